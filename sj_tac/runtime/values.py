"""Values that say what they are: tensors of logical shape [T, N, ...] that note what they are made of.

An operation that is known to treat all frames alike acts on the compact form (table.py); whatever else touches a value gets
ordinary frames, made once. docs/how-it-works.md has the picture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from sj_tac.errors import StaleValueError
from sj_tac.kernels import reference
from sj_tac.runtime import attributes, compiled
from sj_tac.runtime.expressions import Expression, Maker, Reading, SharedExpression
from sj_tac.runtime.functions import ASKING, GRADIENTS, MEMORY, POOLED_LATER, SUMMED, shares_memory, writes
from sj_tac.runtime.groups import Groups, Sums, single
from sj_tac.runtime.recording import Birth, Born, as_at_birth, below, follow, note_view, packs

below_functions = torch._C.DisableTorchFunctionSubclass


class Frames(Tensor):
    """Frames [T, N, ...], or [T * N, ...] where ``folded``, that need not exist yet.

    Attributes:
        expression: how the frames are made, unfolded; steps: T; folded: N, where T and N are one dimension.
        kind: dtype and device; dims: the shape, for those who ask often: torch's own answer takes its way round Python.
        maker: who made the value.
    """

    expression: Expression
    steps: int
    dims: tuple[int, ...]
    folded: int | None
    kind: tuple[torch.dtype, torch.device]
    # What follows is set on a value where it is otherwise: making one is what a layer's overhead is made of.
    maker: Maker | None = None
    # The frames once they exist; their version when they were made, and when they were last seen to be this value's.
    _made: Tensor | None = None
    _as_made: int = 0
    _followed: int = 0
    # Somebody wants the gradient of the frames, or holds a view; the place in autograd's graph that the value was born with.
    _watched: bool = False
    _lent: bool = False
    _node: Any = None
    _birth: Birth | None = None
    _recorded: bool = False
    # The value that this one is a view of, its expression then, and the view; the compact form was used while recording.
    _viewed: tuple[Frames, Expression, Callable[[Tensor], Tensor]] | None = None
    _taken: bool = False
    # Frames of a view whose elements do not lie in order.
    _strided: bool = False

    @classmethod
    def _born(cls, expression: Expression, shape: tuple[int, ...], like: Tensor, steps: int, folded: int | None) -> Self:
        if not compiled.EAGER and "torch._dynamo" in sys.modules:
            compiled.run_eagerly(Frames)
        kind = (like.dtype, like.device)
        recorded = torch.is_grad_enabled()
        made: Self
        if recorded and expression.differentiates:
            birth = Birth(cls, expression, shape, kind, folded)
            made = Born.apply(birth, *expression.inputs)
            held = made.__dict__
            held["_birth"] = birth
            with below_functions():
                held["_node"] = made.grad_fn
        else:
            made = Tensor._make_wrapper_subclass(cls, shape, dtype=kind[0], device=kind[1])
            held = made.__dict__
        held["expression"], held["dims"], held["kind"] = expression, shape, kind
        held["steps"], held["folded"] = steps, folded
        if recorded:
            held["_recorded"] = True
        return made

    @classmethod
    def _wrapper(cls, shape: tuple[int, ...], kind: tuple[torch.dtype, torch.device]) -> Self:
        # No storage: what gets past torch's functions sees the true shape, and fails rather than read the compact form.
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=kind[0], device=kind[1])
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if name in attributes.OWN:
            attributes.refuse_others(name, self.dims)
        super().__setattr__(name, value)

    @property
    def intact(self) -> bool:
        """True while the value is what its maker gave: frames unwritten, nobody wants their gradient.

        What something below Python put elsewhere in autograd's graph (a custom Function, a checkpoint) becomes its frames.
        """
        if self._viewed is not None and not (self._viewed[0].intact and self._viewed[0].expression is self._viewed[1]):
            return False
        if torch.is_grad_enabled() and not self._is_own_node():
            self.frames()
        made = self._made
        return made is None or (not self._watched and made._version == self._as_made)

    @property
    def is_written(self) -> bool:
        """True where somebody wrote into its frames."""
        if self._viewed is not None and self._viewed[0].is_written:
            return True
        return self._made is not None and self._made._version != self._as_made

    def note_use(self) -> None:
        """Note that the compact form is used instead of frames."""
        if self._recorded and torch.is_grad_enabled():
            self._taken = True
            if self._viewed is not None:
                self._viewed[0].note_use()

    def view_of(self, base: Frames, view: Callable[[Tensor], Tensor]) -> Self:
        """Say that the frames are a view of another value's: who writes into the ones writes into the others."""
        self._viewed = (base, base.expression, view)
        note_view(base, self)
        return self

    def _is_own_node(self) -> bool:
        with below_functions():
            return self.grad_fn is self._node and (self._node is not None or not self.requires_grad)

    def frames(self, reader: str = "") -> Tensor:
        """The frames as an ordinary tensor, made on the first call. Raises StaleValueError where they no longer can be."""
        with below_functions():  # _is_own_node, written out
            own = self.grad_fn is self._node and (self._node is not None or not self.requires_grad)
        if not own:
            # Something below Python put the value elsewhere in autograd's graph: take it from there, whoever reads it first.
            with below_functions(), torch.enable_grad():
                self._made, self._node = torch.ops.aten.clone(self), self.grad_fn  # no view, which could not be written
            self._as_made = self._followed = self._made._version
            self._watched = not settle(self, self._made)
        if self._made is not None:
            return self._made
        exist = self._viewed is None and self.expression.made
        if self._viewed is None and self.maker is not None and not exist:
            self.maker.frames_made(reader)
        if exist and self.folded is None:
            made: Tensor = self.expression.frames  # type: ignore[attr-defined]
        else:
            made = self._make(reader)
        self._made = made
        self._as_made = self._followed = made._version
        if self._birth is not None:
            self._birth.frames, self._birth.version = made, made._version
        return made

    def _make(self, reader: str) -> Tensor:
        """The frames, as they would have been made where the value was born."""
        with as_at_birth(self._recorded, self.kind[1].type):
            if self._viewed is not None:
                made = self._viewed[2](self._viewed[0].frames(reader))
            else:
                made = self.expression.make()
                made = made if self.folded is None else made.flatten(0, 1)
            if made.is_inference():
                made = made.clone()  # an ordinary tensor, whose writes are counted
        return made

    def frames_of_its_own(self, reader: str) -> None:
        """Make the frames, where they are noted elsewhere, as a copy that may be written."""
        self._made = self.frames(reader).clone()
        self._as_made = self._followed = self._made._version

    def cut(self, reader: str) -> None:
        """Cut the frames from autograd's graph, as ``detach_`` does: what was read before keeps its gradient."""
        self._made = self.frames(reader).detach()
        with below_functions():
            self.detach_()
        self._node = self._birth = None
        if not settle(self, self._made):
            self._watched = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        frames: Any = self.frames("pickle")
        return frames.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        frames: Any = self.frames("deepcopy")
        copied: Tensor = frames.__deepcopy__(memo)
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKING:
            with below_functions():
                return func(*args, **(kwargs or {}))
        handler = TABLE.get(func)
        if handler is not None and args:
            found = handler(func, args, kwargs or {})
            if found is not NotImplemented:
                return found
        return on_frames(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], Shared) and args[0]._becoming is not None:
            args[0]._become()
            return args[0]
        if func._schema.is_mutable:
            for x, argument in zip(args, func._schema.arguments, strict=False):
                if isinstance(x, Frames) and argument.alias_info is not None and argument.alias_info.is_write:
                    raise StaleValueError(
                        f"{func} would write, below torch's own functions, into frames that sj_tac has not made; "
                        "make them ordinary first: x = x[:]"
                    )
        args, kwargs = torch.utils._pytree.tree_map_only(Frames, below, (args, kwargs or {}))
        return func(*args, **kwargs)


