"""What test_training.py runs in two processes of a torchrun, and in one."""

import sys
from pathlib import Path

import torch
from datasets import Frames
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import nn
from training import Recipe, Workers, fit, predict

import sj_tac


def net() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(
        layer.Conv2d(2, 4, 3, padding=1), neuron.LIFNode(surrogate_function=surrogate.ATan()), layer.MaxPool2d(2),
        layer.Conv2d(4, 4, 3, padding=1), neuron.LIFNode(surrogate_function=surrogate.ATan()), layer.MaxPool2d(2),
        layer.Flatten(), layer.Linear(16, 3),
    )  # fmt: skip
    functional.set_step_mode(made, "m")
    return sj_tac.convert(made, "preserve", 2)


def frames() -> Frames:
    generator = torch.Generator().manual_seed(0)
    return Frames(torch.rand(4, 22, 2, 8, 8, generator=generator) * 4, torch.arange(22) % 3)


def train(made: nn.Module, folder: Path, workers: Workers) -> None:
    # 22 samples in batches of 8 leave one of 6: shares of 4, 4 and 3.
    fit(made, frames(), Recipe(2, 8, 1e-2), folder, workers=workers)


def predicted(made: nn.Module, workers: Workers) -> torch.Tensor:
    return predict(made, frames(), 4, workers=workers)[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    joined = Workers.join("cpu")
    assert joined.count == 2
    trained = net()
    train(trained, Path(sys.argv[1]) / "run", joined)
    found = predicted(trained, joined)
    if joined.rank == 0:
        torch.save(trained.state_dict(), Path(sys.argv[1]) / "together.pt")
        torch.save(found, Path(sys.argv[1]) / "predictions.pt")
    joined.leave()
