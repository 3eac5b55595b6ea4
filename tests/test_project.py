"""The project itself: README code runs, imports stay light, files stay short, every public name is documented."""

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sj_tac

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SOURCES = [p for folder in ("sj_tac", "rewrites", "examples", "tests") for p in ROOT.joinpath(folder).rglob("*.py")]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_readme_code_runs_as_printed(capsys):
    namespace = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["votes"].shape == (8, 1, 11)
    assert "5 converted" in capsys.readouterr().out


def test_readme_is_short_and_names_both_commands():
    commands = blocks("bash")
    assert "pip install -e . && python examples/quickstart.py\n" in commands
    assert 'pip install -e ".[test]" && pytest\n' in commands
    assert len(README.splitlines()) <= 130


def test_readme_shows_what_was_measured():
    measured = (ROOT / "benchmarks" / "results" / "int8-cpu-2026-11-29.md").read_text()
    rows = {}
    for line in re.findall(r"^\| paper-dvs (.*) \|$", measured, re.MULTILINE):
        k, _, _, compiled, *found = line.removeprefix("| ").split(" | ")
        rows[k] = [f"{float(ms):.0f} ms, {speed}" for ms, speed in zip(found[:2], found[3:5], strict=True)]
        assert f"takes {float(compiled):.0f} ms" in README
    shown = re.findall(r"^\| sj_tac preserve k=(\d) \| (.+x) \| (.+x) \|$", README, re.MULTILINE)
    assert {k: found for k, *found in shown} == rows


# Each needs a process of its own.
FIRST = [
    "sj_tac",
    "sj_tac.rewrites.gate",
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("sj_tac.rewrites.pipeline", "sj_tac.verdicts")),
]


@pytest.mark.parametrize("first", FIRST)
def test_any_module_can_be_imported_first_and_none_starts_cuda(first):
    script = (
        f"import {first}, sys, torch\n"
        "import sj_tac\n"
        "assert callable(sj_tac.convert) and callable(sj_tac.report) and callable(sj_tac.plan)\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'cupy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Rooms of the house from the ground floor up: a file or folder of sj_tac. Each imports what is below it.
FLOORS = [
    {"errors", "host"},
    {"support", "kernels", "compat"},
    {"verdicts", "policy", "functional", "definition"},
    {"rewrites"},
    {"operators", "experimental", "tuning", "quantized"},
    {"batchnorm"},
    {"conversion", "capturing", "saving", "exporting"},
    {"cli", "__main__", "schedule"},
]


def test_imports_point_downwards():
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    for path in [*ROOT.joinpath("sj_tac").rglob("*.py"), *ROOT.joinpath("rewrites").rglob("*.py")]:
        own = path.relative_to(ROOT).parts
        here = "rewrites" if own[0] == "rewrites" else own[1].removesuffix(".py")
        if here == "__init__":
            continue  # its names are loaded when they are asked for
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sj_tac":
                parts = node.module.split(".")
                there = parts[1] if len(parts) > 1 else node.names[0].name
                assert here == there or floor[there] < floor[here] or {here, there} == {"cli", "__main__"}, (
                    f"{path.name} imports {node.module}"
                )


def test_no_module_has_the_name_of_a_public_function():
    functions = {n for n in sj_tac.__all__ if inspect.isfunction(getattr(sj_tac, n))}
    assert not functions & {p.stem for p in ROOT.joinpath("sj_tac").iterdir()}


def test_modules_that_tests_import_by_name_have_names_of_their_own():
    """pytest puts every folder of tests on the path, beside examples: what comes first would hide the other."""
    folders = [ROOT / "examples", *(p for p in ROOT.joinpath("tests").rglob("*") if p.is_dir()), ROOT / "tests"]
    names = [path.stem for folder in folders for path in folder.glob("*.py") if path.stem not in ("conftest", "__init__")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_files_are_short():
    assert SOURCES
    assert {p.name: n for p in SOURCES if (n := len(p.read_text().splitlines())) > 400} == {}


def test_functions_take_few_parameters():
    found = {}
    for path in SOURCES:
        # A command's parameters are the command line's options; an older SpikingJelly's constructors are what they were.
        if path.parts[-2:] == ("cli", "app.py") or path.parts[-2] == "clock_driven":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                given = node.args
                names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                count = len(names) - (names[:1] in (["self"], ["cls"]))
                if count > 8:
                    found[f"{path.name}:{node.lineno}"] = count
    assert found == {}


def test_public_names_are_documented():
    for name in sj_tac.__all__:
        value = getattr(sj_tac, name)
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            text = inspect.getdoc(value)
            assert "aises" in text, f"{name} does not say what it raises"


def test_public_functions_take_every_parameter_by_name_and_options_by_name_alone():
    for name in sj_tac.__all__:
        value = getattr(sj_tac, name)
        if inspect.isfunction(value):
            kinds = [p.kind for p in inspect.signature(value).parameters.values()]
            assert inspect.Parameter.POSITIONAL_ONLY not in kinds, name
            assert kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) <= 4, name


def test_the_version_is_one():
    from importlib.metadata import version

    assert version("sj_tac") == sj_tac.__version__
    assert (ROOT / "sj_tac" / "py.typed").exists()


def test_the_arithmetic_in_the_docs_is_what_the_script_prints():
    from benchmarks import arithmetic

    page = (ROOT / "docs" / "gpu.md").read_text()
    for precision in arithmetic.PEAK:
        assert arithmetic.table(precision) in page
    # One layer by hand: 128 -> 128 at 64 x 64, T = 16, batch 16, float32, k = 2.
    frame = 16 * 128 * 64 * 64
    cost = arithmetic.ours(arithmetic.LAYERS[1], 2, 16, 16, 4)
    assert cost.conv_bytes == 8 * 2 * frame * 4
    assert cost.neuron_bytes == 8 * frame * 4 + 8 * frame // 4 * 4 + frame * 4
    assert cost.other_bytes == 0
    assert cost.neuron_steps == 16 * frame
    assert cost.flops == 2 * 9 * 128 * 128 * 64 * 64 * 16 * 8


def test_the_cuda_sources_are_package_data():
    from fnmatch import fnmatch

    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["sj_tac.kernels.gpu"]
    kernels = ROOT / "sj_tac" / "kernels" / "gpu"
    sources = [str(p.relative_to(kernels)) for p in (kernels / "src").iterdir()]
    assert len(sources) >= 8
    assert all(any(fnmatch(source, pattern) for pattern in patterns) for source in sources)


def test_the_registers_in_the_docs_are_those_that_the_script_found():

    from benchmarks import registers

    newest = max((ROOT / "benchmarks" / "results").glob("cuda-registers-*.json"))
    rows = json.loads(newest.read_text())["kernels"]
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert registers.page_table(rows) in page
    assert len(rows) == 64
    spilled = {a: max(row[a]["spill_bytes"] for row in rows.values()) for a in next(iter(rows.values()))}
    assert len(spilled) >= 7
    assert all(most <= (16 if a in ("sm_80", "sm_90") else 32) for a, most in spilled.items())


def test_the_wheel_has_every_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [path.parent.relative_to(ROOT) for path in (ROOT / "sj_tac").rglob("__init__.py")]
    found += [Path("sj_tac") / path.parent.relative_to(ROOT) for path in (ROOT / "rewrites").rglob("__init__.py")]
    assert sorted(listed) == sorted({".".join(path.parts) for path in found})
