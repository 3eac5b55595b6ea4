"""The operators of which a converted net is made, in plain PyTorch: any device, any floating dtype, differentiable.

    aggregate   frames [T * n, ...] -> sums [G * n, ...]           one weighted sum for each group of k frames
    expand      values [G * n, ...] -> frames [T * n, ...]         each value for every frame of its group
    neuron      drives [T, ...], voltage -> spikes [T, ...], voltage     the neuron's own T steps
    mark        frames -> frames                                   in captured graphs alone: here stands a shared convolution

G is T / k, rounded up; the last group may have fewer than k frames. Dimension 0 holds T blocks of n rows, T outermost, so
frames may be folded ([T * N, C, H, W], n = N) or not ([T, N, C, H, W], n = 1). ``steps`` is T.

Each operator is one node of a captured graph. Its backward recomputes the plain function, and autograd differentiates that.
Exporters, and modes that look at every operation, are given the plain functions: what torch.export writes needs torch alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sj_tac import host
from sj_tac.errors import ExportError
from sj_tac.host import dispatch
from sj_tac.kernels.checks import refuse_tangents


def groups(steps: int, k: int) -> int:
    """Return G, the number of groups of k frames in T frames."""
    return (steps + k - 1) // k


def group_weights(by: Tensor, length: int, form: str) -> Tensor:
    """Return the weights of a group of ``length`` frames from those of k frames, ``by`` [k].

    The last ones count: a frame's weight depends on the steps behind it. ``form`` is "plain"; "normalized", which rescales
    them to sum 1; or "logits", where ``by`` are logits and the weights their softmax.
    """
    last = by[by.shape[0] - length :]
    if form == "logits":
        return torch.softmax(last, 0)
    return last / last.sum() if form == "normalized" else last


def aggregated(x: Tensor, weights: Sequence[float], by: Tensor | None, steps: int, form: str) -> Tensor:
    """``aggregate`` as a function of plain PyTorch: ``sum_j w_j x_j``, in the order of j, half inputs in float32."""
    wide = host.wide_dtype(x.dtype)
    # On the CPU, whatever x's device: numbers that are copied to a GPU would have a CUDA graph's recording wait.
    flat = torch.tensor(weights, dtype=wide, device="cpu") if by is None else by.to(wide)
    k, frames = len(flat), _blocks(x, steps).to(wide)
    whole, sums = steps // k * k, []
    if whole:
        grouped = frames[:whole].reshape(whole // k, k, *frames.shape[1:])
        sums.append(_weighted(grouped, group_weights(flat, k, form)))
    if steps > whole:
        sums.append(_weighted(frames[whole:].unsqueeze(0), group_weights(flat, steps - whole, form)))
    return torch.cat(sums).flatten(0, 1).to(x.dtype)


def _blocks(x: Tensor, count: int) -> Tensor:
    """[count * n, ...] as [count, n, ...]."""
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


def _weighted(grouped: Tensor, weights: Tensor) -> Tensor:
    total = grouped[:, 0] * weights[0]
    for j in range(1, len(weights)):
        total = total + grouped[:, j] * weights[j]
    return total


def expanded(y: Tensor, k: int, steps: int) -> Tensor:
    """``expand`` as a function of plain PyTorch."""
    return _blocks(y, groups(steps, k)).repeat_interleave(k, 0)[:steps].flatten(0, 1)


def stepped(x: Tensor, v: Tensor | None, w: Tensor | None, *of: Any) -> tuple[Tensor, Tensor]:
    """``neuron`` as a function of plain PyTorch: SpikingJelly's own steps, half inputs in float32.

    Args:
        v: the voltage to begin with, in the dtype of steps; None where the neuron is at rest. w: of a ParametricLIFNode.
        of: ``host.Numbers``, with the surrogate as its number in ``host.SURROGATES_BY_NUMBER``, and that one's alpha.
    """
    *numbers, surrogate, alpha = of
    known = host.Numbers._make([*numbers, host.SURROGATES_BY_NUMBER[surrogate](alpha=alpha)])
    drives = x.to(host.wide_dtype(x.dtype))
    voltage = torch.full_like(drives[0], 0.0 if known.reset is None else known.reset) if v is None else v
    spikes, last = host.steps_of(known, drives, voltage, w)
    return spikes.to(x.dtype), last


def laid_like(x: Tensor, rows: int) -> Tensor:
    """Return an empty tensor of ``rows`` rows in x's memory format (channels_last is preserved), dimension 0 outermost."""
    if not x.shape[0]:
        return x.new_empty((rows, *x.shape[1:]))
    row = torch.empty_like(x[0])
    return x.new_empty_strided((rows, *x.shape[1:]), (max(1, row.numel()), *row.stride()))


