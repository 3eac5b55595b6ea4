"""The source net and the converted net, run on the example input: what it costs, and whether the swap did what it should."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import ConversionError
from sj_tac.host import dispatch
from sj_tac.kernels import backends
from sj_tac.rewrites.arguments import copied, described
from sj_tac.rewrites.layouts import Layout, Sample
from sj_tac.runtime.borders import definition

_CONVS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_MEASURED = (*_CONVS, nn.Linear)

_ROW = 4096  # words of a digest's rows
_WEIGHTS = torch.randint(-(2**62), 2**62, (_ROW,), generator=torch.Generator().manual_seed(0), device="cpu") * 2 + 1
FAR = 0.3  # of an output's mean size: where rounding alone moves as much, as it may in deep nets, float64 tells
ASKS = (
    "a forward that asks for the class of a module (type(m) is layer.Conv2d, m.__class__.__name__) goes another way, as a "
    "converted layer has another class: ask isinstance(m, layer.Conv2d) there"
)
FEW = 0.01  # of a neuron's spikes: the most that rounding moves
_PIECE = 1 << 18  # elements: what the CPU's caches hold


@dataclass(frozen=True)
class Seen:
    """What one call of a module put out: its shapes, whether all is finite, and digests that differ where any value does."""

    module: str
    shapes: tuple[tuple[int, ...], ...]
    finite: bool
    digests: tuple[bytes, ...] = field(repr=False)


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
    return [leaf for leaf in torch.utils._pytree.tree_leaves(host.opened(output)) if isinstance(leaf, Tensor)]


@dataclass
class _Counts:
    """What a run's convs and Linears cost, by name: their multiplications, and the steps that their frames are of.

    Attributes:
        called: of a chain [N, T, ...] are frames; elsewhere an image may have as many channels as there are steps.
    """

    batch: int
    sample: Sample | None
    called: set[str]
    totals: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def note(self, name: str, module: Any, args: Any, output: Tensor) -> None:
        if isinstance(module, _MEASURED):
            counted = dispatch.unwrapped(args[0] if host.is_transposed(module) and args else output)
            total = counted.numel() * host.filter_size(module) // max(1, self.batch)
            self.totals[name] = self.totals.get(name, 0) + total
        if dispatch.is_in_function():  # what vmap runs over, time mostly, is no dimension there
            return
        frames = (Layout.FOLDED, Layout.BATCH) if name in self.called else (Layout.FOLDED,)
        if output.dim() >= 3 and output.shape[1] == self.batch:
            self.steps[name] = output.shape[0]
        elif self.sample is not None and self.sample.layout(output.shape) in frames:
            self.steps[name] = self.sample.steps


def run(
    model: nn.Module,
    arguments: tuple[Any, ...],
    sites: Mapping[str, str],
    *,
    watched: bool = True,
    exact: bool = False,
    sample: Sample | None = None,
) -> Run:
    """Run the model from its reset state, and leave it as it was.

    Args:
        sites: for a conv, the module whose output has T in front, where that is another one.
        watched: with hooks on all modules; exact: take down digests, too. sample: T and N, where the neurons said so.
    """
    data = tensors(arguments)
    batch = sample.batch if sample is not None else _batch(data[0], model) if data else 1
    found, entered = Run({}, [], []), []
    counts = _Counts(batch, sample, set(sites.values()))

    def enter(name: str) -> Any:
        return lambda module, args: entered.append(name)

    def leave(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            entered.pop()
            found.calls.append(_seen(name, tensors(output), exact))
            if isinstance(output, Tensor):
                counts.note(name, module, args, output)

        return hook

    with host.looked_at(model):
        host.reset_memories(model)
        for name, module in _hooked(model) if watched else ():
            module.register_forward_pre_hook(enter(name))
            module.register_forward_hook(leave(name))
        try:
            found.output = [t.clone() for t in tensors(model(*copied(arguments)))]
        except Exception as error:
            shape = list(data[0].shape) if len(data) == len(arguments) == 1 else described(arguments)
            where = f" in module {entered[-1]!r}" if entered and entered[-1] else ""
            found.error = error
            why = f"{type(error).__name__}: {error}; in eval mode, without gradients"
            found.failure = f"does not run on example_input of shape {shape}{where} ({why})"
    for name, total in counts.totals.items():
        count = counts.steps.get(sites.get(name, name), 1)
        found.macs[name] = (count, total // count)
    return found


def _hooked(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that take hooks, by name."""
    return [(name, m) for name, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)]


