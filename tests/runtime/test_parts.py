"""Parts of a converted net that are called by themselves, watched or compiled; gradients of steps behind a collapse."""

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import StaleValueError

pytestmark = pytest.mark.filterwarnings("ignore::sj_tac.errors.PlanNotKeptWarning")


class Net(nn.Module):
    def __init__(self, *between):
        super().__init__()
        torch.manual_seed(0)
        lifs = [node("lif", v_threshold=0.3) for _ in range(2)]
        pool = layer.MaxPool2d(2, step_mode="m")
        self.features = nn.Sequential(conv(2, 6), norm(6), lifs[0], *between, pool, conv(6, 6), norm(6), lifs[1])
        self.head = nn.Sequential(layer.Flatten(step_mode="m"), layer.Linear(96, 5, step_mode="m"))

    def forward(self, x):
        return self.head(self.features(x))


@pytest.fixture
def x():
    return frames(8, 3, 2, 8, 8).requires_grad_()


NEW_HEAD = nn.Linear(96, 3)
WAYS = {
    "the net": lambda net, x: net(x),
    "its forward": lambda net, x: net.forward(x),
    "a part": lambda net, x: net.features(x),
    "a part in another net": lambda net, x: nn.Sequential(net.features, layer.Flatten(step_mode="m"), NEW_HEAD)(x),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("policy", [("preserve", 1), ("preserve", 4), ("collapse", 4)])
def test_backward_hooks_see_gradients_and_change_nothing(way, policy, x):
    found = []
    for fuse in (False, True):
        net = sj_tac.convert(Net().eval(), *policy, fuse=fuse)
        for module in net.modules():
            if hasattr(module, "v_threshold"):
                module.train()
        before = WAYS[way](net, x).detach()
        functional.reset_net(net)
        seen = []
        handles = [
            m.register_full_backward_hook(lambda m, given, out, seen=seen: seen.append(out[0].clone()))
            for m in net.features
            if isinstance(m, (nn.Conv2d, nn.MaxPool2d))
        ]
        y = WAYS[way](net, x)
        assert torch.equal(y, before)
        assert before.abs().mean() > 0
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        assert len(seen) == 3
        found.append((y.detach(), seen))
        for handle in handles:
            handle.remove()
        functional.reset_net(net)
        assert torch.equal(WAYS[way](net, x), before)
    torch.testing.assert_close(found[1][0], found[0][0])
    for a, b in zip(*(seen for _, seen in found), strict=True):
        assert b.abs().sum() > 0
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_an_error_inside_the_net_does_not_make_its_parts_blind(x):
    net = sj_tac.convert(Net().eval(), k=2)
    for module in net.modules():
        if hasattr(module, "v_threshold"):
            module.train()

    def fail(module, args):
        raise RuntimeError("planned")

    handle = net.head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planned"):
        net(x)
    handle.remove()
    functional.reset_net(net)
    net.features[0].register_full_backward_hook(lambda m, given, out: None)
    net.features(x).sum().backward()
    assert net.features[0].weight.grad.abs().sum() > 0


class Front(nn.Module):
    """Ends in a norm: its neuron stands outside."""

    def __init__(self, inputs):
        super().__init__()
        self.conv, self.norm = conv(inputs, 6), norm(6)

    def forward(self, x):
        return self.norm(self.conv(x))


@pytest.mark.parametrize("policy", [("preserve", 4), ("collapse", 4), ("collapse", 2)])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile itself asks for it
def test_a_compiled_part_changes_nothing(policy, at, recorded, x):
    torch.manual_seed(0)
    net = nn.Sequential(
        Front(2), node("lif", v_threshold=0.3), Front(6), node("lif", v_threshold=0.3), layer.AvgPool2d(2, step_mode="m"),
        layer.Flatten(step_mode="m"), layer.Linear(96, 20, step_mode="m"), node("lif", v_threshold=0.1),
    ).eval()  # fmt: skip
    fast = sj_tac.convert(net, *policy)

    def call():
        functional.reset_net(fast)
        with torch.set_grad_enabled(recorded):
            return fast(x).detach()

    before = call()
    assert 0.02 < before.mean() < 0.6
    torch._dynamo.reset()
    fast[at].compile(backend="eager")
    assert torch.equal(call(), before)


LOOKS = {
    "retain_grad": lambda y: y.retain_grad(),
    "register_hook": lambda y: y.register_hook(lambda g: None),
    "data_ptr": lambda y: y.data_ptr(),
}


@pytest.mark.parametrize("look", list(LOOKS))
@pytest.mark.parametrize("between", [(), (layer.Dropout(0.5, step_mode="m"),)], ids=["pool", "dropout, pool"])
def test_the_gradient_of_steps_that_a_pool_takes_means_of_is_refused(look, between, x):
    """Nothing reads these frames: every step is pooled, and only then the mean is taken."""
    for policy, fuse in ((("collapse", 4), True), (("collapse", 4), False), (("preserve", 4), True)):
        net = sj_tac.convert(Net(*between).eval(), *policy, fuse=fuse)
        for module in net.modules():
            if hasattr(module, "v_threshold"):
                module.train()
        before = net(x).detach()
        functional.reset_net(net)
        handle = net.features[2].register_forward_hook(lambda m, args, out: (LOOKS[look](out), None)[1])
        if policy[0] == "collapse":
            with pytest.raises(
                StaleValueError, match=f"{look}: behind a collapse, the mean of these steps is taken after the Max"
            ):
                net(x)
        else:
            assert torch.equal(net(x).detach(), before)
        handle.remove()
        functional.reset_net(net)
        seen = []
        net.features[2].register_forward_hook(lambda m, args, out, seen=seen: (seen.append(out.sum().item()), None)[1])
        assert torch.equal(net(x).detach(), before)
        assert seen[0] > 0
