"""Does a net need the order of its frames? Its accuracy on frames as they come, shuffled and reversed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.tuning import bounds
from sj_tac.tuning.batches import Batch
from sj_tac.tuning.measure import Decode, batch_scores, check_labels


@dataclass(frozen=True)
class Reordered:
    """Accuracy of a net on the same samples with their frames in other orders.

    Attributes:
        samples: how many. accuracy: on frames as they come; shuffled, reversed: on re-ordered ones.
        chance: of always the commonest label. least, most: of the larger of the two drops, each with confidence 1 - level.
        verdict: "preserve": the order is needed; "collapse": it is not, by more than ``margin``; "undecided".
    """

    samples: int
    accuracy: float
    shuffled: float
    reversed: float
    chance: float
    least: float
    most: float
    verdict: Literal["preserve", "collapse", "undecided"]
    reason: str


class Reordering:
    """Collects what a net says of batches in three orders of their frames."""

    def __init__(self, decode: Decode | None, seed: int) -> None:
        self.decode, self.rng, self.seed = decode, torch.Generator().manual_seed(seed), seed
        self.right: dict[str, list[Tensor]] = {"as they come": [], "shuffled": [], "reversed": []}
        self.labels: list[Tensor] = []

    def copy(self) -> Reordering:
        """The same, which goes on by itself. The random numbers are shared: they never go back."""
        made = copy.copy(self)
        made.right, made.labels = {name: list(parts) for name, parts in self.right.items()}, list(self.labels)
        return made

    def add(self, net: nn.Module, batch: Batch, number: int) -> None:
        """One batch with labels. Raises BatchError."""
        assert batch.labels is not None
        order = torch.rand(batch.frames.shape[:2], generator=self.rng, device="cpu").argsort(0).to(batch.frames.device)
        every = torch.arange(batch.samples, device=order.device)
        frames = {
            "as they come": batch.frames, "shuffled": batch.frames[order, every], "reversed": batch.frames.flip(0)
        }  # fmt: skip
        for name, x in frames.items():
            with host.looked_at(net):
                torch.manual_seed(self.seed + number)
                found = batch_scores(net, Batch(x, batch.labels, batch.batch_first), number, self.decode)
            check_labels(batch.labels, found.shape[1])
            self.right[name].append((found.argmax(1) == batch.labels).cpu())
        self.labels.append(batch.labels.cpu())

    def result(self, level: float, margin: float) -> Reordered:
        """What all batches together say."""
        right = {name: torch.cat(parts) for name, parts in self.right.items()}
        labels, count = torch.cat(self.labels), len(right["as they come"])
        # Two questions are asked, so that each is answered at half the level.
        drops = [bounds.drop(right["as they come"], right[name], level / 2) for name in ("shuffled", "reversed")]
        least, most = max(d.least for d in drops), max(d.most for d in drops)
        share = {name: x.double().mean().item() for name, x in right.items()}
        chance = bounds.chance(labels)
        told = ", ".join(f"{100 * value:.1f} % {name}" for name, value in share.items())
        said = f"The net is right in {told} ({count} samples): "
        verdict: Literal["preserve", "collapse", "undecided"] = "undecided"
        if bounds.by_chance(int(right["as they come"].sum()), count, chance) > level:
            said += f"no better than the commonest label ({100 * chance:.1f} %), so that it says nothing of order."
        elif least > 0 and max(d.seen for d in drops) >= margin:
            verdict, said = "preserve", f"{said}it needs the order, which is what decides."
        elif most < margin:
            verdict, said = "collapse", f"{said}it loses {most:.3f} at most, less than {margin:g}, which is what decides."
        else:
            said += f"the drop is from {least:.3f} to {most:.3f}; too few samples to tell that from {margin:g}."
        return Reordered(
            count, share["as they come"], share["shuffled"], share["reversed"], chance, least, most, verdict, said
        )
