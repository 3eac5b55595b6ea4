"""A collapsed region ends in a call where it ends by the trace, whichever of the two knows more of what stands between.

By the trace alone goes a call that is compiled, exported or watched; all of them must give what an ordinary call gives.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, layer
from support import conv, node, only_v2
from torch import nn
from torch.utils.checkpoint import checkpoint

import sj_tac
from sj_tac.runtime.borders import Span, definition
from sj_tac.runtime.regions import as_traced
from sj_tac.runtime.values import Shared

C = 4


class Between(nn.Module):
    """A collapse, and behind it a conv and a neuron with something between them."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.c1, self.l1 = conv(2, C), node("lif", v_threshold=0.3)
        self.c2, self.l2 = conv(C, C), node("lif", v_threshold=0.3)
        self.gain = nn.Parameter(torch.rand(1, 1, C, 1, 1) + 0.5)
        self.scale = nn.Parameter(torch.rand(1, C, 1, 1) + 0.5)

    def forward(self, x):
        return self.l2(self.between(self, self.c2(self.l1(self.c1(x)))))


class Headed(nn.Module):
    """A collapse, and behind it a Linear layer with a neuron, and something in front of them."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.c1, self.l1 = conv(2, C), node("lif", v_threshold=0.3)
        self.fc, self.l2 = layer.Linear(36 * C, 5, step_mode="m"), node("lif", v_threshold=0.3)
        self.gain = nn.Parameter(torch.rand(1, 1, C, 1, 1) + 0.5)
        self.scale = nn.Parameter(torch.rand(1, C, 1, 1) + 0.5)

    def forward(self, x):
        return self.l2(self.fc(self.between(self, self.l1(self.c1(x))).flatten(2)))


def folded(function):
    return lambda net, x: function(net, x.flatten(0, 1)).unflatten(0, x.shape[:2])


SAME_SIZE = {
    "by a parameter": lambda net, x: x * net.gain,
    "folded, by a parameter": folded(lambda net, x: x * net.scale),
    "to its dtype, by name": lambda net, x: x.to(dtype=x.dtype),
    "to where it is": lambda net, x: x.cpu(),
    "unfolded by torch.unflatten": lambda net, x: torch.unflatten(x.flatten(0, 1), 0, x.shape[:2]),
    "by a number of NumPy's": lambda net, x: x * np.float64(0.7),
    "by True": lambda net, x: x * True,
    "copied in one piece": lambda net, x: x.clone(memory_format=torch.contiguous_format),
    "copied to its dtype": lambda net, x: x.to(x.dtype, False, True),
    "folded in another layout": folded(lambda net, x: x.contiguous(memory_format=torch.channels_last)),
    "zeros beside, and away": lambda net, x: torch.cat([x, torch.zeros_like(x)], 2)[:, :, :C],
    "beside itself, by name": lambda net, x: torch.cat(tensors=[x, x], dim=2)[:, :, :C],
    "folded from the end": lambda net, x: x.flatten(0, -4).view(x.shape),
    "pooled, by name": folded(lambda net, x: F.avg_pool2d(input=x, kernel_size=3, stride=1, padding=1)),
    "torch's Dropout": lambda net, x: F.dropout(x, 1e-12, net.training),
    "half of it mirrored": lambda net, x: F.pad(x[..., 1:-1, 1:-1], (1, 1, 1, 1, 0, 0), mode="reflect"),
}
MAPS = {
    "mean, and squeezed": lambda net, x: x.mean((-1, -2), keepdim=True).squeeze()[..., None, None],
    "mean, and squeezed twice": lambda net, x: x.mean((-1, -2), keepdim=True).squeeze((-1, -2)).unsqueeze(-1).unsqueeze(-1),
    "flattened, by name": lambda net, x: torch.flatten(input=x, start_dim=3).unsqueeze(-1),
    "flattened, folded": lambda net, x: functional.seq_to_ann_forward(x, nn.Flatten(2)).unsqueeze(-1),
    "mean, by name": lambda net, x: torch.mean(input=x, dim=-1, keepdim=True),
}
POLICIES = {
    "count": {"default": {"mode": "keep"}, "rules": [{"match": "c1", "mode": "collapse", "k": 2}]},
    "binary": {
        "default": {"mode": "keep"},
        "rules": [{"match": "c1", "mode": "collapse", "k": 2, "spikes": "binary"}],
    },
    "read by 2": {"default": {"mode": "preserve", "k": 2}, "rules": [{"match": "c1", "mode": "collapse", "k": 2}]},
    "read by 6": {"default": {"mode": "collapse", "k": 6}, "rules": [{"match": "c1", "mode": "collapse", "k": 3}]},
}


def made(kind, between):
    torch.manual_seed(0)
    net = kind(between).double().eval()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data *= 2
            module.bias.data += 0.3
    return net


def results(net, x):
    functional.reset_net(net)
    with torch.no_grad():
        y = net(x)
    return [y, *[m.v for m in net.modules() if hasattr(m, "v_threshold")]]


def check(kind, between, policy, *, training=False):
    net = made(kind, between)
    net.train(training)
    # Seven frames: the last group is no whole one.
    x = torch.rand(7, 3, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for fuse in (True, False):
        fast = sj_tac.convert(net, policy, fuse=fuse, example_input=x)
        fast.train(training)
        found.append(results(fast, x))
        with definition(fast, traced=True):
            found.append(results(fast, x))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore::sj_tac.errors.PlanNotKeptWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("between", SAME_SIZE | MAPS)
def test_a_call_goes_by_the_trace(between, policy):
    check(Between, (SAME_SIZE | MAPS)[between], POLICIES[policy])


@pytest.mark.filterwarnings("ignore::sj_tac.errors.PlanNotKeptWarning")
@pytest.mark.parametrize("policy", ["count", "binary"])
@pytest.mark.parametrize("between", SAME_SIZE)
def test_the_neuron_of_a_linear_layer_does_fused_what_it_does_unfused(between, policy):
    check(Headed, SAME_SIZE[between], POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dropout_that_drops_next_to_nothing_changes_nothing(policy):
    check(Between, SAME_SIZE["torch's Dropout"], POLICIES[policy], training=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_masks_of_frames_leave_the_rate_as_it_is(policy):
    """Each frame, or each group that is one step, has a mask of its own; what the neuron emits is at the collapse's rate."""
    net = made(Between, lambda net, x: F.dropout(x, 0.5, net.training))
    x = torch.rand(6, 3, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    fast = sj_tac.convert(net, POLICIES[policy], example_input=x).train()
    for module in fast.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    y = results(fast, x)[0].as_subclass(torch.Tensor)
    size = 6 if policy == "read by 6" else 2
    assert y.any()
    for group in y.split(size):
        assert torch.equal(group, group[:1].expand_as(group))


def test_frames_that_differ_have_no_mark():
    """The sample took the way with the collapse, the call takes another: steps are steps."""

    class Either(Between):
        def forward(self, x):
            y = self.l1(self.c1(x)) if self.collapsing else x[:, :, :1].expand(-1, -1, C, -1, -1)
            return self.l2(self.c2(y))

    torch.manual_seed(0)
    net = Either(None).double().eval()
    net.collapsing = True
    net.c2.weight.data *= 2
    x = torch.rand(6, 3, 2, 6, 6, dtype=torch.float64)
    fast = sj_tac.convert(net, POLICIES["count"])
    net.collapsing = fast.collapsing = False
    assert torch.equal(results(fast, x)[0], results(net, x)[0])


@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=only_v2)])
@pytest.mark.parametrize("between", ["by a parameter", "copied to its dtype", "beside itself, by name"])
def test_a_checkpoint_runs_it_again_as_it_was(between, reentrant):
    """Autograd runs the part outside of the net's call; what the trace says of it holds there, too."""

    class Again(Between):
        checkpointed = False

        def forward(self, x):
            spikes = self.l1(self.c1(x))
            if self.checkpointed:
                return checkpoint(self.rest, spikes, use_reentrant=reentrant)
            return self.rest(spikes)

        def rest(self, spikes):
            functional.reset_net(self.l2)  # it runs twice
            return self.l2(self.between(self, self.c2(spikes)))

    net = made(Again, SAME_SIZE[between])
    net.train()  # neurons of old hosts have no gradients in eval mode
    x = torch.rand(7, 3, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for fuse in (True, False):
        fast = sj_tac.convert(net, POLICIES["count"], fuse=fuse, example_input=x)
        for fast.checkpointed in (False, True):
            functional.reset_net(fast)
            fast.zero_grad()
            y = fast(x.clone().requires_grad_()).as_subclass(torch.Tensor)
            (y * torch.linspace(0, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
            found.append([y.detach(), *[p.grad for p in fast.parameters() if p.grad is not None]])
    assert len(found[0]) > 4
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_call_without_the_collapse_has_no_mark_though_its_frames_are_alike():
    """One image T times over, on a way that the sample did not take."""
    net, x = made(Between, lambda net, x: x), torch.rand(1, 3, 2, 6, 6, dtype=torch.float64).repeat(6, 1, 1, 1, 1)
    fast = sj_tac.convert(net, POLICIES["count"])

    def way(net):
        return net.l2(net.c2(x[:, :, :1].expand(-1, -1, C, -1, -1)))

    expected = way(net)
    fast.forward = lambda x: way(fast)
    assert expected.any()
    assert not expected.all()
    assert torch.equal(fast(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_frames_are_alike_but_for_roundings(dtype):
    x = torch.rand(4, 2, 3, 5, 5).to(dtype)
    alike, span = x[:2].repeat_interleave(2, 0), Span(1, 2)
    assert isinstance(as_traced(alike, "", span), Shared)
    assert isinstance(
        as_traced(
            alike * (1 + torch.finfo(dtype).eps * torch.tensor([0, 1, 0, 1]).view(-1, 1, 1, 1, 1)).to(dtype), "", span
        ),
        Shared,
    )
    for other in (x, alike + torch.tensor([0, 0.05, 0, 0]).to(dtype).view(-1, 1, 1, 1, 1)):
        assert as_traced(other, "", span) is other
    for odd in (torch.inf, torch.nan):
        other = x.clone()
        other[0, 0, 0, 0, 0] = odd
        assert as_traced(other, "", span) is other
    assert as_traced(alike.to("meta"), "", span).is_meta
