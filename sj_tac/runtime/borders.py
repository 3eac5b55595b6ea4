"""Whether values may pass between the modules of a net, or every module takes and gives ordinary frames."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from sj_tac.errors import InputError
from sj_tac.host.dispatch import modes, tracing, transform
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
# Different T and N that are kept of calls, at most.
MOST_BEFORE = 256


class Call(NamedTuple):
    """T and N of one call of the net, where its arguments say so."""

    steps: int | None
    batch: int | None

    def of(self, total: int) -> Call | None:
        """T and N of so many folded frames; None where they are no frames of this call."""
        steps, batch = self
        if steps is None:
            steps = total // batch if batch else 0
        if batch is None:
            batch = total // steps if steps else 0
        return Call(steps, batch) if total and steps * batch == total else None

    def frames(self, x: Tensor, batch_first: bool = False) -> Tensor | None:
        """Folded frames [T * N, ...], or [N * T, ...], as [T, N, ...]; None where they are no frames of this call."""
        found = self.of(x.shape[0])
        if found is None:
            return None
        shape = (*(found[::-1] if batch_first else found), *x.shape[1:])
        return x.reshape(shape).transpose(0, 1) if batch_first else x.reshape(shape)


class Axes(NamedTuple):
    """Where T and N stand among the arguments of the net's forward, as the sample showed.

    Attributes:
        names: of forward's parameters, in order. ranks: dimensions of each argument, -1 of what is no tensor.
        steps, batch: (argument, dimension), or None where no argument has it.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: tuple[int, int] | None
    batch: tuple[int, int] | None

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """T and N of a call. Raises InputError where an argument has other dimensions than in the sample."""
        given = [*args, *(kwargs.get(name) for name in self.names[len(args) :])]
        found = tuple(x.dim() if isinstance(x, Tensor) else -1 for x in given)[: len(self.ranks)]
        if any(a != b for a, b in zip(found, self.ranks, strict=False) if a >= 0 and b >= 0):
            raise InputError(
                f"the net was converted for inputs of {list(self.ranks)} dimensions, got {list(found)}: it folds time "
                "into the batch, and its forward may take another way for these; convert it with such an example_input"
            )
        steps, batch = (
            int(given[at[0]].shape[at[1]]) if at is not None and isinstance(given[at[0]], Tensor) else None
            for at in (self.steps, self.batch)
        )
        return Call(steps, batch)


