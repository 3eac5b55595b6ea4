"""The source net and the converted one, run on the example: does the converted one do what it should?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import ConversionError
from sj_tac.rewrites.arguments import copied, described
from sj_tac.rewrites.gate import as_defined

# Of the largest value: what rounding moves where convolutions of another batch size add up in another order.
NEAR = 1e-4
ASKS = (
    "a forward that asks for the class of a module (type(m) is layer.Conv2d) goes another way, as a "
    "converted layer has another class: ask isinstance(m, layer.Conv2d) there"
)


def tensors(output: Any) -> list[Tensor]:
    """Return the tensors of an output, however it is nested."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(host.opened(output)) if isinstance(leaf, Tensor)]


def verify(source: nn.Module, target: nn.Module, arguments: tuple[Any, ...], *, exact: bool, groups: int) -> None:
    """Run both from rest, as they are defined, and compare what they return; both are left as they were.

    Args:
        exact: the converted net computes what its source does. groups: so many frames of the source's output are
            one of its own.

    Raises:
        ConversionError: it fails, or returns other shapes, or values that are not finite where the source's are, or other
            values where ``exact``. It names the first module that differs.
    """
    # A converted net's neurons step in float32 where its drives are half: spikes may differ.
    exact = exact and not any(p.dtype in (torch.float16, torch.bfloat16) for p in target.parameters())
    own = None if source is target else _run(source, arguments)
    place: list[str] = []
    try:
        made = _run(target, arguments, before=place.append)
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConversionError(
            f"verification failed: the converted net does not run on example_input of shape {described(arguments)} in "
            f"module {place[-1] if place else ''!r} ({said}); {ASKS}"
        ) from error
    if own is None:
        return
    for i, (a, b) in enumerate(zip(own, made, strict=True)):
        wanted = [-(-a.shape[0] // groups), *a.shape[1:]] if a.dim() else []
        if list(b.shape) != wanted:
            problem = f"output {i} is {list(b.shape)}, and {wanted} was expected"
        elif a.is_floating_point() and bool(a.isfinite().all()) and not bool(b.isfinite().all()):
            problem = f"output {i} is not finite, the source's is"
        elif exact and not _is_near(a, b):
            problem = f"output {i} differs from the source's at k=1"
        else:
            continue
        first = _first_that_differs(source, target, arguments, exact)
        raise ConversionError(f"verification failed: {problem}; {first}{ASKS}")


def _is_near(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    size = float(a.double().nan_to_num().abs().max())
    return torch.allclose(a.double(), b.double(), rtol=0, atol=NEAR * max(size, 1e-12), equal_nan=True)


def _first_that_differs(source: nn.Module, target: nn.Module, arguments: tuple[Any, ...], exact: bool) -> str:
    """Return in words which module is the first to put out something else; empty where none can be named."""
    seen: list[tuple[str, list[Tensor]]] = []
    _run(source, arguments, behind=lambda name, out: seen.append((name, [x.clone() for x in tensors(out)])))
    expected, found = iter(seen), list[str]()

    def look(name: str, out: Any) -> None:
        own_name, own = next(expected, ("", []))
        if found or own_name != name or not name:
            return
        for a, b in zip(own, tensors(out), strict=False):
            if exact and a.shape != b.shape:
                found.append(f"layer {name!r} puts out {list(b.shape)}, the source {list(a.shape)}; ")
            elif a.is_floating_point() and bool(a.isfinite().all()) and not bool(b.isfinite().all()):
                found.append(f"layer {name!r} puts out numbers that are not finite; ")
            elif exact and not _is_near(a, b):
                found.append(f"layer {name!r} is the first whose output differs; ")

    _run(target, arguments, behind=look)
    return found[0] if found else ""


def _run(
    net: nn.Module,
    arguments: tuple[Any, ...],
    before: Callable[[str], None] | None = None,
    behind: Callable[[str, Any], None] | None = None,
) -> list[Tensor]:
    """Return the tensors that a net returns from rest, as it is defined; it is left as it was.

    Args:
        before, behind: called for each call of a module in it.
    """
    device = next((p.device.type for p in net.parameters()), "cpu")
    with host.looked_at(net), as_defined(), torch.random.fork_rng(devices=[]), torch.autocast(device, enabled=False):
        for name, module in net.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                continue
            if before is not None:
                module.register_forward_pre_hook(lambda m, a, name=name: before(name))
            if behind is not None:
                module.register_forward_hook(lambda m, a, out, name=name: behind(name, out))
        torch.manual_seed(0)
        host.reset_memories(net)
        with torch.no_grad():
            return [x.detach() for x in tensors(net(*copied(arguments)))]
