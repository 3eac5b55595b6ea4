"""How kernels are compiled: threads run the serial one, found by the types of its operands, and Numba keeps both."""

import os
import shutil
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numba import config, njit, types
from numba.core.codegen import JITCodeLibrary

from sj_tac.kernels.cpu import aggregate
from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.geometry import PITCH, room
from sj_tac.kernels.cpu.linked import by_type, lean, making

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("threads", "pieces"), list(product([1, 2, 3], [1, 2, 5])))
def test_threads_share_all_pieces(threads, pieces):
    size = pieces * aggregate.PIECE - 7
    x, weights = np.random.default_rng(0).standard_normal((3, size)).astype(np.float32), np.array([1, 2, 3], np.float32)
    alone, shared = np.zeros((2, size), np.float32), np.zeros((2, size), np.float32)
    aggregate.forward.serial(0, pieces, x, weights, 2, alone)
    aggregate.forward.parallel(threads, pieces, x, weights, 2, shared)
    assert np.array_equal(alone, shared)
    np.testing.assert_allclose(alone, np.stack([x[0] + 2 * x[1], 3 * x[2]]), rtol=1e-6, atol=1e-6)


@njit
def _compiled_room(regions, like):
    numbers = room(regions, like)
    return numbers.ctypes.data, numbers


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_regions_of_a_buffer_begin_with_cache_lines_that_differ_in_their_last_twelve_bits(dtype):
    like, others = np.empty(1, dtype), []
    for size in range(1, 4000, 97):
        others.append(np.empty(size, np.uint8))
        at, numbers = _compiled_room(4, like)
        alone = room.py_func(4, like)
        for data, found in ((at, numbers), (alone.ctypes.data, alone)):
            assert (found.dtype, found.size) == (dtype, 4 * PITCH)
            assert not found.any()
            places = [(data + i * PITCH * found.itemsize) % 4096 for i in range(4)]
            assert all(place % 64 == 0 for place in places)
            assert all(64 < abs(a - b) < 4032 for a in places for b in places if a != b)
            assert len(set(places)) == 4


def _fill(begin, end, a, b, c, d):
    for i in range(begin, end):
        d[i] = a[i] + b + c


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32])
def test_a_kernel_is_run_for_the_types_in_front_of_it(dtype):
    fill = kernel(_fill)
    for kind in (np.float32, np.float64, np.int64, np.int32):
        fill.parallel(2, 3, np.ones(3, kind), 1, 2.5, np.zeros(3))
    assert len(fill.addresses) == 4
    a, out = np.array([1, 2, 300], dtype), np.zeros(3)
    fill.parallel(2, 3, a, 1, 2.5, out)
    assert len(fill.addresses) == 4
    assert np.array_equal(out, a + 3.5)


def test_operands_of_other_memory_have_an_address_of_their_own():
    """An array that is read only or not contiguous is another type, whose kernel takes it apart in another way."""
    fill = kernel(_fill)
    readonly = np.arange(3.0)
    readonly.flags.writeable = False
    for number, a in enumerate([np.arange(3.0), readonly, np.arange(6.0)[::2], np.arange(3.0)[::-1]]):
        out = np.zeros(3)
        fill.parallel(2, 3, a, 0, 0.0, out)
        assert np.array_equal(out, a), number
    assert len(fill.addresses) == 3


def test_threads_of_python_may_add_kernels_at_once():
    fill = kernel(_fill)
    kinds, outs = (np.float32, np.float64, np.int64, np.int32), [np.zeros(4) for _ in range(4)]
    runs = [
        threading.Thread(target=fill.parallel, args=(1, 4, np.arange(4).astype(kind), 1, 0.5, out))
        for kind, out in zip(kinds, outs, strict=True)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert all(np.array_equal(out, np.arange(4) + 1.5) for out in outs)


def _fails(begin, end, a, b, c, d):
    if begin >= b:
        raise MemoryError
    for i in range(begin, end):
        d[i] = a[i]


@pytest.mark.parametrize(("from_unit", "failed"), [(0, 4), (2, 2), (4, 0)])
def test_a_thread_that_fails_is_an_error(from_unit, failed):
    a, out = np.ones(4), np.zeros(4)
    fails = kernel(_fails)
    if not failed:
        fails.parallel(4, 4, a, from_unit, 0, out)
        assert np.array_equal(out, a)
        return
    with pytest.raises(MemoryError, match=f"{failed} of 4 threads of _fails"):
        fails.parallel(4, 4, a, from_unit, 0, out)


@lean()
def _twice(x):
    return x + x


def _changed(x):
    """Twice a real number, and one less than an integer, where it is not compiled."""
    return x - 1 if isinstance(x, int) else 2 * x


@by_type(_changed)
def _changes(x):
    return (lambda x: x - 1) if isinstance(x, types.Integer) else (lambda x: _twice(x))


@making()
def _copied(x, size):
    copy = np.zeros(size)
    copy[: x.size] = x
    return copy


def _calls_others(begin, end, a, b, c, d):
    copy = _copied(a, b)
    for i in range(begin, end):
        d[i] = _twice(copy[i]) + _changed(copy[i]) + _changed(c)


def test_what_only_kernels_call_is_emitted_with_them_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))  # one that was kept would not be compiled
    emitted, emit = [], JITCodeLibrary._finalize_specific
    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", lambda library: (emitted.append(library.name), emit(library)))
    others = kernel(_calls_others)
    for run in (others.serial, lambda begin, end, *operands: others.parallel(2, end, *operands)):
        out = np.zeros(3)
        run(0, 3, np.arange(3.0), 3, 7, out)
        assert out.tolist() == [6, 10, 14]
    assert "_calls_others" in emitted
    assert {"_twice", "_copied", "_changes.<locals>.<lambda>"}.isdisjoint(emitted)
    assert all(dispatcher.overloads for dispatcher in (_twice, _copied))


