"""An event camera's recording as a stream of micro-batches: k frames a call, voltages carried from call to call.

    python examples/streaming.py --budget-ms 50                           # the shipped N-MNIST recordings
    python examples/streaming.py --data FOLDER_OR_NPZ --budget-ms 30 --live
    python examples/streaming.py --layout dvs128 --data FOLDER --checkpoint net.pt --frame-ms 60 --budget-ms 300

A prediction waits for the k frames of its group and for the net. --budget-ms is the most that both may take: the largest
k that keeps to it, and keeps up with the camera, is chosen by measuring; --k says it instead. Micro-batches of whole groups
give what one call on the whole recording gives; --chunk with others is said to be something else. Prints tables, and writes
a plot.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import command
import datasets
import dvs128
import nets
import nmnist
import numpy as np
import quickstart
import torch
from datasets import DataError
from rich.console import Console
from rich.table import Table
from spikingjelly.activation_based import functional
from torch import Tensor, nn

import sj_tac

KS = (1, 2, 4, 8, 16)
PERCENTILES = (50, 95, 99)
# matplotlib's backends that draw into files alone.
HEADLESS = ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template")


@dataclass(frozen=True)
class Recordings:
    """Recordings [T, N, 2, H, W] with labels [N], and the milliseconds that a frame lasts."""

    frames: Tensor
    labels: Tensor
    frame_ms: float


@dataclass(frozen=True)
class Step:
    """One micro-batch: frames up to ``until`` are seen, their votes [t, N, classes], milliseconds of the call."""

    until: int
    votes: Tensor
    ms: float


@dataclass(frozen=True)
class Candidate:
    """A k with what a prediction waits for: its group's frames, and 95 % of the calls."""

    k: int
    wait_ms: float
    call_ms: float

    @property
    def latency_ms(self) -> float:
        return self.wait_ms + self.call_ms

    def fits(self, budget_ms: float) -> bool:
        """Within the budget, and done before the next micro-batch is there."""
        return self.latency_ms <= budget_ms and self.call_ms <= self.wait_ms


def is_whole(steps: int, chunk: int, k: int) -> bool:
    """True where every micro-batch but the last is whole groups, so that streaming gives what one call gives."""
    return chunk % k == 0 or steps <= chunk


@torch.no_grad()
def stream(net: nn.Module, frames: Tensor, chunk: int) -> Iterator[Step]:
    """Call the net on ``chunk`` frames of [T, N, 2, H, W] at a time; from rest, with the voltages of the call before."""
    functional.reset_net(net)
    for start in range(0, frames.shape[0], chunk):
        piece = frames[start : start + chunk]
        begin = time.perf_counter()
        votes = net(piece)
        yield Step(start + len(piece), votes, (time.perf_counter() - begin) * 1000)
    functional.reset_net(net)


@torch.no_grad()
def whole(net: nn.Module, frames: Tensor) -> Tensor:
    """The votes of one call on all frames, from rest."""
    functional.reset_net(net)
    votes = net(frames)
    functional.reset_net(net)
    return votes


def measured(source: nn.Module, frames: Tensor, frame_ms: float, ks: Iterable[int]) -> list[Candidate]:
    """What every k costs on a recording [T, 1, ...], in micro-batches of one group."""
    found = []
    for k in ks:
        net = converted(source, k)
        for _ in stream(net, frames, k):  # kernels are compiled, memory is fetched
            pass
        calls = [step.ms for _ in range(3) for step in stream(net, frames, k) if step.until % k == 0]
        found.append(Candidate(k, k * frame_ms, float(np.percentile(calls, 95))))
    return found


def chosen(candidates: Sequence[Candidate], budget_ms: float) -> Candidate:
    """The largest k that fits. Raises DataError where none does."""
    fitting = [c for c in candidates if c.fits(budget_ms)]
    if not fitting:
        least = min(candidates, key=lambda c: c.latency_ms)
        late = "" if least.call_ms <= least.wait_ms else ", and the camera is faster than the net"
        raise DataError(
            f"no k keeps to --budget-ms {budget_ms:g}: the least is {least.latency_ms:.1f} ms at k={least.k}, of which a "
            f"frame of the camera takes {least.wait_ms / least.k:.1f}{late}"
        )
    return max(fitting, key=lambda c: c.k)


def converted(source: nn.Module, k: int) -> nn.Module:
    return sj_tac.convert(source, "preserve", k)


