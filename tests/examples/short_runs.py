"""What the tests of the examples share: MNIST's and tonic's file formats, and a call as the command line makes it."""

import gzip
import struct
import sys

import command
import gestures
import numpy as np
import pytest
import torch

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


def generated_gestures(events=None):
    """Events [events, 4] of a generated recording of each of the 11 gestures: x, y, polarity, milliseconds."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    found = []
    for label in range(11):
        recorded = gestures.record(gestures.draw(label, generator), rng)[:events]
        found.append(np.stack([recorded["x"], recorded["y"], recorded["p"], recorded["t"] // 1000], 1).astype(np.float64))
    return found


def gesture_folder(folder, recorded, users=10):
    """DVS128 Gesture as tonic's download is laid out: a file for each of ``recorded``, of every user, in both parts."""
    for part in ("Train", "Test"):
        for user in range(1, users + 1):
            held = folder / "DVSGesture" / f"ibmGesture{part}" / f"user{user:02}_lab"
            held.mkdir(parents=True)
            for label, events in enumerate(recorded):
                np.save(held / f"{label}.npy", events)
        # tonic looks for the archive beside what was unpacked.
        (folder / "DVSGesture" / f"ibmGesture{part}.tar.gz").write_bytes(b"")
