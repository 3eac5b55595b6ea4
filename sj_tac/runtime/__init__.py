"""What a converted module does in a call."""
