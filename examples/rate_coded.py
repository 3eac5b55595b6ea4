"""Rate-coded MNIST and Fashion-MNIST: the paper's Table 2, from scratch and by conversion.

    python examples/rate_coded.py --data FOLDER --quick          # FOLDER: the four idx.gz files; minutes on a CPU
    python examples/rate_coded.py --download FOLDER --dataset fashion-mnist --seeds 0 1 2

Baseline, TAC and TAC-TP as the paper writes them, and this library's normalised preserve and count collapse, each at
several k: trained from scratch, converted from the trained baseline, and converted and fine-tuned. A kill costs at most
--save-every seconds: the same command goes on. The paper's protocol: T = 25, tau = 10, soft reset, batch 128, Adam 1e-3
with a cosine, 15 epochs, cross-entropy on the spike count.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import command
import datasets
import nets
import study
from study import Protocol, Task
from torch import Tensor
from training import Recipe, Workers

STEPS = 25
PAPER = Protocol("full protocol", Recipe(15, 128), 1, 1e-4, (4, 8, 16), (2, 4, 8, 16))
QUICK = Protocol("quick protocol", Recipe(3, 32, 2e-3), 1, 3e-4, (4, 8, 16), (2, 4, 8, 16), scratch=study.PAPER)
QUICK_TRAIN, QUICK_TEST = 3000, 5000
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}


def download(folder: Path, dataset: str, split: str) -> tuple[Tensor, Tensor]:
    """By torchvision: images [N, 28, 28] in 0..1 and labels [N]. Raises DataError where they cannot be had."""
    try:
        from torchvision.datasets import MNIST, FashionMNIST
    except ImportError:
        raise datasets.DataError("--download needs torchvision: pip install torchvision, or give --data FOLDER") from None
    kind = {"mnist": MNIST, "fashion-mnist": FashionMNIST}[dataset]
    try:
        found = kind(str(folder), train=split == "train", download=True)
    except (RuntimeError, OSError) as error:
        what = f"{TITLES[dataset]} cannot be downloaded to {folder}"
        raise datasets.DataError(f"{what} ({error}); give --data FOLDER") from None
    return found.data.float() / 255, found.targets.long()


def load(args: argparse.Namespace, split: str, limit: int | None) -> datasets.RateCoded:
    if args.data:
        images, labels = datasets.mnist(args.data, split)
    else:
        images, labels = download(args.download, args.dataset, split)
    return datasets.RateCoded(images[:limit], labels[:limit], args.steps)


def arguments() -> argparse.Namespace:
    parser = command.parser(__doc__ or "", "runs/rate-coded")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="folder with the four idx.gz files")
    source.add_argument("--download", type=Path, help="folder that torchvision downloads to")
    parser.add_argument("--dataset", choices=list(TITLES), default="mnist", help="what --data holds, or --download fetches")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"T, spike frames per image (default {STEPS})")
    parser.add_argument("--decay-input", action="store_true", help="neurons with SpikingJelly's input gain, 1/tau, not 1")
    parser.add_argument(
        "--printed", action="store_true", help="the net as the paper prints it: no padding, 128 hidden neurons"
    )
    parser.add_argument("--train-images", type=int, help=f"only the first ones (--quick: {QUICK_TRAIN})")
    parser.add_argument("--test-images", type=int, help=f"only the first ones (--quick: {QUICK_TEST})")
    return command.parsed(parser, steps=1, train_images=1, test_images=1)


def main() -> None:
    args = arguments()
    workers = Workers.join(args.device)
    protocol = command.adjusted(QUICK if args.quick else PAPER, args)
    train = load(args, "train", args.train_images or (QUICK_TRAIN if args.quick else None))
    test = load(args, "t10k", args.test_images or (QUICK_TEST if args.quick else None))
    title = TITLES[args.dataset] + (", decay_input" if args.decay_input else "") + (", printed net" if args.printed else "")
    make = partial(nets.PaperImageNet, decay_input=args.decay_input, printed=args.printed)
    task = Task(title, make, train, test)
    options, own = command.options(args, workers), command.own_policy(args)
    results = study.run(lambda seed: task, protocol, args.seeds, options, own)
    if workers.rank == 0:
        study.finish(args.dataset, task, protocol, results, options, args.rounds, own)
    workers.leave()


if __name__ == "__main__":
    command.run(main)
