"""Slips on the command line, told at once and as what they are; files that the commands write and read; Ctrl-C."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support import time_by_k

import sj_tac
from sj_tac.cli import load, named
from sj_tac.cli.named import UsageError

ROOT = Path(__file__).resolve().parents[2]


SLIPS = ["--help", "search --help", "polish", "plan nets:X --polcy x", "plan netz:X", "plan ../etc/passwd:x"]


@pytest.mark.parametrize("line", SLIPS)
def test_help_and_slips_import_neither_torch_nor_spikingjelly(line, tmp_path):
    arguments = line.split()
    script = (
        "import sys\nfrom sj_tac.cli.app import main\n"
        f"sys.argv = ['sj-tac', *{arguments}]\n"
        "try:\n    main()\nexcept SystemExit as left:\n    print('left', left.code)\n"
        "print('heavy', sorted({'torch', 'spikingjelly', 'numpy', 'numba'} & set(sys.modules)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "heavy []" in done.stdout
    assert "Traceback" not in done.stderr
    assert ("left 2" in done.stdout) is ("--help" not in arguments)


FACTORIES = """
def undefined():
    return no_such_name

def typed():
    return len(3)

def wants(a, b=1):
    return a

def nested():
    import json
    return json.loads('{')

class Late:
    def __call__(self):
        raise KeyError('k')

late = Late()
"""
STOPPING = """
from support import csnn

calls = []

def stop(net, batches):
    calls.append(net)
    if len(calls) > 3:
        raise KeyboardInterrupt
    return 1.0
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("factories.py").write_text(FACTORIES)
    Path("torn.py").write_text("def f(:\n")
    Path("fails.py").write_text("x = 1\ny = 1 / 0\n")
    Path("lacks.py").write_text("import no_such_thing\n")
    yield tmp_path
    for name in ("factories", "torn", "fails", "lacks"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("factories:undefined", r"failed with NameError: name 'no_such_name' .* \(.*factories.py, line 3, in undefined\)"),
        ("factories:typed", r"failed with TypeError: .* has no len\(\) \(.*factories.py, line 6, in typed\)"),
        ("factories:nested", r"failed with JSONDecodeError: .* \(.*factories.py, line 13, in nested\)"),
        ("factories:late", r"failed with KeyError: 'k' \(.*factories.py, line 17, in __call__\)"),
        ("factories:wants", "cannot be called without arguments .missing a required argument: 'a'"),
        ("torn:f", r"cannot be imported with SyntaxError: .*\(.*torn.py, line 1\)"),
        ("fails:f", r"cannot be imported with ZeroDivisionError: division by zero \(.*fails.py, line 2, in <module>\)"),
        ("lacks:f", r"cannot be imported \(No module named 'no_such_thing' \(.*lacks.py, line 1, in <module>\)\)"),
        ("../../etc/passwd:x", "is no module's name"),
        ("a..b:x", "is no module's name"),
        (".a:x", "is no module's name"),
        ("nowhere.at.all:x", "nowhere.at.all cannot be imported"),
    ],
)  # fmt: skip
def test_a_factorys_own_error_is_the_users_with_its_line(mine, spec, words):
    with pytest.raises(UsageError, match=words):
        load.model(spec, None)


def test_what_is_written_in_c_and_what_is_no_function(mine):
    assert named.called(dict, "builtins:dict", "data") == {}
    with pytest.raises(UsageError, match="returned a dict; a factory returns"):
        load.model("builtins:dict", None)


def invoked(monkeypatch, capsys, status, *arguments):
    from sj_tac.cli.app import main

    monkeypatch.setattr(sys, "argv", ["sj-tac", *map(str, arguments)])
    ended = 0
    try:
        main()
    except SystemExit as left:
        ended = left.code
    text = capsys.readouterr()
    assert ended == status, text
    return text.out, text.err


@pytest.fixture
def net(mine):
    Path("mynet.py").write_text(STOPPING)
    np.save("x.npy", (np.random.default_rng(0).random((8, 12, 2, 8, 8)) < 0.4).astype(np.float32))
    yield mine
    sys.modules.pop("mynet", None)


def test_safetensors_in_and_out(net, capsys, monkeypatch):
    invoked(monkeypatch, capsys, 0, "convert", "mynet:csnn", "--policy", "preserve:4", "--out", "fast.safetensors")
    from support import csnn

    fast = sj_tac.load("fast.safetensors", csnn())
    assert [v.k for v in sj_tac.report(fast).converted] == [4, 4, 4]
    # What is not corrected is the source's own checkpoint; what is, is refused.
    again = load.model("mynet:csnn", Path("fast.safetensors"))
    assert all(torch.equal(value, fast.state_dict()[key]) for key, value in again.state_dict().items())
    sj_tac.recalibrate(fast, torch.from_numpy(np.load("x.npy")))
    for name in ("matched.safetensors", "matched.pt"):
        sj_tac.save(fast, name)
        with pytest.raises(UsageError, match="is a converted net whose statistics were corrected"):
            load.model("mynet:csnn", Path(name))
    Path("torn.safetensors").write_bytes(Path("fast.safetensors").read_bytes()[:50])
    for name, words in (("torn.safetensors", "cannot be read"), ("none.safetensors", "does not exist")):
        with pytest.raises(UsageError, match=words):
            load.model("mynet:csnn", Path(name))


