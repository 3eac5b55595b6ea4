"""A neuron run as one operator with what stands before and behind it, inside the converted net's call.

conv -> norm -> neuron -> [pool] stay modules at their own paths. Fused, the conv hands on its G drives, norm and pool pass
through, and the neuron runs ``fire`` on the drives: BatchNorm's affine map, the steps, the pool and, where every reader is
a conv that would aggregate, the weighted sums for their groups. Spike trains are then never written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sj_tac import host
from sj_tac.host import dispatch
from sj_tac.kernels import fire as kernels
from sj_tac.kernels import reference
from sj_tac.kernels.fire import fire_checked
from sj_tac.runtime.spans import Timeline
from sj_tac.runtime.values import SharedDrive


@dataclass(eq=False)
class Junction:
    """Values that travel as weighted sums of frames, or all as frames: from neurons, through sums and Dropout, to convs.

    Decided once a call, at the first neuron that fires, because hooks come and go.

    Attributes:
        writers: the fused neurons; readers: the convs, which want the same groups with the same weights; via: the modules
            between (Dropout, AvgPool).
    """

    writers: list[Fusion] = field(default_factory=list)
    readers: list[Any] = field(default_factory=list)
    via: tuple[Any, ...] = ()
    is_open: bool = False
    decided: bool = False
    steps: int = 0

    def decide(self, steps: int) -> bool:
        """Whether this call's frames travel as sums."""
        if not self.decided:
            self.decided, self.steps, self.is_open = True, steps, self._may_open()
        return self.is_open

    def _may_open(self) -> bool:
        modules = (*self.readers, *self.via)
        if any(writer.problem() for writer in self.writers):
            return False
        if any(host.has_user_hooks(m) or not host.is_multi_step(m) for m in modules):
            return False
        # A neuron's time constant may have been changed since the convs were found to agree.
        return len(self.readers) == 1 or len({host.decay(r._tac.node, torch.float64) for r in self.readers}) == 1

    def start(self) -> None:
        """Called at the begin of the net's call: what a call that failed had decided must not reach the next."""
        self.decided = self.is_open = False


