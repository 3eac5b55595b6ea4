"""``neuron(expand(norm(y)) + r) = fire(y, norm, k, r)``: a neuron takes what is in front of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from sj_tac.kernels import fire_op
from sj_tac.rewrites.equations.nodes import (
    ADDS,
    EXPAND,
    NEURON,
    argument,
    dtype,
    each,
    emit,
    is_eval,
    is_frozen,
    is_tensor,
    replace,
    shape,
    through_reshapes,
)  # fmt: skip

NORM = ("running_mean", "running_var", "weight", "bias")


def fire(**operands: Any) -> tuple[Tensor, Tensor]:
    """A neuron with all that went into it; ``lower`` puts a kernel in its place.

    Operands: y [G * n, ...]; v: voltage or None; residual [T, ...] or None; norm: tensors of an eval BatchNorm and eps, or
    None; w: of a PLIF; steps: T; numbers: ``host.Numbers``; k; places: dimensions of a frame of one sample; pool: (kind,
    kh, kw, sh, sw, ph, pw) or None; sums: (k, weights, by, form) of the aggregate that reads the spikes, or None;
    convolution: (weight, bias, stride, padding, dilation) of what computes the drives from y, or None; top: the sums are
    whole numbers up to this one, in uint8, or None; joined: such numbers that are added to them, or None.
    """
    raise NotImplementedError(f"lower() did not replace fire of {list(operands)}")


def fuse(graph: Graph) -> None:
    """neuron(expand(norm(y)) + r) = fire(y, norm, k, r)."""
    for node in each(graph):
        if node.target is not NEURON or is_frozen(node):
            continue
        x, v, w, *numbers = node.args
        device, frame = x.meta["example_value"].device.type, shape(x)[1:]
        known = {"cpu": fire_op.ON_CPU, "cuda": fire_op.ON_CUDA}.get(device, ())
        if dtype(x) not in known or not frame:
            continue
        y, k, steps, residual = _drives(node, x)
        y, norm = _norm(y, frame)
        operands = {
            "y": y, "v": v, "residual": residual, "norm": norm, "w": w, "steps": steps, "numbers": tuple(numbers), "k": k,
            "places": len(frame) - 1, "pool": None, "sums": None, "convolution": None,
            "top": None, "joined": None,
        }  # fmt: skip
        with graph.inserting_before(node):
            new = graph.call_function(fire, (), operands)
        new.meta = dict(node.meta)
        replace(node, new)


def _drives(node: Node, x: Node) -> tuple[Node, int, Any, Node | None]:
    """Return y, k, T and the residual of drives x = expand(y) + residual."""

    def apart(n: Node) -> tuple[Node, int, Any]:
        if n.target is EXPAND and not is_frozen(n) and dtype(n) is dtype(x):
            return n.args
        steps = shape(n)[0]
        return n, 1, steps if isinstance(steps, int) else emit(node, "size", (n, 0))

    def alike(n: Any) -> bool:
        return is_tensor(n) and shape(n) == shape(x) and dtype(n) is dtype(x)

    if x.target in ADDS and not x.kwargs and len(x.users) == 1 and not is_frozen(x) and all(map(alike, x.args)):
        a, b = x.args
        # The operand that has most to give: one that is shared, else one behind a norm that no other node reads.
        gives = [(n.target is EXPAND, through_reshapes(n).target is F.batch_norm and len(n.users) == 1) for n in (a, b)]
        if any(gives[0]) or any(gives[1]):
            y, residual = (a, b) if gives[0] >= gives[1] else (b, a)
            return *apart(y), residual
    return *apart(x), None


def _norm(y: Node, frame: torch.Size) -> tuple[Node, tuple[Any, ...] | None]:
    """Return what a norm in front of the neuron reads and the norm's tensors, if it goes by the neuron's channels."""
    norm = through_reshapes(y)
    if norm.target is not F.batch_norm or not is_eval(norm) or is_frozen(norm, y) or shape(norm)[1:] != frame[1:]:
        return y, None
    of = argument(norm, 0, "input")
    if dtype(of) is not dtype(norm):
        return y, None
    tensors = [argument(norm, place + 1, name) for place, name in enumerate(NORM)]
    return of, (*tensors, argument(norm, 7, "eps", 1e-5))
