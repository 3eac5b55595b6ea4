"""The host's functional interface (2.0): a neuron of a converted net that is handed its state, and gives it back."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from sj_tac import host


class ByState:
    """Goes before the host's class: what calls a neuron past its ``forward`` gets what its ``forward`` gives.

    ``base.to_functional_forward`` and ``memopt`` call neurons so. The host's own would run plain steps on frames, and know
    nothing of collapsed time.
    """

    _memories: dict[str, Any]
    _neuron_precision: Any
    _tac: Any

    def materialize_states(self, inputs: tuple[Any, ...], states: tuple[Any, ...], step_mode: str) -> tuple[Any, ...]:
        x = inputs[0]
        if isinstance(states[0], Real) and not isinstance(states[0], float):
            # The host makes a tensor of a float alone, and has its steps broadcast what else a user sets, as v = 1.
            states = (float(states[0]), *states[1:])
        wide = host.wide_dtype(x.dtype)
        if step_mode == "m" and x.dtype != wide and self._neuron_precision is None and not self._tac.head:
            # The host keeps the voltage in the input's dtype; a decay of a half voltage loses small drives for good.
            inputs = (x[:1].to(wide), *inputs[1:])
        state, *others = super().materialize_states(inputs, states, step_mode)  # type: ignore[misc]
        return (recordable(state), *others)

    def functional_forward(
        self, inputs: tuple[Any, ...], states: tuple[Any, ...], **kwargs: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Outputs and states behind a call from ``states``; the neuron's own stay as they are."""
        kept = dict(self._memories)
        try:
            self._memories.update(zip(kept, states, strict=True))
            out = self.forward(*inputs, **kwargs)  # type: ignore[attr-defined]
            after = tuple(self._memories.values())
        finally:
            self._memories.update(kept)
        return out if isinstance(out, tuple) else (out,), after


def recordable(v: Tensor) -> Tensor:
    """Voltages that autograd may save: those of a call in inference mode may not leave it."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return v
    return v.clone() if v.is_inference() else v
