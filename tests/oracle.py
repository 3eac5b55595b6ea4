"""Keep what ``sj_tac.plan`` and ``sj_tac.convert`` say and compute on many nets, and list what a change makes of it.

    python tests/oracle.py --write               # store it in tests/data/oracle.json.gz: some minutes on one core
    python tests/oracle.py --compare             # a table of every difference from what is stored; exit code 1 if any
    python tests/oracle.py --compare --net NAME  # of some nets alone, e.g. --net "zoo sew_resnet18"
    python tests/oracle.py --write --published FOLDER  # of the published models whose checkouts lie in FOLDER

A planner that is written anew must convert the same layers and compute the same numbers, or each difference must have an
explanation. Tests compare with definitions, which cannot show that a layer is no longer converted, and which cover few nets
of the zoo. This keeps, of the nets of benchmarks/nets.py, benchmarks/zoo_nets.py and tests/idioms, with small inputs:

- verdicts: status, reason, mode and k of every layer, by policy (``PLANS``);
- numbers, in float64 with ``fuse=False``, of one call and its backward pass from rest, in eval mode and in training mode
  (``SETTINGS``; large nets have some of them alone): the norm of each output, gradient, buffer and last voltage, and a few
  entries, so that a permutation shows;
- the class of the error and its reason code, or the beginning of its message, where something raises.

The published models are many and large: their verdicts alone are kept, in a file of their own, where --published is given.
Thresholds are moved until neurons fire. Everything is seeded, and runs in one thread: writing twice gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from spikingjelly.activation_based import functional, neuron
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oracle_nets import Subject, subjects

import sj_tac
from sj_tac.verdicts import Reason

STORE = Path(__file__).resolve().parent / "data" / "oracle.json.gz"
PUBLISHED = STORE.with_name("oracle_published.json.gz")
# Of a stored number: rounding is then a tenth of what may differ.
DIGITS = 8
# Relative to the norm of the tensor, and to the largest norm in its group: gradients that should be zero are noise.
CLOSE, NOISE = 1e-6, 1e-9
SAMPLES = 3

SETTINGS: dict[str, Any] = {
    "preserve k=1": {"mode": "preserve", "k": 1},
    "preserve k=2": {"mode": "preserve", "k": 2},
    "preserve k=3": {"mode": "preserve", "k": 3},
    "collapse count k=2": {"mode": "collapse", "k": 2, "spikes": "count"},
    "collapse binary k=2": {"mode": "collapse", "k": 2, "spikes": "binary"},
    "exact": "exact",
    "preserve k=2, learned": {"mode": "preserve", "k": 2, "weights": "learned"},
}
# What plan is asked: a setting, the kinds of layers (None: those of the net), whether it has a sample.
PLANS: dict[str, tuple[str, tuple[str, ...] | None, bool]] = {
    "preserve k=2": ("preserve k=2", None, True),
    "collapse count k=2": ("collapse count k=2", None, True),
    "exact": ("exact", None, True),
    "preserve k=2, linear too": ("preserve k=2", ("conv", "linear"), True),
    "preserve k=2, no sample": ("preserve k=2", None, False),
}
MODES = ("eval", "train")
# How closely to look at a net: what plan is asked, and which settings run in which modes. What convert says of itself under
# a setting is what plan says.
DEPTHS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "all": (tuple(PLANS), dict.fromkeys(SETTINGS, MODES)),
    "some": (tuple(PLANS)[-2:], {"preserve k=2": MODES, "collapse count k=2": ("eval",)}),
    "verdicts": (tuple(PLANS)[:2], {}),
    "step by step": (tuple(PLANS)[-1:], {}),
}


def raised(error: BaseException) -> str:
    """An error as it is kept: its class, and its reason code or the beginning of its message."""
    text = str(error)
    codes = [code for code in re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", text) if code in Reason.__members__]
    return f"{type(error).__name__}: {codes[0] if codes else text[:80]}"


def attempt(action: Callable[..., Any], *arguments: Any) -> Any:
    """What an action gives, or {"raised": ...}."""
    try:
        return action(*arguments)
    except (Exception, SystemExit) as error:
        return {"raised": raised(error)}


def policy(setting: str, layers: tuple[str, ...]) -> Any:
    """A setting as ``convert`` takes it."""
    default = SETTINGS[setting]
    return default if isinstance(default, str) else {"version": 1, "layers": list(layers), "default": default}


def verdicts(report: Any) -> dict[str, str]:
    """The verdict of each layer in a few words."""
    said = {v.layer: [v.status, v.mode, v.k and f"k={v.k}", v.reason] for v in report.verdicts}
    return {layer: " ".join(str(word) for word in words if word) for layer, words in said.items()}


def planned(net: nn.Module, x: Tensor, layers: tuple[str, ...], plans: tuple[str, ...]) -> dict[str, Any]:
    """What ``plan`` says under each policy."""

    def asked(setting: str, kinds: tuple[str, ...] | None, sampled: bool) -> dict[str, str]:
        return verdicts(sj_tac.plan(net, policy(setting, kinds or layers), example_input=x if sampled else None))

    return {name: attempt(asked, *PLANS[name]) for name in plans}


def numbers(value: Tensor, samples: int = SAMPLES) -> list[float]:
    """The norm of a tensor and a few of its entries, rounded."""
    flat = value.detach().double().flatten()
    # Places that no stride of a map or a batch divides.
    places = [(i * 7919 + 13) % flat.numel() for i in range(samples)] if flat.numel() else []
    return [float(f"{number:.{DIGITS}g}") for number in (flat.norm().item(), *(flat[p].item() for p in places))]


def called(net: nn.Module, x: Tensor, mode: str) -> dict[str, dict[str, list[float]]]:
    """Outputs, gradients, voltages and buffers of a call from rest, in groups; buffers are put back."""
    net.train(mode == "train")
    functional.reset_net(net)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    x = x.clone().requires_grad_()
    # Dropouts draw, and convert has drawn before.
    torch.manual_seed(1)
    outputs = [y for y in torch.utils._pytree.tree_leaves(net(x)) if isinstance(y, Tensor)]
    torch.autograd.backward([y.flatten() @ torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype) for y in outputs])
    gradients = {n: p.grad for n, p in [("input", x), *net.named_parameters()] if p.grad is not None}
    ends = [*gradients][:2] + [*gradients][-1:]
    voltages = {n: m.v for n, m in net.named_modules() if isinstance(m, neuron.BaseNode) and isinstance(m.v, Tensor)}
    moved = {n: b for n, b in net.named_buffers() if b.is_floating_point() and not torch.equal(b, before[n])}
    found = {
        "outputs": {str(i): numbers(y) for i, y in enumerate(outputs)},
        "gradients": {n: numbers(g, SAMPLES if n in ends else 0) for n, g in gradients.items()},
        "voltages": {n: numbers(v, 1) for n, v in voltages.items()},
        "buffers": {n: numbers(b, 0) for n, b in moved.items()},
    }
    with torch.no_grad():
        for name, buffer in net.named_buffers():
            buffer.copy_(before[name])
    net.zero_grad()
    functional.reset_net(net)
    return found


def converted(net: nn.Module, x: Tensor, chosen: Any, modes: tuple[str, ...]) -> dict[str, Any]:
    """What the converted net says of itself, and what it computes in each mode."""
    fast = sj_tac.convert(net, chosen, example_input=x, fuse=False)
    with torch.no_grad():
        for name, parameter in fast.named_parameters():
            if name.endswith("tac_logits"):
                # Learned weights begin as those that the decay gives: others show whether they are used.
                parameter.add_(torch.linspace(-0.5, 0.7, parameter.numel(), dtype=x.dtype).view(parameter.shape))
    return {"verdicts": verdicts(sj_tac.report(fast))} | {mode: attempt(called, fast, x, mode) for mode in modes}


def looked_at(subject: Subject) -> dict[str, Any]:
    """All that is kept of one net."""
    made = attempt(subject.make)
    if isinstance(made, dict):
        return {"make": made}
    net, x = made
    plans, settings = DEPTHS[subject.depth]
    found: dict[str, Any] = {"plan": planned(net, x, subject.layers, plans)}
    if settings:
        # A difference here is none of ours, and explains those below.
        found["source"] = attempt(called, net, x, "eval")
    net.eval()
    for setting, modes in settings.items():
        found[setting] = attempt(converted, net, x, policy(setting, subject.layers), modes)
    return found


def every(wanted: list[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each net's name and what is found, as it is found."""
    return ((name, looked_at(subject)) for name, subject in subjects().items() if name in (wanted or [name]))


