"""A converted chain run as one operator: what its modules do instead of their own work, inside the converted net's call.

conv -> norm -> neuron -> [pool] stay four modules at their own paths. Fused, the conv hands on its G drives, norm and pool
pass through, and the neuron runs ``fire`` on the drives: BatchNorm's affine map, the steps, the pool and, where the next
consumer is another fused chain, the weighted sum for that chain's groups. Spike trains are then never written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sj_tac import host
from sj_tac.functional import fire
from sj_tac.kernels import fire as kernels
from sj_tac.kernels import reference
from sj_tac.spans import Timeline


@dataclass(eq=False)
class Fusion:
    """One chain: its modules, and where its output goes. Decided again at every call, because hooks come and go.

    Attributes:
        via: modules between this chain and the next that an aggregate may pass (Dropout, AvgPool).
        next: the chain that takes this one's output as groups, if there is one.
        active: this call runs fused. arriving: the conv is handed groups, not frames. steps: T of this call.
        ran: the kernel of the last call, or why it did not run fused.
    """

    timeline: Timeline
    conv: Any
    norm: Any
    node: Any
    pool: Any
    via: tuple[Any, ...] = ()
    next: Fusion | None = None
    backend: str = "auto"
    active: bool = False
    arriving: bool = False
    steps: int = 0
    ran: str = ""
    _constants: dict[tuple[Any, ...], tuple[Tensor | None, int]] = field(default_factory=dict, repr=False)

    def modules(self) -> list[Any]:
        return [m for m in (self.conv, self.norm, self.node, self.pool) if m is not None]

    def problem(self) -> str:
        """Why this chain cannot run fused right now; empty where it can."""
        if not self.timeline.grouped:
            return "called from outside the converted net"
        for module in self.modules():
            if host.has_user_hooks(module):
                return "UNFUSED_HOOK: a hook watches one of its modules"
            if not host.is_multi_step(module):
                return "a module is in step_mode 's'"
        if self.node.store_v_seq:
            return "store_v_seq wants every step's voltage"
        if self.node._neuron_precision is not None:
            return "the neuron has a precision of its own"
        return ""

    def begin(self, x: Tensor) -> bool:
        """Called by the conv: whether this call runs fused."""
        problem = self.problem()
        self.active = not problem
        if not self.active:
            self.ran = problem
        elif not self.arriving:
            self.steps = x.shape[0] if self.conv._tac.span.is_plain else int(self.timeline.steps or x.shape[0])
        return self.active

    def normalize(self, norm: Any, y: Tensor, forward: Any) -> Tensor:
        """Called by the norm, on the chain's drives: nothing in eval mode, where ``fire`` does it."""
        if not norm.training:
            return y
        lengths = self.lengths()
        if lengths[-1] == lengths[0]:
            result: Tensor = forward(y)
            return result
        # Statistics weigh a drive by the steps it stands for.
        return reference.first(forward(reference.repeat(y, lengths)), lengths)

    def lengths(self) -> list[int]:
        """Steps on each drive."""
        return [sum(group) for group in self.conv._tac.groups(self.steps)]

    def fire(self, y: Tensor) -> Tensor:
        """Called by the neuron, on the chain's drives: the chain's output, its state kept in the host's own memory."""
        node, place = self.node, self.conv._tac
        lengths, merge = self.lengths(), node._tac.merge > 1
        scale = shift = None
        if self.norm is not None and not self.norm.training:
            scale, shift = host.affine(self.norm)
        weights, group = self.weights(y.dtype)
        v = None if host.is_at_rest(node) else host.take_state(node, y)
        self.ran, _ = kernels.choose(self.backend, node, self.pool, y.device, y.dtype)
        out, v = fire(
            y, node, max(lengths), steps=sum(lengths), v=v, scale=scale, shift=shift, pool=self.pool,
            weights=weights, group=group, merge=merge, normalize=place.normalize, backend=self.ran,
        )  # fmt: skip
        host.put_state(node, v, [])
        return out

    def receiver(self) -> Fusion | None:
        """The next chain, where it can take groups in this call."""
        chain = self.next
        if chain is None or chain.problem() or any(host.has_user_hooks(m) for m in self.via):
            return None
        return chain if chain.conv._tac.span == self.conv._tac.out else None

    def weights(self, dtype: torch.dtype) -> tuple[Tensor | None, int]:
        """What ``fire`` sums: the next chain's groups, the mean of a frame's steps, or nothing (frames)."""
        wide = reference.accumulation_dtype(dtype)
        chain = self.receiver()
        key: tuple[Any, ...] = (self.steps, self.conv._tac.out, wide, self.conv.weight.device)
        if chain is not None:
            chain.arriving, chain.steps = True, self.steps
            place = chain.conv._tac
            beta = host.decay(place.node, wide)
            if place.weights == "learned" or isinstance(beta, Tensor) or torch.compiler.is_compiling():
                return self._sums(chain, wide)
            key += (place.k, place.weights, place.normalize, place.span, beta)
        elif torch.compiler.is_compiling():
            return self._sums(None, wide)
        if key not in self._constants:
            # The tensor is held by reference.constant; here it is the groups' arithmetic that is done once.
            self._constants.clear()
            self._constants[key] = self._sums(chain, wide)
        return self._constants[key]

    def _sums(self, chain: Fusion | None, wide: torch.dtype) -> tuple[Tensor | None, int]:
        """One weight for each step, and how many steps are summed."""
        per_frame = self.conv._tac.out.inner_steps(self.steps)
        groups, values = [[n] for n in per_frame], [[1.0] for _ in per_frame]
        if chain is not None:
            groups = chain.conv._tac.groups(self.steps)
            values = [[1.0] if len(g) == 1 else list(chain.conv.group_weights(g, wide)) for g in groups]
        if sum(groups[0]) == 1:
            return None, 1
        flat = [w / n for g, ws in zip(groups, values, strict=True) for n, w in zip(g, ws, strict=True) for _ in range(n)]
        device = self.conv.weight.device
        if any(isinstance(w, Tensor) for w in flat):
            return torch.stack([torch.as_tensor(w, dtype=wide, device=device) for w in flat]), sum(groups[0])
        return reference.constant([float(w) for w in flat], wide, device), sum(groups[0])
