"""Corrections of a converted net, fitted layer by layer within one forward, each on inputs that are corrected already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.definition.convs import torchs_own
from sj_tac.definition.neurons import OperatorNeuron
from sj_tac.rewrites.corrections import STATISTICS, held, put
from sj_tac.rewrites.gate import as_defined
from sj_tac.rewrites.plan import Plan
from sj_tac.tuning.batches import Batch
from sj_tac.tuning.measure import run_batch

SKIPPED = "its drive is not that of one norm of shared frames and, perhaps, a residual"
# How far the standard deviation of a channel's drive may be stretched, and, as a logarithm, its gain.
STRETCH, GAIN = (0.2, 5.0), 1.0
HALVINGS = 8
# Below this a channel of the drive varies too little, relative to its norm's own statistics, or fires too seldom.
SILENT = 1e-3
# Samples on which rates are fitted: every halving runs the neuron on them.
SAMPLES = 16


@dataclass(frozen=True)
class Places:
    """Where a converted net can be corrected: BatchNorms of aggregated frames, and biases of convolutions without one.

    Attributes:
        norms, convs: names. norm_of: by neuron, the norm between it and the one convolution that drives it alone.
        direct: neurons that have no other input.
    """

    norms: tuple[str, ...]
    convs: tuple[str, ...]
    norm_of: Mapping[str, str]
    direct: frozenset[str]

    @classmethod
    def of(cls, converted: nn.Module, plan: Plan) -> Places:
        modules, measured = dict(converted.named_modules()), plan.measured
        norms = [n for n in measured.norms if _learns(modules.get(n))]
        behind = {conv: [n for n in norms if measured.sources.get(n) == {conv}] for conv in plan.places}
        norm_of: dict[str, str] = {}
        convs: list[str] = []
        direct: set[str] = set()
        drivers = Counter(neuron for name in plan.places for neuron in measured.shared[name].neurons)
        seen: set[int] = set()  # biases: two convolutions may have one
        for name in plan.places:
            driven, bias = measured.shared[name].neurons, getattr(modules[name], "bias", None)
            if len(behind[name]) == 1 and len(driven) == 1 and drivers[driven[0]] == 1:
                norm_of[driven[0]] = behind[name][0]
                direct |= {driven[0]} if measured.sources.get(driven[0]) == {name} else set()
            any_norm = any(name in measured.sources.get(n, ()) for n in measured.norms)
            if not any_norm and isinstance(bias, nn.Parameter) and id(bias) not in seen:
                seen.add(id(bias))
                convs.append(name)
        return cls(tuple(norms), tuple(convs), norm_of, frozenset(direct))

    def take(self, converted: nn.Module) -> dict[str, dict[str, Tensor]]:
        """Copies of all that a fit may write, by module."""
        found = {name: held(converted.get_submodule(name), STATISTICS) for name in self.norms}
        return found | {name: held(converted.get_submodule(name), ("bias",)) for name in self.convs}


def _learns(module: Any) -> bool:
    noted = vars(module).get("_tac") if module is not None else None
    return noted is not None and noted.aggregated and module.running_mean is not None


def put_all(converted: nn.Module, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    for name, values in tensors.items():
        put(converted.get_submodule(name), values)


@dataclass(frozen=True)
class Aim:
    """What the source does on the batch that is fitted.

    Attributes:
        moments: mean and standard deviation [C] of what a norm is given, or a convolution without a norm gives.
        rates: spikes a step of every channel [C] of a neuron in step_mode "m", on ``SAMPLES`` of the samples.
    """

    moments: Mapping[str, tuple[Tensor, Tensor]]
    rates: Mapping[str, Tensor]

    @classmethod
    def of(cls, source: nn.Module, places: Places, batch: Batch, seed: int, *, rates: bool) -> Aim:
        """``source``: the converted net at k = 1. Raises BatchError where it does not run on the batch."""
        moments: dict[str, tuple[Tensor, Tensor]] = {}
        with host.looked_at(source), as_defined():
            for name in places.norms:
                hook = _noting(moments, name, lambda module, args: _moments(args[0], module))
                source.get_submodule(name).register_forward_pre_hook(hook)
            for name in places.convs:
                hook = _noting(moments, name, lambda module, args, out: _moments(out, module))
                source.get_submodule(name).register_forward_hook(hook)
            found = watch_rates(source) if rates else {}
            torch.manual_seed(seed)
            run_batch(source, batch, 0)
        return cls(moments, {name: rate for name, rate in found.items() if rate is not None})


def watch_rates(net: nn.Module) -> dict[str, Tensor | None]:
    """Hooks that note the rates [C] of every neuron in step_mode "m", whenever it runs; None of what has no channels."""
    found: dict[str, Tensor | None] = {}
    for name, module in net.named_modules():
        if (host.is_neuron(module) or host.is_registered_neuron(module)) and host.is_multi_step(module):
            module.register_forward_hook(_noting(found, name, lambda module, args, out: _rate(out)))
    return found


def _noting(found: dict[str, Any], name: str, look: Callable[..., Any]) -> Callable[..., None]:
    def hook(module: nn.Module, *given: Any) -> None:
        found[name] = look(module, *given)

    hook.of_sj_tac = True  # type: ignore[attr-defined]
    return hook


def _moments(x: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel of frames."""
    frames = x.movedim(_channel(module, x), 0).flatten(1).double()
    return frames.mean(1), frames.std(1, correction=0)


