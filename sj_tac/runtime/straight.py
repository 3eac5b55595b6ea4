"""The short way of a neuron: where nothing differentiates and all is as in an earlier call, straight to the kernel.

What decides is looked at on every call, and compared with what the launch was made for: the value in front of the neuron,
its shape and memory format, the neuron's numbers, its pool, what the reader behind wants. What differs, or is not known
here, takes the long way (neurons.py), which knows everything.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sj_tac import host
from sj_tac.host import dispatch
from sj_tac.kernels import reference
from sj_tac.kernels.checks import WIDE
from sj_tac.kernels.fire_op import ON_CPU, ON_CUDA
from sj_tac.kernels.gpu import conv_fire
from sj_tac.kernels.layout import empty
from sj_tac.runtime.deferred import Deferred, Narrow
from sj_tac.runtime.expressions import Made, SharedExpression
from sj_tac.runtime.groups import Sums, single
from sj_tac.runtime.launching import NONE, Prepared, find
from sj_tac.runtime.runs import Again, Inputs, Run
from sj_tac.runtime.values import Frames, Shared, Spikes

if TYPE_CHECKING:
    from sj_tac.runtime.neurons import Unit

# Dtypes of drives on each device.
DTYPES = {"cpu": ON_CPU, "cuda": ON_CUDA}


def _numbers(node: Any, unit: Unit, x: Shared) -> tuple[Any, ...] | None:
    """All that a neuron's steps depend on besides tensors; None where a launch cannot know it, or the value notes more."""
    y, (dtype, device) = x.expression.held, x.kind
    if (
        not ((x._made is None and x._viewed is None) or _is_untouched(x))
        or x.folded is not None
        or x.means is not None
        or x.merges
        or (type(y) not in (Deferred, Narrow) and (type(y) is not Tensor or y.requires_grad))
        or len(y.shape) not in (4, 5)
        or dtype not in DTYPES.get(device.type, ())
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
        if type(w) is not torch.nn.Parameter or w.device != device or w.shape:
            return None
        w = w.item() if device.type in dispatch.AT_HAND else w.dtype
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
        or (reset is None and not math.isfinite(threshold))
        or type(decays) is not bool
        or type(detaches) is not bool
        # The voltages of all steps are wanted, or may be: both hosts keep it here.
        or held.get("_store_v_seq", True) is not False
        or held.get("_neuron_precision") is not None
    ):
        return None
    own = surrogate.__dict__
    vouched = bool(host.SURROGATES) and host.is_registered_surrogate(surrogate)
    spiking = type(surrogate), own.get("spiking"), own.get("alpha"), "forward" in own, vouched
    return type(node), node.training, threshold, reset, detaches, tau, decays, w, spiking


