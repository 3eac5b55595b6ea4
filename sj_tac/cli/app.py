"""``sj-tac``: plan, convert, match, diagnose, sensitivity, search, bench, env.

Exit status: 0 done; 1 the answer is no (nothing can be converted, no policy meets the goal); 2 wrong input; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

# What takes seconds to import is imported by the command that needs it: help and slips come at once.
import sj_tac
from sj_tac.cli import named, results
from sj_tac.cli.named import UsageError
from sj_tac.errors import ConversionError, SearchError, SearchInterrupted, SjTacError

app = typer.Typer(
    name="sj-tac",
    help=(
        "Temporal aggregation for pretrained SpikingJelly nets. A model is given as package.module:factory, data as a .npy, "
        ".npz or .pt of frames [T, N, C, H, W] (with labels [N]) or as package.module:factory.\n\n"
        "Exit status: 0 done; 1 nothing can be converted, or no policy meets the goal; 2 wrong input; 130 interrupted."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[str, typer.Argument(help="package.module:factory, called without arguments; it returns the net")]
Checkpoint = Annotated[Path | None, typer.Option(help="its state_dict (torch.save or safetensors); no code is loaded")]
Data = Annotated[str, typer.Option(help="frames: .npy, .npz, .pt, or package.module:factory")]
Sample = Annotated[str | None, typer.Option(help="frames, as a sample input: .npy, .npz, .pt, or package.module:factory")]
BatchSize = Annotated[int, typer.Option(min=1, help="what frames of a file are divided into")]
BatchFirst = Annotated[
    bool, typer.Option("--batch-first", help="the net takes, and the frames are, [N, T, ...] instead of [T, N, ...]")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of a table")]
AsHtml = Annotated[Path | None, typer.Option("--html", help="the report as an HTML page of its own, too")]
PolicyOption = Annotated[str, typer.Option(help="preserve, collapse, keep, preserve:4, preserve:4:int8, or a policy file")]
K = Annotated[int, typer.Option(help="frames per convolution where the policy does not say")]
Rounds = Annotated[int, typer.Option(min=1, help="timed rounds; medians are shown")]
Seed = Annotated[int, typer.Option(help="of everything random")]
Kinds = Annotated[list[str], typer.Option("--layers", help="conv, linear; may be given again")]
Modes = Annotated[list[str], typer.Option("--mode", help="preserve, collapse; may be given again")]
NetFile = Annotated[Path, typer.Option(help="the net: .safetensors (sj_tac.load reads it), else torch.save, whole")]
EPILOG = "Example: "


def _loader(model: str | None) -> Any:
    """What reads models and data, once the model is known to have a module."""
    if model is not None:
        named.check(model, "model")
    from sj_tac.cli import load

    return load


def _example(held: list[Any] | None, net: Any) -> Any:
    """A few samples of the batches, as an example input."""
    from sj_tac.tuning.batches import read

    return None if held is None else next(read(held, net)).example()


@app.command(epilog=EPILOG + "sj-tac plan nets:DigitNet --policy collapse --k 4 --data digits.npz")
def plan(
    model: Model,
    checkpoint: Checkpoint = None,
    policy: PolicyOption = "preserve",
    k: K = 2,
    data: Sample = None,
    batch_first: BatchFirst = False,
    html: AsHtml = None,
    as_json: AsJson = False,
) -> None:
    """A dry run: what would become of every convolution, and why. Exit status 1 where none can be converted."""
    named.check_outputs({"html": html}, model=model, checkpoint=checkpoint, policy=policy, data=data)
    load = _loader(model)
    net = load.model(model, checkpoint)
    held = load.batches(data, 2, batch_first, net) if data else None
    found = sj_tac.plan(net, policy, k, example_input=_example(held, net))
    results.write_html(found, html)
    results.show(found, as_json, html)
    if not found.converted:
        raise typer.Exit(1)


@app.command(epilog=EPILOG + "sj-tac convert nets:EventNet --checkpoint events.pt --policy policy.yaml --out fast.pt")
def convert(
    model: Model,
    out: NetFile,
    checkpoint: Checkpoint = None,
    policy: Annotated[
        str, typer.Option(help="preserve:4, collapse ..., a policy file, or auto (needs --data)")
    ] = "preserve",
    k: K = 2,
    data: Sample = None,
    match: Annotated[bool, typer.Option("--match", help="correct it by --data, without labels")] = False,
    recalibrate: Annotated[bool, typer.Option("--recalibrate", help="re-estimate BatchNorms on --data")] = False,
    batch_size: BatchSize = 32,
    batch_first: BatchFirst = False,
    html: AsHtml = None,
    as_json: AsJson = False,
) -> None:
    """Convert a net and save it whole: class, weights and policy. Its state_dict fits the source's class, strictly."""
    named.check_outputs({"out": out, "html": html}, model=model, checkpoint=checkpoint, policy=policy, data=data)
    load = _loader(model)
    net = load.model(model, checkpoint)
    results.check_can_be_whole(net, out)
    held = load.batches(data, batch_size, batch_first, net) if data else None
    if held is None and (recalibrate or match or policy == "auto"):
        asked = "--recalibrate" if recalibrate else "--match" if match else "--policy auto"
        raise UsageError(f"{asked} needs --data, batches to measure on")
    calibration = held if policy == "auto" else None
    wanted = held if match else None
    fast = sj_tac.convert(net, policy, k, example_input=_example(held, net), calibration=calibration, match=wanted)
    if recalibrate:
        sj_tac.recalibrate(fast, held)
    results.write(fast, out)
    # On the page with rates and times, where there are frames to measure them on.
    found = sj_tac.report(fast, held if html is not None else None)
    results.write_html(found, html)
    results.show(found, as_json, out, html)


