"""What the convs of converted chains become: they call the convolution once for each group of frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import InputError
from sj_tac.host import layer
from sj_tac.kernels import aggregate as aggregation
from sj_tac.kernels import reference
from sj_tac.kernels.weights import decay_weights, learned_weights
from sj_tac.runtime.places import DrivePlace
from sj_tac.runtime.values import SharedDrive

LOGITS = "tac_logits"
# Dimensions of the frames that a layer takes, in step_mode "m", and how its errors write them.
_FRAMES = {nn.Conv1d: (4, "[T, N, C, L]"), nn.Conv2d: (5, "[T, N, C, H, W]"), nn.Conv3d: (6, "[T, N, C, D, H, W]")}


def check_frames(x: Tensor, inner: Any, name: str) -> None:
    """Raises InputError unless ``x`` is frames of what the conv or Linear takes, with its channels, and at least one."""
    if isinstance(inner, nn.Linear):
        if x.dim() < 3 or x.shape[0] == 0 or x.shape[-1] != inner.in_features:
            raise InputError(
                f"layer {name!r} takes frames [T, N, ..., F] with T >= 1 and F={inner.in_features}, "
                f"got a tensor of shape {list(x.shape)}; stack the time steps in front, T first"
            )
        return
    dims, shape = next(value for kind, value in _FRAMES.items() if isinstance(inner, kind))
    if x.dim() != dims or x.shape[0] == 0 or x.shape[2] != inner.in_channels:
        raise InputError(
            f"layer {name!r} takes frames {shape} with T >= 1 and C={inner.in_channels}, "
            f"got a tensor of shape {list(x.shape)}; stack the time steps in front, T first"
        )


class SharedDriveSite(nn.Module):
    """The conv of a converted chain, or the container that begins with it. See the subclasses."""

    _tac: DrivePlace

    def inner(self) -> Any:
        """The layer that has the weights."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        if not host.is_multi_step(self):
            result: Tensor = super().forward(x)
            return result
        place = self._tac
        junction = place.junction
        arriving = junction is not None and junction.is_open and place.timeline.grouped
        if not arriving:
            check_frames(x, self.inner(), place.name)
        if place.timeline.grouped and place.timeline.steps is None:
            # The first layer of the running call: nothing was collapsed before it, so its frames are the input's.
            place.timeline.steps = x.shape[0] * place.span.factor
        steps = junction.steps if junction is not None and arriving else self._steps(x)
        direct = place.fusion is not None and place.fusion.begin(steps)
        if not (arriving or direct):
            return place.run(x, place.out, self._drive)
        groups = place.groups(steps)
        y: Tensor = super().forward(x if arriving else self._aggregate(x, groups))
        self._see(steps, y)
        return y if direct else self._hand_on(y, groups)

    def _steps(self, x: Tensor) -> int:
        """T of the running call."""
        return x.shape[0] if self._tac.span.is_plain else int(self._tac.timeline.steps or x.shape[0])

    def _see(self, steps: int, y: Tensor) -> None:
        if not torch.compiler.is_compiling():
            weight = self.inner().weight
            per_frame = y.numel() // max(1, y.shape[0] * y.shape[1])
            self._tac.seen = (steps, per_frame * (weight.numel() // weight.shape[0]))

    def _drive(self, x: Tensor, steps: int) -> Tensor:
        groups = self._tac.groups(steps)
        y: Tensor = super().forward(self._aggregate(x, groups))
        self._see(steps, y)
        return self._hand_on(y, groups)

    def _hand_on(self, y: Tensor, groups: list[list[int]]) -> Tensor:
        """The drives of all groups, at the rate of what is behind."""
        place, lengths = self._tac, [len(g) for g in groups]
        if place.mode != "preserve":
            return y
        lazily = place.shares and place.timeline.grouped and lengths[0] > 1
        if lazily and not torch.compiler.is_compiling() and not host.has_user_hooks(self):
            return SharedDrive.of(y, lengths)
        return reference.repeat(y, lengths)

    def _aggregate(self, x: Tensor, groups: list[list[int]]) -> Tensor:
        if len(groups) == x.shape[0]:
            return x
        # The last group alone can differ: fewer frames, or a last frame that stands for fewer steps.
        ragged = groups[-1] != groups[0]
        tail = self.group_weights(groups[-1], x.dtype) if ragged else ()
        run = aggregation.RUNNERS[aggregation.choose(self._tac.backend, x.device, x.dtype)]
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
        return torch.tensor(weights, dtype=torch.float64).log().to(self.inner().weight)

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


class TACTPConv1d(SharedDriveSite, layer.Conv1d):
    """TAC-TP, "preserve": one convolution for k frames; its drive is repeated, so T stays. [T, N, C, L] in and out."""


class TACTPConv2d(SharedDriveSite, layer.Conv2d):
    """TAC-TP, "preserve": one convolution for k frames; its drive is repeated, so T stays. [T, N, C, H, W] in and out."""


class TACTPConv3d(SharedDriveSite, layer.Conv3d):
    """TAC-TP, "preserve": one convolution for k frames; its drive is repeated, so T stays. [T, N, C, D, H, W] in and out."""


class TACTPLinear(SharedDriveSite, layer.Linear):
    """TAC-TP, "preserve": one product for k frames; its drive is repeated, so T stays. [T, N, ..., F] in and out."""


class TACConv1d(SharedDriveSite, layer.Conv1d):
    """TAC, "collapse": one convolution for k frames, and one frame out for k in. [T, N, C, L] -> [ceil(T/k), N, ...]."""


class TACConv2d(SharedDriveSite, layer.Conv2d):
    """TAC, "collapse": one convolution for k frames, and one frame out for k in. [T, N, C, H, W] -> [ceil(T/k), N, ...]."""


class TACConv3d(SharedDriveSite, layer.Conv3d):
    """TAC, "collapse": one convolution for k frames, and one frame out for k in. [T, N, C, D, H, W] -> [ceil(T/k), ...]."""


class TACLinear(SharedDriveSite, layer.Linear):
    """TAC, "collapse": one product for k frames, and one frame out for k in. [T, N, ..., F] -> [ceil(T/k), N, ...]."""


class _Container(SharedDriveSite, layer.SeqToANNContainer):
    def inner(self) -> Any:
        return self[0]

    def _see(self, steps: int, y: Tensor) -> None:
        # Pools behind the conv hide how large its own output was; the first run of the source net has seen it.
        if not any(isinstance(m, (*host.ANY_MAX_POOLS, *host.INNER_AVG_POOLS)) for m in self):
            super()._see(steps, y)


class TACTPSeqToANNContainer(_Container):
    """TAC-TP, "preserve", of a container conv -> [norm] -> [pool]; frames in and out."""


class TACSeqToANNContainer(_Container):
    """TAC, "collapse", of a container conv -> [norm] -> [pool]; frames in, one for k of them out."""


SITE_SWAPS: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
    "preserve": {
        layer.Conv1d: TACTPConv1d,
        layer.Conv2d: TACTPConv2d,
        layer.Conv3d: TACTPConv3d,
        layer.Linear: TACTPLinear,
        layer.SeqToANNContainer: TACTPSeqToANNContainer,
    },
    "collapse": {
        layer.Conv1d: TACConv1d,
        layer.Conv2d: TACConv2d,
        layer.Conv3d: TACConv3d,
        layer.Linear: TACLinear,
        layer.SeqToANNContainer: TACSeqToANNContainer,
    },
}
