"""Torch's functions by what they are to a value that they are called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Questions that are answered for the frames without making them.
ASKING: set[Any] = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "is_sparse", "is_meta")
    ),
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex, Tensor.__hash__),
    *(Tensor.nelement, Tensor.element_size, torch.numel, torch.is_floating_point, torch.is_complex),
}
# From here on somebody else wants the gradient of the frames themselves.
GRADIENTS: set[Any] = {
    *(Tensor.retain_grad, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_),
    torch.autograd.grad,
}
# From here on somebody may write into the frames past their version counter.
MEMORY: set[Any] = {
    *(Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage),  # type: ignore[attr-defined]
    *(Tensor.__dlpack__, Tensor.set_, Tensor.share_memory_),
}


def writes(name: str) -> bool:
    """True for the name of a torch function that writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name in ("__setitem__", "__set__")


def shares_memory(found: Any, frames: Tensor) -> bool:
    """Whether a function gave back other tensors of the same memory."""
    if type(found) in (tuple, list):
        return any(shares_memory(x, frames) for x in found)
    if not isinstance(found, Tensor) or found is frames or found.layout is not torch.strided:
        return False
    return bool(found.untyped_storage()._cdata == frames.untyped_storage()._cdata)


# Why the gradient of a value's frames, or their memory, is not to be had.
SUMMED = (
    "the gradient of these frames is not known, because the next converted layer read sums of them, not the frames; ask for "
    "it before that layer is called (retain_grad in a forward hook), or, where nothing collapses, convert with fuse=False"
)
POOLED_LATER = (
    "behind a collapse, the mean of these steps is taken after the MaxPool, and these frames are none that it reads; ask "
    "for those behind the pool, or convert with fuse=False"
)
