"""Whether a converted net goes the way of its source: with nothing shared it must put out what that does."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sj_tac.errors import ConversionError
from sj_tac.host import dispatch
from sj_tac.rewrites.verify import ASKS, Run, compare, far, run, tensors
from sj_tac.runtime.borders import PLAIN, definition
from sj_tac.runtime.drives import Drive
from sj_tac.runtime.layers import Pool
from sj_tac.runtime.neurons import Unit

# With these every module does what its source's does, one frame after the other.
_AS_SOURCE: dict[type, dict[str, Any]] = {
    Drive: {"mode": "preserve", "k": 1, "span": PLAIN, "dtype": None},
    Unit: {"span": PLAIN, "merge": 1, "pools_later": False},
    Pool: {"span": PLAIN, "means": False},
}


@contextlib.contextmanager
def as_source(model: nn.Module) -> Iterator[None]:
    """Run a converted model as its source: its modules keep their classes, and share nothing."""
    roles = [role for m in model.modules() if (role := m.__dict__.get("_tac")) is not None]
    kept = [(role, dict(vars(role))) for role in roles]
    try:
        for role in roles:
            fresh: dict[str, Any] = {"made": Counter(), "_cache": {}} if isinstance(role, Drive) else {}
            vars(role).update(fresh | _AS_SOURCE.get(type(role), {}))
        with definition(model, alike=False, traced=True):
            yield
    finally:
        for role, before in kept:
            vars(role).update(before)


def check_way(source: Run, model: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Raise ConversionError where a forward goes another way, as one does that asks for the class of a module."""
    half = (torch.bfloat16, torch.float16)
    if any(dispatch.autocasts(x.device.type) or x.dtype in half for x in tensors(arguments)):
        return  # neurons step in float32 there, and may make their spikes otherwise
    with as_source(model):
        found = run(model, arguments, {}, watched=False)
    if found.failure:
        return  # so will the call that is verified
    if compare(source.output, found.output, False) or far(source.output, found.output, ""):
        raise ConversionError(
            "verification failed: with nothing shared the converted net puts out something else than its source; "
            f"{ASKS}; the model was left as it was"
        )
