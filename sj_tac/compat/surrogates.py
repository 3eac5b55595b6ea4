"""Surrogate functions of one's own, written for SpikingJelly up to 0.0.0.0.14: ``SurrogateFunctionBase(alpha, spiking)``."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from spikingjelly.activation_based import surrogate

_host: Any = surrogate.SurrogateFunctionBase
OLD_SIGNATURE = "alpha" in inspect.signature(_host.__init__).parameters


def accept_old_signature() -> None:
    """Let the host's ``SurrogateFunctionBase`` take ``(alpha, spiking=True)`` by position, too.

    The host's own classes pass both by keyword, so nothing changes for them.
    """
    if OLD_SIGNATURE or hasattr(_host.__init__, "__wrapped__"):
        return
    init = _host.__init__

    @functools.wraps(init)
    def accept(self: Any, *args: Any, **given: Any) -> None:
        if not args or (len(args) == 1 and isinstance(args[0], bool)):
            init(self, *args, **given)
            return
        alpha, *spiking = args
        # The host hands parameters over by name, older hosts by position: the author chose the name.
        named = list(inspect.signature(self.spiking_function).parameters)[1:] or ["alpha"]
        init(self, *spiking, **{named[0]: alpha}, **given)
        self.alpha = alpha

    _host.__init__ = accept


if OLD_SIGNATURE:
    piecewise_leaky_relu: Any = surrogate.piecewise_leaky_relu
    PiecewiseLeakyReLU: Any = surrogate.PiecewiseLeakyReLU
else:
    # SpikingJelly 2.0 halved the slope within the width; nets were trained with the old one.
    class piecewise_leaky_relu(surrogate.piecewise_leaky_relu):  # type: ignore[no-redef]
        """A step forward; backward 1 / w within the width w and c outside, as up to 0.0.0.0.14."""

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            (x,) = ctx.saved_tensors
            within = x.abs() < ctx.w
            return grad_output * torch.where(within, 1 / ctx.w, ctx.c).to(grad_output), None, None

    class PiecewiseLeakyReLU(surrogate.PiecewiseLeakyReLU):  # type: ignore[no-redef]
        """A surrogate that is 1 / w steep within the width w, and c outside."""

        @staticmethod
        def spiking_function(x: torch.Tensor, w: float, c: float) -> Any:
            return piecewise_leaky_relu.apply(x, w, c)

        @staticmethod
        def backward(grad_output: torch.Tensor, x: torch.Tensor, w: float, c: float) -> torch.Tensor:
            return grad_output * torch.where(x.abs() < w, 1 / w, c).to(grad_output)


if hasattr(surrogate, "MultiArgsSurrogateFunctionBase"):
    MultiArgsSurrogateFunctionBase: Any = surrogate.MultiArgsSurrogateFunctionBase
else:

    class MultiArgsSurrogateFunctionBase(_host):  # type: ignore[no-redef]
        """Base of surrogate functions with several parameters, which write a ``forward`` of their own."""

        def __init__(self, spiking: bool, *args: Any, **kwargs: Any) -> None:
            super().__init__(spiking=spiking)
