"""How kernels are compiled for the CPU and run by threads, and what Numba may keep of them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from spikingjelly.activation_based import layer, neuron

from sj_tac.kernels import fire
from sj_tac.kernels.cpu import aggregate, costs, threads
from sj_tac.kernels.cpu.arguments import Windows
from sj_tac.kernels.cpu.compiled import Kernel, kernel
from sj_tac.kernels.cpu.digest import PIECE, digest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("workers", "pieces"), [(1, 2), (2, 5), (3, 2)])
def test_threads_share_all_pieces(workers, pieces):
    size = pieces * aggregate.PIECE - 7
    x, weights = np.random.default_rng(0).standard_normal((3, size)).astype(np.float32), np.array([1, 2, 3], np.float32)
    alone, shared = np.zeros((2, size), np.float32), np.zeros((2, size), np.float32)
    aggregate.forward.serial(0, pieces, x, weights, 2, alone)
    aggregate.forward.parallel(workers, pieces, x, weights, 2, shared)
    assert np.array_equal(alone, shared)
    np.testing.assert_allclose(alone, np.stack([x[0] + 2 * x[1], 3 * x[2]]), rtol=1e-6, atol=1e-6)


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


@pytest.fixture
def shared(monkeypatch):
    """The kernels that threads were started for."""
    started, parallel = [], Kernel.parallel
    monkeypatch.setattr(Kernel, "parallel", lambda k, *a: (started.append(k.serial.__name__), parallel(k, *a))[1])
    monkeypatch.setattr(threads, "are_safe", lambda: True)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield started
    torch.set_num_threads(before)


def test_threads_start_where_the_work_is_worth_it(shared, monkeypatch):
    torch.manual_seed(0)
    y = torch.randn(2, 4, 16, 6, 8, requires_grad=True)
    spiking, steps = neuron.LIFNode(step_mode="m", v_threshold=0.4), 4 * y[0].numel()

    def run(alone):
        monkeypatch.setattr(threads, "ALONE", alone)
        shared.clear()
        out, v = fire.run_numba(fire.Call(y, spiking, [2, 2], pool=layer.MaxPool2d(2, step_mode="m")), None)
        (gradient,) = torch.autograd.grad(out.square().sum() + v.square().sum(), y)
        return out, v, gradient

    layout = Windows(False, 6, 8, 16)
    alone, none = run(costs.backward(steps, layout) + 1), list(shared)
    one, in_backward = run(costs.backward(steps, layout)), list(shared)
    two, in_both = run(costs.forward(steps, layout)), list(shared)
    assert (none, in_backward, in_both) == ([], ["backward"], ["forward", "backward"])
    for other in (one, two):
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))
    assert 0 < alone[0].detach().mean() < 1


@given(st.sampled_from([2, 1000, PIECE, PIECE + 1, 3 * PIECE + 5]), st.integers(0, 2**32 - 1), st.data())
def test_one_bit_or_two_numbers_that_change_places_make_another_digest(size, seed, data):
    """By which laid out weights are known to be those of a layer still."""
    numbers = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    before, bits = digest(numbers), numbers.view(np.uint32)
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 31))
    bits[place] ^= np.uint32(1 << bit)
    assert digest(numbers) != before
    bits[place] ^= np.uint32(1 << bit)
    assert digest(numbers) == before
    a, b = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    numbers[[a, b]] = numbers[[b, a]]
    assert digest(numbers) != before
