"""The hooks of a net with collapsed time: they open and close its call, and give frames back where a region ends.

Instances, not functions, so that they pickle and deep-copy with the net.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sj_tac.kernels import reference
from sj_tac.runtime.places import Place
from sj_tac.runtime.spans import Timeline


class Expand:
    """Forward hook of the last module of a collapsed region: every frame as often as it stands for a source frame."""

    of_sj_tac = True

    def __init__(self, place: Place) -> None:
        self.place = place

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        timeline = self.place.timeline
        if not timeline.grouped or timeline.steps is None:
            return output
        return reference.repeat(output, self.place.span.lengths(timeline.steps))


class Enter:
    """Forward pre-hook of the converted net: from here to ``Leave``, frames may travel in groups."""

    of_sj_tac = True

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.timeline.start()


class Leave(Enter):
    """Forward hook of the converted net, run also where its call failed."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self.timeline.stop()
