"""What the convs of converted chains become: they call the convolution once for each group of frames."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import InputError, PlanNotKeptWarning
from sj_tac.host import layer
from sj_tac.kernels import aggregate as aggregation
from sj_tac.kernels import reference
from sj_tac.kernels.weights import decay_weights, learned_weights
from sj_tac.runtime.borders import PLAIN, Borders, Span
from sj_tac.runtime.expressions import SharedExpression
from sj_tac.runtime.groups import Groups, Sums, even, single, sums
from sj_tac.runtime.table import is_usable
from sj_tac.runtime.values import Frames, Shared, Spikes, ordinary

LOGITS = "tac_logits"
# Dimensions of the frames that a layer takes, in step_mode "m", and how its errors write them.
_FRAMES = {nn.Conv1d: (4, "[T, N, C, L]"), nn.Conv2d: (5, "[T, N, C, H, W]"), nn.Conv3d: (6, "[T, N, C, D, H, W]")}


def check_frames(x: Tensor, inner: Any, name: str) -> None:
    """Raise InputError unless ``x`` is frames of what the conv or Linear takes, with its channels, and at least one."""
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


@dataclass(eq=False)
class Drive:
    """A converted conv: ``k`` source steps share one drive.

    Attributes:
        node: the neuron whose decay gives the weights; no child module, or it would be in the state_dict twice.
        span: what the trace says of the frames in front of it; takes_sums: sums were planned to come.
        backend: of the sums of frames. ran: what the last call took: "sums", "shared", "frames", "frames of a value" or
            "plain"; seen: T and the shape of the convolution's output in the last call; made: readers of its frames.
    """

    name: str
    node: nn.Module
    borders: Borders
    mode: str = "preserve"
    k: int = 2
    weights: str = "decay"
    normalize: bool = True
    spikes: str = "count"
    span: Span = PLAIN
    takes_sums: bool = False
    backend: str = reference.NAME
    ran: str = ""
    seen: tuple[int, Sequence[int]] | None = None
    made: Counter[str] = field(default_factory=Counter)
    told: bool = False
    _cache: dict[Any, Sums] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": {}, "made": Counter(self.made)}

    @property
    def frames(self) -> int:
        """Frames in a whole group, where the trace is right."""
        return max(1, self.k // self.span.stretch)

    @property
    def out(self) -> Span:
        """What the trace says of the frames behind it."""
        if self.mode == "preserve":
            return self.span
        return self.span.collapsed(max(self.k, self.span.stretch), self.spikes)

    @property
    def merges(self) -> bool:
        """True for a binary collapse: one step for ``k``."""
        return self.mode == "collapse" and self.spikes == "binary" and max(self.k, self.span.stretch) > 1

    def frames_made(self, reader: str) -> None:
        self.made[reader] += 1

    def tell(self, x: Frames) -> None:
        """Warn, once, that a value came whose sums could not be used."""
        if self.told:
            return
        self.told = True
        made = getattr(x.maker, "made", {})
        readers = ", ".join(name for name in made if name and name != self.name)
        why = "it was written, or its gradient is wanted" if not x.intact else "they are sums of other groups or weights"
        why += f" (frames were made for {readers})" if readers else ""
        warnings.warn(
            f"layer {self.name!r}: sums of frames came as was planned, but cannot be used: {why}. The call goes another way "
            "than the traced one, or the net was changed; it is slower, the result is the same",
            PlanNotKeptWarning,
            stacklevel=4,
        )

    def wants(self, of: Groups, kind: tuple[torch.dtype, torch.device], logits: Tensor | None = None) -> Sums | None:
        """What this conv sums of compact frames ``of``; None where ``k`` steps are no whole number of them."""
        first = of.steps[0]
        if self.k > first and self.k % first and len(of.steps) > 1:  # one group alone may be shorter than a whole one
            return None
        wide = reference.accumulation_dtype(kind[0])
        beta = host.decay(self.node, wide) if self.weights == "decay" else 0.0
        if isinstance(beta, Tensor) or logits is not None:
            source: Any = self.node.w if logits is None else logits
            tag = (id(source), -1 if source.is_inference() else source._version, torch.is_grad_enabled())
            return self._sums(of, beta, (wide, kind[1]), (self.weights, tag), logits)
        key = (of, kind, beta)
        found = self._cache.get(key)
        if found is None or torch.compiler.is_compiling():
            found = self._sums(of, beta, (wide, kind[1]), None, None)
            if len(self._cache) > 16:
                self._cache.clear()
            if type(found.flat) is Tensor and not torch.compiler.is_compiling():
                self._cache[key] = found
        return found

    def _sums(
        self, of: Groups, beta: float | Tensor, like: tuple[torch.dtype, torch.device], tag: object, logits: Tensor | None
    ) -> Sums:
        size = max(1, self.k // of.steps[0])
        cuts = [of.steps[i : i + size] for i in range(0, len(of.steps), size)]
        rows: list[Sequence[float | Tensor]] = []
        for i, lengths in enumerate(cuts):
            # All groups but the last are alike.
            rows.append(rows[0] if 0 < i < len(cuts) - 1 else self._row(lengths, beta, like[0], logits))
        return sums(of, size, rows, like, tag)

    def _row(
        self, lengths: tuple[int, ...], beta: float | Tensor, dtype: torch.dtype, logits: Tensor | None
    ) -> Sequence[float | Tensor]:
        """Weights of a group whose frames stand for ``lengths`` steps."""
        if len(lengths) == 1:
            return [1.0]
        if logits is not None:
            return _learned(logits, len(lengths), dtype)
        if self.weights == "uniform":
            return [length / (sum(lengths) if self.normalize else 1) for length in lengths]
        return decay_weights(beta, lengths, self.normalize)

    def aggregate(self, x: Tensor, wanted: Sums) -> Tensor:
        """The sums of compact frames or ordinary ones."""
        if wanted.sums_nothing:
            return x
        run = aggregation.RUNNERS[aggregation.choose(self.backend, x.device, x.dtype)]
        return run(x, *wanted.weights())

    def takes(self, x: Frames) -> bool:
        """True where the compact form of a value will do: what the frames' own sums would be is known from it."""
        if not isinstance(x, Shared) or not is_usable(x) or not x.is_bare or x.merges:
            return False
        groups = x.expression.groups
        if x.means is not None:
            whole = self.k <= groups.steps[0] or self.k % groups.steps[0] == 0 or len(groups.steps) == 1
            return x.means == groups and whole
        if groups.steps is not groups.frames:
            return True
        # Repeated frames: weights that sum to 1 give them back.
        whole = self.k % groups.steps[0] == 0 or groups.steps[0] % self.k == 0
        return self.normalize and self.weights != "learned" and whole

    def emit(self, y: Tensor, wanted: Sums, x: Any) -> Shared:
        """The value of drives ``y``, one for each group of ``wanted``, of what came as ``x``."""
        groups = wanted.groups
        means = x.means if isinstance(x, Shared) else None
        if self.mode == "collapse" and self.spikes == "count":
            means = groups if groups.steps[0] > 1 else None
        value = Shared.of(SharedExpression(y, groups), means)
        value.maker = self
        if self.merges and groups.steps[0] > 1:
            value.merges, value.normalize, value.means = True, self.normalize, None
        return value


