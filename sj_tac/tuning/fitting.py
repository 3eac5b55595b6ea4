"""Corrections of a converted net, fitted layer by layer within one forward, each on inputs that are corrected already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.kernels.layout import is_channels_last, laid
from sj_tac.rewrites.chains import Chain
from sj_tac.rewrites.corrections import STATISTICS, held, put
from sj_tac.rewrites.plan import Plan
from sj_tac.runtime.drives import Drive
from sj_tac.runtime.expressions import SharedExpression
from sj_tac.runtime.groups import Groups
from sj_tac.runtime.layers import Norm
from sj_tac.runtime.neurons import UnitModule
from sj_tac.runtime.runs import Inputs, Run
from sj_tac.runtime.swaps import is_swapped
from sj_tac.runtime.values import Frames, Shared
from sj_tac.tuning.batches import Batch
from sj_tac.tuning.measure import run_batch

AVG_POOLS = (nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd)
SKIPPED = "its drive is not that of one norm with no other reader, or comes as ordinary frames"
# How far the standard deviation of a channel's drive may be stretched, and, as a logarithm, its gain.
STRETCH, GAIN = (0.2, 5.0), 1.0
HALVINGS = 8
# Below this a channel of the drive varies too little, relative to its norm's own statistics, or fires too seldom.
SILENT = 1e-3
# Samples on which rates are fitted: every halving runs the neuron on them.
SAMPLES = 16
# Numbers of a map from which on sums along it are fast.
LARGE_MAP = 64


@dataclass(frozen=True)
class Places:
    """Where a converted net can be corrected: its swapped norms, and convolutions without one that have a bias.

    Attributes:
        norms, convs: names. norm_of: the norm behind the convolution of that name, where its drive goes to one neuron alone.
        direct: convolutions with nothing but average pools between norm and neuron. units: neurons that run fused.
    """

    norms: tuple[str, ...]
    convs: tuple[str, ...]
    norm_of: Mapping[str, str]
    direct: frozenset[str]
    units: tuple[str, ...]

    @classmethod
    def of(cls, converted: nn.Module, plan: Plan) -> Places:
        modules = dict(converted.named_modules())
        # Norms that are swapped, and that no plan speaks of any more, see what they saw in the source.
        swapped = [n for n, m in modules.items() if is_swapped(m) and isinstance(m._tac, Norm) and n in plan.layout.norms]
        norms = [n for n in swapped if modules[n].running_mean is not None]
        norm_of: dict[str, str] = {}
        convs: list[str] = []
        direct: set[str] = set()
        seen: set[int] = set()  # biases: two convolutions may have one
        for name in plan.layout.drives:
            chain = plan.chains[name]
            assert isinstance(chain, Chain)
            inner = next((n for n in norms if n.startswith(f"{chain.site}.")), None) if chain.site != name else None
            norm = chain.norm or inner
            pooled = all(isinstance(modules[between], AVG_POOLS) for between in chain.between)
            direct |= {name} if chain.direct and pooled else set()
            if norm in norms:
                norm_of |= {name: str(norm)} if len(chain.neurons) == 1 and not chain.readout else {}
            elif (
                norm is None and chain.site == name and modules[name].bias is not None and id(modules[name].bias) not in seen
            ):
                seen.add(id(modules[name].bias))
                convs.append(name)
        units = tuple(n for n, m in modules.items() if isinstance(m, UnitModule) and not m._tac.head)
        return cls(tuple(norms), tuple(convs), norm_of, frozenset(direct), units)

    def take(self, converted: nn.Module) -> dict[str, dict[str, Tensor]]:
        """Copies of all that a fit may write, by module."""
        found = {name: held(converted.get_submodule(name), STATISTICS) for name in self.norms}
        return found | {name: held(converted.get_submodule(name), ("bias",)) for name in self.convs}


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
        with host.looked_at(source):
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
        if isinstance(module, UnitModule):
            module.register_forward_pre_hook(_noting(found, name, lambda module, args: _unit_rate(module, args[0])))
        if (host.is_neuron(module) or host.is_registered_neuron(module)) and host.is_multi_step(module):
            # What a unit's pre-hook could not tell.
            module.register_forward_hook(
                _noting(
                    found, name, lambda module, args, out, name=name: _rate(out) if found.get(name) is None else found[name]
                )
            )
    return found


def _noting(found: dict[str, Any], name: str, look: Callable[..., Any]) -> Callable[..., None]:
    def hook(module: nn.Module, *given: Any) -> None:
        found[name] = look(module, *given)

    hook.of_sj_tac = True  # type: ignore[attr-defined]
    return hook


def _moments(x: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel of frames, ordinary or compact, weighed by the steps they stand for."""
    if isinstance(x, Shared) and x.intact and x.is_bare:
        frames, lengths = x.expression.mapped(), x.expression.groups.frames
    elif isinstance(x, Frames):
        frames, lengths = x.expression.make(), ()
    else:
        steps = host.is_multi_step(module) and not _folds(module)
        frames, lengths = x if steps else x[None], ()
    found = [_of_frame(frame.movedim(_channel(module, frames) - 1, 1)) for frame in frames]
    mean, var = (torch.stack(values) for values in zip(*found, strict=True))
    weights = torch.tensor(lengths or [1] * len(mean), dtype=torch.float64, device=mean.device)
    weights = (weights / weights.sum())[:, None]
    whole = (weights * mean).sum(0)
    return whole, ((weights * (var + (mean - whole) ** 2)).sum(0)).sqrt()


