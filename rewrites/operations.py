"""What an operation does to time: the one place that knows which modules and functions treat frames alike.

Its counterpart in a call is sj_tac/runtime/table.py: what carries frames here must be handled there.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from sj_tac import host
from sj_tac.rewrites.buffers import is_whole, written
from sj_tac.rewrites.kinds import Kind
from sj_tac.rewrites.layouts import Layout, Sample, layout_of
from sj_tac.rewrites.maps import filled_kind, is_unclear, map_kind
from sj_tac.runtime.swaps import clash

# fmt: off
_SUMS = {
    operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub, "add", "add_", "sub", "sub_", "__iadd__",
    "__isub__",
}
_SCALINGS = {
    operator.mul, operator.imul, operator.truediv, operator.itruediv, torch.mul, torch.div, "mul", "mul_", "div", "div_",
    "__imul__", "__itruediv__",
}
# fmt: on
_CATS = {torch.cat, torch.concat, torch.concatenate}
_PRODUCTS = {operator.mul, torch.mul}
_DIVISIONS = {operator.truediv, operator.itruediv, torch.div, "div", "div_"}
# To a dtype, as the sample has it: rounding is alike for all frames.
_CASTS = {"float", "double", "half", "bfloat16", "to", "type_as"}
_COPIES = {"contiguous", "clone", "detach", operator.pos, operator.neg, torch.neg, torch.clone, torch.detach, "neg"}
_WRITTEN_OUT = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}
_IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, "add_", "sub_", "mul_", "div_", *_WRITTEN_OUT}
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
# Those that return indices are other functions.
_MAX_POOLS = {F.max_pool1d, F.max_pool2d, F.max_pool3d}
_FLATTENS = {torch.flatten, "flatten"}
_SQUEEZES = {"squeeze", "unsqueeze", torch.squeeze, torch.unsqueeze}
_RESHAPES = {
    torch.reshape,
    "reshape",
    "view",
    "view_as",
    "reshape_as",
    *_FLATTENS,
    "unflatten",
    *_SQUEEZES,
}
_PERMUTES = {"permute", torch.permute}
_TRANSPOSES = {
    *("transpose", torch.transpose, "swapaxes", torch.swapaxes),
    *("movedim", torch.movedim, "moveaxis", torch.moveaxis),
}
_MEANS = {torch.mean, "mean", torch.sum, "sum"}
_UNBINDS = {torch.unbind, "unbind"}
_PARTS = {torch.chunk, "chunk", torch.split, "split", *_UNBINDS}
# Pools and resizing of each frame's map: linear on folded frames, where they see one frame at a time.
_RESIZES = {F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d}
_INTERPOLATES = {F.interpolate}
# Of channels and places of each frame's map.
_SHUFFLES = {torch.pixel_shuffle, torch.pixel_unshuffle}
_QUERIES = {"shape", "ndim", "dtype", "device", "is_cuda"}
_ASKING = {"size", "dim", "numel", "is_contiguous", "stride", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
_LIKE = {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like}
# Of these the second argument gives a shape or a type, and no frames.
_AS = {"view_as", "reshape_as", "expand_as", "type_as", torch.Tensor.view_as, torch.Tensor.reshape_as}


def asks(node: fx.Node) -> bool:
    """True for a question about a value that no frames are needed for."""
    if node.op == "call_method":
        return node.target in _ASKING
    return node.target in _LIKE or (node.target is getattr and len(node.args) > 1 and node.args[1] in _QUERIES)


def read_by(node: fx.Node) -> list[fx.Node]:
    """The values that an operation reads, rather than asks for their shape or type."""
    return [a for a in node.args[:1] if isinstance(a, fx.Node)] if node.target in _AS else node.all_input_nodes


def kind_of(
    node: fx.Node, module: nn.Module | None, inputs: int, sample: Sample | None, frames: Container[fx.Node] = ()
) -> Kind:
    """What one operation of a graph is.

    Args:
        module: what is called, None for a function. inputs: how many values that carry frames go in.
        sample: T and N of the sample that gave the nodes their shapes, or None. frames: what carries frames.
    """
    if node.op == "placeholder":
        return Kind.INPUT
    if node.op == "output":
        return Kind.OUTPUT
    if node.target is written or node.target == "copy_":
        return filled_kind(node, sample, frames) or _written_kind(node, inputs)
    if module is None and inputs == 1:
        found = _mapped(node, frames) or _with_constant(node, sample, frames)
        if found is not None:
            return found
    if any(n.op == "get_attr" for n in node.all_input_nodes):
        # A parameter may have T in it.
        return Kind.FIXED
    if module is None:
        # Frames that were folded one way, and the other, do not belong together.
        orders = {layout_of(n).batch_first for n in node.all_input_nodes if layout_of(n) is not Layout.OTHER}
        return _function_kind(node, inputs) if len(orders) < 2 else Kind.FIXED
    if inputs != 1:
        return Kind.FIXED
    found = _kind_of_module(node, module)
    # What a converted layer takes: the size of a transposed conv's output, say, is not passed on.
    more = len(node.args) + len(node.kwargs) > 1 or (node.kwargs and node.kwargs.keys() != {_argument(module)})
    return Kind.FIXED if more and found in (Kind.SITE, Kind.NORM, Kind.MAX_POOL, Kind.LINEAR) else found


def _argument(module: nn.Module) -> str:
    """The name of the frames among the arguments of a module."""
    return next(iter(inspect.signature(module.forward).parameters), "")


def _kind_of_module(node: fx.Node, module: nn.Module) -> Kind:
    """Of a module that is handed one value, by where time stands in that."""
    before, after = _layouts(node)
    if before is not after and (before.folded or after.folded):
        return Kind.FIXED
    steps = host.steps_by_itself(module)
    if steps and before is (Layout.TIME if host.is_batch_first(module) else Layout.BATCH):
        return Kind.FIXED  # it steps through samples
    if host.kind(module) in (*host.PADS, *host.SHUFFLES):
        if before is not after or before is Layout.OTHER:
            return Kind.FIXED
        padding: Any = getattr(module, "padding", ())
        dims = len(padding) // 2 if host.kind(module) in host.PADS else 3
        return _reaching(dims, node, before.kept)
    return folded_kind(module) if before.folded else module_kind(module)


def _mapped(node: fx.Node, frames: Container[fx.Node]) -> Kind | None:
    """Of a linear map of each frame: None where time stands elsewhere, or for other operations."""
    x = next((n for n in node.all_input_nodes if n in frames), None)
    layout = Layout.OTHER if x is None else layout_of(x)
    return None if x is None or layout is Layout.OTHER else map_kind(node, x, layout.kept)


def _with_constant(node: fx.Node, sample: Sample | None, frames: Container[fx.Node]) -> Kind | None:
    """Of frames and a tensor that is none: a parameter, a buffer, or what was made of such; None for other operations.

    Its shape in the sample tells whether it is the same for every frame of every sample.
    """
    if node.target not in _SUMS | _SCALINGS or node.kwargs or len(node.args) != 2 or sample is None:
        return None
    if not all(isinstance(a, fx.Node) for a in node.args) or len(node.all_input_nodes) != 2:
        return None
    first, second = node.all_input_nodes
    x, constant = (first, second) if first in frames else (second, first)
    before, shape, layout = x.meta.get("shape"), constant.meta.get("shape"), layout_of(x)
    if before is None or shape is None or layout is Layout.OTHER or len(shape) > len(before):
        return Kind.FIXED
    kept = layout.kept
    ahead = max(0, len(shape) - len(before) + kept)
    unclear = ahead and is_unclear(constant, sample)
    if unclear or any(size != 1 for size in shape[:ahead]) or (constant is first and node.target in _DIVISIONS | _IN_PLACE):
        return Kind.FIXED
    # In another call such a tensor may have a size of 1 where it has a time or a batch: none but a parameter may say so.
    if ahead and not constant.meta.get("parameter"):
        return Kind.SPREAD
    return Kind.WRITTEN if node.target in _IN_PLACE else Kind.AFFINE


def _written_kind(node: fx.Node, inputs: int) -> Kind:
    """Of a tensor that a value was written into: all of it, which copies the value, or a part."""
    index, value = (..., node.args[1]) if node.target == "copy_" else node.args[1:]
    whole = inputs == 1 and isinstance(value, fx.Node) and is_whole(index)
    same = (
        isinstance(value, fx.Node)
        and value.meta.get("shape") is not None
        and value.meta.get("shape") == node.meta.get("shape")
    )
    return Kind.WRITTEN if whole and same else Kind.FIXED


def _layouts(node: fx.Node) -> tuple[Layout, Layout]:
    """Of what goes in first, and of what comes out."""
    if not node.all_input_nodes:
        return Layout.OTHER, Layout.OTHER
    return layout_of(node.all_input_nodes[0]), layout_of(node)


def module_kind(module: nn.Module) -> Kind:
    """What a module does to frames [T, N, ...], by its class and step mode."""
    kind = host.kind(module)
    if not host.is_multi_step(module) or clash(module):
        return Kind.FIXED
    if kind in host.NEURONS or host.is_registered_neuron(module):
        return Kind.FIXED if host.many_numbers(module) else Kind.NEURON
    if host.is_registered_affine(module):
        return Kind.AFFINE
    if kind in (*host.CONVS, *host.LINEARS) or site_layer(module) is not None:
        return Kind.SITE
    if kind in host.NORMS:
        return Kind.FIXED if host.uses_batch_statistics(module) else Kind.NORM
    if kind in host.LINEAR_IN_TIME:
        return Kind.LINEAR
    if kind in host.AFFINE:
        return Kind.AFFINE
    if kind in host.MAX_POOLS:
        return Kind.FIXED if getattr(module, "return_indices", False) else Kind.MAX_POOL
    return Kind.AFFINE if kind in host.PER_FRAME else Kind.FIXED


def folded_kind(module: nn.Module) -> Kind:
    """What one of torch's own modules does to folded frames [T * N, ...]: it treats all that is in a batch alike."""
    kind = host.kind(module)
    if clash(module):
        return Kind.FIXED
    if host.is_registered_affine(module):
        return Kind.AFFINE
    if kind in (*host.FOLDED_CONVS, *host.FOLDED_LINEARS):
        return Kind.SITE
    if kind in host.PLAIN_NORMS:
        return Kind.FIXED if host.uses_batch_statistics(module) else Kind.NORM
    if kind in host.FOLDED_LINEAR:
        return Kind.LINEAR
    if kind in host.FOLDED_MAX_POOLS:
        return Kind.FIXED if getattr(module, "return_indices", False) else Kind.MAX_POOL
    return Kind.AFFINE if kind in host.PER_FRAME else Kind.FIXED


