"""The short way of a neuron: where nothing differentiates and all is as in an earlier call, straight to the kernel.

What decides is looked at on every call, and compared with what the launch was made for: the value in front of the neuron,
its shape and memory format, the neuron's numbers, its pool, what the reader behind wants. What differs, or is not known
here, takes the long way (neurons.py), which knows everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sj_tac import host
from sj_tac.kernels import backends, fire as kernels, reference
from sj_tac.kernels.fire_op import ON_CPU
from sj_tac.kernels.pools import NO_POOL, in_tiles, overlap
from sj_tac.runtime.expressions import Made
from sj_tac.runtime.groups import Groups, Sums
from sj_tac.runtime.runs import Again, Inputs, Run
from sj_tac.runtime.values import Shared, Spikes

if TYPE_CHECKING:
    from sj_tac.kernels.cpu.launches import Launch
    from sj_tac.runtime.neurons import Unit

# Stands for "no launch is made for these".
NONE: Any = object()
# As many launches as a unit keeps: sizes of batches and clips that take turns.
KEPT = 16


class Prepared(NamedTuple):
    """A launch, and what else does not change between the calls that it is for.

    Attributes:
        wanted: what the reader behind sums, or None for frames; lengths: steps on each drive; window: the pool's.
        inner, outer: shapes of the frames behind the pool and before it.
    """

    launch: Launch
    wanted: Sums | None
    lengths: list[int]
    window: tuple[int, ...] | None
    inner: tuple[int, ...]
    outer: tuple[int, ...]


def _numbers(node: Any, unit: Unit, x: Shared) -> tuple[Any, ...] | None:
    """All that a neuron's steps depend on besides tensors; None where a launch cannot know it, or the value notes more."""
    y, (dtype, device) = x.expression.compact, x.kind
    if (
        x._made is not None
        or x._viewed is not None
        or x.folded is not None
        or x.means is not None
        or x.merges
        or type(y) is not Tensor
        or y.requires_grad
        or len(y.shape) != 5
        or dtype not in ON_CPU
        or device.type != "cpu"
        or unit.backend == reference.NAME
        or torch._C._autograd._profiler_enabled()
    ):
        return None
    held, parameters = node.__dict__, node.__dict__["_parameters"]
    surrogate = held["_modules"].get("surrogate_function")
    threshold, reset = held.get("v_threshold"), held.get("v_reset", "")
    w, tau, decays, detaches = None, None, True, held.get("detach_reset")
    # A number may be a buffer, a parameter or a memory of the node's instead, and is then nothing that a launch knows.
    if isinstance(node, host.neuron.ParametricLIFNode):
        w, decays = parameters.get("w"), held.get("decay_input")
        if type(w) is not torch.nn.Parameter or w.device.type != "cpu":
            return None
    elif isinstance(node, host.neuron.LIFNode):
        tau, decays = held.get("tau"), held.get("decay_input")
        if type(tau) not in (float, int):
            return None
    if (
        surrogate is None
        or surrogate._forward_hooks
        or surrogate._forward_pre_hooks
        or type(threshold) not in (float, int)
        or type(reset) not in (float, int, type(None))
        or type(decays) is not bool
        or type(detaches) is not bool
        # The voltages of all steps are wanted, or may be: both hosts keep it here.
        or held.get("_store_v_seq", True) is not False
        or held.get("_neuron_precision") is not None
    ):
        return None
    own = surrogate.__dict__
    spiking = type(surrogate), own.get("spiking"), own.get("alpha"), "forward" in own
    return type(node), node.training, threshold, reset, detaches, tau, decays, None if w is None else w.item(), spiking


def _options(pool: Any) -> tuple[Any, ...]:
    """All that a pool's windows depend on."""
    held = pool.__dict__
    return (
        type(pool), held["kernel_size"], held["stride"], held["padding"], held["ceil_mode"], held.get("dilation"),
        held.get("return_indices"), held.get("count_include_pad"), held.get("divisor_override"),
    )  # fmt: skip


