"""Convolutions of a converted net: ``expand(conv(aggregate(x)))``, one convolution for k frames."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.definition import notices, ops
from sj_tac.definition.classes import mixed, own_class
from sj_tac.definition.frames import Frames, forget_calls, note_calls
from sj_tac.definition.noted import Matchable, Noted, words
from sj_tac.errors import ConversionError
from sj_tac.host import dispatch

LOGITS = "tac_logits"
# ``conv`` is the layer whose call runs in this thread, as it is defined.
_RUNNING = threading.local()


@dataclass
class Sharing:
    """How a converted convolution aggregates the frames of a group.

    Attributes:
        k: frames per convolution; 1 is the source's layer.
        neuron: the neuron that the convolution drives, whose decay weighs the frames.
        beta: the decay as it was measured, of a neuron whose class is unknown.
        frames: where its frames are; by default [T, N, ...].
        plain: its class's forward takes T frames alone, so torch's own convolution, which gives the same, takes the sums.
        stretch, rate: behind a collapse, frames are equal in groups (definition/collapse.py). A step of the neuron has
            ``rate`` equal rows of the tensor (binary collapse), of which one is taken. ``stretch`` steps have equal frames
            (counted collapse). k counts steps; it is 1, a part of stretch, or a multiple of it.
        layer: the convolution's qualified name.
        weights: "decay": ``w_j = beta^(k-1-j) / S_k``; "uniform": ``1 / k``; "learned": the softmax of
            ``tac_logits`` [k / stretch]. ``S_k`` is ``1 + beta + .. + beta^(k-1)``.
        normalize: weights sum to 1. False is the paper's form, without ``/ S_k``.
        dtype: that its convolution computes in, and its result is rounded to; None for the input's. int8 is a kernel's
            matter (rewrites/equations/integers.py): the definition computes in the input's.
        gate: of the net whose calls are captured (rewrites/gate.py); None if none are.
        unshared: sentences on calls in which the layer aggregated nothing, for the report.
    """

    k: int
    neuron: nn.Module
    weights: Literal["decay", "uniform", "learned"] = "decay"
    normalize: bool = True
    beta: float | None = None
    frames: Frames = field(default_factory=Frames)
    plain: bool = False
    stretch: int = 1
    rate: int = 1
    layer: str = ""
    dtype: torch.dtype | None = None
    gate: Any = field(default=None, repr=False, compare=False)
    unshared: dict[str, None] = field(default_factory=dict, repr=False, compare=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({"unshared": {}} | state)
        kind = type(self.neuron)
        if self.beta is None and not host.has_known_decay(self.neuron):
            raise ConversionError(
                f"layer {self.layer!r} shares drives for neurons of {kind.__module__}.{kind.__qualname__}, which is not "
                "registered in this process: call sj_tac.register_neuron with it, as where the net was converted, before "
                "the net is loaded"
            )

    def aggregates(self) -> bool:
        """Return whether a call of the layer would aggregate frames: k > 1, and its neuron takes many steps."""
        return self.k > 1 and getattr(self.neuron, "step_mode", "m") == "m"

    @property
    def frames_of_group(self) -> int:
        """How many frames that differ a group has."""
        return max(1, self.k // self.stretch)

    def by_row(self, logits: Tensor | None) -> Tensor | None:
        """Return logits [k / stretch] for each row: [k], whose softmax shares a frame's weight out among its equal rows."""
        return logits if logits is None or self.stretch == 1 else logits.repeat_interleave(self.stretch)

    def decay(self, dtype: torch.dtype) -> float | Tensor:
        """Return the neuron's decay: a number, or a tensor if it has a gradient."""
        if self.beta is not None:
            return self.beta
        found: float | Tensor = host.decay(self.neuron, host.wide_dtype(dtype))
        return found

    def marked(self, dtype: torch.dtype, logits: Tensor | None) -> tuple[Tensor | None, Tensor | None, float | None]:
        """Return what ``ops.mark`` must hold, whatever k will be: logits, the decay as a tensor, or as a number."""
        if self.weights != "decay":
            return (self.by_row(logits) if self.weights == "learned" else None), None, None
        beta = self.decay(dtype)
        return (None, beta, None) if isinstance(beta, Tensor) else (None, None, beta)

    def operands(self, dtype: torch.dtype, logits: Tensor | None) -> tuple[list[float], Tensor | None, str]:
        """Return the weights for ``ops.aggregate``: numbers, or a tensor if they have a gradient; and their form."""
        form = "normalized" if self.normalize else "plain"
        if self.weights == "learned":
            if logits is None:
                raise ValueError(f"weights='learned', and the convolution has no {LOGITS} [k={self.k}]")
            return [], self.by_row(logits), "logits"
        if self.weights == "uniform":
            return [1.0] * self.k, None, form
        beta = self.decay(dtype)
        if isinstance(beta, Tensor):
            return [], beta ** torch.arange(self.k - 1, -1, -1, device=beta.device), form
        return [beta ** (self.k - 1 - j) for j in range(self.k)], None, form


