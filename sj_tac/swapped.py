"""What the modules of a converted chain become: subclasses of their own classes that know how long their frames are.

A swap changes ``module.__class__`` and adds one plain attribute, ``_tac``, so the module keeps its path, its parameters
and their names. Every class here is static and importable, which is what pickling needs.

Inside the converted net's own call (``timeline.grouped``) frames behind a collapse travel at their own rate. Called from
outside, a module takes and returns frames at the rate of the input, with the same values: it thins what comes in and
repeats what goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import InputError
from sj_tac.functional import decay_weights, learned_weights, temporal_sum
from sj_tac.fusion import Fusion
from sj_tac.host import layer, neuron
from sj_tac.kernels import aggregate as aggregation
from sj_tac.kernels import reference
from sj_tac.spans import PLAIN, Span, Timeline

LOGITS = "tac_logits"


@dataclass(eq=False)
class Place:
    """Where on the time axis a module stands: its timeline, and what its frames stand for."""

    timeline: Timeline
    span: Span = PLAIN
    # The chain it belongs to, where that may run as one operator; its modules then leave the work to the neuron.
    fusion: Fusion | None = field(default=None, kw_only=True)

    @property
    def fused(self) -> Fusion | None:
        """The chain's fusion, in a call that runs fused."""
        return self.fusion if self.fusion is not None and self.fusion.active and self.timeline.grouped else None

    def run(self, x: Tensor, out: Span, function: Callable[[Tensor, int], Tensor]) -> Tensor:
        """``function(frames, T)`` on frames of ``self.span``, whichever rate ``x`` comes at; the result has span ``out``."""
        if self.timeline.grouped and self.timeline.steps is not None:
            return function(x, x.shape[0] if self.span.is_plain else self.timeline.steps)
        steps = x.shape[0]
        x = x if self.span.is_plain else reference.first(x, self.span.lengths(steps))
        y = function(x, steps)
        return y if out.is_plain else reference.repeat(y, out.lengths(steps))


