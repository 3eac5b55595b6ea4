"""How Numba compiles what only kernels call."""

from __future__ import annotations

from functools import partial

from numba import njit

# For functions that make no arrays: without reference counts, whose atomic increments at every call cost more than a row;
# and without the wrappers for callers outside of compiled code, which take an eighth of the time of compiling.
lean = partial(njit, error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
# For those that make some.
making = partial(njit, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
