"""What commands write: never over what they read, nor over each other; said before the work; what Ctrl-C leaves."""

import json
import os
from pathlib import Path

import pytest
import torch
from support import csnn, time_by_k

import sj_tac
from sj_tac.cli import load
from sj_tac.cli.named import UsageError
from sj_tac.errors import WriteError


@pytest.fixture
def work(monkeypatch):
    """What would be too late to be told at; a call fails."""

    def too_late(*args, **kwargs):
        raise AssertionError("measured before the outputs were checked")

    for name in ("plan", "convert", "match", "sensitivity", "search", "bench"):
        monkeypatch.setattr(sj_tac, name, too_late)


NET, DATA = "mine:csnn", ["--data", "x.npy"]
READ = [
    (["plan", NET, "--policy", "own.yaml", "--html", "own.yaml"], "--html own.yaml is the file that --policy reads"),
    (["plan", NET, "--checkpoint", "own.pt", "--html", "own.pt"], "--html own.pt is the file that --checkpoint reads"),
    (["plan", NET, *DATA, "--html", "mine.py"], "--html mine.py is the file that the model reads"),
    (["plan", NET, *DATA, "--html", "other"], "--html other is the file that --data reads"),
    (["convert", NET, "--checkpoint", "own.pt", "--out", "../{here}/own.pt"], "own.pt is the file that --checkpoint reads"),
    (["match", NET, *DATA, "--policy", "own.yaml", "--out", "own.yaml"], "--out own.yaml is the file that --policy reads"),
    (["bench", NET, *DATA, "--match", "own.pt", "--out", "own.pt"], "--out own.pt is the file that --match reads"),
    (["bench", NET, *DATA, "--checkpoint", "own.png", "--out", "own.json"], "the picture of --out, own.png, is the file"),
    (["bench", NET, *DATA, "--policy", "own.yaml", "--out", "own.yaml"], "--out own.yaml is the file that --policy reads"),
    (["sensitivity", NET, *DATA, "--out", "x.npy"], "--out x.npy is the file that --data reads"),
    (["search", NET, *DATA, "--out", "p", "--evidence", "x.npy"], "--evidence x.npy is the file that --data reads"),
    (["search", NET, *DATA, "--out", "p", "--log", "x.npy"], "--log x.npy is the file that --data reads"),
]
TWICE = [
    (["convert", NET, "--out", "o.pt", "--html", "../{here}/o.pt"], "o.pt and --out o.pt are one file"),
    (["search", NET, *DATA, "--out", "p", "--evidence", "p"], "--evidence p and --out p are one file"),
    (["search", NET, *DATA, "--out", "p.png", "--evidence", "p.json"], "the picture of --evidence, p.png, and --out p.png"),
    (["bench", NET, *DATA, "--out", "b.png"], "--out: b.png would be replaced by the picture"),
    (["sensitivity", NET, *DATA, "--out", "b.PNG"], "--out: b.PNG would be replaced by the picture"),
]
NOWHERE = [
    (["convert", NET, "--out", "."], "--out: . cannot be written: it is a folder"),
    (["search", NET, *DATA, "--out", "own.pt/p.yaml"], "own.pt is no folder"),
    (["bench", NET, *DATA, "--out", "/dev/fd/1"], "is no file, beside which the .png could stand"),
    (["convert", "mine:hooked", "--out", "o.pt"], "with a name that ends in .safetensors its tensors and policy"),
    (["match", "mine:hooked", *DATA, "--out", "o.pt"], "the net cannot be written whole"),
]


@pytest.mark.parametrize(
    ("line", "words"), READ + TWICE + NOWHERE, ids=lambda value: value[0] if isinstance(value, list) else ""
)
def test_what_would_be_lost_or_cannot_be_written_is_said_before_anything_is_measured(folder, work, invoked, line, words):
    os.link("x.npy", "other")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert words in invoked(2, *[text.format(here=folder.name) for text in line])[1]
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_mode_or_a_factory_is_no_file(folder, invoked):
    invoked(0, "convert", NET, "--policy", "preserve", "--out", "preserve", "--json")
    assert Path("preserve").stat().st_size
    invoked(0, "convert", "mine:hooked", "--out", "o.safetensors", "--json")
    assert sj_tac.load("o.safetensors", csnn()) is not None


