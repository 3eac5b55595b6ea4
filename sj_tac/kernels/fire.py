"""``fire`` by backend: what each can do, and the same call for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import BackendError
from sj_tac.host import dispatch
from sj_tac.kernels import backends, fire_op, pools, reference
from sj_tac.kernels.weights import merged_steps


def kernel_problem(node: nn.Module, pool: nn.Module | None, differentiates: bool = True) -> str:
    """Why no compiled kernel can run this neuron and pool; empty where they can."""
    if host.fused_surrogate(node) is None and (differentiates or not host.fires_by_threshold(node)):
        names = ", ".join(t.__name__ for t in host.FUSED_SURROGATES)
        found = type(node.surrogate_function).__name__
        return f"the compiled kernels have no derivative of surrogate {found}, only of {names} in spiking mode"
    if pool is not None and host.pool_window(pool) is None:
        return f"the compiled kernels do not pool with this {type(pool).__name__}'s options"
    return ""


def choose(
    backend: str,
    node: nn.Module,
    pool: nn.Module | None,
    device: torch.device | None,
    dtype: torch.dtype = torch.float32,
    differentiates: bool = True,
) -> tuple[str, str]:
    """The kernel that runs there, and why it is not the fastest one. Raises BackendError where a named one cannot.

    Args:
        differentiates: gradients will be wanted; without them any surrogate will do.
    """
    if backends.choose(backend) == reference.NAME:
        return reference.NAME, ""
    fastest, problem = backends.fastest(backend, device, dtype)
    problem = problem or kernel_problem(node, pool, differentiates)
    if problem and backend != "auto":
        raise BackendError(f"backend={backend!r}: {problem}; use backend=\"auto\", which falls back to 'reference'")
    return (reference.NAME if problem else fastest), problem


def plan(backend: str, node: nn.Module, pool: nn.Module | None, weight: Tensor) -> tuple[str, str]:
    """``choose`` for a chain that is not running yet, by its conv's weight."""
    # A net that is to run on the GPU may be converted before it is moved there.
    elsewhere = weight.device.type == "meta" or (backend == backends.CUPY and weight.device.type == "cpu")
    return choose(backend, node, pool, None if elsewhere else weight.device, weight.dtype)


@dataclass(frozen=True)
class Call:
    """One call of ``fire``, whichever kernel runs it: arguments as ``functional.fire``, checked.

    Attributes:
        v: voltages, or None at rest; v, scale, shift, weights in the accumulation dtype of y.
        lengths: steps on each drive; linear: [G, 2], beta and gamma that make every drive one merged step, or None.
    """

    y: Tensor
    residual: Tensor | None
    node: Any
    v: Tensor | None
    lengths: Sequence[int]
    linear: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    pool: nn.Module | None
    weights: Tensor | None
    group: int


def run_reference(call: Call) -> tuple[Tensor, Tensor]:
    """The definition in plain PyTorch."""
    y, node, pool, weights, group = call.y, call.node, call.pool, call.weights, call.group
    narrow, y = y.dtype, y.to(reference.accumulation_dtype(y.dtype))
    v = torch.full_like(y[0], host.resting_voltage(node)) if call.v is None else call.v
    if call.scale is not None and call.shift is not None:
        y = y * call.scale.view(-1, 1, 1) + call.shift.view(-1, 1, 1)
    if call.linear is None:
        drives = reference.repeat(y, call.lengths)
        spikes, v = host.steps_on(node, drives if call.residual is None else drives + call.residual.to(drives.dtype), v)
    else:
        rest, fired = host.resting_voltage(node), []
        for drive, (beta, gamma) in zip(y, call.linear, strict=True):
            spike, v = host.fire_and_reset(node, rest + beta * (v - rest) + gamma * drive)
            fired.append(spike)
        spikes = torch.stack(fired)
    if pool is not None:
        spikes = host.pool_frames(pool, spikes)
    if weights is None:
        return spikes.to(narrow), v
    starts = range(0, len(spikes), group)
    sums = [reference.weighted_sum(spikes[i : i + group].unsqueeze(0), weights[i : i + group].unbind()) for i in starts]
    return torch.cat(sums).to(narrow), v


