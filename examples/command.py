"""What the scripts of the paper's experiments share on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import study
import torch
from datasets import DataError
from rich.console import Console
from training import RunError, Workers

from sj_tac import Policy
from sj_tac.errors import SjTacError


def parser(description: str, out: str) -> argparse.ArgumentParser:
    """The options that all of them have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path(out), help=f"folder of checkpoints and results (default {out})")
    made.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run of everything per seed (default 0)")
    made.add_argument("--quick", action="store_true", help="the CPU protocol of minutes: fewer samples, epochs and pixels")
    made.add_argument("--epochs", type=int, help="passes over the training set, in place of the protocol's")
    made.add_argument("--batch", type=int, help="samples per step, in place of the protocol's")
    made.add_argument("--rate", type=float, help="Adam's learning rate, in place of the protocol's")
    made.add_argument("--tune-epochs", type=int, help="passes of the fine-tuning after conversion; 0 leaves it out")
    made.add_argument("--ks", type=int, nargs="+", help="frames per convolution, in place of the protocol's")
    made.add_argument("--rounds", type=int, default=7, help="timed rounds; medians are shown (default 7)")
    made.add_argument("--device", default="auto", help="cpu, cuda, or auto (default)")
    made.add_argument("--amp", action="store_true", help="autocast: bfloat16, or float16 with scaled gradients")
    made.add_argument("--threads", type=int, help="CPU threads of torch")
    made.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints (default 60)")
    made.add_argument("--tensorboard", action="store_true", help="also write TensorBoard event files")
    names = [study.BASELINE, *study.policies(2, "")]
    made.add_argument("--rows", nargs="+", choices=names, help="only these rows of the table; the baseline always is one")
    made.add_argument("--fused-baseline", action="store_true", help="train baselines as sj_tac runs them at k=1: sooner")
    made.add_argument("--operators", nargs="+", choices=study.OTHERS, help="the paper's other operators, from scratch, too")
    made.add_argument("--policy", type=Path, help="a policy file of your own, as rows of its own")
    made.add_argument("--k", type=int, default=2, help="frames per convolution where --policy does not say (default 2)")
    return made


def own_policy(args: argparse.Namespace) -> dict[str, tuple[Policy, int]]:
    """The rows of --policy: the policy under its file's name, with --k. Raises PolicyError before anything is trained."""
    return {f"policy {args.policy.name}": (Policy.load(args.policy), args.k)} if args.policy else {}


def adjusted(protocol: study.Protocol, args: argparse.Namespace) -> study.Protocol:
    """The protocol with what the command line says instead; its name then tells of it."""
    changes = {key: value for key in ("epochs", "batch", "rate") if (value := getattr(args, key)) is not None}
    recipe = replace(protocol.recipe, **changes, amp=args.amp)
    ks = tuple(args.ks) if args.ks else None
    tune = protocol.tune_epochs if args.tune_epochs is None else args.tune_epochs
    made = replace(
        protocol,
        recipe=recipe,
        tune_epochs=tune,
        ks_scratch=ks or protocol.ks_scratch,
        ks_converted=ks or protocol.ks_converted,
        only=tuple(args.rows) if args.rows else protocol.only,
        operators=tuple(args.operators) if args.operators else protocol.operators,
    )
    return made if made == protocol else replace(made, name=f"{protocol.name}, changed")


def options(args: argparse.Namespace, workers: Workers) -> study.Options:
    console = Console() if sys.stdout.isatty() else Console(width=125)
    return study.Options(args.out, workers, args.save_every, args.tensorboard, console, args.fused_baseline)


def parsed(made: argparse.ArgumentParser, **least: int) -> argparse.Namespace:
    """The command line. Numbers that can mean nothing end here, before anything is read; ``least`` names more of them."""
    args = made.parse_args()
    for name, low in {"epochs": 1, "batch": 1, "rounds": 1, "threads": 1, "tune_epochs": 0, "k": 1, **least}.items():
        value = getattr(args, name)
        if value is not None and value < low:
            made.error(f"--{name.replace('_', '-')} {value}: at least {low}")
    if args.rate is not None and not 0 < args.rate < float("inf"):
        made.error(f"--rate {args.rate}: a positive number")
    if args.ks and min(args.ks) < 2:
        made.error(f"--ks {min(args.ks)}: at least 2 frames per convolution; k=1 is the baseline")
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def run(main: Callable[[], None]) -> None:
    """``main``, whose known errors become one line on stderr and exit status 2."""
    try:
        main()
    except (DataError, RunError, SjTacError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None
