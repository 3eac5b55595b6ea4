"""What converted modules compute where torch compiles a call whose T is a symbol: the definition, in one graph for every T.

A list of groups, or a loop over steps, would write one T into the graph. Here groups are arithmetic of T's symbol, and a
neuron's steps are one operator, ``sj_tac::fire``, which reads T from its frames. All groups hold ``size`` frames but the
last, which holds what is left: ``last_of(T, size)``, from 1 to ``size``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.torch_version import TorchVersion

from sj_tac import host
from sj_tac.kernels import fire as kernels, reference
from sj_tac.kernels.weights import merged_steps

# The oldest torch that sj_tac runs on has none.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)
HAS_FLAG = hasattr(torch.compiler, "_is_exporting_flag")
# From here on torch answers, while it compiles, whether a size is a number.
EAGER: list[bool] = []
ANSWERS = TorchVersion(torch.__version__) >= "2.8"
# Weights of the frames of a group.
Row = Sequence[float | Tensor]


def run_eagerly(cls: Any) -> None:
    """Keep torch.compile out of what values of ``cls`` do: a function that the user compiled may be handed one.

    Not before torch.compile is imported, which takes seconds and most never need.
    """
    dispatch = cls.__dict__["__torch_function__"].__func__
    cls.__torch_function__ = classmethod(torch.compiler.disable(dispatch))  # type: ignore
    EAGER.append(True)


def is_free(x: Tensor) -> bool:
    """True while torch compiles a call in which the first dimension of ``x`` may be any number."""
    if not ANSWERS or not torch.compiler.is_dynamo_compiling():
        return False
    # torch.export writes what it sees into a file, which no operator of sj_tac should be in. Where the function is asked,
    # torch 2.11 says so of every call that it compiles; what that function reads is right.
    exporting = torch.compiler._is_exporting_flag if HAS_FLAG else _is_exporting()
    if exporting:
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # whoever compiles has imported it

    return not has_static_value(x.shape[0])


def groups_of(total: int, size: int) -> int:
    """How many groups of ``size`` there are, the last one of what is left."""
    return (total + size - 1) // size


def last_of(total: int, size: int) -> int:
    """How many the last group holds: 1 to ``size``."""
    return (total - 1) % size + 1


def repeat(frames: Tensor, size: int, total: int) -> Tensor:
    """Frame g of [G, ...] ``size`` times, the last one as often as makes ``total`` frames."""
    if size == 1:
        return frames
    return frames.unsqueeze(1).expand(-1, size, *frames.shape[1:]).flatten(0, 1)[:total]


def sums(frames: Tensor, table: Sequence[Row], size: int, last: int) -> Tensor:
    """One weighted sum for every ``size`` of the frames [T, ...]; in their order, as ``reference.weighted_sum``.

    Args:
        table: weights of a group by what it holds, from 1 to whole; a group of fewer frames has fewer weights.
        last: what the last group holds.
    """
    wide = frames.to(reference.accumulation_dtype(frames.dtype))
    total = groups_of(frames.shape[0], size)
    grouped = _filled(wide, total, size)
    flat = [w for row in table for w in (*row, *[0.0] * (size - len(row)))]
    if any(isinstance(w, Tensor) for w in flat):
        held = torch.stack([reference.tensor_of(w, wide.dtype, wide.device) for w in flat])
    else:
        held = reference.constant([float(w) for w in flat], wide.dtype, wide.device)
    by_group = _by_group(held.view(len(table), size), total, last)
    weights = by_group.view(total, size, *[1] * (frames.dim() - 1))
    summed = grouped[:, 0] * weights[:, 0]
    for j in range(1, size):
        summed = summed + grouped[:, j] * weights[:, j]
    return summed.to(frames.dtype)


def _filled(frames: Tensor, groups: int, size: int) -> Tensor:
    """Frames in their groups, [groups, size, ...]; the last one is filled up with zeros."""
    filled = pad(frames, [0, 0] * (frames.dim() - 1) + [0, groups * size - frames.shape[0]])
    return filled.view(groups, size, *frames.shape[1:])


def _by_group(table: Tensor, groups: int, last: int) -> Tensor:
    """The row of every group: the table's last one, and for the last group that of what it holds."""
    number = torch.arange(groups, device=table.device)
    return table[torch.where(number == groups - 1, last - 1, table.shape[0] - 1)]


def mean(frames: Tensor, size: int) -> Tensor:
    """The mean of every ``size`` frames [T, ...]."""
    if size == 1:
        return frames
    uniform = [[1.0 / length] * length for length in range(1, size + 1)]
    return sums(frames, uniform, size, last_of(frames.shape[0], size))


def mean_of_alike(frames: Tensor, size: int) -> Tensor:
    """``mean`` of groups whose frames should all be alike: to the last bit the frame itself where they are."""
    if size == 1:
        return frames
    firsts, total = frames[::size], groups_of(frames.shape[0], size)
    # What is left of each is nothing, in whatever order it is summed; a collapse of collapses makes long groups.
    less = _filled(frames - repeat(firsts, size, frames.shape[0]), total, size).sum(1)
    wide = reference.accumulation_dtype(frames.dtype)
    table = reference.constant([1.0 / length for length in range(1, size + 1)], wide, frames.device)
    share = _by_group(table, total, last_of(frames.shape[0], size))
    return firsts + (less * share.view(total, *[1] * (frames.dim() - 1))).to(frames.dtype)


def kernel_of(node: Any, x: Tensor) -> str:
    """The kernel that runs a neuron's steps as one operator; empty where they must be written out, for one T."""
    if host.neuron_problem(node):
        return ""
    kernel, _ = kernels.choose(node._tac.backend, node, None, x.device, x.dtype, torch.is_grad_enabled())
    return "" if kernel == reference.NAME else kernel


def steps(node: Any, x: Tensor, kernel: str, linear: Tensor | None = None) -> Tensor:
    """A neuron's steps on frames [T, ...], one each, from its voltages as they are, which it keeps.

    Args:
        linear: [T, 2], beta and gamma of steps that stand for several.
    """
    v = None if host.is_at_rest(node) else host.take_state(node, x)
    call = kernels.Call(kernels.as_maps(x), node, (), None if v is None else kernels.as_maps(v[None])[0])
    out, last = kernels.run(kernel, call, linear)
    host.put_state(node, last.reshape(x.shape[1:]), [])
    return out.reshape(x.shape)


def merged(node: Any, drives: Tensor, kernel: str, total: int) -> Tensor:
    """A binary collapse: one step for every ``merge`` of ``total`` steps."""
    unit = node._tac
    wide = reference.accumulation_dtype(drives.dtype)
    table = merged_steps(node, range(1, unit.merge + 1), unit.normalize, wide, drives.device)
    return steps(node, drives, kernel, _by_group(table, drives.shape[0], last_of(total, unit.merge)))
