"""What the tests of packed convolutions share: a net whose layers pack, and what is known of their calls."""

import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import nn

import sj_tac
from sj_tac.runtime import packing
from sj_tac.runtime.convs import DriveModule

CHANNELS = 32


def source(channels=CHANNELS, **options):
    """Three layers of small maps in channels_last, whose neurons fire."""
    torch.manual_seed(0)
    modules, options = [], {"kernel_size": 3, "padding": 1, "bias": False} | options
    for _ in range(3):
        conv = layer.Conv2d(channels, channels, **options)
        norm = layer.BatchNorm2d(channels)
        norm.running_mean.uniform_(-0.2, 0.2)
        norm.running_var.uniform_(0.02, 0.1)
        nn.init.uniform_(norm.bias, 0.0, 0.6)
        modules += [conv, norm, neuron.LIFNode(surrogate_function=surrogate.ATan())]
    net = nn.Sequential(*modules)
    functional.set_step_mode(net, "m")
    return net.eval().to(memory_format=torch.channels_last)


def frames(steps=6, batch=2, channels=CHANNELS, size=4, last=True):
    x = (torch.rand(steps, batch, channels, size, size) < 0.3).float()
    return x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (steps, batch)) if last else x


def convs(net):
    return [m for m in net.modules() if isinstance(m, DriveModule)]


def found(net):
    """What is known of each layer's calls."""
    return [set(conv._tac.packing.calls.values()) for conv in convs(net)]


@torch.no_grad()
def settled(net, *inputs):
    """Call it until nothing is tried any more."""
    for x in inputs:
        for _ in range(3):
            functional.reset_net(net)
            net(x)
    functional.reset_net(net)
    return net


def packed(k=2, **options):
    net = sj_tac.convert(source(**options), "preserve", k)
    x = frames()
    assert found(settled(net, x)) == [{packing.PACKS}] * 3
    return net, x
