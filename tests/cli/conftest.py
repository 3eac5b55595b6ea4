"""The command line in this process, and a folder with files as users have them."""

import pkgutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import csnn, frames, interrupt

MODULE = """
import torch
from torch import nn
from spikingjelly.activation_based import layer
from support import csnn

calls = []
number = 3

def bare():
    return nn.Sequential(layer.Conv2d(1, 1, 3, step_mode="m"))

def hooked():
    net = csnn()
    net.register_forward_hook(lambda *args: None)
    return net

def stream():
    yield torch.rand(4, 3, 2, 8, 8)
    raise RuntimeError("disk gone")

def count(net, batches):
    return -len(batches)

def failing(net, batches):
    raise ValueError("mine")

def stopping(net, batches):
    calls.append(net)
    if len(calls) > 3:
        raise KeyboardInterrupt
    return 1.0
"""


@pytest.fixture
def invoked(monkeypatch, capsys):
    """A function that runs a command line in this process, checks its exit status, and returns its stdout and stderr."""
    from sj_tac.cli.app import main

    def run(status, *arguments):
        monkeypatch.setattr(sys, "argv", ["sj-tac", *map(str, arguments)])
        ended = 0
        try:
            main()
        except SystemExit as left:
            ended = left.code
        text = capsys.readouterr()
        assert ended == status, text
        return text.out, text.err

    return run


@pytest.fixture
def stop(monkeypatch):
    """A function that makes the n-th call of what a dotted path names a Ctrl-C."""

    def at(place, number):
        path, _, name = place.rpartition(".")
        interrupt(monkeypatch, pkgutil.resolve_name(path), name, number)

    return at


@pytest.fixture(scope="session")
def labelled():
    """Frames for ``support:csnn`` and the classes that it sees in them."""
    x = frames(8, 12, 2, 8, 8)
    with torch.no_grad():
        return x, csnn()(x).mean(0).argmax(1)


@pytest.fixture
def folder(tmp_path, monkeypatch, labelled):
    """The current folder: mine.py with factories, frames, labels, a checkpoint, a policy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("mine.py").write_text(MODULE)
    np.save("x.npy", labelled[0].numpy())
    np.savez("x.npz", frames=labelled[0].numpy(), labels=labelled[1].numpy())
    for name in ("own.pt", "own.png"):
        torch.save(csnn().state_dict(), name)
    Path("own.yaml").write_text("default: {mode: preserve, k: 2}\n")
    yield tmp_path
    sys.modules.pop("mine", None)
