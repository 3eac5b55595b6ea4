"""Runs of copies: a measurement leaves the user's net, its hooks and the random stream as they were."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

# Largest difference, as a part of the largest value, of two results that count as the same: float32 sums in another order.
TOLERANCE = 1e-5


def fresh(module: nn.Module, hooks: bool = True) -> nn.Module:
    """Return a deep copy that shares the parameters. Without ``hooks``, those of the user's are gone; torch's own stay."""
    made = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    if not hooks:
        for part in made.modules():
            for held in (part._forward_hooks, part._forward_pre_hooks):
                # Old weight_norm and pruning compute their weight in a hook.
                for number in [n for n, hook in held.items() if not type(hook).__module__.startswith("torch.nn.utils")]:
                    del held[number]
    return made


def copied(arguments: Any) -> Any:
    """Return arguments with copies of their tensors."""
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, arguments)


def first(values: Any) -> Tensor | None:
    """Return the first tensor of numbers with two or more dimensions; None if there is none."""
    of = (x for x in tree_leaves(values) if isinstance(x, Tensor))
    return next((x for x in of if x.is_floating_point() and x.dim() >= 2), None)


def is_convolution(module: nn.Module) -> bool:
    """Return whether a module owns a weight of three or more dimensions, two of them larger than one."""
    own: list[Tensor] = [p for p in module._parameters.values() if p is not None]
    if hasattr(module, "parametrizations"):
        own += [getattr(module, name) for name in cast(nn.ModuleDict, module.parametrizations)]
    kinds = torch.nn.modules.conv._ConvNd
    return isinstance(module, kinds) or any(p.dim() >= 3 and sum(s > 1 for s in p.shape) >= 2 for p in own)


@contextlib.contextmanager
def hooked(handles: list[RemovableHandle]) -> Iterator[None]:
    """Remove hooks in the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def undisturbed(net: nn.Module) -> Iterator[None]:
    """Keep the random stream and the mode of a net; measure in eval mode, and with gradients whatever the caller's mode."""
    training = {module: module.training for module in net.modules()}
    with torch.random.fork_rng(devices=[], enabled=True), torch.inference_mode(False), torch.enable_grad():
        try:
            net.eval()
            yield
        finally:
            for module, mode in training.items():
                module.training = mode


class Call:
    """One recorded call of a module: a copy of it as it was before the call, and its arguments.

    Attributes:
        x: the first tensor among the arguments; measurements put another in its place. runs: how often it ran.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.module = fresh(module, hooks=False)
        self._values, self._form = tree_flatten((copied(args), copied(kwargs)))
        self._place = next(i for i, v in enumerate(self._values) if isinstance(v, Tensor))
        self.runs = 0

    @property
    def x(self) -> Tensor:
        """The first tensor of the call."""
        x: Tensor = self._values[self._place]
        return x

    def on(self, x: Tensor) -> Call:
        """Return the same call with another first tensor."""
        made = copy.copy(self)
        made._values = [*self._values]
        made._values[self._place] = x
        return made

    def run(self, x: Tensor | None = None, times: int = 1) -> list[Tensor]:
        """Return the first tensor of each output of ``times`` calls after one another, from the recorded state on."""
        self.runs += times
        module, outputs = fresh(self.module), []
        for _ in range(times):
            values = copied(self._values)
            values[self._place] = (self.x if x is None else x).clone()
            args, kwargs = tree_unflatten(values, self._form)
            out = first(module(*args, **kwargs))
            if out is None:
                raise ValueError("it returns no tensor of numbers")
            outputs.append(out)
        return outputs


def run(net: nn.Module, arguments: tuple[Any, ...], hook: Callable[[nn.Module], list[RemovableHandle]] | None = None) -> Any:
    """Return the output of a copy of ``net``; ``hook`` registers hooks on the copy."""
    made = fresh(net, hooks=False)
    with hooked([] if hook is None else hook(made)):
        return made(*copied(arguments))


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are the same to the last bit; NaN is the same as NaN."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def is_near(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are the same but for rounding."""
    if a.shape != b.shape:
        return False
    size = b.double().abs().max().clamp_min(1e-12) if b.numel() else 1.0
    return bool(((a.double() - b.double()).abs() <= TOLERANCE * size).all())
