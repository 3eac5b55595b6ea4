"""Warn when a tool counts the operations of a converted net: such tools do not know that k frames share a convolution."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from sj_tac.errors import OperationCountWarning

# Package of the tool's hooks or modes -> how its count of a converted net goes wrong.
TOOLS = {
    "spikingjelly.activation_based.op_counter": "counts aggregated frames as dense inputs, and misses fused kernels",
    **dict.fromkeys(
        ("torchinfo", "thop", "ptflops", "calflops", "torchstat", "torchsummary"),
        "counts from output shapes, as if k were 1",
    ),
}


def warn_of_counts(model: nn.Module, convs: Sequence[weakref.ref[nn.Module]]) -> None:
    """Warn if one of ``TOOLS`` counts this call and a converted layer has k >= 2.

    Args:
        convs: the converted layers. A tool that counts by hooks registers them on every layer, or on the net.
    """
    layers = [conv for ref in convs if (conv := ref()) is not None]
    # convert registers one hook of each kind on the net, and none on its layers. This check runs in every call.
    if (
        len(model._forward_hooks) + len(model._forward_pre_hooks) <= 2
        and not any(conv._forward_hooks or conv._forward_pre_hooks for conv in layers)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
    ):
        return
    roles: list[Any] = [conv._tac for conv in layers]
    count = sum(role.mode != "keep" and role.k > 1 for role in roles)
    tool = next(_tools([model, *layers]), None) if count else None
    if tool is not None:
        warnings.warn(
            f"{tool.rpartition('.')[2]} {TOOLS[tool]}. {count} layers of this {type(model).__name__} take one convolution "
            "for several frames; sj_tac.report(net) has the MACs of each layer, beside the source's",
            OperationCountWarning,
            stacklevel=2,
        )


def _tools(modules: Sequence[nn.Module]) -> Iterator[str]:
    """Yield the tools whose torch modes are active, or whose hooks these modules have."""
    stacks: list[Any] = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]  # type: ignore[no-untyped-call]
    found: list[Any] = [type(mode) for mode in stacks]
    for module in modules:
        found += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    for one in found:
        of = str(getattr(getattr(one, "func", one), "__module__", ""))  # ``func`` of a functools.partial
        yield from (tool for tool in TOOLS if of == tool or of.startswith(f"{tool}."))
