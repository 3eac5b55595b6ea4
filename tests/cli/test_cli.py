"""The command line, run as a user runs it: the quickstart's story, results as JSON, exit statuses, errors in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import nets
import numpy as np
import pytest
import torch
from support import time_by_k

import sj_tac
from sj_tac.cli import load

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def sj_tac_command(*arguments, cwd=EXAMPLES, status=0):
    """stdout of ``python -m sj_tac``, after a check of the exit status; its stderr where that is not 0."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    command = [sys.executable, "-W", "ignore", "-m", "sj_tac", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr if status else done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Digits and events as files of frames and labels, as a user would have them."""
    folder = tmp_path_factory.mktemp("data")
    images, labels = datasets.shipped_digits()
    digits = datasets.rate_code(images[:100], nets.DIGITS_T, torch.Generator().manual_seed(1))
    np.savez_compressed(folder / "digits.npz", frames=digits.numpy().astype(np.uint8), labels=labels[:100].numpy())
    frames, labels = datasets.shipped_events(nets.EVENTS_T)
    torch.save({"frames": frames, "labels": labels}, folder / "events.pt")
    np.save(folder / "frames.npy", frames.transpose(0, 1).numpy())
    return folder


DIGITS = ("nets:DigitNet", "--checkpoint", "checkpoints/digits.pt")
EVENTS = ("nets:EventNet", "--checkpoint", "checkpoints/events.pt")


