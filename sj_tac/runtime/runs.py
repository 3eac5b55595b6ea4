"""One run of a neuron by ``fire``, and the same run again."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sj_tac import host
from sj_tac.errors import InputError, StaleValueError
from sj_tac.host import dispatch
from sj_tac.kernels import fire as kernels
from sj_tac.kernels.layout import of_shape
from sj_tac.runtime.expressions import Expression, Later


class Inputs(NamedTuple):
    """What one run of a unit's neuron reads: the tensors of a ``kernels.fire.Call``, which all may have gradients.

    ``y`` is None where the convolution in front was run in parts (``Run.drives``).
    """

    y: Tensor | None
    v: Tensor | None
    residual: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    w: Tensor | None

    def of(self, tensors: tuple[Tensor, ...]) -> Inputs:
        """The same with other tensors in the places of those that are given."""
        found = iter(tensors)
        return Inputs(*[None if x is None else next(found) for x in self])


class Again(Expression):
    """What another call of a run would give, as a function of the run's tensors."""

    def __init__(self, run: Run, pool: Any, weights: Tensor | None, size: int) -> None:
        self.run, self.options = run, (pool, weights, size)
        self.inputs = run.given

    def on(self, *inputs: Tensor) -> Tensor:
        return self.run.as_it_was()(*self.options, self.run.inputs.of(inputs))[0]


class Run:
    """One run of a neuron, which can be run again: on the same tensors, by the neuron as it was.

    Its shapes are the kernels': [G, N, C, H, W], whatever the dimensions of the frames ``frame``.
    """

    __slots__ = (
        *("node", "unit", "frame", "inputs", "drives", "given", "lengths", "merges", "normalize", "wants"),
        *("_numbers", "_also", "_versions", "_w"),
    )

    def __init__(
        self, node: Any, inputs: Inputs, lengths: list[int], merges: bool, normalize: bool, drives: Later | None = None
    ) -> None:
        self.node, self.unit, self.lengths, self.drives = node, node._tac, lengths, drives
        y = inputs.y
        if inputs.v is not None and inputs.v.is_inference():
            # It keeps no version by which a write of the user's could be noticed.
            inputs = inputs._replace(v=inputs.v.clone())
        self.frame = (y if drives is None else drives).shape[1:]  # type: ignore[union-attr]
        if y is not None and len(self.frame) != 4:
            v = None if inputs.v is None else kernels.as_maps(inputs.v[None])[0]
            residual = None if inputs.residual is None else kernels.as_maps(inputs.residual)
            inputs = inputs._replace(y=kernels.as_maps(y), v=v, residual=residual)
        self.inputs, self.merges, self.normalize = inputs, merges, normalize
        # Without helpers: every layer of every call makes a run.
        given, versions, recorded, self.wants = [], [], torch.is_grad_enabled(), False
        for x in inputs:
            if x is not None:
                given.append(x)
                versions.append(None if x.is_inference() else x._version)
                if recorded and x.requires_grad:
                    self.wants = True
        held = node.__dict__
        threshold = held.get("v_threshold")
        if threshold is None:
            threshold = node.v_threshold
        numbers = {name: held[name] for name in _NUMBERS if name in held}
        parameters = held["_parameters"]
        also = [threshold, numbers.get("tau", parameters.get("tau")), numbers.get("v_reset", parameters.get("v_reset"))]
        surrogate = held["_modules"].get("surrogate_function")
        if surrogate is not None and self.wants:  # its alpha is for gradients alone
            own = surrogate.__dict__
            also += [own.get("alpha"), *own["_parameters"].values(), *own["_buffers"].values()]
        self._also = [x for x in also if isinstance(x, Tensor)]
        versions += [None if x.is_inference() else x._version for x in self._also]
        self.given, self._versions = tuple(given), versions
        self._numbers = numbers, surrogate, None if surrogate is None else dict(surrogate.__dict__)
        self._w = _number(inputs.w)

    def __call__(self, pool: Any, weights: Tensor | None, size: int, inputs: Inputs | None = None) -> tuple[Tensor, Tensor]:
        """Pooled frames or sums of ``size`` steps, in the frames' own dimensions; and the last voltages."""
        y, v, residual, scale, shift, w = inputs or self.inputs
        node, unit = self.node, self.unit
        if y is None:
            assert self.drives is not None
            y = self.drives.make()
        if w is not self.inputs.w:
            node = _twin(node)
            node.__dict__["_parameters"] = {"w": w}
        kernel, _ = kernels.choose(unit.backend, node, pool, y.device, y.dtype, self.wants)
        frame = None if len(self.frame) == 4 else self.frame
        call = kernels.Call(
            y, node, self.lengths, v, residual, scale, shift, pool, weights, size, self.merges, self.normalize, frame
        )
        out, last = kernels.run(kernel, call)
        unit.ran, unit.convolved = kernel, False
        if frame is not None:
            out, last = out.reshape(out.shape[0], *self.frame), of_shape(last, self.frame)
        return out, last

    def again(self, pool: Any, weights: Tensor | None, size: int) -> Again:
        """What another call would give, as an expression of the run's tensors."""

        return Again(self, pool, weights, size)

    def as_it_was(self) -> Run:
        """This run, of a neuron that has the numbers of then. Raises StaleValueError where its tensors were changed."""
        then = copy.copy(self)
        then.node = _twin(self.node)
        # Past the host's setters, which would check what was allowed then.
        numbers, surrogate, held_then = self._numbers
        held = then.node.__dict__
        held.update(numbers)
        if surrogate is not None:
            held["_modules"] = {**held["_modules"], "surrogate_function": _twin(surrogate, held_then)}
        for x, version in zip((*self.given, *self._also), self._versions, strict=True):
            if (version is not None and x._version != version) or (x is self.inputs.w and _number(x) != self._w):
                what = "its time constant w" if x is self.inputs.w else f"a tensor {list(x.shape)} that it read"
                raise StaleValueError(
                    f"layer {self.unit.name!r}: {what} was changed in place before the frames of a value that it gave were "
                    "read; read them before that, for example with value = value[:]"
                )
        return then


# What a step of a neuron depends on besides tensors, read past torch's slow look-up; and its surrogate, if that is a module.
_NUMBERS = ("v_threshold", "v_reset", "detach_reset", "tau", "decay_input", "surrogate_function")


def _twin(module: Any, held: dict[str, Any] | None = None) -> Any:
    """The same attributes, or those given, in another object. Not by ``copy``, which parametrized modules refuse."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__ if held is None else held)
    return twin


def _number(w: Tensor | None) -> float | None:
    """A PLIF's w where it is at hand: who writes it through ``.data`` leaves no other trace."""
    known = w is not None and w.device.type in dispatch.AT_HAND and not w.dim() and dispatch.is_plain(w)
    return w.item() if known and w is not None else None


def check_voltage(node: Any, frame: torch.Size) -> None:
    """Raise InputError where the voltage that a call before left does not fit the call's frames, [N, C, H, W].

    SpikingJelly 2.0 replaces such a voltage by itself. A voltage that was set for all samples or places fits.
    """
    held = None if host.IS_V2 else node._memories["v"]
    if not isinstance(held, Tensor) or held.shape == frame:
        return
    try:
        held.expand(frame)
    except RuntimeError:
        raise InputError(
            f"neuron {node._tac.name!r} holds voltages {list(held.shape)} of an earlier call, and this call's frames are "
            f"{list(frame)}; call functional.reset_net(net) between calls of different shapes"
        ) from None