class SharedConv(Matchable):
    """Mixin for a convolution class: it runs once for ``sharing.k`` frames.

    The convolution itself is the class's own forward, on the G sums of a call instead of its T frames. Where T of a call is
    unknown (``Frames.steps``), the layer computes what its source does, and a warning says so.
    """

    sharing: Sharing
    _corrected = "bias"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Who makes a layer of a converted layer's class, as peft does, gets one of the source's: it shares nothing.
        self.__class__ = source_class(type(self))  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return frames in the input's layout, equal within each group of k. The input is the first argument."""
        if torch.compiler.is_dynamo_compiling():
            return self._call(args, kwargs)
        before, _RUNNING.conv = getattr(_RUNNING, "conv", None), self
        try:
            return self._call(args, kwargs)
        finally:
            _RUNNING.conv = before

    def _conv_forward(self, *args: Any) -> Tensor:
        """Return the class's own convolution; a warning names a forward that calls this instead of the layer."""
        is_own = torch.compiler.is_dynamo_compiling() or getattr(_RUNNING, "conv", None) is self
        if not is_own and self.sharing.aggregates():
            notices.around(self.sharing)
        made: Tensor = super()._conv_forward(*args)  # type: ignore[misc]
        return made

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        (x, *rest), kwargs = (args, kwargs) if args else ([kwargs[n] for n in [*kwargs][:1]], dict([*kwargs.items()][1:]))
        sharing, captured = self.sharing, torch.compiler.is_dynamo_compiling()
        frames = sharing.frames
        if not frames.folded and getattr(self, "step_mode", "m") == "s" and isinstance(self, host.StepModule):
            merges = getattr(sharing.neuron, "merging", None) is not None
            if (merges or not captured) and sharing.k > 1 and getattr(sharing.neuron, "step_mode", "s") == "m":
                notices.single(sharing, merges)
            one_step: Tensor = super().forward(x, *rest, **kwargs)
            return one_step
        of_call = frames.steps(x) if x.numel() else None
        if not captured and x.numel():
            self._say(of_call, x)
        if of_call is not None and sharing.rate > 1:
            rows = ops.last_of_each(frames.time_first(x, of_call), sharing.rate, of_call)
            steps = ops.groups(of_call, sharing.rate)
            x = frames.back(rows, steps)
            made = self._shared(x, rest, kwargs, steps)
            return frames.back(ops.expand(frames.time_first(made, steps), sharing.rate, of_call), of_call)
        return self._shared(x, rest, kwargs, of_call)

    def _shared(self, x: Tensor, rest: Any, kwargs: dict[str, Any], steps: int | None) -> Tensor:
        sharing, captured = self.sharing, torch.compiler.is_dynamo_compiling()
        frames, logits = sharing.frames, getattr(self, LOGITS, None)
        if steps is not None and captured:
            marked = sharing.marked(x.dtype, logits)
            # Nothing stands between the question and the mark: a mark that is not captured cannot run.
            if ops.is_captured():
                rows = ops.mark(frames.time_first(x, steps), *marked, steps, sharing.layer)
                x, steps = frames.back(rows, steps), None
        if steps is None or sharing.k == 1:
            return self._own(x, rest, kwargs)
        weights, by, form = sharing.operands(x.dtype, logits)
        count = ops.groups(steps, sharing.k)
        sums = frames.back(ops.aggregate(frames.time_first(x, steps), weights, by, steps, form), count)
        made = self._own(sums, rest, kwargs, sharing.plain)
        return frames.back(ops.expand(frames.time_first(made, count), sharing.k, steps), steps)

    def _own(self, x: Tensor, rest: Any, kwargs: dict[str, Any], plain: bool = False) -> Tensor:
        """Return the convolution itself, in the dtype that it is to compute in."""
        dtype = self.sharing.dtype
        # Under autocast, and in a net of another dtype, each layer is told its dtype anyway.
        is_told = torch.is_autocast_enabled(x.device.type)
        if (
            dtype is not None
            and dtype.is_floating_point
            and x.dtype is torch.float32
            and not is_told
            and torchs_own(self) is not None
        ):
            return rounded(self, x, dtype)
        made: Tensor = plainly(self, x) if plain else super().forward(x, *rest, **kwargs)
        return made

    def _replicate_for_data_parallel(self) -> Any:
        raise RuntimeError(
            f"layer {self.sharing.layer!r}: nn.DataParallel would give each device a layer that reads the original's neuron"
            "; use nn.parallel.DistributedDataParallel"
        )

    def _say(self, steps: int | None, x: Tensor) -> None:
        """Warn of a call that shares nothing, or runs no kernels."""
        ops.refuse_trace()
        sharing = self.sharing
        if sharing.k > 1 and dispatch.counts():
            notices.counted(sharing.layer, sharing.k)
        if steps is None and sharing.k > 1:
            notices.unknown(sharing, tuple(x.shape))
        elif sharing.gate is not None and not ops.is_inside():
            notices.part(type(sharing.gate.net).__name__)

    def fit_logits(self) -> None:
        """Give the convolution the logits that its weights need: k of them, at the decay weights, or none."""
        sharing, held = self.sharing, self._parameters.get(LOGITS)
        count = sharing.frames_of_group
        wanted = count if sharing.weights == "learned" and count > 1 else 0
        if wanted != (0 if held is None else len(held)):
            self._parameters.pop(LOGITS, None)
            if wanted:
                self.register_parameter(LOGITS, nn.Parameter(self.initial_logits()))

    def initial_logits(self) -> Tensor:
        """Return logits [k] whose softmax is the decay weights, in the dtype and on the device of the layer's weight."""
        with torch.no_grad():
            beta = torch.as_tensor(self.sharing.decay(torch.float64), dtype=torch.float64, device="cpu")
            powers = beta ** torch.arange(self.sharing.k - 1, -1, -1, device="cpu")
            powers = powers.reshape(-1, self.sharing.stretch).sum(1)
            return (powers / powers.sum()).log().to(next(p for p in self.parameters() if p.dim() > 1))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A checkpoint of the source has no logits; it loads strictly, and they are what they were at first.
        key = prefix + LOGITS
        if LOGITS in self._parameters and key not in state_dict:
            state_dict = state_dict | {key: self.initial_logits()}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        sharing = self.sharing
        shown = f"{super().extra_repr()}, k={sharing.k}, weights={sharing.weights}"
        return shown if sharing.normalize else f"{shown}, normalize=False"