def load(args: argparse.Namespace) -> tuple[nn.Module, Recordings]:
    """The net in eval mode, and what is streamed. Raises DataError."""
    if args.layout == "dvs128":
        if args.data is None or args.checkpoint is None or args.frame_ms is None:
            raise DataError("--layout dvs128 needs --data, --checkpoint (of nets.GestureNet) and --frame-ms")
        found = dvs128.load(args.data, "auto", args.steps, args.size, 0).test
        ((frames, labels),) = found.load([torch.arange(min(args.recordings, len(found)))], [0])
        net = nets.GestureNet(dvs128.CLASSES, size=args.size)
        frame_ms = args.frame_ms
    else:
        frames, labels, _ = nmnist.recordings(args.data, args.steps)
        net, frame_ms = nets.EventNet(), args.frame_ms or frame_milliseconds(args.data, args.steps)
    path = args.checkpoint or quickstart.HERE / "checkpoints" / "events.pt"
    try:
        net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError) as error:
        raise DataError(f"--checkpoint {path} does not fit {type(net).__name__} ({str(error).splitlines()[0]})") from None
    return net.eval(), Recordings(frames[:, : args.recordings], labels[: args.recordings], frame_ms)


def frame_milliseconds(path: Path | None, steps: int) -> float:
    """How long a frame of recordings in an .npz lasts, on average. Raises DataError where it is no .npz."""
    if path is not None and path.is_dir():
        raise DataError(f"--data {path}: say with --frame-ms how long a frame lasts (N-MNIST: about 300 ms / --steps)")
    archive = datasets.read_recordings(path or datasets.SHIPPED_EVENTS)
    return float(archive["dt_us"].astype(np.int64).sum()) / 1000 / len(archive["label"]) / steps


@dataclass(frozen=True)
class Streamed:
    """What came of streaming: every call, predictions over time, and the comparison with one call on all frames.

    Attributes:
        until: frames seen behind each micro-batch; predictions [micro-batches, N]: the class that leads by then.
        ms: of every call. difference: the largest of a vote to one call's; agreeing: recordings with its prediction.
    """

    until: list[int]
    predictions: Tensor
    ms: list[float]
    difference: float
    agreeing: int

    def percentiles(self) -> dict[int, float]:
        """Milliseconds of a micro-batch by percentile."""
        return {p: float(np.percentile(self.ms, p)) for p in PERCENTILES}


def run(net: nn.Module, frames: Tensor, chunk: int) -> Streamed:
    """Stream every recording of [T, N, ...] by itself, as a camera gives it."""
    ms, leading, until, difference, agreeing = [], [], [], 0.0, 0
    for n in range(frames.shape[1]):
        recording = frames[:, n : n + 1]
        steps = list(stream(net, recording, chunk))
        ms += [step.ms for step in steps]
        until = [step.until for step in steps]
        votes = torch.cat([step.votes for step in steps])[:, 0]
        leading.append(torch.stack([votes[:u].mean(0).argmax() for u in until]))
        expected = whole(net, recording)[:, 0]
        difference = max(difference, float((votes - expected).abs().max()))
        agreeing += int(votes.mean(0).argmax() == expected.mean(0).argmax())
    return Streamed(until, torch.stack(leading, 1), ms, difference, agreeing)


def table(found: Streamed, labels: Tensor, chunk: int, frame_ms: float) -> Table:
    """Accuracy over time, and the latency of a micro-batch."""
    said = ", ".join(f"p{p} {ms:.2f} ms" for p, ms in found.percentiles().items())
    late = chunk * frame_ms + found.percentiles()[95]
    made = Table(
        title=f"{len(found.ms)} micro-batches of {chunk} frames: {said}",
        caption=f"A prediction is {late:.1f} ms behind the first event of its micro-batch (p95).",
    )
    for column in ("recording seen, ms", "accuracy %"):
        made.add_column(column, justify="right")
    for i in sorted({round(q * (len(found.until) - 1)) for q in (0, 0.25, 0.5, 0.75, 1)}):
        right = (found.predictions[i] == labels).float().mean()
        made.add_row(f"{found.until[i] * frame_ms:.0f}", f"{100 * right:.1f}")
    return made


def told(found: Streamed, steps: int, chunk: int, k: int, count: int) -> str:
    """How the stream compares with one call on the whole recording."""
    same = (
        f"predictions are the same in {found.agreeing} of {count} recordings, votes differ by up to {found.difference:.3g}"
    )
    if is_whole(steps, chunk, k):
        return f"Micro-batches of {chunk} frames are whole groups of k={k}, as in one call on the whole recording: {same}."
    return (
        f"Micro-batches of {chunk} frames are NO whole groups of k={k}: groups begin anew with each call, so this is "
        f"another function than one call on the whole recording; {same}. Take a multiple of {k} for --chunk."
    )


