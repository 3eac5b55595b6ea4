"""What is said of a model that cannot be traced although there is a sample."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path
from typing import Any

from torch import nn

from sj_tac import host
from sj_tac.rewrites.answers import NOT_ASKING
from sj_tac.rewrites.arguments import copied, described

_AS_MODULE = "wrap what it does there in a module of its own, which then becomes one node"


def why_not(model: nn.Module, arguments: tuple[Any, ...], error: BaseException) -> str:
    """What to do about ``error``, of a trace with a sample: it depends on whether the model runs on it at all."""
    said = f"tracing failed with example_input of shape {described(arguments)}: {first_line(error)}"
    failed = _fails(model, arguments)
    if failed is None:
        return f"{said}; the model runs on it, but torch.fx cannot follow {_place(error)}: {_AS_MODULE}"
    also = "" if first_line(failed) == first_line(error) else f" (called, the model raises {first_line(failed)})"
    return (
        f"{said}; check that model.eval()(*example_input) runs under torch.no_grad(), and that its modules are called with "
        f"tensors{also}"
    )


def _fails(model: nn.Module, arguments: tuple[Any, ...]) -> Exception | None:
    """What a plain call of the model ends in."""
    with host.looked_at(model):
        host.reset_memories(model)  # voltages may be those of another batch
        try:
            model(*copied(arguments))
        except Exception as error:
            return error
    return None


def _place(error: BaseException) -> str:
    """The last line of the model's own Python that ran."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in NOT_ASKING:
            code = frame.f_code
            text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
            return f"{text or code.co_name!r} ({Path(code.co_filename).name}, line {line})"
    return "its forward"


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
