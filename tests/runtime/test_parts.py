"""Parts of a converted net that are called by themselves, watched; gradients of steps behind a collapse."""

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
        self.double().eval()
        for lif in lifs:
            lif.train()  # the older host differentiates no neuron in eval mode

    def forward(self, x):
        return self.head(self.features(x))


@pytest.fixture
def x():
    return frames(8, 3, 2, 8, 8, dtype=torch.float64).requires_grad_()


def call(net, x):
    functional.reset_net(net)
    return net(x)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


NEW_HEAD = nn.Linear(96, 3).double()
WAYS = {
    "the net": lambda net, x: net(x),
    "its forward": lambda net, x: net.forward(x),
    "a part": lambda net, x: net.features(x),
    "a part in another net": lambda net, x: nn.Sequential(net.features, layer.Flatten(step_mode="m"), NEW_HEAD)(x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["preserve", "collapse"])
def test_backward_hooks_see_gradients_and_change_nothing(way, mode, x):
    found = []
    for fuse in (False, True):
        net = sj_tac.convert(Net(), mode, 4, fuse=fuse)
        before, seen = WAYS[way](net, x).detach(), []
        functional.reset_net(net)
        handles = [
            m.register_full_backward_hook(lambda m, given, out, seen=seen: seen.append(out[0].clone()))
            for m in net.features
            if isinstance(m, (nn.Conv2d, nn.MaxPool2d))
        ]
        y = WAYS[way](net, x)
        close(y.detach(), before)
        assert before.abs().mean() > 0
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        assert len(seen) == 3
        found.append((before, seen))
        for handle in handles:
            handle.remove()
        functional.reset_net(net)
        close(WAYS[way](net, x).detach(), before)
    close(*(before for before, _ in found))
    for a, b in zip(*(seen for _, seen in found), strict=True):
        assert b.abs().sum() > 0
        close(a, b)


def test_an_error_inside_the_net_does_not_make_its_parts_blind(x):
    net = sj_tac.convert(Net(), k=2)

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


LOOKS = {
    "retain_grad": lambda y: y.retain_grad(),
    "register_hook": lambda y: y.register_hook(lambda g: None),
    "data_ptr": lambda y: y.data_ptr(),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("between", [(), (layer.Dropout(0.5, step_mode="m"),)], ids=["pool", "dropout, pool"])
def test_the_gradient_of_steps_that_a_pool_takes_means_of_is_refused(look, between, x):
    """Nothing reads these frames: every step is pooled, and only then the mean is taken."""
    for mode in ("collapse", "preserve"):
        net = sj_tac.convert(Net(*between), mode, 4)
        before = net(x).detach()
        handle = net.features[2].register_forward_hook(lambda m, args, out: (LOOKS[look](out), None)[1])
        if mode == "collapse":
            with pytest.raises(StaleValueError, match=f"{look}: behind a collapse, the mean of these steps"):
                call(net, x)
        else:
            close(call(net, x).detach(), before)
        handle.remove()
        seen = []
        net.features[2].register_forward_hook(lambda m, args, out, seen=seen: (seen.append(out.sum().item()), None)[1])
        close(call(net, x).detach(), before)
        assert seen[0] > 0
