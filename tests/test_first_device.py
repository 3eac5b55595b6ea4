"""The script of a first run on a device, tried on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import first_device

ROOT = Path(__file__).resolve().parents[1]


def called(monkeypatch, path):
    monkeypatch.setattr(sys, "argv", ["first_device.py", "--device", "cpu", "--out", str(path)])
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        with pytest.raises(SystemExit) as ended:
            first_device.main()
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    return ended.value.code, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_call_is_a_row(monkeypatch, tmp_path):
    code, rows = called(monkeypatch, tmp_path / "calls.jsonl")
    assert code == 0
    assert len(rows) == 1 + 6 + 2
    assert not any("WRONG" in str(row["found"]) for row in rows)


def test_a_wrong_kernel_is_seen_and_one_that_fails_does_not_end_the_run(monkeypatch, tmp_path):
    fire = first_device.fire

    def worse(y, node, k, *, backend, **options):
        if options.get("pool") is not None and backend != "reference":
            raise RuntimeError("illegal address")
        out, v = fire(y, node, k, backend=backend, **options)
        return (out if backend == "reference" else 1 - out), v

    monkeypatch.setattr(first_device, "fire", worse)
    code, rows = called(monkeypatch, tmp_path / "calls.jsonl")
    found = {row["call"]: row["found"] for row in rows}
    assert code == "7 calls are wrong"
    assert found["fire, float32, contiguous, no pool"].startswith("WRONG: 24576 flips")
    assert "illegal address" in found["fire, float32, channels_last, 3x3"]


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_stages_have_an_end_and_leave_their_output(tmp_path):
    """A stand-in for Python that takes its time: the stages that are left are named, and nothing hangs."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *first_device*) sleep 60;; esac\n')
    python.chmod(0o755)
    script = ROOT / "benchmarks" / "first_device_run.sh"
    env = {**os.environ, "PYTHON": str(python), "MINUTES": "0.12"}
    command = ["bash", str(script), str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    said = (tmp_path / "out" / "stages.txt").read_text()
    assert "== machine: exit status 0" in said
    assert "== calls: exit status 124" in said
    assert "== figures: no time left" in said
    assert (tmp_path / "out" / "machine.txt").read_text().strip() == "-m sj_tac env"
    assert "Written" in done.stdout
