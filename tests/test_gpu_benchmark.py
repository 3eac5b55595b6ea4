"""benchmarks.gpu keeps what it measured, whatever fails later. No device is needed: what times is a stand-in."""

import json
import types

import pytest
import torch
from rich.console import Console

from benchmarks import gpu, nets


def read(folder):
    return json.loads((folder / "all.json").read_text())


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(
        nets, "make", lambda name, batch, device="cpu": (torch.nn.Conv2d(1, 1, 1), torch.zeros(2, 1, 1, 4, 4))
    )
    return types.SimpleNamespace(
        out=tmp_path / "found", net=["DVSGestureNet"], batch=1, rounds=2, no_compile=True, stage=gpu.STAGES,
        precision=gpu.PRECISIONS, row="",
    )  # fmt: skip


def test_every_row_is_in_the_file_before_the_next_begins(tmp_path):
    results = gpu.Results(tmp_path, 1)
    assert "machine" in read(tmp_path)

    def second():
        assert [row["name"] for row in read(tmp_path)["bandwidth"]] == ["first"]
        raise RuntimeError("out of memory")

    results.add("bandwidth", "first", lambda: {"ms": 1.0})
    results.add("bandwidth", "second", second)
    results.end = 0.0
    results.add("bandwidth", "third", lambda: pytest.fail("measured after its time"))
    found = read(tmp_path)["bandwidth"]
    assert found[0] == {"name": "first", "ms": 1.0}
    assert found[1]["failed"] == "RuntimeError: out of memory"
    assert "out of time" in found[2]["failed"]


def test_rows_that_fail_cost_no_others(options, monkeypatch):
    def timed(make, rounds):
        if "training" in titles[-1]:
            raise RuntimeError("no kernel")
        return {"seconds": [0.001] * rounds, "peak MB": 1.0}

    titles, add = [], gpu.Results.add
    monkeypatch.setattr(gpu.Results, "add", lambda self, stage, *a: (titles.append(stage), add(self, stage, *a))[1])
    monkeypatch.setattr(gpu, "timed", timed)
    results = gpu.Results(options.out, 1)
    gpu.tables(results, Console(record=True, quiet=True), options)
    found = read(options.out)
    assert len([title for title in found if title.startswith(("inference", "training"))]) == 2 * len(gpu.PRECISIONS)
    for title, rows in found.items():
        if title.startswith("inference"):
            assert all(row["peak MB"] == 1.0 for row in rows)
        if title.startswith("training"):
            assert all(row["failed"] == "RuntimeError: no kernel" for row in rows)
    assert (options.out / "inference-DVSGestureNet-bf16-weights-batch-1.json").exists()
    assert (options.out / "report.txt").exists()