class Shared(Frames):
    """Frames that are shared by steps: one compact frame [G, N, ...] stands for several. Its expression says for which.

    Attributes:
        means: the groups over which a neuron behind emits the mean of its steps, behind a count collapse; else None.
        merges: a neuron behind takes one step on each compact frame, in a binary collapse; normalize: as in the policy.
    """

    expression: SharedExpression
    means: Groups | None = None
    merges: bool = False
    normalize: bool = True
    _becoming: tuple[SharedExpression, Groups | None] | None = None
    # As of spikes, behind a binary collapse.
    pooled: tuple[tuple[int, ...], Tensor] | None = None

    @staticmethod
    def of(expression: SharedExpression, means: Groups | None = None, folded: int | None = None) -> Shared:
        """The value of an expression, in its dtype and on its device."""
        compact, groups = expression.held, expression.groups
        steps = sum(groups.frames)
        shape = (steps, *compact.shape[1:]) if folded is None else (steps * compact.shape[1], *compact.shape[2:])
        made = Shared._born(expression, shape, compact, steps, folded)
        if means is not None:
            made.__dict__["means"] = means
        return made

    def like(self, compact: Tensor, folded: int | None = None) -> Shared:
        """A value of the same groups, of another compact form."""
        made = Shared.of(SharedExpression(compact, self.expression.groups), self.means, folded)
        held = made.__dict__
        held["maker"], held["merges"], held["normalize"] = self.maker, self.merges, self.normalize
        return made

    @property
    def is_bare(self) -> bool:
        """True where nothing was added: the compact form says it all."""
        return self.expression.residual is None

    def _become(self) -> None:
        """The new expression of ``x += y``, once autograd has taken note of the sum."""
        assert self._becoming is not None
        self.expression, self.means = self._becoming
        self.merges, self.pooled = False, None


