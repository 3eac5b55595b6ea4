"""Numbers of tensors, read where they lie.

``Tensor.numpy`` leaves a storage that can never be resized again, as sharding and offloading do in every call.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from torch import Tensor


def lent(x: Tensor, dtype: Any) -> np.ndarray[Any, Any]:
    """The numbers of a tensor on the CPU that lie side by side, in the order of its memory, as an array of ``dtype``.

    It is to be read at once, while somebody holds the tensor: it does not keep the memory. No numbers where there is none.
    """
    size = x.numel() * x.element_size() if x.data_ptr() else 0
    memory: Any = (ctypes.c_char * size).from_address(x.data_ptr())
    return np.frombuffer(memory, dtype)


def content(x: Tensor) -> bytes:
    """A copy of such a tensor's bytes."""
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()) if x.data_ptr() else b""
