"""Which modules are neurons, of any class: rows of one dimension influence others, and only later ones."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from sj_tac.definition.frames import Frames
from sj_tac.rewrites.measure.runs import TOLERANCE, Call, is_same

# A table of influences takes a run for each row.
MOST_ROWS = 512
LOOKS_AHEAD = "later rows influence earlier ones"
SAMPLES_MEET = "rows influence each other along dimensions"


@dataclass(frozen=True)
class Layout:
    """Where frames are in a tensor of known shape: T, N and their order. ``frames`` is the same without sizes."""

    T: int
    N: int
    dim: int = 0
    folded: bool = False
    samples_first: bool = False

    @property
    def frames(self) -> Frames:
        """The layout at any size; T of folded rows is still to be found."""
        return Frames(self.dim, self.folded, self.samples_first)

    def counts(self, x: Tensor) -> bool:
        """Return whether x has as many rows as this layout."""
        return x.shape[self.dim] == self.T * (self.N if self.folded else 1)

    def fits(self, x: Tensor, like: Tensor) -> bool:
        """Return whether x has frames of this layout, as ``like`` has, be its maps of another size."""
        dims = 1 if self.folded else min(2, like.dim() - 1)
        return x.dim() == like.dim() and x.shape[:dims] == like.shape[:dims]

    def places(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return step and sample of each element of x, in shapes that broadcast to x's."""
        if self.folded:
            rows = torch.arange(x.shape[0], device=x.device).view(-1, *[1] * (x.dim() - 1))
            return (rows % self.T, rows // self.T) if self.samples_first else (rows // self.N, rows % self.N)
        other = 1 - self.dim if self.dim in (0, 1) else 0
        samples = _along(x, other) if x.dim() > 2 and x.shape[other] > 1 else torch.zeros([1] * x.dim(), dtype=torch.long)
        return _along(x, self.dim), samples

    def by_step(self, x: Tensor) -> Tensor:
        """Return x as [T, elements of a step]."""
        return self.frames.time_first(x, self.T).reshape(self.T, -1)

    def like(self, rows: Tensor, x: Tensor) -> Tensor:
        """Return the tensor of x's shape of which ``by_step`` made ``rows``."""
        return self.frames.back(rows.reshape(self.frames.time_first(x, self.T).shape), self.T).contiguous()


def _along(x: Tensor, dim: int) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.arange(x.shape[dim], device=x.device).view(shape)


class Stimulus:
    """Drives of all magnitudes for a call, with and without noise on some rows of a dimension.

    A saturated neuron forgets what was before, and one that never fires hides its threshold. So each element has one
    magnitude for all rows, drawn from a log-uniform distribution, and small tensors are drawn more often.
    """

    def __init__(self, call: Call, dim: int) -> None:
        self.call, self.dim = call, dim
        self._undisturbed: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def draws(self) -> range:
        """Seeds: a large tensor has elements of many magnitudes in one draw."""
        elements = self.call.x.numel()
        return range(2 if elements > 4096 else 4 if elements > 512 else 16)

    def changed(self, rows: Tensor, seed: int) -> Tensor:
        """Return which rows of the output a change of ``rows`` (mask) of the input changes."""
        base, noise, out = self._drawn(seed)
        shape = [1] * base.dim()
        shape[self.dim] = -1
        other = self.call.on(torch.where(rows.view(shape), base + noise, base)).run()
        return _differ(other, out, self.dim)

    def _drawn(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return drives, noise, and the output for the drives."""
        if seed not in self._undisturbed:
            x, generator = self.call.x, torch.Generator().manual_seed(1000 * self.dim + seed)
            size = (x.double().std() if x.numel() > 1 else x.double().abs().max()).nan_to_num(1.0).clamp_min(1e-2)
            thin = [1 if d == self.dim else s for d, s in enumerate(x.shape)]
            magnitude = 10 ** (torch.rand(thin, generator=generator) * 3.5 - 2)
            magnitude = magnitude.double() * torch.where(torch.rand(thin, generator=generator) < 0.5, size, 1.0)
            # Its own drives and random ones take turns.
            shape = x.double() / size if seed % 2 else torch.randn(x.shape, generator=generator).double()
            base = (magnitude * shape).to(x.dtype)
            noise = (3 * magnitude * torch.randn(x.shape, generator=generator).double()).to(x.dtype)
            self._undisturbed[seed] = base, noise, self.call.on(base).run()
        return self._undisturbed[seed]


def _differ(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Return which rows of a dimension differ."""
    off = (a.double() - b.double()).abs()
    limit = TOLERANCE * b.double().nan_to_num().abs().max().clamp_min(1e-12)
    apart = torch.where(off.isnan(), a.isnan() != b.isnan(), off > limit)
    return apart.movedim(dim, 0).flatten(1).any(1)


def mixes(call: Call, dim: int) -> bool:
    """Return whether rows of a dimension influence other rows."""
    stimulus, count = Stimulus(call, dim), call.x.shape[dim]
    for seed in stimulus.draws:
        rows = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.5
        rows[0], rows[-1] = True, False
        if stimulus.changed(rows, seed)[~rows].any():
            return True
    return False


def influences(call: Call, dim: int) -> Tensor:
    """Return a table [rows, rows]: a change of row i of the input changes row j of the output."""
    stimulus, count = Stimulus(call, dim), call.x.shape[dim]
    table = torch.zeros(count, count, dtype=torch.bool)
    for i in range(count):
        rows = torch.arange(count) == i
        for seed in stimulus.draws:
            table[i] |= stimulus.changed(rows, seed)
    return table


def cropped(call: Call, out: Tensor) -> Call | str:
    """Return the same call on a corner of its maps; or, in words, why that is something else."""
    x = call.x
    if x.dim() >= 4 and max(x.shape[-2:]) > 4:
        small = call.on(x[..., :4, :4].contiguous())
        with contextlib.suppress(Exception):  # it may want maps of this size
            same = is_same(small.run(), out[..., :4, :4])
            return small if same else "its pixels influence each other, or it draws random numbers"
    return call if is_same(call.run(), out) else "it does not give the same result twice"


def is_refuted(reason: str) -> bool:
    """Return whether a reason of ``find_layout`` says that a module is no neuron, not that none was seen."""
    return reason == LOOKS_AHEAD or reason.startswith(SAMPLES_MEET)


def find_layout(call: Call, out: Tensor) -> Layout | str:
    """Return where the frames of a neuron's drives are; or, in words, why the module is no neuron."""
    small = cropped(call, out)
    if isinstance(small, str):
        return small
    x, found = small.x, []
    for dim in range(x.dim()):
        if x.shape[dim] > 1 and mixes(small, dim):
            found.append(dim)
        if len(found) > 1:
            return f"{SAMPLES_MEET} {found}"
    if not found:
        return "it treats each row alone"
    return _layout(small, found[0])


def _layout(call: Call, dim: int) -> Layout | str:
    rows, stimulus = call.x.shape[dim], Stimulus(call, dim)
    last = torch.arange(rows) == rows - 1
    # Two runs, before the run for each row of the whole table.
    if any(stimulus.changed(last, seed)[:-1].any() for seed in range(2)):
        return LOOKS_AHEAD
    if rows > MOST_ROWS:
        return f"it has {rows} rows, and {MOST_ROWS} are measured at most"
    table = influences(call, dim)
    if (table & ~torch.ones(rows, rows, dtype=torch.bool).triu()).any():
        return LOOKS_AHEAD
    groups = _connected(table)
    steps, samples = len(groups[0]), rows // len(groups[0])
    if steps < 2 or any(len(group) != steps for group in groups):
        return f"its rows influence each other in groups of {sorted({len(g) for g in groups})}"
    if samples == 1:
        other = call.x.shape[1 - dim] if dim in (0, 1) and call.x.dim() > 2 else 1
        return Layout(steps, other, dim)
    if dim:
        return f"frames are folded in dimension {dim}"
    if groups[0] == tuple(range(0, rows, samples)):
        return Layout(steps, samples, 0, True)
    if groups[0] == tuple(range(steps)):
        return Layout(steps, samples, 0, True, samples_first=True)
    return f"rows {list(groups[0])} are one sample"


def _connected(table: Tensor) -> list[tuple[int, ...]]:
    """Return the groups of rows that influence each other, directly or through others: one group for each sample."""
    rows = len(table)
    joined = table | table.T | torch.eye(rows, dtype=torch.bool)
    while True:
        more = (joined.float() @ joined.float()) > 0
        if torch.equal(more, joined):
            break
        joined = more
    return sorted({tuple(row.nonzero().flatten().tolist()) for row in joined})
