"""The short way of a neuron: where nothing differentiates and all is as in an earlier call, straight to the kernel.

What decides is looked at on every call, and compared with what the launch was made for: the value in front of the neuron,
its shape and memory format, the neuron's numbers, its pool, what the reader behind wants. What differs, or is not known
here, takes the long way (neurons.py), which knows everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sj_tac import host
from sj_tac.host import dispatch
from sj_tac.kernels import backends, fire as kernels, reference
from sj_tac.kernels.checks import WIDE
from sj_tac.kernels.fire_op import ON_CPU, ON_CUDA
from sj_tac.kernels.gpu import conv_fire
from sj_tac.kernels.layout import empty
from sj_tac.kernels.operands import Operands
from sj_tac.kernels.pools import NO_POOL, in_tiles, overlap
from sj_tac.runtime.deferred import Deferred, Narrow
from sj_tac.runtime.expressions import Made, SharedExpression
from sj_tac.runtime.groups import Groups, Sums, single
from sj_tac.runtime.runs import Again, Inputs, Run
from sj_tac.runtime.values import Frames, Shared, Spikes

if TYPE_CHECKING:
    from sj_tac.runtime.neurons import Unit

# Stands for "no launch is made for these".
NONE: Any = object()
# As many launches as a unit keeps: sizes of batches and clips that take turns.
KEPT = 16
# Dtypes of drives on each device.
DTYPES = {"cpu": ON_CPU, "cuda": ON_CUDA}


class Launch(Protocol):
    """What runs the steps: ``kernels.cpu.launches.Launch`` or ``kernels.gpu.launches.Launch``."""

    shape: tuple[int, ...]
    last: bool

    @property
    def kernel(self) -> str:
        """Its name."""

    @property
    def reads_weights(self) -> bool:
        """Whether the sums' weights and a PLIF's w are read in every call, or are numbers in the launch."""

    @property
    def convolves(self) -> bool:
        """Whether it is given frames and weights in the place of drives."""

    def __call__(
        self,
        y: Any,
        v0: Tensor | None,
        residual: Tensor | None,
        affine: tuple[Tensor | None, Tensor | None],
        weights: Tensor | None,
        w: Tensor | None,
        /,
    ) -> tuple[Tensor, Tensor]: ...


class Prepared(NamedTuple):
    """A launch, and what else does not change between the calls that it is for.

    Attributes:
        wanted: what the reader behind sums, or None for frames; lengths: steps on each drive; window: the pool's.
        inner, outer: shapes of the frames behind the pool and before it.
        narrow: the sums are of another dtype than the frames, for a reader of that dtype.
    """

    launch: Launch
    wanted: Sums | None
    lengths: list[int]
    window: tuple[int, ...] | None
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    narrow: bool = False

    def fits(self, wanted: Sums | None) -> bool:
        """Whether it makes other sums, too: weights that hang on a tensor of a device are new in every call."""
        before = self.wanted
        alike = before is not None and wanted is not None and before.size == wanted.size and before.of == wanted.of
        return alike and self.launch.reads_weights


def _numbers(node: Any, unit: Unit, x: Shared) -> tuple[Any, ...] | None:
    """All that a neuron's steps depend on besides tensors; None where a launch cannot know it, or the value notes more."""
    y, (dtype, device) = x.expression.held, x.kind
    if (
        not _is_untouched(x)
        or x.folded is not None
        or x.means is not None
        or x.merges
        or (type(y) not in (Deferred, Narrow) and (type(y) is not Tensor or y.requires_grad))
        or len(y.shape) != 5
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
        or type(decays) is not bool
        or type(detaches) is not bool
        # The voltages of all steps are wanted, or may be: both hosts keep it here.
        or held.get("_store_v_seq", True) is not False
        or held.get("_neuron_precision") is not None
    ):
        return None
    own = surrogate.__dict__
    spiking = type(surrogate), own.get("spiking"), own.get("alpha"), "forward" in own
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
    if numbers is None or groups.frames is not groups.steps:
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
        found = _prepared(unit, node, inputs, wanted, (*key, read.dtype, read.stride()))
        if found is NONE:
            return None
        out, last = found.launch(read, v, residual, (scale, shift), None if wanted is None else wanted.flat, w)
        inputs = inputs if y is None else inputs._replace(y=None)
    node._memories["v"] = last
    if node.__dict__.get("v_seq") is not None:
        node.v_seq = None
    unit.ran, unit.convolved = found.launch.kernel, found.launch.convolves
    return _value(node, unit, found, wanted, (inputs, y), out)


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
        prepared = _prepared(unit, node, inputs, wanted, (*key, drives.one), drives)
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
        prepared = _prepared(unit, node, part, wanted, (*key, y.dtype, y.shape, y.stride()))
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


