"""What a converted net computes, written as plain PyTorch on all T frames: the definition that the tests compare with.

``define(source, settings)`` is a copy of the source net whose convs, neurons and pools do what docs/equations.md says,
slowly: every tensor has T frames, a shared drive is repeated, and a collapse is a note ("mark") on the value. Nothing here
knows how sj_tac runs a net; it needs torch and SpikingJelly alone.

A mark says in which groups a value is constant. It travels through what treats all frames alike: norms, average pools,
Flatten, Linear, Dropout, convs, sums of two values with the same mark (in place too) and
their concatenation, products with a number. Whatever else
touches a marked value reads its T frames, and what comes out has no mark. A write into the value takes its mark away.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from spikingjelly.activation_based import functional, layer, neuron
from torch import Tensor, nn

NEURONS = (neuron.LIFNode, neuron.IFNode, neuron.ParametricLIFNode)
CONVS = (layer.Conv1d, layer.Conv2d, layer.Conv3d, layer.ConvTranspose2d)
NORMS = (layer.BatchNorm1d, layer.BatchNorm2d, layer.BatchNorm3d)
ALIKE = (layer.AvgPool2d, layer.AdaptiveAvgPool2d, layer.Flatten, layer.Linear, layer.Dropout, layer.PrintShapeModule)
ALIKE += (layer.Upsample,) if hasattr(layer, "Upsample") else ()


@dataclass(frozen=True)
class Setting:
    """What is done to one conv; ``neuron``: the name of the neuron whose decay weighs its frames."""

    mode: str
    k: int
    neuron: str
    weights: str = "decay"
    normalize: bool = True
    spikes: str = "count"


@dataclass(frozen=True)
class Mark:
    """Groups in which a value of ``frames`` frames is constant.

    A group is ``stretch`` steps of a neuron, each of ``merged`` frames (a binary collapse merges, a count collapse
    stretches). ``once``: the drives of a binary collapse, on their way to the neuron that makes one step of each group.
    """

    frames: int
    merged: int = 1
    stretch: int = 1
    once: bool = False

    def lengths(self) -> list[int]:
        return cut(self.frames, self.merged * self.stretch)

    def steps(self) -> list[int]:
        """Neuron steps of each group."""
        return cut(-(-self.frames // self.merged), self.stretch)


def cut(total: int, size: int) -> list[int]:
    """Lengths of groups of ``size`` from the start; the last is shorter."""
    return [min(size, total - start) for start in range(0, total, size)]


def regroup(lengths: list[int], size: int) -> list[list[int]]:
    return [lengths[i : i + size] for i in range(0, len(lengths), size)]


def repeat(x: Tensor, lengths: Iterable[int]) -> Tensor:
    return torch.cat([x[i : i + 1].expand(n, *x.shape[1:]) for i, n in enumerate(lengths)])


def mean(x: Tensor, lengths: Iterable[int]) -> Tensor:
    """The mean over each group, one frame a group."""
    return torch.stack([group.mean(0) for group in x.split(list(lengths))])


def firsts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


# ---- values with a mark ----------------------------------------------------------------------------------------------


class Marked(Tensor):
    """T frames with a mark; ``spikes``: of a neuron's means, the spikes of all its steps, for the MaxPool behind it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            mark = _mark_behind(func, args, kwargs)
            result = func(*args, **(kwargs or {}))
        return result if mark is None else marked(result, mark)


_SUMS = {torch.add, torch.sub, Tensor.add, Tensor.sub, Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__}
_IN_PLACE = {Tensor.add_, Tensor.sub_, Tensor.__iadd__, Tensor.__isub__}
_SUMS |= _IN_PLACE
_SCALINGS = {torch.mul, torch.div, Tensor.mul, Tensor.div, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__}


def _mark_behind(func: Any, args: Any, kwargs: Any) -> Mark | None:
    if func is torch.cat and len(args) == 2 and args[1] >= 2:
        first, *others = [mark_of(a) for a in args[0]]
        return first if all(other == first for other in others) else None
    if kwargs or len(args) != 2:
        return None
    first, second = (mark_of(a) for a in args)
    if func in _SUMS - _IN_PLACE and first is not None and isinstance(args[1], (int, float)):
        return first
    if func in _SUMS and first is not None and first == second and args[0].shape == args[1].shape:
        return first
    if func in _SCALINGS and first is not None and isinstance(args[1], (int, float)):
        return first
    return None


