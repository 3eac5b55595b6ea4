"""Large convolutions that the neuron behind them runs in parts: the same numbers, whatever happens in between.

In float64: a convolution in parts may add in another order than the whole, which is no spike there.
"""

import pairs
import pytest
import torch
from spikingjelly.activation_based import functional, layer
from straight_cases import NEURONS, POOLS, Residual, awake, compare, each
from support import large_convolutions
from torch import nn

import sj_tac
from sj_tac.runtime import deferred


@pytest.fixture(autouse=True)
def parts():
    """How many parts were run; every convolution is large. Set up before a test's own patches, and ended after them."""
    run, found = deferred.Deferred.parts, []

    def counted(self, samples, channels):
        found.append((self.shape[1] // samples) * (self.shape[2] // channels))
        return run(self, samples, channels)

    with large_convolutions(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred.Deferred, "parts", counted)
        yield found


def converted(k=2, net=None):
    torch.manual_seed(0)
    return sj_tac.convert((net or awake()).double().eval(), k=k, example_input=torch.rand(4, 1, 2, 8, 8).double())


def frames(steps=6, samples=4):
    torch.manual_seed(1)
    return (torch.rand(steps, samples, 2, 8, 8) < 0.4).double()


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "pool", "last", "k"),
    [
        ("LIF", "none", False, 2), ("LIF", "2x2", True, 4), ("LIF", "average", False, 1), ("LIF", "3x3", True, 2),
        ("PLIF", "none", True, 1), ("LIF", "float32", False, 1), ("LIF", "float32", True, 1),
    ],
)  # fmt: skip
def test_parts_give_what_the_whole_gives(kind, pool, last, k, parts):
    torch.manual_seed(0)
    net, x = converted(k, awake(NEURONS[kind], POOLS.get(pool), 2)), frames(6, 1 if last else 4)
    if pool == "float32":  # with multiples of 1/16, every order of additions gives the same
        net, x = net.float(), x.float()
        for conv in each(net, nn.Conv2d):
            conv.weight.data.mul_(16).round_().div_(16)
    net = net.to(memory_format=torch.channels_last) if last else net
    assert 0.02 < compare(net, x, exact=pool == "float32") < 0.9
    assert max(parts) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2}, {"dilation": 2, "padding": 2}, {"bias": True}, {"padding_mode": "circular"}, {"padding": "same"},
    ],
    ids=str,
)  # fmt: skip
def test_a_residual_and_options_of_the_convolution(options, parts):
    torch.manual_seed(0)
    net = Residual(awake(layers=1), awake(layers=1))
    net.two[0] = layer.Conv2d(8, 8, 3, **{"padding": 1, "bias": False, **options}, step_mode="m")
    assert compare(converted(2, net), frames(), exact=False) > 0.02
    assert max(parts) > 2


def noise_for_the_call(net):
    kept = []

    def before(m, args):
        kept.append(m.weight.data.clone())
        m.weight.data.add_(torch.randn(m.weight.shape, generator=torch.Generator().manual_seed(0)) * 0.1)

    net[3].register_forward_pre_hook(before)
    after(3, lambda m, x, out: m.weight.data.copy_(kept.pop()))(net)


def options_changed(net):
    net[3].register_forward_pre_hook(lambda m, args: setattr(m, "padding", (1, 1)))
    after(3, lambda m, x, out: setattr(m, "padding", (0, 0)))(net)


def after(i, look):
    """A hook behind a convolution that gives nothing back."""
    return lambda net: net[i].register_forward_hook(lambda m, args, out: (look(m, args[0], out), None)[1])


BETWEEN = {
    "noise_for_the_call": noise_for_the_call,
    "input_written": after(0, lambda m, x, out: x.zero_()),
    "frames_written": after(3, lambda m, x, out: x.mul_(0)),
    "frames_written_past_torch": after(3, lambda m, x, out: x[0].mul_(0)),
    "drives_scaled": lambda net: net[3].register_forward_hook(lambda m, args, out: out * 1.5),
    "drives_scaled_in_place": after(3, lambda m, x, out: out.mul_(1.5)),
    "options_changed": options_changed,
    "looked_at": after(3, lambda m, x, out: out.mean()),
}


@pairs.parametrize(change=BETWEEN, mode=[torch.no_grad, torch.inference_mode], k=[1, 2])
def test_what_happens_between_the_convolution_and_its_neuron(change, mode, k, monkeypatch, parts):
    """Against the same net that runs every convolution at once."""
    net = converted(k)
    BETWEEN[change](net)
    with mode():
        found = net(frames()).clone()
        voltages = [net[i].v.clone() for i in (2, 5, 8)]
        assert parts
        monkeypatch.setattr(deferred, "LARGE", 1 << 60)
        functional.reset_net(net)
        expected = net(frames())
    assert 0 < expected.mean() < 1 or change == "frames_written"
    close(found, expected)
    for ours, i in zip(voltages, (2, 5, 8), strict=True):
        close(ours, net[i].v)


def test_gradients_and_autocast_have_the_whole():
    net = converted(2)
    net(frames()).sum().backward()
    assert net[0].weight.grad.abs().max() > 0
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        drives = net.float()[0](frames().float())
        assert (drives.dtype, drives[:].dtype) == (torch.bfloat16, torch.bfloat16)
