"""Training and evaluating a multi-step SNN: one loop for all scripts, which a kill in mid-epoch does not hurt.

A run's folder holds ``last.pt`` (weights, optimiser, position) and ``log.csv``. Everything random in a step follows from
(seed, epoch, step, rank), so a resumed run computes what an uninterrupted one would have. Files are written beside their
place and moved there whole. Under torchrun every process trains on its share of each batch (DistributedDataParallel).
"""

from __future__ import annotations

import contextlib
import csv
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import Progress
from spikingjelly.activation_based import functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sj_tac.support.files import write_whole

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Data(Protocol):
    """Samples by their index."""

    def __len__(self) -> int: ...

    def load(self, rows: list[Tensor], seeds: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each batch of indices: frames [T, N, C, H, W] (float32) and labels [N]; its randomness from its seed."""
        ...


class RunError(Exception):
    """A run's folder cannot be used: what is in it, and what to do."""


@dataclass(frozen=True)
class Recipe:
    """What a run's result depends on, besides net and data.

    ``loss`` is a key of LOSSES; ``rate`` Adam's (largest) learning rate, lowered to 0 by a cosine over all steps, or raised
    and lowered by "onecycle". ``freeze_norms`` keeps BatchNorm on its running statistics, as fine-tuning wants it.
    """

    epochs: int
    batch: int
    rate: float = 1e-3
    loss: str = "count"
    seed: int = 0
    amp: bool = False
    decay: float = 0.0
    freeze_norms: bool = False
    schedule: str = "cosine"


@dataclass
class History:
    """What a run has done so far."""

    epoch: int = 0
    step: int = 0  # of this epoch
    seconds: float = 0.0  # spent in training, over all processes' lives
    losses: list[float] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)  # one per epoch


def spike_count(out: Tensor, labels: Tensor, frames: Tensor) -> Tensor:
    """Cross-entropy on each class's spike count: the paper's. ``out`` [T, N, classes]."""
    return F.cross_entropy(out.float().sum(0), labels)


def firing_rate(out: Tensor, labels: Tensor, frames: Tensor) -> Tensor:
    """Mean squared error between each class's firing rate and its one-hot label: SpikingJelly's usual one."""
    rate = out.float().mean(0)
    return F.mse_loss(rate, F.one_hot(labels, rate.shape[1]).to(rate.dtype))


LOSSES: dict[str, Loss] = {"count": spike_count, "rate": firing_rate}


def distilled(loss: Loss, teacher: nn.Module, share: float = 0.5) -> Loss:
    """``loss``, of which ``share`` becomes the distance to what ``teacher`` (a source net) says to the same frames."""
    teacher.eval()

    def both(out: Tensor, labels: Tensor, frames: Tensor) -> Tensor:
        functional.reset_net(teacher)
        with torch.no_grad():
            wanted = teacher(frames).float().mean(0)
        return (1 - share) * loss(out, labels, frames) + share * F.mse_loss(out.float().mean(0), wanted)

    return both


@dataclass(frozen=True)
class Workers:
    """The processes of a torchrun, or this one alone."""

    rank: int = 0
    count: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009  a device is immutable

    @classmethod
    def join(cls, device: str = "auto") -> Workers:
        """Those of the environment; gloo on CPUs, nccl on GPUs. Raises RunError for a device that is not there."""
        wanted = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        if wanted.startswith("cuda") and not torch.cuda.is_available():
            raise RunError(f"--device {device}: torch {torch.__version__} sees no GPU here; use --device cpu")
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return cls(device=torch.device(wanted))
        if wanted == "cuda":
            wanted = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(wanted)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if wanted.startswith("cuda") else "gloo")
        return cls(dist.get_rank(), count, torch.device(wanted))

    def leave(self) -> None:
        """The end of what the processes do together; of one alone, nothing.

        Gloo's threads still hold the last tensors, and need Python's lock to let go of them: a process that ends before they
        had it aborts. They get it while this one waits.
        """
        if self.count > 1:
            dist.barrier()
            time.sleep(0.2)
            dist.destroy_process_group()

    def sum(self, value: Tensor) -> Tensor:
        if self.count > 1:
            dist.all_reduce(value)
        return value

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint as plain tensors and numbers. Raises RunError where the file is none, or only a part of one."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises anything from EOFError to RuntimeError here
        raise RunError(f"{path} is no whole checkpoint ({type(error).__name__}); delete it and run again") from None
    if not isinstance(loaded, dict):
        raise RunError(f"{path} holds a {type(loaded).__name__}, no checkpoint; delete it and run again")
    return loaded


