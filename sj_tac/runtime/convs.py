"""What the convs of converted chains become: they call the convolution once for each group of frames."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import InputError
from sj_tac.host import dispatch, layer
from sj_tac.kernels import reference
from sj_tac.kernels.gpu import conv_fire
from sj_tac.kernels.weights import decay_weights
from sj_tac.runtime import compiled, deferred, packing
from sj_tac.runtime.drives import Drive
from sj_tac.runtime.expressions import Later
from sj_tac.runtime.groups import Groups, Sums, even, single
from sj_tac.runtime.matched import Matchable
from sj_tac.runtime.regions import as_traced
from sj_tac.runtime.values import Frames, Shared, Spikes, ordinary

LOGITS = "tac_logits"
# What runs a Conv2d, as long as nobody has patched it.
_FORWARDS = layer.Conv2d.forward, nn.Conv2d.forward
# Dimensions of the frames that a layer takes, in step_mode "m", and how its errors write them.
_FRAMES: dict[Any, tuple[int, str]] = {
    (nn.Conv1d, nn.ConvTranspose1d): (4, "[T, N, C, L]"),
    (nn.Conv2d, nn.ConvTranspose2d): (5, "[T, N, C, H, W]"),
    (nn.Conv3d, nn.ConvTranspose3d): (6, "[T, N, C, D, H, W]"),
}


def check_frames(x: Tensor, inner: Any, name: str) -> None:
    """Raise InputError unless ``x`` is frames of what the conv or Linear takes, with its channels, and at least one."""
    if isinstance(inner, nn.Linear):
        if x.dim() < 3 or x.shape[0] == 0 or x.shape[-1] != inner.in_features:
            raise InputError(
                f"layer {name!r} takes frames [T, N, ..., F] with T >= 1 and F={inner.in_features}, "
                f"got a tensor of shape {list(x.shape)}; stack the time steps in front, T first"
            )
        return
    dims, shape = next(value for kinds, value in _FRAMES.items() if isinstance(inner, kinds))
    if x.dim() != dims or x.shape[0] == 0 or x.shape[2] != inner.in_channels:
        raise InputError(
            f"layer {name!r} takes frames {shape} with T >= 1 and C={inner.in_channels}, "
            f"got a tensor of shape {list(x.shape)}; stack the time steps in front, T first"
        )


def _can_be_rounded(frames: Tensor) -> bool:
    """Whether a layer of another dtype may take frames as they are: ordinary ones of float32, or of what was made for it."""
    return type(frames) is Tensor and frames.device.type == "cpu" and frames.dtype in (torch.float32, torch.bfloat16)


def _is_repeated(frames: Tensor) -> bool:
    """True where frames [T, ...] are one frame T times over and nobody wants the gradient of each."""
    if frames.shape[0] == 1 or (frames.requires_grad and torch.is_grad_enabled()) or dispatch.is_transformed():
        return False
    if frames.stride(0) == 0:
        return True
    # Event frames differ in the first two.
    return torch.equal(frames[0], frames[1]) and torch.equal(frames[1:], frames[:1].expand_as(frames[1:]))


class DriveModule(Matchable):
    """The conv of a converted chain, or the container that begins with it. See the subclasses."""

    _tac: Drive
    _corrected = "bias"
    # Dimensions of the frames, where the layer is a conv itself: most calls are checked by these.
    _rank = 0
    # One of torch's own layers, which takes folded frames [T * N, ...].
    _folds = False
    # Each element of the input, not of the output, takes one filter's multiplications.
    _counts_input = False
    in_channels: int
    out_channels: int

    def inner(self) -> Any:
        """The layer that has the weights."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        held = self.__dict__
        # host.is_multi_step, where it is quick to say so.
        if held.get("_step_mode") != "m" and not host.is_multi_step(self):
            return self._layer(x)
        drive, logits = self._tac, held["_parameters"].get(LOGITS)
        wanted: Sums | None
        if not drive.borders.entered and not isinstance(x, Frames):
            drive.borders.look()
        if drive.batch_first or drive.borders.are_plain:
            return self._on_frames(ordinary(x, drive.name))
        if drive.borders.collapses and drive.borders.go_by_trace():
            x = as_traced(x, drive.name, drive.span, unfold=self._frames if self._folds else None)
        if isinstance(x, Frames) and (x.folded is not None) is self._folds:
            of_value, summed = self._of_value(x, logits)
            wanted, groups, steps = of_value, of_value.groups, x.steps
            shape = summed.shape
            if len(shape) != self._rank or shape[2] != self.in_channels or not shape[0]:
                check_frames(summed, self.inner(), drive.name)
        else:
            x = ordinary(x, drive.name)
            frames = self._frames(x)
            if frames is None:
                drive.ran = "single frames"
                return self._layer(x)
            steps = frames.shape[0]
            if drive.repeated and drive.borders.alike and drive.borders.fused and _is_repeated(frames):
                drive.ran, wanted, summed, groups = "one frame", None, frames[:1], even(steps, steps)
            else:
                wanted = drive.wants(single(steps), (x.dtype, x.device), logits)
                assert wanted is not None
                drive.ran, summed, groups = "frames", drive.aggregate(frames, wanted), wanted.groups
        y = self._run(summed, x, wanted)
        drive.seen = (steps, summed.shape if self._counts_input else y.shape)
        return drive.emit(y, groups, x, y.shape[1] if self._folds else None)

    def _layer(self, x: Tensor) -> Tensor:
        """The source's own layer, in the dtype that was asked for; what comes out has that of ``x``."""
        result: Tensor
        narrowing = self._narrowing(x)
        if narrowing is None:
            result = super().forward(x)
            return result
        with narrowing:
            result = super().forward(x)
        return result.to(x.dtype)

    def _narrowing(self, x: Tensor) -> AbstractContextManager[Any] | None:
        """In the dtype that was asked for, whatever a forward of the user's calls: weights that are made anew, another
        function's convolution. None for frames that may not be rounded: not of float32, or the user's autocast does it.
        """
        dtype, kind = self._tac.dtype, x.device.type
        if dtype is None or x.dtype is not torch.float32:
            return None
        plain = torch.amp.is_autocast_available(kind) and not dispatch.autocasts(kind)
        return torch.autocast(kind, dtype) if plain else None

    def _run(self, frames: Tensor, *_: Any) -> Tensor | Later:
        """The source's own layer on compact frames [G, N, ...]."""
        if not self._folds:
            return self._layer(frames)
        y = self._layer(frames.flatten(0, 1))
        return y.reshape(*frames.shape[:2], *y.shape[1:])

    def _run_2d(self, frames: Tensor, x: Any, wanted: Sums | None) -> Tensor | Later:
        """What ``layer.Conv2d`` computes on [G, N, C, H, W], without its way there, which costs as much as a small map.

        A large one may be run later, by the neuron behind it. ``x``: what ``frames`` were made of; ``wanted``: how.
        """
        parameters: Any = self._parameters
        dtype = self._tac.dtype
        if not self._tac.borders.fused:
            return DriveModule._run(self, frames)
        narrow = None if dtype is None else self.narrows()
        if not self._runs_parameters() or (dtype is not None and (narrow is None or not _can_be_rounded(frames))):
            return DriveModule._run(self, frames)
        large = 8 * frames.numel() * self.out_channels >= deferred.LARGE * self.in_channels
        if large or (self.in_channels <= conv_fire.FEW and deferred.may_be_one(self, frames)):
            # Sums are nobody else's, where anything was summed at all.
            owned = self._tac.ran == "sums" or (wanted is not None and not wanted.sums_nothing)
            later = deferred.defer(self, x, frames, owned, narrow)
            if later is not None:
                return later
        inner: Any = self
        folded, weight, bias = frames.flatten(0, 1), parameters["weight"], parameters["bias"]
        folded = folded if narrow is None else folded.to(narrow)
        # Contiguous ones torch convolves in another layout.
        y = None if folded.is_contiguous() and weight.is_contiguous() else packing.convolve(self, folded)
        if y is None:
            if narrow is not None:
                # Rounded in every call: it costs what a look whether they are still the same would cost.
                weight, bias = weight.to(narrow), None if bias is None else bias.to(narrow)
            y = inner._conv_forward(folded, weight, bias)
        y = y.view(*frames.shape[:2], *y.shape[1:])
        return y if narrow is None else deferred.Narrow(y, parameters["weight"].dtype)

    def _run_folded_2d(self, frames: Tensor, *_: Any) -> Tensor:
        """What torch's own Conv2d computes on the folded frames of [G, N, C, H, W]."""
        folded = frames.flatten(0, 1)
        y = packing.convolve(self, folded) if self._tac.dtype is None and self._runs_parameters() else None
        y = self._layer(folded) if y is None else y
        return y.reshape(*frames.shape[:2], *y.shape[1:])

    def _runs_parameters(self) -> bool:
        """Whether a Conv2d runs the host's own forward on the parameters that it holds."""
        held, own = self._parameters, self.__dict__
        # A subclass of the user's, and one that a parametrization made, have a forward of their own; so may the host's class
        # that somebody patched. Pruned weights are made anew on every call, in front of the parameter.
        plain = "_run" in type(self).__dict__ and getattr(super().forward, "__func__", None) is _FORWARDS[self._folds]
        plain = plain and nn.Conv2d.forward is _FORWARDS[1] and held.get("weight") is not None and "bias" in held
        return plain and "weight" not in own and "bias" not in own

    def narrows(self) -> torch.dtype | None:
        """The dtype in which the kernels read and write what this layer does; None where it is the net's own.

        They know bfloat16 on the CPU. Elsewhere, and where somebody differentiates, frames are rounded beside them.
        """
        dtype = self._tac.dtype
        if dtype is not torch.bfloat16 or self._folds or torch.is_grad_enabled() or not self._runs_parameters():
            return None
        return dtype if deferred.is_own(self) and not torch.is_autocast_enabled("cpu") else None

    def _frames(self, x: Tensor) -> Tensor | None:
        """What came as frames [T, N, ...]; None where they were folded and nobody knows how."""
        frames: Tensor | None = x
        if self._folds:
            call = self._tac.borders.now(x.shape[0]) if x.dim() else None
            frames = None if call is None else call.frames(x, self._tac.batch_first)
            if frames is None and self._tac.k > 1:
                raise InputError(
                    f"layer {self._tac.name!r} is handed {list(x.shape)}, and nobody says how time is folded there"
                    + (f" (the net's input has T={call.steps}, N={call.batch})" if call is not None else "")
                    + ": call the converted net itself, not a part or a method of it, nor one with a copy of this layer; "
                    "set_k(net, 1) runs single frames"
                )
        elif self._tac.batch_first and x.dim() > 1:
            frames = x.transpose(0, 1)
        if frames is not None:
            self._check(frames)
        return frames

    def _as_given(self, frames: Tensor) -> Tensor:
        """Frames [T, N, ...] with time where this layer is handed it."""
        frames = frames.transpose(0, 1) if self._tac.batch_first else frames
        return frames.flatten(0, 1) if self._folds else frames

    def _takes(self, narrowed: tuple[Sums, Tensor], wanted: Sums) -> bool:
        """Whether sums that were made in another dtype are these, and this layer reads that dtype in this call."""
        return narrowed[0] == wanted and narrowed[1].dtype is self.narrows()

    def _of_value(self, x: Frames, logits: Tensor | None) -> tuple[Sums, Tensor]:
        """The sums of a value, by the shortest way that it allows."""
        drive = self._tac
        if isinstance(x, Shared) and drive.takes(x):
            groups, frames = drive.compact(x)
            wanted = drive.wants(groups, x.kind, logits)
            if wanted is not None:
                drive.ran = "shared"
                x.note_use()
                return wanted, drive.aggregate(frames, wanted)
        wanted = drive.wants(single(x.steps), x.kind, logits)
        assert wanted is not None
        recorded = torch.is_grad_enabled()
        looks = recorded or x._made is not None or x._viewed is not None
        if isinstance(x, Spikes) and x.narrowed is not None and (not looks or x.intact) and self._takes(x.narrowed, wanted):
            drive.ran = "sums"
            return x.narrowed
        if isinstance(x, Spikes) and x.sums and (not looks or x.intact):
            # The reader that was planned finds its own: to compare weights costs more than to look.
            (planned, found), *_ = x.sums.items()
            if planned is not wanted:
                found = x.sums.get(wanted)  # type: ignore[assignment]
            if found is not None:
                drive.ran = "sums"
                if recorded:
                    x.note_use()
                return wanted, found
        drive.ran = "frames of a value"
        found = x.frames(drive.name)
        if x.folded is not None:
            found = found.reshape(x.steps, x.folded, *found.shape[1:])
        if isinstance(x, Spikes) and x.sums and not wanted.sums_nothing:
            drive.tell(x)
        return wanted, found if wanted.sums_nothing else drive.aggregate(found, wanted)

    def _on_frames(self, x: Tensor) -> Tensor:
        """The definition: frames in, each group's drive as often as it has frames out."""
        drive, logits, compiling = self._tac, self._parameters.get(LOGITS), torch.compiler.is_compiling()
        frames = self._frames(x)
        if frames is None:
            return self._layer(x)
        lengths: tuple[int, ...]
        # A compiled call cannot look whether frames are alike: it runs all of them.
        if drive.repeated and (compiling or _is_repeated(frames)):
            single = compiling or not (drive.borders.alike and drive.borders.fused)
            summed, lengths = (frames, (1,)) if single else (frames[:1], (frames.shape[0],))
        elif compiled.is_free(frames):
            return self._on_free_frames(frames, logits)
        else:
            summed, lengths = self._sums_of_frames(frames, logits)
        if drive.batch_first and summed is frames:
            # In the order that they came in: rows in another order may be other bits.
            given = self._layer(x)
            repeated = given[None] if self._folds else given
        else:
            repeated = self._run_repeated(summed, lambda y: reference.repeat(y, lengths))
            given = self._as_given(repeated)
        if not compiling:
            drive.ran, drive.seen = "plain", (frames.shape[0], summed.shape if self._counts_input else repeated.shape)
        return given

    def _run_repeated(self, summed: Tensor, repeat: Callable[[Tensor], Tensor]) -> Tensor:
        """What the layer computes on compact frames, as often as each stands for frames.

        By the host's own layer: what compiles or traces this cannot follow the short way.
        """
        y: Any = DriveModule._run(self, summed)
        return repeat(y)

    def _on_free_frames(self, frames: Tensor, logits: Tensor | None) -> Tensor:
        """The same of any number of frames, in a call that torch compiles."""
        summed, size = self._tac.sums_of_free_frames(frames, logits)
        repeated = self._run_repeated(summed, lambda y: compiled.repeat(y, size, frames.shape[0]))
        return self._as_given(repeated)

    def _sums_of_frames(self, x: Tensor, logits: Tensor | None) -> tuple[Tensor, tuple[int, ...]]:
        """The sums of ordinary frames by the trace's span, and how many frames each is for."""
        drive = self._tac
        lengths = list(drive.span.lengths(x.shape[0]))
        # Behind a collapse all frames of a group are alike; their mean is what they are.
        compact = reference.mean_of_alike(x, lengths)
        steps = even(-(-x.shape[0] // drive.span.merged), drive.span.stretch)
        # One object for both says that there is no binary collapse, to whoever takes these sums from the cache, too.
        apart = steps.steps if drive.span.merged == 1 else tuple(lengths)
        groups, keeps = Groups(steps.steps, apart, drive.span.merged), not torch.compiler.is_compiling()
        wanted = drive.wants(groups, (x.dtype, x.device), logits, keeps)
        assert wanted is not None
        return drive.aggregate(compact, wanted), wanted.groups.frames

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
        return steps, math.prod(shape[2:]) * host.filter_size(self.inner())

    def initial_logits(self) -> Tensor:
        """Logits whose softmax is the decay weights of a whole group, in the conv's dtype: [frames]."""
        drive = self._tac
        with torch.no_grad():
            beta = host.decay(drive.node, torch.float64)
        weights = decay_weights(float(beta), [drive.span.stretch] * drive.frames)
        return torch.tensor(weights, dtype=torch.float64, device="cpu").log().to(host.held_weight(self.inner()))

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
