"""SpikingJelly's memory optimization (``memopt``) of a converted net: the same gradients, and less kept for the backward."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import conv, frames, node, norm, only_v2
from torch import nn

import sj_tac

pytestmark = only_v2
X = frames(6, 4, 2, 8, 8, dtype=torch.float64)


def flat():
    torch.manual_seed(0)
    modules = []
    for i in range(4):
        modules += [conv(2 if i == 0 else 8, 8, padding=1), norm(8), node("lif", v_threshold=0.2)]
    return nn.Sequential(*modules).double().train()


def kept(net):
    """Bytes that a forward keeps for its backward, and the parameters' gradients."""
    own = {t.untyped_storage().data_ptr() for t in [*net.parameters(), *net.buffers()]}
    found = {}

    def pack(t):
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    functional.reset_net(net)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = net(X).square().sum()
    loss.backward()
    return sum(size for at, size in found.items() if at not in own), [p.grad for p in net.parameters()]


def optimized(net, targets):
    memopt = pytest.importorskip("spikingjelly.activation_based.memopt")

    def example(net):
        functional.reset_net(net)
        return net(X)

    return memopt.optimize_memory(net, targets, example, level=1, compress=False)


def test_memopt_of_a_flat_net_keeps_less():
    """Less than without, and at k=1 no more than of its source."""
    source = flat()
    plain, _ = kept(sj_tac.convert(source, "preserve", 1, example_input=X))
    found, _ = kept(optimized(sj_tac.convert(source, "preserve", 1, example_input=X), (neuron.BaseNode,)))
    wanted, _ = kept(optimized(source, (neuron.BaseNode,)))
    assert found <= min(plain, wanted)


@pytest.mark.parametrize("k", [1, 2])
def test_memopt_of_every_layer_gives_the_same_gradients(k):
    targets = neuron.BaseNode, layer.Conv2d, layer.BatchNorm2d
    _, wanted = kept(sj_tac.convert(flat(), "preserve", k, example_input=X))
    _, found = kept(optimized(sj_tac.convert(flat(), "preserve", k, example_input=X), targets))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k", [1, 2])
def test_checkpoints_around_blocks_keep_what_they_keep_of_the_source(k):
    """``memopt.checkpoint_module`` around blocks of conv, norm and neuron."""
    memopt = pytest.importorskip("spikingjelly.activation_based.memopt")

    def blocks():
        return nn.Sequential(*(nn.Sequential(*flat()[i : i + 3]) for i in range(0, 12, 3)))

    def checkpointed(net):
        for i, block in enumerate(net):
            net[i] = memopt.checkpoint_module(block)
        return net

    fast = sj_tac.convert(blocks(), "preserve", k, example_input=X)
    _, wanted = kept(copy.deepcopy(fast))
    size, found = kept(checkpointed(fast))
    of_source, _ = kept(checkpointed(blocks()))
    assert size <= of_source
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
