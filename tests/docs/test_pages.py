"""The how-to pages: their Python runs as printed, their commands are ones that the command line takes."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

import sj_tac
from sj_tac.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Run by tests of its own: it needs Lightning and Accelerate, and trains.
ELSEWHERE = {"lightning"}
RUN = [DOCS / "index.md", *sorted(p for p in (DOCS / "howto").glob("*.md") if p.stem not in ELSEWHERE)]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Pages whose Python needs what they do not say (a model, a GPU): their commands alone are looked at.
REFERRED = ("choosing.md", "export.md", "gpu.md", "results.md", "tables.md", "speed.md", "paper.md")
ALL = [*RUN, ROOT / "README.md", *(DOCS / name for name in REFERRED)]


def blocks(path, language):
    return [(more, text) for found, more, text in FENCE.findall(path.read_text()) if found == language]


def named(path):
    return str(path.relative_to(ROOT))


# What the pages say that their code prints or makes, in this order.
PRINTED = {
    "index": [r"conv_fc\.0 +│ converted .* 2 ", "5 converted, 0 stretched, 0 kept, 0 refused"],
    "convert": ["the net +│ collapse", "2 converted", "2 converted", r"^│ 2 .* 0\.\d*[1-9]", "agreement", "collapse k=4"],
    "policy": [r"conv_fc\.0 +│ kept ", "4 converted", r"rules\[0\] .*conv_fc\.00.* did you mean 'conv_fc\.0'"],
    "not-fused": [r"^cpp, fused$", r"^reference \| not fused: store_v_seq", r"^cpp, fused$"],
    "int8": [r"^0 ", r"^4 "],
    "own-neuron": [
        r"converted .* 4 .*reference .*a SoftLIF runs its own steps",
        r"^0\.5$",
        "a LIFSpike runs its own",
        "1 converted",
    ],
    "batch-first": ["1 converted", "1 converted", "^False$"],
    "hooks": [r"\[8, 2, 8, 16, 16\]", r"^\{'2': 0\.\d*[1-9]", r"^\[\('2', 0\.\d*[1-9]", r"\[8, 2, 8, 8, 8\]"],
    "save-load": ["2 converted", r"fast\.safetensors does not fit the model: .*v_threshold=1\.0"],
    "fine-tune": [r"^\['0\.tac_logits', '4\.tac_logits'\]$", r"\[8, 2, 8, 8, 8\]"],
    "memory": [],
}


def run(path):
    """A page's Python blocks, one after the other; a YAML block with a title is the file of that name."""
    for more, text in blocks(path, "yaml"):
        (title,) = re.findall(r'title="([\w.-]+)"', more)
        Path(title).write_text(text)
    namespace = {"__name__": "page"}
    for _, text in blocks(path, "python"):
        exec(compile(text, str(path), "exec"), namespace)


@pytest.mark.captured
@pytest.mark.parametrize("path", [path for path in RUN if blocks(path, "python")], ids=named)
def test_the_python_of_a_page_runs_as_printed(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    if "keep_memory()" in path.read_text():
        # What it sets is for the whole process and cannot be taken back.
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-W", "ignore", __file__, str(path)], env=environment, check=True)
    else:
        run(path)
    left = capsys.readouterr().out
    for pattern in PRINTED[path.stem]:
        found = re.search(pattern, left, re.MULTILINE)
        assert found, f"{pattern} is not in what is left of the output:\n{left}"
        left = left[found.end() :]


def commands(path):
    """The lines of a page's shell blocks, without comments, at their line breaks put together."""
    for _, text in blocks(path, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                if words:
                    yield words


COMMANDS = [(path, words) for path in ALL for words in commands(path)]


@pytest.mark.parametrize(
    ("path", "words"),
    [(path, words) for path, words in COMMANDS if words[0] == "sj-tac"],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else named(value),
)
def test_a_command_is_one_that_the_command_line_takes(path, words):
    """It is parsed, every option and value of it, and not run."""
    group = typer.main.get_command(app)
    context = group.make_context("sj-tac", [*words[1:]])
    name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    parsed = command.make_context(name, rest, parent=context)
    assert parsed.params


def test_scripts_and_modules_that_commands_run_exist():
    for path, words in COMMANDS:
        if words[0] == "python":
            script = words[1:] if words[1] != "-m" else words[2:]
            there = importlib.util.find_spec(script[0]) if words[1] == "-m" else (ROOT / script[0]).exists()
            assert there, f"{path.name}: {' '.join(words)}"


def test_the_policy_page_has_every_key_and_a_valid_file():
    page = DOCS / "howto" / "policy.md"
    ((_, text),) = blocks(page, "yaml")
    sj_tac.Policy.from_dict(yaml.safe_load(text))
    for key in sj_tac.policy.Settings.model_fields:
        assert f"| `{key}` |" in page.read_text()


def test_the_command_page_has_every_command():
    text = (DOCS / "howto" / "cli.md").read_text()
    commands = typer.main.get_command(app).commands
    assert len(commands) >= 8
    for name in commands:
        assert f"| `{name}` |" in text
        assert f"\nsj-tac {name}" in text


if __name__ == "__main__":
    run(Path(sys.argv[1]))
