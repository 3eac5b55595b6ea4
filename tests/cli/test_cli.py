"""Commands as a user runs them: what they print, write and end with; wrong input is one message and writes nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import csnn, time_by_k

import sj_tac
from sj_tac.cli import load

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
COMMANDS = ("plan", "convert", "match", "diagnose", "sensitivity", "search", "bench", "env")
NET = "support:csnn"


def test_a_process_whose_stdout_is_the_page_has_nothing_else_in_it():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-W", "ignore", "-m", "sj_tac", "plan", NET, "--html", "/dev/fd/1", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.lstrip().lower().startswith("<!doctype html>")
    assert done.stdout.rstrip().endswith("</html>")
    assert json.loads(done.stderr.partition("Written: /dev/fd/1")[2])["verdicts"]


def test_help_names_every_command_and_gives_an_example_of_each(invoked):
    text, _ = invoked(0, "--help")
    assert "Exit status" in text
    for command in COMMANDS:
        assert command in text
        assert f"Example: sj-tac {command}" in " ".join(invoked(0, command, "--help")[0].split())
    assert json.loads(invoked(0, "env", "--json")[0])["torch"] == torch.__version__
    assert torch.__version__ in invoked(0, "env")[0]


def test_from_plan_to_a_net_that_is_matched_or_recalibrated(folder, invoked):
    common = (NET, "--checkpoint", "own.pt", "--data", "x.npz", "--batch-size", 6)
    plan = json.loads(invoked(0, "plan", *common[:5], "--policy", "own.yaml", "--json")[0])
    assert [(v["status"], v["k"]) for v in plan["verdicts"]] == [("converted", 2)] * 3
    assert "NO_NEURON" in invoked(1, "plan", "mine:bare")[0]
    invoked(0, "convert", *common, "--policy", "collapse", "--k", 4, "--recalibrate", "--out", "fast.pt", "--json")
    fast = torch.load("fast.pt", weights_only=False)
    assert [(v.mode, v.k) for v in sj_tac.report(fast).converted] == [("collapse", 4)] * 3
    assert sj_tac.recalibrate(fast, undo=True) == ["1", "5"]
    found = json.loads(invoked(0, "match", *common, "--k", 8, "--out", "fast.pt", "--json")[0])
    assert [c["method"] for c in found["candidates"]] == ["none", "moments", "rates", "both"]
    notes = str(sj_tac.report(torch.load("fast.pt", weights_only=False)).notes)
    assert f"matched by {found['method']!r}" in notes or found["method"] == "none"
    out, _ = invoked(0, "match", *common, "--method", "moments")
    assert "agreement" in out
    assert "rates:" not in out
    invoked(0, "convert", *common, "--match", "--out", "again.pt")
    assert "matched" in str(sj_tac.report(torch.load("again.pt", weights_only=False)).notes)


def test_figures_of_layers_and_nets_are_shown_and_written(folder, invoked, monkeypatch):
    time_by_k(monkeypatch)
    common = (NET, "--data", "x.npz", "--batch-size", 6, "--rounds", 1)
    shown, _ = invoked(0, "sensitivity", *common, "--k", 4, "--mode", "preserve", "--out", "layers.json")
    assert "predictions changed" in shown
    assert [(e["layer"], e["k"]) for e in json.loads(Path("layers.json").read_text())["effects"]] == [
        ("0", 4), ("4", 4), ("8", 4),
    ]  # fmt: skip
    shown, _ = invoked(0, "bench", *common, "--policy", "preserve:8", "--policy", "own.yaml", "--out", "rows.json")
    assert "support:csnn, x.npz" in shown
    rows = json.loads(Path("rows.json").read_text())["rows"]
    assert [row["name"] for row in rows if not row["host"]] == ["preserve k=8", "own.yaml"]
    assert rows[0]["accuracy"] == 1
    assert Path("rows.png").read_bytes().startswith(b"\x89PNG")
    matched = json.loads(invoked(0, "bench", *common, "--policy", "preserve:8", "--match", "x.npy", "--json")[0])
    assert matched["rows"][-1]["firing"] != next(row for row in rows if row["name"] == "preserve k=8")["firing"]


def test_a_search_writes_its_policy_and_evidence_and_goes_on_from_its_log(folder, invoked, monkeypatch):
    time_by_k(monkeypatch)
    common = ("search", NET, "--data", "x.npz", "--rounds", 1, "--mode", "preserve", "--out", "p.yaml")
    more = ("--k", 1, "--k", 4, "--max-drop", 1, "--log", "log.jsonl", "--evidence", "e.json", "--html", "e.html", "--json")
    found = json.loads(invoked(0, *common, *more)[0])
    assert (found["metric"], found["source_metric"]) == ("accuracy", 1)
    chosen = next(trial for trial in found["trials"] if trial["name"] == found["chosen"])
    assert [f"preserve {rule.k}" for rule in sj_tac.Policy.load("p.yaml").rules] == [*chosen["choices"].values()]
    assert "preserve 4" in chosen["choices"].values()
    assert json.loads(Path("e.json").read_text())["chosen"] == found["chosen"]
    assert 'id="frontier"' in Path("e.html").read_text()
    logged = Path("log.jsonl").read_text()
    assert json.loads(invoked(0, *common, *more)[0])["trials"] == found["trials"]
    assert Path("log.jsonl").read_text() == logged
    own = json.loads(invoked(0, *common, "--k", 4, "--metric", "mine:count", "--batch-size", 6, "--no-match", "--json")[0])
    assert own["source_metric"] == -2
    Path("p.yaml").unlink()
    assert "no policy has accuracy" in invoked(1, *common, "--k", 4, "--max-drop", -2)[1]
    assert "no policy reaches 1000x" in invoked(1, *common, "--k", 4, "--speedup", 1000)[1]
    assert not Path("p.yaml").exists()


def test_auto_searches_what_it_converts_by(folder, invoked, monkeypatch):
    time_by_k(monkeypatch)
    shown, _ = invoked(0, "convert", NET, "--data", "x.npz", "--policy", "auto", "--out", "fast.pt", "--html", "fast.html")
    assert "on the Pareto frontier" in shown
    assert sj_tac.report(torch.load("fast.pt", weights_only=False)).converted
    assert 'id="layers"' in Path("fast.html").read_text()
    invoked(0, "plan", NET, "--html", "plan.html", "--json")
    assert 'id="layers"' not in Path("plan.html").read_text()


def test_a_time_limit_is_of_reading_the_data_too(folder, invoked, monkeypatch):
    given = {}

    def search(net, batches, **options):
        given.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(sj_tac, "search", search)
    now = iter((100.0, 107.0))
    monkeypatch.setattr("sj_tac.cli.app.time.monotonic", lambda: next(now))
    line = ("search", NET, "--data", "x.npz", "--out", "p.yaml", "--time-limit")
    invoked(130, *line, 30)
    assert given["time_limit"] == 23
    now = iter((100.0, 107.0))
    assert "was over before" in invoked(2, *line, 7)[1]


@pytest.mark.parametrize("done", [True, False])
def test_bench_keeps_memory_where_it_can_and_says_so(done, folder, monkeypatch, invoked):
    from sj_tac.support import memory

    def keep():
        memory._SAID[:] = ["kept"] if done else []
        return done

    time_by_k(monkeypatch)
    monkeypatch.setattr(memory, "_SAID", [])
    monkeypatch.setattr(memory, "keep_memory", keep)
    monkeypatch.setattr(memory, "VARIABLES", ())
    out, err = invoked(0, "bench", NET, "--data", "x.npy", "--policy", "preserve:2", "--rounds", 1, "--keep-memory")
    assert f"Memory mode: {'kept' if done else 'default'}." in " ".join(out.split())
    assert ("--keep-memory does nothing here" in err) is not done


PLAN = ["plan", NET]


def test_a_file_may_hold_one_unnamed_array_or_more_than_frames_and_labels(folder, invoked):
    x = np.load("x.npy")
    np.savez("clip.npz", clip=x)
    np.savez("more.npz", frames=x, events=np.zeros(5, [("x", "i2"), ("t", "i8")]), classes=np.array(["left", "right"]))
    expected = invoked(0, "diagnose", "--data", "x.npy", "--json")[0]
    assert json.loads(expected)
    for name in ("clip.npz", "more.npz"):
        assert invoked(0, "diagnose", "--data", name, "--json")[0] == expected


SEARCH = ["search", NET, "--data", "x.npy", "--k", "2", "--out", "p.yaml", "--metric"]
WRONG = [
    (2, "Missing argument", ["plan"]),
    (2, "No such option: --polcy", [*PLAN, "--polcy", "x"]),
    (2, "No such command", ["polish"]),
    (2, "support has no 'csn'; did you mean 'csnn'", ["plan", "support:csn"]),
    (2, "returned a int; a factory returns a torch.nn.Module", ["plan", "mine:number"]),
    (2, "checkpoint nowhere.pt does not exist", [*PLAN, "--checkpoint", "nowhere.pt"]),
    (2, "does not fit support:csnn", [*PLAN, "--checkpoint", EXAMPLES / "checkpoints" / "digits.pt"]),
    (2, "cannot be read as plain tensors", [*PLAN, "--checkpoint", "mine.py"]),
    (2, "has the key 1 (int); those of a state_dict are names", [*PLAN, "--checkpoint", "wrapped.pt"]),
    (2, "has keys ['epoch']; none of", [*PLAN, "--checkpoint", "none.pt"]),
    (2, "neither a mode nor a file; did you mean 'preserve'", [*PLAN, "--policy", "presrve"]),
    (2, "data 'x.csv' is neither a file of frames", ["diagnose", "--data", "x.csv"]),
    (2, "data none.npz does not exist", ["diagnose", "--data", "none.npz"]),
    (2, "data torn.npz cannot be read", ["diagnose", "--data", "torn.npz"]),
    (2, "holds ['a', 'b']; frames are expected under 'frames'", ["diagnose", "--data", "others.npz"]),
    (2, "10 labels for frames [4, 3, 2, 8, 8]", ["diagnose", "--data", "labels.npz"]),
    (2, "--batch-first is for frames [N, T, ...]", ["diagnose", "--data", "turned.npz"]),
    (2, "has one label, 3, for frames [4, 3, 2, 8, 8]", ["diagnose", "--data", "one.npz"]),
    (
        2,
        "data events.npy holds events (fields x, t), not frames; count them into frames",
        ["diagnose", "--data", "events.npy"],
    ),
    (2, "data events.npz holds events (fields x, t), not frames", ["diagnose", "--data", "events.npz"]),
    (2, "data columns.npz holds events (arrays t, x, y, p), not frames; count", ["diagnose", "--data", "columns.npz"]),
    (2, "data words.npy cannot be read (can't convert np.ndarray of type numpy.str_", ["diagnose", "--data", "words.npy"]),
    (2, "(frames [4, 3, 3, 8, 8]): Sequential does not run on a batch [4, 2, 3, 8, 8]", [*PLAN, "--data", "channels.npy"]),
    (2, "data 'mine:stream' failed with RuntimeError: disk gone (", ["diagnose", "--data", "mine:stream"]),
    (2, "data 'mine:number' is a int; frames", ["diagnose", "--data", "mine:number"]),
    (2, "metric 'mine:failing' failed with ValueError: mine (", [*SEARCH, "mine:failing"]),
    (2, "metric 'mine:number' is a int; name a function", [*SEARCH, "mine:number"]),
    (2, "level=2.0 must be in (0, 1)", ["diagnose", "--data", "x.npy", "--level", "2"]),
    (2, "--policy auto needs --data", ["convert", NET, "--out", "o.pt", "--policy", "auto"]),
    (2, "--match needs --data", ["convert", NET, "--out", "o.pt", "--match"]),
    (2, "--recalibrate needs --data", ["convert", NET, "--out", "o.pt", "--recalibrate"]),
    (2, "Invalid value for '--rounds'", ["bench", NET, "--data", "x.npy", "--rounds", "0"]),
    (1, "no convolution of", ["convert", "mine:bare", "--out", "o.pt"]),
]


@pytest.mark.parametrize(
    ("status", "message", "arguments"), WRONG, ids=lambda value: "" if isinstance(value, list) else None
)
def test_wrong_input_is_one_message_and_writes_nothing(folder, invoked, status, message, arguments):
    x = np.load("x.npy")[:4, :3]
    np.save("events.npy", np.zeros(5, [("x", "i2"), ("t", "i8")]))
    np.savez("events.npz", events=np.load("events.npy"))
    np.savez("columns.npz", **dict.fromkeys("txyp", np.zeros(5, int)))
    np.save("words.npy", np.array(["a", "b"]))
    np.save("channels.npy", np.ones((4, 3, 3, 8, 8), np.float32))
    for name, labels in (("labels", np.zeros(10, int)), ("turned", np.zeros(4, int)), ("one", np.int64(3))):
        np.savez(f"{name}.npz", frames=x, labels=labels)
    np.savez("others.npz", a=x, b=x)
    Path("torn.npz").write_bytes(Path("others.npz").read_bytes()[:300])
    torch.save({"state_dict": {1: 2}}, "wrapped.pt")
    torch.save({"epoch": 3}, "none.pt")
    before = sorted(folder.iterdir())
    out, err = invoked(status, *arguments)
    assert message in err
    assert err.startswith("sj-tac: ")
    assert not out
    assert [p for p in sorted(folder.iterdir()) if p.name != "__pycache__"] == before


def test_data_in_every_form(folder, labelled):
    frames, labels = labelled
    (one,) = load.batches("x.npy", 1000, False)
    assert torch.equal(one, frames)
    parts = load.batches("x.npz", 5, False)
    assert [y.tolist() for _, y in parts] == [labels[:5].tolist(), labels[5:10].tolist(), labels[10:].tolist()]
    assert torch.equal(torch.cat([x for x, _ in parts], 1), frames)
    np.save("wide.npy", frames.double().numpy())
    (one,) = load.batches("wide.npy", 1000, False, csnn())
    assert one.dtype is torch.float64
    turned = frames.transpose(0, 1)
    torch.save((turned, labels), "pair.pt")
    assert torch.equal(load.batches("pair.pt", 50, True)[0][0], frames)
    torch.save({"x": frames, "y": labels}, "named.pt")
    assert torch.equal(load.batches("named.pt", 50, False)[0][1], labels)
    torch.save([frames, frames, frames], "list.pt")
    assert len(load.batches("list.pt", 4, False)) == 3
    Path("forms.py").write_text("import torch\nx = torch.rand(4, 6, 1, 2, 2)\ndef stream(): yield x; yield x, x.sum()\n")
    assert [tuple(b.shape) for b in load.batches("forms:x", 4, False)] == [(4, 4, 1, 2, 2), (4, 2, 1, 2, 2)]
    assert tuple(load.batches("forms:stream", 4, True)[1][0].shape) == (6, 4, 1, 2, 2)
    sys.modules.pop("forms")


def test_checkpoints_as_they_are_and_in_wrappers(folder):
    weights = {name: value + 1 for name, value in csnn().state_dict().items()}
    torch.save(weights, "plain.pt")
    torch.save({"net": weights, "epoch": 3}, "wrapped.pt")
    for name in ("plain.pt", "wrapped.pt"):
        net = load.model(NET, Path(name))
        assert all(torch.equal(net.state_dict()[name], value) for name, value in weights.items())
        assert not net.training