def site_layer(container: nn.Module) -> nn.Module | None:
    """The conv or Linear of a container that runs it, a norm and pools frame by frame; None for any other module."""
    if host.kind(container) not in host.CONTAINERS:
        return None
    first, *behind = [*container.children()] or [container]
    if host.kind(first) not in (*host.INNER_CONVS, *host.INNER_LINEARS):
        return None
    allowed = (*host.NORMS, *host.PLAIN_NORMS, *host.INNER_AVG_POOLS, nn.MaxPool2d, nn.Identity)
    plain = all(host.kind(m) in allowed for m in behind)
    norms = [m for m in behind if host.is_norm(m)]
    if not plain or any(host.uses_batch_statistics(m) for m in norms) or (norms and behind[0] is not norms[0]):
        return None
    return None if len(norms) > 1 else first


def _function_kind(node: fx.Node, inputs: int) -> Kind:
    target, others = node.target, [a for a in _flat(node.args[1:]) if not isinstance(a, fx.Node)]
    if target in _SUMS and (inputs == 2 or len(node.all_input_nodes) == 2):
        if inputs != 2 or others or node.kwargs:
            return Kind.FIXED
        return Kind.ADDED if target in _IN_PLACE else Kind.SUM
    if target in _SUMS and inputs == 1 and all(isinstance(a, (int, float)) for a in others):
        return Kind.FIXED if node.kwargs else Kind.WRITTEN if target in _IN_PLACE else Kind.AFFINE
    if target in _CATS:
        dim = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else 0))
        return Kind.SUM if _are_inner([dim], node) else Kind.FIXED
    if inputs != 1:
        return Kind.FIXED
    if target in _SCALINGS:
        return _scaling_kind(node, others)
    if target in _COPIES:
        return Kind.LINEAR
    if target in _DROPOUTS:
        return Kind.AFFINE
    if target in _CASTS:
        dtype = node.meta.get("dtype")
        return Kind.AFFINE if dtype is not None and dtype.is_floating_point and not node.kwargs else Kind.FIXED
    return _shape_kind(node, others)


