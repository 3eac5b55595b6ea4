"""What registered classes promise, and what convs with a forward of their own do, tried on what the sample hands them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.host import dispatch
from sj_tac.rewrites.arguments import copied
from sj_tac.verdicts import Reason, Refusal

UNTRIED = "what it computes can be tried on example_input alone, and none was given"
RAISES = "it does not run on"
# Places of a map that a trial needs, beyond those that a kernel reaches.
FEW = 2
# Steps, or folded frames, of a trial.
MOST = 16


def broken_promises(model: nn.Module, arguments: tuple[Any, ...] | None) -> dict[str, Refusal]:
    """Why each registered module cannot be relied on, by name; those that keep their promise are left out. Changes nothing.

    Args:
        arguments: of the model's forward; None where there is no sample.
    """
    named = list(model.named_modules())
    neurons = {name: m for name, m in named if host.is_registered_neuron(m)}
    affine = {name: m for name, m in named if host.is_registered_affine(m)}
    if not neurons and not affine:
        return {}
    if arguments is None:
        users = {name: m for name, m in (neurons | affine).items() if not host.is_the_hosts(m)}
        return {
            name: Refusal(Reason.PROMISE_UNTRIED, f"{name!r} ({type(m).__name__}) is registered")
            for name, m in users.items()
        }
    inputs = _inputs(model, {**neurons, **affine}, arguments)
    found = {name: _order_problem(m, inputs[name]) for name, m in neurons.items() if name in inputs}
    found |= {name: _affine_problem(m, inputs[name]) for name, m in affine.items() if name in inputs}
    kinds = {name: type(m).__name__ for name, m in named}
    return {
        name: Refusal(Reason.PROMISE_BROKEN, f"{name!r} ({kinds[name]}) is registered, but {problem}")
        for name, problem in found.items()
        if problem
    }


def own_forwards(model: nn.Module, arguments: tuple[Any, ...] | None, linears: bool) -> dict[str, str]:
    """Of each conv or Linear with a forward of its own, by name, what keeps it from standing for the known one; else "".

    A forward that standardises, quantises or masks its weights is as good as that of the class that it derives from: all
    that a converted layer asks of it is that each frame has the same affine map. Changes nothing.

    Args:
        arguments: of the model's forward; None where there is no sample. linears: Linear layers are looked at, too.
    """
    wanted = {
        name: m
        for name, m in model.named_modules()
        if host.has_own_forward(m) and not (host.is_registered_affine(m) or host.is_registered_neuron(m))
        if linears or not isinstance(m, nn.Linear)
    }
    if not wanted or arguments is None:
        return dict.fromkeys(wanted, UNTRIED)
    inputs = _inputs(model, wanted, arguments)
    return {
        name: _own_forward_problem(m, inputs[name]) if name in inputs else "the sample does not call it with frames"
        for name, m in wanted.items()
    }


def _own_forward_problem(module: nn.Module, x: Tensor) -> str:
    """What keeps a forward from being one affine map of every frame: of some frames, on a corner of their maps."""
    layer: Any = module
    steps = host.is_multi_step(module) and isinstance(module, (*host.CONVS, *host.LINEARS))
    wanted, channels = (layer.in_channels, 2 if steps else 1) if host.is_conv(module) else (layer.in_features, x.dim() - 1)
    if host.is_conv(module) and not isinstance(module, host.CONVS) and x.dim() == len(layer.kernel_size) + 3:
        named = next(kind.__name__ for kind in host.FOLDED_CONVS if isinstance(module, kind))
        return (
            f"it is handed {list(x.shape)}, unfolded frames [T, N, ...], which torch's nn.{named} does not take; "
            f"derive its class from SpikingJelly's layer.{named}, in step_mode 'm'"
        )
    if x.dim() <= channels or x.shape[channels] != wanted or not len(x):
        return f"it is handed {list(x.shape)}, where its class says {wanted} channels or features"
    # More steps than a sample of one has, so that they can be told apart.
    front = (min(max(len(x), 4), MOST), 2) if steps else (min(max(len(x), 6), MOST),)
    frames = x.new_empty((*front, *x.shape[len(front) :]))
    corner = frames
    # Large maps of many channels would take seconds.
    reaches = (
        [d * (k - 1) + 1 for k, d in zip(layer.kernel_size, layer.dilation, strict=True)] if host.is_conv(module) else []
    )
    for dim, reach in enumerate(reaches, start=-len(reaches)):
        corner = corner.narrow(dim, 0, min(corner.shape[dim], reach + FEW))
    try:
        plain = _without_hooks(module)
        for part in (frames,) if corner.shape == frames.shape else (corner, frames):
            problem = _affine_problem(plain, part)
            if not problem or not problem.startswith(RAISES):
                break
        return problem or _affine_problem_of(copy.deepcopy(plain).double(), part, training=True)
    except Exception as error:  # a weight that is no leaf, say
        return f"it cannot be tried ({type(error).__name__}: {error})"


def _without_hooks(module: nn.Module) -> nn.Module:
    """A copy that calls nobody else."""
    fresh = copy.deepcopy(module, host.detached_memories(module))
    for inner in fresh.modules():
        inner._forward_hooks.clear()
        inner._forward_pre_hooks.clear()
    return fresh


def _inputs(model: nn.Module, wanted: dict[str, nn.Module], arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """What each module is called with first."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            first = next(iter((*args, *kwargs.values())), None)
            # What a transform of torch.func's hands it, as vmap in a forward, ends with that; no converted layer is there.
            if isinstance(first, Tensor) and not dispatch.is_in_function():
                found.setdefault(name, first.detach().clone())

        return hook

    with host.looked_at(model):
        host.reset_memories(model)
        for name, module in wanted.items():
            module.register_forward_pre_hook(note(name), with_kwargs=True)
        try:
            model(*copied(arguments))
        except Exception:  # the run of the source says what is wrong
            return found
    return found