def _is_untouched(x: Frames) -> bool:
    """Whether nobody has read or written a value's frames, nor those that it is a view of, as unfolded drives are."""
    while x._made is None:
        if x._viewed is None:
            return True
        base, expression, _ = x._viewed
        if base.expression is not expression:
            return False
        x = base
    return False


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
    y, groups = x.expression.held, x.expression.groups
    numbers, v = _numbers(node, unit, x), node._memories["v"]
    if numbers is None or groups.frames is not groups.steps or (unit.pool is not None and len(y.shape) != 5):
        return None
    shape, (dtype, device) = y.shape, x.kind
    wide = WIDE[dtype]
    if type(v) is float and v == (numbers[3] or 0.0):
        v = None
    elif type(v) is not Tensor or v.shape != shape[1:] or v.dtype is not wide or v.requires_grad or v.device != device:
        return None
    (scale, shift), affine = x.expression.affine or (None, None), None
    if scale is not None and shift is not None:
        affine = (
            scale.shape, scale.dtype, scale.device, scale.requires_grad,
            shift.shape, shift.dtype, shift.device, shift.requires_grad,
        )  # fmt: skip
    residual = None if x.expression.residual is None else x.expression.residual.make()
    if residual is not None and not (
        type(residual) is Tensor and residual.dtype is dtype and not residual.requires_grad and residual.device == device
    ):
        return None
    pool = None if unit.pool is None else _options(unit.pool)
    w, added = node._parameters.get("w"), None if residual is None else residual.shape
    narrow = None if unit.direct is None else unit.narrow(groups, x.kind)
    wanted, emitted = (unit.wanted(groups, x.kind), dtype) if narrow is None else narrow
    key = (groups, emitted, x.kind), shape, affine, added, numbers, pool, unit.backend
    if type(y) is Deferred:
        inputs = Inputs(None, v, residual, scale, shift, w)
        ran = _with_convolution(node, unit, inputs, y, wanted, key)
        if ran is None:
            return None
        found, out, last = ran
    else:
        read, y = (y.raw, y) if type(y) is Narrow else (y, None)
        # Past NamedTuple's own function.
        inputs = tuple.__new__(Inputs, (read, v, residual, scale, shift, w))
        ran = _on_drives(node, unit, inputs, wanted, (*key, read.dtype, read.stride()))
        if ran is None:
            return None
        found, out, last = ran
        inputs = inputs if y is None else inputs._replace(y=None)
    node._memories["v"] = last
    if node.__dict__.get("v_seq") is not None:
        node.v_seq = None
    unit.ran, unit.convolved = found.launch.kernel, found.launch.convolves
    return _value(node, unit, found, wanted, (inputs, y), out)


def _on_drives(
    node: Any, unit: Unit, inputs: Inputs, wanted: Sums | None, key: tuple[Any, ...]
) -> tuple[Prepared, Tensor, Tensor] | None:
    """Run a neuron on drives that there are: what was prepared, the output and the last voltages; None where nothing can be.

    Drives of lines [G, N, C, L] run as maps of one column.
    """
    y, v, residual, scale, shift, w = inputs
    lines = y is not None and y.dim() == 4
    if lines:
        y, v, residual = (None if x is None else x.unsqueeze(-1) for x in (y, v, residual))
    found = find(unit, node, Inputs(y, v, residual, scale, shift, w) if lines else inputs, wanted, key)
    if found is NONE:
        return None
    out, last = found.launch(y, v, residual, (scale, shift), None if wanted is None else wanted.flat, w)
    # Detached, a view is none: who detaches the voltage in place must not meet one.
    return found, *((out.squeeze(-1), last.squeeze(-1).detach()) if lines else (out, last))


def run_features(node: Any, unit: Unit, x: Tensor) -> Tensor | None:
    """The frames that a unit emits for ordinary ones [T, N, F]; None where the long way must be taken. As ``run``."""
    v = node._memories["v"]
    if type(x) is not Tensor or x.dim() != 3 or unit.keeps_half(x) or (type(v) is Tensor and v.shape != x.shape[1:]):
        return None
    maps = Shared.of(SharedExpression(x[..., None, None], single(x.shape[0])))
    try:
        if type(v) is Tensor:
            node._memories["v"] = v[..., None, None]
        found = run(node, unit, maps)
        last = v if found is None else node._memories["v"].view(x.shape[1:]).detach()
    except BaseException:
        node._memories["v"] = v
        raise
    node._memories["v"] = last
    return None if found is None else found.frames(unit.name).view(x.shape)


def _with_convolution(
    node: Any, unit: Unit, inputs: Inputs, drives: Deferred, wanted: Sums | None, key: tuple[Any, ...]
) -> tuple[Prepared, Tensor, Tensor] | None:
    """Run a convolution and the neuron behind it: what was prepared, with the shapes of all; the output; and the last
    voltages. None where no launch is made for these.
    """
    by = _in_parts if drives.one is None else _in_one
    return by(node, unit, inputs, drives, wanted, key)


