"""TAC and TAC-TP: as modules for nets written by hand, and as the swap that ``convert`` makes in a net that exists.

Both go through ``runtime.swaps.absorb``, so there is one implementation. Source of the operators: J. Qin, "Collapse or
Preserve: Data-Dependent Temporal Aggregation for Spiking Neural Network Acceleration", arXiv 2603.13810.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import BackendError, ConversionError
from sj_tac.kernels import backends, reference
from sj_tac.kernels import fire as fire_kernels
from sj_tac.policy import Settings
from sj_tac.runtime.fusion import Fusion
from sj_tac.runtime.places import DrivePlace, Place
from sj_tac.runtime.spans import Span, Timeline
from sj_tac.runtime.swapped import is_swapped, source_class
from sj_tac.runtime.swaps import Swap, absorb, chain_swaps, drive_place


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
        backends.choose(backend, fuse)
        if fuse:
            self._fuse(place, backend)

    def _fuse(self, place: DrivePlace, backend: str) -> None:
        """Let the modules leave their work to ``fire``, where its pool or none is theirs."""
        pool = self.pool if isinstance(self.pool, host.FUSED_POOLS) and host.pool_window(self.pool) else None
        if pool is None and not self.neuron._tac.emit_mean:
            if backend in backends.COMPILED:
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
