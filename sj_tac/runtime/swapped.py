"""What the neurons, norms and pools of converted chains become, and which class becomes which.

A swap changes ``module.__class__`` and adds one plain attribute, ``_tac``, so the module keeps its path, its parameters
and their names. Every class here and in drives.py is static and importable, which is what pickling needs.

Inside the converted net's own call (``timeline.grouped``) frames behind a collapse travel at their own rate. Called from
outside, a module takes and returns frames at the rate of the input, with the same values: it thins what comes in and
repeats what goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.host import layer, neuron
from sj_tac.kernels import reference
from sj_tac.kernels.weighted_norm import weighted_batch_norm
from sj_tac.kernels.weights import temporal_sum
from sj_tac.runtime.drives import SITE_SWAPS
from sj_tac.runtime.places import FiringPlace, NormPlace, Place
from sj_tac.runtime.spans import Span
from sj_tac.runtime.values import SharedDrive


class _PlacedNode(neuron.BaseNode):
    """A neuron on a time axis whose frames may stand for several steps. Its voltage is float32 for half inputs."""

    _tac: FiringPlace

    def materialize_states(self, inputs: tuple[Any, ...], states: tuple[Any, ...], step_mode: str) -> tuple[Any, ...]:
        x = inputs[0]
        wide = host.wide_dtype(x.dtype)
        if step_mode == "m" and x.dtype != wide and self._neuron_precision is None:
            # The host keeps the voltage in the input's dtype; a decay of a half voltage loses small drives for good.
            state, *others = super().materialize_states((x[:1].to(wide), *inputs[1:]), states, step_mode)
            return (state, *others)
        materialized: tuple[Any, ...] = super().materialize_states(inputs, states, step_mode)
        return materialized

    def multi_step_forward(self, x_seq: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place = self._tac
        unit = place.fusion
        if unit is not None and (unit.active and place.timeline.grouped if unit.site is not None else unit.begin()):
            return unit.fire(x_seq)
        if isinstance(x_seq, SharedDrive):
            x_seq = x_seq.frames()
        if place.merge > 1:
            return place.run(x_seq, place.out, self._merged_steps)
        if place.span.is_plain:
            return self._steps(x_seq)
        return place.run(x_seq, place.out, self._stretched_steps)

    def _steps(self, x: Tensor) -> Tensor:
        # The older host makes a voltage of its input's dtype, so that is what widens it.
        spikes: Tensor = super().multi_step_forward(x if host.IS_V2 else x.to(host.wide_dtype(x.dtype)))
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


class _LearningNorm(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm that may be frozen, and that remembers whether it learnt from aggregated frames."""

    _tac: NormPlace

    def train(self, mode: bool = True) -> Any:
        return super().train(mode and not self._tac.frozen)

    def forward(self, x: Tensor) -> Tensor:
        self._note_learning()
        result: Tensor = super().forward(x)
        return result

    def _note_learning(self) -> None:
        if self.training:
            self._tac.moved = self._tac.moved or self._tac.aggregated

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._tac.moved = False


class _PlacedNorm(_LearningNorm):
    """A BatchNorm whose batch statistics weigh a frame by the steps it stands for."""

    _is_plain_norm = True

    def forward(self, x: Tensor) -> Tensor:
        place = self._tac
        unit = place.fused
        if unit is not None:
            return x if unit.absorbs_norm and not self.training else self._of_drives(x, unit.lengths())
        if isinstance(x, SharedDrive) and host.has_user_hooks(self):
            x = x.frames()
        if isinstance(x, SharedDrive):
            if x.is_bare and not self.training:
                return SharedDrive.of(x.drives, x.lengths, None, host.affine(self))
            return x.map(lambda drives: self._of_drives(drives, x.lengths))
        if not self.training:
            return super().forward(x)
        steps = place.timeline.steps if place.timeline.grouped else None
        if steps is not None and not place.span.is_plain and steps % place.span.factor:
            return self._of_drives(x, place.span.lengths(steps))
        return super().forward(x)

    def _of_drives(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Frames or drives that stand for several steps each: in training, statistics weigh each by its steps."""
        if not self.training or lengths[-1] == lengths[0]:
            result: Tensor = super().forward(x)
            return result
        if (
            self._is_plain_norm
            and x.dtype in (torch.float32, torch.float64)
            and not torch.is_autocast_enabled(x.device.type)
        ):
            self._note_learning()
            return weighted_batch_norm(self, x, lengths)
        return reference.first(super().forward(reference.repeat(x, lengths)), lengths)


class TACBatchNorm1d(_PlacedNorm, layer.BatchNorm1d):
    """BatchNorm1d of a converted net."""


class TACBatchNorm2d(_PlacedNorm, layer.BatchNorm2d):
    """BatchNorm2d of a converted net."""


class TACBatchNorm3d(_PlacedNorm, layer.BatchNorm3d):
    """BatchNorm3d of a converted net."""


class TACThresholdDependentBatchNorm2d(_PlacedNorm, layer.ThresholdDependentBatchNorm2d):
    """ThresholdDependentBatchNorm2d of a converted net."""

    _is_plain_norm = False  # its host scales what torch's BatchNorm gives


class InnerBatchNorm1d(_LearningNorm, nn.BatchNorm1d):
    """torch's BatchNorm1d in a container of a converted net."""


class InnerBatchNorm2d(_LearningNorm, nn.BatchNorm2d):
    """torch's BatchNorm2d in a container of a converted net."""


class InnerBatchNorm3d(_LearningNorm, nn.BatchNorm3d):
    """torch's BatchNorm3d in a container of a converted net."""


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
    layer.BatchNorm1d: TACBatchNorm1d,
    layer.BatchNorm2d: TACBatchNorm2d,
    layer.BatchNorm3d: TACBatchNorm3d,
    layer.ThresholdDependentBatchNorm2d: TACThresholdDependentBatchNorm2d,
    nn.BatchNorm1d: InnerBatchNorm1d,
    nn.BatchNorm2d: InnerBatchNorm2d,
    nn.BatchNorm3d: InnerBatchNorm3d,
    layer.MaxPool2d: TACMaxPool2d,
    layer.AvgPool2d: TACAvgPool2d,
}
_SOURCES = {new: old for swaps in (SWAPS, *SITE_SWAPS.values()) for old, new in swaps.items()}


def source_class(module: nn.Module) -> type[nn.Module]:
    """The class of the module in the source net."""
    return _SOURCES.get(type(module), type(module))


def is_swapped(module: nn.Module) -> bool:
    """True for the modules of a converted chain."""
    return type(module) in _SOURCES
