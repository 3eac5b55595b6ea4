"""Where a tensor's frames are: which dimension is time, and how many steps T a call has where time is folded into rows.

A convolution may be handed frames as [T, N, C, H, W], as [N, T, C, H, W], or folded to [T * N, C, H, W] or [N * T, C, H,
W]. Folded rows do not tell T. So a converted net, or a part of it around the convolution, notes the shapes of each call's
inputs while the call runs, and a ``Rule`` finds T in them. Nothing is kept in modules: calls in several threads, each with
its own T, are right.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from sj_tac.definition.classes import drop_hooks

# ``call`` is (name of the module that runs, shapes of its input tensors, the call around it); None outside of a call.
_CALLS = threading.local()


@dataclass(frozen=True)
class Rule:
    """One way to find T at a call.

    Attributes:
        kind: "rows": each row is a step; "number": T is always ``number``; "size": T is the size of dimension ``dim`` of the
            call's input tensor number ``argument``; "quotient": T is the number of rows divided by that size.
    """

    kind: Literal["rows", "number", "size", "quotient"]
    number: int = 0
    argument: int = 0
    dim: int = 0

    def steps(self, rows: int, shapes: tuple[tuple[int, ...], ...]) -> int | None:
        """Return T; None where this call has no such input, or T is no whole number.

        Args:
            rows: T * N. shapes: of the call's input tensors, in the order in which they are passed.
        """
        if self.kind == "rows":
            return rows
        if self.kind == "number":
            return self.number
        if self.argument >= len(shapes) or self.dim >= len(shapes[self.argument]):
            return None
        size = shapes[self.argument][self.dim]
        if self.kind == "size":
            return size
        return rows // size if size and not rows % size else None


@dataclass(frozen=True)
class Frames:
    """Where a tensor's frames are.

    Attributes:
        dim: the dimension of time, or of folded rows.
        folded: ``dim`` is 0 and has T * N rows.
        samples_first: the rows of one sample follow each other (N * T); otherwise the rows of one step do.
        of: name of the module whose calls tell T of folded rows; the net itself has an empty name.
        rules: all ways to find T in such a call that fitted what was measured. They must agree, or T is unknown.
    """

    dim: int = 0
    folded: bool = False
    samples_first: bool = False
    of: str = ""
    rules: tuple[Rule, ...] = ()

    def steps(self, x: Tensor) -> int | None:
        """Return T of a tensor in the running call; None if it is unknown."""
        if not self.folded:
            return x.shape[self.dim]
        rows, call = x.shape[0], getattr(_CALLS, "call", None)
        while call is not None and call[0] != self.of:
            call = call[2]
        shapes = () if call is None else call[1]
        found = [rule.steps(rows, shapes) for rule in self.rules]
        if not found or not found[0]:
            return None
        steps = found[0]
        return steps if all(other == steps for other in found[1:]) and not rows % steps else None

    def time_first(self, x: Tensor, steps: int) -> Tensor:
        """Return x [.., T, ..] with T blocks of rows in dimension 0, T outermost: what ``ops.aggregate`` takes."""
        if self.folded and self.samples_first:
            return x.reshape(-1, steps, *x.shape[1:]).transpose(0, 1).flatten(0, 1)
        return x if self.dim == 0 else x.movedim(self.dim, 0)

    def back(self, x: Tensor, steps: int) -> Tensor:
        """Return the tensor of which ``time_first`` made x; ``steps`` may be another number of frames, as of sums."""
        if self.folded and self.samples_first:
            return x.reshape(steps, -1, *x.shape[1:]).transpose(0, 1).flatten(0, 1)
        return x if self.dim == 0 else x.movedim(0, self.dim)


def shapes_of(arguments: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of all tensors among the arguments of a call, in their order, which rules count them by."""
    leaves = torch.utils._pytree.tree_leaves(arguments)
    return tuple([tuple(x.shape) for x in leaves if isinstance(x, Tensor)])


class Enter:
    """Forward pre-hook of a module: notes the shapes of the call's inputs under the module's name."""

    of_sj_tac: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _CALLS.call = self.name, shapes_of((args, kwargs)), getattr(_CALLS, "call", None)


class Leave:
    """Forward hook of a module: forgets what ``Enter`` noted, after an exception as well."""

    of_sj_tac: ClassVar[bool] = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = getattr(_CALLS, "call", None)
        _CALLS.call = None if call is None else call[2]


def note_calls(module: nn.Module, name: str) -> None:
    """Let the calls of ``module`` tell the convolutions in it the shapes of their inputs."""
    if not any(isinstance(hook, Enter) for hook in module._forward_pre_hooks.values()):
        # In front of the user's own: those may raise, or pass other inputs on.
        module.register_forward_pre_hook(Enter(name), prepend=True, with_kwargs=True)
        module.register_forward_hook(Leave(), with_kwargs=True, always_call=True)


def forget_calls(module: nn.Module) -> None:
    """Take the hooks of ``note_calls`` away."""
    drop_hooks(module, Enter, Leave)
