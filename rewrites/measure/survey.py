"""One run of a net that looks at each module behind its call: is it a neuron, and where are its frames?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sj_tac import host
from sj_tac.definition import neurons
from sj_tac.definition.frames import shapes_of
from sj_tac.rewrites.arguments import copied
from sj_tac.rewrites.measure import decays
from sj_tac.rewrites.measure.neurons import Layout, find_layout, is_refuted
from sj_tac.rewrites.measure.runs import Call, first, fresh, is_convolution


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
        neurons: by name, in the order of their first calls. calls: how often each module was called.
        inputs: of each convolution, what each of its calls was given.
        shapes: of each module around convolutions, the shapes of the tensors that its one call was given.
    """

    neurons: dict[str, Neuron] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


def survey(
    net: nn.Module, arguments: tuple[Any, ...], looks_at: Callable[[nn.Module], bool], to_first_neuron: bool = False
) -> Survey:
    """Return what a run of a copy of ``net`` shows.

    Args:
        looks_at: modules whose inputs are kept. No module above one of them, or above a convolution, is tried as a neuron.
        to_first_neuron: the run ends behind it.
    """
    made = fresh(net)
    surveyor = _Surveyor(made, looks_at, to_first_neuron)
    with torch.no_grad(), contextlib.suppress(_Enough):
        made(*copied(arguments))
    return surveyor.found


class _Enough(Exception):
    pass


class _Surveyor:
    def __init__(self, net: nn.Module, looks_at: Callable[[nn.Module], bool], to_first_neuron: bool) -> None:
        self.found, self.looks_at, self.to_first_neuron = Survey(), looks_at, to_first_neuron
        self._open: list[Call | None] = []
        self._seen: dict[Hashable, tuple[Layout | str, tuple[float, float] | None]] = {}
        self._closed = {
            name for name, module in net.named_modules() if any(is_convolution(m) or looks_at(m) for m in module.modules())
        }
        for name, module in net.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                # Functions, which a deep copy of a module shares: it must not copy the surveyor.
                module.register_forward_pre_hook(lambda m, a, k, name=name: self._before(name, m, a, k), with_kwargs=True)
                module.register_forward_hook(lambda m, a, out, name=name: self._after(name, m, out))

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        found = self.found
        if self.to_first_neuron and found.neurons:
            raise _Enough
        count = found.calls[name] = found.calls.get(name, 0) + 1
        x, call = first((args, kwargs)), None
        if name in self._closed:
            # A module that is called several times may be given other frames each time.
            found.shapes[name] = shapes_of((args, kwargs)) if count == 1 else ()
            if x is not None and self.looks_at(module):
                found.inputs.setdefault(name, []).append(x.detach())
        elif x is not None and count == 1:
            if neurons.is_known(module) and host.is_multi_step(module):  # its class tells its layout and its decay
                found.neurons[name] = Neuron(name, _known_layout(module, x), x.detach().clone(), is_known=True)
            # The first tensor is what is disturbed: numbers, of rows.
            elif not _is_no_neuron(module) and x is next(a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)):
                call = Call(module, args, kwargs)
        self._open.append(call)

    def _after(self, name: str, module: nn.Module, output: Any) -> None:
        call, found, out = self._open.pop(), self.found, first(output)
        if name in found.neurons:
            found.neurons[name].outputs.append(copied(output))
        if call is None or out is None or any(n.startswith(f"{name}.") for n in found.neurons):
            return
        is_registered = host.is_registered_neuron(module)
        layout, decay = self._look(call, out, is_registered)
        if isinstance(layout, str):
            if not is_registered or is_refuted(layout):
                return
            layout = _known_layout(module, call.x)  # its class tells
        neuron = found.neurons[name] = Neuron(name, layout, call.x, [copied(output)], is_known=is_registered)
        if decay is not None:
            neuron.decay, neuron.spread = decay

    def _look(self, call: Call, out: Tensor, tells_decay: bool) -> tuple[Layout | str, tuple[float, float] | None]:
        """Return a module's layout, or why it has none; and its decay with the spread of that, where it does not tell it."""
        if out.shape != call.x.shape:
            return "its output has another shape than its input", None
        key = _key(call)
        if key not in self._seen:
            try:
                layout = find_layout(call, out)
            except Exception as error:
                layout = f"it cannot be run alone ({type(error).__name__}: {str(error)[:80]})"
            decay = None
            if not isinstance(layout, str) and not tells_decay:
                with contextlib.suppress(Exception):  # it wants maps of their own size, or a second tensor that fits
                    decay = decays.measure(call, layout)
            self._seen[key] = layout, decay
        return self._seen[key]


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