def _scaling_kind(node: fx.Node, others: list[Any]) -> Kind:
    """By one number: beside the value, or in front of it in a product. ``x * x`` has one input, too."""
    first = node.args[0] if node.args else None
    if node.kwargs or len(node.args) != 2:
        return Kind.FIXED
    if isinstance(first, (int, float)):
        return Kind.LINEAR if node.target in _PRODUCTS else Kind.FIXED
    if len(others) != 1 or not isinstance(others[0], (int, float)) or not isinstance(first, fx.Node):
        return Kind.FIXED
    return Kind.WRITTEN if node.target in _IN_PLACE else Kind.LINEAR


def _shape_kind(node: fx.Node, others: list[Any]) -> Kind:
    """Of a function of one value: does it leave T and N alone?"""
    target = node.target
    before, after = _layouts(node)
    if (before.folded or after.folded) and target in _RESHAPES:
        # Time is folded, unfolded or stays folded: elements keep their order, so the first dimensions tell.
        lost = Layout.OTHER in (before, after) or before.batch_first is not after.batch_first
        return Kind.FIXED if lost else _reshape_kind(node, before, after)
    folded = before.folded
    if target in _FLATTENS:
        start = node.kwargs.get("start_dim", others[0] if others else 0)
        return Kind.LINEAR if isinstance(start, int) and start >= 1 else Kind.FIXED
    if target in _MEANS:
        dims = _flat([node.kwargs.get("dim", others or None)])
        dims = [d for d in dims if not isinstance(d, bool)]  # keepdim
        time, batch = (1, 0) if before is Layout.BATCH else (0, 1)
        if before in (Layout.TIME, Layout.BATCH) and time in dims and batch not in dims and len(others) <= 1:
            return Kind.READOUT
        return Kind.LINEAR if dims and _are_inner(dims, node) else Kind.FIXED
    if target is operator.getitem:
        return _index_kind(node, 1 if folded else 2)
    if target in _PARTS:
        at = 0 if target in _UNBINDS else 1
        dim = node.kwargs.get("dim", others[at] if len(others) > at else 0)
        return Kind.RESHAPE if _are_inner([dim], node) else Kind.FIXED
    if folded and after is before and target in _RESIZES | _INTERPOLATES:
        return Kind.LINEAR
    if folded and after is before and target in _MAX_POOLS:
        return Kind.MAX_POOL
    return _kept_kind(node, others, before, after)