def test_ctrl_c_names_the_log_and_writes_the_best_so_far(net, capsys, monkeypatch):
    time_by_k(monkeypatch)
    options = [
        "--data",
        "x.npy",
        "--metric",
        "mynet:stop",
        "--k",
        1,
        "--k",
        2,
        "--rounds",
        1,
        "--log",
        "log.jsonl",
        "--out",
        "p.yaml",
    ]
    _, err = invoked(monkeypatch, capsys, 130, "search", "mynet:csnn", *options)
    assert "the best so far is written: p.yaml" in err
    assert "interrupted after 2 policies; the same command goes on from log.jsonl" in err
    assert sj_tac.Policy.load("p.yaml").rules


STOPPED = {
    "sensitivity": ("sj_tac.tuning.sensitivity._effect", 4, "after 3 of 4 settings", "found.json"),
    "bench": ("sj_tac.tuning.bench._rate", 2, "after 1 of", "found.json"),
    "match": ("sj_tac.tuning.matching.Fit", 2, "the net keeps the nearest", "found.safetensors"),
    "diagnose": ("sj_tac.tuning.diagnosis._refuse_recording", 3, "after 2 batches, 8 samples", None),
}
# A real signal, from within the n-th call of what measures.
SIGNALLED = """
import os, runpy, signal, sys
from importlib import import_module

path, number, *sys.argv = sys.argv[1:]
module, name = path.rsplit(".", 1)
holder, calls = import_module(module), []
run = getattr(holder, name)

def stopping(*args, **kwargs):
    calls.append(name)
    if len(calls) == int(number):
        os.kill(os.getpid(), signal.SIGINT)
    return run(*args, **kwargs)

setattr(holder, name, stopping)
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in a shell's background
runpy.run_module("sj_tac", run_name="__main__")
"""


@pytest.mark.parametrize(
    "command", [name if name == "sensitivity" else pytest.param(name, marks=pytest.mark.slow) for name in STOPPED]
)
def test_ctrl_c_writes_and_shows_what_was_finished(net, command):
    path, number, words, written = STOPPED[command]
    model = [] if command == "diagnose" else ["mynet:csnn"]
    more = {"sensitivity": ["--k", "2", "--rounds", "1", "--mode", "preserve", "--layers", "linear", "--layers", "conv"]}
    out = ["--out", written] if written else []
    line = [command, *model, "--data", "x.npy", "--batch-size", "4", *more.get(command, []), *out, "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(net)])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SIGNALLED, path, str(number), "sj-tac", *line],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert found["interrupted"] is True
    if written == "found.json":
        assert json.loads(Path(written).read_text()) == found
    elif written:
        from support import csnn

        assert found["method"] in ("none", "moments")
        assert sj_tac.load(written, csnn()) is not None


def test_ctrl_c_before_anything_was_measured_writes_nothing(net, capsys, monkeypatch):
    def stopping(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("sj_tac.tuning.sensitivity.milliseconds", stopping)
    out, err = invoked(monkeypatch, capsys, 130, "sensitivity", "mynet:csnn", "--data", "x.npy", "--out", "found.json")
    assert out == ""
    assert "interrupted before a layer was measured" in err
    assert not Path("found.json").exists()


@pytest.mark.slow
def test_a_time_limit_is_of_the_whole(net, capsys, monkeypatch):
    time_by_k(monkeypatch, each=0.2)
    options = ["--data", "x.npy", "--rounds", 1, "--out", "p.yaml", "--max-drop", 1, "--json"]
    begun = time.monotonic()
    invoked(monkeypatch, capsys, 0, "search", "mynet:csnn", *options, "--time-limit", 30)
    assert time.monotonic() - begun < 36
    assert "was over before" in invoked(monkeypatch, capsys, 2, "search", "mynet:csnn", *options, "--time-limit", 1e-9)[1]


@pytest.mark.parametrize("read", ["--checkpoint", "--data", "--policy"])
def test_what_is_read_is_not_overwritten(read, net, capsys, monkeypatch):
    from support import csnn

    torch.save(csnn().state_dict(), "own.pt")
    Path("own.yaml").write_text("default: {mode: preserve, k: 2}\n")
    name = {"--checkpoint": "own.pt", "--data": "x.npy", "--policy": "own.yaml"}[read]
    before = Path(name).read_bytes()
    more = [] if read == "--data" else ["--data", "x.npy"]
    for line in (["convert", "mynet:csnn", read, name], ["match", "mynet:csnn", read, name, *more]):
        out = os.path.join("..", Path.cwd().name, name)
        told = invoked(monkeypatch, capsys, 2, *line, "--out", out)
        assert f"is the file that {read} reads, and would be overwritten" in str(told)
        assert Path(name).read_bytes() == before
