"""Neurons of Linear layers that no policy speaks of: their steps are one operator, and give what the host's loop gives."""

import copy

import pairs
import pytest
import torch
from defined import given, same
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import awake
from torch import nn

import sj_tac

NEURONS = {
    "LIF": lambda: neuron.LIFNode(),
    "IF": lambda: neuron.IFNode(),
    "PLIF": lambda: neuron.ParametricLIFNode(),
    "soft reset": lambda: neuron.LIFNode(tau=1.7, v_reset=None),
    "detached": lambda: neuron.LIFNode(detach_reset=True, surrogate_function=surrogate.Sigmoid()),
    "every voltage": lambda: neuron.LIFNode(store_v_seq=True),
}


def preserve(k):
    return {"version": 1, "default": {"mode": "preserve", "k": k}}


class Net(nn.Module):
    """One convolution and two Linear layers, each with its neuron; ``mean``: the output is a mean over time."""

    def __init__(self, kind="LIF", mean=True):
        super().__init__()
        self.features = nn.Sequential(
            layer.Conv2d(2, 6, 3, padding=1), layer.BatchNorm2d(6), neuron.LIFNode(), layer.MaxPool2d(2, 2)
        )
        self.hidden, self.hidden_neuron = layer.Linear(96, 20), NEURONS[kind]()
        self.last, self.last_neuron = layer.Linear(20, 10), NEURONS[kind]()
        self.flatten, self.mean = layer.Flatten(), mean
        functional.set_step_mode(self, "m")

    def forward(self, x):
        x = self.hidden_neuron(self.hidden(self.flatten(self.features(x))))
        x = self.last_neuron(self.last(x))
        return x.mean(0) if self.mean else x


def made(kind="LIF", mean=True, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.rand(6, 4, 2, 8, 8)
    return awake(Net(kind, mean).eval(), x).to(dtype), x.to(dtype)


@pairs.parametrize(kind=NEURONS, k=[1, 2], mean=[True, False])
def test_outputs_voltages_and_gradients(kind, mean, k):
    net, x = made(kind, mean)
    fast = sj_tac.convert(copy.deepcopy(net), preserve(k), example_input=x)
    other = net if k == 1 else sj_tac.convert(copy.deepcopy(net), preserve(k), fuse=False)
    for frames in ((x, x.flip(0)), (x[:5, :3], x[:3, :3])):
        for grad in (False, True):
            found, expected = (given(n, x, grad, lambda _, n=n: [n(f) for f in frames]) for n in (fast, other))  # noqa: B023
            assert 0.02 < found["output 0"].mean() < 0.6
            same(found, expected, atol=1e-12)
            assert not grad or expected["gradient of hidden.weight"].abs().sum() > 0


CHANGES = {
    "v_threshold": lambda net: setattr(net.last_neuron, "v_threshold", 0.7 * net.last_neuron.v_threshold),
    "a hook": lambda net: net.hidden_neuron.register_forward_hook(lambda module, args, out: out.roll(1, 0) * 0.5),
    "w": lambda net: net.hidden_neuron.w.data.add_(0.5),
    "reset of one": lambda net: net.hidden_neuron.reset(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_later_is_seen(change):
    net, x = made("PLIF", mean=False)
    results = []
    for one in (net, sj_tac.convert(copy.deepcopy(net), preserve(1))):
        with torch.no_grad():
            one(x)
            CHANGES[change](one)
            results.append((one(x), one.hidden_neuron.v))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)
    assert results[0][0].any()


def test_they_run_single_steps_and_frames_without_a_batch():
    net, _ = made()
    drives, results = torch.rand(6, 20, dtype=torch.float64) * 3, []
    for one in (net, sj_tac.convert(copy.deepcopy(net), preserve(1))):
        functional.reset_net(one)
        results.append([one.hidden_neuron(drives)[:], one.hidden_neuron.v])
        functional.reset_net(one)
        one.hidden_neuron.step_mode = "s"
        results[-1] += [one.hidden_neuron(drives), one.hidden_neuron.v]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    assert results[0][0].any()


def test_they_are_no_layers_of_the_report_nor_of_match_and_go_back():
    net, x = made()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fast = sj_tac.convert(copy.deepcopy(net), preserve(2))
    assert [v.layer for v in sj_tac.report(fast).verdicts] == ["features.0"]
    assert sj_tac.match(fast, [x])
    assert list(fast.state_dict()) == list(before)
    back = sj_tac.restore(fast)
    assert type(back.hidden_neuron) is type(back.last_neuron) is neuron.LIFNode
    assert all(torch.equal(value, before[name]) for name, value in back.state_dict().items())
