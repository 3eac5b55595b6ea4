"""All that is SpikingJelly's: its types, its neurons' constants, its module state. Nothing else imports its internals.

Two hosts are known: 2.0, and 0.0.0.0.14 from before its rewrite (``IS_V2`` is False), whose neurons keep their state in
attributes of their own and which has no functions for the steps of a neuron.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from spikingjelly.activation_based import base, functional
from spikingjelly.activation_based import layer as layer
from spikingjelly.activation_based import neuron as neuron
from spikingjelly.activation_based import surrogate as surrogate
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from sj_tac import dispatch

# For modules of ours that keep state, or have a step mode, as the host's do.
MemoryModule: Any = base.MemoryModule
StepModule: Any = base.StepModule

LIBRARY = "spikingjelly.activation_based."
IS_V2 = hasattr(base.MemoryModule, "materialize_states")

# Exact types only: a subclass may have other dynamics, and swapping its class would lose them.
CONVS: tuple[type[nn.Module], ...] = (layer.Conv2d, layer.Conv1d, layer.Conv3d)
LINEARS: tuple[type[nn.Module], ...] = (layer.Linear,)
# Containers that fold time into the batch and run torch's own layers, or the host's in step_mode "s".
CONTAINERS: tuple[type[nn.Module], ...] = (layer.SeqToANNContainer,)
INNER_CONVS: tuple[type[nn.Module], ...] = (*CONVS, nn.Conv2d, nn.Conv1d, nn.Conv3d)
INNER_LINEARS: tuple[type[nn.Module], ...] = (*LINEARS, nn.Linear)
PLAIN_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm2d, nn.BatchNorm1d, nn.BatchNorm3d)
NORMS: tuple[type[nn.Module], ...] = (
    layer.BatchNorm2d,
    layer.BatchNorm1d,
    layer.BatchNorm3d,
    layer.ThresholdDependentBatchNorm2d,
)
NEURONS: tuple[type[nn.Module], ...] = (neuron.LIFNode, neuron.IFNode, neuron.ParametricLIFNode)
MAX_POOLS: tuple[type[nn.Module], ...] = (layer.MaxPool2d,)
# MaxPools of any kind: not linear, so that a mean of steps, or a drive, must not pass one.
ANY_MAX_POOLS: tuple[type[nn.Module], ...] = (
    layer.MaxPool1d,
    layer.MaxPool2d,
    layer.MaxPool3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool2d,
)
AVG_POOLS: tuple[type[nn.Module], ...] = (
    layer.AvgPool1d,
    layer.AvgPool2d,
    layer.AvgPool3d,
    layer.AdaptiveAvgPool1d,
    layer.AdaptiveAvgPool2d,
    layer.AdaptiveAvgPool3d,
)
INNER_AVG_POOLS: tuple[type[nn.Module], ...] = (*AVG_POOLS, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool2d)
POOLS: tuple[type[nn.Module], ...] = (
    layer.MaxPool2d,
    layer.AvgPool2d,
    layer.AdaptiveAvgPool2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
)
FUSED_POOLS: tuple[type[nn.Module], ...] = (layer.MaxPool2d, layer.AvgPool2d)
# What a weighted sum of frames may pass through, because it treats all frames alike and is linear in them.
LINEAR_IN_TIME: tuple[type[nn.Module], ...] = (layer.Dropout, layer.Dropout2d, *AVG_POOLS, layer.Flatten, nn.Identity)
# What treats every frame [N, ...] alike, linear or with a constant on top: weights that sum to 1 may pass.
AFFINE: tuple[type[nn.Module], ...] = (*CONVS, *LINEARS, *NORMS, layer.VotingLayer, nn.Linear)
# What treats every frame alike, and no more: frames that stand for several steps may pass, sums may not.
PER_FRAME: tuple[type[nn.Module], ...] = (nn.Dropout,)


def is_conv(module: nn.Module) -> bool:
    """Any convolution at all, SpikingJelly's or torch's own, of any dimension."""
    return isinstance(module, _ConvNd)


def is_norm(module: nn.Module) -> bool:
    """Any normalisation layer, supported or not."""
    return isinstance(module, (_NormBase, nn.GroupNorm, nn.LayerNorm)) or type(module).__module__ == LIBRARY + "layer.bn"


def is_neuron(module: nn.Module) -> bool:
    """Any spiking neuron, supported or not, subclasses by the user among them."""
    return isinstance(module, neuron.BaseNode) or type(module).__module__.startswith(LIBRARY + "neuron")


def is_leaf(module: nn.Module) -> bool:
    """What torch.fx must not look into: step modules (they branch on ``step_mode``) and the library's own layers."""
    return isinstance(module, base.StepModule) or type(module).__module__.startswith(LIBRARY + "layer")


