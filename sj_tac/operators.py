"""TAC and TAC-TP as modules, for nets written by hand: conv -> [norm] -> neuron -> [pool], owned by one module.

They are made of what ``convert`` makes a net of (sj_tac/definition). Source of the operators: J. Qin, "Collapse or
Preserve: Data-Dependent Temporal Aggregation for Spiking Neural Network Acceleration", arXiv 2603.13810.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack, get_type_hints

from torch import Tensor, nn

from sj_tac import host
from sj_tac.definition import collapse, convs, neurons, noted, ops
from sj_tac.errors import ConversionError, InputError, PolicyError, refuse_unknown
from sj_tac.kernels import backends, reference
from sj_tac.policy import Settings
from sj_tac.rewrites.gate import capture_calls
from sj_tac.rewrites.pipeline import check_backend
from sj_tac.verdicts import REASONS, Reason

# Layers that take frames: torch's own pools do not.
_POOLS = tuple(kind for kind in host.POOLS if issubclass(kind, host.StepModule))
# How a frame's dimensions are written, by the number of them.
_SHAPES = {1: "L", 2: "H, W", 3: "D, H, W"}


class _Aggregation(TypedDict, total=False):
    """The settings of a rule that both operators take."""

    weights: str
    normalize: bool


class _Emission(_Aggregation, total=False):
    """Those of TAC."""

    spikes: str
    emit: str


class _Operator(nn.Module):
    """conv -> [norm] -> neuron -> [pool] as one module that owns them."""

    # Layers of SpikingJelly have attributes that nn.Module's type does not say.
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
        name = type(self).__name__
        for role, module, allowed in (
            ("conv", conv, host.CONVS),
            ("norm", norm, (*host.NORMS, type(None))),
            ("neuron", neuron, host.NEURONS),
            ("pool", pool, (*_POOLS, type(None))),
        ):
            # A binary collapse asks a neuron for a step that classes made of SpikingJelly's do not have.
            kind: Any = type(module) if module is None or role == "neuron" else host.kind(module)
            if kind not in allowed:
                names = [t.__name__ for t in allowed if t is not type(None)]
                raise ConversionError(
                    f"{name}: {role} is a {type(module).__name__}; it must be exactly one of {names} "
                    "(a subclass may have other dynamics)"
                )
        if norm is not None and host.uses_batch_statistics(norm):
            raise ConversionError(f"{name}: norm keeps no running statistics (track_running_stats=False)")
        if problem := host.many_numbers(neuron):
            raise ConversionError(f"{name}: neuron has several decays: its {problem}")
        _check_settings(name, settings, stretch)
        backend = backends.choose(backend, fuse)
        self.conv, self.norm, self.neuron, self.pool = conv, norm, neuron, pool
        self.settings, self.stretch = settings, stretch
        check_backend(backend, self, ["neuron"])
        for child in self.children():
            child.step_mode = "m"  # type: ignore[assignment]  # a property of the host's
        self._define()
        if fuse and backend != reference.NAME:
            capture_calls(self, backend)

    def _define(self) -> None:
        """Give the children their classes and hooks."""
        s, steps = self.settings, max(self.settings.k, self.stretch)
        is_collapse = s.mode == "collapse" and steps > 1
        is_binary = is_collapse and s.spikes == "binary"
        sharing = convs.Sharing(steps, self.neuron, stretch=self.stretch, weights="uniform")
        if s.k > self.stretch:  # otherwise frames are equal within a group
            sharing.weights, sharing.normalize = s.weights, s.normalize  # type: ignore[assignment]
        neurons.swap(self)
        convs.share(self, {"conv": sharing})
        self.conv._tac.fits = fits = noted.words(s.mode, s.k, s.weights)
        noted.note_norms(self, {"norm": noted.Noted("conv", fits, aggregated=steps > 1)})
        equal = steps if is_collapse else self.stretch
        if is_binary:
            self.neuron.merging = neurons.Merging(1, steps, s.normalize)
        elif equal > 1:
            at = "pool" if isinstance(self.pool, host.MAX_POOLS) else "neuron"
            collapse.put_means(self, {at: collapse.Mean(equal, layer=at)}, 1)
        # Rows of the definition for each frame that is given back.
        self.rows_of_frame = equal if s.emit == "groups" else self.stretch

    def forward(self, x: Tensor) -> Tensor:
        """Frames [T, N, C, H, W] -> spikes; T stays for TACTP and for ``emit="frames"``, else ceil(T / k)."""
        dims = self.conv.weight.dim() - 2
        if x.dim() != dims + 3 or x.shape[0] == 0 or x.shape[2] != self.conv.in_channels:
            raise InputError(
                f"layer {type(self).__name__!r} takes frames [T, N, C, {_SHAPES[dims]}] with T >= 1 and "
                f"C={self.conv.in_channels}, got a tensor of shape {list(x.shape)}; stack the time steps in front, T first"
            )
        rows = x.shape[0] * self.stretch
        y = x if self.stretch == 1 else ops.expand(x, self.stretch, rows)
        for child in (self.conv, self.norm, self.neuron, self.pool):
            y = y if child is None else child(y)
        return y if self.rows_of_frame == 1 else ops.last_of_each(y, self.rows_of_frame, rows)


def _check_settings(name: str, settings: Settings, stretch: Any) -> None:
    """Raise ConversionError or PolicyError where an operator of this name cannot have these settings."""
    if isinstance(stretch, bool) or not isinstance(stretch, int) or stretch < 1:
        raise ConversionError(f"{name}: stretch={stretch!r} must be an int of at least 1")
    if settings.weights == "mixed":
        raise PolicyError(f"{name}: weights='mixed' asks what a layer of a net reads; here, say 'decay' or 'uniform'")
    if settings.k > stretch and settings.k % stretch:
        raise PolicyError(
            f"{name}: k={settings.k} is no multiple of {stretch}, the steps that a frame stands for behind the collapse "
            f"before it; {REASONS[Reason.K_NOT_WHOLE][1]}"
        )


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
