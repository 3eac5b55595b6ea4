"""The source net and the converted net, run on the example input: what it costs, and whether the swap did what it should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import ConversionError

_MEASURED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


@dataclass(frozen=True)
class Seen:
    """What one call of a module put out: its shapes, whether all is finite, and numbers that differ where any bit does."""

    module: str
    shapes: tuple[tuple[int, ...], ...]
    finite: bool
    numbers: tuple[tuple[float, float], ...] = field(repr=False)


@dataclass
class Run:
    """A run on the example input.

    Attributes:
        macs: T and multiply-accumulates per frame and sample, of every conv and Linear.
        calls: every module call in the order they ended; output: what the net put out.
        failure: why it did not end, and in which module, empty where it did; error: what was raised there.
    """

    macs: dict[str, tuple[int, int]]
    calls: list[Seen]
    output: list[Tensor]
    failure: str = ""
    error: Exception | None = None


def tensors(output: Any) -> list[Tensor]:
    """The tensors of an output, however it is nested."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def run(
    model: nn.Module,
    arguments: tuple[Any, ...],
    sites: Mapping[str, str],
    *,
    watched: bool = True,
    exact: bool = False,
) -> Run:
    """Run the model from its reset state, and leave it as it was.

    Args:
        sites: for a conv, the module whose output has T in front, where that is another one.
        watched: with hooks on all modules, which makes a converted net run unfused; exact: take down the numbers, too.
    """
    data = arguments[0]
    batch = data.shape[1] if isinstance(data, Tensor) and data.dim() == 5 else len(data)
    found, entered = Run({}, [], []), []
    totals: dict[str, int] = {}
    steps: dict[str, int] = {}

    def enter(name: str) -> Any:
        return lambda module, args: entered.append(name)

    def leave(name: str, measured: bool) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            entered.pop()
            found.calls.append(_seen(name, tensors(output), exact))
            if measured and isinstance(output, Tensor):
                totals[name] = totals.get(name, 0) + output.numel() * module.weight[0].numel() // max(1, batch)
            if isinstance(output, Tensor) and output.dim() >= 3 and output.shape[1] == batch:
                steps[name] = output.shape[0]

        return hook

    with host.looked_at(model):
        host.reset_memories(model)
        for name, module in model.named_modules() if watched else ():
            module.register_forward_pre_hook(enter(name))
            module.register_forward_hook(leave(name, isinstance(module, _MEASURED)))
        try:
            found.output = [t.clone() for t in tensors(model(*arguments))]
        except Exception as error:
            shape = list(data.shape) if isinstance(data, Tensor) else type(data).__name__
            where = f" in module {entered[-1]!r}" if entered and entered[-1] else ""
            found.error = error
            found.failure = f"does not run on example_input of shape {shape}{where} ({type(error).__name__}: {error})"
    for name, total in totals.items():
        frames = steps.get(sites.get(name, name), 1)
        found.macs[name] = (frames, total // frames)
    return found


def _seen(name: str, output: list[Tensor], exact: bool) -> Seen:
    numbers = []
    for tensor in output if exact else ():
        flat = tensor.detach().to(torch.float64).flatten()
        ramp = torch.arange(1, len(flat) + 1, device=flat.device) % 97
        numbers.append((flat.sum().item(), (flat * ramp).sum().item()))
    finite = all(bool(torch.isfinite(t).all()) for t in output)
    return Seen(name, tuple(tuple(t.shape) for t in output), finite, tuple(numbers))


def verify(
    source: Run, model: nn.Module, arguments: tuple[Any, ...], *, exact: bool, any_rate: bool, runs_here: bool
) -> None:
    """Check a converted net against its source on the example input; leaves it as it was.

    Args:
        exact: nothing is aggregated (k=1 everywhere), so that unfused every module must put out the source's bits.
        any_rate: the output may have fewer frames (``emit: groups``). runs_here: the kernels that were named run here.

    Raises:
        ConversionError: an output of another shape, one that is not finite, or at k=1 another value; names the first
            module that differs.
    """
    problem, error = "", None
    if runs_here:
        fused = run(model, arguments, {}, watched=False)
        problem, error = fused.failure or _compare(source.output, fused.output, any_rate), fused.error
    if not problem and not exact:
        return
    # Watched, it runs unfused: the definition.
    unfused = run(model, arguments, {}, exact=exact)
    different = _first_difference(source.calls, unfused.calls, exact)
    if not different and unfused.failure:
        different, error = f"the converted net {unfused.failure}", unfused.error
    if different:
        raise ConversionError(f"verification failed: {different}; the model was left as it was") from error
    if problem:
        raise ConversionError(
            f"verification failed in the fused kernels alone: {problem}; convert with fuse=False, and please report this"
        ) from error


def _compare(expected: list[Tensor], got: list[Tensor], any_rate: bool) -> str:
    if len(expected) != len(got):
        return f"the output has {len(got)} tensors, the source's {len(expected)}"
    for a, b in zip(expected, got, strict=True):
        if a.shape[any_rate:] != b.shape[any_rate:] or a.dtype != b.dtype:
            return f"the output is {list(b.shape)} of {b.dtype}, the source's {list(a.shape)} of {a.dtype}"
        if torch.isfinite(a).all() and not torch.isfinite(b).all():
            return "the output is not finite, the source's is"
    return ""


def _first_difference(expected: list[Seen], got: list[Seen], exact: bool) -> str:
    for a, b in zip(expected, got, strict=False):
        if a.module != b.module:
            return f"layer {b.module!r} ran where the source ran {a.module!r}"
        # Inside a collapsed region frames travel at their own rate.
        if [s[1:] for s in a.shapes] != [s[1:] for s in b.shapes] or (exact and a.shapes != b.shapes):
            return f"layer {a.module!r} puts out {b.shapes}, the source {a.shapes}"
        if a.finite and not b.finite:
            return f"layer {a.module!r} puts out numbers that are not finite, the source's are"
        if exact and a.finite and a.numbers != b.numbers:
            return f"layer {a.module!r} is the first whose output differs from the source's at k=1"
    return ""