@app.command(
    epilog=EPILOG + "sj-tac match nets:EventNet --checkpoint events.pt --policy policy.yaml --data events.npz --out fast.pt"
)
def match(
    model: Model,
    data: Data,
    checkpoint: Checkpoint = None,
    policy: PolicyOption = "preserve",
    k: K = 2,
    method: Annotated[str, typer.Option(help="auto, moments, rates, or both")] = "auto",
    out: NetFile | None = None,
    batch_size: BatchSize = 32,
    batch_first: BatchFirst = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Convert a net, and correct it by unlabeled data so that it answers as its source does."""
    named.check_outputs({"out": out}, model=model, checkpoint=checkpoint, policy=policy, data=data)
    load = _loader(model)
    net = load.model(model, checkpoint)
    results.check_can_be_whole(net, out)
    held = load.batches(data, batch_size, batch_first, net)
    fast = sj_tac.convert(net, policy, k, example_input=_example(held, net))
    with results.what_there_is(as_json, out, lambda found: results.write(fast, out)):
        found = sj_tac.match(fast, held, method=method, seed=seed)
    results.write(fast, out)
    results.show(found, as_json, out)


@app.command(epilog=EPILOG + "sj-tac diagnose --data gestures.npz")
def diagnose(
    data: Data,
    model: Annotated[str | None, typer.Argument(help="package.module:factory: test every layer's input, too")] = None,
    checkpoint: Checkpoint = None,
    level: Annotated[float, typer.Option(help="of the tests")] = 0.05,
    margin: Annotated[float, typer.Option(help="effects up to this are negligible")] = 0.05,
    batch_size: BatchSize = 32,
    batch_first: BatchFirst = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Is time signal (preserve it) or noise (collapse it) in this data?"""
    load = _loader(model)
    net = None if model is None else load.model(model, checkpoint)
    try:
        held = load.batches(data, batch_size, batch_first, net)
        with results.what_there_is(as_json, None):
            found = sj_tac.diagnose(held, net, level=level, margin=margin, seed=seed)
    except ValueError as error:
        raise error if isinstance(error, SjTacError) else UsageError(str(error)) from error
    results.show(found, as_json)


@app.command(epilog=EPILOG + "sj-tac sensitivity nets:EventNet --checkpoint events.pt --data events.npz --out layers.json")
def sensitivity(
    model: Model,
    data: Data,
    checkpoint: Checkpoint = None,
    ks: Annotated[list[int], typer.Option("--k", help="may be given again")] = [2, 4, 8],  # noqa: B006
    modes: Modes = ["preserve", "collapse"],  # noqa: B006
    layers: Kinds = ["conv"],  # noqa: B006
    rounds: Rounds = 5,
    out: Annotated[Path | None, typer.Option(help="JSON, and a heat map as PNG beside it")] = None,
    batch_size: BatchSize = 32,
    batch_first: BatchFirst = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Convert every layer alone: what it changes, and what it saves."""
    named.check_outputs({"out": out}, pictures=("out",), model=model, checkpoint=checkpoint, data=data)
    load = _loader(model)
    net = load.model(model, checkpoint)
    held = load.batches(data, batch_size, batch_first, net)
    with results.what_there_is(as_json, out, partial(results.save, out=out)):
        found = sj_tac.sensitivity(net, held, ks, modes, layers=layers, rounds=rounds, seed=seed)
    results.save(found, out)
    results.show(found, as_json, out)


@app.command(epilog=EPILOG + "sj-tac search nets:EventNet --checkpoint events.pt --data events.npz --out policy.yaml")
def search(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="the policy file that is written")],
    checkpoint: Checkpoint = None,
    metric: Annotated[str | None, typer.Option(help="accuracy, agreement, or package.module:function(net, batches)")] = None,
    max_drop: Annotated[float, typer.Option(help="of the metric, absolute")] = 0.01,
    speedup: Annotated[float | None, typer.Option(help="search the best metric at this speed instead")] = None,
    time_limit: Annotated[float | None, typer.Option(help="seconds, of everything")] = None,
    ks: Annotated[list[int] | None, typer.Option("--k", help="may be given again (default: 1, 2, 3, 4, 6, 8 ... T)")] = None,
    modes: Modes = ["preserve", "collapse"],  # noqa: B006
    layers: Kinds = ["conv"],  # noqa: B006
    rounds: Rounds = 9,
    match: Annotated[bool, typer.Option(help="correct every candidate by --data before it is measured")] = True,
    holdout: Annotated[
        float | None,
        typer.Option(help="share of samples that only tell how sure it is (default: 0.25 of 400 or more)"),
    ] = None,
    log: Annotated[Path | None, typer.Option(help="goes on from here after a kill")] = None,
    html: AsHtml = None,
    evidence: Annotated[Path | None, typer.Option(help="JSON of everything tried, and the Pareto frontier as PNG")] = None,
    batch_size: BatchSize = 32,
    batch_first: BatchFirst = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """The fastest policy within an accuracy budget, as a policy file. Exit status 1 where there is none."""
    begun = time.monotonic()
    written = {"out": out, "log": log, "html": html, "evidence": evidence}
    named.check_outputs(written, pictures=("evidence",), model=model, checkpoint=checkpoint, data=data, metric=metric)
    load = _loader(model)
    net = load.model(model, checkpoint)
    held = load.batches(data, batch_size, batch_first, net)
    measure: Any = named.function(metric, "metric") if metric and ":" in metric else metric
    left = None if time_limit is None else time_limit - (time.monotonic() - begun)
    if left is not None and left <= 0:
        raise UsageError(f"--time-limit {time_limit:g} was over before the model and its data were read")
    try:
        found = sj_tac.search(
            net, held, metric=measure, max_drop=max_drop, speedup=speedup, time_limit=left, ks=ks or None, modes=modes,
            layers=layers, rounds=rounds, log=log, out=evidence, seed=seed, match=match, holdout=holdout,
        )  # fmt: skip
    except SearchInterrupted as stopped:
        if stopped.policy is not None:
            stopped.policy.save(out)
            print(f"sj-tac: the best so far is written: {out}", file=sys.stderr)
        goes_on = f"the same command goes on from {log}" if log else "with --log FILE the same command would go on"
        print(f"sj-tac: interrupted after {len(stopped.evidence.trials)} policies; {goes_on}", file=sys.stderr)
        raise typer.Exit(130) from None
    found.save(out)
    if html is not None:
        dry = sj_tac.plan(net, found, example_input=_example(held, net))
        results.write_html(replace(dry, title=f"{type(net).__name__}, searched", evidence=found.evidence), html)
    results.show(found.evidence, as_json, *written.values())
    print(f"Written: {out}", file=sys.stderr)


@app.command(epilog=EPILOG + "sj-tac bench nets:DigitNet --data digits.npz --policy preserve:2 --policy policy.yaml")
def bench(
    model: Model,
    data: Data,
    checkpoint: Checkpoint = None,
    policies: Annotated[list[str], typer.Option("--policy", help="preserve:4, or a policy file; again for more rows")] = [  # noqa: B006
        "preserve:2",
        "preserve:4",
        "collapse:4",
    ],
    rounds: Rounds = 9,
    match: Annotated[
        str | None, typer.Option(help="match the conversions by these frames: a file, or package.module:factory")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="compare with torch.compile as well (minutes)")] = False,
    keep_memory: Annotated[
        bool,
        typer.Option("--keep-memory", help="let the process keep the memory it frees (glibc): faster rows, all of them"),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON, and a PNG beside it")] = None,
    batch_size: BatchSize = 100,
    batch_first: BatchFirst = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """The net beside its conversions: accuracy, agreement, firing rate, MACs, milliseconds."""
    from sj_tac.support import memory

    named.check_outputs(
        {"out": out}, pictures=("out",), model=model, checkpoint=checkpoint, data=data, policy=policies, match=match
    )
    if keep_memory and not memory.keep_memory():
        print("sj-tac: --keep-memory does nothing here: the allocator is not glibc's", file=sys.stderr)
    load = _loader(model)
    net = load.model(model, checkpoint)
    held = load.batches(data, batch_size, batch_first, net)
    by = load.batches(match, batch_size, batch_first, net) if match else None
    with results.what_there_is(as_json, out, partial(results.save, out=out)):
        found = sj_tac.bench(
            net, held, policies, title=f"{model}, {data}", rounds=rounds, compiled=compiled, seed=seed, match=by
        )
    results.save(found, out)
    results.show(found, as_json, out)


@app.command(epilog=EPILOG + "sj-tac env --json")
def env(as_json: AsJson = False) -> None:
    """Machine and versions: what belongs into a report of a problem or of a figure."""
    from sj_tac.support import machine

    found = machine.describe()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(show_header=False)
    for key, value in found.items():
        table.add_row(key, str(value))
    Console().print(table)


def main() -> None:
    """The command, with every known error as one message on stderr."""
    try:
        status = app(standalone_mode=False)  # that of a typer.Exit; commands return nothing
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except (SjTacError, ImportError) as error:
        print(f"sj-tac: {error}", file=sys.stderr)
        searched = isinstance(error, SearchError) and error.evidence is not None
        raise SystemExit(1 if searched or type(error) is ConversionError else 2) from None
    except Exception as error:
        usage = getattr(error, "format_message", None)  # of the parser's own errors
        if usage is None:
            raise
        print(f"sj-tac: {usage()}; see sj-tac --help", file=sys.stderr)
        raise SystemExit(2) from None
    if status:
        raise SystemExit(status)