@dataclass
class Borders:
    """What the converted modules of one net share.

    Attributes:
        call: T and N of the net's call that is running, for frames that were folded before they became values; else None.
        outer: those of the calls that this one is made in, of a net whose forward calls itself; as many as calls run.
        before: those of calls that autograd recorded, each once, for what it runs again (checkpoints).
        fused: modules may leave to others what they would do themselves; False is the definition: every module does its own
            work on frames, which say what they stand for where time is collapsed.
        alike: it is looked whether frames are one frame T times over, where the trace says so.
        collapses: time is collapsed somewhere, so that what gets ordinary frames and what gets values are not the same.
        collapsed: it was, in the net's call that is running or was the last.
        watched: when the net was last called while autograd recorded, or collapses, something stood between its modules that
            autograd's graph would have to pass (backward hooks, FSDP) or that cannot take values (a compiled submodule).
        traced: every module gives ordinary frames, and a collapse goes by the trace.
        told: it was said that features are returned whose gradient is not to be had.
        entered: the net's own call is running; else a module is called by itself, and has to look. root: the net.
    """

    fused: bool = True
    collapses: bool = False
    collapsed: bool = False
    watched: bool = False
    traced: bool = False
    told: bool = False
    entered: bool = False
    root: weakref.ref[nn.Module] | None = None
    alike: bool = True
    call: Call | None = None
    outer: list[Call | None] = field(default_factory=list)
    before: dict[Call, None] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"call": None, "outer": [], "before": {}, "entered": False, "root": None}

    @property
    def passes(self) -> bool:
        """Whether values pass at all."""
        return self.fused or self.collapses

    def enter(self, model: nn.Module) -> None:
        """Look at the net whose call begins."""
        if not self.entered:  # a net may call itself
            self.collapsed = False
        self.entered = True
        if self.passes and (torch.is_grad_enabled() or (self.collapses and "torch._dynamo" in sys.modules)):
            self.watched = is_watched(model)

    def look(self) -> None:
        """Look at the net where a part of it is called by itself, and begins here: it is handed an ordinary tensor."""
        if self.passes and (self.collapses or torch.is_grad_enabled()):
            root = None if self.root is None else self.root()
            # A part that was copied alone knows no net.
            self.watched = self.watched if root is None else is_watched(root)

    def begin(self) -> None:
        """Keep T and N of the call in which another one begins, if there is any."""
        self.outer.append(self.call)
        self.call = None

    def end(self) -> None:
        """Go on with the call that the one which ends was made in, if there is any."""
        if self.call is not None and torch.is_grad_enabled():
            if len(self.before) >= MOST_BEFORE:
                self.before.clear()
            self.before[self.call] = None
        self.call = self.outer.pop() if self.outer else None

    def now(self, total: int) -> Call | None:
        """T and N of the call that is running, or of the one that a backward runs again on ``total`` folded frames.

        Raises InputError where calls of several T have so many.
        """
        if self.call is not None or not self.before or torch.compiler.is_compiling():
            return self.call
        if torch._C._current_graph_task_id() == -1:
            return None
        found = {call for call in (call.of(total) for call in self.before) if call is not None}
        if len(found) > 1:
            ways = " and ".join(f"T={call.steps}, N={call.batch}" for call in sorted(found))
            raise InputError(
                f"a checkpoint runs a folding layer again on {total} frames, and the net was called with {ways}: nobody "
                "knows which of them is meant; put the checkpoint around the whole net instead of a part of it"
            )
        return found.pop() if found else None

    def check(self, x: Tensor, name: str, batch_first: bool = False) -> None:
        """Raise InputError where a neuron is handed other frames [T, N, ...] than those that the net's arguments have.

        ``batch_first``: they are [N, T, ...].
        """
        shape = x.shape[:2][::-1] if batch_first else x.shape[:2]
        call = self.call if self.call is not None or not self.before else self.now(shape.numel())
        if call is None:
            return
        for found, wanted, what in zip(shape, call, ("steps", "samples"), strict=False):
            if wanted is not None and found != wanted:
                raise InputError(
                    f"layer {name!r} runs {found} {what}, but the net's input has {wanted}: its forward unfolds time by "
                    "another T than its input has, or cuts and pads time; set the model's own T, if it has one, or "
                    "convert it with an example_input of this size"
                )

    def go_by_trace(self) -> bool:
        """Whether collapsed time ends where the trace says so: in the net's call, and where a checkpoint runs that again.

        Of a part that is called by itself, and of a call that took a way without a collapse, the trace knows nothing.
        """
        return self.collapsed and (self.entered or torch._C._current_graph_task_id() != -1)

    @property
    def are_plain(self) -> bool:
        """True where every module must give ordinary frames: compiled, traced, transformed, or watched while recording.

        The definition of what is preserved needs no more than these, either.
        """
        return (
            not (self.fused or self.collapses)  # ``passes``, written out
            or self.traced
            or bool(every_module._global_forward_hooks or every_module._global_forward_pre_hooks)
            or torch.compiler.is_compiling()
            or (self.watched and (self.collapses or torch.is_grad_enabled()))
            # dispatch.is_transformed, written out: every module asks at every call.
            or modes() > 0
            or tracing() is not None
            or transform() is not None
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
def definition(model: nn.Module, alike: bool = True, traced: bool = False) -> Iterator[None]:
    """Run a converted model as its definition, module by module.

    Args:
        alike: where frames are one frame T times over, run that one. traced: go by the trace, as a compiled call does.
    """
    found = {id(role.borders): role.borders for m in model.modules() if (role := m.__dict__.get("_tac")) is not None}
    kept = [(borders, borders.fused, borders.alike, borders.traced) for borders in found.values()]
    try:
        for borders, *_ in kept:
            borders.fused, borders.alike, borders.traced = False, alike, traced
        yield
    finally:
        for borders, *before in kept:
            borders.fused, borders.alike, borders.traced = before
