"""What norms and pools of the host compute, as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from spikingjelly.activation_based import functional
from torch import Tensor, nn
from torch.autograd import forward_ad

from sj_tac.host import arrays, dispatch


class _Number(NamedTuple):
    """A tensor that was given, or None; where and how its numbers lay, the memory there, and what it held.

    ``place`` is empty where they did not lie side by side, or nowhere: then the next call looks anew.
    """

    tensor: Tensor | None
    place: tuple[Any, ...]
    memory: Any
    content: bytes


class Mapped(NamedTuple):
    """The affine map of a BatchNorm, scale and shift [C], and what its gradients take: 1 / sqrt(var + eps), and minus the
    running mean.
    """

    by: tuple[Tensor, Tensor]
    invstd: Tensor
    opposite: Tensor


class Affine:
    """The map of one BatchNorm's numbers, computed again only when one of them is another.

    The numbers themselves are compared: who writes through ``.data`` leaves no other trace.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        # Replaced as a whole: another thread may be reading it.
        self._known: tuple[float, list[_Number], Mapped] | None = None

    def of(self, eps: float, *tensors: Tensor | None) -> Mapped:
        """The map; tensors: running mean and variance, weight and bias or None, float32 on the CPU."""
        known = self._known
        if known is not None and known[0] == eps:
            for x, (before, place, memory, content) in zip(tensors, known[1], strict=True):
                if x is not before:
                    break
                # Where it lies first: the memory may be nobody's by now.
                if x is not None and ((x.data_ptr(), x.shape, x.stride()) != place or memory.raw != content):
                    break
            else:
                return known[2]
        pairs = [(_NOTHING, None) if x is None else _number(x) for x in tensors]
        with torch.inference_mode(False):  # it outlives the call that it was computed in
            found = _affine_of_numbers(eps, *(array for _, array in pairs))
        self._known = eps, [number for number, _ in pairs], found
        return found


_NOTHING = _Number(None, (), None, b"")


def _number(x: Tensor) -> tuple[_Number, np.ndarray[Any, Any]]:
    """What is kept of a tensor, and its numbers as an array of their own. Raises RuntimeError where its memory was freed."""
    if x.numel() and not x.data_ptr():
        raise RuntimeError(
            f"a BatchNorm's tensor of shape {list(x.shape)} has no memory: its storage was freed, as sharding and "
            "offloading do outside of the module's forward; bring it back before the call"
        )
    if x.numel() and x.is_contiguous() and x.dtype is torch.float32:
        memory = arrays.memory(x)
        content = memory.raw
        return _Number(x, (x.data_ptr(), x.shape, x.stride()), memory, content), np.frombuffer(content, np.float32)
    return _Number(x, (), None, b""), x.detach().clone().contiguous().numpy()


def norm_numbers(norm: Any) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Weight, bias, running mean and variance of a BatchNorm."""
    # Past the module's own look-up, which costs more than the arithmetic; a parametrized weight is in neither.
    held = norm._parameters
    weight, bias = [held[name] if name in held else getattr(norm, name) for name in ("weight", "bias")]
    return weight, bias, norm._buffers["running_mean"], norm._buffers["running_var"]


def affine(norm: Any, known: Affine, watched: bool | None = None) -> tuple[Tensor, Tensor]:
    """Scale and shift [C] of a BatchNorm in eval mode, differentiable in its weight and bias.

    ``watched``: whether something of torch's watches the call, where that was found out already.
    """
    # norm_numbers, written out: small maps cost little more than the way to their kernel.
    held, buffers = norm._parameters, norm._buffers
    weight = held["weight"] if "weight" in held else norm.weight  # noqa: SIM401
    bias = held["bias"] if "bias" in held else norm.bias  # noqa: SIM401
    mean, var = buffers["running_mean"], buffers["running_var"]
    numbers = var.device.type == "cpu" and var.dtype is torch.float32 and type(var) in dispatch.PLAIN
    numbers = numbers and (dispatch.is_plain(var) if watched is None else not watched)
    if numbers and not (torch.is_grad_enabled() and dispatch.differentiates(weight, bias)):
        return known.of(norm.eps, mean, var, weight, bias).by
    if numbers and are_differentiable(var, weight, bias):
        found = known.of(norm.eps, mean, var, weight, bias)
        scale, shift = found.by
        # Tensors of their own: what was kept must not come to hang on a graph.
        return differentiable(weight, bias, lambda: found._replace(by=(scale.clone(), shift.clone())))
    invstd = 1 / torch.sqrt(var + norm.eps)
    scale = invstd if weight is None else weight * invstd
    shift = -mean * scale
    return scale, shift if bias is None else bias + shift


class _Differentiable(torch.autograd.Function):
    """A map that was computed as numbers, with the gradients to the BatchNorm's weight and bias: of torch's own operations,
    each of which costs more than the arithmetic of a few channels, these would be seven, and their backwards.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor | None, bias: Tensor | None, make: Callable[[], Mapped]) -> tuple[Tensor, Tensor]:
        by, *saved = make()
        # The numbers of then: running statistics may move before the backward.
        ctx.save_for_backward(*saved)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(by[0])
        return by

    @staticmethod
    def backward(ctx: Any, g_scale: Tensor, g_shift: Tensor) -> tuple[Any, ...]:
        (invstd, opposite), (of_weight, of_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        # scale = weight * invstd, shift = bias + opposite * scale
        return (g_scale + opposite * g_shift) * invstd if of_weight else None, g_shift if of_bias else None, None


def are_differentiable(var: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether ``differentiable`` knows a weight and bias: without tangents, of the running variance's dtype and device."""
    if forward_ad._current_level >= 0:
        return False
    kind = var.dtype, var.device
    return all(x is None or (type(x) in dispatch.PLAIN and (x.dtype, x.device) == kind) for x in (weight, bias))


def differentiable(weight: Tensor | None, bias: Tensor | None, make: Callable[[], Mapped]) -> tuple[Tensor, Tensor]:
    """Scale and shift of a map that nobody watches, differentiable in weight and bias; ``make`` gives a scale and a shift
    that nobody else holds.
    """
    found: tuple[Tensor, Tensor] = _Differentiable.apply(weight, bias, make)
    return found


_ONE = np.float32(1)


def _affine_of_numbers(eps: float, mean: Any, var: Any, weight: Any, bias: Any) -> Mapped:
    """``affine`` in NumPy, operation for operation: a call of torch's costs more than the arithmetic of a few channels."""
    invstd = np.add(var, np.float32(eps))
    np.sqrt(invstd, out=invstd)
    np.divide(_ONE, invstd, out=invstd)
    scale = invstd if weight is None else np.multiply(weight, invstd)
    shift = np.multiply(mean, scale)
    if bias is None:
        np.negative(shift, out=shift)
    else:
        np.subtract(bias, shift, out=shift)  # b - m s is b + (-m) s, to the last bit
    scale, shift, invstd, opposite = (torch.from_numpy(x) for x in (scale, shift, invstd, np.negative(mean)))
    return Mapped((scale, shift), invstd, opposite)


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
