"""The old ``spikingjelly.cext.neuron``, whose neurons took the name of a surrogate function and its alpha."""

from __future__ import annotations

from typing import Any

from sj_tac.compat.clock_driven import lost, neuron, surrogate

_SURROGATES = {"ATan": surrogate.ATan, "Sigmoid": surrogate.Sigmoid}


def _surrogate(name: str, alpha: float) -> Any:
    if name not in _SURROGATES:
        raise ValueError(
            f"surrogate_function={name!r}: the neurons of spikingjelly.cext know {', '.join(map(repr, _SURROGATES))}"
        )
    return _SURROGATES[name](alpha=alpha)


def _volts(value: float | None) -> float | None:
    # Whole numbers were fine there; the host wants floats.
    return None if value is None else float(value)


BaseNode = neuron.BaseNode


class IFNode(neuron.IFNode):
    """An integrate-and-fire neuron, one step a call."""

    def __init__(
        self,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: str = "ATan",
        alpha: float = 2.0,
        detach_reset: bool = False,
    ) -> None:
        super().__init__(float(v_threshold), _volts(v_reset), _surrogate(surrogate_function, alpha), detach_reset)


class LIFNode(neuron.LIFNode):
    """A leaky neuron whose input decays, too, one step a call."""

    def __init__(
        self,
        tau: float = 100.0,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: str = "ATan",
        alpha: float = 2.0,
        detach_reset: bool = False,
    ) -> None:
        made = _surrogate(surrogate_function, alpha)
        super().__init__(float(tau), True, float(v_threshold), _volts(v_reset), made, detach_reset)


class ParametricLIFNode(neuron.ParametricLIFNode):
    """A leaky neuron with a learned decay, one step a call (cext of the versions before 0.0.0.0.12)."""

    def __init__(
        self,
        init_tau: float = 2.0,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: str = "ATan",
        alpha: float = 2.0,
        detach_reset: bool = False,
    ) -> None:
        made = _surrogate(surrogate_function, alpha)
        super().__init__(float(init_tau), True, float(v_threshold), _volts(v_reset), made, detach_reset)


class MultiStepIFNode(IFNode):
    """An integrate-and-fire neuron for frames [T, N, ...]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_mode = "m"


class MultiStepLIFNode(LIFNode):
    """A leaky neuron for frames [T, N, ...]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_mode = "m"


class MultiStepParametricLIFNode(ParametricLIFNode):
    """A leaky neuron with a learned decay for frames [T, N, ...]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_mode = "m"


__getattr__ = lost("spikingjelly.cext.neuron", {})
