"""How kernels are compiled: the parallel one is the serial one on threads, and Numba's disk cache tells them apart."""

import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from sj_tac.kernels.cpu import aggregate, backward, forward, overlaps, overlaps_backward, planes

KERNELS = [forward.forward, backward.backward, planes.forward, planes.backward, aggregate.forward, aggregate.backward]
KERNELS += [overlaps.forward, overlaps_backward.backward]


def test_every_parallel_kernel_is_cached_under_its_own_name_beside_its_serial_one():
    functions = [k.parallel.py_func for k in KERNELS] + [k.serial.py_func for k in KERNELS]
    assert len({(f.__module__, f.__qualname__) for f in functions}) == len(functions)
    for kernel in KERNELS:
        serial, parallel = kernel.serial.py_func, kernel.parallel.py_func
        assert parallel.__code__.co_filename == serial.__code__.co_filename
        assert parallel.__module__ == serial.__module__
        assert parallel.__closure__ is None


@pytest.mark.parametrize(("threads", "pieces"), list(product([1, 2, 3], [1, 2, 5])))
def test_threads_share_all_pieces(threads, pieces):
    size = pieces * aggregate.PIECE - 7
    x, weights = np.random.default_rng(0).standard_normal((3, size)).astype(np.float32), np.array([1, 2, 3], np.float32)
    alone, shared = np.zeros((2, size), np.float32), np.zeros((2, size), np.float32)
    aggregate.forward.serial(0, pieces, x, weights, 2, alone)
    aggregate.forward.parallel(threads, pieces, x, weights, 2, shared)
    assert np.array_equal(alone, shared)
    np.testing.assert_allclose(alone, np.stack([x[0] + 2 * x[1], 3 * x[2]]), rtol=1e-6, atol=1e-6)


SCRIPT = """
import numpy as np
from sj_tac.kernels.cpu import aggregate
x, out = np.ones((3, 10), np.float32), np.zeros((2, 10), np.float32)
aggregate.forward.parallel(1, 1, x, x[:, 0].copy(), 2, out)
print(sum(aggregate.forward.parallel.stats.cache_hits.values()))
"""


def test_a_parallel_kernel_is_found_again_by_the_next_process(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    hits = [int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(2)]
    assert hits == [0, 1]
