"""A training step of the paper's image net in each of its table's ways, side by side: python -m benchmarks.paper_steps

What the accuracies of ``examples/rate_coded.py`` cost is not read off their logs, whose runs had other work beside them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from spikingjelly.activation_based import functional
from torch import Tensor, nn

import sj_tac
from benchmarks import measure

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
KS = (4, 8, 16)
SEPARATE, EAGER, FUSED = "T separate calls (the paper's baseline)", "SpikingJelly eager", "sj_tac k=1"


def ways(net: nn.Module, x: Tensor) -> dict[str, nn.Module]:
    """The net as SpikingJelly runs it, at k = 1, and as every row of the paper's table."""
    import study

    found: dict[str, nn.Module] = {
        SEPARATE: measure.SeparateCalls(net),
        EAGER: net,
        FUSED: sj_tac.convert(net, "preserve", 1),
    }
    for k in KS:
        for name, policy in study.policies(k, "features.0").items():
            if name in study.PAPER:
                found[f"{name} k={k}"] = sj_tac.convert(net, policy, example_input=x[:, :1])
    return found


def step(net: nn.Module, x: Tensor, labels: Tensor) -> None:
    import training

    functional.reset_net(net)
    net.zero_grad()
    training.spike_count(net(x), labels, x).backward()


def main() -> None:
    made = measure.parser(__doc__ or "")
    made.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default 1)")
    options = measure.parsed(made)
    options.net, options.autocast = ["paper-mnist, printed"], False
    torch.set_num_threads(options.threads)
    sys.path.insert(0, str(EXAMPLES))
    import nets

    def measured(name: str) -> tuple[Tensor, list[dict[str, Any]]]:
        torch.manual_seed(0)
        net = nets.PaperImageNet(printed=True).to(memory_format=torch.channels_last)
        x = (torch.rand(25, 32, 1, 28, 28) < 0.2).float()
        labels = torch.randint(0, 10, (32,))
        found = ways(net.eval(), x)
        runs = {label: partial(step, module.train(), x, labels) for label, module in found.items()}
        seconds = measure.interleaved(runs, options.rounds, name)
        return x, measure.rows(seconds, [EAGER], {})

    measure.report(options, "paper-steps", measured)


if __name__ == "__main__":
    main()
