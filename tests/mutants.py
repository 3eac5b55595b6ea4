"""Apply small faults to copies of the package, one at a time, and list those that the quick suite does not notice.

    pip install -e ".[mutants]"
    python tests/mutants.py --seed 1

A fault is one of cosmic-ray's mutations (KINDS below), at a place drawn by the seed: each operator, number, condition and
``except`` of the package's Python is as likely as any other, and each operator and number of its C++ (SWAPS). First the
quick suite runs once under coverage, which tells for each line the tests that execute it. Then each fault meets tests that
concern it (``Concerned.of``): those that execute its line, up to ``--budget`` seconds of them, of many files. A fault is
killed when one of them fails, and when they take more than twice that time and a minute to start (three where kernels have
to be compiled anew).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue

import parso.python.tree  # noqa: F401  (before cosmic_ray: its operators import parso in a circle otherwise)
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "sj_tac", "rewrites"

# cosmic-ray's operators that are used. Each comparison becomes its negation or moves its boundary; each arithmetic operator
# becomes its counterpart. Left out are replacements that no Python programmer would type (``a << b`` for ``a - b``).
COMPARISONS = {
    "Eq": ["NotEq"], "NotEq": ["Eq"], "Is": ["IsNot"], "IsNot": ["Is"],
    "Lt": ["LtE", "GtE"], "LtE": ["Lt", "Gt"], "Gt": ["GtE", "LtE"], "GtE": ["Gt", "Lt"],
}  # fmt: skip
ARITHMETIC = {
    "Add": "Sub", "Sub": "Add", "Mul": "Div", "Div": "Mul", "FloorDiv": "Div", "Mod": "Mul", "Pow": "Mul",
    "BitAnd": "BitOr", "BitOr": "BitAnd", "LShift": "RShift", "RShift": "LShift",
}  # fmt: skip
KINDS = [
    *(f"core/ReplaceComparisonOperator_{before}_{after}" for before, found in COMPARISONS.items() for after in found),
    *(f"core/ReplaceBinaryOperator_{before}_{after}" for before, after in ARITHMETIC.items()),
    "core/ReplaceUnaryOperator_USub_UAdd", "core/ReplaceUnaryOperator_Delete_Not", "core/AddNot",
    "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd", "core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue",
    "core/NumberReplacer", "core/ZeroIterationForLoop", "core/ExceptionReplacer",
    "core/ReplaceBreakWithContinue", "core/ReplaceContinueWithBreak",
]  # fmt: skip
# Of C++, in which each binary operator stands between spaces, and each number is written out.
SWAPS = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ", " + ": " - ", " - ": " + ",
    " * ": " / ", " / ": " * ", " % ": " * ", " && ": " || ", " || ": " && ", " & ": " | ", " | ": " & ", " << ": " >> ",
    " += ": " -= ", " |= ": " &= ", "true": "false", "false": "true",
}  # fmt: skip
TOKEN = re.compile("|".join(map(re.escape, sorted(SWAPS, key=len, reverse=True))) + r"|(?<![\w.])\d+(?![\w.])")
KERNELS = "sj_tac/kernels/cpu"


@dataclass(frozen=True)
class Fault:
    """The ``occurrence``-th place in ``file`` where the operator ``kind`` applies."""

    file: str
    kind: str
    occurrence: int
    line: int

    def code(self) -> str:
        """Return the file's text with the fault in it."""
        if self.kind == "C++":
            text = (ROOT / self.file).read_text()
            found = next(place for place in TOKEN.finditer(text, self.occurrence))
            other = SWAPS.get(found[0]) or str(int(found[0]) + 1)
            return text[: found.start()] + other + text[found.end() :]
        changed = mutate_code((ROOT / self.file).read_text(), get_operator(self.kind)(), self.occurrence)
        assert changed is not None, self
        return str(changed)

    def describe(self) -> str:
        before, after = (ROOT / self.file).read_text().splitlines(), self.code().splitlines()
        old, new = next(((a, b) for a, b in zip(before, after, strict=False) if a != b), ("", ""))
        return f"{self.file}:{self.line}  {self.kind.split('/')[-1]}\n      - {old.strip()}\n      + {new.strip()}"


