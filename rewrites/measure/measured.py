"""Everything that is measured of a net: of each convolution, whether and how it may run once for k frames, or why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.definition import convs
from sj_tac.definition.frames import Rule, shapes_of
from sj_tac.definition.noted import is_norm
from sj_tac.rewrites.measure import groups, steps
from sj_tac.rewrites.measure.codes import Coded
from sj_tac.rewrites.measure.drives import compare
from sj_tac.rewrites.measure.likeness import likeness
from sj_tac.rewrites.measure.neurons import Layout
from sj_tac.rewrites.measure.runs import is_convolution, undisturbed
from sj_tac.rewrites.measure.survey import Neuron, Survey, survey
from sj_tac.verdicts import Reason, Refusal

# Shared and own drives of an affine path differ by rounding alone: by so much, or by so many of a dtype's smallest steps.
AFFINE, ROUNDINGS = 1e-4, 8
# Decays of a neuron's elements that differ by more are decays of their own; by less, an error of measurement.
SPREAD = 0.01


@dataclass(frozen=True)
class Shared:
    """A convolution that may run once for k frames.

    Attributes:
        layout: where its frames are, on the example. rules: how T of folded rows is found in a call of the module ``of``.
        neurons: that it drives, in the order of their calls; the first one's decay weighs the frames.
        decay: as measured; None where the neuron's class tells it.
        plain: as torch's own forward on folded rows, for its own takes T frames alone.
        off: how far a group's weighted sum of its neurons' drives is off when it is shared at k = 2, as a part of the sum:
            0 where the path is affine, but for rounding; None where no neuron was reached. is_affine: whether it is no more
            than rounding.
        notes: what a reader of the plan should know.
    """

    layout: Layout
    neurons: tuple[str, ...]
    of: str = ""
    rules: tuple[Rule, ...] = ()
    decay: float | None = None
    plain: bool = False
    off: float | None = None
    is_affine: bool = True
    notes: tuple[str, ...] = ()

    def sharing(self, k: int, net: nn.Module) -> convs.Sharing:
        """Return how the definition is to run it in ``net``."""
        frames = replace(self.layout.frames, of=self.of, rules=self.rules)
        return convs.Sharing(k, net.get_submodule(self.neurons[0]), beta=self.decay, frames=frames, plain=self.plain)


@dataclass
class Measured:
    """What was measured of a net.

    Attributes:
        convolutions: by name, in the net's order. neurons: by name.
        sources: of each neuron and convolution, and of OUTPUT, what its input is made of: the nearest convolutions and
            neurons, and INPUT. alike: those that take equal frames where the neurons in front emit equal ones.
        pools: of a neuron, the MaxPool that alone reads its spikes. calls: how often each module was called, in their order.
        kinds: names of the neurons' classes. norms: names of the BatchNorms that were called.
        macs: of each convolution, T and multiply-accumulates of a frame of one sample.
        notes: what could not be measured.
    """

    convolutions: dict[str, Shared | Refusal] = field(default_factory=dict)
    neurons: dict[str, Neuron] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)
    alike: set[str] = field(default_factory=set)
    pools: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    norms: tuple[str, ...] = ()
    macs: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def shared(self) -> dict[str, Shared]:
        """The convolutions that may be shared."""
        return {name: found for name, found in self.convolutions.items() if isinstance(found, Shared)}

    def slim(self) -> Measured:
        """Return it without the tensors that runs gave: what a converted net keeps."""
        kept = {n: replace(neuron, drives=torch.empty(0), outputs=[]) for n, neuron in self.neurons.items()}
        return replace(self, neurons=kept)

    def sharings(self, k: int, net: nn.Module, approximate: bool = False) -> dict[str, convs.Sharing]:
        """Return how the definition is to run each of them in ``net``.

        Args:
            approximate: those, too, whose path to a neuron is not affine (a MaxPool, an activation).
        """
        chosen = {n: f for n, f in self.shared.items() if approximate or f.is_affine}
        return {name: found.sharing(k, net) for name, found in chosen.items()}


def measure(net: nn.Module, arguments: tuple[Any, ...], linears: bool = False, groups_too: bool = True) -> Measured:
    """Measure a net on an example. It is left as it was, its hooks do not run, and the random stream does not move.

    Args:
        arguments: of its forward; a batch of two or more samples, so that the order of folded rows can be seen.
        linears: plan Linear layers too.
        groups_too: find ``alike``, which takes two forwards and which collapses and mixed weights alone ask for.
    """

    def looks_at(module: nn.Module) -> bool:
        return is_convolution(module) or (linears and isinstance(module, nn.Linear))

    with undisturbed(net):
        return _Planner(net, arguments, looks_at).run(groups_too)


class _Planner:
    def __init__(self, net: nn.Module, arguments: tuple[Any, ...], looks_at: Callable[[nn.Module], bool]) -> None:
        self.net, self.arguments, self.looks_at = net, arguments, looks_at
        self.found, self.surveyed = Measured(), survey(net, arguments, looks_at)

    def run(self, groups_too: bool) -> Measured:
        surveyed, found, modules = self.surveyed, self.found, dict(self.net.named_modules())
        hooked = [n or type(m).__name__ for n, m in modules.items() if m._forward_hooks or m._forward_pre_hooks]
        if hooked:
            found.notes.append(f"planned without the hooks of {hooked[:3]}: one that changes data makes another net of it")
        found.neurons, found.calls = surveyed.neurons, surveyed.calls
        coded = Coded(self.net, self.arguments, surveyed.neurons, self.looks_at)
        for name, module in modules.items():
            if self.looks_at(module) and name not in surveyed.neurons:
                found.convolutions[name] = self._first_look(name, module, coded)
        found.sources, found.pools = coded.sources, coded.pools
        found.kinds = {n: type(modules[n]).__qualname__ for n in found.neurons}
        found.norms = tuple(n for n, m in modules.items() if is_norm(m) and n in surveyed.calls)
        found.macs = {n: m for n, outs in coded.outputs.items() if (m := self._macs(n, modules[n], outs)) is not None}
        del coded
        for name, shared in found.shared.items():
            found.convolutions[name] = self._compare_frames(name, shared)
        self._find_steps()
        self._compare_drives()
        if groups_too:
            layouts = {name: shared.layout for name, shared in found.shared.items()}
            found.alike = groups.alike(self.net, self.arguments, found.neurons, layouts)
        return found

    def _first_look(self, name: str, module: nn.Module, coded: Coded) -> Shared | Refusal:
        calls, driven = self.surveyed.calls.get(name, 0), coded.driven.get(name, [])
        if not calls:
            return Refusal(Reason.NEVER_CALLED, "it is never called as a module")
        outputs = coded.outputs.get(name)
        if not outputs:
            return Refusal(Reason.NO_TENSOR, "it returns no tensor of numbers")
        leads, notes = _leads(module, outputs[0]), list[str]()
        read = coded.read(name, leads)
        if driven and any(isinstance(r, Refusal) and r.reason is Reason.FRAMES_MEET for r in read):
            # Later neurons may stand behind attention over time: the nearest one decides.
            nearest = coded.read(name, leads, driven[0])
            if not any(isinstance(r, Refusal) for r in nearest):
                read, driven, notes = nearest, driven[:1], ["frames meet before its later neurons"]
        if problem := next((r for r in read if isinstance(r, Refusal)), None):
            return problem if calls == 1 else replace(problem, detail=f"it is called {calls} times; {problem.detail}")
        layouts = [r for r in read if isinstance(r, Layout)]
        if len(set(layouts)) > 1:
            return Refusal(Reason.OTHER_FRAMES, f"its {calls} calls take other frames each")
        if convs.torchs_own(module) and layouts[0].dim >= max(1, leads):
            return Refusal(Reason.TIME_IN_CHANNELS, "time is among its channels")
        decay = self._weigh(driven, notes)
        return Shared(layouts[0], tuple(driven), decay=decay, notes=tuple(notes))

    def _weigh(self, driven: list[str], notes: list[str]) -> float | None:
        """Return the decay of the first neuron, None where its class tells it; and note where others decay otherwise."""
        decays = {name: self._decay(name, notes) for name in driven}
        first = self.found.neurons[driven[0]]
        known = {round(d, 4) for d in decays.values() if d is not None}
        if len(known) > 1:
            notes.append(f"its neurons decay by {sorted(known)}; the frames are weighed for {first.name!r}")
        if first.spread > SPREAD:
            notes.append(
                f"decays of {first.name!r} differ by {first.spread:.2g} from element to element; their mean is taken"
            )
        decay = decays[first.name]
        if decay is None:
            notes.append(f"the decay of {first.name!r} is unknown: all frames of a group weigh the same")
        if first.is_known and not host.many_numbers(self.net.get_submodule(first.name)):
            return None
        return 1.0 if decay is None else decay

    def _decay(self, name: str, notes: list[str]) -> float | None:
        """Return a neuron's decay; of one that has a decay for each channel or place, their mean, with a note."""
        neuron, module = self.found.neurons[name], self.net.get_submodule(name)
        if neuron.is_known and (many := host.many_numbers(module)):
            values: Any = 1 - module.w.sigmoid() if hasattr(module, "w") else 1 - 1 / module.tau  # type: ignore[operator]
            neuron.decay = float(values.detach().double().mean())
            notes.append(f"{many} in {name!r}: the mean of its decays is taken")
        elif neuron.is_known:
            with torch.no_grad():
                return float(host.decay(module, torch.float64))
        return neuron.decay

    def _macs(self, name: str, module: Any, outputs: list[Tensor]) -> tuple[int, int] | None:
        """Return T and the multiply-accumulates of one frame; of a layer without a layout, T is 1 and a frame is all."""
        weight, found, out = getattr(module, "weight", None), self.found.convolutions.get(name), outputs[0]
        if not isinstance(weight, Tensor) or weight.dim() < 2 or len(outputs) != 1:
            return None
        is_transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
        counted = self.surveyed.inputs[name][0] if is_transposed else out
        total = counted.numel() * (weight.numel() // weight.shape[0])
        if isinstance(found, Shared):
            T, N = found.layout.T, found.layout.N
        else:  # N of the first neuron; of a net that has none, of a layer that takes [T, N, ...]
            unfolded = out.shape[1] if _leads(module, out) > 1 else 1
            T, N = 1, next((neuron.layout.N for neuron in self.found.neurons.values()), unfolded)
        return T, total // (T * N)

    def _compare_frames(self, name: str, found: Shared) -> Shared | Refusal:
        try:
            seen = likeness(self.net.get_submodule(name), self.surveyed.inputs[name][0], found.layout)
        except Exception as error:
            return Refusal(Reason.NOT_RUN, f"it cannot be run alone ({_said(error)})")
        return Refusal(Reason.NOT_ALIKE, seen.problem) if seen.problem else replace(found, plain=seen.plain)

    def _find_steps(self) -> None:
        """Run other batch sizes and other T, where rows are folded, and keep the rules that always find T."""
        if not any(found.layout.folded for found in self.found.shared.values()):
            return
        surveys = [self.surveyed]
        for other in steps.varied(self.arguments):
            try:
                surveys.append(survey(self.net, other, self.looks_at))
            except Exception as error:
                self.found.notes.append(f"it does not run on {shapes_of(other)}: {_said(error)}")
                continue
            self._find_order(other, surveys[-1])
        for name, found in self.found.shared.items():
            if not found.layout.folded:
                continue
            of, rules = steps.rules(name, found.neurons[0], surveys)
            shown = steps.seen(name, found.neurons[0], surveys)
            notes = (*found.notes, "T was seen at one shape only") if len(shown) < 2 else found.notes
            unclear = Refusal(Reason.STEPS_UNKNOWN, f"no rule finds T of a call: (rows, T) were {shown}")
            self.found.convolutions[name] = replace(found, of=of, rules=rules, notes=notes) if rules else unclear

    def _find_order(self, arguments: tuple[Any, ...], seen: Survey) -> None:
        """See the order of folded rows with more samples, where the example had one."""
        unsure = [
            (name, found)
            for name, found in self.found.shared.items()
            if found.layout.folded and found.layout.N == 1 and found.neurons[0] in seen.neurons
            and seen.inputs[name][0].shape[0] != self.surveyed.inputs[name][0].shape[0]
            and seen.neurons[found.neurons[0]].layout.T == found.layout.T
        ]  # fmt: skip
        if not unsure:
            return
        coded = Coded(self.net, arguments, seen.neurons, self.looks_at)
        for name, found in unsure:
            read = coded.read(name, _leads(self.net.get_submodule(name), coded.outputs[name][0]), found.neurons[0])[0]
            if isinstance(read, Refusal):
                self.found.convolutions[name] = replace(read, detail=f"with more samples, {read.detail}")
            else:
                self.found.convolutions[name] = replace(found, layout=replace(read, T=found.layout.T, N=1))

    def _compare_drives(self) -> None:
        """See how far drives are off where all are shared at k = 2; share each alone that is off, all if the net fails."""
        found = self.found
        try:
            together = compare(self.net, self.arguments, found.sharings(2, self.net, approximate=True), found.neurons)
        except Exception:
            together = None
        drivers = Counter(neuron for shared in found.shared.values() for neuron in shared.neurons)
        for name, shared in found.shared.items():
            off = None if together is None else _largest(together, shared)
            is_off = off is not None and not self._is_rounding(off, shared)
            # Another convolution may have done it, unless the one neuron has no other.
            if together is None or (is_off and (len(shared.neurons) > 1 or drivers[shared.neurons[0]] > 1)):
                try:
                    alone = compare(self.net, self.arguments, {name: shared.sharing(2, self.net)}, found.neurons)
                except Exception as error:
                    why = f"shared at k = 2, the net does not run ({_said(error)})"
                    found.convolutions[name] = Refusal(Reason.NOT_RUN, why)
                    continue
                off = _largest(alone, shared)
            is_affine = off is not None and self._is_rounding(off, shared)
            found.convolutions[name] = replace(shared, off=off, is_affine=is_affine)

    def _is_rounding(self, off: float, shared: Shared) -> bool:
        kind = self.found.neurons[shared.neurons[0]].drives.dtype
        return off <= max(AFFINE, ROUNDINGS * torch.finfo(kind).eps)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:80]}"


def _largest(off: dict[str, float], shared: Shared) -> float | None:
    return max([off[n] for n in shared.neurons if n in off], default=None)


def _leads(module: nn.Module, out: Tensor) -> int:
    """Return how many dimensions an output has in front of [C, H, W]."""
    own = [p.dim() for p in module.parameters(recurse=False)] or [p.dim() for p in module.parameters()]
    return out.dim() - max(own) + 1
