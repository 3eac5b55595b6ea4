"""Nets for the graph engine, and one comparison: a captured net beside the same net run as it is defined."""

import copy

import pytest
import torch
from defined import given, same
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from spikingjelly.activation_based.model import sew_resnet
from support import awake, conv, frames, node, norm
from torch import nn
from torch.utils.checkpoint import checkpoint

import sj_tac
from sj_tac.rewrites.gate import detach, gate_of

M = {"step_mode": "m"}
OPTIONS = {"surrogate_function": surrogate.ATan(), "detach_reset": True}


def dvs():
    """The DVS net of the paper, cut to three blocks of eight channels."""
    modules = []
    for i in range(3):
        modules += [conv(2 if i == 0 else 8, 8, padding=1), norm(8), node("lif"), layer.MaxPool2d(2, 2, **M)]
    return nn.Sequential(*modules, layer.Flatten(**M), layer.Linear(8 * 4, 5, **M)), (6, 2, 2, 16, 16)


def sew():
    """sew_resnet18, cut to one block in each stage."""
    options = {"num_classes": 5, "cnf": "ADD", "spiking_neuron": neuron.IFNode} | OPTIONS
    net = sew_resnet.SEWResNet(sew_resnet.BasicBlock, [1, 1, 1, 1], **options)
    return net, (4, 2, 3, 32, 32)


def spikformer():
    """A spikformer with one block."""
    model = __import__("spikingjelly.activation_based.model.spikformer", fromlist=["Spikformer"])
    net = model.Spikformer(
        T=4, img_size_h=32, img_size_w=32, patch_size=16, num_classes=5, embed_dims=64, num_heads=4, depths=1,
        spiking_neuron=neuron.LIFNode, **OPTIONS,
    )  # fmt: skip
    return net, (4, 2, 3, 32, 32)


NETS = {"dvs": dvs, "sew": sew, "spikformer": spikformer}


def quickly(name):
    """A test of this net in the quick suite, and of the others, too, in the exhaustive one."""
    return pytest.mark.parametrize(
        "name", [name, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in NETS if n != name)]
    )


def source(name, dtype=torch.float64):
    """An awake net in eval mode, and frames for it."""
    torch.manual_seed(0)
    net, shape = NETS[name]()
    functional.set_step_mode(net, "m")
    x = frames(*shape, dtype=dtype)
    return awake(net.to(dtype).eval(), x), x


def convert(net, k=2, **options):
    """The net with k in every layer."""
    return sj_tac.convert(net, "preserve", k, **options)


def graphs(net):
    """What was captured of a net's calls."""
    gate = gate_of(net)
    return [] if gate is None else gate.capture.graphs


def pair(net, x, k=2, convert=convert):
    """The captured net, and the same net that runs as it is defined."""
    fast = convert(net, k, example_input=x)
    slow = copy.deepcopy(fast)
    detach(slow)
    awake(slow, x)  # at k: shared drives are smoother
    for a, b in zip(fast.modules(), slow.modules(), strict=True):
        if isinstance(a, neuron.BaseNode):
            a.v_threshold = b.v_threshold
    return fast, slow


def pair_of(name, dtype=torch.float64):
    """The same of one of NETS, and frames for it."""
    net, x = source(name, dtype)
    return *pair(net, x), x


def seen(net, x, training=False):
    """All that a call shows, in training with gradients; it goes on from the voltages of the one before."""
    return given(net.train(training), x, grad=training, reset=False)


def agree(fast, slow, x, training=False, calls=1, rest=False):
    """Compare calls that carry the voltages on, on awake nets; ``rest``: the first begins anew."""
    for net in (fast, slow) if rest else ():
        functional.reset_net(net)
    for _ in range(calls):
        found, expected = (seen(net, x, training) for net in (fast, slow))
        gradients = [g.abs().max().item() for n, g in expected.items() if n.startswith("gradient")]
        same(found, expected, atol=1e-9 * max([1.0, *gradients]))
        assert found["output 0"].abs().max() > 0


def code(net):
    """The Python of all graphs of a net."""
    return "\n".join(found.code for found in graphs(net))


def fused(net, which=-1):
    """How many neurons of a graph run in kernels, and how many do not."""
    text = graphs(net)[which].code
    lines = text.splitlines()
    return sum("= sj_tac_rewrites_lower_fire" in line for line in lines), text.count("neuron_steps")


def wide():
    """A net of more than 30 MB, which DistributedDataParallel would cut at its buckets."""
    modules = []
    for i in range(5):
        modules += [conv(2 if i == 0 else 480, 480, padding=1, bias=False), norm(480), node("lif", v_threshold=0.3)]
    return nn.Sequential(*modules)


def trained(rank, net, file, found):
    """Call a net in one of two processes, and note what of its graph is fused."""
    torch.set_num_threads(1)
    net = copy.deepcopy(net)  # what is sent shares its memory
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    parallel = nn.parallel.DistributedDataParallel(net.train())
    for _ in range(2):  # a copy is captured by its second call
        functional.reset_net(net)
        parallel(frames(4, 2, 2, 4, 4)).mean().backward()
    found[rank] = fused(net)
    torch.distributed.destroy_process_group()


def captures(net):
    return len(graphs(net))


class Blocks(nn.Module):
    """Three blocks; those of ``checkpointed`` keep nothing for the backward, and one has a dropout."""

    def __init__(self, checkpointed=(0, 1, 2), inplace=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks, self.neurons = nn.ModuleList(), nn.ModuleList()
        for i in range(3):
            parts = [conv(2 if i == 0 else 6, 6, padding=1), norm(6)]
            parts += [nn.Dropout(0.3)] if i == 1 else []
            self.blocks.append(nn.Sequential(*parts))
            self.neurons.append(node("lif"))
        self.relu = nn.ReLU(inplace=True) if inplace else None

    def forward(self, x):
        for i, (block, spiking) in enumerate(zip(self.blocks, self.neurons, strict=True)):
            x = checkpoint(block, x, use_reentrant=False) if i in self.checkpointed and self.training else block(x)
            if self.relu is not None:
                x = self.relu(x)
            x = spiking(x)
        return x


X = frames(6, 2, 2, 8, 8, dtype=torch.float64)


def blocks(**options):
    torch.manual_seed(0)
    return awake(Blocks(**options).double().eval(), X)
