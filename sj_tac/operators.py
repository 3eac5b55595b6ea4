"""TAC and TAC-TP: as modules for nets written by hand, and as the swap that ``convert`` makes in a net that exists.

Both go through ``absorb``, so there is one implementation. Source of the operators: J. Qin, "Collapse or Preserve:
Data-Dependent Temporal Aggregation for Spiking Neural Network Acceleration", arXiv 2603.13810.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.drives import LOGITS, SITE_SWAPS, SharedDriveSite
from sj_tac.errors import BackendError, ConversionError, PolicyError
from sj_tac.fusion import Fusion
from sj_tac.kernels import fire as fire_kernels
from sj_tac.kernels import reference, registry
from sj_tac.places import DrivePlace, FiringPlace, NormPlace, Place
from sj_tac.policy import Settings
from sj_tac.spans import Span, Timeline
from sj_tac.swapped import SWAPS, is_swapped, source_class


@dataclass(frozen=True)
class Swap:
    """One module that changes its class, and the place on the time axis it gets."""

    module: nn.Module
    place: Place


def drive_place(name: str, settings: Settings, span: Span, node: nn.Module, timeline: Timeline) -> DrivePlace:
    """The place of a chain's conv. Raises PolicyError where ``k`` does not fit a collapse before it."""
    k, step = settings.k, span.stretch
    if k > step and k % step:
        raise PolicyError(
            f"layer {name!r}: k={k} source steps are no whole number of frames, because a frame stands for {step} steps "
            f"here; choose a multiple of {step}, or a k up to {step}"
        )
    return DrivePlace(
        timeline,
        span,
        name=name,
        mode=settings.mode,
        k=k,
        weights=settings.weights,
        normalize=settings.normalize,
        spikes=settings.spikes,
        node=node,
    )


def chain_swaps(
    drive: DrivePlace, conv: nn.Module, norm: nn.Module | None, node: nn.Module, mean_pool: nn.Module | None
) -> list[Swap]:
    """The swaps of one chain; ``mean_pool`` is the MaxPool that follows the neuron, if there is one."""
    out = drive.out
    swaps = [Swap(conv, drive)]
    if norm is not None:
        swaps.append(Swap(norm, NormPlace(drive.timeline, out, name=drive.name, aggregated=drive.k > 1)))
    merge = out.merged // drive.span.merged
    pooled = mean_pool is not None and out.stretch > 1
    firing = FiringPlace(drive.timeline, out, emit_mean=not pooled, merge=merge, normalize=drive.normalize)
    swaps.append(Swap(node, firing))
    if pooled and mean_pool is not None:
        swaps.append(Swap(mean_pool, Place(drive.timeline, out)))
    return swaps


def absorb(swap: Swap) -> None:
    """Change the class of one module (source class or swapped already) and put it at its place."""
    module, place = swap.module, swap.place
    if isinstance(place, DrivePlace):
        module.__class__ = SITE_SWAPS[place.mode][source_class(module)]
        module._tac = place  # type: ignore[assignment]
        _fit_logits(module)
        return
    old = module.__dict__.get("_tac")
    if isinstance(place, NormPlace) and isinstance(old, NormPlace):
        place.frozen, place.moved = old.frozen, old.moved
    module.__class__ = SWAPS[source_class(module)]
    module._tac = place  # type: ignore[assignment]


def release(module: nn.Module) -> None:
    """Undo ``absorb``."""
    module.__class__ = source_class(module)
    del module.__dict__["_tac"]
    module._parameters.pop(LOGITS, None)


def _fit_logits(conv: Any) -> None:
    """Give the conv the logits its weights need: as many as frames in a group, none where nothing is aggregated."""
    place = conv._tac
    wanted = place.frames if place.weights == "learned" and place.frames > 1 else 0
    held = conv._parameters.get(LOGITS)
    if held is not None and len(held) == wanted:
        return
    conv._parameters.pop(LOGITS, None)
    if wanted:
        conv.register_parameter(LOGITS, nn.Parameter(conv.initial_logits()))


def has_trained_logits(conv: nn.Module) -> bool:
    """True where learned weights are no longer the decay weights they started at."""
    held = conv._parameters.get(LOGITS)
    return held is not None and isinstance(conv, SharedDriveSite) and not torch.equal(held, conv.initial_logits())