@dataclass(eq=False)
class Fusion:
    """One neuron: what it runs with, and where its output goes. Decided again at every call.

    Attributes:
        node: the neuron; pool: the pool behind it that ``fire`` does, or None.
        site: the conv whose drives come to this neuron alone and as they are, or None; norm: the norm between; between:
            other modules there, which run on the drives, and then the norm does so too.
        alone: nobody else reads what the neuron reads.
        junction: where the output may go as sums.
        planned: the kernel that will run; slower: why it is not the fastest.
        active: this call runs fused; steps: T of this call; ran: the kernel of the last call, or why it did not run fused.
    """

    timeline: Timeline
    node: Any
    pool: Any = None
    site: Any = None
    norm: Any = None
    between: tuple[Any, ...] = ()
    alone: bool = True
    backend: str = "auto"
    junction: Junction | None = None
    planned: str = ""
    slower: str = ""
    active: bool = False
    steps: int = 0
    ran: str = ""
    _constants: dict[tuple[Any, ...], tuple[Tensor | None, int]] = field(default_factory=dict, repr=False)

    def modules(self) -> list[Any]:
        return [m for m in (self.site, self.norm, *self.between, self.node, self.pool) if m is not None]

    def problem(self) -> str:
        """Why this neuron cannot run fused right now; empty where it can."""
        if not self.timeline.grouped:
            return "called from outside the converted net"
        for module in self.modules():
            if host.has_user_hooks(module):
                return "UNFUSED_HOOK: a hook watches one of its modules"
            if not host.is_multi_step(module):
                return "a module is in step_mode 's'"
        return host.neuron_problem(self.node)

    def begin(self, steps: int | None = None) -> bool:
        """Called by the site, or by a neuron that has none: whether this call runs fused."""
        problem = self.problem()
        self.active, self.steps = not problem, steps or 0
        if problem:
            self.ran = problem
        return self.active

    @property
    def absorbs_norm(self) -> bool:
        """Whether ``fire`` does what the norm does in eval mode."""
        return self.norm is not None and not self.between

    def lengths(self) -> list[int]:
        """Steps on each drive of the site."""
        return [sum(group) for group in self.site._tac.groups(self.steps)]

    def fire(self, x: Tensor) -> Tensor:
        """Called by the neuron: the output of the neuron and its pool, the state kept in the host's own memory."""
        node, place = self.node, self.node._tac
        if isinstance(x, SharedDrive) and x.residual is not None and not self.alone:
            x = x.frames()
        scale = shift = residual = None
        if isinstance(x, SharedDrive):
            y, residual, lengths, self.steps = x.drives, x.residual, list(x.lengths), x.shape[0]
            scale, shift = x.affine or (None, None)
        elif self.site is not None:
            y, lengths = x, self.lengths()
            if self.absorbs_norm and not self.norm.training:
                scale, shift = host.affine(self.norm)
        else:
            y, self.steps = x, x.shape[0] if place.span.is_plain else int(self.timeline.steps or x.shape[0])
            lengths = place.span.inner_steps(self.steps)
        weights, group = self.weights(y.dtype, y.device)
        v = None if host.is_at_rest(node) else host.take_state(node, y)
        inputs = (y, residual, v, scale, shift, weights, getattr(node, "w", None))
        wants = dispatch.differentiates(*inputs)
        self.ran, _ = kernels.choose(self.backend, node, self.pool, y.device, y.dtype, wants)
        frame = y.shape[1:]
        if len(frame) != 4:
            y, residual = _as_maps(y), None if residual is None else _as_maps(residual)
            v = None if v is None else v.reshape(y.shape[1:])
        out, v = fire_checked(
            self.ran, y, node, lengths, v, residual, scale, shift, self.pool, weights, group, place.merge > 1,
            place.normalize,
        )  # fmt: skip
        if len(frame) != 4:
            out, v = out.reshape(-1, *frame), v.reshape(frame)
        host.put_state(node, v, [])
        return out

    def weights(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, int]:
        """What ``fire`` sums: the readers' groups, the mean of a frame's steps, or nothing (frames)."""
        wide = reference.accumulation_dtype(dtype)
        key: tuple[Any, ...] = (self.steps, self.node._tac.span, wide, device)
        reader = None
        if self.junction is not None and self.junction.decide(self.steps):
            reader = self.junction.readers[0]
            place = reader._tac
            beta = host.decay(place.node, wide)
            if place.weights == "learned" or isinstance(beta, Tensor) or torch.compiler.is_compiling():
                return self._sums(reader, wide, device)
            key += (place.k, place.weights, place.normalize, place.span, beta)
        elif torch.compiler.is_compiling():
            return self._sums(None, wide, device)
        if key not in self._constants:
            # The tensor is held by reference.constant; here it is the groups' arithmetic that is done once.
            self._constants.clear()
            self._constants[key] = self._sums(reader, wide, device)
        return self._constants[key]

    def _sums(self, reader: Any, wide: torch.dtype, device: torch.device) -> tuple[Tensor | None, int]:
        """One weight for each step, and how many steps are summed."""
        per_frame = self.node._tac.span.inner_steps(self.steps)
        groups, values = [[n] for n in per_frame], [[1.0] for _ in per_frame]
        if reader is not None:
            groups = reader._tac.groups(self.steps)
            values = [[1.0] if len(g) == 1 else list(reader.group_weights(g, wide)) for g in groups]
        if sum(groups[0]) == 1:
            return None, 1
        flat = [w / n for g, ws in zip(groups, values, strict=True) for n, w in zip(g, ws, strict=True) for _ in range(n)]
        if any(isinstance(w, Tensor) for w in flat):
            return torch.stack([torch.as_tensor(w, dtype=wide, device=device) for w in flat]), sum(groups[0])
        return reference.constant([float(w) for w in flat], wide, device), sum(groups[0])


def _as_maps(x: Tensor) -> Tensor:
    """Frames of any dimension as [T, N, C, H, W], which is what ``fire`` takes: neurons do not look at their neighbours."""
    if x.dim() <= 3:
        return x.reshape(*x.shape[:2], -1, 1, 1)
    return x.reshape(*x.shape[:3], -1, 1)
