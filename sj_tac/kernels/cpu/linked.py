"""How Numba compiles what only kernels call: it is linked into them as it was written, and optimised there, once.

Numba optimises each function by itself and emits machine code of it, and optimises it again in whatever calls it, and in
whatever calls that. Of a forward kernel's sixty functions only the kernel itself is ever run on its own: it takes half as
long to compile where the others are left to it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import overload


class _WithoutAddresses:
    """Numba's code generator for what is not emitted: there is no memory in which to note a function's environment.

    Only what makes Python objects reads one, which nothing here does.
    """

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, name: str, environment: Any) -> None:
        pass


class _Linked(JITCodeLibrary):
    """A function, and what it calls, as it was written: for others to link."""

    @property
    def codegen(self) -> Any:
        return _WithoutAddresses(self._codegen)

    def get_pointer_to_function(self, name: str) -> int:
        """0, as of a name that is not defined: it has no address."""
        self._ensure_finalized()  # type: ignore[no-untyped-call]
        return 0

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._verify_declare_only_symbols()  # type: ignore[no-untyped-call]
        self._finalized = True


class _Compiler(Compiler):
    """Numba's compiler, but for the library that it puts a function in."""

    def compile_extra(self, func: Any) -> Any:
        self.state.library = _Linked(self.state.targetctx.codegen(), func.__qualname__)  # type: ignore[no-untyped-call]
        return super().compile_extra(func)  # type: ignore[no-untyped-call]


# Without the wrappers for callers outside of compiled code, either.
_OPTIONS: Any = {"pipeline_class": _Compiler, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

# For functions that make no arrays: without reference counts, whose atomic increments at every call cost more than a row.
lean = partial(njit, error_model="numpy", _nrt=False, **_OPTIONS)
# For those that make some.
making = partial(njit, error_model="numpy", **_OPTIONS)
# For functions that are chosen by the types of their arguments.
by_type = partial(overload, jit_options=_OPTIONS, strict=False)
