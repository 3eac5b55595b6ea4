"""A value's place in autograd's graph, for whatever reaches it below Python."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sj_tac.errors import StaleValueError
from sj_tac.host import dispatch
from sj_tac.runtime.expressions import Expression

# Older releases of torch do not say.
_TOP = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


@contextmanager
def modes(recorded: bool, device: str) -> Iterator[None]:
    """Outside inference mode, autocast and other people's hooks on saved tensors, with autograd recording or not."""
    with torch.inference_mode(False), torch.set_grad_enabled(recorded), ExitStack() as stack:
        if dispatch.autocasts(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        if packs():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is))
        yield


def as_at_birth(recorded: bool, device: str) -> AbstractContextManager[None]:
    """Frames are made as where their value was born: in its gradient mode, outside autocast and inference mode.

    A checkpoint counts what is saved within it. It runs its part again when the frames are there already.
    """
    plain = not dispatch.autocasts(device) and not torch.is_inference_mode_enabled() and not packs()
    return nullcontext() if plain and torch.is_grad_enabled() == recorded else modes(recorded, device)


def packs() -> bool:
    """Whether somebody's hooks are handed the tensors that autograd saves."""
    return _TOP is not None and _TOP(False) is not None


def _as_it_is(x: Tensor) -> Tensor:
    return x


class Birth:
    """What a value is born as, for autograd to hold. No tensor of it is the Function's own input."""

    def __init__(
        self,
        cls: Any,
        expression: Expression,
        shape: tuple[int, ...],
        kind: tuple[torch.dtype, torch.device],
        folded: int | None,
    ) -> None:
        # The frames once they exist, and their version then.
        self.frames: Tensor | None = None
        self.version = 0
        self.cls, self.expression, self.shape, self.kind, self.folded = cls, expression, shape, kind, folded

    def check(self) -> None:
        """Raise StaleValueError where the frames were written, and nobody told the value."""
        if self.frames is not None and self.frames._version != self.version:
            raise StaleValueError(
                "the frames of a value were written through a view of them, and what reads the value below torch's own "
                "functions (a custom autograd Function, a checkpoint) cannot know of that gradient; write into a copy: "
                "v = x[0].clone()"
            )


class Born(torch.autograd.Function):
    """Gives a value its place in autograd's graph, for whatever reaches it below Python."""

    @staticmethod
    def forward(ctx: Any, birth: Birth, *inputs: Tensor) -> Any:
        ctx.birth = birth
        ctx.save_for_backward(*inputs)
        # Written in place, a value leaves this node behind, which then gets no gradient and has nothing to do.
        ctx.set_materialize_grads(False)
        return birth.cls._wrapper(birth.shape, birth.kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * (1 + len(ctx.saved_tensors))
        ctx.birth.check()
        # Detached: inputs may hang on each other, and the graph behind them is run once, by autograd itself.
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            frames = ctx.birth.expression.on(*inputs)
            if ctx.birth.folded is not None:
                frames = frames.flatten(0, 1)
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(frames, wanted, gradient, allow_unused=True))
        return (None, *(next(found) if x.requires_grad else None for x in inputs))


def note_view(base: Any, view: Any) -> None:
    """Note that the frames of a value are a view of another's."""
    if view._recorded:
        base.__dict__.setdefault("_views", []).append(weakref.ref(view))


def relatives(value: Any) -> list[Any]:
    """All values whose frames are the same memory, and that are alive: what one is a view of, and the views of that."""
    root, found = value, []
    while root._viewed is not None:
        root = root._viewed[0]
    ahead = [root]
    while ahead:
        x = ahead.pop()
        found.append(x)
        ahead += [view for ref in x.__dict__.get("_views", ()) if (view := ref()) is not None and view._viewed is not None]
    return found if any(x is value for x in found) else [value, *found]


def note_write(value: Tensor) -> None:
    """Count a write that autograd is not told of: what a Function has saved of the value before is no longer that."""
    with torch._C.DisableTorchFunctionSubclass():
        if not value.is_inference():
            torch.autograd.graph.increment_version(value)


class BornAgain(Born):
    """A value that is another expression's from now on, in place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, birth: Birth, *inputs: Tensor) -> Any:  # type: ignore[override]
        ctx.birth = birth
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return (None, *Born.backward(ctx, gradient))


class Followed(torch.autograd.Function):
    """A value whose frames were written: below Python, too, its gradient is theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, birth: Birth, frames: Tensor) -> Tensor:
        ctx.birth = birth
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.birth.check()
        return None, None, gradient


def follow(value: Any, reader: str) -> None:
    """Tie a value to its frames, which were written, and with it all whose frames are the same memory."""
    for x in relatives(value):
        _follow(x, x.frames(reader))


def _follow(value: Any, frames: Tensor) -> None:
    if value._birth is not None:  # of those alone that read the value before, or do not know of the write, as autograd
        value._birth.version = frames._version
    if torch.is_grad_enabled() and (frames.requires_grad or value._node is not None):
        # Nobody makes these frames again, so that what they were made of need not be kept.
        value._birth = birth = Birth(type(value), Expression(), value.dims, value.kind, value.folded)
        birth.frames, birth.version = frames, frames._version
        with torch._C.DisableTorchFunctionSubclass():
            Followed.apply(value, birth, frames)
            value._node = value.grad_fn
    else:
        note_write(value)
    value._followed = frames._version


def below(x: Any) -> Any:
    """A value's frames for what runs below autograd."""
    if x._made is not None:
        if x._made._version != x._followed and x._made.requires_grad:
            raise StaleValueError(
                "the frames of a value were written through a view of them, and what reads the value now cannot know of the "
                "gradient; write into a copy: v = x[0].clone()"
            )
        return x._made.detach()
    made = x.expression.make()
    return (made.flatten(0, 1) if x.folded is not None else made).detach()