def marked(x: Tensor, mark: Mark | None, spikes: Tensor | None = None) -> Tensor:
    """``x`` with a mark; itself where there is nothing to mark."""
    if mark is None or mark.merged * mark.stretch == 1:
        return plain(x)
    noted = x if isinstance(x, Marked) else x.as_subclass(Marked)
    noted.mark, noted.spikes, noted.noted = mark, spikes, _version(noted)
    return noted


def mark_of(x: Any) -> Mark | None:
    """The mark of a value that nobody has written to since."""
    return x.mark if isinstance(x, Marked) and hasattr(x, "mark") and x.noted == _version(x) else None


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor) if isinstance(x, Marked) else x


def unmark(value: Any) -> Any:
    """Ordinary tensors, in tuples, lists and dicts too."""
    return torch.utils._pytree.tree_map(lambda x: plain(x) if isinstance(x, Tensor) else x, value)


# ---- modules ---------------------------------------------------------------------------------------------------------


def decay(node: nn.Module, dtype: torch.dtype) -> float | Tensor:
    if isinstance(node, neuron.ParametricLIFNode):
        return 1 - node.w.to(dtype).sigmoid()
    return 1 - 1 / node.tau if isinstance(node, neuron.LIFNode) else 1.0


def geometric(beta: float | Tensor, steps: int) -> float | Tensor:
    """S_K, the sum of beta^j for j < K."""
    return sum(beta**j for j in range(steps))


