"""One run of a net that looks at each module behind its call: is it a neuron, and where are its frames?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from sj_tac import host
from sj_tac.definition import neurons
from sj_tac.rewrites.measure import decays
from sj_tac.rewrites.measure.neurons import Layout, find_layout, is_refuted
from sj_tac.rewrites.measure.runs import Call, first, is_convolution, run
from sj_tac.rewrites.measure.steps import shapes_of


@dataclass
class Neuron:
    """A module that mixes time causally.

    Attributes:
        drives: its first call's input. outputs: of each of its calls, as it returned them.
        decay: of its voltage in a step, where its class does not tell; None if unknown. spread: of the decay over elements.
    """

    name: str
    layout: Layout
    drives: Tensor
    outputs: list[Any] = field(default_factory=list)
    decay: float | None = None
    spread: float = 0.0
    is_known: bool = False


@dataclass
class Survey:
    """What one run shows.

    Attributes:
        neurons: by name, in the order of their first calls. others: why a module that was tried is no neuron.
        calls: how often each module was called. inputs: of each convolution, what each of its calls was given.
        shapes: of each module around convolutions, the shapes of the tensors that its one call was given.
    """

    neurons: dict[str, Neuron] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


def survey(
    net: nn.Module,
    arguments: tuple[Any, ...],
    looks_at: Callable[[nn.Module], bool] = is_convolution,
    to_first_neuron: bool = False,
) -> Survey:
    """Return what a run of a copy of ``net`` shows.

    Args:
        looks_at: modules whose inputs are kept. No module above one of them, or above a convolution, is tried as a neuron.
        to_first_neuron: the run ends behind it.
    """
    surveyor = _Surveyor(looks_at, to_first_neuron)
    with torch.no_grad(), contextlib.suppress(_Enough):
        run(net, arguments, surveyor.hook)
    return surveyor.found


class _Enough(Exception):
    pass


class _Surveyor:
    def __init__(self, looks_at: Callable[[nn.Module], bool], to_first_neuron: bool) -> None:
        self.found, self.looks_at, self.to_first_neuron = Survey(), looks_at, to_first_neuron
        self._open: list[Call | None] = []
        self._seen: dict[Hashable, Layout | str] = {}
        self._decays: dict[Hashable, tuple[float, float] | None] = {}

    def hook(self, net: nn.Module) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        self._closed = {n for n, m in net.named_modules() if any(map(self._is_looked_at, m.modules()))}
        for name, module in net.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                continue
            handles += [
                module.register_forward_pre_hook(lambda m, a, k, name=name: self._before(name, m, a, k), with_kwargs=True),
                module.register_forward_hook(lambda m, a, k, o, name=name: self._after(name, m, o), with_kwargs=True),
            ]
        return handles

    def _is_looked_at(self, module: nn.Module) -> bool:
        return is_convolution(module) or self.looks_at(module)

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        found = self.found
        if self.to_first_neuron and found.neurons:
            raise _Enough
        found.calls[name] = found.calls.get(name, 0) + 1
        x = first((args, kwargs))
        if name in self._closed:
            # A module that is called several times may be given other frames each time.
            found.shapes[name] = shapes_of((args, kwargs)) if found.calls[name] == 1 else ()
        if self.looks_at(module) and x is not None:
            found.inputs.setdefault(name, []).append(x.detach())
        is_tried = x is not None and name not in self._closed and found.calls[name] == 1
        if is_tried and x is not None and _is_one_of_three(module):
            found.neurons[name] = Neuron(name, _known_layout(module, x), x.detach().clone(), is_known=True)
        # The first tensor is what is disturbed: numbers, of rows.
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        is_tried &= name not in found.neurons and bool(tensors) and tensors[0] is x and not _is_no_neuron(module)
        self._open.append(Call(module, args, kwargs) if is_tried else None)

    def _after(self, name: str, module: nn.Module, output: Any) -> None:
        call, found = self._open.pop(), self.found
        if name in found.neurons:
            found.neurons[name].outputs.append(_detached(output))
        out = first(output)
        if call is None or out is None or any(n.startswith(f"{name}.") for n in found.neurons):
            return
        is_registered = host.is_registered_neuron(module)
        try:
            layout = self._look(call, out)
        except Exception as error:
            layout = f"it cannot be run alone ({type(error).__name__}: {str(error)[:80]})"
        if isinstance(layout, str):
            if is_registered and not is_refuted(layout):  # its class tells
                found.neurons[name] = Neuron(name, _known_layout(module, call.x), call.x, [_detached(output)], is_known=True)
                return
            found.others[name] = layout
            return
        neuron = Neuron(name, layout, call.x, [_detached(output)], is_known=is_registered)
        if is_registered:
            found.neurons[name] = neuron
            return
        if (measured := self._decay(call, layout)) is not None:
            neuron.decay, neuron.spread = measured
        found.neurons[name] = neuron

    def _look(self, call: Call, out: Tensor) -> Layout | str:
        if out.shape != call.x.shape:
            return "its output has another shape than its input"
        key = _key(call)
        if key not in self._seen:
            self._seen[key] = find_layout(call, out)
        return self._seen[key]

    def _decay(self, call: Call, layout: Layout) -> tuple[float, float] | None:
        key = _key(call)
        if key not in self._decays:
            try:
                self._decays[key] = decays.measure(call, layout)
            except Exception:  # it wants maps of their own size, or a second tensor that fits
                self._decays[key] = None
        return self._decays[key]


def _is_one_of_three(module: nn.Module) -> bool:
    """Return whether the class of a neuron is SpikingJelly's, and tells its layout and its decay."""
    return neurons.is_known(module) and host.is_multi_step(module)


def _is_no_neuron(module: nn.Module) -> bool:
    """Return whether a module's class is a layer of torch's, or SpikingJelly's of one: none of them mixes time causally."""
    kinds = [kind for kind in type(module).__mro__ if kind not in (nn.Module, nn.Sequential)]
    libraries = kinds[0].__module__.startswith(("torch.nn.modules.", host.LIBRARY))
    return libraries and any(kind.__module__.startswith("torch.nn.modules.") for kind in kinds)


def _known_layout(module: nn.Module, x: Tensor) -> Layout:
    time = 1 if host.is_batch_first(module) else 0
    return Layout(x.shape[time], x.shape[1 - time] if x.dim() > 2 else 1, time)


def _key(call: Call) -> Hashable:
    """Return what decides how a module treats rows: its class, its numbers, its parameters and the shape of its input."""
    parts: list[Hashable] = [tuple(call.x.shape), call.x.dtype]
    for module in call.module.modules():
        parts.append(f"{type(module).__module__}.{type(module).__qualname__} {id(type(module))}")
        numbers = {n: v for n, v in vars(module).items() if isinstance(v, (bool, int, float, str, type(None)))}
        parts.append(tuple(sorted((n, repr(v)) for n, v in numbers.items())))
        tensors = [*module._parameters.values(), *module._buffers.values()]
        parts += [tuple(t.detach().flatten()[:64].tolist()) for t in tensors if t is not None]
    return tuple(parts)


def _detached(values: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, values)
