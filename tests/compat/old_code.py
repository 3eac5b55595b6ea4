"""Code as it was written for SpikingJelly 0.0.0.0.12, run there and on the installed host: python old_code.py where out.

where: "old" (nothing is imported in front) or "new" (sj_tac.compat.clock_driven is). clock_driven_checks.py imports it, too.
"""

import itertools
import sys

import torch
import torch.nn as nn

if "new" in sys.argv[1:2]:
    import sj_tac.compat.clock_driven  # noqa: F401

from spikingjelly.clock_driven import functional, layer, neuron, surrogate

T, N = 6, 3


class SewBlock(nn.Module):
    """Spikes of two convolutions added to those that come in; containers fold time."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = layer.SeqToANNContainer(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
        backend = "cupy" if "new" in sys.argv[1:2] else "torch"
        self.sn1 = neuron.MultiStepIFNode(detach_reset=True, surrogate_function=surrogate.ATan(), backend=backend)
        self.conv2 = layer.SeqToANNContainer(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
        self.sn2 = neuron.MultiStepParametricLIFNode(init_tau=2.0, detach_reset=True, surrogate_function=surrogate.ATan())

    def forward(self, x):
        return self.sn2(self.conv2(self.sn1(self.conv1(x)))) + x


class Sew(nn.Module):
    """A residual net of the SEW kind."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.sn = neuron.MultiStepIFNode(detach_reset=True)
        self.blocks = nn.Sequential(SewBlock(6), SewBlock(6))
        self.pool = layer.SeqToANNContainer(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = functional.seq_to_ann_forward(x, self.stem)
        return self.fc(self.pool(self.blocks(self.sn(x))))


def analog(base):
    """A neuron that gives its voltage, stepping by the hooks that it inherits, and keeps a record that it registers."""

    class Analog(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_memory("v_seq", None)

        def step(self, x):
            self.neuronal_charge(x)
            spike = self.neuronal_fire()
            y = torch.relu(self.v)
            self.neuronal_reset(spike)
            return y

        def forward(self, x_seq):
            self.v_seq = torch.stack([self.step(x) for x in x_seq])
            return self.v_seq

    return Analog


def trained():
    """What a net begins with, and what it gives: two forwards with state kept between them, and a backward."""
    torch.manual_seed(0)
    net = Sew()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    x = torch.rand(T, N, 2, 8, 8) * 2
    out = torch.stack([net(x), net(x * 0.7)])
    out.square().sum().backward()
    v = {n: m.v.detach() for n, m in net.named_modules() if isinstance(m, neuron.BaseNode)}
    return {"state": state, "out": out.detach(), "v": v, "grad": {n: p.grad for n, p in net.named_parameters()}}


def neurons():
    """Every setting of the multi-step neurons, and the plain ones, step by step."""
    done = {}
    kinds = itertools.product(("LIF", "ParametricLIF", "IF"), (True, False), (0.0, None, -0.2), (2.0, 1.7, 5.0))
    torch.manual_seed(0)
    x = torch.randn(8, 4, 500) * 2.0 + 0.8
    for (kind, decay, v_reset, tau), detach, form in itertools.product(kinds, (True, False), ("ATan", "Sigmoid")):
        if kind == "IF" and (not decay or tau != 2.0):
            continue
        given = {"v_reset": v_reset, "detach_reset": detach, "surrogate_function": getattr(surrogate, form)()}
        if kind != "IF":
            given |= {"decay_input": decay, "tau" if kind == "LIF" else "init_tau": tau}
        setting = decay, v_reset, tau, detach, form
        for name in (f"MultiStep{kind}Node", f"{kind}Node"):
            done[name, *setting] = stepped(getattr(neuron, name)(**given), x)
        if form == "ATan":
            done[f"own {kind}", *setting] = stepped(analog(getattr(neuron, f"{kind}Node"))(**given), x)
    for v_reset in (-0.1, None):
        for name in ("EIFNode", "MultiStepEIFNode", "QIFNode"):
            node = getattr(neuron, name)(v_reset=v_reset, detach_reset=True)
            done[name, v_reset] = stepped(node, x.clamp(-1, 1))
    return done


def stepped(node, x):
    x = x.clone().requires_grad_()
    several = type(node).__name__.startswith(("MultiStep", "Analog"))
    y = node(x) if several else torch.stack([node(f) for f in x])
    (y * torch.arange(1, 9).view(-1, 1, 1)).sum().backward()
    w = getattr(node, "w", None)
    return {"spikes": y.detach(), "v": node.v.detach(), "grad": x.grad, "w": w.grad if w is not None else None}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save({"net": trained(), "neurons": neurons()}, sys.argv[2])