class _Conv:
    """One convolution for the weighted sum of each group, repeated."""

    def forward(self, x: Tensor) -> Tensor:
        if self.step_mode == "s":
            return super().forward(plain(x))
        setting, node = self.setting
        mark = mark_of(x) or Mark(x.shape[0])
        if setting.k > mark.stretch and setting.k % mark.stretch:
            mark = Mark(x.shape[0])  # k is no whole number of these groups: it reads frames
        x, lengths, steps = plain(x), mark.lengths(), mark.steps()
        size = max(1, setting.k // mark.stretch)
        frames = x[firsts(lengths)]
        if size == 1:
            drives = super().forward(frames)
        else:
            sums, start = [], 0
            for group in regroup(steps, size):
                weights = _weights(setting, node, group, frames.dtype)
                sums.append(sum(w * f for w, f in zip(weights, frames[start : start + len(group)], strict=True)))
                start += len(group)
            drives = super().forward(torch.stack(sums).to(x.dtype))
        y = repeat(drives, [sum(group) for group in regroup(lengths, size)])
        if setting.mode == "preserve":
            return marked(y, mark)
        steps_in = max(setting.k, mark.stretch)
        return marked(y, Mark(mark.frames, mark.merged, steps_in, setting.spikes == "binary"))


def _weights(setting: Setting, node: nn.Module, steps: list[int], dtype: torch.dtype) -> list[Any]:
    if setting.weights == "uniform":
        return [n / (sum(steps) if setting.normalize else 1) for n in steps]
    beta = decay(node, torch.promote_types(dtype, torch.float32))
    whole = geometric(beta, sum(steps)) if setting.normalize else 1
    return [beta ** sum(steps[j + 1 :]) * geometric(beta, n) / whole for j, n in enumerate(steps)]


class _Neuron:
    """All steps of every group and their mean, or one step for a group of a binary collapse."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mark = mark_of(x)
        x = plain(x)
        if mark is None or self.step_mode == "s" or not self.takes_groups:
            return super().forward(x, *args, **kwargs)
        if mark.once:
            spikes = self._one_step_each(x[firsts(mark.lengths())], mark.steps())
            return marked(repeat(spikes, mark.lengths()), Mark(mark.frames, mark.merged * mark.stretch))
        spikes = super().forward(x[:: mark.merged])
        # Where each group is one step there is nothing to average.
        return marked(repeat(mean(spikes, mark.steps()), mark.lengths()), mark, spikes)

    def _one_step_each(self, drives: Tensor, steps: list[int]) -> Tensor:
        rest = 0.0 if self.v_reset is None else self.v_reset
        beta, gain = decay(self, drives.dtype), 1.0
        if getattr(self, "decay_input", False):
            gain = 1 - beta
        v, spikes = self.v, []
        if isinstance(v, float) or v.shape != drives.shape[1:]:
            v = torch.full_like(drives[0], v if isinstance(v, float) else rest)
        for drive, n in zip(drives, steps, strict=True):
            h = rest + beta**n * (v - rest) + gain * (geometric(beta, n) if self.normalize else 1) * drive
            spike = self.surrogate_function(h - self.v_threshold)
            fired = spike.detach() if self.detach_reset else spike
            v = h - fired * self.v_threshold if self.v_reset is None else fired * rest + (1 - fired) * h
            spikes.append(spike)
        self.v = v
        return torch.stack(spikes)


class _MaxPool:
    """Behind a neuron that emits means: pools every step, then takes the mean."""

    def forward(self, x: Tensor) -> Tensor:
        mark, spikes = mark_of(x), getattr(x, "spikes", None)
        if mark is not None and mark.stretch == 1 and self.step_mode == "m":
            return marked(super().forward(plain(x)), mark)  # each group is one step
        if mark is None or spikes is None or self.step_mode == "s":
            return super().forward(plain(x))
        return marked(repeat(mean(super().forward(spikes), mark.steps()), mark.lengths()), mark)


class _Alike:
    """A module that treats all frames alike."""

    def forward(self, x: Tensor) -> Tensor:
        return marked(super().forward(plain(x)), mark_of(x))


# ---- the net ---------------------------------------------------------------------------------------------------------


def define(source: nn.Module, settings: Mapping[str, Setting], planned: Iterable[str] | None = None) -> nn.Module:
    """A copy of ``source`` that computes what ``settings`` mean, conv by conv.

    Args:
        settings: of each converted conv, by its name.
        planned: names of the neurons that take groups; all of the net where None.
    """
    net = copy.deepcopy(source)
    functional.reset_net(net)
    modules = dict(net.named_modules())
    for name, setting in settings.items():
        modules[name].__dict__["setting"] = (setting, modules[setting.neuron])
        modules[setting.neuron].normalize = setting.normalize
        _become(modules[name], _Conv)
    for name, module in modules.items():
        if type(module) in NEURONS:
            module.takes_groups = planned is None or name in planned
            _become(module, _Neuron)
    adopt(net)
    return net


def adopt(net: nn.Module, convs: bool = True) -> None:
    """Let whatever treats frames alike pass marks on: also modules that were put in after ``define``."""
    for module in net.modules():
        if type(module) is layer.MaxPool2d:
            _become(module, _MaxPool)
        elif type(module) in (*NORMS, *ALIKE) or (convs and type(module) in CONVS):
            _become(module, _Alike)


def _become(module: nn.Module, mixin: type) -> None:
    module.__class__ = type(f"Defined{type(module).__name__}", (mixin, type(module)), {})


def settings_of(source: nn.Module, report: Any, neurons: Mapping[str, str] | None = None, **more: Any) -> dict[str, Setting]:
    """The settings of what a report says was converted; a conv's neuron is the next in the net unless ``neurons`` says."""
    settings, names = {}, dict(source.named_modules())
    for verdict in report.converted:
        order = list(names)
        behind = order[order.index(verdict.layer) :]
        found = (neurons or {}).get(verdict.layer) or next(n for n in behind if isinstance(names[n], NEURONS))
        settings[verdict.layer] = Setting(verdict.mode, verdict.k, found, **more)
    return settings


def planned_neurons(settings: Mapping[str, Setting], report: Any) -> set[str]:
    """Neurons of converted chains and those that a report calls stretched."""
    return {s.neuron for s in settings.values()} | {v.layer for v in report.verdicts if v.status == "stretched"}


@contextmanager
def margins(net: nn.Module) -> Iterator[list[float]]:
    """Distances |h - v_threshold|, the smallest of each surrogate call: how far a spike was from tipping over."""
    seen: list[float] = []

    def note(module: nn.Module, args: Any) -> None:
        if args[0].numel():
            seen.append(float(args[0].detach().abs().min()))

    surrogates = {m.surrogate_function for m in net.modules() if isinstance(m, neuron.BaseNode)}
    handles = [s.register_forward_pre_hook(note) for s in surrogates]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
