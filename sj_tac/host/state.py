"""The host's memories: taking, keeping and resetting them; looking at a model without leaving a trace on it."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from spikingjelly.activation_based import base, functional
from torch import Tensor, nn

from sj_tac.host.neurons import resting_voltage
from sj_tac.host.types import IS_V2


def has_user_hooks(module: nn.Module) -> bool:
    """True where a forward hook or pre-hook watches the module, other than sj_tac's own."""
    if not module._forward_hooks and not module._forward_pre_hooks:
        return False
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not getattr(hook, "of_sj_tac", False) for hook in hooks)


def take_state(node: Any, frames: Tensor) -> Tensor:
    """The neuron's voltage for frames [T, ...], made or re-made by the host's own rules."""
    if IS_V2:
        states = node.materialize_states((frames,), tuple(node._memories.values()), "m")
        voltage: Tensor = states[0]
        return voltage
    if isinstance(node.v, float):
        node.v = torch.full_like(frames[0], node.v, dtype=wide_dtype(frames.dtype))
    held: Tensor = node.v
    return held


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of voltages and sums: float32 for half inputs, which would lose bits; otherwise the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_at_rest(node: Any) -> bool:
    """True where the neuron has not run since its reset: its voltage is still the number it is reset to, the resting one."""
    voltage = node._memories["v"]
    return isinstance(voltage, float) and voltage == resting_voltage(node)


def put_state(node: Any, voltage: Tensor, history: list[Tensor]) -> None:
    """Store the voltage after a call, and its history where ``store_v_seq`` is on."""
    node._memories["v"] = voltage
    if IS_V2 or node.store_v_seq:
        node.v_seq = torch.stack(history) if node.store_v_seq else None


def reset(model: nn.Module) -> None:
    """Set every memory of the model to its reset value."""
    forget_reset_cache(model)
    functional.reset_net(model)


def reset_memories(model: nn.Module) -> None:
    """``reset`` of the host's own stateful modules alone: what else of the user's has a ``reset`` is not called."""
    for module in model.modules():
        if isinstance(module, base.MemoryModule):
            module.reset()


def forget_reset_cache(model: nn.Module) -> None:
    """``reset_net`` caches a net's module list; call this after every change to a net's modules."""
    if IS_V2:
        functional.invalidate_reset_cache(model)


def folded(model: nn.Module) -> nn.Module | None:
    """A copy in eval mode whose BatchNorms the host has folded into its convolutions; None where the host cannot."""
    try:
        from spikingjelly.activation_based.functional import conv_bn_fusion
    except ImportError:  # the host before 2.0
        return None
    made: nn.Module = conv_bn_fusion.fuse_conv_bn_eval_modules(copy.deepcopy(model, detached_memories(model)).eval())
    return made


def detached_memories(model: nn.Module) -> dict[int, Any]:
    """A memo for ``copy.deepcopy`` under which voltages that hang on an autograd graph are copied without it."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, base.MemoryModule):
            held = [*module._memories.values(), *module._memories_rv.values(), *vars(module).values()]
            memo |= {id(v): v.detach().clone() for v in held if isinstance(v, Tensor) and not v.is_leaf}
    return memo


def _own(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Of a module's hooks, those that are part of a converted net."""
    return OrderedDict((key, hook) for key, hook in hooks.items() if getattr(hook, "of_sj_tac", False))


@contextlib.contextmanager
def looked_at(model: nn.Module) -> Iterator[None]:
    """Run the model without leaving a trace on it: eval mode, no gradients, the user's hooks silent, state put back."""
    modules = list(model.modules())
    training = [m.training for m in modules]
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in modules]
    memories = [(m, dict(m._memories), getattr(m, "v_seq", None)) for m in modules if isinstance(m, base.MemoryModule)]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        try:
            for module, (forward, before) in zip(modules, hooks, strict=True):
                module.__dict__["_forward_hooks"] = _own(forward)
                module.__dict__["_forward_pre_hooks"] = _own(before)
            model.eval()
            for module, held, _ in memories:
                # Clones: a neuron may write into its voltage, and what is put back must be what was there.
                module._memories.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in held.items()})
            yield
        finally:
            for module, was_training, (forward, before) in zip(modules, training, hooks, strict=True):
                module.training = was_training
                module.__dict__["_forward_hooks"] = forward
                module.__dict__["_forward_pre_hooks"] = before
            for module, held, v_seq in memories:
                module._memories.update(held)
                if hasattr(module, "v_seq"):
                    module.v_seq = v_seq
