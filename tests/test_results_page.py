"""The generated tables of docs say what benchmarks/results holds; the sparse ways compute what they are compared with."""

import json

import pytest
import torch
import torch.nn.functional as F

from benchmarks import bandwidth, event_conv, results_page, sparsity
from benchmarks.measure import RESULTS


def test_the_tables_are_what_the_results_say():
    blocks = []
    for path in results_page.PAGES:
        page = path.read_text()
        found = results_page.BLOCK.findall(page)
        assert results_page.generated(page) == page
        assert page.count("<!-- table") == len(found)
        blocks += found
    assert {"mnist", "fashion", "nmnist", "gestures"} <= {f.split("-")[1] for kind, f, _ in blocks if kind == "study"}
    assert {"speed", "sparsity", "agreement", "losses", "tuned", "schedule"} <= {kind for kind, _, _ in blocks}


def test_a_study_with_three_seeds_says_so():
    for path in RESULTS.glob("study-*.json"):
        content = json.loads(path.read_text())
        assert all(row["seeds"] == len(content["seeds"]) for row in content["rows"]), path
        base = next(r for r in content["rows"] if r["name"] == "baseline" and r["how"] == "scratch")
        for row in content["rows"]:
            assert row["to_baseline"] == pytest.approx(row["accuracy"] - base["accuracy"]), (path, row["name"])


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("k", [1, 4])
def test_a_copy_moves_the_bytes_that_fire_reads_and_writes(dtype, number, k):
    frame = bandwidth.BATCH * bandwidth.CHANNELS * 8 * 8
    groups = bandwidth.STEPS // k
    moved = groups * frame * number + groups * frame // 4 * number + frame * 4
    timed = bandwidth.fired(8, k, True, True, dtype)
    copy = bandwidth.copied(timed.moved)
    assert timed.moved == moved
    assert 2 * copy.call().numel() * 4 == moved


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5, 1.0])
def test_every_sparse_way_is_the_convolution(rate):
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(5, 2, 3, 6, 7, generator=generator) < rate).float()
    if rate:
        x[3] = x[2]
    weight = torch.randn(4, 3, 3, 3, generator=generator)
    expected = torch.stack([F.conv2d(frame, weight, padding=1) for frame in x])
    ways = sparsity.strategies(compiled=False)
    assert len(ways) == 6
    for name, way in ways.items():
        if name != sparsity.TAC:
            torch.testing.assert_close(way(x, weight), expected, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    summed = x[:4].mean(0, keepdim=True)
    torch.testing.assert_close(ways[sparsity.TAC](x, weight)[:1], sparsity.dense(summed, weight), rtol=1e-4, atol=1e-4)


def test_the_cuda_kernel_computes_the_convolution(tmp_path):
    """Its source, compiled for the CPU, block by block and thread by thread."""
    import ctypes
    import shutil
    import subprocess

    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    before = (
        "struct Place { int x; }; static Place blockIdx, threadIdx, blockDim;\n#define __global__\n"
        "static void atomicAdd(float *target, float value) { *target += value; }\n"
    )
    after = (
        'extern "C" void launch(int blocks, int threads, const long long *e, const float *r, float *o, int c, int n, int h, '
        "int w) {\n blockDim.x = threads;\n for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)\n"
        "  for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) event_conv(e, r, o, c, n, h, w);\n}\n"
    )
    (tmp_path / "event_conv.cpp").write_text(before + event_conv.SOURCE + after)
    library = tmp_path / "event_conv.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, tmp_path / "event_conv.cpp"], check=True)
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(3, 3, 6, 7, generator=generator) < 0.3).float()
    weight = torch.randn(5, 3, 3, 3, generator=generator)
    events, rows = x.nonzero().contiguous(), weight.permute(2, 3, 1, 0).contiguous()
    out = torch.zeros(3, 6, 7, 5)
    pointers = [ctypes.c_void_p(value.data_ptr()) for value in (events, rows, out)]
    ctypes.CDLL(str(library)).launch(len(events), 2, *pointers, 3, 5, 6, 7)
    torch.testing.assert_close(out.permute(0, 3, 1, 2), F.conv2d(x, weight, padding=1), rtol=1e-5, atol=1e-5)
