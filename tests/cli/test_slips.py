"""Slips on the command line, told at once and as what they are; files that the commands write and read; Ctrl-C."""

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


@pytest.mark.slow
def test_a_time_limit_is_of_the_whole(net, capsys, monkeypatch):
    time_by_k(monkeypatch, each=0.2)
    options = ["--data", "x.npy", "--rounds", 1, "--out", "p.yaml", "--max-drop", 1, "--json"]
    begun = time.monotonic()
    invoked(monkeypatch, capsys, 0, "search", "mynet:csnn", *options, "--time-limit", 30)
    assert time.monotonic() - begun < 36
    assert "was over before" in invoked(monkeypatch, capsys, 2, "search", "mynet:csnn", *options, "--time-limit", 1e-9)[1]
