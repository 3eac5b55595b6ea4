"""What the torch operators ``sj_tac::fire`` and ``sj_tac::fire_backward`` are called with, by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from sj_tac.host.neurons import ChargeMode

# What torch's schemas call the types of Operands.
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Sequence[int]": "SymInt[]",
    "int": "SymInt",
    "float": "float",
    "bool": "bool",
    "str": "str",
}


class Operands(NamedTuple):
    """The arguments of ``sj_tac::fire``, in the order of its schema.

    ``functional.fire`` says what it computes. All that goes with drives of bfloat16 or float16 is of float32.

    Attributes:
        y: drives [G, N, C, H, W], of the output's dtype; float64 on a CPU alone.
        residual: [T, N, C, H, W] of y's dtype, added step by step behind the affine map, or None.
        scale, shift: [C], of a BatchNorm, both or none. v0: voltages [N, C, H, W], or None at rest.
        linear: [G, 2], beta and gamma of the step on each drive, or None where they are ``decay`` and ``gain``.
        q: sigmoid(w) of a PLIF, 0-dim, without gradient.
        weights: [T], one weight for each step, summed in groups of ``group``; None for frames.
        lengths: steps on each drive; empty: one on each, so that T need not be a number while torch compiles.
        mode: a ChargeMode, whose ``tau`` is the neuron's, or its inverse where the mode multiplies.
        rest, threshold, hard, detach: v_reset or 0, v_threshold, whether v_reset is a number, detach_reset.
        surrogate, alpha: its number in host.FUSED_SURROGATES, and its width.
        pool: NO_POOL, MAX_POOL or AVG_POOL; window: (kh, kw, sh, sw, ph, pw).
        launcher: what launches the CUDA kernels, by its name; "": the first that works. Without meaning on a CPU.
    """

    y: Tensor
    residual: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    v0: Tensor | None
    linear: Tensor | None
    q: Tensor | None
    weights: Tensor | None
    lengths: Sequence[int]
    mode: int
    tau: float
    decay: float
    gain: float
    rest: float
    threshold: float
    hard: bool
    detach: bool
    surrogate: int
    alpha: float
    pool: int
    window: Sequence[int]
    group: int
    launcher: str = ""

    @property
    def steps(self) -> int:
        """T: steps in all."""
        return sum(self.lengths) if len(self.lengths) else self.y.shape[0]

    def counted(self) -> Operands:
        """The same with the steps on each drive written out."""
        return self if len(self.lengths) else self._replace(lengths=[1] * self.y.shape[0])


def schema() -> str:
    """Return the operands as torch's schemas write them."""
    types: dict[str, Any] = Operands.__annotations__  # NamedTuple wraps what is written into references
    return ", ".join(f"{_TYPES[types[name].__forward_arg__]} {name}" for name in Operands._fields)


def constants(
    kind: str,
    tau: float,
    decay_input: bool,
    threshold: float,
    reset: float | None,
    detach: bool,
    surrogate: int,
    alpha: float,
) -> tuple[Any, ...]:
    """Return the operands from ``mode`` to ``alpha`` of a neuron, from its ``host.Numbers`` and its surrogate's number."""
    divisor, inverse = tau, 1 / tau
    if kind == "if":
        mode = ChargeMode.IF
    elif kind == "lif" and math.frexp(tau)[0] != 0.5:
        mode = ChargeMode.LIF_DECAY if decay_input else ChargeMode.LIF
    else:
        # Dividing by a power of two and multiplying by its inverse are the same to the last bit, and one is far faster.
        mode, divisor = (ChargeMode.PLIF_DECAY if decay_input else ChargeMode.PLIF), inverse
    decay, gain = (1 - inverse, inverse if decay_input else 1.0) if kind == "lif" else (1.0, 1.0)
    return mode, divisor, decay, gain, reset or 0.0, float(threshold), reset is not None, detach, surrogate, alpha
