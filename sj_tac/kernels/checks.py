"""What every kernel takes for granted, looked at before it reads: shapes, dtypes, devices, and no forward-mode derivatives.

A kernel that is handed less than it reads gives numbers that were never there, so the operators look themselves, whoever
calls them. A check costs about as much as one small operation of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from sj_tac.kernels.operands import Operands
from sj_tac.kernels.pools import AVG_POOL, MAX_POOL, pooled_size

# By the dtype of frames, that of everything else: voltages, sums and numbers by channel.
WIDE = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
# Of what sums frames alone, the reference kernel has any derivative.
INSTEAD = 'use reverse mode (backward), or backend="reference"'


def _shown(x: Any) -> str:
    return f"{list(x.shape)} of {x.dtype} on {x.device}" if isinstance(x, Tensor) else str(x)


def _refuse(operator: str, name: str, found: Any, y: Tensor, wanted: str) -> NoReturn:
    kind = "drives" if operator.startswith("fire") else "frames"
    beside = "" if found is y else f" with {kind} {_shown(y)}"
    raise ValueError(f"{operator} got {name} {_shown(found)}{beside}; it takes {wanted}")


def wide_dtype(operator: str, y: Tensor) -> torch.dtype:
    """The dtype of all that goes with frames ``y``. Raises ValueError where they are not floating point numbers."""
    wide = WIDE.get(y.dtype)
    if wide is None:
        raise ValueError(
            f"{operator} got frames {list(y.shape)} of {y.dtype}; it takes float32, float64, float16 or bfloat16: "
            "convert what the net is handed, x.float()"
        )
    return wide


def refuse_tangents(operator: str, *tensors: Tensor | None, advice: str = "use reverse mode (backward)") -> None:
    """Raise NotImplementedError where a tensor carries a forward-mode derivative, which would be lost without a word."""
    if forward_ad._current_level < 0:
        return
    # Inside torch.func.jvp an operator's kernel is handed tensors that have been stripped of their tangents.
    lost = eager_transforms.JVP_NESTING > 0 and not any(_is_wrapped(x) for x in tensors)
    if lost or any(x is not None and _tangent(x) is not None for x in tensors):
        raise NotImplementedError(f"{operator}: forward-mode derivatives are not implemented; {advice}")


def _tangent(x: Tensor) -> Tensor | None:
    tangent: Tensor | None = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]
    return tangent


def _is_wrapped(x: Tensor | None) -> bool:
    return x is not None and bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def refuse_dtype(operator: str, y: Tensor, takes: Sequence[torch.dtype]) -> None:
    """Raise ValueError where a device's kernels do not read this dtype."""
    if y.dtype not in takes:
        kernels = f"one of {', '.join(str(dtype) for dtype in takes)} on {y.device.type}"
        if not y.dtype.is_floating_point:
            kernels += ": convert what the net is handed, x.float()"
        _refuse(operator, "drives" if operator.startswith("fire") else "frames", y, y, kernels)


def check_fire(o: Operands, operator: str = "fire") -> None:
    """Raise ValueError where the operands of ``fire`` do not fit each other."""
    # This runs on every call, however small: a comparison each, and words only where one fails.
    y, lengths = o.y, o.lengths
    shape, device, wide = y.shape, y.device, WIDE.get(y.dtype)
    if wide is None or len(shape) != 5 or not shape[0] or o.group < 1:
        _refuse_steps(o, operator)
    if len(lengths) and (len(lengths) != shape[0] or min(lengths) < 1):
        _refuse_steps(o, operator)
    steps = o.steps
    if o.scale is not None or o.shift is not None:
        _check_affine(o, operator, wide)
    if o.v0 is not None and (o.v0.shape != shape[1:] or o.v0.dtype is not wide or o.v0.device != device):
        _refuse(operator, "voltages", o.v0, y, f"[N, C, H, W] of {wide}")
    weights, residual = o.weights, o.residual
    if weights is not None and (weights.shape != (steps,) or weights.dtype is not wide or weights.device != device):
        _refuse(operator, "weights", weights, y, f"one weight for each of {steps} steps, of {wide}")
    if residual is not None and (residual.shape, residual.dtype, residual.device) != ((steps, *shape[1:]), y.dtype, device):
        _refuse(operator, "a residual", residual, y, f"one frame for each of {steps} steps, of {y.dtype}")
    if o.linear is not None or o.q is not None:
        _check_decay(o, operator, wide)
    if o.pool:
        _check_pool(o, operator)
    if forward_ad._current_level >= 0:
        refuse_tangents(operator, *o[:8])


def _refuse_steps(o: Operands, operator: str) -> NoReturn:
    y = o.y
    wide_dtype(operator, y)
    if y.dim() != 5 or not y.shape[0]:
        _refuse(operator, "drives", y, y, "[G, N, C, H, W] with G >= 1")
    if o.group < 1:
        _refuse(operator, "group", o.group, y, "groups of at least 1 step")
    _refuse(
        operator, "lengths", list(o.lengths), y, "one number of steps for each drive, at least 1, or none at all: one each"
    )


