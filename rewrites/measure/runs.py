"""Runs of copies: a measurement leaves the user's net, its hooks and the random stream as they were."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from sj_tac import host
from sj_tac.rewrites.arguments import copied

# Largest difference, as a part of the largest value, of two results that count as the same: float32 sums in another order.
TOLERANCE = 1e-5


def fresh(module: nn.Module) -> nn.Module:
    """Return a deep copy that shares the parameters. The user's hooks are gone; torch's and ours stay."""
    shared: dict[int, Any] = {id(p): p for p in module.parameters()}
    # A tensor that a call left behind, with its graph, has no deep copy.
    shared |= {id(x): x.detach().clone() for x in _kept(module) if x.grad_fn is not None}
    made = copy.deepcopy(module, shared)
    for part in made.modules():
        for name, value in vars(part).items():
            if isinstance(value, FunctionType) and value.__closure__:
                vars(part)[name] = _rebound(value, shared)
        for held in (part._forward_hooks, part._forward_pre_hooks):
            # Old weight_norm and pruning compute their weight in a hook.
            for number in [n for n, hook in held.items() if not _is_kept(hook)]:
                del held[number]
    return made


UNSET = "set it to None meanwhile"


def uncopied(model: nn.Module) -> tuple[str, str]:
    """Return, for an error, which attribute stands in the way of a deep copy, and what to do with it."""
    memo = host.detached_memories(model)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            at = f"{name}.{key}".lstrip(".")
            if isinstance(value, Tensor) and not value.is_leaf and id(value) not in memo:
                return f" because {at!r} is a tensor computed from others", (
                    "set it to None if a forward keeps it (a feature, a loss), or call the model under torch.no_grad() "
                    "first; make weights plain (torch.nn.utils.prune.remove, torch.nn.utils.remove_weight_norm)"
                )
            if key not in ("_modules", "_parameters", "_buffers"):
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    return f" because of {at!r}, a {type(value).__name__}", UNSET
    return "", "make copyable what it holds"


def _is_kept(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils") or getattr(hook, "of_sj_tac", False)


def _rebound(function: FunctionType, copies: Mapping[int, Any]) -> FunctionType:
    """Return a function whose closure holds the copies of what it held: a copy of a net shares its functions."""
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            held = cell.cell_contents
            if isinstance(held, MethodType) and id(held.__self__) in copies:
                cell = CellType(MethodType(held.__func__, copies[id(held.__self__)]))
            elif isinstance(held, nn.Module) and id(held) in copies:
                cell = CellType(copies[id(held)])
        cells.append(cell)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _kept(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that modules hold as attributes, buffers or memories."""
    for part in module.modules():
        held = vars(part)
        for values in (held, part._buffers, held.get("_memories", {})):
            yield from (x for x in values.values() if isinstance(x, Tensor))


def first(values: Any) -> Tensor | None:
    """Return the first tensor of numbers with two or more dimensions; None if there is none."""
    of = (x for x in tree_leaves(values) if isinstance(x, Tensor))
    return next((x for x in of if x.is_floating_point() and x.dim() >= 2), None)


def is_convolution(module: nn.Module) -> bool:
    """Return whether a module owns a weight of three or more dimensions, two of them larger than one."""
    if isinstance(module, parametrize.ParametrizationList):
        return False
    if host.is_neuron(module) or host.is_registered_neuron(module):
        return False
    own: list[Tensor] = [p for p in module._parameters.values() if p is not None]
    if hasattr(module, "parametrizations"):
        own += [getattr(module, name) for name in cast(nn.ModuleDict, module.parametrizations)]
    kinds = torch.nn.modules.conv._ConvNd
    return isinstance(module, kinds) or any(p.dim() >= 3 and sum(s > 1 for s in p.shape) >= 2 for p in own)


def before_calls(module: nn.Module, look: Callable[[Tensor | None], None]) -> None:
    """Let ``look`` see the first tensor that each call of a copy's module is given."""
    module.register_forward_pre_hook(lambda m, args, kwargs: look(first((args, kwargs))), with_kwargs=True)


def replace_outputs(module: nn.Module, outputs: list[Any]) -> None:
    """Let a neuron of a copy return these, call by call."""
    following = iter([*outputs, *outputs[-1:] * 10_000])
    # Copies: the net may write into them (a residual sum in place).
    module.forward = lambda *args, **kwargs: copied(next(following))


@contextlib.contextmanager
def undisturbed(net: nn.Module) -> Iterator[None]:
    """Measure in eval mode, with gradients whatever the caller's mode; keep what a run of a copy may change all the same.

    Kept are the random streams, modes, parameters (copies share them, and a forward may write into one) and memories (a
    function that closes over the net runs the net itself).
    """
    training = {module: module.training for module in net.modules()}
    memories = {module: dict(vars(module)["_memories"]) for module in net.modules() if "_memories" in vars(module)}
    parameters = {p: p.detach().clone() for p in net.parameters()}
    streams = random.getstate(), np.random.get_state()
    with (
        host.stack_for(net),
        torch.random.fork_rng(devices=[], enabled=True),
        torch.autocast("cpu", enabled=False),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        try:
            net.eval()
            yield
        finally:
            for module, mode in training.items():
                module.training = mode
            for module, held in memories.items():
                vars(module)["_memories"].update(held)
            for parameter, kept in parameters.items():
                if not torch.equal(parameter.detach(), kept):
                    parameter.data.copy_(kept)
            random.setstate(streams[0])
            np.random.set_state(streams[1])


class Call:
    """One recorded call of a module: a copy of it as it was before the call, and its arguments.

    Attributes:
        x: the first tensor among the arguments; measurements put another in its place.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.module = fresh(module)
        self._values, self._form = tree_flatten((copied(args), copied(kwargs)))
        self._place = next(i for i, v in enumerate(self._values) if isinstance(v, Tensor))

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

    def run(self) -> Tensor:
        """Return the first tensor of the output, from the recorded state on."""
        args, kwargs = tree_unflatten(copied(self._values), self._form)
        out = first(fresh(self.module)(*args, **kwargs))
        if out is None:
            raise ValueError("it returns no tensor of numbers")
        return out


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are the same to the last bit; NaN is the same as NaN."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def is_near(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are the same but for rounding."""
    if a.shape != b.shape:
        return False
    size = b.double().abs().max().clamp_min(1e-12) if b.numel() else 1.0
    return bool(((a.double() - b.double()).abs() <= TOLERANCE * size).all())
