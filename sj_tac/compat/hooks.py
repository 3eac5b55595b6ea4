"""What neurons of both worlds check: the name of a backend, and methods that the host never calls."""

from __future__ import annotations

from spikingjelly.activation_based import base, neuron

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


def refuse_hooks(node: object) -> None:
    """Raise HostError where the class of ``node`` has dynamics of its own that the installed host would not run."""
    if CALLS_HOOKS and not isinstance(node, NEVER_IN_EVAL):
        return
    own: set[str] = set()
    for cls in type(node).__mro__:
        if cls.__module__.partition(".")[0] in ("spikingjelly", "sj_tac"):
            break
        own |= vars(cls).keys()
    hooks = own & HOOKS
    if not hooks or "single_step_functional_forward" in own or (own & STEPS and hooks == HOOKS):
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