def run(node: Any, unit: Unit, x: Shared) -> Spikes | None:
    """What a unit emits for drives that steps share; None where the long way must be taken.

    Nobody differentiates (``torch.is_grad_enabled()`` is False), and values pass (``Borders.are_plain`` is False).
    """
    y, groups = x.expression.compact, x.expression.groups
    numbers, v = _numbers(node, unit, x), node._memories["v"]
    if numbers is None or groups.frames is not groups.steps:
        return None
    shape, (dtype, device) = y.shape, x.kind
    if type(v) is float and v == (numbers[3] or 0.0):
        v = None
    elif type(v) is not Tensor or v.shape != shape[1:] or v.dtype is not dtype or v.requires_grad or v.device != device:
        return None
    scale, shift = x.expression.affine or (None, None)
    if scale is not None and (scale.dtype is not dtype or scale.requires_grad or scale.shape != shape[2:3]):
        return None  # the long way has words for a norm of other channels
    residual = None if x.expression.residual is None else x.expression.residual.make()
    if residual is not None and (type(residual) is not Tensor or residual.dtype is not dtype or residual.requires_grad):
        return None
    pool = None if unit.pool is None else _options(unit.pool)
    # Past NamedTuple's own function.
    inputs: Inputs = tuple.__new__(Inputs, (y, v, residual, scale, shift, node._parameters.get("w")))
    added = None if residual is None else residual.shape
    key = groups, shape, y.stride(), x.kind, scale is None, added, numbers, pool, unit.backend
    found = _prepared(unit, node, inputs, groups, key)
    if found is NONE:
        return None
    out, last = found.launch(y, v, residual, (scale, shift))
    node._memories["v"] = last
    if node.__dict__.get("v_seq") is not None:
        node.v_seq = None
    unit.ran = backends.NUMBA
    return _value(node, unit, found, inputs, out)


def _prepared(unit: Unit, node: Any, inputs: Inputs, groups: Groups, key: tuple[Any, ...]) -> Any:
    """What was prepared for ``key``, now if not before; NONE where nothing can be."""
    wanted = unit.wanted(groups, key[3])
    try:
        found = unit.launches.get(key)
    except TypeError:  # a pool's options are lists
        return NONE
    if found is None or (found is not NONE and found.wanted is not wanted):
        found = _prepare(unit, node, inputs, groups, wanted) or NONE
        if len(unit.launches) >= KEPT:
            unit.launches.clear()
        unit.launches[key] = found
    return found


def _value(node: Any, unit: Unit, found: Prepared, inputs: Inputs, out: Tensor) -> Spikes:
    """The value of an output: neurons.UnitModule._emit, for what was prepared."""
    ran, wanted = Run(node, inputs, found.lengths, False, True), found.wanted
    pool = None if found.window is None else unit.pool
    if wanted is None:
        unit.gave = "frames"
        inner = Spikes.of(Made(Again(ran, pool, None, 1).on, ran.given, out), found.inner, out)
    else:
        unit.gave = "sums"
        inner = Spikes.of(Again(ran, pool, None, 1), found.inner, out, sums={wanted: out})
        inner.__dict__["maker"] = unit
    if found.window is None:
        return inner
    value = Spikes.of(Again(ran, None, None, 1), found.outer, out, pooled=(found.window, inner))
    value.__dict__["maker"] = unit
    return value


def _prepare(unit: Unit, node: Any, inputs: Inputs, groups: Groups, wanted: Sums | None) -> Prepared | None:
    """A launch for such inputs; None where the kernels of the CPU, or their tiles, are not what runs."""
    y, v, residual, scale, shift, _ = inputs
    window = None if unit.pool is None else host.pool_window(unit.pool)
    if not y.numel() or (window is None) is not (unit.pool is None):
        return None
    kernel, _ = kernels.choose(unit.backend, node, unit.pool, y.device, y.dtype, False)
    if kernel != backends.NUMBA:
        return None
    lengths = list(groups.steps)
    weights, size = (None, 1) if wanted is None else (wanted.flat, wanted.size)
    call = kernels.Call(y, node, lengths, v, residual, scale, shift, unit.pool, weights, size)
    o = kernels.operands(call, None)
    if not in_tiles(y, o.pool, o.window) or overlap(o.pool, o.window):
        return None
    from sj_tac.kernels.cpu.launches import Launch  # it imports Numba

    launch = Launch(o)
    frames = (groups.total, *y.shape[1:])
    inner = launch.shape if wanted is None else (groups.total, *launch.shape[1:])
    assert (window is None) == (o.pool == NO_POOL)
    return Prepared(launch, wanted, lengths, window, inner, frames)
