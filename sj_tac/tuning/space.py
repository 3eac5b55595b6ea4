"""What a policy may say about each layer of one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sj_tac.errors import PolicyError
from sj_tac.policy import Policy, Rule, Settings, nearest
from sj_tac.rewrites.pipeline import convert_with, report

MODES = ("preserve", "collapse")


@dataclass(frozen=True)
class Choice:
    """What happens to one layer: "keep" (k = 1), or preserve or collapse at k."""

    mode: str
    k: int = 1

    def __str__(self) -> str:
        return "keep" if self.mode == "keep" else f"{self.mode} {self.k}"

    @classmethod
    def read(cls, text: str) -> Choice:
        """What ``str`` wrote."""
        mode, _, k = text.partition(" ")
        return cls(mode, int(k or 1))

    @property
    def plain(self) -> Choice:
        """The same under one name: a collapse by 1 collapses nothing."""
        return Choice("preserve") if self.mode == "collapse" and self.k == 1 else self


KEEP = Choice("keep")
Choices = Mapping[str, Choice]


@dataclass(frozen=True)
class Space:
    """The layers that can be converted, in the model's order, and the ks and modes they may take.

    ``ks`` ascends and holds no k above T; ``kinds`` are the policy's ``layers``.
    """

    layers: tuple[str, ...]
    ks: tuple[int, ...]
    modes: tuple[str, ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(
        cls, model: nn.Module, ks: Sequence[int] | None, modes: Sequence[str], kinds: Sequence[str], steps: int, example: Any
    ) -> Space:
        """The space of a model; ``ks`` None: 1, 2, 3, 4, 6, 8, 12, 16 ... up to T. Left as it was.

        Raises:
            ConversionError: no layer can be converted; it names each with its reason. PolicyError: ks, modes or kinds.
        """
        if isinstance(ks, (str, int)) or isinstance(modes, str) or isinstance(kinds, str):
            raise PolicyError(f"ks={ks!r}, modes={modes!r} and layers={kinds!r} are each a sequence")
        for mode in modes:
            if mode not in MODES:
                raise PolicyError(f"modes={tuple(modes)}: {mode!r} is none; {nearest(mode, MODES)}")
        if not modes:
            raise PolicyError(f"modes=() leaves nothing to choose from; there are {MODES}")
        wanted = [k << i for i in range(steps.bit_length()) for k in (1, 3)] if ks is None else list(ks)
        for k in wanted:
            Settings.build(k=k)
        fitting = tuple(sorted({k for k in wanted if k <= steps}))
        if not fitting:
            raise PolicyError(f"ks={tuple(wanted)}: none is at most T = {steps}")
        whole = Policy.from_dict({"default": {"mode": "preserve", "k": 1}, "layers": list(kinds)}, f"layers={tuple(kinds)}")
        found = tuple(v.layer for v in report(convert_with(model, whole, example_input=example)).converted)
        return cls(found, fitting, tuple(dict.fromkeys(modes)), tuple(kinds))

    @property
    def aggregating(self) -> list[Choice]:
        return [Choice(mode, k) for mode in self.modes for k in self.ks]

    def all(self, choice: Choice) -> dict[str, Choice]:
        """The same for every layer."""
        return dict.fromkeys(self.layers, choice)

    def policy(self, choices: Choices) -> Policy:
        """Rules by exact name; what is not in ``choices`` is kept."""
        rules = tuple(Rule(match=n, mode=c.mode, k=c.k) for n, c in choices.items() if c != KEEP)
        return Policy(layers=self.kinds, default=Settings(mode="keep"), rules=rules)

    def name(self, choices: Choices) -> str:
        """ "preserve 2 | preserve 4 | keep", in the order of the layers; one word where all are alike."""
        said = [str(choices.get(layer, KEEP)) for layer in self.layers]
        return said[0] if len(set(said)) == 1 else " | ".join(said)

    def next_k(self, k: int, up: bool) -> int | None:
        """The neighbouring k, or None at the end."""
        position = self.ks.index(k) + (1 if up else -1)
        return self.ks[position] if 0 <= position < len(self.ks) else None

    def is_uniform(self, choices: Choices) -> bool:
        return len({choices.get(layer, KEEP) for layer in self.layers}) == 1

    def kept(self, choices: Choices) -> int:
        """How many layers stay as they are."""
        return sum(choices.get(layer, KEEP) == KEEP for layer in self.layers)


def described(choices: Choices) -> dict[str, str]:
    """As plain data."""
    return {name: str(choice) for name, choice in choices.items()}


def read_choices(values: Mapping[str, str], layers: Iterable[str]) -> dict[str, Choice]:
    """What ``described`` made, in the order of the layers."""
    return {name: Choice.read(values[name]) for name in layers}
