"""The old ``spikingjelly.clock_driven.encoding``."""

from __future__ import annotations

import torch
from spikingjelly.activation_based import encoding as _host
from spikingjelly.activation_based.encoding import (
    LatencyEncoder as LatencyEncoder,
    PoissonEncoder as PoissonEncoder,
    StatefulEncoder as StatefulEncoder,
    StatelessEncoder as StatelessEncoder,
    WeightedPhaseEncoder as WeightedPhaseEncoder,
)

from sj_tac.compat.clock_driven import base as base, lost


class PeriodicEncoder(_host.PeriodicEncoder):
    """Gives out the steps of ``spike`` [T, ...], over and over; the host's waits for them until its first call."""

    def __init__(self, spike: torch.Tensor) -> None:
        super().__init__(spike)
        self.spike = spike


__getattr__ = lost("spikingjelly.clock_driven.encoding", {})