def _of_frame(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [C] of [N, C, ...]."""
    wide = x.float() if x.dtype in (torch.half, torch.bfloat16) else x
    if x.device.type != "cpu" or not x.numel():
        var, mean = torch.var_mean(wide, [d for d in range(x.dim()) if d != 1], correction=0)
    elif x[0, 0].numel() >= LARGE_MAP and x.is_contiguous():
        return _of_maps(wide.flatten(2))
    else:  # BatchNorm's own pass, which is several times faster there
        mean, var = torch.ops.aten.batch_norm_update_stats(wide, None, None, 0.0)
    return mean.double(), var.double()


def _of_maps(x: Tensor) -> tuple[Tensor, Tensor]:
    """``_of_frame`` of large maps [N, C, S], which lie in one piece: by sums and norms, ten times faster than BatchNorm."""
    count = x.shape[0] * x.shape[2]
    mean = x.sum(2).double().sum(0) / count
    var = torch.linalg.vector_norm(x, dim=2).double().square().sum(0) / count - mean**2
    near = var < mean**2 / 16  # the difference has lost digits
    if bool(near.any()):
        _, exact = torch.ops.aten.batch_norm_update_stats(x[:, near], None, None, 0.0)
        var[near] = exact.double()
    return mean, var


def _channel(module: nn.Module, frames: Tensor) -> int:
    """The dimension of [T, N, ...] that a norm, a convolution's output or a Linear's features are counted in."""
    return frames.dim() - 1 if isinstance(module, nn.Linear) else 2


def _folds(module: nn.Module) -> bool:
    """True for one of torch's own modules, which take frames [T * N, ...]."""
    return not isinstance(module, host.StepModule)


def _rate(spikes: Any) -> Tensor | None:
    if not isinstance(spikes, Tensor) or spikes.dim() < 3:
        return None
    frames = spikes.expression.make() if isinstance(spikes, Frames) else spikes
    return frames.double().mean([d for d in range(frames.dim()) if d != 2])


def _unit_rate(unit: Any, x: Any) -> Tensor | None:
    """The rates of a unit on shared drives, by ``fire`` alone, which makes no frames; None of anything else."""
    if not isinstance(x, Shared) or not x.intact or _merges(x) or x.folded is not None:
        return None
    return fired(unit, x.expression)(None)


def _merges(x: Shared) -> bool:
    """Whether a neuron takes several steps as one: one step alone, of a short call behind a binary collapse, is a step."""
    return x.merges and max(x.expression.groups.steps) > 1


def fired(unit: Any, expression: SharedExpression) -> Callable[[Tensor | None], Tensor]:
    """The rates [C] of a unit on drives, as a function of a gain [C] on what is not the residual, on the first samples."""
    # Spread over all of them: samples may be sorted by their class.
    few = slice(None, None, -(-expression.compact.shape[1] // SAMPLES))
    compact, groups = _some(expression.compact, few), expression.groups
    residual = None if expression.residual is None else _some(expression.residual.make(), few)
    steps = sum(groups.steps)
    weights, size = unit._tac.mean_weights(Groups((steps,), (steps,)), (compact.dtype, compact.device))
    noted = expression.affine

    def rates(gain: Tensor | None) -> Tensor:
        scale, shift = noted if noted is not None else (None, None)
        if gain is not None:
            like = gain.to(compact.dtype if noted is None else noted[0].dtype)
            scale, shift = (like, torch.zeros_like(like)) if noted is None else (noted[0] * like, noted[1] * like)
        inputs = Inputs(compact, None, residual, scale, shift, unit._parameters.get("w"))
        mean = Run(unit, inputs, list(groups.steps), False, True)(None, weights, size)[0]
        return mean.double().mean([d for d in range(mean.dim()) if d != 2])

    return rates


def _some(frames: Tensor, few: slice) -> Tensor:
    """Some samples of frames, in the memory format that all have."""
    return laid(frames[:, few], frames.dim() == 5 and is_channels_last(frames))


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

    def __call__(self, batch: Batch, seed: int) -> None:
        """Raises BatchError where the net does not run on the batch."""
        with host.looked_at(self.converted, trains=True):
            get = self.converted.get_submodule
            if self.moments:
                for name in self.places.norms:
                    get(name).register_forward_pre_hook(_own(self._to_moments, name))
                for name in self.places.convs:
                    get(name).register_forward_hook(_own(self._to_mean, name))
            if self.rates:
                for name in self.places.units:
                    get(name).register_forward_pre_hook(_own(self._to_rates, name))
                others = [name for name in self.aim.rates if name not in self.places.units]
                self.skipped |= dict.fromkeys(others, "it runs its own steps")
            torch.manual_seed(seed)
            run_batch(self.converted, batch, 0)

    def _to_moments(self, name: str, norm: Any, args: tuple[Any, ...]) -> None:
        """``I' = a (y - m) s0 / s + a m0 + c``, for the source's moments m0, s0 and those here, m, s."""
        mean, std = _moments(args[0], norm)
        aimed_mean, aimed_std = self.aim.moments[name]
        center, usual = norm.running_mean.double(), (norm.running_var.double() + norm.eps).sqrt()
        usable = (std > SILENT * usual) & (aimed_std > SILENT * usual)
        ratio = torch.where(usable, (aimed_std / std.clamp_min(1e-30)).clamp(*STRETCH), 1.0)
        rescale(norm, ratio, torch.where(usable, mean + (center - aimed_mean) / ratio, center))

    def _to_mean(self, name: str, conv: Any, args: tuple[Any, ...], out: Any) -> Any:
        """A convolution without a norm can be shifted alone, by its bias."""
        shift = (self.aim.moments[name][0] - _moments(out, conv)[0]).to(conv.bias.dtype)
        put(conv, {"bias": conv.bias + shift})
        if isinstance(out, Shared):
            compact = out.expression.mapped()
            return out.like(compact + shift.view(-1, *[1] * (compact.dim() - 1 - _channel(conv, compact))), out.folded)
        frames = out[None] if _folds(conv) else out
        return out + shift.view(-1, *[1] * (frames.dim() - 1 - _channel(conv, frames)))

    def _to_rates(self, name: str, unit: Any, args: tuple[Any, ...]) -> Any:
        """``I' = g I`` per channel, for the gain g that gives the channel the source's rate, found by bisection."""
        x = args[0]
        maker = x.maker if isinstance(x, Shared) and x.intact and not _merges(x) else None
        conv = maker.name if isinstance(maker, Drive) else ""
        norm_name = self.places.norm_of.get(conv)
        # With no affine map noted a pool may stand between, but a sum could not be told from one drive.
        if norm_name is None or (x.expression.affine is None and not (x.is_bare and conv in self.places.direct)):
            self.skipped[name] = SKIPPED
            return None
        norm: Any = self.converted.get_submodule(norm_name)
        scale, shift = (value.detach() for value in host.affine(norm, norm._tac._affine))
        expression: SharedExpression = x.expression
        noted = expression.affine
        if noted is not None and not (torch.equal(noted[0], scale) and torch.equal(noted[1], shift)):
            self.skipped[name] = SKIPPED
            return None
        gain = self._gain(name, unit, expression)
        gain = torch.where(scale.double().abs() > 1e-12, gain, 1.0)
        # g (a y + c) = g a (y - mu) + b + d, for b = c + a mu and d = (g - 1) b.
        above = shift.double() + scale.double() * norm.running_mean.double()
        shift_and_scale(norm, gain, scale.double(), (gain - 1) * above)
        like = gain.to(scale.dtype)
        if noted is not None:
            scaled = SharedExpression(
                expression.compact, expression.groups, (scale * like, shift * like), expression.residual
            )
        else:
            by_channel = gain.to(expression.compact.dtype).view(-1, *[1] * (expression.compact.dim() - 3))
            scaled = SharedExpression(expression.compact * by_channel, expression.groups, None, expression.residual)
        made = Shared.of(scaled, x.means, x.folded)
        made.__dict__.update({"maker": x.maker, "merges": x.merges, "normalize": x.normalize})
        return (made, *args[1:])

    def _gain(self, name: str, unit: Any, expression: SharedExpression) -> Tensor:
        """The gain [C] of the drive's own branch that gives every channel its rate; 1 where it comes no nearer."""
        aimed, rates = self.aim.rates[name], fired(unit, expression)
        low, high = torch.full_like(aimed, -GAIN), torch.full_like(aimed, GAIN)
        before = rates(None)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            less = rates(middle.exp()) < aimed
            low, high = torch.where(less, middle, low), torch.where(less, high, middle)
        found = ((low + high) / 2).exp()
        after = rates(found)
        nearer = ((after - aimed).abs() < (before - aimed).abs()) & (aimed > SILENT) & (before > 0)
        return torch.where(nearer, found, torch.ones_like(found))


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