def has_trained_logits(module: nn.Module) -> bool:
    """Return whether a convolution's learned weights are not those that it began with."""
    held = module._parameters.get(LOGITS) if isinstance(module, SharedConv) else None
    return held is not None and not torch.equal(held, module.initial_logits())  # type: ignore[operator]


def torchs_own(module: nn.Module) -> type[nn.Module] | None:
    """Return the convolution class of torch's that a module's class extends; None if it extends none."""
    modules = "torch.nn.modules.conv", "torch.nn.modules.linear"
    return next((kind for kind in type(module).__mro__ if kind.__module__ in modules), None)


def leading(module: Any, x: Tensor) -> int:
    """Return how many dimensions x has in front of [C, H, W]."""
    return x.dim() - int(module.weight.dim()) + 1


def plainly(module: nn.Module, x: Tensor) -> Tensor:
    """Return torch's own convolution of frames whose leading dimensions are all rows."""
    rows, kind = leading(module, x), torchs_own(module)
    made: Tensor = kind.forward(module, x.flatten(0, rows - 1))  # type: ignore[union-attr]
    return made.reshape(*x.shape[:rows], *made.shape[1:])


def rounded(module: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return torch's own convolution or Linear in another dtype, as x's: weights, input and result are rounded to it."""
    weight = module.weight.to(dtype)
    bias = None if module.bias is None else module.bias.to(dtype)
    if isinstance(module, nn.Linear):
        return torch.nn.functional.linear(x.to(dtype), weight, bias).to(x.dtype)
    rows = leading(module, x)
    made: Tensor = module._conv_forward(x.to(dtype).flatten(0, rows - 1), weight, bias).to(x.dtype)
    return made.reshape(*x.shape[:rows], *made.shape[1:])


# Classes whose forward is known: it treats all frames alike.
PLAIN: tuple[type[nn.Module], ...] = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear),
    *(host.layer.Conv1d, host.layer.Conv2d, host.layer.Conv3d, host.layer.Linear),
)


def shared_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that ``share`` gives a convolution of class ``kind``."""
    if "weight" in kind.__dict__ and kind.__name__ == f"Parametrized{kind.__bases__[0].__name__}":
        # torch makes it of the source's class for one module, and gives the module its first base when that ends.
        names = {n: v for n, v in vars(kind).items() if n not in ("__dict__", "__weakref__")} | {"_is_made_of": kind}
        return type(kind.__name__, (shared_class(kind.__bases__[0]),), names)
    return mixed(SharedConv, kind)


def share(net: nn.Module, plan: Mapping[str, Sharing]) -> None:
    """Change the class of each convolution in ``plan``, in place, and let calls around them tell T.

    Args:
        plan: name of the convolution -> how it aggregates. A convolution that is swapped already gets the new one.

    Raises:
        ValueError: no such module, or a neuron with several decays. The net is left as it was.
    """
    modules = dict(net.named_modules(remove_duplicate=False))
    for name, sharing in plan.items():
        _check(modules, name, sharing)
    for name, sharing in plan.items():
        conv: Any = modules[name]
        if not isinstance(conv, SharedConv):
            conv.__class__ = shared_class(type(conv))
        before, wanted = vars(conv).get("sharing"), replace(sharing, layer=name)
        if before is None:
            conv.sharing, conv._tac = wanted, Noted(name)
        else:  # the same object, which a captured call knows
            vars(before).update(vars(replace(wanted, gate=before.gate, unshared=before.unshared)))
        conv._tac.fits = words("preserve", sharing.k, sharing.weights)
        conv.fit_logits()
    for name in {sharing.frames.of for sharing in plan.values() if sharing.frames.folded}:
        note_calls(modules[name], name)


def _check(modules: Mapping[str, nn.Module], name: str, sharing: Sharing) -> None:
    """Raise ValueError where ``share`` cannot take this part of its plan."""
    conv = modules.get(name)
    if conv is None:
        raise ValueError(f"the net has no module {name!r}")
    if sharing.beta is None and (problem := host.many_numbers(sharing.neuron)):
        raise ValueError(f"{name!r} drives a neuron with several decays: its {problem}")
    if type(conv) in PLAIN and not _takes_frames(conv) and not sharing.frames.folded:
        raise ValueError(
            f"convolution {name!r} ({type(conv).__name__}) takes folded frames [T * N, C, ...]: its Sharing needs "
            "Frames(folded=True, rules=...), which find T"
        )


def _takes_frames(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or getattr(module, "step_mode", "s") == "m"


def source_class(made: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a swapped convolution had."""
    known: type[nn.Module] | None = vars(made).get("_is_made_of")
    if known is not None:
        return known
    if SharedConv in made.__bases__:
        return own_class(made)
    # It was parametrized since: torch made a class of the swapped one.
    names = {n: v for n, v in vars(made).items() if n not in ("__dict__", "__weakref__")}
    return type(made.__name__, (source_class(made.__bases__[0]),), names)


def undo(net: nn.Module, but: Collection[str] = ()) -> None:
    """Give each module that ``share`` changed its own class again, but for those of these names."""
    kept = {id(net.get_submodule(name)) for name in but}
    for module in net.modules():
        if isinstance(module, SharedConv) and id(module) not in kept:
            module._parameters.pop(LOGITS, None)
            del module.sharing, module._tac
            module.__class__ = source_class(type(module))  # type: ignore[assignment]
        forget_calls(module)