@dataclass(eq=False)
class DrivePlace(Place):
    """The conv of a chain: ``k`` source steps share one drive."""

    name: str = ""
    mode: str = "preserve"
    k: int = 2
    weights: str = "decay"
    normalize: bool = True
    spikes: str = "count"
    # The neuron whose decay gives the weights; no child module, or it would be in the state_dict twice.
    node: nn.Module = field(default_factory=nn.Identity)
    seen: tuple[int, int] | None = None

    @property
    def frames(self) -> int:
        """Frames of this place's span in a whole group."""
        return max(1, self.k // self.span.stretch)

    @property
    def out(self) -> Span:
        """The span of what the chain emits."""
        if self.mode == "preserve":
            return self.span
        return self.span.collapsed(max(self.k, self.span.stretch), self.spikes)

    def groups(self, steps: int) -> list[list[int]]:
        """Inner steps of every frame, group by group, for ``steps`` source frames."""
        per_frame = self.span.inner_steps(steps)
        return [per_frame[i : i + self.frames] for i in range(0, len(per_frame), self.frames)]


@dataclass(eq=False)
class FiringPlace(Place):
    """A neuron: runs ``span.stretch`` steps a frame; emits their mean, or the steps where a MaxPool behind takes it.

    ``merge`` > 1 is the binary collapse: one step stands for ``merge`` of them, with the decay of all.
    """

    emit_mean: bool = True
    merge: int = 1
    normalize: bool = True

    @property
    def out(self) -> Span:
        return self.span if self.emit_mean else self.span.unstretched()


@dataclass(eq=False)
class NormPlace(Place):
    """A BatchNorm that may be frozen, and that remembers whether it learnt from aggregated frames."""

    name: str = ""
    aggregated: bool = False
    frozen: bool = False
    moved: bool = False


def check_frames(x: Tensor, conv: nn.Module, name: str) -> None:
    """Raises InputError unless ``x`` is [T, N, C, H, W] with this conv's C and at least one frame."""
    if x.dim() != 5 or x.shape[0] == 0 or x.shape[2] != conv.in_channels:
        raise InputError(
            f"layer {name!r} takes frames [T, N, C, H, W] with T >= 1 and C={conv.in_channels}, "
            f"got a tensor of shape {list(x.shape)}; stack the time steps in front, T first"
        )


class SharedDriveConv2d(layer.Conv2d):
    """Conv2d of a converted chain; calls the convolution once for each group of frames. See the subclasses."""

    _tac: DrivePlace

    def forward(self, x: Tensor) -> Tensor:
        if self.step_mode == "s":
            result: Tensor = super().forward(x)
            return result
        place = self._tac
        check_frames(x, self, place.name)
        if place.timeline.grouped and place.timeline.steps is None:
            # The first chain of the running call: nothing was collapsed before it, so its frames are the input's.
            place.timeline.steps = x.shape[0] * place.span.factor
        if place.fusion is not None and place.fusion.begin(x):
            return self._fused_drive(x, place.fusion)
        return place.run(x, place.out, self._drive)

    def _fused_drive(self, x: Tensor, fusion: Fusion) -> Tensor:
        """The drives of all groups, not repeated: the chain's neuron runs its steps on them."""
        if fusion.arriving:
            fusion.arriving = False
        else:
            x = self._aggregate(x, self._tac.groups(fusion.steps))
        y: Tensor = super().forward(x)
        self._see(fusion.steps, y)
        return y

    def _see(self, steps: int, y: Tensor) -> None:
        if not torch.compiler.is_compiling():
            self._tac.seen = (steps, y[0, 0].numel() * self.weight[0].numel())

    def _drive(self, x: Tensor, steps: int) -> Tensor:
        place = self._tac
        groups = place.groups(steps)
        y: Tensor = super().forward(self._aggregate(x, groups))
        self._see(steps, y)
        return reference.repeat(y, [len(g) for g in groups]) if place.mode == "preserve" else y

    def _aggregate(self, x: Tensor, groups: list[list[int]]) -> Tensor:
        if len(groups) == x.shape[0]:
            return x
        # The last group alone can differ: fewer frames, or a last frame that stands for fewer steps.
        ragged = groups[-1] != groups[0]
        tail = self.group_weights(groups[-1], x.dtype) if ragged else ()
        # Unfused is the definition, in plain PyTorch.
        backend = self._tac.fusion.backend if self._tac.fusion is not None else reference.NAME
        run = aggregation.RUNNERS[aggregation.choose(backend, x.device, x.dtype)]
        return run(x, self.group_weights(groups[0], x.dtype), tail)

    def group_weights(self, lengths: list[int], dtype: torch.dtype) -> Sequence[float | Tensor]:
        """Weights of a group whose frames stand for ``lengths`` steps."""
        place = self._tac
        wide = reference.accumulation_dtype(dtype)
        if place.weights == "learned":
            return learned_weights(getattr(self, LOGITS), len(lengths), wide)
        if place.weights == "uniform":
            return [length / (sum(lengths) if place.normalize else 1) for length in lengths]
        return decay_weights(host.decay(place.node, wide), lengths, place.normalize)

    def initial_logits(self) -> Tensor:
        """Logits whose softmax is the decay weights of a whole group, in the conv's dtype: [frames]."""
        place = self._tac
        with torch.no_grad():
            beta = host.decay(place.node, torch.float64)
        lengths = [place.span.stretch] * place.frames
        weights = decay_weights(float(beta), lengths)
        return torch.tensor(weights, dtype=torch.float64).log().to(self.weight)

    def extra_repr(self) -> str:
        place = self._tac
        shown = f"{super().extra_repr()}, k={place.k}, weights={place.weights}"
        return shown if place.normalize else shown + ", normalize=False"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A checkpoint of the source net knows no logits; it loads strictly, and they start at the decay weights.
        key = prefix + LOGITS
        if LOGITS in self._parameters and key not in state_dict:
            state_dict[key] = self.initial_logits()
            try:
                super()._load_from_state_dict(state_dict, prefix, *args)
            finally:
                del state_dict[key]
        else:
            super()._load_from_state_dict(state_dict, prefix, *args)

    def _replicate_for_data_parallel(self) -> Any:
        raise RuntimeError(
            f"layer {self._tac.name!r}: nn.DataParallel replicas would share one neuron state and one time axis; "
            "use torch.nn.parallel.DistributedDataParallel, or sj_tac.restore the net first"
        )


class TACTPConv2d(SharedDriveConv2d):
    """TAC-TP, "preserve": one convolution for k frames; its drive is repeated, so T stays. [T, N, C, H, W] in and out."""


class TACConv2d(SharedDriveConv2d):
    """TAC, "collapse": one convolution for k frames, and one frame out for k in. [T, N, C, H, W] -> [ceil(T/k), N, ...]."""


class _PlacedNode(neuron.BaseNode):
    """A neuron on a time axis whose frames may stand for several steps. Its voltage is float32 for half inputs."""

    _tac: FiringPlace

    def materialize_states(self, inputs: tuple[Any, ...], states: tuple[Any, ...], step_mode: str) -> tuple[Any, ...]:
        x = inputs[0]
        wide = reference.accumulation_dtype(x.dtype)
        if step_mode == "m" and x.dtype != wide and self._neuron_precision is None:
            # The host keeps the voltage in the input's dtype; a decay of a half voltage loses small drives for good.
            state, *others = super().materialize_states((x[:1].to(wide), *inputs[1:]), states, step_mode)
            return (state, *others)
        materialized: tuple[Any, ...] = super().materialize_states(inputs, states, step_mode)
        return materialized

    def multi_step_forward(self, x_seq: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place = self._tac
        if place.fused is not None:
            return place.fused.fire(x_seq)
        if place.merge > 1:
            return place.run(x_seq, place.out, self._merged_steps)
        if place.span.is_plain:
            return self._steps(x_seq)
        return place.run(x_seq, place.out, self._stretched_steps)

    def _steps(self, x: Tensor) -> Tensor:
        spikes: Tensor = super().multi_step_forward(x)
        return spikes.to(x.dtype)

    def _stretched_steps(self, x: Tensor, steps: int) -> Tensor:
        inner = self._tac.span.inner_steps(steps)
        spikes = self._steps(reference.repeat(x, inner))
        return reference.mean(spikes, inner) if self._tac.emit_mean else spikes

    def _merged_steps(self, x: Tensor, steps: int) -> Tensor:
        """One step per frame: ``h = r + beta^K (v - r) + gamma S_K I`` (``gamma I`` where not normalised)."""
        place = self._tac
        before = Span(place.span.merged // place.merge, place.merge)
        v = host.take_state(self, x)
        rest = host.resting_voltage(self)
        beta, gain = host.decay(self, v.dtype), host.input_gain(self, v.dtype)
        spikes, voltages = [], []
        for drive, length in zip(x.unbind(), before.inner_steps(steps), strict=True):
            scale = gain * temporal_sum(beta, length) if place.normalize else gain
            spike, v = host.fire_and_reset(self, rest + beta**length * (v - rest) + scale * drive.to(v.dtype))
            spikes.append(spike)
            voltages.append(v)
        host.put_state(self, v, voltages)
        return torch.stack(spikes).to(x.dtype)


class TACLIFNode(_PlacedNode, neuron.LIFNode):
    """LIFNode of a converted net."""


class TACIFNode(_PlacedNode, neuron.IFNode):
    """IFNode of a converted net."""


class TACParametricLIFNode(_PlacedNode, neuron.ParametricLIFNode):
    """ParametricLIFNode of a converted net."""


class _PlacedNorm(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm that may be frozen, and whose batch statistics weigh a frame by the steps it stands for."""

    _tac: NormPlace

    def train(self, mode: bool = True) -> Any:
        return super().train(mode and not self._tac.frozen)

    def forward(self, x: Tensor) -> Tensor:
        place = self._tac
        if self.training:
            place.moved = place.moved or place.aggregated
        if place.fused is not None:
            return place.fused.normalize(self, x, super().forward)
        if not self.training:
            return super().forward(x)
        steps = place.timeline.steps if place.timeline.grouped else None
        if steps is not None and not place.span.is_plain and steps % place.span.factor:
            lengths = place.span.lengths(steps)
            return reference.first(super().forward(reference.repeat(x, lengths)), lengths)
        return super().forward(x)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._tac.moved = False


class TACBatchNorm2d(_PlacedNorm, layer.BatchNorm2d):
    """BatchNorm2d of a converted net."""


class TACThresholdDependentBatchNorm2d(_PlacedNorm, layer.ThresholdDependentBatchNorm2d):
    """ThresholdDependentBatchNorm2d of a converted net."""


class TACMaxPool2d(layer.MaxPool2d):
    """MaxPool2d behind a stretched neuron: pools every step, then takes the mean of the steps of each frame."""

    _tac: Place

    def forward(self, x: Tensor) -> Tensor:
        if self.step_mode == "s":
            result: Tensor = super().forward(x)
            return result
        if self._tac.fused is not None:
            return x
        span = self._tac.span
        return Place(self._tac.timeline, span.unstretched()).run(x, span, self._pool)

    def _pool(self, x: Tensor, steps: int) -> Tensor:
        return reference.mean(super().forward(x), self._tac.span.inner_steps(steps))


class TACAvgPool2d(layer.AvgPool2d):
    """AvgPool2d that a fused chain has absorbed; frames that are means of steps it may average as they are."""

    _tac: Place

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x if self._tac.fused is not None and self.step_mode == "m" else super().forward(x)
        return result


SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    neuron.LIFNode: TACLIFNode,
    neuron.IFNode: TACIFNode,
    neuron.ParametricLIFNode: TACParametricLIFNode,
    layer.BatchNorm2d: TACBatchNorm2d,
    layer.ThresholdDependentBatchNorm2d: TACThresholdDependentBatchNorm2d,
    layer.MaxPool2d: TACMaxPool2d,
    layer.AvgPool2d: TACAvgPool2d,
}
CONV_SWAPS: dict[str, type[nn.Module]] = {"preserve": TACTPConv2d, "collapse": TACConv2d}
_SOURCES = {new: old for old, new in SWAPS.items()} | dict.fromkeys(CONV_SWAPS.values(), layer.Conv2d)


def source_class(module: nn.Module) -> type[nn.Module]:
    """The class of the module in the source net."""
    return _SOURCES.get(type(module), type(module))


def is_swapped(module: nn.Module) -> bool:
    """True for the modules of a converted chain."""
    return type(module) in _SOURCES
