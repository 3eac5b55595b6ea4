"""Training step (forward, backward, no optimiser), BatchNorm frozen: SpikingJelly, sj_tac and bare convolutions."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from spikingjelly.activation_based import functional
from torch import Tensor, nn

import sj_tac
from benchmarks import measure, nets

EAGER, COMPILED = "SpikingJelly eager", "SpikingJelly torch.compile"


def step(module: nn.Module, x: Tensor, options: argparse.Namespace) -> None:
    functional.reset_net(module)
    module.zero_grad()
    with measure.precision(options):
        out = module(x)
    out.sum().backward()


def saved_megabytes(module: nn.Module, x: Tensor, options: argparse.Namespace) -> float:
    """What autograd keeps for the backward, parameters and buffers aside."""
    own = {t.data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[tuple[int, Any], int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in own:
            kept[t.data_ptr(), t.shape] = t.numel() * t.element_size()
        return t

    functional.reset_net(module)
    with measure.precision(options), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x)
    functional.reset_net(module)
    return sum(kept.values()) / 1e6


def main() -> None:
    options = measure.arguments(__doc__ or "", list(nets.CASES))

    def measured(name: str) -> tuple[Tensor, list[dict[str, Any]]]:
        net, x = nets.make(name)
        # Eval mode: BatchNorm frozen and dropout off, for everybody alike.
        found: dict[str, nn.Module] = {}
        for suffix in ("", measure.LAST):
            source = copy.deepcopy(net).to(memory_format=torch.channels_last if suffix else torch.contiguous_format)
            found[EAGER + suffix] = source
            if measure.compiles(options, suffix):
                found[COMPILED + suffix] = torch.compile(copy.deepcopy(source))
            for k in (1, 2, 4):
                if k <= x.shape[0]:
                    found[f"sj_tac preserve k={k}{suffix}"] = sj_tac.convert(source, "preserve", k, example_input=x[:, :1])
        runs: dict[str, Any] = {label: lambda m=m, x=x: step(m, x, options) for label, m in found.items()}
        floors = {label: measure.under(options, bare) for label, bare in measure.floors(net, x, (1, 2, 4)).items()}
        runs |= {label: lambda bare=bare: sum(y.sum() for y in bare()).backward() for label, bare in floors.items()}
        seconds = measure.interleaved(runs, options.rounds, name, options.again)
        more = {}
        for label, run in runs.items():
            eager = label in found and not label.startswith(COMPILED)
            saved = round(saved_megabytes(found[label], x, options)) if eager else None
            more[label] = {"saved MB": saved, "peak MB": measure.peak_megabytes(run)}
        return x, measure.rows(seconds, [label for label in found if label.startswith("SpikingJelly")], more)

    measure.report(options, "training", measured)


if __name__ == "__main__":
    main()
