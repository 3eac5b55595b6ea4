"""``sj_tac.functional.fire``, the same call for all backends. Captured calls come by rewrites/lower.py instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from sj_tac import host
from sj_tac.errors import BackendError
from sj_tac.host import dispatch
from sj_tac.host.neurons import ChargeMode
from sj_tac.kernels import backends, fire_op, pools, reference
from sj_tac.kernels.checks import check_fire, refuse_tangents, widened
from sj_tac.kernels.layout import laid_like
from sj_tac.kernels.operands import Operands, constants
from sj_tac.kernels.weights import merged_steps


def kernel_problem(node: nn.Module, pool: nn.Module | None) -> str:
    """Why no compiled kernel can run this neuron and pool; empty where they can."""
    if isinstance(node.v_threshold, Tensor) and (node.v_threshold.dim() or node.v_threshold.requires_grad):
        shape = list(node.v_threshold.shape)
        return f"the compiled kernels know one fixed v_threshold for all neurons, not a tensor {shape} or a trained one"
    if host.fused_surrogate(node) is None:
        names = ", ".join(t.__name__ for t in host.FUSED_SURROGATES)
        function: Any = node.surrogate_function
        found = (
            type(function).__name__ if isinstance(function, nn.Module) else getattr(function, "__qualname__", str(function))
        )
        problem = f"the compiled kernels have no derivative of surrogate {found}, only of {names} in spiking mode"
        if host.fires_by_threshold(node) or not host.may_be_vouched_for(function):
            return problem
        return f"{problem}; where its value is x >= 0, sj_tac.register_surrogate({found}) lets inference run compiled"
    if pool is not None and host.pool_window(pool) is None:
        return f"the compiled kernels do not pool with this {type(pool).__name__}'s options"
    return ""


def choose(
    backend: str,
    node: nn.Module,
    pool: nn.Module | None,
    device: torch.device | None,
    dtype: torch.dtype = torch.float32,
) -> tuple[str, str]:
    """The kernel that runs there, and why it is not the fastest one. Raises BackendError where a named one cannot."""
    if backends.choose(backend) == reference.NAME:
        return reference.NAME, ""
    fastest, problem = backends.fastest(backend, device, dtype)
    problem = problem or kernel_problem(node, pool)
    if problem and backend != "auto":
        raise BackendError(f"backend={backend!r}: {problem}; use backend=\"auto\", which falls back to 'reference'")
    return (reference.NAME if problem else fastest), problem


class Call(NamedTuple):
    """One call of ``fire``, whichever kernel runs it: arguments as ``functional.fire``.

    Attributes:
        lengths: steps on each drive; empty: one on each, however many there are. v: voltages, or None at rest.
    """

    y: Tensor
    node: Any
    lengths: Sequence[int]
    v: Tensor | None = None
    residual: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    pool: nn.Module | None = None
    weights: Tensor | None = None
    group: int = 1
    merge: bool = False
    normalize: bool = True


def _check(call: Call, linear: Tensor | None) -> None:
    """What the operators look at themselves, for the kernel that is not one."""
    window = None if call.pool is None else host.pool_window(call.pool)
    check_fire(
        Operands(
            call.y, call.residual, call.scale, call.shift, call.v, linear, None, call.weights,
            call.lengths if linear is None else [1] * len(call.lengths), 0, 1.0, 1.0, 1.0, 0.0, 1.0, False, False, 0, 1.0,
            pools.NO_POOL if window is None else pools.number(call.pool), window or (), call.group,
        )
    )  # fmt: skip


def _steps(call: Call, linear: Tensor | None, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Spikes of drives behind the affine map, and the last voltages."""
    node = call.node
    v = laid_like(v, y[0])
    if linear is None:
        drives = reference.repeat(y, call.lengths)
        if call.residual is not None:
            drives = drives + call.residual.to(drives.dtype)
        return host.steps_on(node, drives, v)
    rest, fired = host.resting_voltage(node), []
    for drive, (beta, gamma) in zip(y, linear, strict=True):
        spike, v = host.fire_and_reset(node, rest + beta * (v - rest) + gamma * drive)
        fired.append(spike)
    return torch.stack(fired), v


def run_reference(call: Call, linear: Tensor | None) -> tuple[Tensor, Tensor]:
    """The definition in plain PyTorch; linear: [G, 2], beta and gamma of merged steps, or None."""
    _check(call, linear)
    y, node, pool, weights, group = call.y, call.node, call.pool, call.weights, call.group
    narrow, y = y.dtype, y.to(reference.accumulation_dtype(y.dtype))
    v = torch.full_like(y[0], host.resting_voltage(node)) if call.v is None else call.v
    if call.scale is not None and call.shift is not None:
        y = y * call.scale.view(-1, 1, 1) + call.shift.view(-1, 1, 1)
    spikes, v = _steps(call, linear, y, v)
    if pool is not None:
        spikes = host.pool_frames(pool, spikes)
    if weights is None:
        return spikes.to(narrow), v
    starts = range(0, len(spikes), group)
    sums = [reference.weighted_sum(spikes[i : i + group].unsqueeze(0), weights[i : i + group].unbind()) for i in starts]
    return torch.cat(sums).to(narrow), v


