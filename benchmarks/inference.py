"""Inference: SpikingJelly's configurations, sj_tac at several k, and the bare convolutions, interleaved in one run."""

from __future__ import annotations

import copy
import time
from argparse import Namespace
from typing import Any

import torch
import torch._inductor.config
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.functional import conv_bn_fusion
from torch import Tensor, nn

import sj_tac
from benchmarks import measure, nets

KS = (1, 2, 4, 8, 16)
EAGER, FOLDED, COMPILED = "SpikingJelly eager", "SpikingJelly BN folded", "SpikingJelly BN folded, torch.compile"
# Inductor may choose other memory formats than the net's; sometimes it is faster where it may not. Where it may take weights
# for constants, it lays them out for oneDNN once; who changes them afterwards must compile again.
VARIANTS = {"": {}, ", layouts kept": {"layout_optimization": False}, ", weights frozen": {"freezing": True}}


def configurations(net: nn.Module, x: Tensor, options: Namespace) -> dict[str, nn.Module]:
    """What is compared, by name. Contiguous weights first, then channels_last, which the host gains from as well.

    Under ``options.autocast`` they are called in bfloat16; nets that were converted to it are called outside of it.
    """
    found: dict[str, nn.Module] = {"T separate calls (the paper's baseline)": measure.SeparateCalls(net)}
    layouts = {"": net, measure.LAST: copy.deepcopy(net).to(memory_format=torch.channels_last)}
    for suffix, source in layouts.items():
        found[EAGER + suffix] = source
        found[FOLDED + suffix] = conv_bn_fusion.fuse_conv_bn_eval_modules(source)
        if measure.compiles(options, suffix):
            folded = conv_bn_fusion.fuse_conv_bn_eval_modules
            for variant, chosen in VARIANTS.items():
                found[COMPILED + variant + suffix] = torch.compile(folded(source), options=chosen)
    for policy, suffix in (("preserve", ""), ("preserve", measure.LAST), ("collapse", "")):
        for k in KS:
            if k > x.shape[0] or (policy == "collapse" and k == 1):
                continue
            if sj_tac.plan(net, policy, k, example_input=x[:, :1]).converted:
                found[f"sj_tac {policy} k={k}{suffix}"] = sj_tac.convert(layouts[suffix], policy, k, example_input=x[:, :1])
    for k in KS if options.autocast else ():
        half = sj_tac.convert(layouts[measure.LAST], "preserve", k, dtype=torch.bfloat16)
        found[f"sj_tac bfloat16 preserve k={k}{measure.LAST}"] = measure.OutsideAutocast(half)
    return found


@torch.no_grad()
def main() -> None:
    options = measure.arguments(__doc__ or "", list(nets.CASES))
    if options.compile:
        torch._inductor.config.force_disable_caches = True  # seconds of compiling are those of a first time

    def measured(name: str) -> tuple[Tensor, list[dict[str, Any]]]:
        net, x = nets.make(name)

        def timed(module: nn.Module) -> None:
            functional.reset_net(module)
            with measure.precision(options):
                module(x)

        found = configurations(net, x, options)
        runs = {label: lambda module=module: timed(module) for label, module in found.items()}
        runs |= {name: measure.under(options, bare) for name, bare in measure.floors(net, x, KS).items()}
        ready = {}
        for label in (label for label in found if label.startswith(COMPILED)):
            start = time.perf_counter()
            runs[label]()
            ready[label] = round(time.perf_counter() - start)
        seconds = measure.interleaved(runs, options.rounds, name, options.again)
        more = {label: {"compile s": ready.get(label), "peak MB": measure.peak_megabytes(r)} for label, r in runs.items()}
        return x, measure.rows(seconds, [label for label in found if label.startswith("SpikingJelly")], more)

    measure.report(options, "inference", measured)


if __name__ == "__main__":
    main()
