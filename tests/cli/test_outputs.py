"""What the commands write: never over what they read, nor over each other; into pipes and stdout; said before the work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import csnn
from test_slips import invoked

import sj_tac
from sj_tac.errors import WriteError

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
from support import csnn

def hooked():
    net = csnn()
    net.register_forward_hook(lambda *args: None)
    return net
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("thenet.py").write_text(MODEL)
    np.save("x.npy", (np.random.default_rng(0).random((8, 6, 2, 8, 8)) < 0.4).astype(np.float32))
    for name in ("own.pt", "own.png"):
        torch.save(csnn().state_dict(), name)
    Path("own.yaml").write_text("default: {mode: preserve, k: 2}\n")
    yield tmp_path
    sys.modules.pop("thenet", None)


@pytest.fixture
def work(monkeypatch):
    """What would be too late to be told at; a call fails."""

    def too_late(*args, **kwargs):
        raise AssertionError("measured before the outputs were checked")

    for name in ("plan", "convert", "match", "sensitivity", "search", "bench"):
        monkeypatch.setattr(sj_tac, name, too_late)


NET, DATA = "thenet:csnn", ["--data", "x.npy"]
READ = [
    (["plan", NET, "--policy", "own.yaml", "--html", "own.yaml"], "--html own.yaml is the file that --policy reads"),
    (["plan", NET, "--checkpoint", "own.pt", "--html", "own.pt"], "--html own.pt is the file that --checkpoint reads"),
    (["plan", NET, *DATA, "--html", "thenet.py"], "--html thenet.py is the file that the model reads"),
    (["plan", NET, *DATA, "--html", "other"], "--html other is the file that --data reads"),
    (["bench", NET, *DATA, "--out", "x.npy"], "--out x.npy is the file that --data reads"),
    (["bench", NET, *DATA, "--match", "own.pt", "--out", "own.pt"], "--out own.pt is the file that --match reads"),
    (
        ["bench", NET, *DATA, "--checkpoint", "own.png", "--out", "own.json"],
        "the picture of --out, own.png, is the file that",
    ),
    (["bench", NET, *DATA, "--policy", "own.yaml", "--out", "own.yaml"], "--out own.yaml is the file that --policy reads"),
    (["sensitivity", NET, *DATA, "--out", "x.npy"], "--out x.npy is the file that --data reads"),
    (["search", NET, *DATA, "--out", "x.npy"], "--out x.npy is the file that --data reads"),
    (
        ["search", NET, *DATA, "--out", "p", "--checkpoint", "own.pt", "--evidence", "own.pt"],
        "--evidence own.pt is the file",
    ),
    (["search", NET, *DATA, "--out", "p", "--log", "x.npy"], "--log x.npy is the file that --data reads"),
]


@pytest.mark.parametrize(("line", "words"), READ, ids=lambda value: "" if isinstance(value, str) else None)
def test_no_command_writes_over_what_it_reads(folder, work, capsys, monkeypatch, line, words):
    os.link("x.npy", "other")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert words in invoked(monkeypatch, capsys, 2, *line)[1]
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


TWICE = [
    (["convert", NET, "--out", "o.pt", "--html", "../{here}/o.pt"], "o.pt and --out o.pt are one file"),
    (["search", NET, *DATA, "--out", "p", "--evidence", "p"], "--evidence p and --out p are one file"),
    (["search", NET, *DATA, "--out", "p.png", "--evidence", "p.json"], "the picture of --evidence, p.png, and --out p.png"),
    (["search", NET, *DATA, "--out", "p", "--log", "e.png", "--evidence", "e.json"], "e.png, and --log e.png are one file"),
    (["bench", NET, *DATA, "--out", "b.png"], "--out: b.png would be replaced by the picture"),
    (["sensitivity", NET, *DATA, "--out", "b.PNG"], "--out: b.PNG would be replaced by the picture"),
]
NOWHERE = [
    (["convert", NET, "--out", "."], "--out: . cannot be written: it is a folder"),
    (["plan", NET, "--html", ""], "--html: . cannot be written: it is a folder"),
    (["search", NET, *DATA, "--out", "."], "--out: . cannot be written: it is a folder"),
    (["search", NET, *DATA, "--out", "own.pt/p.yaml"], "own.pt is no folder"),
    (["match", NET, *DATA, "--out", "folder"], "--out: folder cannot be written: it is a folder"),
    (["bench", NET, *DATA, "--out", "/dev/fd/1"], "is no file, beside which the .png could stand"),
    (["convert", "thenet:hooked", "--out", "o.pt"], "with a name that ends in .safetensors its tensors and policy"),
    (["match", "thenet:hooked", *DATA, "--out", "o.pt"], "the net cannot be written whole"),
]


@pytest.mark.parametrize(("line", "words"), TWICE + NOWHERE, ids=lambda value: "" if isinstance(value, str) else None)
def test_what_cannot_all_be_written_is_said_before_anything_is_measured(folder, work, capsys, monkeypatch, line, words):
    Path("folder").mkdir()
    before = sorted(folder.rglob("*"))
    line = [text.format(here=folder.name) for text in line]
    assert words in invoked(monkeypatch, capsys, 2, *line)[1]
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in str(path)] == before


def test_a_mode_or_a_factory_is_no_file(folder, capsys, monkeypatch):
    invoked(monkeypatch, capsys, 0, "convert", NET, "--policy", "preserve", "--out", "preserve", "--json")
    assert Path("preserve").stat().st_size
    invoked(monkeypatch, capsys, 0, "convert", "thenet:hooked", "--out", "o.safetensors", "--json")
    assert sj_tac.load("o.safetensors", csnn()) is not None


def test_figures_and_their_picture_are_two_files_in_python_too(folder, monkeypatch):
    x = torch.from_numpy(np.load("x.npy"))
    monkeypatch.setattr("sj_tac.tuning.search.collect", lambda *args: pytest.fail("read before the outputs were checked"))
    for out, words in (("e.png", "would be replaced by the picture"), ("own.pt/e.json", "own.pt is no folder")):
        with pytest.raises(WriteError, match=words):
            sj_tac.search(csnn(), x, out=out, progress=False)
    found = sj_tac.bench(csnn(), x, ["preserve:2"], rounds=1, progress=False)
    with pytest.raises(WriteError, match="would be replaced by the picture"):
        found.save("b.png")
    assert not Path("b.png").exists()


def test_stdout_as_out_holds_nothing_else(folder):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-W", "ignore", "-m", "sj_tac", "plan", NET, "--html", "/dev/fd/1", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.lstrip().lower().startswith("<!doctype html>")
    assert done.stdout.rstrip().endswith("</html>")
    assert json.loads(done.stderr.partition("Written: /dev/fd/1")[2])["verdicts"]
