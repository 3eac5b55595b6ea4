"""Which kernel runs: ``auto`` chooses, a name is a contract."""

from __future__ import annotations

from sj_tac.errors import BackendError
from sj_tac.kernels import reference

NUMBA = "numba"
AVAILABLE = (reference.NAME, NUMBA)
PLANNED = ("cupy",)


def choose(backend: str) -> str:
    """The backend that will run for ``backend`` ("auto" or a name).

    Raises:
        BackendError: the named backend is unknown or not in this version.
    """
    if backend == "auto" or backend in AVAILABLE:
        return backend
    if backend in PLANNED:
        raise BackendError(
            f"backend={backend!r}: this version of sj_tac has no {backend} kernels yet, it runs {list(AVAILABLE)}; "
            'use backend="auto", which takes the fastest there is'
        )
    raise BackendError(f"backend={backend!r} is unknown; choose one of {['auto', *AVAILABLE]}")
