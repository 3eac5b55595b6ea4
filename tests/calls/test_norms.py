"""A norm's map is computed again whenever one of its numbers is another, however it came to be so."""

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import awake, conv, frames, node, norm
from torch import nn

import sj_tac


def net():
    torch.manual_seed(0)
    chain = nn.Sequential(conv(2, 8), norm(8), node("lif"), conv(8, 8), norm(8), node("lif"))
    return awake(chain.eval(), frames(6, 2, 2, 8, 8))


def clip(steps=6):
    return frames(steps, 2, 2, 8, 8)


def learned(bn):
    bn.train()
    bn(torch.randn(4, 2, 8, 5, 5))
    bn.eval()


CHANGES = {
    "through data": lambda bn: bn.running_mean.data.add_(0.2),
    "in place": lambda bn: bn.weight.mul_(1.5),
    "other data": lambda bn: setattr(bn.bias, "data", bn.bias.data + 0.1),
    "a new parameter": lambda bn: setattr(bn, "weight", nn.Parameter(bn.weight * 0.7)),
    "learned": learned,
    "eps": lambda bn: setattr(bn, "eps", 0.3),
    "without a bias": lambda bn: setattr(bn, "bias", None),
    "without a weight": lambda bn: setattr(bn, "weight", None),
    "other memory": lambda bn: bn.running_var.set_(torch.rand(8) + 0.5),
    "through NumPy": lambda bn: bn.running_var.numpy().__setitem__(3, 2.5),
    "otherwise in the same memory": lambda bn: setattr(bn.running_mean, "data", bn.running_mean.data[:1].expand(8)),
}


@pytest.mark.captured
def test_a_changed_norm_is_what_the_next_call_uses():
    """One change after the other, seldom with a new capture."""
    source = net()
    fast, x = sj_tac.convert(source, "preserve", 1, example_input=clip()), clip()
    with torch.no_grad():
        before = fast(x)
        for name, change in CHANGES.items():
            for of in (fast, source):
                torch.manual_seed(3)
                change(of[1])
                change(of[4])
                functional.reset_net(of)
            after, expected = fast(x), source(x)
            assert (after != before).float().mean() > 0.01, f"{name} changes nothing"
            # Maps are kept in float32 alone, where a last bit may tip a spike over.
            assert (after != expected).float().mean() < 1e-3, name
            before = after


@pytest.mark.parametrize(("k", "training", "fuse"), [(2, True, True), (4, False, True), (2, True, False)])
def test_one_map_in_channels_last_has_the_gradients_of_a_contiguous_one(k, training, fuse):
    """torch alone is wrong there: of one sample, whose batch has the stride that a view gives it."""
    torch.manual_seed(0)
    source = nn.Sequential(
        layer.Conv2d(3, 8, 5, 2, 2), layer.BatchNorm2d(8), neuron.LIFNode(v_threshold=0.5), layer.AvgPool2d(3, 1, 1),
        layer.Conv2d(8, 24, 1), layer.BatchNorm2d(24), neuron.LIFNode(v_threshold=0.2),
    ).double()  # fmt: skip
    functional.set_step_mode(source, "m")
    source.train(training)
    x, found = torch.rand(4, 1, 3, 12, 9).double(), []
    for last in (False, True):
        layout = torch.channels_last if last else torch.contiguous_format
        fast = sj_tac.convert(source, "preserve", k, fuse=fuse).to(memory_format=layout)
        y = fast(x.flatten(0, 1).contiguous(memory_format=layout).unflatten(0, (4, 1)))
        assert 0.01 < y.mean() < 0.9
        (y * torch.linspace(-1, 1, y.numel()).double().view(y.shape)).sum().backward()
        found.append((y.detach(), *(p.grad for p in fast.parameters())))
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-8)
