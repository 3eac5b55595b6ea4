"""SpikingJelly's configurations, and times taken in turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

try:
    from spikingjelly.activation_based.functional import conv_bn_fusion
except ImportError:  # SpikingJelly before 2.0 has none
    conv_bn_fusion = None

SOURCE = "SpikingJelly"
FUSED = "SpikingJelly, BN folded"


def host_configurations(net: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """What a converted net is compared with: the source in eval mode, and with SpikingJelly's own conv-BN folding."""
    found = {SOURCE: net}
    if conv_bn_fusion is not None:
        found[FUSED] = conv_bn_fusion.fuse_conv_bn_eval_modules(net)
    return found


def in_turns(runs: dict[str, Callable[[], object]], rounds: int, tick: Callable[[], None] = lambda: None) -> dict[str, list]:
    """Seconds of every run in every round. Whatever else the machine does at a moment, it does to every run."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
        tick()
    return seconds