def _operator(name: str, schema: str, function: Callable[..., Any], room: Callable[..., Any]) -> Any:
    """Register ``function`` as the torch operator ``sj_tac::name`` and return it.

    Where torch.export or a mode looks at a call, ``function`` itself runs.

    Args:
        function: the operator in plain PyTorch. room: returns empty outputs for the same arguments; also the fake kernel.
    """

    def body(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        refuse_tangents(name, *tensors)
        # Autocast must not change dtypes here: the graph's kernels compute in the input's dtype, too.
        with torch.autocast(tensors[0].device.type, enabled=False):
            made = function(*args)
        if isinstance(made, Tensor):
            return room(*args).copy_(made)
        return tuple(to.copy_(one) for to, one in zip(room(*args), made, strict=True))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in inputs])
        ctx.given = [None if isinstance(x, Tensor) else x for x in inputs]

    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(f"{name} has no gradient of a gradient (create_graph=True)")
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad
        device = next(t for t in saved if t is not None).device.type
        with torch.enable_grad(), torch.autocast(device, enabled=False):
            leaves = [None if t is None else t.detach().requires_grad_(need) for t, need in zip(saved, needs, strict=True)]
            made = function(*[x if t is None else t for t, x in zip(leaves, ctx.given, strict=True)])
        made = (made,) if isinstance(made, Tensor) else made
        pairs = [(out, g) for out, g in zip(made, gradients, strict=True) if g is not None and out.requires_grad]
        wanted = [t for t, need in zip(leaves, needs, strict=True) if t is not None and need]
        found = iter(torch.autograd.grad([out for out, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        return tuple(next(found) if need else None for need in needs)

    made = torch.library.custom_op(f"sj_tac::{name}", body, mutates_args=(), schema=schema)
    made.register_fake(room)
    made.register_autograd(backward, setup_context=setup)

    def call(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return made(*args)
        # Exporters, transforms of torch.func and modes, such as counters of operations, look into plain PyTorch.
        is_plain = torch.compiler.is_compiling() or dispatch.takes_gradients() or dispatch.modes() > 0
        return (function if is_plain else made)(*args)

    return call


def _room_of_sums(x: Tensor, weights: Sequence[float], by: Tensor | None, steps: int, form: str) -> Tensor:
    k = len(weights) if by is None else by.shape[0]
    return laid_like(x, x.shape[0] // steps * groups(steps, k))


def _room_of_frames(y: Tensor, k: int, steps: int) -> Tensor:
    return laid_like(y, y.shape[0] // groups(steps, k) * steps)


def _room_of_spikes(x: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    return laid_like(x, x.shape[0]), torch.empty_like(x[0], dtype=host.wide_dtype(x.dtype))


aggregate = _operator(
    "aggregate_frames",
    "(Tensor x, float[] weights, Tensor? by, SymInt steps, str form) -> Tensor",
    aggregated,
    _room_of_sums,
)
expand = _operator("expand_frames", "(Tensor y, SymInt k, SymInt steps) -> Tensor", expanded, _room_of_frames)
neuron = _operator(
    "neuron_steps",
    "(Tensor x, Tensor? v, Tensor? w, str kind, Scalar tau, bool decay_input, Scalar threshold, Scalar? reset, bool detach, "
    "int surrogate, Scalar alpha) -> (Tensor, Tensor)",
    stepped,
    _room_of_spikes,
)


def last_of_each(x: Tensor, k: int, steps: int) -> Tensor:
    """Return the last frame of each group of k, of frames that are equal within each group: ``aggregate`` by 0, .., 0, 1."""
    made: Tensor = aggregate(x, [0.0] * (k - 1) + [1.0], None, steps, "plain")
    return made


# --- in captured graphs ------------------------------------------------------------------------------------------------

# In a thread that calls a captured net, ``inside`` is True (rewrites/gate.py); ``marks`` is True while the captured call
# runs (rewrites/capture.py), and Dynamo reads it when it traces.
CAPTURE = threading.local()


def is_inside() -> bool:
    """Return whether this thread calls a captured net, recomputes a part of it in a backward pass, or compiles."""
    return getattr(CAPTURE, "inside", False) or torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling()


def is_captured() -> bool:
    """Return whether Dynamo traces this call for sj_tac's own backend, which replaces marks."""
    return torch.compiler.is_dynamo_compiling() and getattr(CAPTURE, "marks", False)


def refuse_trace() -> None:
    """Raise ExportError in a call that torch.jit traces."""
    if dispatch.tracing() is not None:
        raise ExportError(
            "torch.jit.trace, and the ONNX exporter that is built on it, cannot record a converted net: T and the voltages "
            "of this call would stay in the recording; use sj_tac.export_onnx, or torch.export.export"
        )


def _never_runs(*args: Any) -> Tensor:
    raise RuntimeError(f"the mark of layer {args[-1]!r} was not replaced: a backend that is not sj_tac's runs its graph")


def _no_backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    raise RuntimeError("a mark was not replaced")


mark = torch.library.custom_op(
    "sj_tac::mark",
    _never_runs,
    mutates_args=(),
    schema="(Tensor x, Tensor? logits, Tensor? beta, Scalar? decay, SymInt steps, str layer) -> Tensor",
)
mark.register_fake(lambda x, *_: torch.empty_like(x))
mark.register_autograd(_no_backward)
