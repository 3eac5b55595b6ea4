"""Whether values may pass between the modules of a net, or every module takes and gives ordinary frames."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as every_module

from sj_tac.host import dispatch
from sj_tac.kernels.weights import group_lengths


class Span(NamedTuple):
    """What a trace says that a frame stands for at some place: the static mark of collapsed time.

    A count collapse by K makes frames that stand for K steps (``stretch``); a binary collapse makes K frames one step from
    there on (``merged``). Only plain borders go by it, where values cannot say so themselves.
    """

    merged: int = 1
    stretch: int = 1

    @property
    def factor(self) -> int:
        """Frames of the input that a frame stands for."""
        return self.merged * self.stretch

    def collapsed(self, k: int, spikes: str) -> Span:
        """The span behind a collapse that makes one frame of ``k`` steps of this span (``k`` >= ``stretch``)."""
        return Span(self.merged, k) if spikes == "count" else Span(self.merged * k, 1)

    def lengths(self, steps: int) -> Sequence[int]:
        """Frames of the input that each frame stands for, of ``steps`` in all."""
        return group_lengths(steps, self.factor)


PLAIN = Span()


@dataclass
class Borders:
    """What the converted modules of one net share. Nothing in it belongs to a call.

    Attributes:
        fused: values may pass; False is the definition.
        watched: when the net was last called while autograd recorded, something stood between its modules that autograd's
            graph would have to pass (backward hooks, FSDP) or that cannot take values (a compiled submodule).
    """

    fused: bool = True
    watched: bool = False

    @property
    def are_plain(self) -> bool:
        """True where every module must give ordinary frames: compiled, traced, transformed, or watched while recording."""
        return (
            not self.fused
            or bool(every_module._global_forward_hooks or every_module._global_forward_pre_hooks)
            or torch.compiler.is_compiling()
            or (self.watched and torch.is_grad_enabled())
            or dispatch.is_transformed()
        )


def is_watched(model: nn.Module) -> bool:
    """True where backward hooks hang on a module inside, or on all modules, or a module inside is compiled or sharded."""
    if every_module._global_backward_hooks or every_module._global_backward_pre_hooks:
        return True
    # FSDP puts nodes of its own into autograd's graph, in front of each part. Nobody has these who has not imported them.
    fsdp, dynamo = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch._dynamo")
    special = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp is not None else ()
    if dynamo is not None:
        special = (*special, dynamo.OptimizedModule)
    return any(
        m._backward_hooks or m._backward_pre_hooks or m._compiled_call_impl is not None or isinstance(m, special)
        for m in model.modules()
        if m is not model
    )


@contextlib.contextmanager
def definition(model: nn.Module) -> Iterator[None]:
    """Run a converted model as its definition, module by module."""
    found = {id(role.borders): role.borders for m in model.modules() if (role := m.__dict__.get("_tac")) is not None}
    kept = [(borders, borders.fused) for borders in found.values()]
    try:
        for borders, _ in kept:
            borders.fused = False
        yield
    finally:
        for borders, fused in kept:
            borders.fused = fused
