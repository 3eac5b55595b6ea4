"""``sj_tac::fire`` and its backward as torch operators: schema, fake kernels, autograd; the kernels are in cpu/ and gpu/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sj_tac.host import dispatch
from sj_tac.kernels.backends import CPP
from sj_tac.kernels.checks import check_fire, check_fire_backward, emitted_shape, refuse_dtype
from sj_tac.kernels.cpu import fire as on_cpu
from sj_tac.kernels.gpu import launchers
from sj_tac.kernels.layout import RUNS, empty, in_memory, is_channels_last
from sj_tac.kernels.operands import Operands, schema
from sj_tac.kernels.reference import accumulation_dtype

# Dtypes of drives on each device.
ON_CPU = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ON_CUDA = (torch.float32, torch.float16, torch.bfloat16)


def _operands(arguments: tuple[Any, ...]) -> Operands:
    return Operands(*map(in_memory, arguments[:8]), *arguments[8:])


def fire_of(beside: on_cpu.Beside, *arguments: Any) -> tuple[Tensor, Tensor]:
    """``fire_now`` with what is no operand of the torch operator, for calls in inference."""
    o = _operands(arguments)
    refuse_dtype("fire", o.y, ON_CPU)
    check_fire(o)
    out = on_cpu.forward(o.counted(), beside)
    RUNS["fire", CPP] += 1
    return out


def fire_now(*arguments: Any) -> tuple[Tensor, Tensor]:
    """BN affine -> neuron steps -> pool -> weighted sums on the CPU; arguments: Operands.

    Raises:
        ValueError: operands that do not fit each other. NotImplementedError: forward-mode derivatives.

    Returns:
        Output and voltages in the memory format of y.
    """
    return fire_of(on_cpu.NOTHING_BESIDE, *arguments)


fire = torch.library.custom_op(
    "sj_tac::fire", fire_now, mutates_args=(), device_types="cpu", schema=f"({schema()}='') -> (Tensor, Tensor)"
)


@fire.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    o = Operands(*arguments)
    check_fire(o)
    last, wide = is_channels_last(o.y), accumulation_dtype(o.y.dtype)
    return empty(o.y, list(emitted_shape(o)), last), empty(o.y, list(o.y.shape[1:]), last, wide)


def fire_backward_now(go: Tensor, gv: Tensor | None, *arguments: Any) -> tuple[Tensor | None, ...]:
    """Gradients to y, residual, scale, shift, v0, linear and weights, from those to the output and the voltages (or None).

    None for what is None, and for a linear and weights that need none. Arguments: Operands, and which of these two do.
    """
    *operands, need_linear, need_weights = arguments
    go, gv, o = in_memory(go), in_memory(gv), _operands(tuple(operands))
    refuse_dtype("fire_backward", o.y, ON_CPU)
    check_fire_backward(go, gv, o)
    found = on_cpu.backward(go, gv, o.counted(), need_linear, need_weights)
    RUNS["fire", CPP] += 1
    return found


def _filled(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """The same with empty tensors in the place of None, as an operator must give."""

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        gy, g_residual, *sums = backward(*arguments)
        assert gy is not None
        wide = accumulation_dtype(gy.dtype)
        none = [gy.new_empty(0, dtype=wide) if x is None else x for x in sums]
        return gy, gy.new_empty(0) if g_residual is None else g_residual, *none

    return run


fire_backward = torch.library.custom_op(
    "sj_tac::fire_backward",
    _filled(fire_backward_now),
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor go, Tensor? gv, {schema()}, bool need_linear, bool need_weights) -> ({', '.join(['Tensor'] * 7)})",
)


@fire_backward.register_fake
def _(go: Tensor, gv: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    *operands, need_linear, need_weights = arguments
    o = Operands(*operands)
    check_fire_backward(go, gv, o)
    y, wide, last = o.y, accumulation_dtype(o.y.dtype), is_channels_last(o.y)

    def like(x: Tensor | None, needed: bool = True) -> Tensor:
        return y.new_empty(0 if x is None or not needed else x.shape, dtype=wide)

    g_residual = y.new_empty(0) if o.residual is None else empty(y, list(o.residual.shape), last)
    gv0 = like(None) if o.v0 is None else empty(y, list(y.shape[1:]), last, wide)
    sums = like(o.scale), like(o.shift), gv0, like(o.linear, need_linear), like(o.weights, need_weights)
    return empty(y, list(y.shape), last), g_residual, *sums


@fire.register_kernel("cuda")
def _on_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    from sj_tac.kernels.gpu import launches

    o = _operands(arguments)
    return launches.forward(launchers.named(o.launcher)[0], o)


def _back_on_cuda(go: Tensor, gv: Tensor | None, *arguments: Any) -> tuple[Tensor | None, ...]:
    """``fire_backward_now`` on CUDA."""
    from sj_tac.kernels.gpu import launches

    *operands, need_linear, need_weights = arguments
    go, gv, o = in_memory(go), in_memory(gv), _operands(tuple(operands))
    return launches.backward(launchers.named(o.launcher)[0], go, gv, o, need_linear, need_weights)


_backward_on_cuda = fire_backward.register_kernel("cuda")(_filled(_back_on_cuda))


# By kind of device, for who goes past torch's dispatch.
FORWARD: dict[str, Any] = {"cpu": fire_now, "cuda": _on_cuda}
BACKWARD: dict[str, Any] = {"cpu": fire_backward_now, "cuda": _back_on_cuda}


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # Nothing of T frames but the residual, which is there anyway: the steps are run again from y and v0.
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]
    # Most calls have no use for the last voltages: a frame of zeros would have to be made, and read.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, go: Tensor | None, gv: Tensor | None) -> tuple[Any, ...]:
    given, options, needs = ctx.saved_tensors, ctx.options, ctx.needs_input_grad
    if go is None:
        if gv is None:
            return (None,) * (8 + len(options))
        o = Operands(*given, *options)
        go = o.y.new_zeros(emitted_shape(o))
    # Who wants a gradient of this gradient, or many at once, or watches, is the operator's.
    straight = not torch.is_grad_enabled() and dispatch.is_plain(go) and not dispatch.is_batched(go, gv)
    backward: Any = BACKWARD[go.device.type] if straight else fire_backward
    gy, g_residual, g_scale, g_shift, gv0, g_linear, g_weights = backward(go, gv, *given, *options, needs[5], needs[7])
    found = (gy, g_residual, g_scale, g_shift, gv0, g_linear, None, g_weights)
    wanted = [g if needed and x is not None else None for x, g, needed in zip(given, found, needs, strict=False)]
    return (*wanted, *[None] * len(options))


fire.register_autograd(_backward, setup_context=_setup)


class Differentiated(torch.autograd.Function):
    """The operator for tensors that nobody watches: the same kernels and gradients, without torch's way to an operator of
    Python's, which costs more than the kernel of a small map.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        _setup(ctx, inputs, None)
        found: tuple[Tensor, Tensor] = FORWARD[inputs[0].device.type](*inputs)
        return found

    backward = staticmethod(_backward)


def _no_second(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "fire: the compiled kernels have no gradient of a gradient (create_graph=True), and surrogate gradients of spikes "
        "have no second order that means anything; take gradients of first order, or have the host's own steps "
        "differentiated twice: convert(..., fuse=False)"
    )


fire_backward.register_autograd(_no_second)
