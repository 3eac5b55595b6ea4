"""benchmarks.gpu keeps what it measured, whatever fails later. No device is needed: what times is a stand-in."""

import json
import os
import sys
import types

import pytest
import stub_cuda
import torch
from rich.console import Console

from benchmarks import first_layer, gpu, gpu_kernels, measure, nets, overhead
from sj_tac.kernels.gpu import conv_fire


def read(folder):
    return json.loads((folder / "all.json").read_text())


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(
        nets, "make", lambda name, batch, device="cpu": (torch.nn.Conv2d(1, 1, 1), torch.zeros(2, 1, 1, 4, 4))
    )
    return types.SimpleNamespace(
        out=tmp_path / "found",
        net=["DVSGestureNet"],
        batch=1,
        rounds=2,
        no_compile=True,
        stage=gpu.STAGES,
        precision=gpu.PRECISIONS,
        row="",
    )


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


def test_a_table_without_any_row_of_the_host_has_no_ratios(tmp_path):
    rows = measure.rows({"sj_tac preserve k=2": [0.5, 0.25, 0.3]}, [], {})
    assert rows[0]["to_best"] is None
    console = Console(record=True, width=100, quiet=True)
    measure.table("none", rows, console)
    assert measure.save(tmp_path / "one.json", "none", {"net": rows}, 1).exists()


def test_only_the_files_of_gpu_tests_run_and_a_run_without_end_is_ended(tmp_path, monkeypatch):
    seen = []

    def run(command, **how):
        seen.append((command, how))
        raise gpu.subprocess.TimeoutExpired(command, how["timeout"])

    monkeypatch.setattr(gpu.subprocess, "run", run)
    gpu.tests(tmp_path, Console(quiet=True), 30)
    (command, how), *rest = seen
    assert not rest
    files = ["tests/test_gpu.py", "tests/test_gpu_nets.py", "tests/kernels/test_gpu_fire.py"]
    assert command[:6] == [sys.executable, "-m", "pytest", *files]
    assert how["timeout"] == 30
    assert "TimeoutExpired" in (tmp_path / "tests.txt").read_text()


def test_peaks_of_graphs_are_those_of_their_capture(monkeypatch):
    allocated, peak = iter([100, 900]), iter([2_000_100, 900])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peak))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = gpu.timed(lambda: lambda: None, 3)
    assert found["peak MB"] == 2.0
    assert len(found["seconds"]) == 3


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """A stand-in for a device, a small layer, and a clock that says the second of two ways is faster."""
    yield from stub_cuda.on_the_stub(monkeypatch, tmp_path)


@pytest.mark.skipif(stub_cuda.REAL, reason="the stand-in's")
def test_a_first_layer_is_run_both_ways_and_the_faster_one_is_named(stub, monkeypatch, tmp_path):
    seconds = iter([0.004, 0.001, 0.003, 0.002])
    monkeypatch.setattr(gpu_kernels, "seconds_of", lambda run: (run(), next(seconds))[1])
    monkeypatch.setitem(first_layer.ON_GPU, "small", first_layer.Case(2, 8, 3, 1, 16, (2, 2, 0)))
    found = gpu.Results(tmp_path, 1).add(
        "first layer", "one", lambda: gpu_kernels.one_kernel("small", torch.float32, 2, "cpu")
    )
    assert (found["cuDNN, fire, ms"], found["one kernel, ms"], found["ratio"]) == (4.0, 1.0, 4.0)
    assert found["faster"] == found["faster, channels_last"] == "one kernel"
    assert found["outputs that differ"] < 1e-3
    assert (found["cuDNN, fire, channels_last, ms"], found["one kernel, channels_last, ms"]) == (3.0, 2.0)
    assert found["ratio, channels_last"] == 1.5
    assert found["outputs that differ, channels_last"] < 1e-3
    assert first_layer.runs() > 0
    assert conv_fire.VARIABLE not in os.environ


@pytest.mark.skipif(stub_cuda.REAL, reason="the stand-in's")
def test_a_first_layer_whose_kernel_does_not_run_is_a_row_that_says_so(stub, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_kernels, "seconds_of", lambda run: 1.0)
    monkeypatch.setitem(first_layer.ON_GPU, "five", first_layer.Case(5, 8, 3, 1, 16, None))
    found = gpu.Results(tmp_path, 1).add(
        "first layer", "one", lambda: gpu_kernels.one_kernel("five", torch.float32, 2, "cpu")
    )
    assert found["failed"] == "RuntimeError: one kernel: the kernel that convolves and fires ran 0 times"


def test_every_first_layer_is_measured(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(gpu_kernels, "one_kernel", lambda *which: (seen.append(which), {})[1])
    gpu_kernels.first_layers(gpu.Results(tmp_path, 1), Console(quiet=True))
    others = len(first_layer.ON_GPU) - len(first_layer.CASES)
    assert len(read(tmp_path)["first layer"]) == len(set(seen)) == 2 * (3 * len(first_layer.CASES) + others)


@pytest.mark.skipif(stub_cuda.REAL, reason="the stand-in's")
def test_what_a_call_costs_is_a_row_of_either_launcher_and_of_the_host(stub, monkeypatch, tmp_path):
    monkeypatch.setattr(overhead, "LAYERS", 2)
    cost = gpu_kernels.call_overhead
    monkeypatch.setattr(gpu_kernels, "call_overhead", lambda maker: cost(maker, "cpu", 0.0))
    gpu_kernels.overheads(gpu_kernels.Results(tmp_path, 1), Console(quiet=True))
    rows = read(tmp_path)["overhead"]
    assert [row["name"] for row in rows][:2] == ["SpikingJelly eager", "sj_tac, cupy, k=1"]
    assert len(rows) == 7
    assert all(row["us a layer"] > 0 for row in rows)