def test_figures_and_their_picture_are_two_files_in_python_too(folder, labelled, monkeypatch):
    x, _ = labelled
    monkeypatch.setattr("sj_tac.tuning.search.collect", lambda *args: pytest.fail("read before the outputs were checked"))
    for out, words in (("e.png", "would be replaced by the picture"), ("own.pt/e.json", "own.pt is no folder")):
        with pytest.raises(WriteError, match=words):
            sj_tac.search(csnn(), x, out=out, progress=False)


def test_safetensors_in_and_out(folder, labelled, invoked):
    invoked(0, "convert", NET, "--policy", "preserve:4", "--out", "fast.safetensors")
    fast = sj_tac.load("fast.safetensors", csnn())
    assert [v.k for v in sj_tac.report(fast).converted] == [4, 4, 4]
    # What is not corrected is the source's own checkpoint; what is, is refused.
    again = load.model(NET, Path("fast.safetensors"))
    assert all(torch.equal(value, fast.state_dict()[key]) for key, value in again.state_dict().items())
    sj_tac.recalibrate(fast, labelled[0])
    for name in ("matched.safetensors", "matched.pt"):
        sj_tac.save(fast, name)
        with pytest.raises(UsageError, match="is a converted net whose statistics were corrected"):
            load.model(NET, Path(name))
    Path("torn.safetensors").write_bytes(Path("fast.safetensors").read_bytes()[:50])
    for name, words in (("torn.safetensors", "cannot be read"), ("none.safetensors", "does not exist")):
        with pytest.raises(UsageError, match=words):
            load.model(NET, Path(name))


def test_ctrl_c_in_a_search_names_the_log_and_writes_the_best_so_far(folder, invoked, monkeypatch):
    time_by_k(monkeypatch)
    line = ("search", NET, *DATA, "--metric", "mine:stopping", "--k", 1, "--k", 2, "--rounds", 1, "--out", "p.yaml")
    _, err = invoked(130, *line, "--log", "log.jsonl")
    assert "the best so far is written: p.yaml" in err
    assert "interrupted after 2 policies; the same command goes on from log.jsonl" in err
    assert sj_tac.Policy.load("p.yaml").rules


STOPPED = {
    "sensitivity": ("sj_tac.tuning.sensitivity._effect", 4, "after 3 of 4 settings", "found.json"),
    "bench": ("sj_tac.tuning.bench._rate", 2, "after 1 of", "found.json"),
    "match": ("sj_tac.tuning.matching.Fit", 2, "the net keeps the nearest", "found.safetensors"),
    "diagnose": ("sj_tac.tuning.diagnosis._refuse_recording", 3, "after 2 batches, 8 samples", None),
}


@pytest.mark.parametrize("command", STOPPED)
def test_ctrl_c_writes_and_shows_what_was_finished(folder, invoked, stop, monkeypatch, command):
    place, number, words, written = STOPPED[command]
    time_by_k(monkeypatch)
    stop(place, number)
    model = [] if command == "diagnose" else [NET]
    more = {"sensitivity": ["--k", "2", "--rounds", "1", "--mode", "preserve", "--layers", "linear", "--layers", "conv"]}
    out = ["--out", written] if written else []
    said, err = invoked(130, command, *model, *DATA, "--batch-size", "4", *more.get(command, []), *out, "--json")
    assert words in err
    found = json.loads(said)
    assert found["interrupted"] is True
    if written == "found.json":
        assert json.loads(Path(written).read_text()) == found
    elif written:
        assert found["method"] in ("none", "moments")
        assert sj_tac.load(written, csnn()) is not None


def test_ctrl_c_before_anything_was_measured_writes_nothing(folder, invoked, stop):
    stop("sj_tac.tuning.sensitivity.milliseconds", 1)
    out, err = invoked(130, "sensitivity", NET, *DATA, "--out", "found.json")
    assert out == ""
    assert "interrupted before a layer was measured" in err
    assert not Path("found.json").exists()
