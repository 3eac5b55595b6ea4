"""Inference: SpikingJelly's configurations, sj_tac at several k, and the bare convolutions, interleaved in one run."""

from __future__ import annotations

from datetime import date

import torch
from rich.console import Console
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.functional import conv_bn_fusion
from torch import Tensor, nn

import sj_tac
from benchmarks import measure, nets

EAGER, FOLDED, COMPILED = "SpikingJelly eager", "SpikingJelly BN folded", "SpikingJelly BN folded, torch.compile"


def configurations(net: nn.Module, x: Tensor, compiled: bool) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {
        "T separate calls (the paper's baseline)": measure.SeparateCalls(net),
        EAGER: net,
        FOLDED: conv_bn_fusion.fuse_conv_bn_eval_modules(net),
    }
    if compiled:
        found[COMPILED] = torch.compile(conv_bn_fusion.fuse_conv_bn_eval_modules(net))
    for policy in ("preserve", "collapse"):
        for k in (1, 2, 4, 8):
            if k > x.shape[0] or (policy == "collapse" and k == 1):
                continue
            if sj_tac.plan(net, policy, k, example_input=x[:, :1]).converted:
                found[f"sj_tac {policy} k={k}"] = sj_tac.convert(net, policy, k, example_input=x[:, :1])
    return found


@torch.no_grad()
def main() -> None:
    options = measure.arguments(__doc__ or "", list(nets.CASES))
    console, results = Console(width=110), {}
    for name in options.net:
        net, x = nets.make(name)

        def timed(module: nn.Module, x: Tensor = x) -> None:
            functional.reset_net(module)
            module(x)

        found = configurations(net, x, options.compile)
        runs = {label: lambda module=module: timed(module) for label, module in found.items()}
        runs |= {f"bare convolutions k={k}": measure.bare_convolutions(net, x, k) for k in (1, 2, 4, 8) if k <= x.shape[0]}
        seconds = measure.interleaved(runs, options.rounds, name)
        results[name] = measure.rows(seconds, [n for n in (EAGER, FOLDED, COMPILED) if n in found], {})
        measure.table(f"{name}, input {list(x.shape)}", results[name], console)
    path = options.out or measure.RESULTS / f"inference-cpu-{date.today().isoformat()}.json"
    console.print(f"Written: {measure.save(path, 'inference', results, options.rounds)}")


if __name__ == "__main__":
    main()