def test_what_fails_in_a_function_that_is_linked_is_an_error():
    others, operands = kernel(_calls_others), (np.arange(3.0), 2**50, 7, np.zeros(3))
    with pytest.raises(MemoryError):
        others.serial(0, 3, *operands)
    with pytest.raises(MemoryError, match="1 of 1 threads of _calls_others"):
        others.parallel(1, 3, *operands)


SCRIPT = """
import numpy as np
from sj_tac.kernels.cpu import aggregate, compiled
x, out = np.ones((3, 10), np.float32), np.zeros((2, 10), np.float32)
aggregate.forward.parallel(1, 1, x, x[:, 0].copy(), 2, out)
assert out.any()
print(sum(compiled._on_threads.stats.cache_hits.values()), sum(aggregate.forward.serial.stats.cache_hits.values()))
"""


def test_a_kernel_and_its_loop_are_found_again_by_the_next_process(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    hits = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(2)]
    assert hits == [["0", "0"], ["1", "1"]]


def test_kernels_that_are_left_as_python_run_alone(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    shared = (
        "import numpy as np\n"
        "from sj_tac.kernels.cpu import aggregate\n"
        "from sj_tac.kernels.cpu.threads import share\n"
        "x, out = np.ones((3, aggregate.PIECE + 10), np.float32), np.zeros((2, aggregate.PIECE + 10), np.float32)\n"
        "share(aggregate.forward, 2, 10**9, x, x[:, 0].copy(), 2, out)\n"
        "print(out.min(), out.max())\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", shared], check=False, capture_output=True, text=True)
    assert done.stdout.split() == ["1.0", "2.0"], done.stderr


FIRE = """
import torch
from spikingjelly.activation_based import layer, neuron
from sj_tac.kernels import fire
from sj_tac.kernels.cpu.launches import Launch
torch.manual_seed(0)
same = []
for format in (torch.contiguous_format, torch.channels_last):
    for pool in (None, layer.MaxPool2d(2), layer.MaxPool2d(3, 2, 1))[: 3 if format is torch.channels_last else 2]:
        for dtype in (torch.float32, torch.bfloat16):
            y = (torch.randn(2, 5, 5, 4) + 0.3).to(dtype, memory_format=format)[:, None]
            norm = torch.rand(5) + 0.5, torch.rand(5)
            call = fire.Call(y, neuron.LIFNode(step_mode="m"), [2, 1], None, None, *norm, pool, torch.rand(3), 2)
            with torch.no_grad():
                expected, found = fire.run_reference(call, None), Launch(fire.operands(call, None))(y, None, None, norm)
            same += [torch.equal(a, b) for a, b in zip(expected, found)]
print(len(same), all(same), float(expected[0].float().mean()) > 0.02)
"""


def test_fire_is_the_same_where_kernels_are_left_as_python(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FIRE], check=False, capture_output=True, text=True)
    assert done.stdout.split() == ["20", "True", "True"], done.stderr


SUM = """
import numpy as np
from sj_tac.kernels.cpu import aggregate
x, out = np.ones((2, 4), np.float32), np.zeros((1, 4), np.float32)
aggregate.forward.parallel(1, 1, x, np.ones(2, np.float32), 2, out)
print(out[0, 0])
"""


def test_a_kernel_that_was_kept_is_compiled_again_where_another_file_changed(tmp_path):
    """As after an upgrade: its own file is as it was, and what it calls is not."""
    for package in ("sj_tac", "rewrites"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    env = {n: v for n, v in os.environ.items() if n != "NUMBA_CACHE_DIR"} | {"PYTHONPATH": str(tmp_path)}

    def found():
        command = [sys.executable, "-W", "ignore", "-c", SUM]
        return float(subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=env).stdout)

    assert found() == 2
    halves = tmp_path / "sj_tac" / "kernels" / "cpu" / "halves.py"
    text = halves.read_text()
    before = "    return lambda x: x\n\n\n@by_type(narrowed)"
    assert before in text
    halves.write_text(text.replace(before, before.replace("lambda x: x", "lambda x: 3 * x")))
    assert found() == 6