def passed_over(tree: ast.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the spans in which a change is no fault of what the package computes.

    These are annotations and blocks for type checkers alone; the texts of messages (no test of the suite is about wording);
    the line that a warning names; limits and block sizes, which are constants of a module in capitals; and
    ``zip(.., strict=..)``, which only looks.
    """
    found: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(node.returns)
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            found.append(node.annotation)
        elif isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            found.append(node)
        elif isinstance(node, ast.keyword) and node.arg in ("strict", "stacklevel"):
            found.append(node.value)
    for node in tree.body:
        if isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) and t.id.isupper() for t in node.targets):
            found += [part for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
    return [
        ((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0))
        for n in found
        if isinstance(n, (ast.expr, ast.stmt))
    ]


def faults_of_kernels(file: Path) -> list[Fault]:
    """Return the faults of a file of C++; ``occurrence`` is where in the text.

    Passed over are comments, what the preprocessor reads, sizes of blocks and units (constants in capitals), and prefetches.
    """
    found, start = [], 0
    for number, line in enumerate(file.read_text().splitlines(keepends=True), 1):
        code = line.partition("//")[0]
        if not re.search(r"^\s*#|constexpr i(64|nt) [A-Z]|ask_for|prefetch|typedef|template", code):
            found += [
                Fault(str(file.relative_to(ROOT)), "C++", start + place.start(), number) for place in TOKEN.finditer(code)
            ]
        start += len(line)
    return found


def draw(seed: int, count: int) -> list[Fault]:
    """Return ``count`` faults at different places, drawn by the seed.

    A place is drawn by a hash of its file, its line's text and its column: as long as they stay, so does the draw.
    """
    places: dict[str, list[Fault]] = defaultdict(list)
    for file in sorted(p for package in PACKAGES for p in ROOT.joinpath(package).rglob("*.py")):
        text, name = file.read_text(), str(file.relative_to(ROOT))
        lines, nodes, skipped = text.splitlines(), list(ast_nodes(get_ast(text))), passed_over(ast.parse(text))
        for kind in KINDS:
            operator = get_operator(kind)()
            starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
            for occurrence, (line, column) in enumerate(starts):
                # cosmic-ray takes the star of f(*rest) and of def f(a, *, b) for a product.
                before, after = lines[line - 1][:column].rstrip()[-1:], lines[line - 1][column:]
                star = after.startswith("*") and before in ("", "(", ",", "[", "{")
                if not star and not any(begin <= (line, column) < end for begin, end in skipped):
                    place = f"{seed} {name} {lines[line - 1].strip()} {column} {lines[:line].count(lines[line - 1])}"
                    places[hashlib.sha256(place.encode()).hexdigest()].append(Fault(name, kind, occurrence, line))
    for file in sorted(ROOT.joinpath(KERNELS, "src").iterdir()):
        for fault in faults_of_kernels(file):
            place = f"{seed} {fault.file} {file.read_text()[fault.occurrence :][:40]} {fault.occurrence}"
            places[hashlib.sha256(place.encode()).hexdigest()].append(fault)
    return [random.Random(place).choice(places[place]) for place in sorted(places)[:count]]


def environment(checkout: Path, **more: str) -> dict[str, str]:
    """Return variables with which Python imports the package from ``checkout`` and leaves no bytecode of a fault there."""
    path = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **more}


def trace(folder: Path) -> None:
    """Run the quick suite of ``folder/checkout`` under coverage; write ``folder/.coverage`` and ``folder/times.xml``."""
    checkout, where = folder / "checkout", {"COVERAGE_FILE": str(folder / ".coverage"), "COVERAGE_CORE": "ctrace"}
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={folder / 'times.xml'}"]
    command += ["--cov-context=test", "--cov-report=", *(f"--cov={package}" for package in PACKAGES)]
    # Some tests fail because they are traced (they count calls or seconds): they concern no fault.
    subprocess.run(command, cwd=checkout, env=environment(checkout, **where), check=False)


def passed(folder: Path, checkout: Path) -> dict[str, float]:
    """Return the seconds of each test that passed under coverage and is still there in ``checkout``, by its id."""
    listing = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(listing, cwd=checkout, env=environment(checkout), capture_output=True, text=True, check=True)
    there, times = set(done.stdout.splitlines()), {}
    for case in ElementTree.parse(folder / "times.xml").iter("testcase"):
        if case.find("failure") is None and case.find("error") is None and case.find("skipped") is None:
            file = case.attrib["classname"].replace(".", "/") + ".py"
            times[f"{file}::{case.attrib['name']}"] = float(case.attrib["time"])
    return {test: seconds for test, seconds in times.items() if test in there}


class Concerned:
    """Which tests concern a fault, from the traced run."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.data = CoverageData(str(folder / ".coverage"))
        self.data.read()
        self.checkout = folder / "checkout"
        self.times = passed(folder, checkout)

    @cache  # noqa: B019  (one object a process)
    def lines(self, file: str) -> dict[int, set[str]]:
        """Return the tests that execute each line of a file."""
        found = self.data.contexts_by_lineno(str(self.checkout / file))
        return {line: {c.partition("|")[0] for c in contexts} & self.times.keys() for line, contexts in found.items()}

    def of(self, fault: Fault, budget: float) -> list[str]:
        """Return the tests that execute the fault's line, in the order in which to run them, ``budget`` seconds in all.

        Two orders take turns: the tests that know the file best (they execute lines of it that few others do), and quick
        tests of all test files in turn. What runs when a module is imported is no test's own line:
        there, and in an unexecuted line, all tests run that execute something of the file, and those of test files that
        name its module; of a file that no test reaches, those of its folder; of C++, those that execute the call of it.
        """
        lines = self.lines(f"{KERNELS}/call.py" if fault.kind == "C++" else fault.file)
        folder = fault.file.split("/")[1]
        tests = lines.get(fault.line, set())
        if not tests:
            tests = set().union(*lines.values()) | {t for t in self.times if t.partition("::")[0] in self.naming(fault.file)}
        if not tests:
            tests = {t for t in self.times if t.startswith(f"tests/{folder}/")}
        known: dict[str, float] = defaultdict(float)
        for found in lines.values():
            for test in found & tests:
                known[test] += 1 / len(found)
        best = sorted(tests, key=lambda test: (-known[test], test))
        chosen: dict[str, None] = {}
        for test in (test for pair in zip(best, self.in_turn(tests), strict=True) for test in pair):
            if test not in chosen and budget >= self.times[test]:
                chosen[test] = None
                budget -= self.times[test]
        return list(chosen)

    def naming(self, file: str) -> set[str]:
        """Return the test files whose text has the name of a module, as in ``from sj_tac.tuning.options import ..``."""
        module = (
            file.removesuffix(".py").replace("/", ".").removesuffix(".__init__").replace("rewrites.", "sj_tac.rewrites.")
        )
        files = self.checkout.joinpath("tests").rglob("test_*.py")
        return {str(f.relative_to(self.checkout)) for f in files if module in f.read_text()}

    def in_turn(self, tests: set[str]) -> list[str]:
        """Return the quickest test of each test file, then the second of each, and so on."""
        files: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda test: (self.times[test], test)):
            files[test.partition("::")[0]].append(test)
        rows = zip_longest(*files.values())
        return [test for row in rows for test in row if test is not None]


