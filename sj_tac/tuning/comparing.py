"""How near a net comes to its source, on samples that no correction was fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.definition.ops import expanded, groups
from sj_tac.errors import BatchError
from sj_tac.rewrites.gate import as_defined
from sj_tac.rewrites.pipeline import RECORD
from sj_tac.rewrites.verify import tensors
from sj_tac.tuning.batches import Batch
from sj_tac.tuning.fitting import watch_rates
from sj_tac.tuning.measure import Decode, batch_scores, described, run_batch


@dataclass(frozen=True)
class Candidate:
    """One method on the samples that were held out.

    Attributes:
        agreement: share of the source's predictions that the net shares; None where its output is no class scores.
        distance: KL divergence of the outputs from the source's, in nats; else the mean squared difference, over the
            variance of the source's.
    """

    method: str
    agreement: float | None
    distance: float

    @property
    def words(self) -> str:
        if self.agreement is None:
            return f"squared difference {self.distance:.3g}"
        return f"agreement {100 * self.agreement:.1f} %, KL {self.distance:.3g}"


@dataclass(frozen=True)
class Rates:
    """Spikes a step of one neuron, the mean over its channels, on samples that were held out (up to 16 of every batch)."""

    neuron: str
    source: float
    before: float
    after: float


def all_tensors(net: nn.Module, output: Any, batch: Batch) -> list[Tensor]:
    """Every tensor of an output; of T / k frames, as ``emit: groups`` gives, one for each frame that they stand for."""
    found: list[Tensor] = tensors(output)
    record = net.__dict__.get(RECORD)
    size = 1 if record is None else record.plan.decision.groups
    count = groups(batch.steps, size)
    return [expanded(x, size, batch.steps) if size > 1 and x.dim() and len(x) == count else x for x in found]


class Comparison:
    """Compares nets with one source, by what they put out on batches and by how often their neurons fire there."""

    def __init__(self, source: nn.Module, batches: Sequence[Batch], decode: Decode | None, seed: int) -> None:
        self.batches, self.decode, self.seed = batches, decode, seed
        self.samples = sum(batch.samples for batch in batches)
        # Class scores of every batch; or else all numbers of every output, whatever some of them look like.
        self.scored = True
        try:
            self.expected, self.rates = self._observed(source)
        except BatchError:
            if decode is not None:
                raise
            self.scored = False
            self.expected, self.rates = self._observed(source)
        self.classifies = self.scored and self.expected.shape[1] > 1

    def __call__(self, method: str, converted: nn.Module) -> tuple[Candidate, dict[str, Tensor]]:
        """How near a net comes, and the rates [C] of its neurons."""
        got, rates = self._observed(converted)
        if got.shape != self.expected.shape:
            raise BatchError(
                f"the outputs of {type(converted).__name__} are {list(got.shape)} numbers, and the source's "
                f"{list(self.expected.shape)}: they cannot be compared; with emit: groups, or where an output depends on T "
                "otherwise, pass decode=, a function from the net's output to scores [N, C]"
            )
        if not self.classifies:
            spread = self.expected.var(correction=0).item()
            return Candidate(method, None, ((got - self.expected) ** 2).mean().item() / (spread or 1.0)), rates
        logs = torch.log_softmax(self.expected, 1), torch.log_softmax(got, 1)
        kl = (logs[0].exp() * (logs[0] - logs[1])).sum(1).mean().item()
        alike = (got.argmax(1) == self.expected.argmax(1)).double().mean().item()
        return Candidate(method, alike, max(0.0, kl)), rates

    def rates_of(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[Rates, ...]:
        """Of all neurons that were seen in all three nets."""
        named = [name for name in self.rates if name in before and name in after]
        return tuple(Rates(name, *(float(x[name].mean()) for x in (self.rates, before, after))) for name in named)

    def _observed(self, net: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs of all batches, and the mean rates [C] of neurons."""
        outputs: list[Tensor] = []
        totals: dict[str, Tensor] = {}
        with host.looked_at(net), as_defined():
            rates = watch_rates(net)
            torch.manual_seed(self.seed)
            for number, batch in enumerate(self.batches):
                rates.clear()
                outputs.append(self._output(net, batch, number))
                for name, rate in rates.items():
                    if rate is not None:
                        part = rate * (batch.samples / self.samples)
                        totals[name] = totals[name] + part if name in totals else part
        return torch.cat(outputs), totals

    def _output(self, net: nn.Module, batch: Batch, number: int) -> Tensor:
        """Class scores [N, C] of a batch, or all that the net puts out as one row of numbers."""
        if self.scored:
            return batch_scores(net, batch, number, self.decode)
        parts = [x.double().flatten() for x in all_tensors(net, run_batch(net, batch, number), batch)]
        row = torch.cat(parts) if parts else torch.empty(0)
        if not len(row) or not torch.isfinite(row).all():
            raise BatchError(
                f"the output of {type(net).__name__} on {described(batch, number)} has no numbers, or is NaN or infinite; "
                "match compares outputs"
            )
        return row
