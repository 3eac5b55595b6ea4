"""How much of a voltage is left after a step, measured from outside."""

from __future__ import annotations

import torch
from torch import Tensor

from sj_tac.rewrites.measure.neurons import Layout
from sj_tac.rewrites.measure.runs import Call

DOUBLINGS, HALVINGS = 24, 80
LEAST = 1e-6


class _Steps:
    """A neuron as a function of two drives [elements of a step], at steps 0 and 1: does it fire at step 1?"""

    def __init__(self, call: Call, layout: Layout) -> None:
        x = call.x
        for dim in range(max(2, x.dim() - 2), x.dim()):  # four pixels will do
            if x.dim() > 3 and dim != layout.dim and x.shape[dim] > 2:
                x = x.narrow(dim, 0, 2)
        self.call, self.layout = call.on(x.contiguous()), layout
        self.zero = torch.zeros_like(layout.by_step(x)[1])

    def fires(self, a: Tensor, b: Tensor) -> Tensor:
        """Return whether each element fires at step 1 on drive a at step 0 and b at step 1."""
        drives = self.layout.like(torch.stack([a, b, *[self.zero] * (self.layout.T - 2)]), self.call.x)
        return self.layout.by_step(self.call.on(drives).run())[1] > 0

    def least(self, a: Tensor) -> Tensor | None:
        """Return the least drive at step 1 on which each element fires; None if some never does."""
        high = torch.ones_like(self.zero)
        for _ in range(DOUBLINGS):
            fires = self.fires(a, high)
            if fires.all():
                break
            high = torch.where(fires, high, high * 2)
        low = 1 - high
        for _ in range(HALVINGS):
            if ((high - low) <= 2e-7 * high.abs()).all():
                break
            middle = (low + high) / 2
            fires = self.fires(a, middle)
            high, low = torch.where(fires, middle, high), torch.where(fires, low, middle)
        return high if self.fires(a, high).all() else None


@torch.no_grad()
def measure(call: Call, layout: Layout) -> tuple[float, float] | None:
    """Return the decay of a neuron's voltage in a step and its spread over elements; None where it cannot be measured.

    A step needs the drive ``theta`` to fire. After the drive ``theta / 2`` in the step before, which leaves
    ``beta * theta / 2``, it needs ``b``. So ``beta = (theta - b) / (theta / 2)``.
    """
    steps = _Steps(call, layout)
    theta = steps.least(steps.zero)
    if theta is None or (theta < LEAST).any():  # it never fires, or it emits something without any drive
        return None
    b = steps.least(theta * 0.5)
    if b is None:
        return None
    beta = ((theta - b) / (theta * 0.5)).double()
    beta = beta[beta.isfinite()]
    if not beta.numel():
        return None
    spread = float(beta.max() - beta.min())
    return float(beta.mean() if spread > 0.01 else beta.median()), spread