@pytest.mark.slow
def test_the_quickstarts_whole_story_without_python_code(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setenv("COLUMNS", "160")

    def here(*arguments):  # what takes long anyhow needs no process of its own
        return invoked(monkeypatch, capsys, 0, *arguments)[0]

    # Is time signal or noise?
    assert json.loads(here("diagnose", "--data", data / "digits.npz", "--json"))["verdict"] == "collapse"
    found = json.loads(here("diagnose", *EVENTS, "--data", data / "events.pt", "--json"))
    assert found["verdict"] == "preserve"
    assert list(found["layers"]) == ["features.0", "features.4", "features.8"]
    # What would become of the layers?
    plan = json.loads(
        sj_tac_command("plan", *EVENTS, "--policy", "policies/mixed.yaml", "--data", data / "events.pt", "--json")
    )
    assert [(v["status"], v["k"]) for v in plan["verdicts"]] == [("converted", 1), ("converted", 4), ("converted", 4)]
    # The quickstart's tables.
    for model, file, steps in ((DIGITS, "digits.npz", nets.DIGITS_T), (EVENTS, "events.pt", nets.EVENTS_T)):
        policies = ["preserve:2", f"collapse:{steps}", "policies/mixed.yaml"]
        options = [text for policy in policies for text in ("--policy", policy)]
        out = tmp_path / f"{file}.json"
        table = here("bench", *model, "--data", data / file, "--batch-size", 25, *options, "--rounds", 1, "--out", out)
        for words in (
            "SpikingJelly, BN folded",
            "agreement",
            "firing rate",
            "speed-up",
            f"collapse k={steps}",
            "mixed.yaml",
        ):
            assert words in table
        rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
        assert rows["SpikingJelly"]["accuracy"] >= 0.95
        assert rows["preserve k=2"]["agreement"] >= 0.97
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    # Which layers, and which policy?
    layers = tmp_path / "layers.json"
    short = ("--data", data / "digits.npz", "--batch-size", 25, "--rounds", 1)
    assert "predictions changed" in here("sensitivity", *DIGITS, *short, "--k", 4, "--out", layers)
    assert len(json.loads(layers.read_text())["effects"]) == 4
    policy, log = tmp_path / "policy.yaml", tmp_path / "log.jsonl"
    options = ("--k", 1, "--k", 4, "--log", log, "--evidence", tmp_path / "evidence.json", "--out", policy)
    evidence = json.loads(here("search", *DIGITS, *short, *options, "--json"))
    assert evidence["chosen"] in {trial["name"] for trial in evidence["trials"]}
    again = json.loads(here("search", *DIGITS, *short, *options, "--json"))
    assert [t["ms"] for t in again["trials"]] == [t["ms"] for t in evidence["trials"]]
    # Convert, and go back.
    fast = tmp_path / "fast.pt"
    shown = sj_tac_command("convert", *DIGITS, "--policy", policy, "--data", data / "digits.npz", "--out", fast)
    assert "converted" in shown
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])}
    script = (
        "import sys, torch, nets\n"
        "fast = torch.load(sys.argv[1], weights_only=False)\n"
        "nets.DigitNet().load_state_dict(fast.state_dict())\n"
        "import sj_tac; print(len(sj_tac.report(fast).converted))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, fast], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "2\n", done.stderr


def test_env_and_help():
    found = json.loads(sj_tac_command("env", "--json"))
    assert found["torch"] == torch.__version__
    text = sj_tac_command("--help")
    for command in ("plan", "convert", "match", "diagnose", "sensitivity", "search", "bench", "env"):
        assert command in text
    assert "Exit status" in text


@pytest.mark.parametrize("done", [True, False])
def test_bench_keeps_memory_where_it_can_and_says_so(done, tmp_path, monkeypatch, capsys):
    from sj_tac.support import memory

    def keep():
        memory._SAID[:] = ["kept"] if done else []
        return done

    monkeypatch.setattr(memory, "_SAID", [])
    monkeypatch.setattr(memory, "keep_memory", keep)
    monkeypatch.setattr(memory, "VARIABLES", ())
    monkeypatch.chdir(EXAMPLES)
    np.save(tmp_path / "frames.npy", np.ones((2, 1, 1, 28, 28), np.float32))
    options = ["--data", tmp_path / "frames.npy", "--policy", "preserve:2", "--rounds", 1]
    out, err = invoked(monkeypatch, capsys, 0, "bench", "nets:DigitNet", *options, "--keep-memory")
    assert f"Memory mode: {'kept' if done else 'default'}." in " ".join(out.split())
    assert ("--keep-memory does nothing here" in err) is not done


@pytest.mark.parametrize("command", ["plan", "convert", "match", "diagnose", "sensitivity", "search", "bench", "env"])
def test_every_command_has_help_with_an_example(command, capsys, monkeypatch):
    text = invoked(monkeypatch, capsys, 0, command, "--help")[0]
    assert f"Example: sj-tac {command}" in " ".join(text.split())


def invoked(monkeypatch, capsys, status, *arguments):
    """(stdout, stderr) of the command in this process."""
    from sj_tac.cli.app import main

    monkeypatch.setattr(sys, "argv", ["sj-tac", *map(str, arguments)])
    try:
        main()
        ended = 0
    except SystemExit as left:
        ended = left.code
    text = capsys.readouterr()
    assert ended == status, text
    return text.out, text.err


PLAN = ["plan", "nets:DigitNet"]
SEARCH = ["search", "nets:DigitNet", "--data", "digits.npy", "--k", "2", "--out", "p.yaml", "--metric"]
WRONG = [
    (2, "Missing argument", ["plan"]),
    (2, "No such option: --polcy", ["plan", "nets:DigitNet", "--polcy", "x"]),
    (2, "No such command", ["polish"]),
    (2, "is not written as package.module:factory", ["plan", "nets"]),
    (2, "no_such_module cannot be imported", ["plan", "no_such_module:Net"]),
    (2, "nets has no 'DigitNt'; did you mean 'DigitNet'", ["plan", "nets:DigitNt"]),
    (2, "returned a int; a factory returns a torch.nn.Module", ["plan", "nets:DIGITS_T"]),
    (2, "cannot be called without arguments", ["plan", "datasets:rate_code"]),
    (2, "checkpoint nowhere.pt does not exist", ["plan", "nets:DigitNet", "--checkpoint", "nowhere.pt"]),
    (2, "does not fit nets:EventNet", ["plan", "nets:EventNet", "--checkpoint", EXAMPLES / "checkpoints" / "digits.pt"]),
    (2, "cannot be read as plain tensors", ["plan", "nets:DigitNet", "--checkpoint", EXAMPLES / "nets.py"]),
    (2, "neither a mode nor a file; did you mean 'preserve'", ["plan", "nets:DigitNet", "--policy", "presrve"]),
    (2, "data 'x.csv' is neither a file of frames", ["diagnose", "--data", "x.csv"]),
    (2, "data x.npz does not exist", ["diagnose", "--data", "x.npz"]),
    (2, "data torn.npz cannot be read", ["diagnose", "--data", "torn.npz"]),
    (2, "holds ['a', 'b']; frames are expected under 'frames'", ["diagnose", "--data", "others.npz"]),
    (2, "10 labels for frames [4, 3, 1, 2, 2]", ["diagnose", "--data", "labels.npz"]),
    (2, "--batch-first is for frames [N, T, ...]", ["diagnose", "--data", "turned.npz"]),
    (2, "values that are NaN", ["diagnose", "--data", "nan.npy"]),
    (2, "has shape [4, 3]; frames are", ["diagnose", "--data", "flat.npy"]),
    (2, "(frames [4, 3, 2, 28, 28]): DigitNet does not run on a batch [4, 2, 2, 28, 28]", [*PLAN, "--data", "channels.npy"]),
    (2, "give frames [T, N, C, H, W] of the shape that it takes", ["bench", "nets:DigitNet", "--data", "channels.npy"]),
    (2, "data 'bare:sparse' is sparse (torch.sparse_coo); give dense frames", [*PLAN, "--data", "bare:sparse"]),
    (2, "data 'complex.npy' is complex", ["diagnose", "--data", "complex.npy"]),
    (2, "has one label, 3, for frames [4, 3, 1, 2, 2]", ["diagnose", "--data", "one.npz"]),
    (2, "has labels that are no numbers (str: 'abc')", ["diagnose", "--data", "text.pt"]),
    (2, "has the key 3 (int); those of a state_dict are names", ["plan", "nets:DigitNet", "--checkpoint", "numbered.pt"]),
    (2, "has the key 1 (int); those of a state_dict are names", ["plan", "nets:DigitNet", "--checkpoint", "wrapped.pt"]),
    (2, "data 'bare:gen' failed with RuntimeError: disk gone (", ["diagnose", "--data", "bare:gen"]),
    (2, "metric 'bare:metric' failed with ValueError: mine (", [*SEARCH, "bare:metric"]),
    (2, "metric 'bare:number' is a int; name a function", [*SEARCH, "bare:number"]),
    (2, "batch 0 is a str", ["diagnose", "--data", "bare:words", "--batch-first"]),
    (2, "level=2.0 must be in (0, 1)", ["diagnose", "--data", "good.npy", "--level", "2"]),
    (2, "--policy auto needs --data", ["convert", "nets:DigitNet", "--out", "x.pt", "--policy", "auto"]),
    (2, "write the k after a colon", ["plan", "nets:DigitNet", "--policy", "preserve:x"]),
    (2, "Invalid value for '--rounds'", ["bench", "nets:DigitNet", "--data", "good.npy", "--rounds", "0"]),
    (1, "no chain of", ["convert", "bare:Bare", "--out", "x.pt"]),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = np.random.default_rng(0).random((4, 3, 1, 2, 2)).astype(np.float32)
    np.save("good.npy", good)
    np.save("flat.npy", good[:, :, 0, 0, 0])
    np.save("nan.npy", np.where(good > 0.5, np.nan, good))
    np.savez("labels.npz", frames=good, labels=np.zeros(10, int))
    np.savez("turned.npz", frames=good, labels=np.zeros(4, int))
    np.savez("others.npz", a=good, b=good)
    Path("torn.npz").write_bytes(Path("others.npz").read_bytes()[:300])
    Path("bare.py").write_text(
        "from torch import nn\nfrom spikingjelly.activation_based import layer\n"
        "def Bare():\n    return nn.Sequential(layer.Conv2d(1, 1, 3, step_mode='m'))\n"
        "import torch\nnumber = 3\nwords = ['abc', 'abd']\n"
        "def sparse():\n    return torch.ones(4, 3, 1, 28, 28).to_sparse()\n"
        "def gen():\n    yield torch.rand(4, 3, 1, 2, 2)\n    raise RuntimeError('disk gone')\n"
        "def metric(net, batches):\n    raise ValueError('mine')\n"
    )
    np.save("channels.npy", np.ones((4, 3, 2, 28, 28), np.float32))
    np.save("digits.npy", np.ones((4, 3, 1, 28, 28)))
    np.save("complex.npy", good.astype(np.complex64))
    np.savez("one.npz", frames=good, labels=np.int64(3))
    torch.save((torch.from_numpy(good), "abc"), "text.pt")
    torch.save({**nets.DigitNet().state_dict(), 3: torch.zeros(1)}, "numbered.pt")
    torch.save({"state_dict": {1: 2}}, "wrapped.pt")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("status", "message", "arguments"), WRONG, ids=lambda value: "" if isinstance(value, list) else None
)
def test_wrong_input_is_one_message_and_writes_nothing(folder, capsys, monkeypatch, status, message, arguments):
    before = sorted(folder.iterdir())
    out, err = invoked(monkeypatch, capsys, status, *arguments)
    assert message in err
    assert err.startswith("sj-tac: ")
    assert not out
    assert [p for p in sorted(folder.iterdir()) if p.name != "__pycache__"] == before


def test_a_plan_with_nothing_to_convert_shows_why_and_ends_with_1(folder, capsys, monkeypatch):
    out, _ = invoked(monkeypatch, capsys, 1, "plan", "bare:Bare")
    assert "NO_NEURON" in out


def test_frames_of_numpys_own_dtype_are_taken(folder, capsys, monkeypatch):
    out, _ = invoked(monkeypatch, capsys, 0, "plan", "nets:DigitNet", "--data", "digits.npy", "--json")
    assert {v["status"] for v in json.loads(out)["verdicts"]} == {"converted"}


def test_a_search_without_an_answer_ends_with_1(folder, capsys, monkeypatch, data):
    arguments = (
        "nets:DigitNet",
        "--data",
        data / "digits.npz",
        "--k",
        "2",
        "--max-drop",
        "-2",
        "--out",
        "p.yaml",
        "--mode",
        "preserve",
    )
    assert "no policy has accuracy" in invoked(monkeypatch, capsys, 1, "search", *arguments)[1]
    assert not Path("p.yaml").exists()


def test_data_in_every_form(data, folder):
    frames = torch.from_numpy(np.load(data / "frames.npy"))
    (one,) = load.batches(str(data / "frames.npy"), 1000, True)
    assert torch.equal(one, frames.transpose(0, 1))
    parts = load.batches(str(data / "events.pt"), 30, False)
    assert [len(labels) for _, labels in parts] == [30, 30, 30, 10]
    assert torch.equal(torch.cat([x for x, _ in parts], 1), frames.transpose(0, 1))
    torch.save((frames, torch.zeros(100).long()), "pair.pt")
    assert [tuple(x.shape[:2]) for x, _ in load.batches("pair.pt", 50, True)] == [(32, 50), (32, 50)]
    Path("mine.py").write_text(
        "import torch\nx = torch.rand(4, 6, 1, 2, 2)\n"
        "def tensor(): return x\ndef pair(): return x, torch.zeros(6).long()\n"
        "def stream(): yield x; yield x, torch.zeros(6)\n"
    )
    assert [tuple(b.shape) for b in load.batches("mine:tensor", 4, False)] == [(4, 4, 1, 2, 2), (4, 2, 1, 2, 2)]
    assert len(load.batches("mine:pair", 4, False)[1][1]) == 2
    assert len(load.batches("mine:stream", 4, False)) == 2
    assert tuple(load.batches("mine:stream", 4, True)[1][0].shape) == (6, 4, 1, 2, 2)
    assert tuple(load.batches("mine:x", 9, False)[0].shape) == (4, 6, 1, 2, 2)


def test_checkpoints_in_wrappers(folder):
    weights = nets.DigitNet().state_dict()
    torch.save({"net": weights, "epoch": 3}, "wrapped.pt")
    net = load.model("nets:DigitNet", Path("wrapped.pt"))
    assert all(torch.equal(net.state_dict()[name], value) for name, value in weights.items())
    assert not net.training
    torch.save({"epoch": 3}, "none.pt")
    with pytest.raises(load.UsageError, match=r"has keys \['epoch'\]; none of"):
        load.model("nets:DigitNet", Path("none.pt"))


def test_auto_and_a_metric_of_ones_own(data, folder, capsys, monkeypatch):
    with np.load(data / "digits.npz") as content:
        np.savez("few.npz", frames=content["frames"][:4, :40], labels=content["labels"][:40])
    arguments = (DIGITS[0], "--checkpoint", EXAMPLES / DIGITS[2], "--data", "few.npz", "--batch-size", 20)
    out, _ = invoked(monkeypatch, capsys, 0, "convert", *arguments, "--policy", "auto", "--out", "fast.pt")
    assert "on the Pareto frontier" in out
    Path("own.py").write_text("def metric(net, batches):\n    return -len(batches)\n")
    more = ("--metric", "own:metric", "--k", 1, "--k", 4, "--rounds", 1, "--out", "p.yaml", "--json")
    assert json.loads(invoked(monkeypatch, capsys, 0, "search", *arguments, *more)[0])["source_metric"] == -2


def test_convert_with_recalibration(data, folder, capsys, monkeypatch):
    arguments = (DIGITS[0], "--checkpoint", EXAMPLES / DIGITS[2], "--data", data / "digits.npz", "--k", 4, "--recalibrate")
    invoked(monkeypatch, capsys, 0, "convert", *arguments, "--out", "fast.pt", "--json")
    fast = torch.load("fast.pt", weights_only=False)
    assert sj_tac.recalibrate(fast, undo=True) == ["features.1", "features.5"]


def test_match(data, folder, capsys, monkeypatch):
    arguments = (DIGITS[0], "--checkpoint", EXAMPLES / DIGITS[2], "--data", data / "digits.npz", "--k", 8)
    out, _ = invoked(monkeypatch, capsys, 0, "match", *arguments, "--out", "fast.pt", "--json")
    found = json.loads(out)
    assert [c["method"] for c in found["candidates"]] == ["none", "moments", "rates", "both"]
    fast = torch.load("fast.pt", weights_only=False)
    assert f"matched by {found['method']!r}" in str(sj_tac.report(fast).notes) or found["method"] == "none"
    out, _ = invoked(monkeypatch, capsys, 0, "match", *arguments, "--method", "moments")
    assert "agreement" in out
    invoked(monkeypatch, capsys, 0, "convert", *arguments, "--match", "--out", "again.pt", "--json")
    assert "matched" in str(sj_tac.report(torch.load("again.pt", weights_only=False)).notes)
    assert "--match needs --data" in invoked(monkeypatch, capsys, 2, "convert", DIGITS[0], "--match", "--out", "no.pt")[1]
    assert "method='some'" in invoked(monkeypatch, capsys, 2, "match", *arguments, "--method", "some")[1]


def test_reports_as_pages(data, folder, capsys, monkeypatch):
    time_by_k(monkeypatch)
    content = torch.load(data / "events.pt")
    torch.save({"frames": content["frames"][:8, :6], "labels": content["labels"][:6]}, "few.pt")
    common = (EVENTS[0], "--checkpoint", EXAMPLES / EVENTS[2], "--data", "few.pt")
    invoked(monkeypatch, capsys, 0, "plan", *common, "--html", "plan.html", "--json")
    page = Path("plan.html").read_text()
    assert "features.4" in page
    assert 'id="layers"' not in page
    invoked(monkeypatch, capsys, 0, "convert", *common, "--out", "fast.pt", "--html", "convert.html")
    assert 'id="layers"' in Path("convert.html").read_text()
    budget = ("--max-drop", "1", "--k", "2", "--mode", "preserve", "--rounds", "1", "--no-match")
    invoked(monkeypatch, capsys, 0, "search", *common, *budget, "--out", "policy.yaml", "--html", "search.html")
    page = Path("search.html").read_text()
    assert 'id="frontier"' in page
    assert "features.4" in page