def _batch(data: Tensor, model: nn.Module) -> int:
    """N of the first input: [T, N, C, ...], with as many sizes behind C as the first conv slides over, or N in front."""
    first = next((m for m in model.modules() if isinstance(m, _CONVS)), None)
    slides = 2 if first is None else len(first.kernel_size)
    return data.shape[1] if data.dim() == 3 + slides else data.shape[0] if data.dim() else 1


def _seen(name: str, output: list[Tensor], exact: bool) -> Seen:
    # Within a transform of torch.func's (vmap in a forward) numbers cannot be asked for; behind it they are compared.
    exact = exact and not dispatch.is_in_function()
    looks = [_look(dispatch.unwrapped(t).detach(), exact) for t in output]
    return Seen(name, tuple(tuple(t.shape) for t in output), all(f for f, _ in looks), tuple(d for _, d in looks))


def _look(tensor: Tensor, exact: bool) -> tuple[bool, bytes]:
    """Is all of a tensor finite; and, where ``exact``, a digest that differs where any value does. Zero has no sign."""
    if tensor.is_meta or not tensor.numel():
        return True, b""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.float()  # torch does not add up numbers of eight bits
    floating = tensor.is_floating_point()
    if not exact:
        return not floating or _is_finite(tensor), b""
    flat, finite, digest = tensor.reshape(-1), True, hashlib.blake2b(digest_size=16)
    # Piece by piece, so that all is read from memory once. On a device a piece is a launch: the whole.
    piece = _PIECE if tensor.device.type == "cpu" else flat.numel()
    for start in range(0, flat.numel(), piece):
        part = flat[start : start + piece]
        # -0.0 + 0.0 is 0.0; a copy otherwise, because a view of other bytes must begin at a whole one of them.
        part = part + 0.0 if floating else part.clone(memory_format=torch.contiguous_format)
        finite = finite and (not floating or _is_finite(part))
        _digest(part.view(torch.uint8), digest)
    return finite, digest.digest()


