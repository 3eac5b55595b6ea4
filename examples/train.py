"""Train the quickstart's nets from scratch, in plain SpikingJelly, and write checkpoints and test data.

    python examples/train.py digits --data FOLDER   # FOLDER: MNIST's four idx.gz files
    python examples/train.py events --data FILE     # FILE: an .npz of N-MNIST recordings (see datasets.read_recordings)

A killed run goes on from the last checkpoint in --out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import command
import datasets
import nets
import numpy as np
import torch
from torch import nn
from training import Data, Recipe, fit, predict

from sj_tac.support.files import write_whole

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"


def finish(net: nn.Module, name: str, test: Data, shipped: Path, arrays: dict[str, np.ndarray]) -> None:
    """Keep the weights and the test data, and say what they give."""
    write_whole(CHECKPOINTS / f"{name}.pt", lambda path: torch.save(net.state_dict(), path))
    write_whole(shipped, lambda path: np.savez_compressed(path, **arrays))
    predictions, labels = predict(net, test, 100)
    print(f"accuracy on {len(test)} test samples: {(predictions == labels).float().mean().item():.1%}")


def train_digits(folder: Path, epochs: int, seed: int, out: Path) -> None:
    train, (images, labels) = datasets.mnist(folder, "train"), datasets.mnist(folder, "t10k")
    net = nets.DigitNet()
    recipe = Recipe(epochs, 100, 3e-3, "rate", seed, schedule="onecycle")
    fit(net, datasets.RateCoded(*train, nets.DIGITS_T), recipe, out / "digits")
    test = datasets.RateCoded(images[:1000], labels[:1000], nets.DIGITS_T)
    arrays = {
        "images": (images[:1000] * 255).round().to(torch.uint8).numpy(),
        "labels": labels[:1000].to(torch.uint8).numpy(),
    }
    finish(net, "digits", test, datasets.SHIPPED_DIGITS, arrays)


def train_events(file: Path, epochs: int, seed: int, out: Path) -> None:
    archive = datasets.read_recordings(file)
    is_test = archive["is_test"].astype(bool)
    held_out = datasets.pack_recordings(archive, is_test)
    train = datasets.event_frames(datasets.pack_recordings(archive, ~is_test), nets.EVENTS_T)
    net = nets.EventNet()
    recipe = Recipe(epochs, 50, 3e-3, "rate", seed, schedule="onecycle")
    fit(net, datasets.Frames(*train, shift=2), recipe, out / "events")
    test = datasets.Frames(*datasets.event_frames(held_out, nets.EVENTS_T))
    finish(net, "events", test, datasets.SHIPPED_EVENTS, held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["digits", "events"])
    parser.add_argument("--data", type=Path, required=True, help="the folder (digits) or the .npz (events)")
    parser.add_argument("--epochs", type=int, help="passes over the training set (digits 3, events 36)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder of the run (default runs/train)")
    args = parser.parse_args()
    if args.epochs is not None and args.epochs < 1:
        parser.error(f"--epochs {args.epochs}: at least 1")
    torch.manual_seed(args.seed)
    if args.task == "digits":
        train_digits(args.data, args.epochs or 3, args.seed, args.out)
    else:
        train_events(args.data, args.epochs or 36, args.seed, args.out)


if __name__ == "__main__":
    command.run(main)