def is_composite(module: nn.Module) -> bool:
    """A layer of the library that is built of multi-step modules, as its attention is: torch.fx may look into it."""
    return is_leaf(module) and not isinstance(module, base.StepModule) and any(True for _ in module.children())


def is_multi_step(module: nn.Module) -> bool:
    """False only where the module has a ``step_mode`` and it is not ``"m"``."""
    return getattr(module, "step_mode", "m") == "m"


def uses_batch_statistics(norm: nn.Module) -> bool:
    """True where a BatchNorm keeps no running statistics and so normalises by the batch's own, in eval mode too."""
    return getattr(norm, "running_mean", None) is None


def decay(node: Any, dtype: torch.dtype) -> float | Tensor:
    """beta of ``h = r + beta (v - r) + gamma x``: a float, or for a PLIF a differentiable 0-dim tensor of ``dtype``."""
    if isinstance(node, neuron.ParametricLIFNode):
        decayed: Tensor = 1.0 - node.w.to(dtype).sigmoid()
        return decayed
    if isinstance(node, neuron.LIFNode):
        return 1.0 - 1.0 / float(node.tau)
    return 1.0


def input_gain(node: Any, dtype: torch.dtype) -> float | Tensor:
    """gamma of ``h = r + beta (v - r) + gamma x``; see ``decay``."""
    if not getattr(node, "decay_input", False):
        return 1.0
    if isinstance(node, neuron.ParametricLIFNode):
        gain: Tensor = node.w.to(dtype).sigmoid()
        return gain
    return 1.0 / float(node.tau)


def fire_and_reset(node: Any, charged: Tensor) -> tuple[Tensor, Tensor]:
    """The second half of a neuron step: charged voltage h -> (spike, voltage after the reset)."""
    spike = node.surrogate_function(charged - node.v_threshold)
    fired = spike.detach() if node.detach_reset else spike
    if node.v_reset is None:
        return spike, charged - fired * node.v_threshold
    return spike, (1.0 - fired) * charged + fired * node.v_reset


def resting_voltage(node: Any) -> float:
    """r: where the voltage decays to, ``v_reset``, or 0 for a soft reset."""
    return 0.0 if node.v_reset is None else float(node.v_reset)


def neuron_problem(node: Any) -> str:
    """Why a neuron's steps must be the host's own; empty where they need not."""
    if node.store_v_seq:
        return "store_v_seq wants every step's voltage"
    if getattr(node, "_neuron_precision", None) is not None:
        return "the neuron has a precision of its own"
    return ""


def has_user_hooks(module: nn.Module) -> bool:
    """True where a forward hook or pre-hook watches the module, other than sj_tac's own."""
    if not module._forward_hooks and not module._forward_pre_hooks:
        return False
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not getattr(hook, "of_sj_tac", False) for hook in hooks)


def steps_on(node: Any, drives: Tensor, voltage: Tensor) -> tuple[Tensor, Tensor]:
    """Ordinary steps on the drives [T, ...] from ``voltage``, by the host's own functions: spikes [T, ...], last voltage."""
    if not IS_V2:
        return _loop(node, drives, voltage)
    shared = (node.v_threshold, node.v_reset, node.surrogate_function, node.detach_reset)
    if isinstance(node, neuron.ParametricLIFNode):
        spikes, last, _ = functional.plif_multi_step(drives, voltage, node.w, node.decay_input, *shared)
    elif isinstance(node, neuron.LIFNode):
        spikes, last, _ = functional.lif_multi_step(drives, voltage, float(node.tau), node.decay_input, *shared)
    else:
        spikes, last, _ = functional.if_multi_step(drives, voltage, *shared)
    return spikes, last


def _loop(node: Any, drives: Tensor, voltage: Tensor) -> tuple[Tensor, Tensor]:
    """``steps_on`` for a host that has no functions for it, in the order of operations of the one that has."""
    rest, spikes = resting_voltage(node), []
    for x in drives:
        if isinstance(node, neuron.ParametricLIFNode):
            rate = node.w.sigmoid().to(voltage.dtype)
            charged = voltage + (x - (voltage - rest)) * rate if node.decay_input else voltage - (voltage - rest) * rate + x
        elif isinstance(node, neuron.LIFNode):
            tau = float(node.tau)
            charged = voltage + (x - (voltage - rest)) / tau if node.decay_input else voltage - (voltage - rest) / tau + x
        else:
            charged = voltage + x
        spike, voltage = fire_and_reset(node, charged)
        spikes.append(spike)
    return torch.stack(spikes), voltage


