"""Where on the time axis a module of a converted net stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from sj_tac.kernels import reference
from sj_tac.runtime.fusion import Fusion, Junction
from sj_tac.runtime.spans import PLAIN, Span, Timeline


@dataclass(eq=False)
class Place:
    """A module's timeline, and what its frames stand for."""

    timeline: Timeline
    span: Span = PLAIN
    # The neuron it may run as one operator with; the module then leaves its work to that.
    fusion: Fusion | None = field(default=None, kw_only=True)

    @property
    def fused(self) -> Fusion | None:
        """The fusion, in a call that runs fused."""
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
    """A conv whose ``k`` source steps share one drive.

    Attributes:
        node: the neuron whose decay gives the weights; no child module, or it would be in the state_dict twice.
        junction: where the frames it reads may come aggregated already.
        backend: of the sums of frames; unfused is the definition, in plain PyTorch.
        shares: the drive may be handed on without being repeated, for sums and neurons behind.
        seen: T and multiply-accumulates per frame and sample of the last call.
    """

    name: str = ""
    mode: str = "preserve"
    k: int = 2
    weights: str = "decay"
    normalize: bool = True
    spikes: str = "count"
    node: nn.Module = field(default_factory=nn.Identity)
    junction: Junction | None = None
    backend: str = reference.NAME
    shares: bool = False
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
