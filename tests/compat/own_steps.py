"""Neurons that step by themselves, as code for SpikingJelly 0.0.0.0.12 has them: python own_steps.py where out.

where: "old" (nothing is imported in front) or "new" (sj_tac.compat.clock_driven is).
"""

import itertools
import sys

import torch

if sys.argv[1] == "new":
    import sj_tac.compat.clock_driven  # noqa: F401

from spikingjelly.clock_driven import functional, neuron, surrogate


def analog(base):
    """A leaky neuron that gives its voltage: steps by the hooks that it inherits."""

    class Analog(base):
        def forward(self, x):
            self.neuronal_charge(x)
            spike = self.neuronal_fire()
            y = torch.relu(self.v)
            self.neuronal_reset(spike)
            return y

    class Recording(Analog):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_memory("v_seq", None)

        def forward(self, x_seq):
            self.v_seq = torch.stack([super(Recording, self).forward(x) for x in x_seq])
            return self.v_seq

    return Recording


def run(node, x):
    x = x.clone().requires_grad_()
    assert node.v_seq is None
    y = node(x)
    (y * torch.arange(1, 9).view(-1, 1, 1)).sum().backward()
    assert node.v_seq is y
    v, w = node.v.detach(), getattr(node, "w", None)
    functional.reset_net(node)
    assert node.v_seq is None
    again = node(x.detach())
    return {"y": y.detach(), "v": v, "again": again.detach(), "x": x.grad, "w": x.grad if w is None else w.grad}


if __name__ == "__main__":
    torch.manual_seed(0)
    x, done = torch.randn(8, 3, 50) + 0.6, {}
    for training, reset, decays in itertools.product((True, False), (0.0, None, -0.3, 0.2), (True, False)):
        more = {"v_reset": reset, "surrogate_function": surrogate.ATan(), "detach_reset": decays}
        made = {
            "if": analog(neuron.IFNode)(v_threshold=0.9, **more),
            "lif": analog(neuron.LIFNode)(3.0, decays, 0.7, **more),
            "plif": analog(neuron.ParametricLIFNode)(2.7, decays, 0.7, **more),
        }
        for name, node in made.items():
            done[name, training, reset, decays] = run(node.train(training), x)
    torch.save(done, sys.argv[2])