def _learned(logits: Tensor, frames: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """Learned weights of ``frames`` frames; where a group has more frames than were planned, each weight is shared out."""
    if frames <= len(logits):
        return learned_weights(logits, frames, dtype)
    learned, each = learned_weights(logits, len(logits), dtype), -(-frames // len(logits))
    shared = [learned[len(logits) - 1 - (frames - 1 - j) // each] / each for j in range(frames)]
    total: Tensor = torch.stack(shared).sum()
    return [w / total for w in shared]


class DriveModule(nn.Module):
    """The conv of a converted chain, or the container that begins with it. See the subclasses."""

    _tac: Drive
    # Dimensions of the frames, where the layer is a conv itself: most calls are checked by these.
    _rank = 0
    in_channels: int

    def inner(self) -> Any:
        """The layer that has the weights."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        if not host.is_multi_step(self):
            result: Tensor = super().forward(x)
            return result
        drive, logits = self._tac, self._parameters.get(LOGITS)
        if drive.borders.are_plain:
            return self._on_frames(ordinary(x, drive.name))
        if not isinstance(x, Frames):
            self._check(x)
            wanted = drive.wants(single(x.shape[0]), (x.dtype, x.device), logits)
            assert wanted is not None
            drive.ran, summed = "frames", drive.aggregate(x, wanted)
            steps = x.shape[0]
        else:
            wanted, summed = self._of_value(x, logits)
            steps = x.steps
            self._check(summed)
        y: Tensor = super().forward(summed)
        drive.seen = (steps, y.shape)
        return drive.emit(y, wanted, x)

    def _of_value(self, x: Frames, logits: Tensor | None) -> tuple[Sums, Tensor]:
        """The sums of a value, by the shortest way that it allows."""
        drive = self._tac
        if isinstance(x, Shared) and drive.takes(x):
            wanted = drive.wants(x.expression.groups, x.kind, logits)
            if wanted is not None:
                drive.ran = "shared"
                x.note_use()
                return wanted, drive.aggregate(x.expression.mapped(), wanted)
        wanted = drive.wants(single(x.steps), x.kind, logits)
        assert wanted is not None
        if isinstance(x, Spikes) and x.sums and is_usable(x):
            found = x.sums.get(wanted)
            if found is not None:
                drive.ran = "sums"
                x.note_use()
                return wanted, found
        drive.ran = "frames of a value"
        found = x.frames(drive.name)
        if isinstance(x, Spikes) and x.sums and not wanted.sums_nothing:
            drive.tell(x)
        return wanted, drive.aggregate(found, wanted)

    def _on_frames(self, x: Tensor) -> Tensor:
        """The definition: frames in, each group's drive as often as it has frames out."""
        drive, logits = self._tac, self._parameters.get(LOGITS)
        self._check(x)
        if not torch.compiler.is_compiling():
            drive.ran = "plain"
        lengths = list(drive.span.lengths(x.shape[0]))
        # Behind a collapse all frames of a group are alike; their mean is what they are.
        compact = reference.mean_of_alike(x, lengths)
        steps = even(-(-x.shape[0] // drive.span.merged), drive.span.stretch)
        groups = Groups(steps.steps, tuple(lengths), drive.span.merged)
        wanted = drive.wants(groups, (x.dtype, x.device), logits)
        assert wanted is not None
        y: Tensor = super().forward(drive.aggregate(compact, wanted))
        if not torch.compiler.is_compiling():
            drive.seen = (x.shape[0], y.shape)
        return reference.repeat(y, wanted.groups.frames)

    def _check(self, x: Tensor) -> None:
        """Raise InputError where ``x`` is not frames that this layer takes."""
        shape = x.shape
        if len(shape) != self._rank or shape[2] != self.in_channels or not shape[0]:
            check_frames(x, self.inner(), self._tac.name)

    def macs(self) -> tuple[int, int] | None:
        """T and multiply-accumulates per frame and sample of the last call; None where they cannot be known from it."""
        if self._tac.seen is None:
            return None
        steps, shape = self._tac.seen
        weight = self.inner().weight
        return steps, math.prod(shape[2:]) * (weight.numel() // weight.shape[0])

    def initial_logits(self) -> Tensor:
        """Logits whose softmax is the decay weights of a whole group, in the conv's dtype: [frames]."""
        drive = self._tac
        with torch.no_grad():
            beta = host.decay(drive.node, torch.float64)
        weights = decay_weights(float(beta), [drive.span.stretch] * drive.frames)
        return torch.tensor(weights, dtype=torch.float64).log().to(self.inner().weight)

    def extra_repr(self) -> str:
        drive = self._tac
        shown = f"{super().extra_repr()}, k={drive.k}, weights={drive.weights}"
        return shown if drive.normalize else shown + ", normalize=False"

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
            f"layer {self._tac.name!r}: nn.DataParallel replicas would share one neuron state; "
            "use torch.nn.parallel.DistributedDataParallel, or sj_tac.restore the net first"
        )


class TACTPConv1d(DriveModule, layer.Conv1d):
    """TAC-TP, "preserve": one convolution for k frames; its drive is shared, so T stays. [T, N, C, L] in and out."""

    _rank = 4


class TACTPConv2d(DriveModule, layer.Conv2d):
    """TAC-TP, "preserve": one convolution for k frames; its drive is shared, so T stays. [T, N, C, H, W] in and out."""

    _rank = 5


class TACTPConv3d(DriveModule, layer.Conv3d):
    """TAC-TP, "preserve": one convolution for k frames; its drive is shared, so T stays. [T, N, C, D, H, W] in and out."""

    _rank = 6


class TACTPLinear(DriveModule, layer.Linear):
    """TAC-TP, "preserve": one product for k frames; its drive is shared, so T stays. [T, N, ..., F] in and out."""


class TACConv1d(DriveModule, layer.Conv1d):
    """TAC, "collapse": one convolution for k frames, which are one behind the neuron. [T, N, C, L] in and out."""

    _rank = 4


class TACConv2d(DriveModule, layer.Conv2d):
    """TAC, "collapse": one convolution for k frames, which are one behind the neuron. [T, N, C, H, W] in and out."""

    _rank = 5


class TACConv3d(DriveModule, layer.Conv3d):
    """TAC, "collapse": one convolution for k frames, which are one behind the neuron. [T, N, C, D, H, W] in and out."""

    _rank = 6


class TACLinear(DriveModule, layer.Linear):
    """TAC, "collapse": one product for k frames, which are one behind the neuron. [T, N, ..., F] in and out."""


class _Container(DriveModule, layer.SeqToANNContainer):
    def inner(self) -> Any:
        return self[0]

    def macs(self) -> tuple[int, int] | None:
        # Pools behind the conv hide how large its own output was; the first run of the source net has seen it.
        pools = any(isinstance(m, (*host.ANY_MAX_POOLS, *host.INNER_AVG_POOLS)) for m in self)
        return None if pools else super().macs()


class TACTPSeqToANNContainer(_Container):
    """TAC-TP, "preserve", of a container conv -> [norm] -> [pool]; frames in and out."""


class TACSeqToANNContainer(_Container):
    """TAC, "collapse", of a container conv -> [norm] -> [pool]; frames in and out."""


DRIVE_SWAPS: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
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