def _channel(module: nn.Module, frames: Tensor) -> int:
    """The dimension of frames that a norm, a convolution's output or a Linear's features are counted in."""
    if isinstance(module, nn.Linear):
        return frames.dim() - 1
    if torchs_own(module) is not None:
        return frames.dim() - int(module.weight.dim()) + 1  # type: ignore[operator]
    return 2 if isinstance(module, host.StepModule) and host.is_multi_step(module) else 1


def _rate(spikes: Any) -> Tensor | None:
    if not isinstance(spikes, Tensor) or spikes.dim() < 3:
        return None
    return spikes.double().mean([d for d in range(spikes.dim()) if d != 2])


class Fit:
    """Fits corrections to a converted net, in place, while it runs on a batch once.

    Args:
        moments: give every drive the mean and standard deviation that it has in the source.
        rates: then scale drives until every channel of a fused neuron fires as often as in the source.
    """

    def __init__(self, converted: nn.Module, places: Places, aim: Aim, *, moments: bool, rates: bool) -> None:
        self.converted, self.places, self.aim = converted, places, aim
        self.moments, self.rates = moments, rates
        self.skipped: dict[str, str] = {}
        self.drives: dict[str, Tensor] = {}

    def __call__(self, batch: Batch, seed: int) -> None:
        """Raises BatchError where the net does not run on the batch."""
        with host.looked_at(self.converted, trains=True), as_defined():
            get = self.converted.get_submodule
            if self.moments:
                for name in self.places.norms:
                    get(name).register_forward_pre_hook(_own(self._to_moments, name))
                for name in self.places.convs:
                    get(name).register_forward_hook(_own(self._to_mean, name))
            if self.rates:
                for name, norm in self.places.norm_of.items():
                    get(norm).register_forward_hook(_own(self._note_drive, name))
                for name in self.aim.rates:
                    get(name).register_forward_pre_hook(_own(self._to_rates, name))
            torch.manual_seed(seed)
            run_batch(self.converted, batch, 0)

    def _note_drive(self, neuron: str, norm: Any, args: tuple[Any, ...], out: Tensor) -> None:
        self.drives[neuron] = out

    def _to_moments(self, name: str, norm: Any, args: tuple[Any, ...]) -> None:
        """``I' = a (y - m) s0 / s + a m0 + c``, for the source's moments m0, s0 and those here, m, s."""
        mean, std = _moments(args[0], norm)
        aimed_mean, aimed_std = self.aim.moments[name]
        center, usual = norm.running_mean.double(), (norm.running_var.double() + norm.eps).sqrt()
        usable = (std > SILENT * usual) & (aimed_std > SILENT * usual)
        ratio = torch.where(usable, (aimed_std / std.clamp_min(1e-30)).clamp(*STRETCH), 1.0)
        rescale(norm, ratio, torch.where(usable, mean + (center - aimed_mean) / ratio, center))

    def _to_mean(self, name: str, conv: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """A convolution without a norm can be shifted alone, by its bias."""
        shift = (self.aim.moments[name][0] - _moments(out, conv)[0]).to(conv.bias.dtype)
        put(conv, {"bias": conv.bias + shift})
        return out + shift.view(-1, *[1] * (out.dim() - 1 - _channel(conv, out)))

    def _to_rates(self, name: str, unit: Any, args: tuple[Any, ...]) -> Any:
        """``I' = g I`` per channel, for the gain g that gives the channel the source's rate, found by bisection."""
        x, own = args[0], self.drives.pop(name, None)
        if own is None or _merges(unit, x) or not isinstance(unit, OperatorNeuron) or not host.is_multi_step(unit):
            self.skipped[name] = SKIPPED if isinstance(unit, OperatorNeuron) else "it runs its own steps"
            return None
        if own.shape != x.shape:
            # An average pool stands between, or the norm takes folded frames.
            if name not in self.places.direct and own.numel() != x.numel():
                self.skipped[name] = SKIPPED
                return None
            own = own.reshape(x.shape) if own.numel() == x.numel() else x
        norm: Any = self.converted.get_submodule(self.places.norm_of[name])
        scale = 1 / (norm.running_var.double() + norm.eps).sqrt()
        scale = scale if norm.weight is None else scale * norm.weight.detach().double()
        bias = torch.zeros_like(scale) if norm.bias is None else norm.bias.detach().double()
        gain = torch.where(scale.abs() > 1e-12, self._gain(name, unit, own, x - own), 1.0)
        # g (a (y - mu) + b) = g a (y - mu) + b + d, for d = (g - 1) b.
        shift_and_scale(norm, gain, scale, (gain - 1) * bias)
        return (own * _by_channel(gain, own) + (x - own), *args[1:])

    def _gain(self, name: str, unit: Any, own: Tensor, residual: Tensor) -> Tensor:
        """The gain [C] of the drive's own branch that gives every channel its rate; 1 where it comes no nearer."""
        # Spread over all samples: they may be sorted by their class. Behind a binary collapse equal frames are one step.
        each, few = slice(None, None, _rows(unit)), slice(None, None, -(-own.shape[1] // SAMPLES))
        own, residual, aimed = own[each, few].detach(), residual[each, few].detach(), self.aim.rates[name]
        rest = torch.full_like(own[0], host.resting_voltage(unit), dtype=host.wide_dtype(own.dtype))

        def rates(gain: Tensor) -> Tensor:
            drives = own * _by_channel(gain, own) + residual
            found = _rate(host.steps_on(unit, drives, rest)[0])
            assert found is not None
            return found

        low, high = torch.full_like(aimed, -GAIN), torch.full_like(aimed, GAIN)
        before = rates(torch.ones_like(aimed))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            less = rates(middle.exp()) < aimed
            low, high = torch.where(less, middle, low), torch.where(less, high, middle)
        found = ((low + high) / 2).exp()
        after = rates(found)
        nearer = ((after - aimed).abs() < (before - aimed).abs()) & (aimed > SILENT) & (before > 0)
        return torch.where(nearer, found, torch.ones_like(found))


def _rows(unit: Any) -> int:
    """How many equal frames are one step of a neuron."""
    merging = getattr(unit, "merging", None)
    return 1 if merging is None else int(merging.rate)


def _merges(unit: Any, x: Tensor) -> bool:
    """Whether a neuron takes several steps of these drives as one."""
    merging = getattr(unit, "merging", None)
    return merging is not None and merging.steps > 1 and x.shape[0] > merging.rate


def _by_channel(gain: Tensor, frames: Tensor) -> Tensor:
    return gain.to(frames.dtype).view(-1, *[1] * (frames.dim() - 3))


def rescale(norm: Any, ratio: Tensor, mean: Tensor) -> None:
    """Running statistics of a scale that is ``ratio`` times the norm's, ``v' = (v + eps) / r^2 - eps``, and of this mean."""
    var = norm.running_var.double()
    put(norm, {"running_mean": mean, "running_var": torch.where(ratio == 1, var, (var + norm.eps) / ratio**2 - norm.eps)})


def shift_and_scale(norm: Any, ratio: Tensor, scale: Tensor, shift: Tensor) -> None:
    """``I' = r a (y - mu) + b + d`` for a norm's ``I = a (y - mu) + b``, as running statistics: ``mu' = mu - d / (r a)``.

    Channels whose scale a is 0 stay as they are: statistics cannot say it.
    """
    usable = scale.abs() > 1e-12
    mean, safe = norm.running_mean.double(), torch.where(usable, scale, 1.0)
    ratio = torch.where(usable, ratio, 1.0)
    rescale(norm, ratio, torch.where(usable, mean - shift / (ratio * safe), mean))


def _own(action: Callable[..., Any], name: str) -> Callable[..., Any]:
    def hook(module: nn.Module, *given: Any) -> Any:
        return action(name, module, *given)

    hook.of_sj_tac = True  # type: ignore[attr-defined]
    return hook
