"""How kernels are compiled for the CPU and run by threads, and what Numba may keep of them."""

import pickle

import numba
import numpy as np
import pytest

from sj_tac.kernels.cpu.compiled import kernel


def _fill(begin, end, a, b, c, d):
    if begin >= b:
        raise MemoryError
    for i in range(begin, end):
        d[i] = a[i] + c


def test_a_kernel_is_run_for_the_types_in_front_of_it_and_a_thread_that_fails_is_an_error():
    """An array that is read only or not contiguous is another type, whose kernel takes it apart in another way."""
    fill, readonly = kernel(_fill), np.arange(4.0)
    readonly.flags.writeable = False
    for _ in range(2):
        for a in (np.arange(4.0), readonly, np.arange(8.0)[::2], np.arange(4, dtype=np.int32)):
            out = np.zeros(4)
            fill.parallel(2, 4, a, 4, 2.5, out)
            assert np.array_equal(out, a + 2.5)
    with pytest.raises(MemoryError, match="2 of 4 threads of _fill"):
        fill.parallel(4, 4, np.arange(4.0), 2, 2.5, np.zeros(4))


def test_what_another_version_kept_is_not_read(monkeypatch, tmp_path):
    """It may name classes that are gone; only Numba's own version stands before it."""
    fill = kernel(_fill)
    file = fill.serial._cache._cache_file
    monkeypatch.setattr(file, "_index_path", str(tmp_path / "index"))
    monkeypatch.setattr(file, "_cache_path", str(tmp_path))
    gone = pickle.dumps(numba.__version__) + b"cno.such.module\nClass\n."
    (tmp_path / "index").write_bytes(gone)
    out = np.zeros(4)
    fill.parallel(2, 4, np.arange(4.0), 4, 2.5, out)
    assert np.array_equal(out, np.arange(4.0) + 2.5)
    assert (tmp_path / "index").read_bytes() != gone