def charge_mode(node: Any, merged: bool) -> int:
    """How a fused kernel orders the operations of the charge, so that its spikes are the host's (kernels/numba_steps.py)."""
    if merged:
        return 5
    if isinstance(node, neuron.ParametricLIFNode):
        return 2 if node.decay_input else 3
    if isinstance(node, neuron.LIFNode):
        return 0 if node.decay_input else 1
    return 4


# The surrogates whose derivative the fused kernels know, in the order that numbers them; the older host lacks one.
_SURROGATES = ("Sigmoid", "ATan", "PiecewiseQuadratic", "PiecewiseExp", "SoftSign", "SuperSpike", "Erf")
_NUMBERS = {getattr(surrogate, name): i for i, name in enumerate(_SURROGATES) if hasattr(surrogate, name)}
FUSED_SURROGATES: tuple[type[nn.Module], ...] = tuple(_NUMBERS)


def fused_surrogate(node: Any) -> tuple[int, float] | None:
    """Number and alpha of a neuron's surrogate, where the fused kernels know it."""
    function = node.surrogate_function
    if type(function) not in FUSED_SURROGATES or not function.spiking or not isinstance(function.alpha, (int, float)):
        return None
    return _NUMBERS[type(function)], float(function.alpha)


# The host's other surrogates that fire where the voltage reaches the threshold, and so differ in their gradient alone.
_THRESHOLDS = (
    *("Rect", "S2NN", "QPseudoSpike", "LeakyKReLU", "FakeNumericalGradient", "LogTailedReLU", "DeterministicPass"),
    *("SquarewaveFourierSeries", "NonzeroSignLogAbs", "PiecewiseLeakyReLU"),
)
_FIRING = {getattr(surrogate, name) for name in (*_SURROGATES, *_THRESHOLDS) if hasattr(surrogate, name)}


def fires_by_threshold(node: Any) -> bool:
    """True where a neuron's spikes are ``h >= v_threshold``, whatever their surrogate gradient."""
    function = node.surrogate_function
    return type(function) in _FIRING and bool(getattr(function, "spiking", True))


def affine(norm: Any) -> tuple[Tensor, Tensor]:
    """Scale and shift [C] of a BatchNorm in eval mode, differentiable in its weight and bias."""
    var: Tensor = norm.running_var
    numbers = var.device.type == "cpu" and var.dtype == torch.float32
    if numbers and not dispatch.differentiates(norm.weight, norm.bias) and dispatch.is_plain(var):
        return _affine_of_numbers(norm)
    invstd = 1 / torch.sqrt(norm.running_var + norm.eps)
    scale = invstd if norm.weight is None else norm.weight * invstd
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else norm.bias + shift


def _affine_of_numbers(norm: Any) -> tuple[Tensor, Tensor]:
    """``affine`` in NumPy, operation for operation: a call of torch's costs more than the arithmetic of a few channels."""
    scale = 1 / np.sqrt(norm.running_var.numpy() + np.float32(norm.eps))
    if norm.weight is not None:
        scale = norm.weight.detach().numpy() * scale
    shift = -norm.running_mean.numpy() * scale
    if norm.bias is not None:
        shift = norm.bias.detach().numpy() + shift
    return torch.from_numpy(scale), torch.from_numpy(shift)


def pool_frames(pool: Any, frames: Tensor) -> Tensor:
    """A pool on frames [T, N, C, H, W], by torch's own class, whatever the module has become."""
    kind = nn.MaxPool2d if isinstance(pool, nn.MaxPool2d) else nn.AvgPool2d
    pooled: Tensor = functional.seq_to_ann_forward(frames, lambda x: kind.forward(pool, x))
    return pooled


def pool_window(pool: Any) -> tuple[int, ...] | None:
    """(kh, kw, sh, sw, ph, pw) of a pool that the fused kernels know, else None."""

    def pair(value: Any) -> tuple[int, int]:
        return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))

    plain = not pool.ceil_mode
    if isinstance(pool, nn.MaxPool2d):
        plain = plain and not pool.return_indices and pair(pool.dilation) == (1, 1)
    elif isinstance(pool, nn.AvgPool2d):
        plain = plain and pool.divisor_override is None and (pool.count_include_pad or pair(pool.padding) == (0, 0))
    else:
        return None
    return (*pair(pool.kernel_size), *pair(pool.stride), *pair(pool.padding)) if plain else None


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
