"""Everything sj_tac raises or warns with. Each error is also the built-in one a caller would expect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class SjTacError(Exception):
    """Base class of all errors of this package."""


class ModelTypeError(SjTacError, TypeError):
    """What was passed as a model is not a ``torch.nn.Module``."""


class ConversionError(SjTacError, ValueError):
    """The model cannot be converted (or restored, or reported on) as it stands; it was left as it was."""


class TraceError(ConversionError):
    """The model's forward takes other arguments than the example has."""


class PolicyError(SjTacError, ValueError):
    """A policy (file, dict or argument) is wrong; the message names the file, the rule and the fix."""


class InputError(SjTacError, ValueError):
    """A tensor does not have the shape, dtype or device that it must have."""


class BackendError(SjTacError, RuntimeError):
    """The kernel backend that was asked for by name cannot run here."""


class HostError(SjTacError, NotImplementedError):
    """The installed SpikingJelly cannot run what was written for another version of it."""


class BatchError(SjTacError, ValueError):
    """A batch of frames (or its labels) cannot be used; the message names the batch, its shape and what would fit."""


class SearchError(SjTacError, RuntimeError):
    """No policy meets what was asked for, or the log of an earlier search does not belong to this one.

    ``evidence``: what was tried, where the search got so far.
    """

    evidence: Any = None


class SearchInterrupted(KeyboardInterrupt):
    """A search was interrupted. ``policy``: the best until then, or None; ``evidence``: what was tried."""

    policy: Any = None
    evidence: Any = None


class MeasurementInterrupted(KeyboardInterrupt):
    """A measurement was interrupted. ``found``: what it would have returned, of what was finished; None where nothing was.

    Of ``match``: the net keeps the best correction until then, and ``found`` says which; else the net is as it was.
    """

    found: Any = None


def interrupted(sentence: str, found: Any = None) -> MeasurementInterrupted:
    """A ``MeasurementInterrupted`` with what was finished."""
    error = MeasurementInterrupted(sentence)
    error.found = found
    return error


class WriteError(SjTacError, OSError):
    """A file could not be written; what stood at its path before still does. ``policy``: what a search had found by then."""

    policy: Any = None


class CheckpointError(SjTacError, ValueError):
    """A file of ``sj_tac.save`` cannot be read or does not fit the model, or a net cannot be written as plain tensors."""


class CaptureError(SjTacError, RuntimeError):
    """A net's call that cannot be recorded as a CUDA graph, or that was recorded of another net than it is now."""


class ExportError(SjTacError, RuntimeError):
    """A net that cannot be written as a graph, or whose graph computes something else; nothing was written."""


class StateNotExportedWarning(UserWarning):
    """An exported net carries voltages of an earlier call; the graph begins every run at rest."""


class BatchNormMovedWarning(UserWarning):
    """Running statistics were updated on aggregated frames, so they no longer fit the layer at another k."""


class NewParametersWarning(UserWarning):
    """Another k made new aggregation weights that are learned (``tac_logits``), which no optimizer knows yet."""


class MatchedStatisticsWarning(UserWarning):
    """A checkpoint's running statistics were corrected by ``match`` for another k or mode than the net has."""


class BackendFallbackWarning(UserWarning):
    """The fastest kernels cannot run on this machine; ``auto`` took the reference ones. Given once for each reason."""


class CaptureWarning(UserWarning):
    """A net, or a graph of it, runs as it is defined: it could not be captured, or an equation failed."""


def refuse_unknown(caller: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError, as Python itself does, where an option by keyword is not one that ``caller`` takes."""
    names = sorted(known)
    for name in given:
        if name not in names:
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}; it knows {', '.join(names)}")
