"""Why a convolution stays as it is: what was observed, as a stable code and in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """What was observed. The codes are stable; the words behind them are not."""

    NEVER_CALLED = "NEVER_CALLED"  # not called as a module
    NO_TENSOR = "NO_TENSOR"  # its output holds no tensor of numbers
    NO_NEURON = "NO_NEURON"  # what it computes reaches no neuron
    ONE_STEP = "ONE_STEP"  # each of its calls serves one step: a loop over time, or T = 1
    FRAMES_MEET = "FRAMES_MEET"  # steps or samples are mixed on the way to its neurons
    TIME_INSIDE = "TIME_INSIDE"  # steps lie along a dimension of its maps
    TIME_IN_CHANNELS = "TIME_IN_CHANNELS"  # steps are its channels
    NO_ORDER = "NO_ORDER"  # rows are neither T * N nor N * T
    OTHER_FRAMES = "OTHER_FRAMES"  # its calls are handed frames of several layouts
    NOT_ALIKE = "NOT_ALIKE"  # it treats frames differently, at random, with a state, or takes T frames alone
    STEPS_UNKNOWN = "STEPS_UNKNOWN"  # T does not follow from a call's shapes
    NOT_RUN = "NOT_RUN"  # it cannot be run by itself, or the net not with it shared


@dataclass(frozen=True)
class Left:
    """A convolution that stays as it is. ``why`` says what was observed."""

    code: Code
    why: str
