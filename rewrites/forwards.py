"""The outermost module's forward, as PyTorch runs it: torch.fx reads the one of its class, by the names in its code."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from sj_tac.errors import TraceError
from sj_tac.rewrites.arguments import PLAIN, signature_of

_STARS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


@dataclass(frozen=True)
class RootForward:
    """A call of a module's own forward.

    Attributes:
        inputs: names of what is data, in order; what is not is bound. call: of the module and the inputs, in order.
        given: what the sample has for each; empty without a sample.
        entry: the name of a function of the module's class, any one where its forward is none: torch.fx asks for it.
        home: the Python module of the code that runs, where it has one.
    """

    inputs: tuple[str, ...]
    call: Callable[..., Any]
    given: dict[str, Any]
    entry: str
    home: ModuleType | None


class _Argument(NamedTuple):
    """``value``: of the sample, in a tuple; an empty one without a sample."""

    name: str
    value: tuple[Any, ...]
    by_keyword: bool = False

    @property
    def is_data(self) -> bool:
        return not self.value or type(self.value[0]) not in PLAIN


def root_forward(model: nn.Module, given: dict[str, Any]) -> RootForward | None:
    """How to call the forward of ``model`` where it is another one than torch.fx would read; else None.

    Args:
        given: the sample's arguments by the names of forward's parameters.

    Raises:
        TraceError: nobody can say what it takes, or it runs another model.
    """
    if _is_read_rightly(model):
        return None
    if _is_of_another(model):
        raise TraceError(
            f"the forward of this {type(model).__name__} runs another one's modules: it is a function that holds its module "
            "or a method of it (a decorator's, torch.compile's), which a copy shares with its source; decorate the method "
            "in the class, make such a forward of the converted model, or pass convert inplace=True"
        )
    return _called(model, given)


def guesses(model: nn.Module) -> list[RootForward | None]:
    """Without a sample: the ways to call the forward of ``model``, as ``root_forward``; the next where one does not do."""
    first = root_forward(model, {})
    if first is not None or not inspect.getattr_static(type(model), "forward").__code__.co_flags & _STARS:
        return [first]
    # torch.fx makes a symbol of all that stars take, which a forward cannot hand on.
    return [first, _called(model, {})]


def _called(model: nn.Module, given: dict[str, Any]) -> RootForward:
    arguments = list(_arguments(signature_of(model), given))
    inputs = tuple(a.name for a in arguments if a.is_data)

    # No annotations: torch.fx would write them into its graph.
    def call(module, *values):  # type: ignore[no-untyped-def]
        held = dict(zip(inputs, values, strict=True))
        found = [(a, held[a.name] if a.is_data else a.value[0]) for a in arguments]
        named = {a.name: value for a, value in found if a.by_keyword}
        return _eager(module.forward)(*(value for a, value in found if not a.by_keyword), **named)

    entry = "forward" if isinstance(getattr(type(model), "forward", None), FunctionType) else nn.Module._get_name.__name__
    home = sys.modules.get(getattr(inspect.unwrap(model.forward), "__module__", None) or "")
    return RootForward(inputs, call, {a.name: a.value[0] for a in arguments if a.value}, entry, home)


def _is_read_rightly(model: nn.Module) -> bool:
    """True where the class's forward is what runs, and its code has its parameters: no decorator's ``*args``."""
    own = inspect.getattr_static(type(model), "forward", None)
    if "forward" in vars(model) or not isinstance(own, FunctionType) or not own.__code__.co_argcount:
        return False
    return not (hasattr(own, "__wrapped__") or hasattr(own, "__signature__"))


def _arguments(signature: inspect.Signature, given: dict[str, Any]) -> Iterator[_Argument]:
    """What forward is called with: the sample, or else everything that has no default."""
    parameters = signature.parameters
    some = bool(given)
    for name, p in parameters.items():
        if p.kind is p.VAR_POSITIONAL:
            values: list[tuple[Any, ...]] = [(value,) for value in given.get(name, ())]
            # Without a sample nobody knows how many: a forward that names none most likely takes one.
            for i, value in enumerate(values if some else [()]):
                yield _Argument(_free(f"{name}_{i}", parameters), value)
        elif p.kind is not p.VAR_KEYWORD and name in given:
            yield _Argument(name, (given[name],))
        elif p.kind is not p.VAR_KEYWORD and p.default is p.empty:
            some = True
            yield _Argument(name, (), p.kind is p.KEYWORD_ONLY)


def _free(name: str, taken: Any) -> str:
    return _free(f"{name}_", taken) if name in taken else name


def _eager(forward: Any) -> Any:
    """What torch.compile made ``forward`` of, as it is called; itself where torch.compile did not make it."""
    found = getattr(forward, "_torchdynamo_orig_callable", None)
    if found is None:
        return forward
    return MethodType(found, forward.__self__) if isinstance(forward, MethodType) else found


def _is_of_another(model: nn.Module) -> bool:
    """True where forward holds modules of which none is in ``model``, but the likes of them are."""
    modules = set(model.modules())
    owners = list(_owners(model.forward))
    return modules.isdisjoint(owners) and not {type(m) for m in modules}.isdisjoint(type(m) for m in owners)


def _owners(function: Any, depth: int = 6) -> Iterator[nn.Module]:
    """The modules that ``function`` holds, or whose methods it calls, as far as its closures tell."""
    inner: list[Any] = []
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, MethodType):
        inner = [function.__self__, function.__func__]
    elif isinstance(function, functools.partial):
        inner = [function.func]
    elif isinstance(function, FunctionType):
        inner = [getattr(function, "__wrapped__", None)]
        for cell in function.__closure__ or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:  # an empty one
                continue
    for item in inner if depth else ():
        yield from _owners(item, depth - 1)


def concrete(model: nn.Module, given: dict[str, Any], sampled: bool) -> dict[str, Any]:
    """Arguments that are no part of the data flow: defaults that stay, and for symbols whatever is given and no tensor."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = {}
    for name, p in signature_of(model).parameters.items():
        if name not in given:
            if p.default is not p.empty:
                found[name] = p.default
        elif not sampled and (type(given[name]) in PLAIN or (p.kind in stars and not given[name])):
            found[stars.get(p.kind, "") + name] = given[name]
    return found
