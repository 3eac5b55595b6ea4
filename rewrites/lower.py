"""From equations to kernels: each ``fire`` and each aggregate becomes a call whose constants are already there."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from sj_tac import host
from sj_tac.definition import ops
from sj_tac.host import dispatch
from sj_tac.kernels import aggregate_op, fire_op
from sj_tac.kernels.cpu.fire import Beside, Convolution
from sj_tac.kernels.cpu.int8 import whole_sums
from sj_tac.kernels.operands import constants
from sj_tac.kernels.weights import group_lengths
from sj_tac.rewrites.equations.fuse import fire
from sj_tac.rewrites.equations.nodes import AGGREGATE, EXPAND, begin, each, is_frozen, replace
from sj_tac.rewrites.equations.writes import CHECKPOINT

_lengths = lru_cache(maxsize=1024)(group_lengths)


@lru_cache(maxsize=1024)
def _constant(weights: tuple[float, ...], steps: int, form: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _by_step(torch.tensor(weights, dtype=dtype, device=device), steps, form)


def _by_step(by: Tensor, steps: int, form: str) -> Tensor:
    """Return one weight for each of T steps."""
    k = by.shape[0]
    whole = [ops.group_weights(by, k, form)] * (steps // k)
    return torch.cat([*whole, ops.group_weights(by, steps % k, form)] if steps % k else whole)


def _weights(x: Tensor, weights: tuple[float, ...], by: Tensor | None, steps: int, form: str) -> Tensor:
    wide = host.wide_dtype(x.dtype)
    return _constant(weights, steps, form, wide, x.device) if by is None else _by_step(by.to(wide), steps, form)


def aggregate(x: Tensor, weights: tuple[float, ...], by: Tensor | None, steps: int, form: str, launcher: str = "") -> Tensor:
    """``ops.aggregate`` by sj_tac's kernel, where there is one for x."""
    if x.dtype not in {"cpu": aggregate_op.ON_CPU, "cuda": aggregate_op.ON_CUDA}.get(x.device.type, ()) or not x.numel():
        return ops.aggregate(x, list(weights), by, steps, form)  # type: ignore[no-any-return]
    frames = x if x.shape[0] == steps else x.unflatten(0, (steps, -1))
    flat = _weights(x, weights, by, steps, form)
    k = len(weights) if by is None else by.shape[0]
    straight = x.device.type == "cpu" and not dispatch.differentiates(x, by)
    out = (aggregate_op.aggregate_now if straight else aggregate_op.aggregate)(frames, flat, k, launcher)
    return out if frames is x else out.flatten(0, 1)


def _affine(known: host.Affine, wide: torch.dtype, mean: Tensor, var: Tensor, weight: Any, bias: Any, eps: float) -> Any:
    """Return scale and shift of an eval BatchNorm: its numbers' own, if nobody differentiates, for which nothing runs."""
    if var.device.type == "cpu" and var.dtype is torch.float32 is wide and not dispatch.differentiates(weight, bias):
        return known.of(eps, mean, var, weight, bias)
    scale = torch.rsqrt(var.to(wide) + eps)
    if weight is not None:
        scale = scale * weight.to(wide)
    shift = -mean.to(wide) * scale
    return scale, shift if bias is None else shift + bias.to(wide)


def _decay_and_gain(w: Tensor, decay_input: bool) -> Tensor:
    """Return beta and gamma of a PLIF, [2]."""
    rate = w.view(()).sigmoid()
    return torch.stack([1 - rate, rate if decay_input else torch.ones_like(rate)])


def _convolved(
    x: Tensor, drives: int, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> tuple[Tensor, Convolution | None]:
    """Return drives that are not there yet, and what computes them; or drives, and None.

    The kernel computes them in channels_last, where torch would give them that format, and in calls without gradients.
    """
    last = any(not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))
    if not last or torch.is_grad_enabled():
        return F.conv2d(x, weight, bias, stride, padding, dilation), None
    (ph, pw), (dh, dw), (kh, kw) = padding, dilation, weight.shape[2:]
    frames = F.pad(x, (pw, pw, ph, ph)).contiguous()
    size = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(frames.shape[2:], (dh, dw), (kh, kw), stride, strict=True)]
    if min(size) < 1:
        return F.conv2d(x, weight, bias, stride, padding, dilation), None  # which says what is wrong
    y = x.new_empty(()).expand(x.shape[0], weight.shape[0], *size)
    return y, Convolution(frames.unflatten(0, (drives, -1)), weight, bias, stride, dilation)


