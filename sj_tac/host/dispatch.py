"""When torch's dispatch has something to do for a call, and when the call may go straight to its kernel.

Dispatch of an operator written in Python costs as much as computing a small map.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def differentiates(*tensors: Tensor | None) -> bool:
    """True where autograd wants a gradient to one of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_plain(x: Tensor) -> bool:
    """True where nothing watches what is done to ``x``: no tracing, compiling, profiling or transform of torch's."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._autograd._profiler_enabled()
    )
