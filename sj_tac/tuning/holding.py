"""What a search is told by samples that it did not choose by: how far the metric drops, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sj_tac.errors import PolicyError
from sj_tac.tuning import bounds
from sj_tac.tuning.batches import Batch
from sj_tac.tuning.trials import Score

# From so many samples on some are held out unasked: of fewer, neither half would say much.
MANY, SHARE = 400, 0.25
LEVEL = 0.05


@dataclass(frozen=True)
class HeldOut:
    """The chosen policy on samples that had no say in its choice.

    Attributes:
        samples: how many. source, chosen: the metric of both. drop: source - chosen, which is ``least`` at the least and
            ``most`` at the most, each with 95 % confidence.
    """

    samples: int
    source: float
    chosen: float
    drop: float
    least: float
    most: float

    def words(self, metric: str, max_drop: float | None) -> list[str]:
        """What it says, and what it cannot."""
        said = [
            f"On {self.samples} samples that were held out the {metric} drops by {self.drop:.4f} ({self.source:.4f} -> "
            f"{self.chosen:.4f}): by {self.most:.4f} at most, with {1 - LEVEL:.0%} confidence."
        ]
        if max_drop is not None and self.least > max_drop:
            said.append(
                f"BUDGET_EXCEEDED: that is more than max_drop {max_drop:g}; search on more samples, or leave it at this."
            )
        elif max_drop is not None and self.most > max_drop:
            said.append(_cannot_tell(max_drop))
        return said


def _cannot_tell(max_drop: float) -> str:
    least = bounds.needed(max_drop, LEVEL)
    takes = f"that takes {least} held out samples at the least, more where predictions change" if least else "none can"
    return f"These samples cannot tell whether the drop is within max_drop {max_drop:g}: {takes}."


def split(held: Sequence[Batch], share: float | None) -> tuple[list[Batch], list[Batch]]:
    """Samples to choose by and samples held out, evenly from all batches; ``share`` None: a quarter where there are many.

    Raises:
        PolicyError: a share out of range, or one that leaves either part empty.
    """
    total = sum(batch.samples for batch in held)
    if share is None:
        share = SHARE if total >= MANY else 0.0
    if not 0 <= share < 1:
        raise PolicyError(f"search: holdout={share} must be at least 0 and less than 1, the share of samples held out")
    out = [int((i + 1) * share) > int(i * share) for i in range(total)]
    if share and (not any(out) or all(out)):
        raise PolicyError(f"search: holdout={share} of {total} samples leaves none to hold out, or none to choose by")
    chosen: list[Batch] = []
    rest: list[Batch] = []
    at = 0
    for batch in held:
        here = torch.tensor(out[at : at + batch.samples], device=batch.frames.device)
        at += batch.samples
        for part, mask in ((chosen, ~here), (rest, here)):
            if mask.any():
                labels = None if batch.labels is None else batch.labels[mask]
                part.append(batch if mask.all() else Batch(batch.frames[:, mask], labels, batch.batch_first))
    return chosen, rest


def judge(score: Score, rest: list[Batch], source: nn.Module, chosen: nn.Module) -> HeldOut | None:
    """The chosen net beside its source on samples held out; None of a metric of the user's, whose spread nobody knows."""
    if callable(score.metric) or not rest:
        return None
    here = Score(score.metric, rest, score.decode, score.seed)
    here.begin(source)
    truth = here.expected
    before, after = right(here, source, truth), right(here, chosen, truth)
    found = bounds.drop(before, after, LEVEL)
    shares = [x.double().mean().item() for x in (before, after)]
    return HeldOut(len(truth), shares[0], shares[1], *found)


def right(score: Score, net: nn.Module, truth: Tensor) -> Tensor:
    """Which samples a net gets right [N]."""
    return score.predictions(net) == truth


def at_chance(score: Score, source: float) -> list[str]:
    """A warning where the source itself does no better than guessing."""
    if score.name != "accuracy":
        return []
    count, share = len(score.expected), bounds.chance(score.expected)
    if bounds.by_chance(round(source * count), count, share) <= LEVEL:
        return []
    return [
        f"SOURCE_AT_CHANCE: the source is right in {source:.4f} of {count} samples, and always the commonest label in "
        f"{share:.4f}; nothing can be lost there. Are these its labels, its preprocessing, its checkpoint?"
    ]
