"""Checks of a conversion that use nothing of sj_tac: which convolutions drive neurons, and what sharing a drive means."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from spikingjelly.activation_based import neuron
from torch import Tensor, nn

from benchmarks.published import building
from benchmarks.published.cases import Case


def leaves(output: Any) -> list[Tensor]:
    """The tensors of an output, in order."""
    return [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]


@contextmanager
def in_float64() -> Iterator[None]:
    """What a forward makes in float32 (``torch.zeros``, ``x.float()``) is made in float64, beside weights of that type."""
    single, usual = Tensor.float, torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.float = single  # type: ignore[method-assign]
        torch.set_default_dtype(usual)


def run(net: nn.Module, x: Tensor) -> list[Tensor]:
    """The output's tensors, from the reset state."""
    building.reset(net)
    with torch.no_grad():
        return leaves(net(x))


class Reached:
    """The neurons that each convolution drives: its weight is in the autograd graph of a neuron's input, cut at neurons."""

    def __init__(self, net: nn.Module, case: Case, x: Tensor) -> None:
        self.neurons: dict[str, set[str]] = {}
        self.frames: dict[str, tuple[int, int]] = {}
        names = {id(m.weight): n for n, m in net.named_modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}

        def look(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                for weight in _parameters(args[0]):
                    if id(weight) in names:
                        self.neurons.setdefault(names[id(weight)], set()).add(name)
                self.frames[name] = (args[0].shape[0], args[0].shape[1])

            return note

        nodes = building.neurons(net, case)
        before = [m.register_forward_pre_hook(look(n)) for n, m in nodes.items()]
        behind = [m.register_forward_hook(lambda module, args, spikes: spikes.detach()) for m in nodes.values()]
        building.reset(net)
        with building.hooked([*before, *behind]), torch.enable_grad():
            net(x)
        building.reset(net)


def known(node: nn.Module, case: Case) -> bool:
    """Whether its dynamics are those of the host's LIF, IF or PLIF, or of a class that the case registers."""
    own = itertools.takewhile(lambda kind: not kind.__module__.startswith("spikingjelly"), type(node).__mro__)
    # The old constructors add what 2.0 took away, and calls nowhere.
    own = (kind for kind in own if not kind.__module__.startswith("sj_tac.compat."))
    methods = {name for kind in own for name, value in vars(kind).items() if callable(value)}
    usual = (neuron.LIFNode, neuron.IFNode, neuron.ParametricLIFNode)
    return type(node).__name__ in case.registered or (isinstance(node, usual) and methods <= {"__init__", "extra_repr"})


class _EnoughError(Exception):
    """A forward that need not go on."""


class Affine:
    """Whether a convolution's output reaches known neurons by one affine map, with all spikes held.

    That is what a rewrite without loss can use at most. A change that is alike for all frames is added to the output, once
    and twice: what the neurons are given must then change alike in every frame, and twice as much.
    """

    def __init__(self, net: nn.Module, case: Case, x: Tensor, reached: Reached) -> None:
        # What a run with gradients has left in some neuron cannot be copied.
        run(net, x)
        self.net, self.x, self.reached, self.case = copy.deepcopy(net).double(), x.double(), reached, case
        self.nodes = building.neurons(self.net, case)
        self.held: dict[str, Tensor] = {}
        with building.hooked([m.register_forward_hook(self._hold(n)) for n, m in self.nodes.items()]):
            run(self.net, self.x)
        self.given = self._given()

    def _hold(self, name: str) -> Any:
        return lambda module, args, out: self.held.update({name: out.clone()})

    def _given(self, wanted: Iterable[str] = ()) -> dict[str, Tensor]:
        """What neurons are given in a call, while each emits what it did in the first; ``wanted``: until these have it."""
        given: dict[str, Tensor] = {}

        def replay(name: str) -> Callable[..., Tensor]:
            def emit(x: Tensor, *args: Any, **named: Any) -> Tensor:
                given[name] = x.clone()
                if wanted and given.keys() >= set(wanted):
                    raise _EnoughError
                return self.held[name].clone()

            return emit

        for name, node in self.nodes.items():
            node.forward = replay(name)
        try:
            with suppress(_EnoughError):
                run(self.net, self.x)
        finally:
            for node in self.nodes.values():
                del node.forward
        return given

    def __call__(self, name: str) -> bool:
        nodes = self.reached.neurons[name]
        if not all(known(self.nodes[node], self.case) for node in nodes):
            return False
        once, twice = self._changes(name, 1.0), self._changes(name, 2.0)
        return all(
            torch.allclose(once[node], once[node][:1, :1].expand_as(once[node]), atol=1e-6 * float(once[node].abs().max()))
            and torch.allclose(twice[node], 2 * once[node], atol=1e-6 * float(once[node].abs().max()))
            for node in nodes
        )

    def _changes(self, name: str, size: float) -> dict[str, Tensor]:
        front = {self.reached.frames[node] for node in self.reached.neurons[name]}

        def add(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            frame = out.shape[2:] if any(out.shape[:2] in (f, f[::-1]) for f in front) else out.shape[1:]
            return out + size * out.std() * torch.randn(frame, generator=torch.Generator().manual_seed(0), dtype=out.dtype)

        with building.hooked([self.net.get_submodule(name).register_forward_hook(add)]):
            given = self._given(self.reached.neurons[name])
        return {node: given[node] - self.given[node] for node in self.reached.neurons[name]}


def _parameters(value: Tensor) -> Iterable[Tensor]:
    """Leaves of the autograd graph behind a value."""
    stack, seen = [value.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        stack += [parent for parent, _ in node.next_functions]


@torch.no_grad()
def decay(node: Any, case: Case) -> float:
    """What is left of a membrane after a step: of one of SpikingJelly's neurons, or as the case says."""
    if type(node).__name__ in case.registered:
        return case.registered[type(node).__name__](node)
    if isinstance(node, neuron.ParametricLIFNode):
        return 1 - float(node.w.double().sigmoid())
    if isinstance(node, neuron.LIFNode):
        return 1 - 1 / float(node.tau)
    return 1.0


def shared(x: Tensor, frames: tuple[int, int], beta: float, k: int) -> Tensor:
    """Every group of k frames replaced by its mean, weighted with the decay: what a shared drive is made of."""
    folded = x.shape[:2] != frames
    if folded and x.shape[0] != frames[0] * frames[1]:
        return x  # no frames: an image that is repeated later
    values = x.unflatten(0, frames) if folded else x
    groups = []
    for group in values.split(k):
        weights = torch.tensor([beta**j for j in reversed(range(len(group)))], dtype=torch.float64)
        weights = (weights / weights.sum()).to(x.dtype).view(-1, *[1] * (values.dim() - 1))
        groups.append((weights * group).sum(0, keepdim=True).expand_as(group))
    made = torch.cat(groups)
    return made.flatten(0, 1) if folded else made


def define(source: nn.Module, ks: Mapping[str, int], reached: Reached, case: Case) -> nn.Module:
    """A copy of the source whose converted convolutions read groups of k frames as ``shared`` makes them.

    Raises ValueError where the neurons of a convolution decay differently.
    """
    net = copy.deepcopy(source)
    for name, k in ks.items():
        nodes = reached.neurons[name]
        decays = {round(decay(net.get_submodule(node), case), 9) for node in nodes}
        frames = {reached.frames[node] for node in nodes}
        if len(decays) != 1 or len(frames) != 1:
            raise ValueError(f"{name} drives neurons of decays {sorted(decays)} on frames {sorted(frames)}")
        net.get_submodule(name).register_forward_pre_hook(_sharing(frames.pop(), decays.pop(), k))
    return net


def _sharing(frames: tuple[int, int], beta: float, k: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Any, ...]]:
    return lambda module, args: (shared(args[0], frames, beta, k), *args[1:])


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference of two outputs, relative to the largest value of its tensor."""
    pairs = list(zip(a, b, strict=True))
    return max(float((x - y).abs().max() / x.abs().max().clamp_min(1e-12)) for x, y in pairs)


def spikes(net: nn.Module, case: Case, x: Tensor) -> dict[str, Tensor]:
    """What every neuron emits, by name."""
    seen: dict[str, Tensor] = {}

    def look(name: str) -> Any:
        return lambda module, args, out: seen.update({name: out.detach().ne(0)})

    with building.hooked([m.register_forward_hook(look(n)) for n, m in building.neurons(net, case).items()]):
        run(net, x)
    return seen
