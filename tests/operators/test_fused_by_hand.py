"""TAC and TACTP as one operator against their own modules, one after the other (``fuse=False``)."""

import copy
from itertools import product

import pytest
import torch
from spikingjelly.activation_based import layer
from support import conv, frames, node, norm

from sj_tac import TAC, TACTP
from sj_tac.kernels.cpu.threads import RUNS

POOLS = {
    "none": lambda: None,
    "max": lambda: layer.MaxPool2d(2, step_mode="m"),
    "overlap": lambda: layer.MaxPool2d(3, 2, 1, step_mode="m"),
    "avg": lambda: layer.AvgPool2d(2, step_mode="m"),
    "ceil": lambda: layer.MaxPool2d(2, ceil_mode=True, step_mode="m"),
}
BUILDS = {
    "preserve": TACTP,
    "binary": TAC,
    "count": lambda *p, **o: TAC(*p, spikes="count", **o),
    "count in frames": lambda *p, **o: TAC(*p, spikes="count", emit="frames", **o),
    "stretched": lambda *p, **o: TACTP(*p, stretch=2, **o),
    "learned": lambda *p, **o: TACTP(*p, weights="learned", **o),
}


@pytest.mark.parametrize(("build", "pool", "kind"), list(product(BUILDS, POOLS, ["lif", "plif"])))
def test_fused_is_unfused(build, pool, kind):
    torch.manual_seed(0)
    # No norm: nothing is folded, so spikes and voltages are the same to the last bit.
    parts = [conv(), None, node(kind, v_threshold=0.3)]
    fused, unfused = (BUILDS[build](*copy.deepcopy(parts), 4, pool=POOLS[pool](), fuse=f) for f in (True, False))
    before = RUNS["fire", "numba"]
    for x in (frames(10, 2, 2, 6, 6), frames(7, 2, 2, 6, 6, seed=1)):
        expected, got = unfused(x), fused(x)
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)  # means of spikes may be summed in another order
        assert torch.equal(fused.neuron.v, unfused.neuron.v)
    # With ceil_mode the kernels leave the pool, and the mean of a frame's steps behind it, to its own module.
    assert RUNS["fire", "numba"] == before + 2
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (got * weight).sum().backward()
    for (name, a), b in zip(unfused.named_parameters(), fused.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("training", [False, True])
def test_with_a_norm(training):
    """The norm folded, or learning from the drives; a spike at the threshold may tip over, and none does here."""
    torch.manual_seed(0)
    parts = [conv(), norm(), node("lif", v_threshold=0.3)]
    fused, unfused = (
        TACTP(*copy.deepcopy(parts), 3, pool=layer.MaxPool2d(2), fuse=f).train(training) for f in (True, False)
    )
    x = frames(9, 2, 2, 8, 8)
    expected = unfused(x)
    assert torch.equal(fused(x), expected)
    assert 0 < expected.mean() < 1
    torch.testing.assert_close(fused.norm.running_mean, unfused.norm.running_mean)


def test_it_pickles_and_copies(tmp_path):
    torch.manual_seed(0)
    operator, x = TACTP(conv(), norm(), node("lif", v_threshold=0.3), 2, pool=layer.MaxPool2d(2)), frames(4, 1, 2, 6, 6)
    with torch.no_grad():
        expected = operator(x)
        operator.neuron.reset()
        torch.save(operator, tmp_path / "operator.pt")
        for other in (copy.deepcopy(operator), torch.load(tmp_path / "operator.pt", weights_only=False)):
            before = RUNS["fire", "numba"]
            assert torch.equal(other(x), expected)
            assert RUNS["fire", "numba"] == before + 1
