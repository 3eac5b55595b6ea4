"""What the norms, pools and Dropouts of a converted net become: they act on what is in front of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.host import dispatch, layer
from sj_tac.kernels import backends, norm_map, reference
from sj_tac.kernels.layout import laid
from sj_tac.kernels.weighted_norm import weighted_batch_norm
from sj_tac.kernels.weights import group_lengths
from sj_tac.runtime import compiled
from sj_tac.runtime.borders import PLAIN, Borders, Span
from sj_tac.runtime.entries import is_of_mode, is_usable
from sj_tac.runtime.expressions import Computed, SharedExpression, over
from sj_tac.runtime.groups import Groups
from sj_tac.runtime.marks import defined
from sj_tac.runtime.matched import Matchable
from sj_tac.runtime.values import Shared, Spikes, ordinary


@dataclass(eq=False)
class Norm:
    """A BatchNorm that may be frozen, and that remembers whether it learnt from aggregated frames.

    Attributes:
        fits: what a correction of its statistics is fitted to; matched: what they were corrected for, empty where they
            were not.
    """

    name: str
    borders: Borders
    aggregated: bool = False
    frozen: bool = False
    moved: bool = False
    fits: str = ""
    matched: str = ""
    _affine: host.Affine = field(default_factory=host.Affine, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_affine": host.Affine()}


@dataclass(eq=False)
class Pool:
    """A pool or Dropout behind a neuron. ``means``: it takes the mean of each group's steps, by the trace's ``span``."""

    name: str
    borders: Borders
    span: Span = PLAIN
    means: bool = False


@dataclass(eq=False)
class Affine:
    """A module of a registered class, which in eval mode is the same affine map of every sample."""

    name: str
    borders: Borders


class AffineModule(nn.Module):
    """A module of a registered class: of frames that steps share, it runs on the compact ones alone."""

    _tac: Affine

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        alone = not args and not kwargs and not self.training
        if not alone or not isinstance(x, Shared) or not x.intact or not x.is_bare or x.merges:
            return super().forward(ordinary(x, self._tac.name), *args, **kwargs)
        compact = x.expression.mapped()
        if x.folded is None:
            return x.like(super().forward(compact))
        mapped = super().forward(compact.flatten(0, 1))
        return x.like(mapped.reshape(*compact.shape[:2], *mapped.shape[1:]), x.folded)


class _LearningNorm(Matchable, nn.modules.batchnorm._BatchNorm):
    """A BatchNorm that may be frozen, and that remembers whether it learnt from aggregated frames."""

    _tac: Norm

    def train(self, mode: bool = True) -> Any:
        return super().train(mode and not self._tac.frozen)

    def forward(self, x: Tensor) -> Tensor:
        self._note_learning()
        result: Tensor = super().forward(x)
        return result

    def _note_learning(self) -> None:
        if self.training:
            self._tac.moved = self._tac.moved or self._tac.aggregated

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + self._corrected in state_dict:
            self._tac.moved = False


class NormModule(_LearningNorm):
    """A BatchNorm that notes its affine map on drives; in training its statistics weigh a drive by the steps it is for."""

    _is_plain_norm = True
    _folds = False

    def forward(self, x: Tensor) -> Tensor:
        # Written out where that is quicker: Shared.is_bare, Frames.intact, host.is_multi_step, host.uses_batch_statistics.
        recorded = torch.is_grad_enabled()
        if not isinstance(x, Shared) or x.expression.residual is not None or (x.folded is not None) is not self._folds:
            return super().forward(ordinary(x, self._tac.name))
        if (recorded or x._made is not None or x._viewed is not None) and not x.intact:
            return super().forward(ordinary(x, self._tac.name))
        held = self.__dict__
        multi = held.get("_step_mode") == "m" or host.is_multi_step(self)
        if not multi or held["_buffers"].get("running_mean") is None:
            return super().forward(ordinary(x, self._tac.name))
        expression = x.expression
        if recorded:
            x.note_use()
        if not self.training and expression.affine is None and self._tac.borders.fused:
            backend = getattr(x.maker, "backend", "auto")
            if held["_buffers"]["running_mean"].device.type == "cpu" and backend not in backends.ON_CUDA:
                # A value came: the call is neither compiled, traced nor transformed.
                by = host.affine(self, self._tac._affine, dispatch.profiling())
            else:
                by = norm_map.affine(self, self._tac._affine, backend)
            mapped = SharedExpression(expression.held, expression.groups, by)
            made = Shared.of(mapped, x.means, x.folded)
            noted = made.__dict__
            noted["maker"], noted["merges"], noted["normalize"] = x.maker, x.merges, x.normalize
            return made
        return x.like(self._of_compact(expression.mapped(), expression.groups.frames), x.folded)

    def _of_compact(self, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Compact frames, each of which stands for ``lengths`` frames."""
        if not self.training:
            return self._run(x)
        if lengths[-1] == lengths[0] and x.numel() > x.shape[2]:
            return self._run_alike(x, lengths[0])
        plain = x.dtype in (torch.float32, torch.float64) and not dispatch.autocasts(x.device.type)
        # torch's own BatchNorm knows what to do without samples.
        if self._is_plain_norm and plain and x.numel():
            self._note_learning()
            return weighted_batch_norm(self, x, lengths)
        return reference.first(self._run(reference.repeat(x, lengths)), lengths)

    def _run_alike(self, x: Tensor, length: int) -> Tensor:
        """In training, of compact frames that stand for ``length`` frames each: the statistics are those of all frames."""
        var = self.running_var
        if length == 1 or var is None:
            return self._run(x)
        before = var.clone()
        y = self._run(x)
        # The running variance is the unbiased one, of as many values as there are frames.
        share = 1 / float(self.num_batches_tracked or 1) if self.momentum is None else self.momentum
        n = x.numel() // x.shape[2]
        more = (n - 1) / n * (n * length) / (n * length - 1) - 1
        # Past the version that autograd took down with it, and never reads.
        var.data.add_((var.data - (1 - share) * before) * more)
        return y

    def _run_alone(self, x: Tensor) -> Tensor:
        """``_run`` of one map in channels_last. A view gives its batch any stride; then torch's gradients are wrong, as they
        are of a gradient that lies otherwise than the map (``kernels.layout.laid_like``).
        """
        y = self._run(x.contiguous())
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.contiguous())  # type: ignore[no-untyped-call]
        return laid(y, True) if x.dim() == 5 else y

    def _run(self, x: Tensor) -> Tensor:
        """The source's own norm on [any, N, C, ...]."""
        if torch.is_grad_enabled() and not dispatch.is_compiling() and x.shape[:2] == (1, 1) and not x.is_contiguous():
            return self._run_alone(x)
        if not self._folds:
            return super().forward(x)
        return super().forward(x.flatten(0, 1)).reshape(x.shape)


