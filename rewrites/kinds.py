"""What an operation may be handed instead of the frames of the input."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What an operation may be handed instead of the frames of the input."""

    INPUT = "input"
    OUTPUT = "output"
    SITE = "site"  # a conv or Linear, or a container that begins with one: affine, frame by frame
    NORM = "norm"  # an affine map in eval mode
    NEURON = "neuron"
    MAX_POOL = "max pool"
    SUM = "sum"  # of values, or their concatenation: a weighted sum of frames may pass where it passes all of them
    ADDED = "added in place"  # a sum, but into spikes it is written as frames
    LINEAR = "linear"  # weighted sums of frames may pass
    AFFINE = "affine"  # drives and frames that stand for several steps may pass; sums may not
    WRITTEN = "written"  # in place by a number: affine, but frames are made to write into; collapsed time ends there
    SPREAD = "spread"  # affine, with a tensor that has a place for time or batch; collapsed time ends there
    FOLD = "fold"  # linear: time folded into the batch or unfolded, and nothing else
    RESHAPE = "reshape"  # linear: other dimensions or a part of them; collapsed time ends there
    READOUT = "readout"  # the mean or sum over time: behind it there are no frames
    FIXED = "fixed"  # whatever it does, it needs the frames of the input


SUMS = (Kind.SUM, Kind.ADDED)
SHAPES = (Kind.FOLD, Kind.RESHAPE)
# Through these a drive that is shared by several frames may reach a neuron and still be that neuron's own, weighted drive.
CARRIES_DRIVES = {Kind.SITE, Kind.NORM, *SUMS, Kind.LINEAR, Kind.AFFINE, Kind.WRITTEN, Kind.SPREAD, *SHAPES}
# Frames that stand for several steps may pass through these.
CARRIES_SPANS = CARRIES_DRIVES - {Kind.RESHAPE, Kind.WRITTEN, Kind.SPREAD} | {Kind.MAX_POOL}
# Weighted sums of frames may pass through these, whatever the weights sum to.
CARRIES_SUMS = {Kind.SUM, Kind.LINEAR, *SHAPES}
# What makes equal frames of equal frames.
CARRIES_EQUALS = CARRIES_DRIVES | {Kind.MAX_POOL}
