"""What a converted net is, in plain PyTorch: right on any device, in any dtype; what every faster path is compared with."""
