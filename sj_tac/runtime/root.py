"""The hooks of a converted net: what they open and close is a call, and nothing of it stays.

Instances, not functions, so that they pickle and deep-copy with the net.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import ExportError, PlanNotKeptWarning
from sj_tac.host import dispatch
from sj_tac.runtime.borders import Axes, Borders, Span
from sj_tac.runtime.convs import DriveModule
from sj_tac.runtime.counting import warn_of_counts
from sj_tac.runtime.neurons import UnitModule
from sj_tac.runtime.table import as_plain
from sj_tac.runtime.values import Frames, Shared, ordinary


class Enter:
    """Forward pre-hook of the converted net: looks whether anything of the user's stands between its modules.

    Args:
        readers: for the name of a neuron, that of the conv which its sums are prepared for.
        direct: likewise, that of the one conv which reads them in another dtype.
        axes: where T and N stand among the arguments, for a net that folds time into the batch; else None.
    """

    of_sj_tac = True

    def __init__(
        self, borders: Borders, readers: Mapping[str, str], direct: Mapping[str, str], axes: Axes | None = None
    ) -> None:
        self.borders, self.readers, self.direct, self.axes = borders, dict(readers), dict(direct), axes
        self.linked: weakref.ref[nn.Module] | None = None
        self.convs: list[weakref.ref[nn.Module]] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"linked": None, "convs": []}

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not dispatch.is_compiling() and dispatch.tracing() is not None:
            raise ExportError(
                "torch.jit.trace, and the ONNX exporter that is built on it, cannot record a converted net "
                f"({type(module).__name__}): T and the voltages of this call would stay in the recording; use "
                "sj_tac.export_onnx, or torch.export.export"
            )
        if self.axes is not None:
            self.borders.begin()  # first: ``Leave`` is called where this raises, too
            self.borders.call = self.axes.of(args, kwargs)
        if self.linked is None or self.linked() is not module:
            link(module, self.readers, self.direct)
            self.linked = weakref.ref(module)
            self.convs = [weakref.ref(m) for m in module.modules() if isinstance(m, DriveModule)]
        if not dispatch.is_compiling():
            warn_of_counts(module, self.convs)
            self.borders.root = self.linked
            self.borders.enter(module)


class Leave:
    """Forward hook of the converted net: ordinary frames leave it, or one for each group where that was asked for.

    It is called after an error, too, with None.

    Args:
        emits: what a frame of the output stands for by the trace, where there should be one for each group; else None.
    """

    of_sj_tac = True
    emits: Span | None = None

    def __init__(self, borders: Borders, emits: Span | None) -> None:
        self.borders, self.emits = borders, emits

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.borders.end()
        if not dispatch.is_compiling():
            self.borders.entered = bool(self.borders.outer)
        if self.emits is not None and isinstance(output, Shared):
            return compact_frames(output)
        if self.emits is not None and self.borders.are_plain and isinstance(output, Tensor):
            return output[:: self.emits.factor]
        return as_plain(output, self._look_at)

    def _look_at(self, x: Frames) -> None:
        """Warn, once, of frames that are returned beside the way that the net's own layers took."""
        if x._taken and x.requires_grad and not self.borders.told and not dispatch.is_compiling():
            self.borders.told = True
            warnings.warn(
                f"the net returns frames {list(x.dims)} whose sums its own next layer read. Their losses train the net; but "
                "the gradient of its output with respect to them is not to be had: retain_grad gives none, and a tensor's "
                "hook sees what others read. Ask in a forward hook, or convert with the arguments that return them",
                PlanNotKeptWarning,
                stacklevel=2,
            )


class Ordinary:
    """Forward pre-hook of a module that gets ordinary frames: a registered neuron, or where a collapsed region ended.

    Args:
        borders: given for a neuron whose drives were folded, which looks at T.
    """

    of_sj_tac = True

    def __init__(self, name: str, borders: Borders | None = None) -> None:
        self.name, self.borders = name, borders

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if self.borders is not None and args and isinstance(args[0], Tensor):
            self.borders.check(args[0], self.name, host.is_batch_first(module))
        return tuple(ordinary(x, type(module).__name__) for x in args)


def compact_frames(x: Shared) -> Tensor:
    """One frame for each group behind a collapse; ordinary frames of any other value."""
    groups = x.expression.groups
    if x.is_bare and x.intact and x.folded is None:
        if x.means == groups or groups.frames is not groups.steps:
            return x.expression.mapped()
        joined = None if x.means is None else x.expression.joined(x.means)
        if joined is not None:
            return joined.mapped()
    return x.frames("the model's output")


def link(model: nn.Module, readers: Mapping[str, str], direct: Mapping[str, str]) -> None:
    """Tell every unit which conv it prepares sums for, by weak references: a unit does not drag its readers along."""
    modules = dict(model.named_modules())
    for names, attribute in ((readers, "reader"), (direct, "direct")):
        for name, reader in names.items():
            unit, conv = modules.get(name), modules.get(reader)
            if isinstance(unit, UnitModule):
                setattr(unit._tac, attribute, None if conv is None else weakref.ref(conv))
