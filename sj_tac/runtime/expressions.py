"""How the frames of a value are made: pure functions of explicit inputs. An expression never changes and knows no value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sj_tac.kernels import reference
from sj_tac.runtime.groups import Groups


class Expression:
    """Frames [T, N, ...] as a function of ``inputs``, to which gradients may flow.

    ``on`` is called with the inputs, or with detached ones in a backward. ``made`` says that making costs nothing.
    """

    inputs: tuple[Tensor, ...]
    made = False
    # Another expression is made of this one's frames: who writes into them writes into a copy.
    noted = False

    def on(self, *inputs: Tensor) -> Tensor:
        """The frames, of other tensors in the inputs' places."""
        raise NotImplementedError  # pragma: no cover

    def make(self) -> Tensor:
        """The frames."""
        return self.on(*self.inputs)

    @property
    def differentiates(self) -> bool:
        """True where a gradient may flow to one of the inputs."""
        return any(x.requires_grad for x in self.inputs)


class Later(Protocol):
    """A tensor that need not exist yet (deferred.py)."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def make(self) -> Tensor:
        """The tensor."""


class Maker(Protocol):
    """Who made a value; hears of it when its frames had to be made, and who asked for them."""

    def frames_made(self, reader: str) -> None: ...

    def pools_means(self, pooled: Any) -> bool: ...


class Reading:
    """A function of frames, whenever somebody reads it: the frames may want a gradient by then."""

    __slots__ = ("_frames", "_function", "device", "dtype", "shape")

    def __init__(self, frames: Tensor, function: Callable[[Tensor], Tensor]) -> None:
        self._frames, self._function = frames, function
        with torch.no_grad():
            made = function(frames)
        self.shape, self.dtype, self.device = made.shape, made.dtype, made.device

    def make(self) -> Tensor:
        """What it is by now."""
        with torch.set_grad_enabled(self._frames.requires_grad):
            return self._function(self._frames)


class SharedExpression(Expression):
    """``repeat(map(compact)) + residual``: what converted convolutions give.

    Args:
        compact: [G, N, C, ...], a tensor or one that is made when it is read; groups: what each of them stands for.
        affine: scale and shift [C] of an affine map of the channels that is noted and not yet applied, or None.
        residual: an expression of the same T that is added, or None.
    """

    def __init__(
        self,
        compact: Tensor | Later,
        groups: Groups,
        affine: tuple[Tensor, Tensor] | None = None,
        residual: Expression | None = None,
    ) -> None:
        # What was given; whoever reads ``compact`` gets a tensor.
        self.held: Any = compact
        self.groups, self.affine, self.residual = groups, affine, residual

    @property
    def compact(self) -> Tensor:
        """The compact frames [G, N, C, ...]."""
        held = self.held
        return held if isinstance(held, Tensor) else held.make()

    @property
    def inputs(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """What gradients may flow to."""
        return (self.compact, *(self.affine or ()), *(self.residual.inputs if self.residual is not None else ()))

    def mapped(self) -> Tensor:
        """The compact form behind its affine map."""
        return _mapped(self.compact, self.affine)

    def split(self, finer: Groups) -> SharedExpression | None:
        """The same with a compact frame for each of ``finer``'s; None where that would cut one."""
        if self.groups == finer:
            return self
        counts = self.groups.split(finer)
        if counts is None:
            return None
        return SharedExpression(reference.repeat(self.mapped(), counts), finer, None, self.residual)

    def joined(self, coarser: Groups) -> SharedExpression | None:
        """The same with a compact frame for each of ``coarser``'s, whose frames are alike; None where one would be cut."""
        counts = coarser.split(self.groups)
        return None if counts is None else SharedExpression(reference.mean_of_alike(self.mapped(), counts), coarser)

    def on(self, *inputs: Tensor) -> Tensor:
        compact, rest = inputs[0], inputs[1:]
        affine = (rest[0], rest[1]) if self.affine is not None else None
        frames = reference.repeat(_mapped(compact, affine), self.groups.frames)
        if self.residual is not None:
            return frames + self.residual.on(*rest[2 if affine is not None else 0 :])
        # Never the compact form itself: who writes into the frames must not write into that.
        return frames.clone() if frames is compact else frames


class _Unmade:
    """Compact frames that an expression makes whenever somebody reads them, recorded where this was born recorded."""

    __slots__ = ("_expression", "_recorded", "device", "dtype", "shape")

    def __init__(self, expression: Expression, shape: tuple[int, ...], like: Tensor) -> None:
        self._expression, self.shape, self.dtype, self.device = expression, torch.Size(shape), like.dtype, like.device
        self._recorded = torch.is_grad_enabled()

    def make(self) -> Tensor:
        """The compact frames, anew."""
        with torch.set_grad_enabled(self._recorded):
            return self._expression.make()


class SharedAgain(SharedExpression):
    """``repeat(compact)`` of compact frames [G, N, C, ...] that nobody has made: ``again`` does where they are read.

    Args:
        shape: of the compact frames; like: a tensor of their dtype and device.
    """

    def __init__(self, again: Expression, groups: Groups, shape: tuple[int, ...], like: Tensor) -> None:
        super().__init__(_Unmade(again, shape, like), groups)
        self._again = again

    @property
    def inputs(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """What gradients may flow to."""
        return self._again.inputs

    def on(self, *inputs: Tensor) -> Tensor:
        return reference.repeat(self._again.on(*inputs), self.groups.frames)


def _mapped(compact: Tensor, affine: tuple[Tensor, Tensor] | None) -> Tensor:
    if affine is None:
        return compact
    scale, shift = (x.view(-1, *[1] * (compact.dim() - 3)) for x in affine)
    wide = compact if compact.dtype is scale.dtype else compact.to(scale.dtype)
    made = wide * scale
    made = made + shift if torch.is_grad_enabled() else made.add_(shift)
    return made if made.dtype is compact.dtype else made.to(compact.dtype)


class Computed(Expression):
    """What a function gives."""

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        self.function, self.inputs = function, tuple(inputs)

    def on(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


class Made(Computed):
    """What a function has given already; computed again only where somebody wrote into that."""

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor], frames: Tensor) -> None:
        super().__init__(function, inputs)
        self.frames = frames
        # Tensors of inference mode keep no version: nobody can tell whether they were written.
        self.version = None if frames.is_inference() else frames._version

    @property
    def made(self) -> bool:  # type: ignore[override]
        return self.version is not None and self.frames._version == self.version

    def make(self) -> Tensor:
        return self.frames if self.made else super().make()


def both(a: Expression, b: Expression, function: Callable[[Tensor, Tensor], Tensor]) -> Expression:
    """``function`` of the frames of two expressions."""
    split = len(a.inputs)
    return Computed(lambda *x: function(a.on(*x[:split]), b.on(*x[split:])), (*a.inputs, *b.inputs))


def over(a: Expression, function: Callable[[Tensor], Tensor]) -> Expression:
    """``function`` of the frames of an expression."""
    return Computed(lambda *x: function(a.on(*x)), a.inputs)
