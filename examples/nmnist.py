"""Real N-MNIST event recordings: the rows of the paper's event table, from scratch and by conversion.

    python examples/nmnist.py --quick                              # the 100 recordings that are shipped
    python examples/nmnist.py --data FOLDER_OR_NPZ --quick --hold-out 300 --seeds 0 1 2

--data takes a folder that holds N-MNIST's Train/ and Test/ (tonic downloads it where nothing is there), or an .npz of
recordings (datasets.read_recordings). --hold-out N draws about N test recordings anew for every seed, each class in
proportion, instead of the official split. A kill costs at most --save-every seconds: the same command goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import command
import datasets
import nets
import study
import torch
from datasets import DataError, Frames
from study import Protocol, Task
from torch import Tensor
from training import Recipe, Workers

KS = (2, 4, 8)
PAPER = Protocol("full protocol", Recipe(64, 32, loss="rate"), 2, 1e-4, (2, 4), KS)
QUICK = Protocol("quick protocol", Recipe(20, 25, 3e-3, "rate"), 2, 3e-4, (2,), KS)


def recordings(path: Path | None, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Frames [steps, N, 2, 34, 34], labels [N], and which are of the official test set [N]. Raises DataError."""
    path = path or datasets.SHIPPED_EVENTS
    if path.is_dir():
        parts = [datasets.nmnist_folder(path, train, steps) for train in (True, False)]
        frames, labels = torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts])
        return frames, labels, torch.arange(len(labels)) >= len(parts[0][1])
    archive = datasets.read_recordings(path)
    frames, labels = datasets.event_frames(archive, steps, str(path))
    return frames, labels, torch.from_numpy(archive["is_test"].astype(bool))


def arguments() -> argparse.Namespace:
    parser = command.parser(__doc__ or "", "runs/nmnist")
    parser.add_argument("--data", type=Path, help="folder or .npz (default: the shipped 100 recordings)")
    parser.add_argument(
        "--hold-out", type=int, help="about so many test recordings, drawn for each seed (default: the official split)"
    )
    parser.add_argument("--steps", type=int, default=32, help="T, frames per recording (default 32)")
    return command.parsed(parser, steps=1, hold_out=1)


def main() -> None:
    args = arguments()
    workers = Workers.join(args.device)
    protocol = command.adjusted(QUICK if args.quick else PAPER, args)
    options, own = command.options(args, workers), command.own_policy(args)
    frames, labels, is_test = recordings(args.data, args.steps)
    hold_out = args.hold_out
    if hold_out is None and (is_test.all() or not is_test.any()):
        hold_out = len(labels) * 3 // 10
        options.console.print(f"The data has no split of its own: {hold_out} of {len(labels)} are held out for each seed.")
    if hold_out is not None and hold_out > len(labels) - 10:
        raise DataError(f"--hold-out {hold_out} of {len(labels)} recordings leaves too few to train on")
    title = "N-MNIST" if hold_out is None else f"N-MNIST ({len(labels)} recordings, {hold_out} held out for each seed)"

    def task(seed: int) -> Task:
        test, train = (is_test.nonzero().flatten(), (~is_test).nonzero().flatten())
        if hold_out is not None:
            test, train = datasets.split_off(labels, hold_out, seed)
        parts = [Frames(frames[:, rows], labels[rows], shift) for rows, shift in ((train, 2), (test, 0))]
        return Task(title, nets.EventNet, parts[0], parts[1])

    results = study.run(task, protocol, args.seeds, options, own)
    if workers.rank == 0:
        study.finish("nmnist", task(args.seeds[0]), protocol, results, options, args.rounds, own)
    workers.leave()


if __name__ == "__main__":
    command.run(main)
