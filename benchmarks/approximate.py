"""What sharing costs where a MaxPool or a ReLU stands between convolution and neuron: accuracy of trained nets.

    python -m benchmarks.approximate --mnist FOLDER --fashion FOLDER --nmnist FILE.npz

Three data sets (rate-coded digits and clothes, N-MNIST recordings), and for each a net of three blocks in three forms: conv
-> norm -> neuron -> pool ("plain"), conv -> norm -> MaxPool -> neuron ("max pool"), and conv -> norm -> ReLU -> neuron ->
pool ("relu"). Each is trained at k = 1. Then all its convolutions share k frames, with no training after that. Rows are
percent of correct predictions on samples that were not trained on.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import Tensor, nn

from sj_tac.definition import convs
from sj_tac.rewrites.measure.measured import measure

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import datasets

FORMS = "plain", "max pool", "relu"
KS = 1, 2, 4
STEPS, EPOCHS, BATCH = 8, 6, 50


def net(form: str, channels: int, classes: int) -> nn.Module:
    """Three blocks of one form, in step mode "m"."""
    modules: list[nn.Module] = []
    for i, width in enumerate((16, 32, 32)):
        modules += [layer.Conv2d(channels if i == 0 else modules[-1].width, width, 3, padding=1, bias=False)]  # type: ignore[arg-type]
        modules += [layer.BatchNorm2d(width)]
        spiking = neuron.LIFNode(surrogate_function=surrogate.ATan(), detach_reset=True)
        between = {"plain": [spiking], "max pool": [layer.MaxPool2d(2), spiking], "relu": [nn.ReLU(), spiking]}[form]
        modules += between if form == "max pool" else [*between, layer.MaxPool2d(2)]
        modules[-1].width = width  # type: ignore[assignment]
    made = nn.Sequential(*modules, layer.AdaptiveAvgPool2d(2), layer.Flatten(), layer.Linear(32 * 4, classes))
    functional.set_step_mode(made, "m")
    return made


def images(folder: Path) -> tuple[Tensor, Tensor, int]:
    """Rate-coded images [T, N, 1, 14, 14] of MNIST or Fashion-MNIST, and labels."""
    given, labels = datasets.mnist(folder, "train")
    small = F.avg_pool2d(given[:5000].unsqueeze(1), 2).squeeze(1)
    return datasets.rate_code(small, STEPS, torch.Generator().manual_seed(0)), labels[:5000], 10


def recordings(file: Path) -> tuple[Tensor, Tensor, int]:
    """N-MNIST recordings [T, N, 2, 17, 17] and labels."""
    frames, labels = datasets.event_frames(datasets.read_recordings(file), STEPS, str(file))
    return F.avg_pool2d(frames.clamp(max=1).flatten(0, 1), 2).unflatten(0, frames.shape[:2]), labels, 10


def train(made: nn.Module, x: Tensor, y: Tensor) -> None:
    """Adam, cross entropy of the mean output."""
    steps, optimizer = EPOCHS * (len(y) // BATCH), torch.optim.Adam(made.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for _ in range(EPOCHS):
        order = torch.randperm(len(y))
        for rows in order[: len(y) // BATCH * BATCH].split(BATCH):
            functional.reset_net(made)
            optimizer.zero_grad()
            F.cross_entropy(made(x[:, rows]).mean(0), y[rows]).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(made: nn.Module, x: Tensor, y: Tensor) -> float:
    """Percent of correct predictions."""
    right = 0
    for rows in torch.arange(len(y)).split(250):
        functional.reset_net(made)
        right += int((made(x[:, rows]).mean(0).argmax(1) == y[rows]).sum())
    return 100 * right / len(y)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mnist", type=Path, required=True, help="folder with MNIST's idx.gz files")
    parser.add_argument("--fashion", type=Path, required=True, help="folder with Fashion-MNIST's idx.gz files")
    parser.add_argument("--nmnist", type=Path, required=True, help=".npz of N-MNIST recordings")
    options = parser.parse_args()
    sets: dict[str, Callable[[], tuple[Tensor, Tensor, int]]] = {
        "digits": lambda: images(options.mnist),
        "clothes": lambda: images(options.fashion),
        "recordings": lambda: recordings(options.nmnist),
    }
    print(f"torch {torch.__version__}, {EPOCHS} epochs, T = {STEPS}")
    print("| data | form | shared | " + " | ".join(f"k = {k}" for k in KS) + " | drives off at k = 2 |\n" + "|---" * 7 + "|")
    for name, load in sets.items():
        x, y, classes = load()
        held = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
        trained, tried = held[: len(y) * 3 // 4], held[len(y) * 3 // 4 :]
        for form in FORMS:
            torch.manual_seed(0)
            made = net(form, x.shape[2], classes)
            train(made, x[:, trained], y[trained])
            functional.reset_net(made.eval())
            found, row = measure(made, (x[:, tried[:8]],)), []
            for k in KS:
                shared = copy.deepcopy(made)
                convs.share(shared, found.sharings(k, shared, approximate=True))
                row.append(accuracy(shared, x[:, tried], y[tried]))
            off = max(each.off or 0.0 for each in found.shared.values())
            shown = " | ".join(f"{a:.1f}" for a in row)
            print(f"| {name} | {form} | {len(found.shared)} | {shown} | {off:.2f} |", flush=True)


if __name__ == "__main__":
    main()
