"""Converted nets under autocast in bfloat16: the compiled kernels against the definition in plain PyTorch."""

import pairs
import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, layer
from support import awake, conv, csnn, frames, node, norm
from torch import nn

import sj_tac

# The kernels, in captured calls, are what is asked about.
pytestmark = pytest.mark.captured


class Residual(nn.Module):
    """A sum before a neuron, an overlapping MaxPool and an AvgPool, with bfloat16 in all of them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(conv(2, 4), norm(4), node("lif"), layer.MaxPool2d(3, 2, 1, step_mode="m"))
        self.first = nn.Sequential(conv(4, 4), norm(4), node("lif"))
        self.second = nn.Sequential(conv(4, 4), norm(4))
        self.out = nn.Sequential(node("if"), layer.AvgPool2d(2, step_mode="m"), layer.Flatten(step_mode="m"))
        self.head = nn.Sequential(layer.Linear(4 * 4, 3, step_mode="m"), node("lif"))

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.out(self.second(self.first(x)) + x))


def residual():
    torch.manual_seed(3)
    return awake(Residual().eval(), frames(6, 2, 2, 8, 8))


def run(net, x):
    """Outputs, voltages, and gradients to the input and all parameters."""
    functional.reset_net(net)
    net.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = net(x)
    out.float().square().sum().backward()
    voltages = [m.v for m in net.modules() if hasattr(m, "surrogate_function")]
    return out, voltages, [x.grad, *(p.grad for p in net.parameters())]


@pairs.parametrize(make=[csnn, residual], policy=["preserve 1", "preserve 2", "collapse 3"], last=[False, True])
def test_the_kernels_are_their_definition(make, policy, last):
    source, x = make(), frames(6, 2, 2, 8, 8)
    mode, k = policy.split()
    source = source.to(memory_format=torch.channels_last) if last else source
    kernels, definition = (sj_tac.convert(source, mode, int(k), backend=b) for b in ("cpp", "reference"))
    (out, voltages, gradients), (expected, rest, wanted) = run(kernels, x), run(definition, x)
    assert 0 < expected.float().mean() < 1
    assert out.dtype == expected.dtype
    # The definition's BatchNorm rounds drives to bfloat16, and the kernels do not: a spike at the threshold may turn.
    assert (out != expected).float().mean() <= 0.06
    # One that turns moves what lies behind it: the first layer has nothing in front.
    assert ((voltages[0] - rest[0]).abs() > 2**-7).float().mean() <= 0.01
    for v, w in zip(voltages, rest, strict=True):
        assert v.dtype == w.dtype == torch.float32
        assert (v - w).abs().mean() <= 0.05 * w.abs().mean() + 0.02
    for found, other in zip(gradients, wanted, strict=True):
        assert found.dtype == other.dtype
        assert torch.cosine_similarity(found.flatten(), other.flatten(), 0) > 0.98
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        functional.reset_net(kernels)
        assert torch.equal(kernels(x), out)


def test_a_layer_is_written_out_by_hand():
    """The convolution in bfloat16, of the mean of two frames; everything behind it in float32."""
    chain = nn.Sequential(conv(2, 8, bias=False), norm(8), node("lif"), layer.MaxPool2d(2, step_mode="m")).eval()
    x = frames(8, 3, 2, 12, 12)
    # Multiples of 1/32, so that every order of additions gives the same.
    chain[0].weight.data.mul_(32).round_().div_(32)
    chain = awake(chain, x)
    fast = sj_tac.convert(chain, {"default": {"k": 2, "weights": "uniform"}}, backend="cpp")
    means = (x[0::2] + x[1::2]) / 2
    bn, lif = chain[1], chain[2]
    v, steps = torch.zeros(3, 8, 12, 12), []
    for mean in means:
        y = F.conv2d(mean.bfloat16(), chain[0].weight.bfloat16(), padding=1).float()
        drive = F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=bn.eps)
        for _ in range(2):
            v = v + (drive - v) / 2
            spike = (v >= lif.v_threshold).float()
            v = v * (1 - spike)
            steps.append(F.max_pool2d(spike, 2))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = fast(x)
    assert out.dtype == torch.bfloat16
    assert 0.05 < out.float().mean() < 0.95
    # Torch's BatchNorm rounds otherwise than one multiplication and one sum.
    assert (out.float() != torch.stack(steps)).float().mean() < 1e-3


def test_what_autograd_keeps_is_half():
    """No float32 copies of the drives."""
    chain = nn.Sequential(conv(2, 8), norm(8), node("lif"), conv(8, 8), norm(8), node("lif")).eval()
    net, x = sj_tac.convert(awake(chain, frames(8, 2, 2, 16, 16)), "preserve", 2), frames(8, 2, 2, 16, 16)
    kept = set()

    def keep(t):
        if t.shape[-3:] == (8, 16, 16):
            kept.add(t.dtype)
        return t

    functional.reset_net(net)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        net(x)
    assert kept == {torch.bfloat16}


@pytest.mark.parametrize("k", [1, 2])
def test_neither_a_net_of_bfloat16_nor_who_converts_under_autocast_is_refused(k):
    net, x = csnn(), frames(6, 2, 2, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(sj_tac.report(sj_tac.convert(net, k=k, example_input=x)).converted) == 3
    assert len(sj_tac.report(sj_tac.convert(net.bfloat16(), k=k, example_input=x.bfloat16())).converted) == 3
