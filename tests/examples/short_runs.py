"""What the tests of the paper's scripts share: MNIST's file format, and a call as the command line makes it."""

import gzip
import struct
import sys

import command
import numpy as np
import pytest

SMALL = ("--quick", "--epochs", 1, "--tune-epochs", 1, "--ks", 2, "--rounds", 1)


def write_idx(path, values):
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


def call(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, arguments)])
    command.run(module.main)


def failure(monkeypatch, capsys, module, *arguments):
    """What a call that must fail says on stderr."""
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, module, *arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said