def operands(call: Call) -> tuple[Any, ...]:
    """What the torch operator ``sj_tac::fire`` is called with; the neuron's own numbers in float32 for half drives."""
    y, node, pool, linear, lengths = call.y, call.node, call.pool, call.linear, call.lengths
    wide = reference.accumulation_dtype(y.dtype)
    spec = host.fused_surrogate(node) or ((0, 1.0) if host.fires_by_threshold(node) else None)
    window = (1, 1, 1, 1, 0, 0) if pool is None else host.pool_window(pool)
    if spec is None or window is None:
        raise BackendError(kernel_problem(node, pool))
    merged = linear is not None
    decay, gain = host.decay(node, wide), host.input_gain(node, wide)
    if isinstance(decay, Tensor) and linear is None:
        pair = [torch.as_tensor(value, dtype=wide, device=y.device) for value in (decay, gain)]
        linear = torch.stack(pair).expand(len(lengths), 2)
    beta, gamma = (1.0 if isinstance(value, Tensor) else value for value in (decay, gain))
    mode, tau = host.charge_mode(node, merged), float(getattr(node, "tau", 1.0))
    if mode in (0, 1) and math.frexp(tau)[0] == 0.5:
        # Dividing by a power of two and multiplying by its inverse are the same to the last bit, and one is far faster.
        mode, tau = mode + 2, 1 / tau
    w = getattr(node, "w", None)
    kind = pools.NO_POOL
    if pool is not None:
        kind = pools.MAX_POOL if isinstance(pool, nn.MaxPool2d) else pools.AVG_POOL
    return (
        y, call.residual, call.scale, call.shift, call.v, linear, None if w is None else w.detach().to(wide).sigmoid(),
        call.weights, [1] * len(lengths) if merged else list(lengths), mode, tau, beta, gamma, host.resting_voltage(node),
        float(node.v_threshold), node.v_reset is not None, node.detach_reset, spec[0], spec[1], kind, list(window),
        call.group,
    )  # fmt: skip


def run_numba(call: Call) -> tuple[Tensor, Tensor]:
    """The compiled kernels for the CPU; half drives run in float32, and what comes out is half again."""
    wide = reference.accumulation_dtype(call.y.dtype)
    if call.y.dtype == wide:
        return _numba(call)
    residual = None if call.residual is None else call.residual.to(wide)
    out, v = _numba(replace(call, y=call.y.to(wide), residual=residual))
    return out.to(call.y.dtype), v


def _numba(call: Call) -> tuple[Tensor, Tensor]:
    """By torch's operator; straight where it has nothing to do, because its dispatch costs as much as a small map."""
    inputs = (call.y, call.residual, call.v, call.scale, call.shift, call.weights, getattr(call.node, "w", None))
    straight = dispatch.is_plain(call.y) and not dispatch.differentiates(*inputs)
    run = fire_op.fire_now if straight else fire_op.fire
    out: tuple[Tensor, Tensor] = run(*operands(call))
    return out


def run_cupy(call: Call) -> tuple[Tensor, Tensor]:
    """The CUDA kernels, which read and write half themselves."""
    out: tuple[Tensor, Tensor] = fire_op.fire(*operands(call))
    return out


RUNNERS = {reference.NAME: run_reference, backends.NUMBA: run_numba, backends.CUPY: run_cupy}


def fire_checked(
    kernel: str, y: Tensor, node: nn.Module, lengths: Sequence[int], v: Tensor | None, residual: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, pool: nn.Module | None, weights: Tensor | None, group: int, merge: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``fire`` by one kernel, with ``lengths[g]`` steps on drive g and everything else known to fit."""
    wide = reference.accumulation_dtype(y.dtype)
    linear = merged_steps(node, lengths, normalize, wide, y.device) if merge else None
    v, scale, shift, weights = (None if x is None else x.to(wide) for x in (v, scale, shift, weights))
    call = Call(y, residual, node, v, lengths, linear, scale, shift, pool, weights, group)
    return RUNNERS[kernel](call)