class TACBatchNorm1d(NormModule, layer.BatchNorm1d):
    """BatchNorm1d of a converted net."""


class TACBatchNorm2d(NormModule, layer.BatchNorm2d):
    """BatchNorm2d of a converted net."""


class TACBatchNorm3d(NormModule, layer.BatchNorm3d):
    """BatchNorm3d of a converted net."""


class TACThresholdDependentBatchNorm2d(NormModule, layer.ThresholdDependentBatchNorm2d):
    """ThresholdDependentBatchNorm2d of a converted net."""

    _is_plain_norm = False  # its host scales what torch's BatchNorm gives


class _FoldedNorm(NormModule):
    """Of torch's own norms, which take folded frames [T * N, ...], and whose only argument is called ``input``."""

    _folds = True

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class InnerBatchNorm1d(_FoldedNorm, nn.BatchNorm1d):
    """torch's BatchNorm1d of a converted net, in a container or on folded frames."""


class InnerBatchNorm2d(_FoldedNorm, nn.BatchNorm2d):
    """torch's BatchNorm2d of a converted net, in a container or on folded frames."""


class InnerBatchNorm3d(_FoldedNorm, nn.BatchNorm3d):
    """torch's BatchNorm3d of a converted net, in a container or on folded frames."""


def pending(steps: Tensor, means: Groups) -> Spikes:
    """Frames that are the means of ``steps`` over ``means``, of which a pool further on will take the steps instead.

    Behind a binary collapse each of the steps stands for several frames.
    """
    frames = Computed(lambda x: reference.repeat(reference.mean(x, means.steps), means.frames), (steps,))
    made = Spikes.of(frames, (means.total, *steps.shape[1:]), steps)
    made.means, made.unpooled = means, steps
    return made


