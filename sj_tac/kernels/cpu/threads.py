"""Numba kernels on as many threads as torch uses, where that is safe; and arrays of tensors, in their own layout."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sj_tac.kernels.checks import WIDE

# For callers that look for it here.
from sj_tac.kernels.layout import RUNS as RUNS

if TYPE_CHECKING:
    from sj_tac.kernels.cpu.compiled import Kernel

# The process that started Numba's threads; a forked child must not touch them.
_STARTED_IN: list[int] = []
# Nanoseconds of work below which a second thread costs more than it saves: its start takes 20 us in a loop, and 50 to 100
# in a net, whose convolutions have filled the caches since the last one.
ALONE = 50_000


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
        work: about how many nanoseconds it takes one thread (costs.py).
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
    """The numbers of frames as they lie in memory, in channels_last or contiguous; a copy where they lie otherwise.

    The bits of bfloat16 as int16. None: as ``vector``.
    """
    if x is None:
        return vector(None, like)
    x = x.detach() if x.requires_grad else x
    lying = (x.movedim(-3, -1) if last else x).contiguous()
    array: np.ndarray = (lying.view(torch.int16) if lying.dtype is torch.bfloat16 else lying).numpy().reshape(-1)
    return array


# Stand for "none" in a kernel's arguments, by the dtype of its frames: for frames, and for other numbers.
_NO_FRAMES: dict[torch.dtype, np.ndarray[Any, Any]] = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
    torch.bfloat16: np.empty(0, np.int16),
}
_NONE = _NO_FRAMES | {torch.bfloat16: np.empty(0, np.float32)}


def frames_or_none(x: Tensor | None, last: bool, like: Tensor) -> np.ndarray:
    """``flat`` of frames of the dtype of ``like``; None: an empty array of that dtype, so that nothing is compiled anew."""
    return _NO_FRAMES[like.dtype] if x is None else flat(x, last, like)


def vector(x: Tensor | None, like: Tensor) -> np.ndarray:
    """The numbers of a small tensor in the dtype that goes with frames ``like``; none for None."""
    if x is None:
        return _NONE[like.dtype]
    # Each call of torch's counts here: small maps cost little more than the way to their kernel.
    x = x.detach() if x.requires_grad else x
    x = x if x.dtype is WIDE[like.dtype] else x.to(WIDE[like.dtype])
    array: np.ndarray = x.contiguous().numpy()
    return array