def _reshape_kind(node: fx.Node, before: Layout, after: Layout) -> Kind:
    """Of a reshape between these: of time alone, of nothing, or of each frame."""

    def frame(node: fx.Node, layout: Layout) -> tuple[int, ...]:
        return tuple(node.meta["shape"][layout.kept :])

    if before is after and node.target in _SQUEEZES:
        return Kind.LINEAR
    if frame(node.all_input_nodes[0], before) != frame(node, after):
        return Kind.RESHAPE
    return Kind.LINEAR if before is after else Kind.FOLD


def _kept_kind(node: fx.Node, others: list[Any], before: Layout, after: Layout) -> Kind:
    """Of what moves dimensions: those of time and batch must stay where they are, or change places."""
    target, kept = node.target, before.kept
    shapes: list[Any] = [n.meta.get("shape") for n in (node.all_input_nodes[0], node)]
    if any(shape is None or len(shape) < 2 for shape in shapes):
        return Kind.FIXED
    dims = [d % len(shapes[0]) for d in _flat([*others, *node.kwargs.values()]) if isinstance(d, int)]
    if {before, after} == {Layout.TIME, Layout.BATCH}:
        swapped = (target in _PERMUTES and dims[:2] == [1, 0]) or (target in _TRANSPOSES and sorted(dims) == [0, 1])
        return Kind.RESHAPE if swapped else Kind.FIXED
    if shapes[0][:kept] != shapes[1][:kept]:
        return Kind.FIXED
    if target in _RESHAPES:
        return _reshape_kind(node, before, before)
    if target is F.pad:
        pad = node.kwargs.get("pad", others[0] if others else None)
        pad = _flat(node.args[1:2] or [pad])
        return _reaching(-(-len(pad) // 2), node, kept) if all(isinstance(n, int) for n in pad) else Kind.FIXED
    if target in _SHUFFLES:
        return _reaching(3, node, kept)
    if target in _PERMUTES:
        return Kind.RESHAPE if dims[:kept] == [*range(kept)] else Kind.FIXED
    if target in _TRANSPOSES:
        return Kind.RESHAPE if dims and all(d >= kept for d in dims) else Kind.FIXED
    return Kind.FIXED


def _reaching(dims: int, node: fx.Node, kept: int) -> Kind:
    """Of what acts on the last ``dims`` dimensions: they must be a frame's."""
    shape = node.all_input_nodes[0].meta.get("shape")
    return Kind.AFFINE if shape is not None and dims <= len(shape) - kept else Kind.FIXED


def _are_inner(dims: list[Any], node: fx.Node) -> bool:
    """True where dimensions, given as they may be, are neither time nor batch."""
    if not all(type(d) is int for d in dims):
        return False
    shape = node.all_input_nodes[0].meta.get("shape")
    kept = _layouts(node)[0].kept
    if shape is None:
        # Frames have three dimensions at least, so that the last one is none of the first two.
        return all(d >= 2 or d == -1 for d in dims)
    return all(d % len(shape) >= kept for d in dims)


def _index_kind(node: fx.Node, kept: int) -> Kind:
    """Of ``x[index]``: a part of what was split, or of the dimensions behind the first ``kept``."""
    x, index = node.all_input_nodes[0], node.args[1]
    if x.target in _PARTS:
        return Kind.RESHAPE if type(index) is int else Kind.FIXED
    items, rank = list(index) if isinstance(index, tuple) else [index], len(x.meta.get("shape") or ())
    if not all(item is Ellipsis or isinstance(item, slice) or type(item) is int for item in items):
        return Kind.FIXED
    if items[0] is Ellipsis:
        return Kind.RESHAPE if len(items) - 1 <= rank - kept and Ellipsis not in items[1:] else Kind.FIXED
    first = [item for item in items[:kept] if item is not Ellipsis]
    whole = len(first) == kept and all(item == slice(None) for item in first)
    return Kind.RESHAPE if whole and Ellipsis not in items[kept + 1 :] else Kind.FIXED


def _flat(items: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for item in items:
        flat += _flat(item) if isinstance(item, (tuple, list)) else [item]
    return flat