class Fire:
    """``fire`` with its constants filled in; numbers that change from call to call are handed to the call.

    Args:
        numbers, k, places, pool: as of ``equations.fuse.fire``. form: of its sums.
        top: the sums are whole numbers up to this one, in uint8 (equations/integers.py); None: in the drives' dtype.
    """

    is_fire = True

    def __init__(
        self, numbers: tuple[Any, ...], k: int, places: int, pool: Any, form: str, launcher: str = "", top: int | None = None
    ) -> None:
        self.__name__ = "fire"  # as the graph's Python has it
        self._fixed = None if any(isinstance(n, Node) for n in numbers) else constants(*numbers)
        self._k, self._places, self._form, self._launcher, self._top = k, places, form, launcher, top
        self._pool = pool or (0, 1, 1, 1, 1, 0, 0)
        self._norm, self._decay_input = host.Affine(), numbers[2]

    def __call__(
        self, y: Tensor, v: Tensor | None, residual: Tensor | None, norm: tuple[Any, ...] | None, w: Tensor | None,
        beside: tuple[Any, Any], sums: tuple[Any, ...] | None, times: tuple[int, tuple[Any, ...] | None],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """beside: a convolution that computes the drives, and frames that join the sums; times: T, and changing numbers."""
        (steps, changing), (convolution, joined), places = times, beside, self._places
        lengths = _lengths(steps, self._k)
        drives, convolved, maps = len(lengths), None, places == 3
        if convolution is not None:
            y, convolved = _convolved(y, drives, *convolution)
        inner = y.shape[y.dim() - places :] if places else y.shape[:0]
        size = inner if maps else (*inner[:1], *[1] * (not places), math.prod(inner[1:]), 1)
        y5 = y.reshape(drives, -1, *size)
        if v is not None and not maps:
            v = v.reshape(-1, *size)
        if residual is not None:
            residual = residual.reshape(steps, -1, *size)
        scale, shift = (None, None) if norm is None else _affine(self._norm, host.wide_dtype(y.dtype), *norm)
        linear = q = None
        if w is not None:
            q = w.detach().sigmoid().view(())
            if dispatch.differentiates(y, v, residual, scale, shift, w):
                linear = _decay_and_gain(w, self._decay_input).expand(drives, 2)
        group, weights = (1, None) if sums is None else self._weights(y, sums, steps)
        kind, *window = self._pool
        known = constants(*changing) if self._fixed is None else self._fixed
        operands = y5, residual, scale, shift, v, linear, q, weights, lengths, *known, kind, window, group, self._launcher
        if torch.is_grad_enabled():
            out, last = fire_op.Differentiated.apply(*operands)
        elif convolved is None and self._top is None:
            out, last = fire_op.FORWARD[y.device.type](*operands)
        else:
            frames = joined
            if joined is not None:
                frames = joined.reshape(-1, *y5.shape[1:3], *(joined.shape[joined.dim() - 2 :] if maps else y5.shape[3:]))
            out, last = fire_op.fire_of(Beside(convolved, frames, self._top is not None), *operands)
        if maps:
            return out, last
        # SpikingJelly's detach() is in place, which no view allows: the voltage gets memory of its own.
        last = last.reshape(-1, *inner)
        return out.reshape(out.shape[0], -1, *inner), last.clone()

    def _weights(self, y: Tensor, sums: tuple[Any, ...], steps: int) -> tuple[int, Tensor]:
        """Return how many steps a group has, and one weight for each of T."""
        group, weights, by = sums
        if self._top is None:
            return group, _weights(y, weights, by, steps, self._form)
        return group, whole_sums(weights, by, steps, self._top)[0]


def checkpointed(body: GraphModule, *operands: Any, context_fn: Any = None, **options: Any) -> Any:
    """Run the body of a checkpoint under torch's own, which keeps the random state that a dropout in it draws from.

    What the body writes into, as a BatchNorm's statistics, is no argument of the checkpoint: it would be saved, and missed.
    """
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    handed = [x for node, x in zip(inputs, operands, strict=True) if not is_frozen(node)]

    def run(*given: Any) -> Any:
        rest = iter(given)
        return body(*(x if is_frozen(node) else next(rest) for node, x in zip(inputs, operands, strict=True)))

    more = {} if context_fn is None else {"context_fn": context_fn}
    return checkpoint(run, *handed, use_reentrant=False, preserve_rng_state=True, **more)


def lower(gm: GraphModule, launcher: str = "") -> None:
    """Put kernels in the place of ``fire``, aggregates, expands and checkpoints, in place; the rest stays torch's own.

    ``launcher``: of the CUDA kernels; empty for the first that works.
    """
    for inner in gm.children():
        if isinstance(inner, GraphModule):
            lower(inner, launcher)
    begin(gm.graph, lower)
    for node in each(gm.graph):
        found = _lowered(node, launcher)
        if found is not None:
            target, args, kwargs = found
            with gm.graph.inserting_before(node):
                new = gm.graph.call_function(target, args, kwargs)
            new.meta = node.meta
            replace(node, new)
    gm.graph.lint()
    gm.recompile()


def _lowered(node: Node, launcher: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    if node.target is fire:
        o: dict[str, Any] = dict(node.kwargs)
        numbers, sums, form = o["numbers"], None, ""
        if o["sums"] is not None:
            k, weights, by, form = o["sums"]
            sums = (k, weights, by)
        target = Fire(numbers, o["k"], o["places"], o["pool"], form, launcher, o["top"])
        changing = numbers if any(isinstance(n, Node) for n in numbers) else None
        names, beside = ("y", "v", "residual", "norm", "w"), (o["convolution"], o["joined"])
        return target, (*(o[name] for name in names), beside, sums, (o["steps"], changing)), {}
    if node.target is AGGREGATE:
        x, weights, *more = node.args
        return aggregate, (x, tuple(weights), *more, launcher), {}
    if node.target is EXPAND:
        return ops.expanded, node.args, {}
    if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == CHECKPOINT:
        return checkpointed, node.args, dict(node.kwargs)
    return None