def _in_one(
    node: Any, unit: Unit, inputs: Inputs, drives: Deferred, wanted: Sums | None, key: tuple[Any, ...]
) -> tuple[Prepared, Tensor, Tensor] | None:
    """``_with_convolution`` by one kernel."""
    if drives.made is not None:  # somebody read the whole
        return None
    prepared = NONE
    if inputs.residual is None:
        prepared = find(unit, node, inputs, wanted, (*key, drives.one), drives)
    if prepared is NONE:
        drives.decline()
        return None
    weights = None if wanted is None else wanted.flat
    affine = inputs.scale, inputs.shift
    out, last = prepared.launch(drives.inputs(), inputs.v, None, affine, weights, inputs.w)
    # Whoever reads the drives, or frames, from now on gets those that the sums were made of.
    drives.by = prepared.launch if drives.device.type in conv_fire.DEVICES else None
    return prepared, out, last


def _in_parts(
    node: Any, unit: Unit, inputs: Inputs, drives: Deferred, wanted: Sums | None, key: tuple[Any, ...]
) -> tuple[Prepared, Tensor, Tensor] | None:
    """``_with_convolution`` on some samples and channels after the other."""
    _, v, residual, scale, shift, w = inputs
    try:
        if drives.made is not None or unit.launches.get(key) is NONE:  # somebody read the whole; found out before
            return None
    except TypeError:  # a pool's options are lists
        return None
    found, out, last = None, torch.empty(0), torch.empty(0)
    for (at, to), y in drives.parts(*drives.size_of_part()):
        added = None if residual is None else residual[:, at, to]
        part = Inputs(
            y, None if v is None else v[at, to], added, None if scale is None else scale[to],
            None if shift is None else shift[to], w,
        )  # fmt: skip
        prepared = find(unit, node, part, wanted, (*key, y.dtype, y.shape, y.stride()))
        if prepared is NONE:
            unit.launches[key] = NONE
            return None
        weights = None if wanted is None else wanted.flat
        some, voltages = prepared.launch(y, part.v, added, (part.scale, part.shift), weights, w)
        if found is None:
            batch = drives.shape[1:3]
            found = prepared._replace(
                inner=(prepared.inner[0], *batch, *prepared.inner[3:]), outer=(prepared.outer[0], *drives.shape[1:])
            )
            lies = prepared.launch.last
            out = empty(some, [some.shape[0], *batch, *some.shape[3:]], lies)
            last = empty(voltages, [*batch, *voltages.shape[2:]], lies)
        out[:, at, to], last[at, to] = some, voltages
    return None if found is None else (found, out, last)


def _value(
    node: Any, unit: Unit, found: Prepared, wanted: Sums | None, read: tuple[Inputs, Deferred | Narrow | None], out: Tensor
) -> Spikes:
    """The value of an output: neurons.UnitModule._emit, for what was prepared."""
    ran = Run(node, read[0], found.lengths, False, True, read[1])
    # Drives of lines [G, N, C, L] are prepared as maps.
    shape = found.inner if len(ran.frame) == 4 else found.inner[:-1]
    pool = None if found.window is None else unit.pool
    if wanted is None:
        unit.gave = "frames"
        inner = Spikes.of(Made(Again(ran, pool, None, 1).on, ran.given, out), shape, out)
    else:
        unit.gave = "sums"
        narrowed, sums = None, {wanted: out}
        if found.narrow:
            narrowed, sums, out = (wanted, out), {}, torch.empty(0, dtype=WIDE[out.dtype], device=out.device)
        inner = Spikes.of(Again(ran, pool, None, 1), shape, out, sums=sums)
        held = inner.__dict__
        held["maker"], held["narrowed"] = unit, narrowed
    if found.window is None:
        return inner
    value = Spikes.of(Again(ran, None, None, 1), found.outer, out, pooled=(found.window, inner))
    value.__dict__["maker"] = unit
    return value
