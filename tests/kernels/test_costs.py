"""When threads help: by how long the work takes one of them."""

import pytest
import torch
from spikingjelly.activation_based import layer, neuron

from sj_tac.kernels import aggregate_op, fire
from sj_tac.kernels.cpu import compiled, costs, threads
from sj_tac.kernels.cpu.arguments import Neurons, OddWindows, Sheets, Windows

# Layouts of a map of 8 x 8, or 9 x 9, of 4 channels: contiguous and channels_last.
LAYOUTS = [
    *(Neurons(last, 8, 8, 4) for last in (False, True)),
    *(Windows(last, 8, 8, 4) for last in (False, True)),
    *(OddWindows(last, 9, 9, 4) for last in (False, True)),
    *(Sheets(last, 8, 8, 4, 1) for last in (False, True)),
    None,
]


@pytest.fixture
def shared(monkeypatch):
    """The kernels that threads were started for."""
    started, parallel = [], compiled.Kernel.parallel

    def noted(kernel, *arguments):
        started.append(kernel.serial.__name__)
        return parallel(kernel, *arguments)

    monkeypatch.setattr(compiled.Kernel, "parallel", noted)
    monkeypatch.setattr(threads, "are_safe", lambda: True)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield started
    torch.set_num_threads(before)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_dearer_is_shared_sooner(layout):
    """A backward is dearer than its forward, and nothing is cheaper than steps where their drives lie."""
    forward, backward = costs.forward(10**6, layout), costs.backward(10**6, layout)
    assert costs.forward(10**6, Neurons(True, 8, 8, 4)) <= forward < backward
    assert costs.forward(2 * 10**6, layout) == pytest.approx(2 * forward)


@pytest.mark.parametrize(
    ("pool", "layout"),
    [
        (None, Neurons(False, 6, 8, 70)),
        (layer.MaxPool2d(2, step_mode="m"), Windows(True, 6, 8, 70)),
        (layer.MaxPool2d(2, step_mode="m"), Windows(False, 6, 8, 70)),
        (layer.MaxPool2d(3, 2, 1, step_mode="m"), Sheets(False, 6, 8, 70, 1)),
        (layer.AvgPool2d(2, step_mode="m"), None),
    ],
)
def test_threads_start_where_the_work_is_worth_it(pool, layout, shared, monkeypatch):
    torch.manual_seed(0)
    format = torch.channels_last if layout is not None and layout.last else torch.contiguous_format
    y = torch.randn(2 * 4, 70, 6, 8).to(memory_format=format).unflatten(0, (2, 4)).requires_grad_()
    spiking, steps = neuron.LIFNode(step_mode="m", v_threshold=0.4), 4 * y[0].numel()

    def run(alone):
        monkeypatch.setattr(threads, "ALONE", alone)
        shared.clear()
        out, v = fire.run_numba(fire.Call(y, spiking, [2, 2], pool=pool), None)
        (gradient,) = torch.autograd.grad(out.square().sum() + v.square().sum(), y)
        return out, v, gradient

    dearest, cheaper = costs.backward(steps, layout), costs.forward(steps, layout)
    alone, none = run(dearest + 1), list(shared)
    one, in_backward = run(dearest), list(shared)
    two, in_both = run(cheaper), list(shared)
    assert (none, in_backward, in_both) == ([], ["backward"], ["forward", "backward"])
    for other in (one, two):
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))
    assert 0 < alone[0].detach().mean() < 1


def test_sums_of_frames_start_threads_where_they_are_worth_it(shared, monkeypatch):
    x, weights = torch.rand(4, 1, 4096), torch.rand(4)
    monkeypatch.setattr(threads, "ALONE", int(x.numel() * costs.SUMMED) + 1)
    alone = aggregate_op.aggregate_now(x, weights, 2)
    assert not shared
    monkeypatch.setattr(threads, "ALONE", int(x.numel() * costs.SUMMED))
    assert torch.equal(aggregate_op.aggregate_now(x, weights, 2), alone)
    assert shared == ["forward"]
