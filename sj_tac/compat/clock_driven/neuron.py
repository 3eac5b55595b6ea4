"""The old ``spikingjelly.clock_driven.neuron``: constructors around the host's neurons, and what 2.0 took from them.

``v_seq`` is not stored, as the host's default is (the old multi-step neurons always did): ``node.store_v_seq = True``.
"""

from __future__ import annotations

from typing import Any

from spikingjelly.activation_based import neuron as _host

from sj_tac.compat.clock_driven import base as base, lost, surrogate as surrogate
from sj_tac.compat.hooks import (
    CALLS_HOOKS,
    charge_if,
    charge_lif,
    charge_plif,
    check_backend,
    check_decay,
    install_hooks,
    refuse_hooks,
)

# One instance for all, as it was: the functions have no state.
_SIGMOID = surrogate.Sigmoid()
install_hooks()


class BaseNode(_host.BaseNode):
    """Base of the neurons here, so that isinstance and subclassing work as they did."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_hooks(self)
        super().__init__(*args, **kwargs)

    def register_memory(self, name: str, value: Any) -> None:
        """A variable that ``reset`` gives its value back. ``v_seq``, which 2.0 has and resets itself, is set alone."""
        if name == "v_seq" and name in self.__dict__:
            self.v_seq = value
        else:
            super().register_memory(name, value)


class IFNode(_host.IFNode, BaseNode):
    """An integrate-and-fire neuron, one step a call."""

    _adds_nothing = True  # that the host calls and has otherwise
    neuronal_charge = charge_if

    def __init__(
        self,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: Any = _SIGMOID,
        detach_reset: bool = False,
        cupy_fp32_inference: bool = False,
    ) -> None:
        super().__init__(v_threshold, v_reset, surrogate_function, detach_reset)


class MultiStepIFNode(IFNode):
    """An integrate-and-fire neuron for frames [T, N, ...]."""

    def __init__(
        self,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: Any = _SIGMOID,
        detach_reset: bool = False,
        backend: str = "torch",
        lava_s_cale: int = 1 << 6,
    ) -> None:
        check_backend(self, backend)
        super().__init__(v_threshold, v_reset, surrogate_function, detach_reset)
        self.step_mode = "m"


class LIFNode(_host.LIFNode, BaseNode):
    """A leaky integrate-and-fire neuron, one step a call."""

    _adds_nothing = True  # that the host calls and has otherwise
    neuronal_charge = charge_lif

    def __init__(
        self,
        tau: float = 2.0,
        decay_input: bool = True,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: Any = _SIGMOID,
        detach_reset: bool = False,
        cupy_fp32_inference: bool = False,
    ) -> None:
        check_decay(self, decay_input)
        super().__init__(tau, decay_input, v_threshold, v_reset, surrogate_function, detach_reset)


class MultiStepLIFNode(LIFNode):
    """A leaky integrate-and-fire neuron for frames [T, N, ...]."""

    def __init__(
        self,
        tau: float = 2.0,
        decay_input: bool = True,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: Any = _SIGMOID,
        detach_reset: bool = False,
        backend: str = "torch",
        lava_s_cale: int = 1 << 6,
    ) -> None:
        check_backend(self, backend)
        super().__init__(tau, decay_input, v_threshold, v_reset, surrogate_function, detach_reset)
        self.step_mode = "m"


class ParametricLIFNode(_host.ParametricLIFNode, BaseNode):
    """A leaky neuron whose decay ``w``, a 0-dim parameter, is learned, one step a call."""

    _adds_nothing = True  # that the host calls and has otherwise
    neuronal_charge = charge_plif

    def __init__(
        self,
        init_tau: float = 2.0,
        decay_input: bool = True,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: Any = _SIGMOID,
        detach_reset: bool = False,
    ) -> None:
        check_decay(self, decay_input)
        super().__init__(init_tau, decay_input, v_threshold, v_reset, surrogate_function, detach_reset)


class MultiStepParametricLIFNode(ParametricLIFNode):
    """A leaky neuron whose decay is learned, for frames [T, N, ...]."""

    def __init__(
        self,
        init_tau: float = 2.0,
        decay_input: bool = True,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: Any = _SIGMOID,
        detach_reset: bool = False,
        backend: str = "torch",
    ) -> None:
        check_backend(self, backend)
        super().__init__(init_tau, decay_input, v_threshold, v_reset, surrogate_function, detach_reset)
        self.step_mode = "m"


class QIFNode(_host.QIFNode, BaseNode):
    """A quadratic integrate-and-fire neuron, one step a call."""

    def __init__(
        self,
        tau: float = 2.0,
        v_c: float = 0.8,
        a0: float = 1.0,
        v_threshold: float = 1.0,
        v_rest: float = 0.0,
        v_reset: float | None = -0.1,
        surrogate_function: Any = _SIGMOID,
        detach_reset: bool = False,
    ) -> None:
        super().__init__(tau, v_c, a0, v_threshold, v_rest, v_reset, surrogate_function, detach_reset)


class EIFNode(_host.EIFNode, BaseNode):
    """An exponential integrate-and-fire neuron, one step a call."""

    def __init__(
        self,
        tau: float = 2.0,
        delta_T: float = 1.0,
        theta_rh: float = 0.8,
        v_threshold: float = 1.0,
        v_rest: float = 0.0,
        v_reset: float | None = -0.1,
        surrogate_function: Any = _SIGMOID,
        detach_reset: bool = False,
    ) -> None:
        super().__init__(tau, delta_T, theta_rh, v_threshold, v_rest, v_reset, surrogate_function, detach_reset)


class MultiStepEIFNode(EIFNode):
    """An exponential integrate-and-fire neuron for frames [T, N, ...]."""

    def __init__(
        self,
        tau: float = 2.0,
        delta_T: float = 1.0,
        theta_rh: float = 0.8,
        v_threshold: float = 1.0,
        v_rest: float = 0.0,
        v_reset: float | None = -0.1,
        surrogate_function: Any = _SIGMOID,
        detach_reset: bool = False,
        backend: str = "torch",
    ) -> None:
        check_backend(self, backend)
        super().__init__(tau, delta_T, theta_rh, v_threshold, v_rest, v_reset, surrogate_function, detach_reset)
        self.step_mode = "m"


# 0.0.0.0.14's own raises in its constructor, and in its first step where that is helped.
if not CALLS_HOOKS:

    class LIAFNode(_host.LIAFNode, BaseNode):
        """A leaky integrate-and-analog-fire neuron, one step a call; what follows the first two is LIFNode's."""

        def __init__(self, act: Any, threshold_related: bool, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("cupy_fp32_inference", None)
            super().__init__(act, threshold_related, *args[:6], **kwargs)


_BROKEN = "its constructor raised in 0.0.0.0.12"
__getattr__ = lost(
    "spikingjelly.clock_driven.neuron",
    {
        "AdaptiveBaseNode": f"{_BROKEN}; spikingjelly.activation_based.neuron.AdaptBaseNode is what it was meant to be",
        "GeneralNode": "it lost its coefficients in its constructor; LIFNode and IFNode are what it could have been",
        "MultiStepGeneralNode": _BROKEN,
        "LIAFNode": "0.0.0.0.14's is broken; SpikingJelly 2.0 has it",
        "check_backend": "backends are the host's own choice now",
    },
)