def run(fault: Fault, tests: list[str], checkout: Path, budget: float) -> str:
    """Return how the tests end on a checkout with the fault: the first that fails, or '' where none does."""
    file, text = checkout / fault.file, (ROOT / fault.file).read_text()
    before = file.stat()
    names = checkout / "tests-of-this-fault.txt"
    names.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", f"@{names}"]
    where, anew = environment(checkout), KERNELS in fault.file
    levels = {library.name.split("-")[1] for library in ROOT.joinpath(KERNELS).glob("*.so")}
    build = [sys.executable, f"{KERNELS}/compiling.py", *levels]
    try:
        file.write_text(fault.code())
        if anew and subprocess.run(build, cwd=checkout, env=where, capture_output=True).returncode:
            return "(does not compile)"
        limit = 2 * budget + (180 if anew else 60)
        done = subprocess.run(command, cwd=checkout, env=where, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "(too slow)"
    finally:
        file.write_text(text)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        for library in ROOT.joinpath(KERNELS).glob("*.so"):
            shutil.copy2(library, checkout / KERNELS)
    if done.returncode == 0:
        return ""
    lines = (done.stdout + done.stderr).splitlines()
    return next(
        (line.partition(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))), f"exit {done.returncode}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100, help="how many faults (default 100)")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the faults to try, as printed; all by default")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of tests that a fault meets (default 240)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="where copies and the traced run are kept, and found again")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="mutants-"))
    folder.mkdir(parents=True, exist_ok=True)
    checkouts: SimpleQueue[Path] = SimpleQueue()

    def copy(name: str) -> Path:
        shutil.rmtree(folder / name, ignore_errors=True)
        ignored = shutil.ignore_patterns(".git", ".ci", ".hypothesis", "site")
        return Path(shutil.copytree(ROOT, folder / name, symlinks=True, ignore=ignored))  # sj_tac/rewrites is a link

    if not (folder / "times.xml").exists():
        copy("checkout")
        print("tracing the quick suite ...", flush=True)
        trace(folder)
    copies = [copy(f"copy{number}") for number in range(given.processes)]
    for checkout in copies:
        checkouts.put(checkout)
    faults, concerned = draw(given.seed, given.count), Concerned(folder, copies[0])
    chosen = [i for i in range(given.count) if not given.only or i in given.only]

    def attempt(number: int) -> tuple[int, int, str]:
        tests, checkout = concerned.of(faults[number], given.budget), checkouts.get()
        try:
            return number, len(tests), run(faults[number], tests, checkout, given.budget) if tests else ""
        finally:
            checkouts.put(checkout)

    survived = []
    with ThreadPoolExecutor(given.processes) as pool:
        for done in as_completed([pool.submit(attempt, number) for number in chosen]):
            number, tests, end = done.result()
            print(f"{number:3d} {'killed  ' if end else 'SURVIVED'} {faults[number].describe()}", flush=True)
            print(f"      {end or f'{tests} tests passed'}", flush=True)
            if not end:
                survived.append(number)
    print(
        f"{len(chosen) - len(survived)} of {len(chosen)} killed; survived: {' '.join(map(str, sorted(survived))) or 'none'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