class Spikes(Frames):
    """What a fused neuron gives: sums for whoever was planned to read it; the frames by running the steps again.

    Attributes:
        sums: [G, N, ...] by what a convolution wants; narrowed: the same for one convolution, in a dtype of its own.
        pooled: the window of the pool that was planned behind the neuron, and the value that it makes.
        means: groups over which a pool further on will take the mean of its output for each of the steps ``unpooled``, or
            None; the frames are means already.
    """

    sums: dict[Sums, Tensor]
    narrowed: tuple[Sums, Tensor] | None = None
    pooled: tuple[tuple[int, ...], Tensor] | None
    means: Groups | None = None
    unpooled: Tensor | None = None

    @staticmethod
    def of(
        expression: Expression,
        shape: tuple[int, ...],
        like: Tensor,
        *,
        sums: dict[Sums, Tensor] | None = None,
        pooled: tuple[tuple[int, ...], Tensor] | None = None,
        folded: tuple[int, int] | None = None,
    ) -> Spikes:
        """A value of ``shape``, of the dtype and device of ``like``; ``folded``: T and N where they are one dimension."""
        steps, batch = folded or (shape[0], None)
        made = Spikes._born(expression, shape, like, steps, batch)
        held = made.__dict__
        held["sums"], held["pooled"] = {} if sums is None else sums, pooled
        return made


TABLE: dict[Any, Callable[..., Any]] = {}


def on_frames(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` of ordinary frames, and where it wrote into a value's frames, that value again."""
    reader = getattr(func, "__name__", str(func))
    read = _watch if func in GRADIENTS or func in MEMORY or reader == "__set__" else _read

    def plain(x: Any) -> Any:
        if isinstance(x, Frames):
            return read(x, func, reader)
        if type(x) in (tuple, list):
            return type(x)([plain(item) for item in x])
        return x

    first, out = args[0] if args else None, kwargs.get("out")
    if isinstance(first, Frames) and first._made is None and first.expression.noted and writes(reader):
        first.frames_of_its_own(reader)
    args = tuple([plain(x) for x in args])
    found = func(*args, **{name: plain(x) for name, x in kwargs.items()})
    if isinstance(first, Frames):
        frames = args[0]
        if frames._version != first._followed and (found is frames or found is None):
            follow(first, reader)  # in place; item assignment gives nothing back
        if found is frames:
            return first
        # Who holds a view may write past version counters, too. A checkpoint must find the value as it was.
        if read is not _watch and shares_memory(found, frames) and not (packs() or _pools_later(first)):
            _stand_by(first, lent=True)
    if isinstance(out, Frames) and out._made is not None:
        follow(out, reader)
        return out
    return found


def _read(x: Frames, func: Any, reader: str) -> Tensor:
    return x.frames(reader)


def _pools_later(x: Frames) -> bool:
    return isinstance(x, Spikes) and (x.means is not None or bool(x.pooled and x.maker and x.maker.pools_means(x.pooled[1])))


def _watch(x: Frames, func: Any, reader: str) -> Tensor:
    """The frames of a value whose gradient or memory is asked for; from then on they are what the value is."""
    if func in GRADIENTS and x._taken:
        raise StaleValueError(f"{reader}: {SUMMED}")
    if _pools_later(x):
        raise StaleValueError(f"{reader}: {POOLED_LATER}")
    frames = x.frames(reader)
    _stand_by(x)
    return frames


def _stand_by(x: Frames | None, lent: bool = False) -> None:
    """Have a value, and what it is a view of, be its frames from now on."""
    while x is not None:
        base = None if x._viewed is None else x._viewed[0]
        if not x.intact or not settle(x, x.frames()):
            x._watched = True
        if lent:
            x._lent = True
        x = base


def settle(x: Frames, frames: Tensor | None = None) -> bool:
    """Make a value one of its own frames as they are, whose mark of a collapse stays; False where it has no such form."""
    source = x.pooled[1] if isinstance(x, Spikes) and x.pooled is not None else x
    if not isinstance(source, Shared):
        return False
    groups = source.expression.groups
    frames = x.frames() if frames is None else frames
    steps, batch, binary = x.steps, x.folded, groups.frames is not groups.steps or source.merges
    alike = groups if binary else single(steps)

    def compact(frames: Tensor) -> Tensor:
        unfolded = frames if batch is None else frames.reshape(steps, batch, *frames.shape[1:])
        return reference.mean_of_alike(unfolded, alike.frames) if binary else unfolded

    expression = SharedExpression(Reading(frames, compact) if binary or batch is not None else frames, alike)
    x.__class__ = Shared
    held = x.__dict__
    held["expression"], held["means"], held["_viewed"] = expression, source.means, None
    held["merges"], held["normalize"], held["_becoming"] = source.merges, source.normalize, None
    held["pooled"] = None
    held["_as_made"] = frames._version
    return True


def ordinary(x: Any, reader: str = "") -> Any:
    """A tensor without notes: the frames of a value, anything else as it is."""
    return x.frames(reader) if isinstance(x, Frames) else x
