"""TAC and TAC-TP: as modules for nets written by hand, and as the swap that ``convert`` makes in a net that exists.

Both go through the same passes, so there is one implementation. Source of the operators: J. Qin, "Collapse or
Preserve: Data-Dependent Temporal Aggregation for Spiking Neural Network Acceleration", arXiv 2603.13810.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack, get_type_hints

from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import ConversionError, PolicyError, refuse_unknown
from sj_tac.kernels import backends, reference
from sj_tac.policy import Settings
from sj_tac.rewrites import swap
from sj_tac.rewrites.chains import find_chains
from sj_tac.rewrites.fuse import Fusion
from sj_tac.rewrites.graph import straight
from sj_tac.rewrites.plan import Plan
from sj_tac.rewrites.rates import Layout
from sj_tac.rewrites.weights import MIXED
from sj_tac.runtime.borders import Borders, Span
from sj_tac.runtime.convs import check_frames
from sj_tac.runtime.expressions import SharedExpression
from sj_tac.runtime.groups import Groups
from sj_tac.runtime.root import compact_frames
from sj_tac.runtime.values import Shared, ordinary
from sj_tac.verdicts import REASONS, Reason, Refusal


class _Aggregation(TypedDict, total=False):
    """The settings of a rule that both operators take."""

    weights: str
    normalize: bool


class _Emission(_Aggregation, total=False):
    """Those of TAC."""

    spikes: str
    emit: str


class _Operator(nn.Module):
    """conv -> [norm] -> neuron -> [pool] as one module that owns them: a chain for nets written by hand."""

    # What absorb makes of them has more attributes than their static types say.
    conv: Any
    norm: Any
    neuron: Any
    pool: Any

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
            if (type(module) if module is None else host.kind(module)) not in allowed:
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
        self.emits_groups, self.stretch = settings.emit == "groups", stretch
        for child in self.children():
            if hasattr(child, "step_mode"):
                setattr(child, "step_mode", "m")  # noqa: B010  (a property of the host's, not a submodule)
        swap.absorb_all(self._plan(settings, backends.choose(backend, fuse), fuse), self, Borders(fuse))
        self.conv._tac.name = type(self).__name__

    def _plan(self, settings: Settings, backend: str, fuse: bool) -> Plan:
        """The plan of these few modules, by the passes that ``convert`` runs."""
        name = type(self).__name__
        if settings.weights == MIXED:
            raise PolicyError(f"{name}: weights='mixed' asks what a layer of a net reads; here, say 'decay' or 'uniform'")
        graph = straight(self, [n for n, _ in self.named_children()])
        chains = find_chains(self, graph, {}, linears=True)
        chain = chains["conv"]
        if isinstance(chain, Refusal):
            raise ConversionError(f"{name}: its conv drives no neuron, {chain.reason.value}: {chain.detail}")
        plan = Plan(chains, {"conv": settings}, graph, False, None, backend, fuse, Layout(), Fusion())
        plan = plan.under(self, {"conv": settings}, Span(1, self.stretch))
        refused = plan.layout.refused.get("conv")
        if refused is not None:
            error = PolicyError if refused.reason is Reason.K_NOT_WHOLE else ConversionError
            raise error(f"{name}: {refused.detail}; {REASONS[refused.reason][1]}")
        return plan

    def forward(self, x: Tensor) -> Tensor:
        """Frames [T, N, C, H, W] -> spikes; T stays for TACTP and for ``emit="frames"``, else ceil(T / k)."""
        drive = self.conv._tac
        x, plain = ordinary(x, type(self).__name__), drive.borders.are_plain
        check_frames(x, self.conv, drive.name)
        y: Tensor = x
        if self.stretch > 1:
            lengths = (self.stretch,) * x.shape[0]
            groups = Groups(lengths, lengths)
            y = reference.repeat(x, lengths) if plain else Shared.of(SharedExpression(x, groups), groups)
        for child in (self.conv, self.norm, self.neuron, self.pool):
            y = y if child is None else child(y)
        if self.emits_groups and isinstance(y, Shared):
            return compact_frames(y)
        frames: Tensor = ordinary(y, type(self).__name__)
        if plain and self.emits_groups:
            return reference.first(frames, drive.out.lengths(frames.shape[0]))
        return frames[:: self.stretch] if self.stretch > 1 else frames


class TACTP(_Operator):
    """TAC-TP, "preserve": one convolution for every ``k`` frames, ordinary neuron steps on the shared drive; T stays.

    ``I = BN(conv(sum_j w_j x_j))`` drives k neuron steps ``h = r + beta (v - r) + gamma I``. Below threshold the membrane at
    the end of each group is the exact one. Algorithm 2 of arXiv 2603.13810 is ``normalize=False``.

    The four layers become this module's children, are set to step_mode "m" and change their class.

    Args:
        conv: a SpikingJelly ``Conv2d``.
        norm: ``BatchNorm2d``, ``ThresholdDependentBatchNorm2d`` or None.
        neuron: exactly ``LIFNode``, ``IFNode`` or ``ParametricLIFNode``.
        k: frames per convolution, at least 1. 1 is the plain chain.
        pool: a pooling layer or None.
        stretch: steps that each incoming frame stands for, behind a TAC with ``spikes="count"``.
        backend: "auto" or the name of a kernel that must run.
        fuse: run BatchNorm, steps and pool as one operator. False keeps every module's own work, the definition (and
            "reference" its kernel).

    Keyword Args:
        weights: "decay" (default), "uniform" or "learned" (trainable logits ``conv.tac_logits`` [k], starting at the decay
            weights).
        normalize: weights that sum to 1, default True.

    Shape: [T, N, C, H, W] -> [T, N, C', H', W']; float16, bfloat16 (voltage in float32), float32, float64.

    Raises:
        ConversionError: a child of another type.
        PolicyError: an option out of range.
        BackendError: a named kernel that cannot run.
        InputError: in forward, other shapes.
    """

    def __init__(
        self,
        conv: nn.Module,
        norm: nn.Module | None,
        neuron: nn.Module,
        k: int = 2,
        *,
        pool: nn.Module | None = None,
        stretch: int = 1,
        backend: str = "auto",
        fuse: bool = True,
        **aggregation: Unpack[_Aggregation],
    ) -> None:
        refuse_unknown(type(self).__name__, aggregation, get_type_hints(_Aggregation))
        settings = Settings.build(mode="preserve", k=k, emit="groups", **aggregation)
        super().__init__(conv, norm, neuron, pool, settings, stretch, backend, fuse)


class TAC(_Operator):
    """TAC, "collapse": one convolution and one frame out for every ``k`` frames in.

    ``spikes="binary"``, the paper's: one neuron step ``h = r + beta^k (v - r) + gamma S_k I`` per group and one spike
    (Algorithm 1 of arXiv 2603.13810 is ``normalize=False``). ``spikes="count"``: k steps per group, and the mean of their
    spikes, taken after a MaxPool; what follows must then treat each frame as k steps, as ``convert`` arranges.

    Layers, settings, dtypes and errors are those of ``TACTP``.

    Args:
        conv: a SpikingJelly ``Conv2d``.
        norm: ``BatchNorm2d``, ``ThresholdDependentBatchNorm2d`` or None.
        neuron: exactly ``LIFNode``, ``IFNode`` or ``ParametricLIFNode``.
        k: frames per convolution, at least 1. 1 is the plain chain.
        pool: a pooling layer or None.
        stretch: steps that each incoming frame stands for, behind a TAC with ``spikes="count"``; k counts steps.
        backend: "auto" or the name of a kernel that must run.
        fuse: run BatchNorm, steps and pool as one operator.

    Keyword Args:
        spikes: "binary" (default) or "count".
        emit: "groups" (default) gives [ceil(T / k), ...]; "frames" repeats each group so that T stays.
        weights: as of ``TACTP``.
        normalize: as of ``TACTP``.
    """

    def __init__(
        self,
        conv: nn.Module,
        norm: nn.Module | None,
        neuron: nn.Module,
        k: int = 2,
        *,
        pool: nn.Module | None = None,
        stretch: int = 1,
        backend: str = "auto",
        fuse: bool = True,
        **aggregation: Unpack[_Emission],
    ) -> None:
        refuse_unknown(type(self).__name__, aggregation, get_type_hints(_Emission))
        settings = Settings.build(**({"mode": "collapse", "k": k, "spikes": "binary", "emit": "groups"} | aggregation))
        super().__init__(conv, norm, neuron, pool, settings, stretch, backend, fuse)
