"""Neurons of Linear layers that no policy speaks of: their steps are one operator, and give what the host's loop gives."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import awake, only_v2
from torch import nn

import sj_tac
from sj_tac.runtime import compiled as free

NEURONS = {
    "LIF": lambda: neuron.LIFNode(),
    "IF": lambda: neuron.IFNode(),
    "PLIF": lambda: neuron.ParametricLIFNode(),
    "soft reset": lambda: neuron.LIFNode(tau=1.7, v_reset=None),
    "detached": lambda: neuron.LIFNode(detach_reset=True, surrogate_function=surrogate.Sigmoid()),
    "every voltage": lambda: neuron.LIFNode(store_v_seq=True),
}
K2 = {"version": 1, "default": {"mode": "preserve", "k": 2}}


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


def made(kind="LIF", mean=True, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.rand(6, 4, 2, 8, 8)
    return awake(Net(kind, mean).eval(), x).to(dtype), x.to(dtype)


def called(net, frames, grad):
    """Outputs of two calls, voltages of the heads and gradients."""
    functional.reset_net(net)
    net.zero_grad()
    for module in net.modules():
        if isinstance(module, neuron.BaseNode):
            module.train(grad)  # SpikingJelly before 2.0 has no gradients in evaluation
    with torch.set_grad_enabled(grad):
        outputs = [net(x) for x in frames]
    if grad:
        sum((out * torch.arange(10.0).to(out)).sum() for out in outputs).backward()
    voltages = [net.hidden_neuron.v, net.last_neuron.v]
    return outputs, voltages, {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mean", [True, False], ids=["a mean", "all steps"])
@pytest.mark.parametrize("kind", NEURONS)
@pytest.mark.parametrize("k", [1, 2])
def test_outputs_voltages_and_gradients(kind, mean, k):
    net, x = made(kind, mean, torch.float64)
    policy = K2 | {"default": {"mode": "preserve", "k": k}}
    fast = sj_tac.convert(copy.deepcopy(net), policy, example_input=x)
    # fuse=False leaves these neurons to SpikingJelly.
    others = [sj_tac.convert(copy.deepcopy(net), policy, fuse=False)] + [net] * (k == 1)
    assert type(others[0].last_neuron) is type(net.last_neuron)
    for frames in ([x, x.flip(0)], [x[:5, :3], x[:3, :3]]):
        for grad in (False, True):
            outputs, voltages, gradients = called(fast, frames, grad)
            assert all(type(out) is torch.Tensor for out in outputs)
            assert 0.02 < outputs[0].mean() < 0.6
            for other in others:
                wanted, v, expected = called(other, frames, grad)
                assert torch.equal(
                    torch.stack(outputs) if len(frames[0]) == 6 else outputs[0],
                    torch.stack(wanted) if len(frames[0]) == 6 else wanted[0],
                )
                assert torch.equal(outputs[1], wanted[1])
                torch.testing.assert_close(voltages, v, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
                assert not grad or expected["hidden.weight"].abs().sum() > 0


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_half_voltages_stay_as_half_as_the_hosts(k, autocast, grad):
    net, x = made(mean=False, dtype=torch.float32 if autocast else torch.bfloat16)
    policy = K2 | {"default": {"mode": "preserve", "k": k}}
    fast, other = (sj_tac.convert(copy.deepcopy(net), policy, fuse=fuse) for fuse in (True, False))
    assert fast.last_neuron._tac.head
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (outputs, voltages, gradients), (wanted, v, expected) = (called(one, [x, x.flip(0)], grad) for one in (fast, other))
    assert all(torch.equal(one, two) for one, two in zip(outputs, wanted, strict=True))
    assert 0.02 < outputs[0].mean() < 0.6
    for one, two in zip(voltages, v, strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    for name in expected:
        if name.startswith(("hidden", "last")):  # gradients of converted layers differ in a sum's last bit
            assert torch.equal(gradients[name], expected[name])


def test_the_kernel_ran_them():
    net, x = made()
    fast = sj_tac.convert(copy.deepcopy(net), K2)
    with torch.no_grad():
        fast(x)
    assert fast.last_neuron._tac.ran == fast.features[2]._tac.ran == "numba"
    plain = sj_tac.convert(copy.deepcopy(net), K2, backend="reference")
    assert type(plain.last_neuron) is neuron.LIFNode


@pytest.mark.parametrize("change", ["v_threshold", "a hook", "training", "single steps", "no batch", "reset of one"])
def test_what_changes_later_is_seen(change):
    net, x = made("PLIF", mean=False)
    fast = sj_tac.convert(copy.deepcopy(net), {"version": 1, "default": {"mode": "preserve", "k": 1}})
    results = []
    for one in (net, fast):
        with torch.no_grad():
            one(x)
            if change == "v_threshold":
                one.last_neuron.v_threshold *= 0.7
            elif change == "a hook":
                one.hidden_neuron.register_forward_hook(lambda module, args, out: out.roll(1, 0) * 0.5)
            elif change == "training":
                one.hidden_neuron.train()
                one.hidden_neuron.w.data += 0.5
            elif change == "single steps":
                one.last_neuron.step_mode = "s"
            elif change == "reset of one":
                one.hidden_neuron.reset()
            if change == "no batch":
                drives = one.hidden(torch.ones(6, 96))
                one.hidden_neuron.reset()
                results.append((one.hidden_neuron(drives), one.hidden_neuron.v))
            elif change == "single steps":
                one.last_neuron.reset()
                results.append(
                    (one.last_neuron(torch.rand(4, 10, generator=torch.Generator().manual_seed(3)) * 3), one.last_neuron.v)
                )
            else:
                results.append((one(x), one.hidden_neuron.v))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert results[0][0].any()


def test_a_policy_that_speaks_of_them_is_followed():
    net, _ = made()
    every = sj_tac.convert(copy.deepcopy(net), K2 | {"layers": ["conv", "linear"]})
    assert [v.layer for v in sj_tac.report(every).verdicts] == ["features.0", "hidden", "last"]
    assert not every.hidden_neuron._tac.head
    kept = sj_tac.convert(
        copy.deepcopy(net), K2 | {"layers": ["conv", "linear"], "rules": [{"match": "last", "mode": "keep"}]}
    )
    assert type(kept.last_neuron) is neuron.LIFNode


def test_they_are_no_layers_of_the_report_nor_of_match_and_go_back():
    net, x = made()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fast = sj_tac.convert(copy.deepcopy(net), K2)
    assert [v.layer for v in sj_tac.report(fast).verdicts] == ["features.0"]
    assert sj_tac.match(fast, [x])
    assert list(fast.state_dict()) == list(before)
    back = sj_tac.restore(fast)
    assert type(back.hidden_neuron) is type(back.last_neuron) is neuron.LIFNode
    assert all(torch.equal(value, before[name]) for name, value in back.state_dict().items())
    sj_tac.set_k(again := sj_tac.convert(copy.deepcopy(net), K2), 1)
    with torch.no_grad():
        assert torch.equal(again(x), net(x))


def test_two_ways_into_one_neuron_and_sums_in_front_of_it_are_left_alone():
    class Twice(Net):
        def forward(self, x):
            x = self.hidden_neuron(self.hidden(self.flatten(self.features(x))))
            return self.last_neuron(self.last(x) + self.last(x.roll(1, 0))) + self.last_neuron(self.last(x))

    torch.manual_seed(0)
    net = Twice().eval()
    fast = sj_tac.convert(net, K2)
    assert type(fast.last_neuron) is neuron.LIFNode
    assert fast.hidden_neuron._tac.head


@only_v2
@pytest.mark.skipif(not free.ANSWERS, reason="this torch takes T for a number")
def test_one_graph_for_any_time_and_batch():
    net, _ = made()
    fast = sj_tac.convert(net, K2)
    torch._dynamo.reset()
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(fast, backend=counted, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for steps, samples in ((6, 4), (8, 4), (10, 6), (12, 8)):
            x = torch.rand(steps, samples, 2, 8, 8)
            functional.reset_net(fast)
            wanted, v = fast(x), fast.last_neuron.v
            functional.reset_net(fast)
            assert torch.equal(compiled(x), wanted)
            assert torch.equal(fast.last_neuron.v, v)
    assert len(graphs) <= 2
