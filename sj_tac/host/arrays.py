"""Numbers of tensors, read where they lie.

``Tensor.numpy`` leaves a storage that can never be resized again, as sharding and offloading do in every call.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor


def memory(x: Tensor) -> Any:
    """The memory of a tensor on the CPU whose numbers lie side by side: ``raw`` are its bytes now.

    It does not keep the memory: it is to be read while somebody holds the tensor, and this lies where it lay. Empty where
    there is none.
    """
    size = x.numel() * x.element_size() if x.data_ptr() else 0
    return (ctypes.c_char * size).from_address(x.data_ptr())