def one_published(name: str, folder: Path) -> dict[str, Any]:
    """The verdicts on a published model."""
    from benchmarks.published import building
    from benchmarks.published.cases import CASES

    torch.set_num_threads(1)
    made = attempt(building.make, CASES[name], folder)
    if isinstance(made, dict):
        return {"make": made}
    return {"plan": planned(made, building.sample(CASES[name], 0), ("conv",), tuple(PLANS))}


def every_published(folder: Path, wanted: list[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same of published models, each in a process of its own: modules of two repositories have the same names."""
    from benchmarks.published.cases import CASES

    for name in [n for n, case in CASES.items() if (folder / case.repository).is_dir() and (not wanted or n in wanted)]:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield name, attempt(pool.submit(one_published, name, folder).result)


def apart(then: list[float], now: list[float], largest: float) -> bool:
    """Whether the numbers of a tensor differ by more than rounding."""
    allowed = CLOSE * abs(then[0]) + NOISE * largest
    # str: NaN is equal to itself.
    alike = [abs(a - b) <= allowed or str(a) == str(b) for a, b in zip(then, now, strict=False)]
    return len(then) != len(now) or not all(alike)


def differences(then: Any, now: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Where two results differ: the names that lead there, and both values, None where there is none."""
    if isinstance(then, dict) and isinstance(now, dict):
        norms = [abs(value[0]) for value in then.values() if isinstance(value, list)]
        for key in dict.fromkeys([*then, *now]):
            a, b = then.get(key), now.get(key)
            if isinstance(a, list) and isinstance(b, list):
                if apart(a, b, max(norms)):
                    yield (*path, key), a, b
            else:
                yield from differences(a, b, (*path, key))
    elif then != now:
        yield path, then, now


def table(found: dict[str, Any], stored: dict[str, Any]) -> Table:
    """A line for each difference."""
    shown = Table("net", "setting", "what", "then", "now", title="Differences from what is stored", title_justify="left")
    for path, then, now in differences(stored, found):
        net, setting, *what = (*path, "", "")
        shown.add_row(net, setting, " / ".join(filter(None, what)), short(then), short(now))
    return shown


def short(value: Any) -> str:
    """A value in a cell of the table."""
    if isinstance(value, dict) and set(value) == {"raised"}:
        return f"raised {value['raised']}"
    if isinstance(value, dict):
        return f"{len(value)} entries: {', '.join(map(str, [*value][:3]))}"
    return "-" if value is None else " ".join(f"{v:.6g}" for v in value) if isinstance(value, list) else str(value)


def run(results: Iterator[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Everything that is found, with a line for each net for who waits."""
    found, start = {}, time.perf_counter()
    for name, result in results:
        found[name] = result
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        start = time.perf_counter()
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="store what is found now")
    action.add_argument("--compare", action="store_true", help="list what differs from what is stored")
    parser.add_argument("--net", action="append", metavar="NAME", help="with --compare: these alone")
    parser.add_argument("--published", type=Path, metavar="FOLDER", help="checkouts of published models: look at those")
    options = parser.parse_args()
    if options.write and options.net:
        parser.error("--write stores every net: drop --net")
    return options


def main() -> int:
    """Look, then write or compare."""
    options = arguments()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = PUBLISHED if options.published else STORE
    found = run(every_published(options.published, options.net) if options.published else every(options.net))
    if options.write:
        path.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0))
        return 0
    stored = json.loads(gzip.decompress(path.read_bytes()))
    wanted = {name: value for name, value in stored.items() if not options.net or name in options.net}
    shown = table(found, wanted)
    differ = shown.row_count > 0
    Console(width=None if sys.stdout.isatty() else 200).print(shown if differ else f"no difference in {len(found)} nets")
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
