"""What neurons of both worlds check: the name of a backend, and methods that the host never calls."""

from __future__ import annotations

from typing import Any

import torch
from spikingjelly.activation_based import base, neuron
from torch import Tensor

from sj_tac.errors import BackendError, HostError

BACKENDS = ("torch", "cupy")
HOOKS = {"neuronal_charge", "neuronal_fire", "neuronal_reset"}
# A class with one of these runs its own steps.
STEPS = {"single_step_functional_forward", "forward", "single_step_forward", "multi_step_forward"}
# 0.0.0.0.14 steps through the hooks, but for these two in eval mode.
CALLS_HOOKS = not hasattr(base.MemoryModule, "materialize_states")
NEVER_IN_EVAL: tuple[type, ...] = (neuron.IFNode, neuron.LIFNode)


def check_backend(owner: object, backend: object) -> None:
    """Raise BackendError unless ``backend`` is one that the host has an equivalent of."""
    if backend not in BACKENDS:
        raise BackendError(
            f"backend={backend!r} of {type(owner).__name__} has no counterpart in the installed SpikingJelly: pass one of "
            f"{', '.join(map(repr, BACKENDS))} (both run what the host chooses itself)"
        )


def neuronal_fire(self: Any) -> Any:
    """Spikes of the membrane as it is: what neurons inherited before 2.0, for classes that step by themselves."""
    return self.surrogate_function(self.v - self.v_threshold)


def neuronal_reset(self: Any, spike: Any) -> None:
    """The reset behind spikes, hard to v_reset or soft by v_threshold. As ``neuronal_fire``."""
    spike = spike.detach() if self.detach_reset else spike
    if self.v_reset is None:
        self.v = self.v - spike * self.v_threshold
    else:
        self.v = (1.0 - spike) * self.v + spike * self.v_reset


def v_float_to_tensor(self: Any, x: Tensor) -> None:
    """A membrane that is still a number becomes a tensor like the input. As ``neuronal_fire``."""
    if isinstance(self.v, float):
        self.v = torch.full_like(x.data, self.v)


def jit_hard_reset(v: Tensor, spike: Tensor, v_reset: float) -> Tensor:
    """The membrane behind a reset to ``v_reset``. As ``neuronal_fire``."""
    return (1.0 - spike) * v + spike * v_reset


def jit_soft_reset(v: Tensor, spike: Tensor, v_threshold: float) -> Tensor:
    """The membrane behind a reset by ``v_threshold``. As ``neuronal_fire``."""
    return v - spike * v_threshold


def charge_if(self: Any, x: Tensor) -> None:
    """An IF neuron's charge, as 0.0.0.0.12 had it. For classes that step by themselves, as ``neuronal_fire``."""
    self.v = self.v + x


def charge_lif(self: Any, x: Tensor) -> None:
    """A LIF neuron's. As ``charge_if``; 0.0.0.0.14 has one itself, which takes no membrane that is a number."""
    if CALLS_HOOKS:
        self.v_float_to_tensor(x)
        neuron.LIFNode.neuronal_charge(self, x)
        return
    # In the order of operations of then: another gives other last bits, and other spikes.
    rests_at_0 = self.v_reset is None or self.v_reset == 0.0
    if self.decay_input:
        self.v = self.v + (x - (self.v if rests_at_0 else self.v - self.v_reset)) / self.tau
    elif rests_at_0:
        self.v = self.v * (1.0 - 1.0 / self.tau) + x
    else:
        self.v = self.v - (self.v - self.v_reset) / self.tau + x


def charge_plif(self: Any, x: Tensor) -> None:
    """A PLIF neuron's. As ``charge_if``."""
    rate, rests_at_0 = self.w.sigmoid(), self.v_reset is None or self.v_reset == 0.0
    if self.decay_input:
        self.v = self.v + (x - (self.v if rests_at_0 else self.v - self.v_reset)) * rate
    elif rests_at_0:
        self.v = self.v * (1.0 - rate) + x
    else:
        self.v = self.v - (self.v - self.v_reset) * rate + x


_GIVEN_BACK: tuple[Any, ...] = () if CALLS_HOOKS else (charge_if, charge_lif, charge_plif)


def install_hooks() -> None:
    """Give the host's neurons what 2.0 took from them: it never calls it, classes of one's own do."""
    methods: tuple[Any, ...] = (neuronal_fire, neuronal_reset, v_float_to_tensor)
    for hook in () if CALLS_HOOKS else (*methods, jit_hard_reset, jit_soft_reset):
        if not hasattr(neuron.BaseNode, hook.__name__):
            setattr(neuron.BaseNode, hook.__name__, hook if hook in methods else staticmethod(hook))


def check_decay(owner: object, decay_input: object) -> None:
    """Raise HostError where ``decay_input`` is none: before 0.0.0.0.10 thresholds stood in its place."""
    if not isinstance(decay_input, bool):
        raise HostError(
            f"{type(owner).__name__}: decay_input={decay_input!r} is no bool; code for SpikingJelly before 0.0.0.0.10, "
            "which had no decay_input, gives v_threshold there: pass v_threshold, v_reset and what follows by name"
        )


def refuse_hooks(node: object) -> None:
    """Raise HostError where the class of ``node`` has dynamics of its own that the installed host would not run."""
    if CALLS_HOOKS and not isinstance(node, NEVER_IN_EVAL):
        return
    own: dict[str, Any] = {}
    for cls in type(node).__mro__:
        if cls.__module__.partition(".")[0] in ("spikingjelly", "sj_tac"):
            break
        own = {**vars(cls), **own}
    hooks = own.keys() & HOOKS
    if not hooks or "single_step_functional_forward" in own or _steps_itself(node, own):
        return
    where = "which SpikingJelly 0.0.0.0.14 never calls in eval mode" if CALLS_HOOKS else "which SpikingJelly 2.0 never calls"
    runs = next(c.__name__ for c in type(node).__mro__ if c.__module__.startswith("spikingjelly."))
    result = "its steps would not run" if runs == "BaseNode" else f"it would silently compute what {runs} does"
    instead = (
        "derive it from neuron.BaseNode"
        if CALLS_HOOKS
        else "give it single_step_functional_forward(inputs, states), or run it under SpikingJelly 0.0.0.0.14"
    )
    raise HostError(
        f"{type(node).__qualname__} (of {type(node).__module__}) overrides {', '.join(sorted(hooks))}, {where}, "
        f"so {result}: {instead}"
    )


def _steps_itself(node: object, own: dict[str, Any]) -> bool:
    """Whether what the user's classes define runs their hooks, all of which there are."""
    steps = own.keys() & STEPS
    if steps and own.keys() >= HOOKS:
        return True
    calls = any("neuronal_charge" in getattr(getattr(own[name], "__code__", None), "co_names", ()) for name in steps)
    # A charge of the host's own: one that was given back may stand beside a hook of the user's that nothing calls.
    there = all(getattr(type(node), name, _GIVEN_BACK) not in (_GIVEN_BACK, *_GIVEN_BACK) for name in HOOKS)
    return calls and there
