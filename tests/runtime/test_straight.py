"""The short way to the kernel: taken where all is as before, and never with anything of before where something changed."""

import pytest
import torch
from spikingjelly.activation_based import functional, neuron
from straight_cases import CHANGES, NEURONS, POOLS, awake, compare, each, launches

import sj_tac
from benchmarks.overhead import frames_to_kernel
from sj_tac.host.types import IS_V2
from sj_tac.runtime.borders import definition
from sj_tac.runtime.drives import Drive


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", NEURONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_gives_what_the_definition_gives(kind, pool, dtype):
    torch.manual_seed(0)
    net = sj_tac.convert(awake(NEURONS[kind], POOLS[pool], 2).to(dtype), "preserve", 2)
    for shape in ((6, 2, 2, 16, 16), (5, 2, 2, 16, 16), (6, 3, 2, 8, 12)):
        rate = compare(net, (torch.rand(shape) < 0.4).to(dtype))
        assert 0.02 < rate < 0.9
    # Three shapes in two layers, unless the pool is one of the other kernels'.
    assert launches(net) == (0 if pool in ("average", "3x3") else 6)


@pytest.mark.parametrize("pool", ["none", "2x2", "3x3"])
def test_channels_last(pool):
    torch.manual_seed(0)
    net = sj_tac.convert(awake(pool=POOLS[pool], layers=2).to(memory_format=torch.channels_last), "preserve", 2)
    x = (torch.rand(6, 2, 2, 16, 16) < 0.4).float()
    assert compare(net, x) > 0.02
    last = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (6, 2))
    assert compare(net, last) > 0.02
    assert launches(net) >= 2


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("pool", ["none", "2x2", "3x3, channels_last"])
def test_what_changes_between_two_calls_is_seen(change, pool):
    torch.manual_seed(0)
    pool, _, last = pool.partition(", ")
    net = awake(pool=POOLS[pool])
    net = sj_tac.convert(net.to(memory_format=torch.channels_last) if last else net, "preserve", 2)
    x = (torch.rand(6, 2, 2, 16, 16) < 0.4).float()
    compare(net, x)
    with torch.no_grad():
        before = net(x).clone()
        CHANGES[change](net)
        functional.reset_net(net)
        after = net(x)
    assert compare(net, x, exact=change != "another surrogate") > 0.001
    # The older host's LIF does not call its surrogate in eval mode.
    unseen = ("store_v_seq",) if IS_V2 else ("store_v_seq", "another surrogate")
    if "pool" not in change and change not in unseen:
        assert not torch.equal(before, after)


def test_a_plifs_time_constant_written_through_data():
    torch.manual_seed(0)
    net = sj_tac.convert(awake(NEURONS["PLIF"]), "preserve", 2)
    x = (torch.rand(6, 2, 2, 16, 16) < 0.4).float()
    compare(net, x)
    with torch.no_grad():
        before = net(x).clone()
        for node in each(net, neuron.BaseNode):
            node.w.data.fill_(1.5)
        functional.reset_net(net)
        assert not torch.equal(before, net(x))
    assert compare(net, x) > 0.02


def test_a_state_of_the_users_own_is_taken():
    torch.manual_seed(0)
    net = sj_tac.convert(awake(), "preserve", 2)
    x = (torch.rand(6, 2, 2, 16, 16) < 0.4).float()
    v = [torch.rand(2, 8, 16, 16) for _ in range(3)]
    found = []
    with torch.no_grad():
        net(x)
        for way in (None, definition):
            functional.reset_net(net)
            for node, state in zip(each(net, neuron.BaseNode), v, strict=True):
                node.v = state.clone() if way else state.clone().contiguous(memory_format=torch.channels_last)
            if way:
                with way(net):
                    found.append(net(x))
            else:
                found.append(net(x))
    assert torch.equal(*found)


def test_frames_can_still_be_made():
    """A hook that reads a unit's output gets the spikes of the call, also where the neuron has changed since."""
    torch.manual_seed(0)
    net = sj_tac.convert(awake(pool=POOLS["2x2"]), "preserve", 2)
    x = (torch.rand(6, 2, 2, 16, 16) < 0.4).float()
    values, expected = [], []
    with torch.no_grad():
        net(x)
        functional.reset_net(net)
        hook = net[2].register_forward_hook(lambda m, a, out: values.append(out))
        net(x)
        hook.remove()
        net[2].v_threshold = 0.2
        functional.reset_net(net)
        read = values[0][:]
        net[2].v_threshold = 1.0
        hook = net[2].register_forward_hook(lambda m, a, out: expected.append(out.clone()))
        with definition(net):
            net(x)
        hook.remove()
    assert torch.equal(read, expected[0])


def test_gradients_after_calls_without():
    """Calls of both kinds take turns: the one with gradients is not the short way."""
    torch.manual_seed(0)
    net = sj_tac.convert(awake(), "preserve", 2)
    sj_tac.freeze_bn(net)
    x = (torch.rand(6, 2, 2, 16, 16) < 0.4).float()
    compare(net, x)
    gradients = []
    net.train()  # the older host has no gradients in eval mode
    for way in (None, definition):
        functional.reset_net(net)
        net.zero_grad()
        if way:
            with way(net):
                net(x).mean().backward()
        else:
            net(x).mean().backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    assert max(g.abs().max() for g in gradients[0]) > 0
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_few_frames_of_python_from_the_conv_to_the_kernel():
    torch.manual_seed(0)
    x = (torch.rand(6, 1, 2, 4, 4) < 0.4).float()
    for k in (1, 2):
        assert frames_to_kernel(sj_tac.convert(awake(), "preserve", k), x) <= 40


@pytest.mark.parametrize("weights", ["decay", "learned"])
def test_weights_that_hang_on_parameters_are_made_once_for_the_same_numbers(weights, monkeypatch):
    torch.manual_seed(0)
    policy = {"default": {"mode": "preserve", "k": 2, "weights": weights}}
    net = sj_tac.convert(awake(NEURONS["PLIF"]), policy)
    x = (torch.rand(6, 2, 2, 16, 16) < 0.4).float()
    compare(net, x)
    made, sums = [], Drive._sums
    monkeypatch.setattr(Drive, "_sums", lambda self, *a: (made.append(1), sums(self, *a))[1])
    with torch.no_grad():
        before = net(x).clone()
        functional.reset_net(net)
        assert not made
        for name, p in net.named_parameters():
            if name.endswith((".w", "tac_logits")):
                p.data[...] = torch.linspace(1.5, 0.2, p.numel()).reshape(p.shape)
        assert not torch.equal(before, net(x))
        assert made
    monkeypatch.undo()
    assert compare(net, x) > 0.02
