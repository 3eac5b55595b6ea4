"""The kernels for CUDA devices: sources in src/, how they are specialised, compiled and launched."""
