"""What a converted net notes of a module whose numbers training, ``match`` or ``recalibrate`` may change; its BatchNorms.

Aggregated frames have less variance than single ones. So a BatchNorm that learns from them no longer fits another k, and one
that ``freeze_bn`` froze stays in eval mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sj_tac.definition.classes import Swapped, mixed, own_class
from sj_tac.definition.ops import is_captured
from sj_tac.errors import MatchedStatisticsWarning

# In a state_dict's metadata, beside the version of a module.
MATCHED = "sj_tac.matched"
# What the statistics of a BatchNorm fit that takes single frames.
SINGLE = "the source's rate"


@dataclass
class Noted:
    """What is noted of one module, in its attribute ``_tac``.

    Attributes:
        name: of the convolution, or of the BatchNorm itself behind one that is not converted.
        fits: which mode and k a correction of it is for, as ``words``.
        matched: what it was corrected for; empty if it was not.
        aggregated: whether it takes aggregated frames. frozen: whether it stays in eval mode. moved: whether its
            statistics learned from aggregated frames.
    """

    name: str
    fits: str = ""
    matched: str = ""
    aggregated: bool = False
    frozen: bool = False
    moved: bool = False


def words(mode: str, k: int, weights: str) -> str:
    """Return what a correction is fitted to."""
    return f"{mode} k={k}" if weights == "decay" else f"{mode} k={k}, {weights} weights"


class Matchable(Swapped):
    """Mixin for a module whose state_dict says in its metadata what ``match`` corrected its values for."""

    _tac: Noted
    # The tensor whose presence in a state_dict says that the module's values are replaced.
    _corrected = "running_mean"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if self._tac.matched and metadata is not None:
            metadata[MATCHED] = self._tac.matched

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if prefix + self._corrected not in state_dict:
            return
        noted, found = self._tac, local_metadata.get(MATCHED, "")
        noted.matched = found
        if found and found != noted.fits:
            warnings.warn(
                # Without the layer's name, so that Python tells it once.
                f"values of this checkpoint were matched for {found}, and loaded into layers at {noted.fits}; sj_tac.match "
                "the net again, or load the source's checkpoint",
                MatchedStatisticsWarning,
                stacklevel=2,
            )


class NotedNorm(Matchable):
    """Mixin for a BatchNorm class."""

    def note_training(self) -> None:
        """Note that a call in training mode moves the statistics. Captured calls may change no object: the gate asks."""
        if self.training and self._tac.aggregated:
            self._tac.moved = True

    def train(self, mode: bool = True) -> Any:
        """Go into training mode, unless frozen."""
        return super().train(mode and not self._tac.frozen)

    def forward(self, input: Tensor) -> Tensor:
        """Return the class's own result, and note that its statistics learn."""
        if not is_captured():
            self.note_training()
        made: Tensor = super().forward(input)
        return made

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + self._corrected in state_dict:
            self._tac.moved = False


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm, of torch's or of a class made of it."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def note_norms(net: nn.Module, found: Mapping[str, Noted]) -> None:
    """Let these BatchNorms, and no others but those that brought something along, keep notes."""
    for name, module in net.named_modules():
        if not is_norm(module):
            continue
        wanted, before = found.get(name), vars(module).get("_tac")
        if wanted is None and (before is None or not (before.frozen or before.moved or before.matched)):
            forget(module)
            continue
        if before is not None:
            now = Noted(name, SINGLE) if wanted is None else wanted
            before.aggregated, before.fits = now.aggregated, now.fits
        elif wanted is not None:
            _note(module, wanted)


def remember(net: nn.Module, names: Collection[str]) -> None:
    """Let those of these modules that are BatchNorms keep notes too: an earlier k gave them aggregated frames."""
    for name, module in net.named_modules():
        if name in names and is_norm(module) and not isinstance(module, NotedNorm):
            _note(module, Noted(name, SINGLE))


def _note(module: nn.Module, noted: Noted) -> None:
    module._tac = noted  # type: ignore[assignment]
    module.__class__ = mixed(NotedNorm, type(module))


def forget(module: nn.Module) -> None:
    """Give a BatchNorm its own class again."""
    if isinstance(module, NotedNorm):
        vars(module).pop("_tac", None)
        module.__class__ = own_class(type(module))  # type: ignore[assignment]