class Plot:
    """Votes of one recording as they come, and the milliseconds of the calls. Raises ImportError without matplotlib.

    Attributes:
        live: it is shown as it comes, which needs a backend that opens windows. backend: matplotlib's.
    """

    def __init__(self, live: bool) -> None:
        import matplotlib

        if not live:
            matplotlib.use("Agg")
        from matplotlib import pyplot

        self.pyplot, self.backend = pyplot, pyplot.get_backend().lower()
        self.live = live and self.backend not in HEADLESS
        self.figure, (self.votes, self.times) = pyplot.subplots(1, 2, figsize=(10, 3.6))

    def follow(self, net: nn.Module, frames: Tensor, chunk: int, frame_ms: float) -> None:
        """Stream one recording [T, 1, ...], at the camera's pace where it is shown live."""
        seen: list[Tensor] = []
        for step in stream(net, frames, chunk):
            seen.append(step.votes[:, 0])
            if self.live:
                self._draw(torch.cat(seen), chunk, frame_ms)
                self.pyplot.pause(max(0.001, (chunk * frame_ms - step.ms) / 1000))
        self._draw(torch.cat(seen), chunk, frame_ms)

    def _draw(self, votes: Tensor, chunk: int, frame_ms: float) -> None:
        mean = votes.cumsum(0) / torch.arange(1, len(votes) + 1)[:, None]
        at = [*range(chunk, len(votes), chunk), len(votes)]
        self.votes.clear()
        for label in range(mean.shape[1]):
            self.votes.step(
                [u * frame_ms for u in at], [float(mean[u - 1, label]) for u in at], where="post", label=str(label)
            )
        self.votes.set(xlabel="ms of the recording", ylabel="mean vote", title="one recording")
        self.votes.legend(fontsize=6, ncol=2, frameon=False)

    def save(self, found: Streamed, path: Path) -> None:
        self.times.hist(found.ms, bins=40, color="#2a6fbb")
        for p, ms in found.percentiles().items():
            self.times.axvline(ms, color="#c0504d", linewidth=1)
            self.times.annotate(f"p{p}", (ms, self.times.get_ylim()[1] * 0.92), fontsize=7)
        self.times.set(xlabel="ms of a micro-batch", title="latency of the net")
        self.figure.tight_layout()
        self.figure.savefig(path, dpi=120)
        self.pyplot.close(self.figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of N-MNIST or DVS128 Gesture, or an .npz (default: as shipped)")
    parser.add_argument("--layout", choices=["nmnist", "dvs128"], default="nmnist", help="what --data is")
    parser.add_argument("--checkpoint", type=Path, help="a state_dict of nets.EventNet, or of nets.GestureNet for dvs128")
    parser.add_argument("--steps", type=int, default=nets.EVENTS_T, help="frames of a recording (default 32)")
    parser.add_argument("--size", type=int, choices=[32, 64, 128], default=64, help="pixels of a frame's side, of dvs128")
    parser.add_argument("--frame-ms", type=float, help="how long a frame lasts (default: as the .npz says)")
    parser.add_argument("--budget-ms", type=float, default=50.0, help="from a group's first event to its prediction (50)")
    parser.add_argument("--k", type=int, help="frames per convolution, instead of --budget-ms")
    parser.add_argument("--chunk", type=int, help="frames of a micro-batch (default: k)")
    parser.add_argument("--recordings", type=int, default=20, help="how many are streamed (default 20)")
    parser.add_argument("--live", action="store_true", help="show the first recording at the camera's pace")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--png", type=Path, default=Path("streaming.png"), help="where the plot goes")
    args = parser.parse_args()
    for name in ("steps", "k", "chunk", "recordings", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: at least 1")
    for name in ("frame_ms", "budget_ms"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {value}: a positive number")
    return args


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    source, data = load(args)
    console = Console()
    ks = [args.k] if args.k else [k for k in KS if k <= args.steps]
    candidates = measured(source, data.frames[:, :1], data.frame_ms, ks)
    choice = Table(title=f"A frame is {data.frame_ms:.2f} ms, the budget {args.budget_ms:g} ms")
    for column in ("k", "waits for frames, ms", "net, p95, ms", "latency, ms", "fits"):
        choice.add_column(column, justify="right")
    for c in candidates:
        numbers = (f"{c.wait_ms:.1f}", f"{c.call_ms:.2f}", f"{c.latency_ms:.1f}")
        choice.add_row(str(c.k), *numbers, "yes" if c.fits(args.budget_ms) else "no")
    console.print(choice)
    candidate = candidates[0] if args.k else chosen(candidates, args.budget_ms)
    net, chunk = converted(source, candidate.k), args.chunk or candidate.k
    found = run(net, data.frames, chunk)
    console.print(table(found, data.labels, chunk, data.frame_ms))
    console.print(told(found, data.frames.shape[0], chunk, candidate.k, data.frames.shape[1]))
    try:
        plot = Plot(args.live)
    except ImportError as error:
        console.print(f"No plot: {error}")
        return
    if args.live and not plot.live:
        console.print(
            f"No window: matplotlib's backend here is {plot.backend}, which draws into files alone. With a display and a "
            "window toolkit (pip install PyQt6) the recording is shown as it comes."
        )
    plot.follow(net, data.frames[:, :1], chunk, data.frame_ms)
    plot.save(found, args.png)
    console.print(f"Plot: {args.png}")


if __name__ == "__main__":
    command.run(main)
