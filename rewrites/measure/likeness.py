"""Does a module treat all frames alike, in any number?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sj_tac.definition.convs import PLAIN, leading, plainly, torchs_own
from sj_tac.rewrites.measure.neurons import Layout
from sj_tac.rewrites.measure.runs import fresh, is_near, is_same


@dataclass(frozen=True)
class Likeness:
    """``problem``: why it does not; empty if it does. ``plain``: for T frames alone, and as torch's own on folded rows."""

    problem: str = ""
    plain: bool = False


def _run(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = fresh(module)(x.clone())
    return out


@torch.no_grad()
def likeness(module: nn.Module, x: Tensor, layout: Layout) -> Likeness:
    """Return whether ``module`` maps each frame of x by itself: rows that are drawn with repetition give the rows drawn."""
    if type(module) in PLAIN and "forward" not in vars(module):
        return Likeness()
    copy, given = fresh(module), x.clone()
    out = copy(given)
    if not is_same(given, x):
        return Likeness("it writes into its input")
    if not is_same(_run(module, x), out):
        return Likeness("it does not give the same result twice")
    if not is_same(copy(x.clone()), out):
        return Likeness("it keeps a state from call to call")
    generator, rows = torch.Generator().manual_seed(3), x.shape[layout.dim]
    few = max(1, layout.T // 2) * (layout.N if layout.folded else 1)
    try:
        for count in (few, rows):
            drawn = torch.randint(rows, (count,), generator=generator)
            if not is_near(_run(module, x.index_select(layout.dim, drawn)), out.index_select(layout.dim, drawn)):
                return Likeness("it does not treat frames alike")
        return Likeness()
    except Exception as error:
        problem = f"it takes no other number of frames ({type(error).__name__}: {str(error)[:60]})"
    if torchs_own(module) is None or layout.dim >= leading(module, x):
        return Likeness(problem)
    return Likeness(plain=True) if is_near(plainly(module, x), out) else Likeness(problem)
