"""Numba kernels on as many threads as torch uses, where that is safe; and arrays of tensors, in their own layout."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

# For callers that look for it here.
from sj_tac.kernels.layout import RUNS as RUNS

if TYPE_CHECKING:
    from sj_tac.kernels.cpu.compiled import Kernel

# The process that started Numba's threads; a forked child must not touch them.
_STARTED_IN: list[int] = []
# Below this many neuron steps a second thread costs more than it saves.
ALONE = 20_000


@cache
def _layer() -> str:
    from numba.np.ufunc import parallel

    parallel._launch_threads()  # type: ignore[no-untyped-call]
    _STARTED_IN.append(os.getpid())
    return str(parallel.threading_layer())  # type: ignore[no-untyped-call]


def are_safe() -> bool:
    """Whether Numba's threads may be used: not by a forked child (OpenMP), nor where Numba has only its own work queue.

    Both would end the process: the one when a forked worker enters, the other when two Python threads do. And not where
    NUMBA_DISABLE_JIT leaves kernels as Python, of which there is no address.
    """
    from numba import config

    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return False
    layer = _layer()
    return _STARTED_IN[0] == os.getpid() and layer != "workqueue"


def share(kernel: Kernel, units: int, work: int, *operands: Any) -> None:
    """``kernel`` over ``units`` pieces that do not depend on each other, nor on how many threads there are.

    Args:
        work: neuron steps in all, or whatever costs as much.
    """
    import numba

    limit: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    threads = min(torch.get_num_threads(), units, limit)
    if threads > 1 and work >= ALONE and are_safe():
        numba.set_num_threads(threads)
        kernel.parallel(threads, units, *operands)
    else:
        kernel.serial(0, units, *operands)


def flat(x: Tensor | None, last: bool, like: Tensor) -> np.ndarray:
    """The numbers of frames as they lie in memory, in channels_last or contiguous; a copy where they lie otherwise."""
    if x is None:
        return vector(None, like)
    x = x.detach() if x.requires_grad else x
    array: np.ndarray = (x.movedim(-3, -1) if last else x).contiguous().numpy().reshape(-1)
    return array


# Stands for "none" in a kernel's arguments, by dtype.
_NONE: dict[torch.dtype, np.ndarray[Any, Any]] = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}


def vector(x: Tensor | None, like: Tensor) -> np.ndarray:
    """The numbers of a small tensor in the dtype of ``like``; none for None."""
    if x is None:
        return _NONE[like.dtype]
    # Each call of torch's counts here: small maps cost little more than the way to their kernel.
    x = x.detach() if x.requires_grad else x
    x = x if x.dtype is like.dtype else x.to(like.dtype)
    array: np.ndarray = x.contiguous().numpy()
    return array
