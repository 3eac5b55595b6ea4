"""What a net puts out on given batches, how often its neurons fire, and how long it takes, in turns with others."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import BatchError
from sj_tac.rewrites.gate import as_defined
from sj_tac.tuning.batches import Batch

INSTANCES = 3

Decode = Callable[[Any], Tensor]
Metric = Callable[[nn.Module, list[Any]], float]


def run(net: nn.Module, frames: Tensor) -> Any:
    """The net's output on frames as it takes them, from its reset state."""
    host.reset_memories(net)
    return net(frames)


def run_batch(net: nn.Module, batch: Batch, number: int) -> Any:
    """``run``, of which a failure names the batch. Raises BatchError."""
    try:
        return run(net, batch.fresh())
    except Exception as error:
        raise BatchError(
            f"{type(net).__name__} does not run on {described(batch, number)} ({type(error).__name__}: {error})"
        ) from error


def described(batch: Batch, number: int) -> str:
    return f"batch {number} of shape {list(batch.given.shape)}"


def scores(net: nn.Module, batches: Sequence[Batch], decode: Decode | None = None, seed: int = 0) -> Tensor:
    """Class scores [N, C] of all samples, in float64; the net is left as it was. Random encoders start from ``seed``.

    ``decode`` makes scores [N, C] of an output; otherwise an output [T, N, C] is averaged over time, [N, C] taken as it is.

    Raises:
        BatchError: the net does not run on a batch, its output needs a ``decode``, or it is not finite.
    """
    found = []
    with host.looked_at(net):
        torch.manual_seed(seed)
        for number, batch in enumerate(batches):
            found.append(batch_scores(net, batch, number, decode))
    return torch.cat(found)


def batch_scores(net: nn.Module, batch: Batch, number: int, decode: Decode | None) -> Tensor:
    """``scores`` of one batch, with the net and the random numbers as they are. Raises BatchError as ``scores``."""
    where = described(batch, number)
    score = decoded(run_batch(net, batch, number), batch, decode, where)
    if not torch.isfinite(score).all():
        raise BatchError(f"the output of {type(net).__name__} on {where} is NaN or infinite")
    return score.double()


def decoded(output: Any, batch: Batch, decode: Decode | None, where: str) -> Tensor:
    """Class scores [N, C] of an output. Raises BatchError where it needs a ``decode``."""
    samples = batch.samples
    if decode is not None:
        output = decode(output)
    elif isinstance(output, Tensor) and output.dim() == 3:
        # Where T is N, a net that takes [N, T, ...] is taken to give that, too.
        if batch.batch_first and output.shape[:2] == (samples, batch.steps):
            output = output.float().mean(1)
        elif output.shape[1] == samples:
            output = output.float().mean(0)
    if isinstance(output, Tensor) and output.dim() == 2 and output.shape[0] == samples:
        return output
    got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    what = "what decode returned" if decode is not None else "the net's output"
    raise BatchError(
        f"{what} on {where} is {got}; class scores are [T, N, C] or [N, C] with N = {samples}: pass "
        "decode=, a function from the net's output to scores [N, C]"
    )


def is_scores(output: Any, batch: Batch) -> bool:
    """Whether an output can be read as class scores without a ``decode``."""
    try:
        decoded(output, batch, None, "")
    except BatchError:
        return False
    return True


def firing(net: nn.Module, batches: Sequence[Batch]) -> dict[str, tuple[float, float]]:
    """Spikes per neuron and step of every spiking layer, with its neurons per sample."""
    totals: dict[str, list[float]] = {}

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def count(module: nn.Module, args: Any, spikes: Tensor) -> None:
            held = totals.setdefault(name, [0.0, 0.0, float(spikes[0, 0].numel())])
            held[0] += spikes.double().mean().item() * spikes.shape[1]
            held[1] += spikes.shape[1]

        return count

    with host.looked_at(net), as_defined():
        handles = [m.register_forward_hook(hook(n)) for n, m in net.named_modules() if isinstance(m, host.neuron.BaseNode)]
        try:
            for batch in batches:
                run(net, batch.fresh())
        finally:
            for handle in handles:
                handle.remove()
    return {name: (total / count, neurons) for name, (total, count, neurons) in totals.items()}