def _is_finite(tensor: Tensor) -> bool:
    """``isfinite().all()`` in one pass: a sum with NaN or infinity in it is no number, and few sums of numbers overflow."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _digest(raw: Tensor, digest: Any) -> None:
    """Feed contiguous bytes to the digest: rows of 64-bit words as weighted sums modulo 2^64, what is left over as it is.

    A weight is odd, so that no change of a single word leaves its row's sum as it was.
    """
    whole = len(raw) // (8 * _ROW) * (8 * _ROW)
    if whole:
        words = raw[:whole].view(torch.int64).view(-1, _ROW)
        # Integers have no matrix product on a device.
        sums = words @ _WEIGHTS if raw.device.type == "cpu" else (words * _WEIGHTS.to(raw.device)).sum(1)
        digest.update(sums.cpu().numpy())
    digest.update(raw[whole:].cpu().numpy())


def verify(
    source: Run,
    model: nn.Module,
    arguments: tuple[Any, ...],
    *,
    exact: bool,
    any_rate: bool,
    runs_here: bool,
    compared: bool = True,
) -> None:
    """Check a converted net against its source on the example input; leaves it as it was.

    Args:
        exact: nothing is aggregated (k=1 everywhere), so that unfused every module must put out the source's bits.
        any_rate: the output may have fewer frames (``emit: groups``). runs_here: the kernels that were named run here.
        compared: where something is aggregated, the numbers are those of the definition, which takes one more run.

    Raises:
        ConversionError: an output of another shape, one that is not finite, at k=1 another value than the source's, or
            where the kernels are fused another one than the definition's; names the first module that differs.
    """
    problem, error = "", None
    if runs_here:
        expected, whose = source, "the source's"
        roles = [role for m in model.modules() if (role := m.__dict__.get("_tac")) is not None]
        if not exact and compared and any(role.borders.fused for role in roles):
            made = [(role.made, role.made.copy()) for role in roles if hasattr(role, "made")]
            with definition(model):
                expected, whose = run(model, arguments, {}, watched=False), "that of fuse=False"
            for now, before in made:  # a report does not tell of frames that were looked at here
                now.clear()
                now.update(before)
        # The last of all, so that a report tells of this one.
        fused = run(model, arguments, {}, watched=False)
        problem, error = fused.failure or compare(source.output, fused.output, any_rate), fused.error
        if not problem and (exact or expected is not source):
            problem = far(expected.output, fused.output, whose)
            rounded = problem and _few_differ(model, arguments) and _are_alike_in_float64(model, arguments)
            problem = "" if rounded else problem
    data = tensors(arguments)
    if any(dispatch.autocasts(x.device.type) or x.dtype in (torch.bfloat16, torch.float16) for x in data):
        exact = False  # the definition's neurons step in float32, and may make their spikes otherwise
    if not problem and not exact:
        return
    # A backend may compute one frame in another order than T of them: here the bits are compared.
    with definition(model, alike=False):
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


def compare(expected: list[Tensor], got: list[Tensor], any_rate: bool) -> str:
    """Other tensors than expected, by their shapes and dtypes, or what is not finite; ``any_rate``: of fewer frames."""
    if len(expected) != len(got):
        return f"the output has {len(got)} tensors, the source's {len(expected)}"
    for a, b in zip(expected, got, strict=True):
        if a.shape[any_rate:] != b.shape[any_rate:] or a.dtype != b.dtype:
            return f"the output is {list(b.shape)} of {b.dtype}, the source's {list(a.shape)} of {a.dtype}"
        if torch.isfinite(a).all() and not torch.isfinite(b).all():
            return "the output is not finite, the source's is"
    return ""


def far(expected: list[Tensor], got: list[Tensor], whose: str) -> str:
    """Other numbers than a few spikes that rounding moved would make."""
    for a, b in zip(expected, got, strict=False):
        if a.shape != b.shape:
            return f"the output is {list(b.shape)}, {whose} {list(a.shape)}"
        if a.dtype not in (torch.float32, torch.float64) or not a.numel() or not torch.isfinite(a).all():
            continue
        size, difference = float(a.abs().mean()), float((a - b).abs().mean())
        if difference > FAR * size:
            return (
                f"the output differs from {whose} by {difference:.3g} in the mean, where its numbers are {size:.3g}; a "
                "forward that asks for the class of a tensor may take another way"
            )
    return ""


def _few_differ(model: nn.Module, arguments: tuple[Any, ...]) -> bool:
    """Whether the first neuron whose output differs, fused and in the definition, puts out few other spikes."""
    shares: list[float] = []
    defined: list[Tensor] = []

    def note(module: Any, args: Any, output: Any) -> None:
        defined.append(output.clone())

    def compare(module: Any, args: Any, output: Any) -> None:
        if defined and not any(shares):
            expected = defined.pop(0)
            alike = expected.shape == output.shape
            shares.append(float((expected != output).double().mean()) if alike else 1.0)

    units = [m for m in model.modules() if host.is_neuron(m)]
    for hook, way in ((note, definition(model)), (compare, contextlib.nullcontext())):
        with host.looked_at(model), way:
            host.reset_memories(model)
            handles = [m.register_forward_hook(hook) for m in units]
            try:
                model(*copied(arguments))
            except Exception:
                return False
            finally:
                for handle in handles:
                    handle.remove()
    return max(shares, default=1.0) <= FEW


def _are_alike_in_float64(model: nn.Module, arguments: tuple[Any, ...]) -> bool:
    """Whether a copy of a fused net, where rounding moves no spike, puts out what its definition does.

    Not where such a copy does not run.
    """

    def widened(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    wide = tuple(torch.utils._pytree.tree_map(widened, arguments))
    try:
        twin = copy.deepcopy(model).double()
    except Exception:
        return False
    with backends.untold():  # on a GPU plain PyTorch is what has float64
        fused = run(twin, wide, {}, watched=False)
    with definition(twin):
        defined = run(twin, wide, {}, watched=False)
    return not (fused.failure or defined.failure or far(defined.output, fused.output, ""))


def _first_difference(expected: list[Seen], got: list[Seen], exact: bool) -> str:
    for a, b in zip(expected, got, strict=False):
        if a.module != b.module:
            return f"layer {b.module!r} ran where the source ran {a.module!r}"
        # Inside a collapsed region frames travel at their own rate.
        if [s[1:] for s in a.shapes] != [s[1:] for s in b.shapes] or (exact and a.shapes != b.shapes):
            return f"layer {a.module!r} puts out {b.shapes}, the source {a.shapes}"
        if a.finite and not b.finite:
            return f"layer {a.module!r} puts out numbers that are not finite, the source's are"
        if exact and a.finite and a.digests != b.digests:
            first = f"layer {a.module!r} is the first whose" if a.module else "the net's own"
            return f"{first} output differs from the source's at k=1; {ASKS}"
    return ""
