"""Published models, as they are: what converts, what is refused and why, whether it is right, how fast it is.

    python -m benchmarks.published --repos FOLDER [--only NAME ...] [--seconds 20] [--no-speed] [--resume]

FOLDER holds checkouts, each in a folder of its repository's name; those that are there are tried, each model in a process of
its own. A run of all models takes hours; it writes docs/published.md and benchmarks/results/published-DATE.json after each,
and ``--resume`` goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.measure import RESULTS
from benchmarks.published.cases import CASES, REPOSITORIES, Case
from benchmarks.published.examining import Row, examine
from benchmarks.published.page import page
from sj_tac.support import machine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "published.md"


def checked_out(folder: Path) -> dict[str, str]:
    """Which repositories lie in the folder, with their commits where git knows them."""
    found = {}
    for name in REPOSITORIES:
        if (folder / name).is_dir():
            git = ["git", "-C", str(folder / name), "rev-parse", "HEAD"]
            own = (folder / name / ".git").exists()
            found[name] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() if own else ""
    return found


def clone_commands(folder: Path) -> str:
    return "\n".join(f"  git clone https://github.com/{owner} {folder / name}" for name, owner in REPOSITORIES.items())


def broken(name: str, case: Case, why: str) -> Row:
    return Row(name, case.repository, case.file, list(case.shape), case.size, bool(case.registered), broken=why)


def in_own_process(name: str, options: argparse.Namespace) -> Row:
    """Examine one model in a process of its own: modules of two repositories have the same names."""
    case = CASES[name]
    threads = str(options.threads)
    own = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "row.json"
        command = [sys.executable, "-m", "benchmarks.published", "--repos", str(options.repos), "--only", name]
        command += ["--seconds", str(options.seconds), "--threads", threads, "--row", str(out)]
        try:
            done = subprocess.run(
                command, env=os.environ | own, capture_output=True, text=True, timeout=options.limit, check=False
            )
        except subprocess.TimeoutExpired:
            return broken(name, case, f"not done after {options.limit:g} s")
        if not out.exists():
            last = next(iter(reversed(done.stderr.strip().splitlines())), "")
            return broken(name, case, f"its process ended with {done.returncode}: {last}")
        return Row(**json.loads(out.read_text()))


def kept(path: Path, where: dict[str, Any], options: argparse.Namespace) -> dict[str, Row]:
    """Rows that an earlier run of today found on this machine, but for those that are wanted again."""
    old = json.loads(path.read_text()) if path.exists() else {"machine": None, "rows": []}
    if old["machine"] != where:
        return {}
    return {row["name"]: Row(**row) for row in old["rows"] if row["name"] not in (options.only or ())}


def told(row: Row) -> str:
    """A row in one line, for who waits."""
    if row.broken:
        return f"{row.name}: does not run: {row.broken}"
    failed = f", {len(row.failures)} checks failed" if row.failures else ""
    return f"{row.name}: {row.converted} of {row.convs} convert{failed}"


def write_row(name: str, options: argparse.Namespace) -> None:
    """The child's part: examine the model, whatever it prints."""
    import torch

    torch.set_num_threads(options.threads)
    with contextlib.redirect_stdout(io.StringIO()):
        row = examine(name, CASES[name], options.repos, options.seconds)
    options.row.write_text(json.dumps(asdict(row)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repos", type=Path, required=True, metavar="FOLDER", help="where the checkouts lie")
    parser.add_argument("--only", action="append", metavar="NAME", help="only these models (default: all that are there)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the speed of one model (default 20)")
    parser.add_argument("--no-speed", action="store_const", const=0.0, dest="seconds", help="measure no speed")
    parser.add_argument("--threads", type=int, default=1, help="of every model (default 1)")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a model is given up (default 1800)")
    resume = "keep what was found today on this machine, but for the models of --only, and examine the rest"
    parser.add_argument("--resume", action="store_true", help=resume)
    parser.add_argument("--out", type=Path, help="the page, its JSON beside it (default: docs/published.md for all models)")
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.only or () if name not in CASES]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: the models are {', '.join(map(repr, CASES))}")
    options.commits = checked_out(options.repos)
    if not options.commits:
        parser.error(
            f"no known repository in {options.repos}; it should hold one or more of\n{clone_commands(options.repos)}"
        )
    there = [name for name, case in CASES.items() if case.repository in options.commits]
    options.names = [name for name in there if options.resume or name in (options.only or CASES)]
    if not options.names:
        wanted = CASES[options.only[0]].repository
        parser.error(
            f"--only {options.only[0]!r} needs git clone https://github.com/{REPOSITORIES[wanted]} {options.repos / wanted}"
        )
    return options


def main() -> None:
    options = arguments()
    if options.row:
        write_row(options.names[0], options)
        return
    where = machine.describe() | {"threads": options.threads}
    result: dict[str, Any] = {"machine": where, "seconds": options.seconds, "commits": options.commits}
    path = options.out.with_suffix(".json") if options.out else RESULTS / f"published-{where['date']}.json"
    found = kept(path, where, options) if options.resume else {}
    for name in track([n for n in options.names if n not in found], description="published", transient=True):
        found[name] = in_own_process(name, options)
        print(told(found[name]), flush=True)
        rows = [found[n] for n in options.names if n in found]
        # After every model: hours of work outlive whatever ends this process.
        if options.out or options.resume or not options.only:
            path.write_text(json.dumps(result | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
            (options.out or PAGE).write_text(page(rows, result))
        elif len(rows) == len(options.names):
            print(page(rows, result))


if __name__ == "__main__":
    main()
