"""What a state_dict says of values that ``match`` corrected: for which mode and k."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from sj_tac.errors import MatchedStatisticsWarning

# In a state_dict's metadata, beside the version of a module.
MATCHED = "sj_tac.matched"


def words(mode: str, k: int, weights: str) -> str:
    """What a correction is fitted to."""
    return f"{mode} k={k}" if weights == "decay" else f"{mode} k={k}, {weights} weights"


class Matchable(nn.Module):
    """A module whose role says what it ``fits``, as ``words``, and for what it was ``matched``, empty where it was not."""

    _tac: Any
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
        role, found = self._tac, local_metadata.get(MATCHED, "")
        role.matched = found
        if found and found != role.fits:
            warnings.warn(
                # Without the layer's name, so that Python tells it once.
                f"values of this checkpoint were matched for {found}, and loaded into layers at {role.fits}; sj_tac.match "
                "the net again, or load the source's checkpoint",
                MatchedStatisticsWarning,
                stacklevel=2,
            )
