"""Which candidates a search tries. Decided by metrics and work alone, so that it is the same whatever the clock says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from sj_tac.tuning.evidence import Trial
from sj_tac.tuning.space import KEEP, Choice, Space, read_choices
from sj_tac.tuning.trials import Trials

Fits = Callable[[Trial], bool]
# Candidates in a row below the budget after which a path is left.
MISSES = 3
# Exchanges (one layer up, another down) that are tried in one pass, for each layer.
EXCHANGES = 3


@dataclass
class Strategy:
    """Walks through the space. ``work``: of each layer at k = 1; ``losses``: of the metric, layer by layer alone."""

    trials: Trials
    work: dict[str, float]
    losses: dict[tuple[str, int], float] = field(default_factory=dict)
    mode: str = ""  # in which single layers are moved; the others are tried on what that finds

    @property
    def space(self) -> Space:
        return self.trials.space

    def uniform(self) -> bool:
        """The same in every layer. False where no mode is possible in all of them."""
        possible = False
        for choice in self.space.aggregating:
            found = self.trials(self.space.all(choice))
            possible = possible or not found.refused
            if not self.mode and not found.refused and choice.plain == choice:
                self.mode = choice.mode
        if possible and not self.mode:
            self.mode = self.space.modes[0]
        return possible

    def alone(self) -> None:
        """Every layer alone at every k, the others at the least k: what it costs the metric, never less at a larger k."""
        least = Choice(self.mode, self.space.ks[0])
        base = self.trials(self.space.all(least))
        for layer in self.space.layers:
            worst = 0.0
            for k in self.space.ks[1:]:
                found = self.trials(self.space.all(least) | {layer: Choice(self.mode, k)})
                worst = max(worst, math.inf if found.refused else base.metric - found.metric)
                self.losses[layer, k] = worst

    def path(self, fits: Fits | None) -> None:
        """From the least k everywhere up, each time where the least is lost for what it saves; until misses in a row."""
        choices = self.space.all(Choice(self.mode, self.space.ks[0]))
        misses = 0
        while misses < MISSES:
            ups = [
                (self._price(choices, layer), i, layer)
                for i, layer in enumerate(self.space.layers)
                if self._up(choices, layer)
            ]
            if not ups:
                return
            layer = min(ups)[2]
            choices = choices | {layer: self._up(choices, layer) or KEEP}
            found = self.trials(choices)
            misses = 0 if fits is None or fits(found) else misses + 1

    def climb(self, best: Trial, better: Callable[[Trial, Trial], bool], faster: bool) -> Trial:
        """Moves of one layer, and exchanges between two, from ``best`` on, as long as one is better."""
        moved = True
        while moved:
            moved = False
            for choices in self._moves(read_choices(best.choices, self.space.layers), faster):
                found = self.trials(choices)
                if not found.refused and better(found, best):
                    best, moved = found, True
                    break
        return best

    def variants(self, best: Trial) -> None:
        """``best`` in the other modes, from some layer on; and with layers that aggregate nothing left to the host."""
        choices = read_choices(best.choices, self.space.layers)
        for mode in self.space.modes:
            for first in range(len(choices)):
                # A collapse changes the rate of all that follows, so that one in the middle is one to the end.
                tail = {n: replace(c, mode=mode) for n, c in list(choices.items())[first:] if c != KEEP}
                self.trials(choices | tail)
        plain = [name for name, choice in choices.items() if choice.k == 1 and choice != KEEP]
        for names in ([name] for name in plain):
            self._leave(choices, names)
        self._leave(choices, plain)

    def _leave(self, choices: dict[str, Choice], names: list[str]) -> None:
        left = choices | dict.fromkeys(names, KEEP)
        if names and self.space.kept(left) < len(self.space.layers):
            self.trials(left)

    def _up(self, choices: dict[str, Choice], layer: str, up: bool = True) -> Choice | None:
        choice = choices[layer]
        k = None if choice == KEEP else self.space.next_k(choice.k, up)
        # At k = 1 the modes are one and the same.
        return None if k is None else replace(choice, k=k, mode=self.mode if choice.k == 1 else choice.mode)

    def _saving(self, layer: str, old: int, new: int) -> float:
        return self.work.get(layer, 0) * (1 / old - 1 / new)

    def _lost(self, layer: str, old: int, new: int) -> float:
        then = self.losses.get((layer, new), 0.0)
        return then if math.isinf(then) else then - self.losses.get((layer, old), 0.0)

    def _price(self, choices: dict[str, Choice], layer: str) -> tuple[float, float]:
        """Metric lost for each piece of work saved by the next k; where nothing is lost, what saves most comes first."""
        old = choices[layer].k
        new = self.space.next_k(old, True) or old
        saving = self._saving(layer, old, new)
        return self._lost(layer, old, new) / max(saving, 1e-9), -saving

    def _moves(self, choices: dict[str, Choice], faster: bool) -> Iterator[dict[str, Choice]]:
        """Single layers, then exchanges between two: those that save work, or else those that are known to lose less.

        What saves most, or loses least, comes first; only so many exchanges are tried.
        """
        layers = self.space.layers
        ups = {n: up for n in layers if (up := self._up(choices, n))}
        downs = {n: down for n in layers if (down := self._up(choices, n, up=False))}

        def saved(n: str, to: Choice) -> float:
            return self._saving(n, choices[n].k, to.k)

        def lost(n: str, to: Choice) -> float:
            return self._lost(n, choices[n].k, to.k)

        if faster:
            singles = sorted((-saved(n, up), i, n) for i, (n, up) in enumerate(ups.items()))
        else:
            singles = sorted((lost(n, down), i, n) for i, (n, down) in enumerate(downs.items()))
        for _, _, n in singles:
            yield choices | {n: (ups if faster else downs)[n]}
        pairs = []
        for i, (n, up) in enumerate(ups.items()):
            for j, (m, down) in enumerate(downs.items()):
                gained, given = saved(n, up) + saved(m, down), lost(n, up) + lost(m, down)
                if m != n and (gained > 0 if faster else given <= 0):
                    pairs.append((given, -gained, i, j, n, m))
        for *_, n, m in sorted(pairs)[: EXCHANGES * len(layers)]:
            yield choices | {n: ups[n], m: downs[m]}
