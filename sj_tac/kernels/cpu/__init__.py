"""The kernels for the CPU, in C++ (src/), compiled when sj_tac is installed."""
