"""The host's memories: taking, keeping and resetting them; looking at a model without leaving a trace on it."""

from __future__ import annotations

import contextlib
import copy
import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from spikingjelly.activation_based import base, functional
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from sj_tac.host.neurons import resting_voltage
from sj_tac.host.registry import is_registered_neuron
from sj_tac.host.types import IS_V2

# How many frames of Python's stack tracing takes for a level of nesting (ten were seen).
FRAMES_A_LEVEL = 15


def take_state(node: Any, frames: Tensor) -> Tensor:
    """The neuron's voltage for frames [T, ...], made or re-made by the host's own rules."""
    if IS_V2:
        states = node.materialize_states((frames,), tuple(node._memories.values()), "m")
        voltage: Tensor = states[0]
        return voltage
    wide, held = wide_dtype(frames.dtype), node.v
    if not isinstance(held, Tensor):
        node.v = held = torch.full_like(frames[0], held, dtype=wide)
    if not held.is_floating_point():
        held = held.to(wide)
    return held if held.shape == frames.shape[1:] else held.expand(frames.shape[1:]).contiguous()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of voltages and sums: float32 for half inputs, which would lose bits; otherwise the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_at_rest(node: Any) -> bool:
    """True where the neuron has not run since its reset: its voltage is still the number it is reset to, the resting one."""
    voltage = node._memories["v"]
    return isinstance(voltage, (float, int)) and voltage == resting_voltage(node)


def carries_state(model: nn.Module) -> list[str]:
    """Names of the modules whose memories are not what ``reset`` makes of them."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, base.MemoryModule):
            held, rest = module._memories, module._memories_rv
            if any(isinstance(value, Tensor) and not _is_rest(value, rest.get(key)) for key, value in held.items()):
                found.append(name or type(module).__name__)
    return found


def _is_rest(value: Tensor, rest: Any) -> bool:
    if isinstance(rest, Tensor):
        return value.shape == rest.shape and torch.equal(value, rest)
    return isinstance(rest, (int, float)) and bool((value == rest).all())


def foreign_hooks(model: nn.Module) -> list[str]:
    """Names of the modules on which forward hooks hang that are no part of a converted net."""
    everywhere = every_module._global_forward_hooks or every_module._global_forward_pre_hooks
    found = ["every module"] if everywhere else []
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(not getattr(hook, "of_sj_tac", False) for hook in hooks):
            found.append(name or type(module).__name__)
    return found


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
    """``reset`` of the host's own stateful modules and of registered neurons: what else has a ``reset`` is not called."""
    for module in model.modules():
        reset: Any = getattr(module, "reset", None)
        if isinstance(module, base.MemoryModule) or (callable(reset) and is_registered_neuron(module)):
            reset()


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
    try:
        made: nn.Module = conv_bn_fusion.fuse_conv_bn_eval_modules(copy.deepcopy(model, detached_memories(model)).eval())
    except AssertionError:  # a norm that is kept in training mode
        return None
    return made


def detached_memories(model: nn.Module) -> dict[int, Any]:
    """A memo for ``copy.deepcopy`` under which voltages that hang on an autograd graph are copied without it."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, base.MemoryModule):
            held = [*module._memories.values(), *module._memories_rv.values(), *vars(module).values()]
            memo |= {id(v): v.detach().clone() for v in held if isinstance(v, Tensor) and not v.is_leaf}
    return memo


def _silence(hooks: dict[int, Any]) -> None:
    """Take a module's hooks away, in place, but for those that are part of a converted net."""
    for key in [key for key, hook in hooks.items() if not getattr(hook, "of_sj_tac", False)]:
        del hooks[key]