class _Operator(nn.Module):
    """conv -> [norm] -> neuron -> [pool] as one module that owns them: a chain for nets written by hand."""

    # What absorb makes of them has more attributes than their static types say.
    conv: Any
    norm: Any
    neuron: Any
    pool: Any
    emit: str

    def __init__(
        self,
        conv: nn.Module,
        norm: nn.Module | None,
        neuron: nn.Module,
        pool: nn.Module | None,
        settings: Settings,
        stretch: int,
        backend: str,
        fuse: bool,
    ) -> None:
        super().__init__()
        for role, module, allowed in (
            ("conv", conv, host.CONVS),
            ("norm", norm, (*host.NORMS, type(None))),
            ("neuron", neuron, host.NEURONS),
            ("pool", pool, (*host.POOLS, type(None))),
        ):
            if type(module) not in allowed:
                names = [t.__name__ for t in allowed if t is not type(None)]
                raise ConversionError(
                    f"{type(self).__name__}: {role} is a {type(module).__name__}; it must be exactly one of {names} "
                    "(a subclass may have other dynamics)"
                )
        if norm is not None and host.uses_batch_statistics(norm):
            raise ConversionError(f"{type(self).__name__}: norm keeps no running statistics (track_running_stats=False)")
        if isinstance(stretch, bool) or not isinstance(stretch, int) or stretch < 1:
            raise ConversionError(f"{type(self).__name__}: stretch={stretch!r} must be an int of at least 1")
        self.conv, self.norm, self.neuron, self.pool = conv, norm, neuron, pool
        self.emit = settings.emit
        for child in self.children():
            if hasattr(child, "step_mode"):
                setattr(child, "step_mode", "m")  # noqa: B010  (a property of the host's, not a submodule)
        self._timeline = Timeline()
        mean_pool = pool if type(pool) in host.MAX_POOLS else None
        place = drive_place(type(self).__name__, settings, Span(1, stretch), neuron, self._timeline)
        for swap in chain_swaps(place, conv, norm, neuron, mean_pool):
            absorb(swap)
        registry.choose(backend, fuse)
        if fuse:
            self._fuse(place, backend)

    def _fuse(self, place: DrivePlace, backend: str) -> None:
        """Let the modules leave their work to ``fire``, where its pool or none is theirs."""
        pool = self.pool if isinstance(self.pool, host.FUSED_POOLS) and host.pool_window(self.pool) else None
        if pool is None and not self.neuron._tac.emit_mean:
            if backend in registry.COMPILED:
                raise BackendError(
                    f"{type(self).__name__}: backend={backend!r}: the mean of a frame's steps is taken at a "
                    f'{source_class(self.pool).__name__} whose options the compiled kernels do not know; use backend="auto"'
                )
            return
        fire_kernels.plan(backend, self.neuron, pool, self.conv.weight)
        fusion = Fusion(self._timeline, self.neuron, pool, self.conv, self.norm, backend=backend)
        if pool is not None and not is_swapped(pool):
            absorb(Swap(pool, Place(self._timeline, place.out)))
        for module in fusion.modules():
            module._tac.fusion = fusion
        place.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        """Frames [T, N, C, H, W] -> spikes; T stays for TACTP and for ``emit="frames"``, else ceil(T / k)."""
        self._timeline.start()
        try:
            y: Tensor = self.conv(x)
            y = y if self.norm is None else self.norm(y)
            y = self.neuron(y)
            y = y if self.pool is None else self.pool(y)
            steps = self._timeline.steps
            if steps is None or self.emit == "groups" or self.conv._tac.out.is_plain:
                return y
            return reference.repeat(y, self.conv._tac.out.lengths(steps))
        finally:
            self._timeline.stop()


class TACTP(_Operator):
    """TAC-TP, "preserve": one convolution for every ``k`` frames, ordinary neuron steps on the shared drive; T stays.

    ``I = BN(conv(sum_j w_j x_j))`` drives k neuron steps ``h = r + beta (v - r) + gamma I``. Below threshold the membrane at
    the end of each group is the exact one. Algorithm 2 of arXiv 2603.13810 is ``normalize=False``.

    Args:
        conv: a SpikingJelly ``Conv2d``; norm: ``BatchNorm2d``, ``ThresholdDependentBatchNorm2d`` or None; neuron: exactly
            ``LIFNode``, ``IFNode`` or ``ParametricLIFNode``; pool: a pooling layer or None. They become this module's
            children, are set to step_mode "m" and change their class.
        k: frames per convolution, at least 1. 1 is the plain chain.
        weights: "decay", "uniform" or "learned" (trainable logits ``conv.tac_logits`` [k], starting at the decay weights).
        normalize: weights that sum to 1.
        stretch: steps that each incoming frame stands for, behind a TAC with ``spikes="count"``.
        backend: "auto" or the name of a kernel that must run; fuse: run BatchNorm, steps and pool as one operator. False
            keeps every module's own work, the definition (and "reference" its kernel).

    Shape: [T, N, C, H, W] -> [T, N, C', H', W']; float16, bfloat16 (voltage in float32), float32, float64.

    Raises:
        ConversionError: a child of another type. PolicyError: an option out of range. BackendError: a named kernel that
            cannot run. InputError (in forward): other shapes.
    """

    def __init__(
        self,
        conv: nn.Module,
        norm: nn.Module | None,
        neuron: nn.Module,
        k: int = 2,
        *,
        pool: nn.Module | None = None,
        weights: str = "decay",
        normalize: bool = True,
        stretch: int = 1,
        backend: str = "auto",
        fuse: bool = True,
    ) -> None:
        settings = Settings.build(mode="preserve", k=k, weights=weights, normalize=normalize, emit="groups")
        super().__init__(conv, norm, neuron, pool, settings, stretch, backend, fuse)


class TAC(_Operator):
    """TAC, "collapse": one convolution and one frame out for every ``k`` frames in.

    ``spikes="binary"``, the paper's: one neuron step ``h = r + beta^k (v - r) + gamma S_k I`` per group and one spike
    (Algorithm 1 of arXiv 2603.13810 is ``normalize=False``). ``spikes="count"``: k steps per group, and the mean of their
    spikes, taken after a MaxPool; what follows must then treat each frame as k steps, as ``convert`` arranges.

    Args:
        emit: "groups" gives [ceil(T / k), ...]; "frames" repeats each group so that T stays.
        stretch: steps that each incoming frame stands for, behind a TAC with ``spikes="count"``; k counts steps.
        Others: see ``TACTP``.
    """

    def __init__(
        self,
        conv: nn.Module,
        norm: nn.Module | None,
        neuron: nn.Module,
        k: int = 2,
        *,
        pool: nn.Module | None = None,
        weights: str = "decay",
        normalize: bool = True,
        spikes: str = "binary",
        emit: str = "groups",
        stretch: int = 1,
        backend: str = "auto",
        fuse: bool = True,
    ) -> None:
        settings = Settings.build(mode="collapse", k=k, weights=weights, normalize=normalize, spikes=spikes, emit=emit)
        super().__init__(conv, norm, neuron, pool, settings, stretch, backend, fuse)
