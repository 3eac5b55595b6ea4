"""Where T and N stand among the arguments of a model's forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.rewrites.arguments import copied, signature_of
from sj_tac.rewrites.failures import first_line
from sj_tac.rewrites.layouts import Sample, handed
from sj_tac.runtime.borders import Axes

# An argument and a dimension of it.
Place = tuple[int, int]


def find_axes(model: nn.Module, arguments: tuple[Any, ...], sample: Sample | None) -> Axes | None:
    """By trial: the dimension of an argument which, made longer by one, gives the neurons one step, or one sample, more.

    Asked is the first neuron that sees T and N: one at the front may see single steps, or frames that are still folded.

    Args:
        sample: T and N that the neurons see for ``arguments``; None where no neuron was seen.
    """
    if sample is None:
        return None
    names = tuple(signature_of(model).parameters)
    ranks = tuple(x.dim() if isinstance(x, Tensor) else -1 for x in arguments)
    found: list[Place | None] = [None, None]
    asked = _asked(model, arguments, sample)
    for which, size in enumerate((sample.steps, sample.batch)) if asked is not None else ():
        more = (sample.steps + (which == 0), sample.batch + (which == 1))
        for places in _tries(arguments, size):
            seen = _longer(model, arguments, places, asked).seen
            if seen is not None and seen.shape == more:
                found[which] = places[0]
                break
    return Axes(names, ranks, found[0], found[1])


def why_unknown(model: nn.Module, arguments: tuple[Any, ...], sample: Sample | None) -> str:
    """What kept the trials of ``find_axes`` from an answer; nothing where there was no dimension to try."""
    asked = None if sample is None else _asked(model, arguments, sample)
    if sample is None or asked is None:
        return ""
    tried = [places for size in (sample.steps, sample.batch) for places in _tries(arguments, size)]
    if not tried:
        return ""
    names = tuple(signature_of(model).parameters)
    where = ", ".join(dict.fromkeys(f"{_named(names, i)!r} in dimension {d}" for places in tried for i, d in places))
    wanted = f"T={sample.steps} or N={sample.batch} of the neurons"
    looks = [_longer(model, arguments, places, asked) for places in tried]
    problem = next((look.problem for look in looks if look.problem), "")
    if problem:
        return f"it folds time, and whether {wanted} is the size of {where} could not be tried: one longer there, {problem}"
    seen = next((list(look.seen.shape) for look in looks if look.seen is not None), [])
    return f"it folds time, and {wanted} is the size of {where}, but one longer there, {asked.name!r} is handed {seen}"


def time_axis(model: nn.Module, x: Tensor) -> int | None:
    """The dimension of a model's only input that is time: made longer by one, it gives the neurons one step more.

    None where neither of the first two is, as for images that the model repeats, or where no neuron runs.
    """
    before = _look(model, (x,), lambda call: True).seen
    for dim in range(min(2, x.dim())) if before is not None else ():
        after = _longer(model, (x,), ((0, dim),), before).seen
        if before is not None and after is not None and after.shape[0] == before.shape[0] + 1:
            return dim
    return None


class _Call(NamedTuple):
    """A neuron's call, the ``number``-th, and T and N that it saw."""

    name: str
    number: int
    shape: tuple[int, ...]


class _Look(NamedTuple):
    """``problem``: why the call that was asked for was not reached."""

    seen: _Call | None
    problem: str = ""


def _named(names: tuple[str, ...], argument: int) -> str:
    return names[argument] if argument < len(names) else f"argument {argument}"


def _asked(model: nn.Module, arguments: tuple[Any, ...], sample: Sample) -> _Call | None:
    return _look(model, arguments, lambda call: call.shape == (sample.steps, sample.batch)).seen


def _tries(arguments: tuple[Any, ...], size: int) -> Iterator[tuple[Place, ...]]:
    """Places to make longer: one by one, the front of arguments first; then together, for arguments that forward joins."""
    places = [(i, d) for i, x in enumerate(arguments) if isinstance(x, Tensor) for d in range(x.dim()) if x.shape[d] == size]
    places.sort(key=lambda place: place[1] > 1)
    yield from ((place,) for place in places)
    for dim in sorted({d for _, d in places}):
        together = tuple(place for place in places if place[1] == dim)
        if len(together) > 1:
            yield together


def _longer(model: nn.Module, arguments: tuple[Any, ...], places: tuple[Place, ...], asked: _Call | None) -> _Look:
    """What the neuron that is asked sees in a call with arguments that are longer by one."""
    longer = list(arguments)
    for argument, dim in places:
        x = arguments[argument]
        try:
            # A copy: of a sparse tensor there is no view.
            longer[argument] = torch.cat([x, torch.narrow_copy(x, dim, 0, 1)], dim)
        except RuntimeError as error:  # compressed rows and the like are neither cut nor joined
            return _Look(None, f"there is no such tensor ({first_line(error)})")
    return _look(model, tuple(longer), lambda call: asked is not None and call[:2] == asked[:2])


class _Enough(Exception):
    pass


def _look(model: nn.Module, arguments: tuple[Any, ...], is_asked: Callable[[_Call], bool]) -> _Look:
    """The first call of a neuron that is the one which is asked for; the model runs no further."""
    seen: list[_Call] = []
    calls: Counter[str] = Counter()

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = handed(module, args, kwargs)
            call = _Call(name, calls[name], () if given is None else given[1])
            calls[name] += 1
            if given is not None and is_asked(call):
                seen.append(call)
                raise _Enough

        return hook

    problem = "no neuron is where it was"
    with host.looked_at(model):
        host.reset_memories(model)
        for name, module in model.named_modules():
            if host.steps_by_itself(module):
                module.register_forward_pre_hook(look(name), with_kwargs=True)
        try:
            model(*copied(arguments))
        except Exception as error:  # what fails has its reasons, and no steps
            problem = f"forward fails ({first_line(error)})"
    return _Look(seen[0]) if seen else _Look(None, problem)