def in_turns(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    tick: Callable[[], None] = lambda: None,
    *,
    again: bool = False,
    until: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of every run in every round. Whatever else the machine does at a moment, it does to every run.

    ``again``: each runs once before it is timed. Behind ``until``, a time of ``time.monotonic``, no round begins.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cuda = torch.cuda.is_available()
    for _ in range(rounds):
        if time.monotonic() >= until:
            break
        for name, call in runs.items():
            if again:
                call()
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if cuda:
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
            tick()
    return seconds


def milliseconds(nets: Mapping[str, nn.Module], frames: Tensor, rounds: int) -> dict[str, float]:
    """Medians of interleaved runs on frames as they take them; the nets are left as they were.

    In its turn every net runs twice, and the second run counts: in use a net follows itself, not another that just filled
    the caches. Short runs get more rounds, up to five times as many, until half a second has been measured.
    """
    return medians(_seconds(nets, frames, rounds, 0.5, ""))


def milliseconds_afresh(
    make: Mapping[str, Callable[[], nn.Module]], frames: Tensor, rounds: int, slow: str
) -> dict[str, float]:
    """The medians of ``seconds_afresh``."""
    return medians(seconds_afresh(make, frames, rounds, slow))


def seconds_afresh(
    make: Mapping[str, Callable[[], nn.Module]],
    frames: Tensor,
    rounds: int,
    slow: str,
    *,
    until: float = math.inf,
    seconds: dict[str, list[float]] | None = None,
) -> dict[str, list[float]]:
    """What the medians of ``milliseconds`` are taken of, from nets made ``INSTANCES`` times.

    Where weights and buffers come to lie changes a small net's time. The net named ``slow`` has ``rounds`` rounds; short
    runs of the others get more, until some seconds have been measured.

    Args:
        until: a time of ``time.monotonic``, behind which no round begins but the first.
        seconds: filled with what was measured, all nets at a time, for who is interrupted.
    """
    seconds = {} if seconds is None else seconds
    instances = min(INSTANCES, rounds)
    for i in range(instances):
        if i and time.monotonic() >= until:
            break
        nets = {name: build() for name, build in make.items()}
        taken = _seconds(nets, frames, -(-rounds // instances), 1.0, slow, until)
        seconds.update({name: seconds.get(name, []) + more for name, more in taken.items()})
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Milliseconds of every net."""
    return {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}


def _seconds(
    nets: Mapping[str, nn.Module], frames: Tensor, rounds: int, enough: float, slow: str, until: float = math.inf
) -> dict[str, list[float]]:
    with ExitStack() as stack:
        for net in nets.values():
            stack.enter_context(host.looked_at(net))
        calls = {name: (lambda net=net: run(net, frames)) for name, net in nets.items()}
        first = in_turns(calls, 1, again=True)
        taken = in_turns(calls, rounds, again=True, until=until)
        if not all(taken.values()):  # the time was over: what was to warm up is all there is
            return first
        fast = {name: call for name, call in calls.items() if name != slow}
        total = sum(statistics.fmean(taken[name]) for name in fast)
        more = in_turns(fast, max(0, min(4 * rounds, int(enough / total) - rounds)), again=True, until=until) if fast else {}
        for name, seconds in more.items():
            taken[name] += seconds
    return taken


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """Share of samples whose prediction [N] is their label [N]."""
    return (predictions == labels).double().mean().item()


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise BatchError where a label [N] is none of the classes that scores [N, classes] tell apart."""
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        found = sorted(set(wrong.tolist()))
        raise BatchError(
            f"labels {found[:5]}{' ...' if len(found) > 5 else ''} are none of the classes 0 .. {classes - 1} that "
            "the net's output has; drop those samples, or pass decode=, a function from the net's output to scores [N, C]"
        )


def labels_of(batches: Iterable[Batch], why: str) -> Tensor:
    """The labels of all samples [N]. Raises BatchError where there are none."""
    found = [batch.labels for batch in batches if batch.labels is not None]
    if not found:
        raise BatchError(f"{why} needs labels: give batches as (frames [T, N, C, H, W], labels [N])")
    return torch.cat(found)
