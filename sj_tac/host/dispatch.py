"""When torch's dispatch has something to do for a call, and when the call may go straight to its kernel.

Dispatch of an operator written in Python costs as much as computing a small map.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PLAIN = {Tensor, nn.Parameter}
# Looked up once: every small operator asks.
is_compiling = torch.compiler.is_compiling
modes, tracing, profiling = (
    torch._C._len_torch_dispatch_stack,
    torch._C._get_tracing_state,
    torch._C._autograd._profiler_enabled,
)
transform = torch._C._functorch.peek_interpreter_stack


def differentiates(*tensors: Tensor | None) -> bool:
    """True where autograd wants a gradient to one of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_transformed() -> bool:
    """True inside a trace of torch.jit's, a transform of torch.func's or a dispatch mode: tensors may be fake or wrapped."""
    return modes() > 0 or tracing() is not None or transform() is not None


def takes_gradients() -> bool:
    """True inside torch.func.grad, vjp and the like, which want operators of plain PyTorch."""
    top = transform()
    return top is not None and top.key() == torch._C._functorch.TransformType.Grad


def counts() -> bool:
    """Return whether a counter of operations or energy of SpikingJelly's watches this call."""
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack() if modes() else []
    return any(type(mode).__module__.startswith("spikingjelly.activation_based.op_counter") for mode in stack)


def is_batched(*gradients: Tensor | None) -> bool:
    """True where one holds many, as torch.autograd.grad(is_grads_batched=True) has them: no transform of torch.func's."""
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in gradients)


def is_plain(x: Tensor) -> bool:
    """True where nothing watches what is done to ``x``: no tracing, compiling, profiling or transform of torch's."""
    # is_transformed, written out: a call of Python's costs about what a comparison of tensors does.
    return (
        type(x) in PLAIN
        and not is_compiling()
        and not (modes() > 0 or tracing() is not None or transform() is not None or profiling())
    )
