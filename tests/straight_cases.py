"""What the tests of the short way share, on the CPU and on CUDA: nets, the comparison with their definition, edits."""

import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import nn

import sj_tac
from sj_tac.runtime import launching
from sj_tac.runtime.borders import definition

POOLS = {
    "none": None,
    "2x2": lambda: layer.MaxPool2d(2),
    "average": lambda: layer.AvgPool2d(2),
    "3x3": lambda: layer.MaxPool2d(3, 2, 1),
}


def awake(node=None, pool=None, layers=3):
    """Conv -> BN -> neuron [-> pool], whose neurons fire; seeded by the caller."""
    modules = []
    for i in range(layers):
        modules += [layer.Conv2d(2 if i == 0 else 8, 8, 3, padding=1, bias=False), layer.BatchNorm2d(8)]
        modules[-1].running_mean.uniform_(-0.2, 0.2)
        modules[-1].running_var.uniform_(0.02, 0.1)
        nn.init.uniform_(modules[-1].bias, 0.0, 0.6)
        modules += [node() if node else neuron.LIFNode(surrogate_function=surrogate.ATan(), detach_reset=True)]
        modules += [pool()] if pool else []
    net = nn.Sequential(*modules)
    functional.set_step_mode(net, "m")
    return net.eval()


def compare(net, x, exact=True):
    """The fused net, twice in a row without a reset, against its definition, bit by bit; returns the rate of the output."""
    with torch.no_grad():
        functional.reset_net(net)
        found = [net(x).clone(), net(x).clone()]
        voltages = [m.v.clone() for m in net.modules() if isinstance(m, neuron.BaseNode)]
        functional.reset_net(net)
        with definition(net):
            expected = [net(x).clone(), net(x).clone()]
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, atol=1e-5)
        for ours, m in zip(voltages, (m for m in net.modules() if isinstance(m, neuron.BaseNode)), strict=True):
            torch.testing.assert_close(ours, m.v)
        functional.reset_net(net)
    return found[0].mean().item()


def launches(net):
    """How many launches the units of a net keep."""
    units = [m._tac for m in net.modules() if isinstance(m, neuron.BaseNode)]
    return sum(found is not launching.NONE for unit in units for found in unit.launches.values())


NEURONS = {
    "LIF": lambda: neuron.LIFNode(surrogate_function=surrogate.ATan()),
    "IF soft": lambda: neuron.IFNode(v_reset=None, surrogate_function=surrogate.ATan()),
    "PLIF": lambda: neuron.ParametricLIFNode(surrogate_function=surrogate.ATan()),
    "LIF no decay": lambda: neuron.LIFNode(decay_input=False, v_reset=-0.1, v_threshold=0.8),
}


def each(net, kind):
    return [m for m in net.modules() if isinstance(m, kind)]


def write(change):
    def changed(net):
        for node in each(net, neuron.BaseNode):
            change(node)

    return changed


CHANGES = {
    "v_threshold": write(lambda m: setattr(m, "v_threshold", 0.7)),
    "v_reset": write(lambda m: setattr(m, "v_reset", -0.3)),
    "soft reset": write(lambda m: setattr(m, "v_reset", None)),
    "tau": write(lambda m: setattr(m, "tau", 3.0)),
    "a tau that is a tensor": write(lambda m: setattr(m, "tau", torch.tensor(3.0))),
    "decay_input": write(lambda m: setattr(m, "decay_input", False)),
    "another surrogate": write(lambda m: setattr(m, "surrogate_function", surrogate.Sigmoid(spiking=False))),
    "store_v_seq": write(lambda m: setattr(m, "store_v_seq", True)),
    "a statistic, through .data": lambda net: [m.running_mean.data.sub_(0.1) for m in each(net, nn.BatchNorm2d)],
    "a weight": lambda net: [m.weight.data.mul_(1.3) for m in each(net, nn.Conv2d)],
    "another weight": lambda net: [setattr(m, "weight", nn.Parameter(m.weight * 1.2)) for m in each(net, nn.Conv2d)],
    "a norm's bias": lambda net: [m.bias.data.add_(0.2) for m in each(net, nn.BatchNorm2d)],
    "a pool's padding": lambda net: [setattr(m, "padding", 1) for m in each(net, nn.MaxPool2d)],
    "a pool's stride": lambda net: [setattr(m, "stride", [1, 1]) for m in each(net, nn.MaxPool2d)],
    "k": lambda net: sj_tac.set_k(net, 3),
}


class Residual(nn.Module):
    """Two chains, with a residual around the second."""

    def __init__(self, one, two):
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x):
        x = self.one(x)
        return self.two[2](self.two[1](self.two[0](x)) + x)
