"""Fine-tune a converted checkpoint: what a few steps give back of what aggregation cost.

    python examples/finetune.py                              # shipped checkpoint and data, less than a minute on a CPU
    python examples/finetune.py --data FOLDER --k 8 --distill --bn moving

The net is the quickstart's DigitNet. Without --data 700 of the shipped 1,000 MNIST digits are trained on and 300 tested;
with --data (the four idx.gz files) the real training and test set. --bn moving shows what happens to the way back: the
statistics learn from aggregated frames, and the net at k = 1 is no longer what it was. A kill costs --save-every seconds.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import command
import datasets
import nets
import torch
from datasets import RateCoded
from quickstart import load
from rich.console import Console
from torch import nn
from training import LOSSES, Recipe, Workers, distilled, fit, predict

import sj_tac
from sj_tac.errors import BatchNormMovedWarning


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with MNIST's four idx.gz files (default: the shipped digits)")
    parser.add_argument("--images", type=int, default=6000, help="training images of --data (default 6000)")
    parser.add_argument("--policy", default="preserve", help="preserve, collapse, or a policy file (default preserve)")
    parser.add_argument("--k", type=int, default=8, help="frames per convolution (default 8)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training images (default 3)")
    parser.add_argument("--rate", type=float, default=3e-4, help="Adam's learning rate (default 3e-4)")
    parser.add_argument(
        "--bn", choices=["frozen", "moving"], default="frozen", help="BatchNorm's statistics (default frozen)"
    )
    parser.add_argument("--distill", action="store_true", help="half of the loss is the distance to the source net")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"), help="folder of the run (default runs/finetune)")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints (default 60)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (default)")
    args = parser.parse_args()
    for name in ("images", "k", "epochs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: at least 1")
    return args


def data(args: argparse.Namespace) -> tuple[RateCoded, RateCoded]:
    if args.data:
        train, test = datasets.mnist(args.data, "train"), datasets.mnist(args.data, "t10k")
        return RateCoded(train[0][: args.images], train[1][: args.images], nets.DIGITS_T), RateCoded(*test, nets.DIGITS_T)
    images, labels = datasets.shipped_digits()
    test, train = datasets.split_off(labels, 300, seed=0)
    return RateCoded(images[train], labels[train], nets.DIGITS_T), RateCoded(images[test], labels[test], nets.DIGITS_T)


def fine_tuned(source: nn.Module, train: RateCoded, args: argparse.Namespace, workers: Workers) -> nn.Module:
    """All of it: convert, freeze BatchNorm, train with the loss you have; ``fit`` is the loop you have as well."""
    frames, _ = next(train.load([torch.arange(1)], [0]))
    fast = sj_tac.convert(source, args.policy, args.k, example_input=frames)
    if args.bn == "frozen":
        sj_tac.freeze_bn(fast)
    loss = distilled(LOSSES["rate"], source.to(workers.device)) if args.distill else LOSSES["rate"]
    name = f"{Path(args.policy).stem}-k{args.k}-{args.bn}{'-distill' if args.distill else ''}"
    recipe = Recipe(args.epochs, 50, args.rate, "rate")
    fit(fast, train, recipe, args.out / name, workers=workers, loss=loss, save_every=args.save_every)
    return fast


def accuracy(net: nn.Module, test: RateCoded, workers: Workers) -> float:
    predictions, labels = predict(net, test, 100, workers=workers)
    return 100 * (predictions == labels).float().mean().item()


def main() -> None:
    args = arguments()
    workers = Workers.join(args.device)
    console = Console()
    train, test = data(args)
    source = load(nets.DigitNet(), "digits")
    frames, _ = next(train.load([torch.arange(1)], [0]))
    before = accuracy(sj_tac.convert(source, args.policy, args.k, example_input=frames), test, workers)
    console.print(f"source, k=1: {accuracy(source, test, workers):.2f} % of {len(test)}")
    console.print(f"converted, {args.policy} k={args.k}: {before:.2f} %")
    fast = fine_tuned(source, train, args, workers)
    console.print(f"fine-tuned, BatchNorm {args.bn}: {accuracy(fast, test, workers):.2f} %")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", BatchNormMovedWarning)
        back = sj_tac.restore(fast)
    console.print(f"and back at k=1 (sj_tac.restore): {accuracy(back, test, workers):.2f} %")
    for warning in told:
        console.print(f"{warning.category.__name__}: {warning.message}")


if __name__ == "__main__":
    command.run(main)
