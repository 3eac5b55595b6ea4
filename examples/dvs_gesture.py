"""DVS128 Gesture, or a generated set of its kind: what collapsing and preserving time do where time is the signal.

    python examples/dvs_gesture.py --synthetic --quick                     # generated gestures; minutes on a CPU
    python examples/dvs_gesture.py --data FOLDER --recipe spikingjelly     # through tonic, or --library spikingjelly
    torchrun --nproc-per-node 4 examples/dvs_gesture.py --data FOLDER --amp --rows baseline preserve

Baseline, TAC and TAC-TP as the paper writes them, and this library's normalised preserve and count collapse: trained from
scratch, converted from the trained baseline, and converted and fine-tuned; with --policy FILE, a policy of your own, too. A
kill costs at most --save-every seconds: the same command goes on. The classes of the generated set differ only in the order
of motion (gestures.py). tonic and SpikingJelly split the real data differently; results say which split they are from.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import command
import dvs128
import gestures
import nets
import study
from datasets import Frames
from spikingjelly.activation_based import functional, neuron, surrogate
from spikingjelly.activation_based.model.parametric_lif_net import DVSGestureNet
from study import Protocol, Task
from torch import nn
from training import Recipe, Workers

KS = (2, 4, 8)
# The paper gives the net (5 x 128 channels on 64 x 64, T = 16) and k = 2; SpikingJelly's tutorial its own net and recipe.
RECIPES = {
    "paper": Protocol("the paper's net", Recipe(64, 16, loss="count"), 2, 1e-4, (2,), KS),
    "spikingjelly": Protocol("SpikingJelly's recipe", Recipe(64, 16, loss="rate"), 2, 1e-4, (2,), KS),
}
QUICK = Protocol("quick protocol", Recipe(20, 16, 2e-3, "rate"), 4, 1e-3, (2, 8), KS)
SIZES = {"paper": 64, "spikingjelly": 128}


def spikingjelly_net() -> nn.Module:
    """SpikingJelly's DVSGestureNet, 128 channels, LIF."""
    net = DVSGestureNet(
        128, spiking_neuron=neuron.LIFNode, surrogate_function=surrogate.ATan(), detach_reset=True, decay_input=True
    )
    functional.set_step_mode(net, "m")
    return net


def arguments() -> argparse.Namespace:
    parser = command.parser(__doc__ or "", "runs/dvs-gesture")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="root folder of DVS128 Gesture, as tonic or SpikingJelly keeps it")
    source.add_argument("--synthetic", action="store_true", help="the generated gestures")
    parser.add_argument("--library", choices=["auto", "tonic", "spikingjelly"], default="auto", help="who reads --data")
    parser.add_argument("--recipe", choices=list(RECIPES), default="paper", help="whose net and hyperparameters")
    parser.add_argument("--steps", type=int, default=16, help="T, frames per sample (default 16)")
    parser.add_argument("--size", type=int, choices=[16, 32, 64, 128], help="pixels of a frame's side")
    parser.add_argument("--train-samples", type=int, default=1100, help="of the generated gestures (default 1100)")
    parser.add_argument("--test-samples", type=int, default=550, help="of the generated gestures (default 550)")
    parser.add_argument("--workers", type=int, default=0, help="processes that read --data (default 0)")
    return command.parsed(parser, steps=1, train_samples=11, test_samples=11, workers=0)


def task_of(args: argparse.Namespace) -> Task:
    size = args.size or (32 if args.quick else SIZES[args.recipe])
    if args.quick:
        make = partial(nets.GestureNet, dvs128.CLASSES, 32, 4, size)
    elif args.recipe == "paper":
        make = partial(nets.GestureNet, dvs128.CLASSES, 128, min(5, size.bit_length() - 1), size)
    else:
        make = spikingjelly_net
    if args.data:
        found = dvs128.load(args.data, args.library, args.steps, size, args.workers)
        return Task(f"DVS128 Gesture ({found.split})", make, found.train, found.test, first_conv(make))
    cache = args.out / "data"
    train = Frames(*gestures.generate(args.train_samples, args.steps, size, 1, cache), shift=2)
    test = Frames(*gestures.generate(args.test_samples, args.steps, size, 2, cache))
    return Task("generated gestures", make, train, test, first_conv(make))


def first_conv(make: partial[nn.Module] | type[nn.Module]) -> str:
    return next(name for name, module in make().named_modules() if isinstance(module, nn.Conv2d))


def main() -> None:
    args = arguments()
    workers = Workers.join(args.device)
    protocol = command.adjusted(QUICK if args.quick else RECIPES[args.recipe], args)
    options, own = command.options(args, workers), command.own_policy(args)
    if workers.rank == 0 and args.synthetic:
        task_of(args)  # one process generates, the others read what it kept
    workers.wait()
    task = task_of(args)
    results = study.run(lambda seed: task, protocol, args.seeds, options, own)
    if workers.rank == 0:
        study.finish("gestures" if args.synthetic else "dvs128", task, protocol, results, options, args.rounds, own)
    workers.leave()


if __name__ == "__main__":
    command.run(main)