class _Kept:
    """What a model holds, so that it can be put back after a forward that may write anything, even torch.fx's proxies.

    Kept are the attributes of every module (registered, or in an attribute), the contents of lists, dicts, sets and deques
    in them, however nested, and the values of tensors: of some kinds. Objects of other classes are not looked into.
    """

    def __init__(self, model: nn.Module, but: Iterable[Any], kinds: tuple[type, ...]) -> None:
        """``but``: tensors whose values need no keeping; ``kinds``: classes of those whose values are kept."""
        self.dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self.others: list[tuple[Any, list[Any]]] = []
        self.tensors: list[tuple[Tensor, Tensor]] = []
        seen = {id(item) for item in but}
        # A loop, not a recursion: nets may be nested deeper than Python's stack.
        waiting: list[Any] = [model]
        while waiting:
            item = waiting.pop()
            kind = type(item)  # not isinstance: an object may answer for its __class__ as it likes
            if kind in _PLAIN or not issubclass(kind, _LOOKED_INTO) or id(item) in seen:
                continue
            seen.add(id(item))
            if issubclass(kind, (nn.Module, dict)):
                held = item if issubclass(kind, dict) else vars(item)
                self.dicts.append((held, dict(held)))
                waiting += held.values()
            elif issubclass(kind, Tensor):
                if kind in kinds and item.layout == torch.strided and not (item.is_meta or item.is_quantized):
                    self.tensors.append((item, item.detach().clone()))
            else:
                waiting += item
                if not issubclass(kind, (tuple, frozenset)):
                    self.others.append((item, list(item)))

    def put_back(self) -> None:
        """Make everything what it was, in place; what has not changed is not written to."""
        for held, before in self.dicts:
            if (held or before) and not (_are(held, before) and _are(held.values(), before.values())):
                base: Any = OrderedDict if isinstance(held, OrderedDict) else dict
                base.clear(held)
                base.update(held, before)
        for item, contents in self.others:
            if not _are(item, contents):
                item.clear()
                (item.update if isinstance(item, set) else item.extend)(contents)
        for tensor, value in self.tensors:
            if tensor.shape != value.shape or tensor.dtype != value.dtype:
                tensor.data = value
            elif not _same_bits(tensor.detach(), value):
                with torch.inference_mode(tensor.is_inference()):
                    tensor.detach().copy_(value)


# What most attributes are: passed over at once, as a net is looked at a dozen times while it is converted.
_PLAIN = frozenset((bool, float, int, str, type(None)))
_LOOKED_INTO = (nn.Module, dict, list, tuple, set, frozenset, deque, Tensor)


def _are(items: Collection[Any], others: Collection[Any]) -> bool:
    """True where both hold the same objects in the same order."""
    return len(items) == len(others) and all(map(operator.is_, items, others))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """True where no bit differs: NaN is equal to itself, zero not to its negative."""
    first, second = (t.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8) for t in (a, b))
    words = len(first) // 8 * 8  # eight times as fast as bytes
    if words and first.data_ptr() % 8 == second.data_ptr() % 8 == 0:
        wide = torch.equal(first[:words].view(torch.int64), second[:words].view(torch.int64))
        return wide and torch.equal(first[words:], second[words:])
    return torch.equal(first, second)


@contextlib.contextmanager
def stack_for(model: nn.Module) -> Iterator[None]:
    """Room on Python's stack for a deeply nested net: tracing makes some ten calls where the net itself makes three."""
    depth = min(2000, max(name.count(".") for name, _ in model.named_modules()))
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + FRAMES_A_LEVEL * depth)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@contextlib.contextmanager
def looked_at(model: nn.Module, *, trains: bool = False) -> Iterator[None]:
    """Run the model without leaving a trace on it: eval mode, no gradients, the user's hooks silent, everything put back.

    Put back are all modules' attributes, the contents of containers in them, buffers, memories, and the random numbers of
    Python, numpy and torch; and parameters and BatchNorm statistics, which a forward may write even so, but where a caller
    ``trains`` them itself.
    """
    modules = list(model.modules())
    memories = [(m._memories, dict(m._memories)) for m in modules if isinstance(m, base.MemoryModule)]
    norms = [m for m in modules if isinstance(m, nn.modules.batchnorm._NormBase)] if trains else []
    statistics = [b for m in norms for b in m._buffers.values()]
    kinds = (Tensor,) if trains else (Tensor, nn.Parameter)
    kept = _Kept(model, [*statistics, *(v for _, held in memories for v in held.values())], kinds)
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices), torch.no_grad(), stack_for(model):
        try:
            for module in modules:
                _silence(module._forward_hooks)
                _silence(module._forward_pre_hooks)
            model.eval()
            for now, held in memories:
                # Clones: a neuron may write into its voltage, and what is put back must be what was there.
                now.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in held.items()})
            yield
        finally:
            try:
                kept.put_back()
            except BaseException:  # a second Ctrl-C: what is half done would be worse than late
                kept.put_back()
                raise
            finally:
                random.setstate(numbers[0])
                np.random.set_state(numbers[1])