def _run(module: nn.Module, x: Tensor, training: bool = False) -> Tensor:
    """A call of a fresh copy, in eval mode or as in training; with the same random numbers in every call."""
    fresh = copy.deepcopy(module, host.detached_memories(module))
    fresh.train(training)
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        host.reset_memories(fresh)
        reset = getattr(fresh, "reset", None)
        if callable(reset) and not (host.is_conv(fresh) or isinstance(fresh, nn.Linear)):
            reset()
    return _called(fresh, x)


def _called(fresh: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        # Not torch.manual_seed, which seeds devices that are not put back.
        torch.default_generator.manual_seed(0)
        if x.is_cuda:
            torch.cuda.manual_seed(0)
        found = fresh(x)
    if not isinstance(found, Tensor):
        raise TypeError(f"it gives a {type(found).__name__}, not one tensor")
    return found


def _order_problem(module: nn.Module, x: Tensor) -> str:
    """What a neuron breaks; and whether it keeps it in the other order of time and samples."""
    given = host.is_batch_first(module)
    problem = _neuron_problem(module, x, given)
    if problem and not _neuron_problem(module, x, not given):
        problem += f"; along dimension {int(not given)} it keeps its promise: register it with batch_first={not given}"
    return problem


def _neuron_problem(module: nn.Module, x: Tensor, batch_first: bool) -> str:
    """What a neuron breaks on its frames: those of the sample, and noise of several sizes that makes it fire."""
    if x.dim() < 2:
        return f"it is handed {list(x.shape)}, and no frames"
    noise = torch.randn(x.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(x)
    for frames in (x, *(noise * size + size / 2 for size in (0.5, 2.0, 8.0))):
        try:
            problem = _neuron_problem_on(module, frames, batch_first)
        except Exception as error:
            return f"it does not run on frames {list(x.shape)} alone ({type(error).__name__}: {error})"
        if problem:
            return problem
    return ""


def _neuron_problem_on(module: nn.Module, x: Tensor, batch_first: bool) -> str:
    time, batch = (1, 0) if batch_first else (0, 1)
    steps, whole = x.shape[time], _run(module, x)
    if whole.shape[:2] != x.shape[:2]:
        return f"it gives {list(whole.shape)} for frames {list(x.shape)}"
    for first in {steps - 1, steps // 2}:
        later = x.clone()
        later.narrow(time, first, steps - first).add_(1)
        if not torch.equal(_run(module, later).narrow(time, 0, first), whole.narrow(time, 0, first)):
            return "what it gives for a step depends on later steps"
    turned = _run(module, x.flip(batch)).flip(batch)
    return "" if torch.allclose(turned, whole, rtol=1e-4, atol=1e-5) else "its samples look at each other"


def _affine_problem(module: nn.Module, x: Tensor) -> str:
    """What an affine module breaks on a batch [M, ...], as it is and with other parameters, as training may find them."""
    generator = torch.Generator().manual_seed(0)
    moved = copy.deepcopy(module).double()
    with torch.no_grad():
        for parameter in moved.parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64, device="cpu").to(parameter.device)
            parameter.add_(noise + 0.5)
    found = _affine_problem_of(copy.deepcopy(module).double(), x)
    if found or not _is_finite(moved, x):
        return found  # parameters may have a domain, which other ones are out of
    return _affine_problem_of(moved, x)


def _is_finite(wide: nn.Module, x: Tensor) -> bool:
    try:
        return bool(torch.isfinite(_run(wide, _batches(x)[0])).all())
    except Exception:
        return False


def _batches(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two batches of a shape: numbers with zeros among them, and spikes."""
    generator = torch.Generator().manual_seed(0)
    a, chance, spikes = (
        torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(x.device) for _ in range(3)
    )
    return torch.where(chance < 0.4, 0.0, 64 * a - 32), (spikes < 0.4).double()


class _WritesError(Exception):
    """A forward wrote into what it was handed."""


def _untouched(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``call`` of ``x``, which it must leave as it is: sums and drives have other readers. Raises _WritesError."""
    given = x.clone()
    found = call(given)
    if not torch.equal(given, x):
        raise _WritesError
    return found


def _affine_problem_of(wide: nn.Module, x: Tensor, training: bool = False) -> str:
    def run(frames: Tensor) -> Tensor:
        return _untouched(lambda given: _run(wide, given, training), frames)

    if _is_affine(wide, x, training):
        return ""
    # Something is wrong: what?
    when = " in training" if training else ""
    try:
        a, b = _batches(x)
        together = run(a)
        mixed = run(0.25 * a + 0.75 * b)
        if not torch.allclose(mixed, 0.25 * together + 0.75 * run(b), rtol=1e-6, atol=1e-6):
            return f"it is not affine{when}"
        alone = torch.cat([run(part) for part in (a[:1], a[1:]) if len(part)])
        turned = run(a.flip(1)).flip(1) if x.dim() > 4 else together
    except _WritesError:
        return f"it writes into what it is handed{when}"
    except Exception as error:
        return f"{RAISES} {list(x.shape)} or on a part of them{when} ({type(error).__name__}: {error})"
    same = alone.shape == together.shape and torch.allclose(alone, together, rtol=1e-6, atol=1e-6)
    if same and torch.allclose(turned, together, rtol=1e-6, atol=1e-6):
        return ""
    return f"its samples or steps look at each other{when}"


def _is_affine(wide: nn.Module, x: Tensor, training: bool) -> bool:
    """All at once: a mixture of two batches, step by step and with its samples in another order. False may be anything."""
    (a, b), inner = _batches(x), x.dim() > 4
    mixed = 0.25 * a + 0.75 * b
    single, rest = mixed[:1], mixed[1:]
    try:
        # A copy of large weights for every call costs more than the call.
        fresh = None if training else copy.deepcopy(wide)
        if fresh is not None:
            fresh.eval()
        left, right, first, others = (
            _untouched(lambda given: _run(wide, given, training) if fresh is None else _called(fresh, given), part)
            for part in (a, b, single, rest.flip(1) if inner else rest)
        )
        expected, others = 0.25 * left + 0.75 * right, others.flip(1) if inner else others
        found = torch.cat([first, others])
    except Exception:
        return False
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
