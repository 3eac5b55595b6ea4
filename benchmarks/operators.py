"""The paper's operators against each other: inference of its MNIST and DVS nets with each of them, interleaved in one run.

    python -m benchmarks.operators

FTC and IMC keep one convolution a frame and add work of their own; TCC skips silent frames, which a batch of events hardly
has; TAC and TAC-TP save k - 1 convolutions of k. The last quarter of the input is silent, as the end of a recording is, for
TCC to have something to skip. Against the best of SpikingJelly's configurations without torch.compile.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.functional import conv_bn_fusion
from torch import Tensor, nn

import sj_tac
from benchmarks import measure, nets
from sj_tac import experimental

SILENT = 0.25  # share of the frames that are


@torch.no_grad()
def main() -> None:
    options = measure.arguments(__doc__ or "", ["paper-mnist", "paper-dvs"])

    def measured(name: str) -> tuple[Tensor, list[dict[str, Any]]]:
        net, x = nets.make(name)
        x[-int(SILENT * len(x)) :] = 0
        last = copy.deepcopy(net).to(memory_format=torch.channels_last)
        found: dict[str, nn.Module] = {"SpikingJelly eager": net, f"SpikingJelly eager{measure.LAST}": last}
        for suffix, source in (("", net), (measure.LAST, last)):
            found[f"SpikingJelly BN folded{suffix}"] = conv_bn_fusion.fuse_conv_bn_eval_modules(source)
        for operator in ("FTC", "IMC", "TCC"):
            found[operator] = experimental.replace(net, operator, x[:, :1])
        for policy in ("preserve", "collapse"):
            for k in (2, 4):
                found[f"sj_tac {policy} k={k}"] = sj_tac.convert(net, policy, k, example_input=x[:, :1])

        def timed(module: nn.Module) -> None:
            functional.reset_net(module)
            module(x)

        runs = {label: lambda module=module: timed(module) for label, module in found.items()}
        return x, measure.rows(
            measure.interleaved(runs, options.rounds, name, options.again), [n for n in found if n.startswith("S")], {}
        )

    measure.report(options, "operators", measured)


if __name__ == "__main__":
    main()