def _plif(node: Any) -> Tensor | None:
    """w of a PLIF; asking other neurons for it would cost as much as a check of the whole call."""
    return node.w if isinstance(node, host.neuron.ParametricLIFNode) else None


def operands(call: Call, linear: Tensor | None, launcher: str = "") -> Operands:
    """What the torch operator ``sj_tac::fire`` is called with; the neuron's own numbers in float32 for half drives."""
    y, node, pool, lengths = call.y, call.node, call.pool, list(call.lengths)
    wide = reference.accumulation_dtype(y.dtype)
    spec = host.fused_surrogate(node) or ((0, 1.0) if host.fires_by_threshold(node) else None)
    window = (1, 1, 1, 1, 0, 0) if pool is None else host.pool_window(pool)
    if spec is None or window is None:
        raise BackendError(kernel_problem(node, pool))
    known, w = constants(*host.numbers_of(node)[:6], *spec), _plif(node)
    if linear is not None:
        known, lengths = (ChargeMode.MERGED, *known[1:]), [1] * len(lengths)
    # Only gradients need a PLIF's decay beside its sigmoid(w), and on a GPU each small operation is a launch.
    elif w is not None and not (dispatch.is_plain(y) and not dispatch.differentiates(y, *call[3:7], call.weights, w)):
        numbers = host.decay(node, wide), host.input_gain(node, wide)
        pair = [reference.tensor_of(value, wide, y.device) for value in numbers]
        linear = torch.stack(pair).expand(len(lengths) or y.shape[0], 2)
    rate = None if w is None else w.detach().to(wide).sigmoid().view(())
    tensors = (y, call.residual, call.scale, call.shift, call.v, linear, rate, call.weights)
    return Operands._make((*tensors, lengths, *known, pools.number(pool), list(window), call.group, launcher))


def run_cpp(call: Call, linear: Tensor | None) -> tuple[Tensor, Tensor]:
    """By torch's operator; straight where it has nothing to do, because its dispatch costs as much as a small map."""
    inputs = (call.y, call.residual, call.v, call.scale, call.shift, call.weights, _plif(call.node))
    if dispatch.is_plain(call.y) and not dispatch.differentiates(*inputs):
        return fire_op.fire_now(*operands(call, linear))
    return _by_operator(call, linear)


def _by_operator(call: Call, linear: Tensor | None, launcher: str = "") -> tuple[Tensor, Tensor]:
    backends.refuse_onnx("fire")
    straight = dispatch.is_plain(call.y) and call.y.device.type in fire_op.FORWARD
    fire: Any = fire_op.Differentiated.apply if straight else fire_op.fire
    out: tuple[Tensor, Tensor] = fire(*operands(call, linear, launcher))
    return out


def _run_cuda(launcher: str) -> Runner:
    """The CUDA kernels, which read and write half themselves, by one launcher."""
    return lambda call, linear: _by_operator(call, linear, launcher)


Runner = Callable[[Call, Tensor | None], tuple[Tensor, Tensor]]
RUNNERS: dict[str, Runner] = {reference.NAME: run_reference, backends.CPP: run_cpp}
RUNNERS |= {name: _run_cuda(name) for name in backends.ON_CUDA}


def run(kernel: str, call: Call, linear: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``fire`` by one kernel: output and last voltages.

    Args:
        linear: [G, 2], beta and gamma of the step on each drive, where the caller knows them; default: the neuron's.

    Raises:
        ValueError: operands that do not fit each other. NotImplementedError: forward-mode derivatives.
    """
    y, node, lengths, v, residual, scale, shift, _, weights, _, merge, normalize = call
    if residual is not None and (merge or residual.dtype is not y.dtype):
        raise ValueError(
            f"fire got a residual {list(residual.shape)} of {residual.dtype} with drives of {y.dtype}, merge={merge}; it "
            "takes one frame for each step, of the drives' dtype, and none for merged steps"
        )
    if forward_ad._current_level >= 0:
        refuse_tangents("fire", y, v, residual, scale, shift, weights, _plif(node))
    v, scale = widened("fire", y, "voltages", v), widened("fire", y, "scale", scale)
    shift, weights = widened("fire", y, "shift", shift), widened("fire", y, "weights", weights)
    if merge:
        linear = merged_steps(node, lengths, normalize, reference.accumulation_dtype(y.dtype), y.device)
    if v is not call.v or scale is not call.scale or shift is not call.shift or weights is not call.weights:
        call = call._replace(v=v, scale=scale, shift=shift, weights=weights)
    return RUNNERS[kernel](call, linear)
