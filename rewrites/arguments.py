"""The arguments of a model's forward: as a sample gives them, and as errors show them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import TraceError

PLAIN = (bool, int, float, str, type(None))


def as_arguments(example_input: Any) -> tuple[Any, ...]:
    """``example_input`` as the positional arguments of forward."""
    return tuple(example_input) if isinstance(example_input, (tuple, list)) else (example_input,)


def copied(arguments: Any) -> Any:
    """The arguments with copies of their tensors: a forward that writes into its input does not write into the caller's."""

    def copy(value: Any) -> Any:
        if host.is_record(value):
            return host.record_like(value, copied(vars(value)))
        return value.detach().clone() if isinstance(value, Tensor) else value

    return torch.utils._pytree.tree_map(copy, arguments)


def signature_of(model: nn.Module) -> inspect.Signature:
    """What the forward of ``model`` takes. Raises TraceError.

    A decorator's own parameters where it names them all, even if it says that it is what it wraps.
    """
    try:
        found = inspect.signature(model.forward, follow_wrapped=False)
        stars = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found.parameters.values())
        return inspect.signature(model.forward) if stars else found
    except (TypeError, ValueError) as error:
        raise TraceError(f"Python cannot tell what the forward of {type(model).__name__} takes: {error}") from error


def check_arguments(model: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Raise TraceError where forward takes other arguments."""
    signature = signature_of(model)
    try:
        given = signature.bind(*arguments).arguments
    except TypeError as error:
        raise TraceError(
            f"the forward of {type(model).__name__} does not take example_input of shape {described(arguments)} ({error}); "
            "example_input is one input or a tuple of forward's positional arguments: give the others a default, or "
            "convert a module that calls this one with all of them"
        ) from error
    arrays = [name for name, value in given.items() if type(value).__module__ == "numpy"]
    if arrays:
        raise TraceError(
            f"example_input has a NumPy array for {arrays[0]!r}, whose frames cannot be followed: give torch.from_numpy of "
            "it, and have the forward take tensors (torch.as_tensor takes both)"
        )


def described(arguments: tuple[Any, ...]) -> str:
    """Arguments as errors show them: shapes of tensors, classes of what is no number."""

    def short(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return list(leaf.shape)
        return leaf if type(leaf) in PLAIN else type(leaf).__name__

    return str(torch.utils._pytree.tree_map(short, list(arguments)))[:300]