class _PoolModule(nn.Module):
    """A pool that hands on what a unit has pooled already."""

    _tac: Pool

    def forward(self, x: Tensor) -> Tensor:
        pool = self._tac
        if not host.is_multi_step(self):
            return self._pooled(ordinary(x, pool.name))
        if isinstance(x, (Shared, Spikes)) and is_usable(x):
            if x.pooled is not None and x.pooled[0] == host.pool_window(self):
                x.note_use()
                return x.pooled[1]
            if isinstance(x, Spikes) and x.means is not None and x.unpooled is not None:
                steps = self._pooled(x.unpooled)
                if pool.means:
                    value = Shared.of(SharedExpression(reference.mean(steps, x.means.steps), x.means), x.means)
                    return value if pool.borders.fused else defined(value)
                return pending(steps, x.means)
        if not (pool.means and pool.borders.are_plain):
            return self._pooled(x)
        frames = ordinary(x, pool.name)
        if compiled.is_free(frames):
            return self._means_of_free_frames(frames)
        merged = group_lengths(frames.shape[0], pool.span.merged)
        steps = self._pooled(reference.mean_of_alike(frames, merged))
        lengths = group_lengths(steps.shape[0], pool.span.stretch)
        return reference.repeat(reference.repeat(reference.mean(steps, lengths), lengths), merged)

    def _means_of_free_frames(self, frames: Tensor) -> Tensor:
        """The mean of each group's steps, of any number of frames, in a call that torch compiles."""
        merged, stretch = self._tac.span
        steps = self._pooled(compiled.mean_of_alike(frames, merged))
        means = compiled.repeat(compiled.mean(steps, stretch), stretch, steps.shape[0])
        return compiled.repeat(means, merged, frames.shape[0])

    def _pooled(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        return result


class TACMaxPool2d(_PoolModule, layer.MaxPool2d):
    """MaxPool2d of a converted net."""


class TACAvgPool2d(_PoolModule, layer.AvgPool2d):
    """AvgPool2d of a converted net."""


class _FoldedPoolModule(nn.Module):
    """torch's own pool on folded frames [T * N, ...]: it hands on what a unit has pooled already."""

    _tac: Pool

    def forward(self, input: Tensor) -> Tensor:
        x = input
        pooled = x.pooled if isinstance(x, Spikes) and x.folded is not None and x.intact else None
        if isinstance(x, Spikes) and pooled is not None and pooled[0] == host.pool_window(self):
            x.note_use()
            return pooled[1].flatten(0, 1)
        result: Tensor = super().forward(x)
        return result


class FoldedMaxPool2d(_FoldedPoolModule, nn.MaxPool2d):
    """torch's MaxPool2d of a converted net, on folded frames."""


class FoldedAvgPool2d(_FoldedPoolModule, nn.AvgPool2d):
    """torch's AvgPool2d of a converted net, on folded frames."""


class _DropoutModule(nn.Module):
    """A Dropout whose one mask serves all frames, and so sums and shared frames, too."""

    _tac: Pool
    mask: Any

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, (Shared, Spikes)) or not is_usable(x) or not is_of_mode(x) or not host.is_multi_step(self):
            plain: Tensor = super().forward(ordinary(x, self._tac.name))
            return plain
        if not self.training:
            return x
        if isinstance(x, Shared):
            if not x.is_bare:
                frames: Tensor = super().forward(x.frames(self._tac.name))
                return frames
            return x.like(super().forward(x.expression.mapped()))
        if len(x.sums) == 1:
            ((wanted, summed),) = x.sums.items()
            masked = super().forward(summed)
        elif x.means is not None and x.unpooled is not None:
            return pending(super().forward(x.unpooled), x.means)
        else:
            whole: Tensor = super().forward(x.frames(self._tac.name))
            return whole
        mask = self.mask
        made = Spikes.of(over(x.expression, lambda t: t * mask), tuple(x.shape), masked, sums={wanted: masked})
        made.maker = x.maker
        return made


class TACDropout(_DropoutModule, layer.Dropout):
    """Dropout of a converted net."""


class TACDropout2d(_DropoutModule, layer.Dropout2d):
    """Dropout2d of a converted net."""


LAYER_SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    layer.BatchNorm1d: TACBatchNorm1d,
    layer.BatchNorm2d: TACBatchNorm2d,
    layer.BatchNorm3d: TACBatchNorm3d,
    layer.ThresholdDependentBatchNorm2d: TACThresholdDependentBatchNorm2d,
    nn.BatchNorm1d: InnerBatchNorm1d,
    nn.BatchNorm2d: InnerBatchNorm2d,
    nn.BatchNorm3d: InnerBatchNorm3d,
    layer.MaxPool2d: TACMaxPool2d,
    layer.AvgPool2d: TACAvgPool2d,
    nn.MaxPool2d: FoldedMaxPool2d,
    nn.AvgPool2d: FoldedAvgPool2d,
    layer.Dropout: TACDropout,
    layer.Dropout2d: TACDropout2d,
}