def _check_affine(o: Operands, operator: str, wide: torch.dtype) -> None:
    y, scale, shift = o.y, o.scale, o.shift
    if scale is None or shift is None:
        _refuse(operator, "scale and shift", [_shown(scale), _shown(shift)], y, "both of them or none")
    channels, device = (y.shape[2],), y.device
    if scale.shape != channels or scale.dtype is not wide or scale.device != device:
        _refuse(operator, "scale", scale, y, f"[C] of {wide}")
    if shift.shape != channels or shift.dtype is not wide or shift.device != device:
        _refuse(operator, "shift", shift, y, f"[C] of {wide}")


def _check_decay(o: Operands, operator: str, wide: torch.dtype) -> None:
    y, linear, q = o.y, o.linear, o.q
    if linear is not None and (linear.shape, linear.dtype, linear.device) != ((y.shape[0], 2), wide, y.device):
        _refuse(operator, "linear", linear, y, f"[G, 2] of {wide}")
    if q is not None and (q.shape, q.dtype, q.device) != ((), wide, y.device):
        _refuse(operator, "q", q, y, f"one number [] of {wide}")


def _check_pool(o: Operands, operator: str) -> None:
    """The windows of a pool lie on the map: each covers some of it, and there is at least one."""
    _, _, _, height, width = o.y.shape
    known = type(height) is type(width) is int  # else a symbol, which cannot be looked up
    if not (_pools if known else _pools.__wrapped__)(o.pool, tuple(o.window), height, width):
        if o.pool not in (MAX_POOL, AVG_POOL):
            _refuse(operator, "pool", o.pool, o.y, "0, 1 or 2: none, MaxPool, AvgPool")
        takes = "(kh, kw, sh, sw, ph, pw) with 0 <= 2 * padding <= kernel, and maps that hold a window"
        _refuse(operator, "the pool's window", list(o.window), o.y, takes)


@lru_cache(maxsize=256)
def _pools(pool: int, window: tuple[int, ...], height: int, width: int) -> bool:
    if pool not in (MAX_POOL, AVG_POOL) or len(window) != 6 or min(window[:4]) < 1 or min(window[4:]) < 0:
        return False
    kh, kw, _, _, ph, pw = window
    within = 2 * ph <= kh and 2 * pw <= kw and min(height, width) >= 1
    return within and min(pooled_size(height, width, pool, window)) >= 1


def emitted_shape(o: Operands) -> tuple[int, ...]:
    """Shape of the output of ``fire``."""
    n, c, height, width = o.y.shape[1:]
    rows = o.steps if o.weights is None else -(-o.steps // o.group)
    return (rows, n, c, *pooled_size(height, width, o.pool, o.window))


def check_fire_backward(go: Tensor, gv: Tensor | None, o: Operands) -> None:
    """Raise ValueError where the operands of the backward of ``fire`` do not fit each other."""
    check_fire(o, "fire_backward")
    y, shape = o.y, emitted_shape(o)
    if (go.shape, go.dtype, go.device) != (shape, y.dtype, y.device):
        _refuse("fire_backward", "the output's gradient", go, y, f"{list(shape)} of {y.dtype}")
    if gv is not None and (gv.shape, gv.dtype, gv.device) != (y.shape[1:], WIDE[y.dtype], y.device):
        _refuse("fire_backward", "the voltages' gradient", gv, y, f"[N, C, H, W] of {WIDE[y.dtype]}")
    refuse_tangents("fire_backward", go, gv)


def check_aggregate(x: Tensor, weights: Tensor, group: int, go: Tensor | None = None) -> None:
    """Raise ValueError where the operands of ``aggregate``, or of its backward, do not fit each other."""
    wide = WIDE.get(x.dtype) or wide_dtype("aggregate", x)
    if not x.dim() or not x.shape[0]:
        _refuse("aggregate", "frames", x, x, "[T, ...] with T >= 1")
    if group < 1:
        _refuse("aggregate", "group", group, x, "groups of at least 1 frame")
    if weights.shape != x.shape[:1] or weights.dtype is not wide or weights.device != x.device:
        _refuse("aggregate", "weights", weights, x, f"one weight for each frame, [T] of {wide}")
    if go is not None:
        shape = (-(-x.shape[0] // group), *x.shape[1:])
        if (go.shape, go.dtype, go.device) != (shape, x.dtype, x.device):
            _refuse("aggregate", "the output's gradient", go, x, f"{list(shape)} of {x.dtype}")
    if forward_ad._current_level >= 0:
        refuse_tangents("aggregate", x, weights, go, advice=INSTEAD)


def widened(operator: str, y: Tensor, name: str, x: Tensor | None) -> Tensor | None:
    """A tensor that goes with frames ``y``, in the dtype of their sums; ValueError where it holds no real numbers."""
    wide = WIDE.get(y.dtype)
    if x is None or x.dtype is wide:
        return x
    if not x.dtype.is_floating_point:
        _refuse(operator, name, x, y, "floating point numbers")
    return x.to(wide or wide_dtype(operator, y))