def _seed(recipe: Recipe, epoch: int, step: int, rank: int = 0) -> int:
    return hash((recipe.seed, epoch, step, rank)) & 0x7FFFFFFF


def _write_log(rows: list[dict[str, float]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["epoch"])
        writer.writeheader()
        writer.writerows(rows)


class _Run:
    """One training run: its net, optimiser and position, and the folder that they survive in."""

    def __init__(self, net: nn.Module, recipe: Recipe, folder: Path | None, workers: Workers, per_epoch: int) -> None:
        self.net, self.recipe, self.folder, self.workers = net, recipe, folder, workers
        self.optimizer = torch.optim.Adam(net.parameters(), recipe.rate, weight_decay=recipe.decay)
        steps = max(1, recipe.epochs * per_epoch)
        self.schedule = {
            "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps),
            "onecycle": lambda: torch.optim.lr_scheduler.OneCycleLR(self.optimizer, recipe.rate, total_steps=steps),
        }[recipe.schedule]()
        half = torch.float16 if workers.device.type == "cuda" and not torch.cuda.is_bf16_supported() else torch.bfloat16
        self.cast = torch.autocast(workers.device.type, half, enabled=recipe.amp)
        self.scaler = torch.amp.GradScaler(workers.device.type, enabled=recipe.amp and half == torch.float16)
        self.history = History()
        self.saved = time.monotonic()

    def _parts(self) -> dict[str, Any]:
        return {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule, "scaler": self.scaler}

    def resume(self) -> None:
        path = self.folder / "last.pt" if self.folder else None
        if path is None or not path.exists():
            return
        found = read_checkpoint(path)
        if found.get("recipe") != asdict(self.recipe):
            raise RunError(
                f"{path} was trained with {found.get('recipe')}, this run asks for {asdict(self.recipe)}; "
                "give it another --out, or delete the folder"
            )
        try:
            for name, part in self._parts().items():
                part.load_state_dict(found[name])
        except (KeyError, RuntimeError, ValueError) as error:
            raise RunError(f"{path} does not fit this net ({error}); give it another --out, or delete the folder") from None
        self.history = History(**found["history"])

    def save(self) -> None:
        if self.folder is None or self.workers.rank:
            return
        state = {name: part.state_dict() for name, part in self._parts().items()}
        state |= {"recipe": asdict(self.recipe), "history": asdict(self.history)}
        write_whole(self.folder / "last.pt", lambda path: torch.save(state, path))
        write_whole(self.folder / "log.csv", lambda path: _write_log(self.history.rows, path))
        self.saved = time.monotonic()

    def step(self, wrapped: nn.Module, loss: Loss, frames: Tensor, labels: Tensor) -> tuple[float, int]:
        device = self.workers.device
        frames, labels = frames.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with self.cast:
            out = wrapped(frames)
            value = loss(out, labels, frames)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(value).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        functional.reset_net(self.net)
        if not torch.isfinite(value):
            raise RunError(
                f"the loss is {value.item()} in epoch {self.history.epoch}, step {self.history.step}; lower --rate, "
                "or train without --amp"
            )
        return value.item(), int((out.detach().sum(0).argmax(1) == labels).sum())


def shares(count: int, recipe: Recipe, epoch: int, workers: Workers) -> list[Tensor]:
    """This process's part of every batch of an epoch: equally long for all, so that gradients can be averaged."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(_seed(recipe, epoch, -1)))
    batches = [rows[: len(rows) // workers.count * workers.count] for rows in order.split(recipe.batch)]
    return [rows[workers.rank :: workers.count] for rows in batches if len(rows)]


def epochs(
    net: nn.Module,
    data: Data,
    recipe: Recipe,
    folder: Path | None = None,
    *,
    workers: Workers | None = None,
    loss: Loss | None = None,
    save_every: float = 60.0,
    shown: Callable[[int], None] = lambda step: None,
) -> Iterator[History]:
    """``fit``, an epoch at a time: gives what is done so far, at first and after every epoch it trained."""
    workers = workers or Workers()
    loss = loss or LOSSES[recipe.loss]
    run = _Run(net.to(workers.device), recipe, folder, workers, len(shares(len(data), recipe, 0, workers)))
    run.resume()
    wrapped = DistributedDataParallel(net) if workers.count > 1 else net
    yield run.history
    while run.history.epoch < recipe.epochs:
        _training_mode(net, recipe.freeze_norms)
        _epoch(run, wrapped, data, loss, save_every, shown)
        yield run.history
    net.eval()


def fit(
    net: nn.Module,
    data: Data,
    recipe: Recipe,
    folder: Path | None = None,
    *,
    workers: Workers | None = None,
    loss: Loss | None = None,
    save_every: float = 60.0,
    tensorboard: bool = False,
) -> History:
    """Train ``net`` in place on ``data``; what ``folder`` holds of this run already is not done again.

    Args:
        net: multi-step; [T, N, C, H, W] in, [T, N, classes] out. It is left in eval mode.
        folder: where it is saved every ``save_every`` seconds and after each epoch; None keeps nothing.
        loss: in place of ``LOSSES[recipe.loss]``.

    Raises:
        RunError: the folder holds another run or a damaged checkpoint; or the loss is no longer finite.
    """
    workers = workers or Workers()
    writer = _summary_writer(folder) if tensorboard and workers.rank == 0 and folder else None
    visible = workers.rank == 0 and sys.stderr.isatty()
    history = History()
    with Progress(transient=True, disable=not visible) as progress, contextlib.closing(writer or contextlib.ExitStack()):
        total = recipe.epochs * len(shares(len(data), recipe, 0, workers))
        bar = progress.add_task(folder.name if folder else "training", total=total)
        trained = epochs(
            net, data, recipe, folder, workers=workers, loss=loss, save_every=save_every,
            shown=lambda done: progress.update(bar, completed=done),
        )  # fmt: skip
        for number, history in enumerate(trained):
            if writer is not None and number:
                for name, value in history.rows[-1].items():
                    writer.add_scalar(name, value, history.epoch)
    return history


def _training_mode(net: nn.Module, freeze_norms: bool) -> None:
    net.train()
    for module in net.modules():
        if freeze_norms and isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def _epoch(run: _Run, wrapped: nn.Module, data: Data, loss: Loss, save_every: float, shown: Callable[[int], None]) -> None:
    history, recipe, rank = run.history, run.recipe, run.workers.rank
    rows = shares(len(data), recipe, history.epoch, run.workers)
    seeds = [_seed(recipe, history.epoch, step, rank) for step in range(len(rows))]
    start = history.step
    began = time.perf_counter()
    for seed, (frames, labels) in zip(seeds[start:], data.load(rows[start:], seeds[start:]), strict=True):
        torch.manual_seed(seed)  # dropout's
        value, right = run.step(wrapped, loss, frames, labels)
        history.losses += [value, right / len(labels)]
        history.step += 1
        now = time.perf_counter()
        history.seconds, began = history.seconds + now - began, now
        shown(history.epoch * len(rows) + history.step)
        if time.monotonic() - run.saved >= save_every:
            run.save()
            began = time.perf_counter()
    means = [sum(history.losses[i::2]) / len(rows) for i in (0, 1)]
    history.rows.append(
        {"epoch": history.epoch + 1, "loss": means[0], "train_accuracy": 100 * means[1], "seconds": history.seconds}
    )
    history.epoch, history.step, history.losses = history.epoch + 1, 0, []
    run.save()


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RunError("--tensorboard needs the tensorboard package: pip install tensorboard") from None
    return SummaryWriter(str(folder / "tensorboard"))


@torch.no_grad()
def predict(net: nn.Module, data: Data, batch: int, seed: int = 0, workers: Workers | None = None) -> tuple[Tensor, Tensor]:
    """Predicted and true labels [samples]: the class with the most spikes (the largest sum over time)."""
    workers = workers or Workers()
    net.to(workers.device).eval()
    rows = list(torch.arange(len(data)).split(batch))
    mine = range(workers.rank, len(rows), workers.count)
    predictions, labels = torch.zeros(2, len(data), dtype=torch.long, device=workers.device)
    loaded = data.load([rows[i] for i in mine], [hash((seed, i)) & 0x7FFFFFFF for i in mine])
    for i, (frames, truth) in zip(mine, loaded, strict=True):
        functional.reset_net(net)
        predictions[rows[i]] = net(frames.to(workers.device)).float().sum(0).argmax(1)
        labels[rows[i]] = truth.to(workers.device)
    functional.reset_net(net)
    return workers.sum(predictions).cpu(), workers.sum(labels).cpu()
