"""Train the quickstart's nets from scratch, in plain SpikingJelly, and write checkpoints and test data.

python examples/train.py digits --data FOLDER   # FOLDER: MNIST's four idx.gz files
python examples/train.py events --data FILE     # FILE: an .npz of N-MNIST recordings (see datasets.read_recordings)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import nets
import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from spikingjelly.activation_based import functional

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"


def fit(net, batches, epochs: int, rate: float) -> None:
    """Adam with a cosine schedule; mean squared error between the firing rate of each class and its one-hot label."""
    optimizer = torch.optim.Adam(net.parameters(), rate)
    steps = epochs * len(batches(0))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    net.train()
    with Progress() as progress:
        task = progress.add_task("training", total=steps)
        for epoch in range(epochs):
            total = 0.0
            for load in batches(epoch):
                frames, labels = load()
                loss = F.mse_loss(net(frames).mean(0), F.one_hot(labels, 10).float())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                functional.reset_net(net)
                total += loss.item()
                progress.advance(task)
            progress.console.print(f"epoch {epoch + 1}: loss {total / len(batches(0)):.4f}")


@torch.no_grad()
def accuracy(net, frames: torch.Tensor, labels: torch.Tensor, batch: int = 100) -> float:
    net.eval()
    right = 0
    for start in range(0, len(labels), batch):
        votes = net(frames[:, start : start + batch]).mean(0)
        right += int((votes.argmax(1) == labels[start : start + batch]).sum())
        functional.reset_net(net)
    return right / len(labels)


def save(net, name: str) -> None:
    CHECKPOINTS.mkdir(exist_ok=True)
    torch.save(net.state_dict(), CHECKPOINTS / f"{name}.pt")


def train_digits(folder: Path, epochs: int) -> None:
    images, labels = datasets.mnist(folder, "train")
    test_images, test_labels = datasets.mnist(folder, "t10k")
    generator = torch.Generator().manual_seed(0)
    net = nets.DigitNet()

    def batches(epoch: int):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch)).split(100)
        return [
            lambda rows=rows: (datasets.rate_code(images[rows], nets.DIGITS_T, generator), labels[rows]) for rows in order
        ]

    fit(net, batches, epochs, rate=3e-3)
    save(net, "digits")
    np.savez_compressed(
        datasets.SHIPPED_DIGITS,
        images=(test_images[:1000] * 255).round().to(torch.uint8).numpy(),
        labels=test_labels[:1000].to(torch.uint8).numpy(),
    )
    frames = datasets.rate_code(test_images[:1000], nets.DIGITS_T, torch.Generator().manual_seed(1))
    print(f"accuracy on the first 1,000 test digits: {accuracy(net, frames, test_labels[:1000]):.1%}")


def train_events(file: Path, epochs: int) -> None:
    archive = datasets.read_recordings(file)
    is_test = archive["is_test"].astype(bool)
    frames, labels = datasets.event_frames(datasets.pack_recordings(archive, ~is_test), nets.EVENTS_T)
    held_out = datasets.pack_recordings(archive, is_test)
    net = nets.EventNet()

    def batches(epoch: int):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch)).split(50)
        return [lambda rows=rows: (datasets.shifted(frames[:, rows], 2), labels[rows]) for rows in order]

    fit(net, batches, epochs, rate=3e-3)
    save(net, "events")
    np.savez_compressed(datasets.SHIPPED_EVENTS, **held_out)
    print(
        f"accuracy on the {is_test.sum()} test recordings: "
        f"{accuracy(net, *datasets.event_frames(held_out, nets.EVENTS_T)):.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["digits", "events"])
    parser.add_argument("--data", type=Path, required=True, help="the folder (digits) or the .npz (events)")
    parser.add_argument("--epochs", type=int, help="passes over the training set (digits 3, events 36)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.data.exists():
        parser.error(f"--data: {args.data} does not exist")
    torch.manual_seed(args.seed)
    if args.task == "digits":
        train_digits(args.data, args.epochs or 3)
    else:
        train_events(args.data, args.epochs or 36)


if __name__ == "__main__":
    main()