def _is_by_channel(x: Tensor, y: Tensor) -> bool:
    """Whether a scale or shift is for drives ``y``: of their channels, on their device; half ones are widened."""
    known = x.dtype is WIDE[y.dtype] or x.dtype is y.dtype
    return known and not x.requires_grad and x.shape == y.shape[2:3] and x.device == y.device


def _prepared(
    unit: Unit, node: Any, inputs: Inputs, wanted: Sums | None, key: tuple[Any, ...], drives: Deferred | None = None
) -> Any:
    """What was prepared for ``key``, now if not before; NONE where nothing can be. ``drives``: to be convolved as well."""
    try:
        found = unit.launches.get(key)
    except TypeError:  # a pool's options are lists
        return NONE
    if found is None or (found is not NONE and found.wanted is not wanted and not found.fits(wanted)):
        found = _prepare(unit, node, inputs, key[0], wanted, drives) or NONE
        if len(unit.launches) >= KEPT:
            unit.launches.clear()
        unit.launches[key] = found
    return found


def _value(
    node: Any, unit: Unit, found: Prepared, wanted: Sums | None, read: tuple[Inputs, Deferred | Narrow | None], out: Tensor
) -> Spikes:
    """The value of an output: neurons.UnitModule._emit, for what was prepared."""
    ran = Run(node, read[0], found.lengths, False, True, read[1])
    pool = None if found.window is None else unit.pool
    if wanted is None:
        unit.gave = "frames"
        inner = Spikes.of(Made(Again(ran, pool, None, 1).on, ran.given, out), found.inner, out)
    else:
        unit.gave = "sums"
        narrowed, sums = None, {wanted: out}
        if found.narrow:
            narrowed, sums, out = (wanted, out), {}, torch.empty(0, dtype=WIDE[out.dtype], device=out.device)
        inner = Spikes.of(Again(ran, pool, None, 1), found.inner, out, sums=sums)
        held = inner.__dict__
        held["maker"], held["narrowed"] = unit, narrowed
    if found.window is None:
        return inner
    value = Spikes.of(Again(ran, None, None, 1), found.outer, out, pooled=(found.window, inner))
    value.__dict__["maker"] = unit
    return value


def _prepare(
    unit: Unit, node: Any, inputs: Inputs, of: tuple[Groups, torch.dtype, Any], wanted: Sums | None, drives: Deferred | None
) -> Prepared | None:
    """A launch for such inputs; None where neither CUDA kernels run nor, on the CPU, those of tiles.

    ``of``: the groups of the drives, the dtype of what is put out, and that of the frames, with their device.
    """
    (y, v, residual, scale, shift, _), (groups, emitted, kind) = inputs, of
    if y is None and drives is not None:
        y = drives.stand_in()
    assert y is not None
    window = None if unit.pool is None else host.pool_window(unit.pool)
    if not y.numel() or (window is None) is not (unit.pool is None):
        return None
    kernel, _ = kernels.choose(unit.backend, node, unit.pool, y.device, y.dtype, False)
    if kernel == reference.NAME:
        return None
    lengths = list(groups.steps)
    weights, size = (None, 1) if wanted is None else (wanted.flat, wanted.size)
    if scale is not None and shift is not None:
        if not (_is_by_channel(scale, y) and _is_by_channel(shift, y)):
            return None  # the long way has words for a norm of other channels
        scale, shift = scale.to(WIDE[y.dtype]), shift.to(WIDE[y.dtype])
    if residual is not None and residual.dtype is not y.dtype:
        # The launch reads either; the check of operands knows them alike.
        residual = residual.new_empty(1, dtype=y.dtype).expand(residual.shape)
    call = kernels.Call(y, node, lengths, v, residual, scale, shift, unit.pool, weights, size)
    o = kernels.operands(call, None)
    launch = _launch(o, kernel, None if drives is None else drives.one, emitted)
    if launch is None:
        return None
    frames = (groups.total, *y.shape[1:])
    inner = launch.shape if wanted is None else (groups.total, *launch.shape[1:])
    assert (window is None) == (o.pool == NO_POOL)
    return Prepared(launch, wanted, lengths, window, inner, frames, emitted is not kind[0])


def _launch(o: Operands, kernel: str, one: Any, emitted: torch.dtype) -> Launch | None:
    """A launch of the kernel of this name, with a convolution in it or not; None of those on the CPU that are no tiles'."""
    if one is not None and kernel in backends.ON_CUDA:
        return conv_fire.ConvLaunch(o, kernel, one)
    if kernel in backends.ON_CUDA:
        from sj_tac.kernels.gpu import launches as on_cuda

        return on_cuda.Launch(o, kernel)
    if not in_tiles(o.y, o.pool, o.window) or overlap(o.pool, o.window):
        return None
    from sj_tac.kernels.cpu import conv_launches, launches as on_cpu  # they import Numba

    if one is None:
        return on_cpu.Launch(o, emitted)
    return conv_launches.ConvLaunch(o, one, emitted) if one.last or o.pool != NO_POOL else None
