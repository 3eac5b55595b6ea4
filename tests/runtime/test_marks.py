"""Where collapsed time ends: values carry the mark of it, fused and in the definition, and must lose it alike.

One layer collapses and others do not, so that a mark that is lost, or kept too long, is seen in what comes out.
"""

import pairs
import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, layer
from support import conv, frames, node
from torch import nn
from torch.utils.checkpoint import checkpoint

import sj_tac
from sj_tac.errors import PolicyError

pytestmark = [
    pytest.mark.filterwarnings("ignore::sj_tac.errors.PlanNotKeptWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


class Doubled(torch.autograd.Function):
    """Linear, and below torch's own functions."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Same(torch.autograd.Function):
    """What it is handed."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class Clamped(torch.autograd.Function):
    """Not linear."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def retained(x):
    if x.requires_grad:
        x.retain_grad()
    return x


def written(x):
    x *= 1.5
    return x


def summed_in_place(x):
    other = x.clone()
    x += other
    return x


def doubled_in_place(x):
    x += x
    return x


def summed_by_name(x):
    return x.__iadd__(x.clone())


def read_and_summed(x):
    assert x.sum().isfinite()
    return summed_in_place(x)


def checkpointed(x):
    return checkpoint(lambda t: t * 1.5, x, use_reentrant=True)


def filled(x):
    x[..., 1:3] = 0.4
    x[..., 0, :] = torch.linspace(0, 0.5, 8, dtype=x.dtype)[None, :, None]
    return x


CHANGES = {
    "nothing": lambda x: x,
    "doubled": lambda x: x * 2,
    "a Function": Doubled.apply,
    "a Function that gives what it gets": Same.apply,
    "a Function that clamps": Clamped.apply,
    "a checkpoint": checkpointed,
    "rolled": lambda x: x.roll(1, -1),
    "transposed": lambda x: x.transpose(-1, -2),
    "a dimension more and less": lambda x: x.unsqueeze(-1).squeeze(-1),
    "copied": lambda x: x.clone(memory_format=torch.preserve_format),
    "doubled in place": doubled_in_place,
    "with its mean over channels": lambda x: x + x.mean(-3, keepdim=True),
    "scaled in place by channel": lambda x: (x * 1).mul_(torch.linspace(0.5, 2, 8, dtype=x.dtype).view(-1, 1, 1)),
    "in halves, one by one": lambda x: torch.cat([*x.unflatten(-3, (2, 4)).unbind(-3)], -3),
    "by its own mean": lambda x: x * (1 + x.detach().mean()),
    "with its mean": lambda x: x + x.mean(),
    "less its mean over time": lambda x: x - x.mean(0),
    "rounded": lambda x: x.float().double(),
    "a view of the same shape": lambda x: x.view_as(x),
    "reshaped to the same": lambda x: x.reshape(x.shape),
    "halves": lambda x: torch.cat(x.chunk(2, -3), -3),
    "retained": retained,
    "written": written,
    "constants written to places": filled,
    "summed in place": summed_in_place,
    "summed by name": summed_by_name,
    "read, then summed in place": read_and_summed,
    "relu": lambda x: x.relu(),
}
FOLDED = {
    "F.max_pool2d": lambda x: F.max_pool2d(x, 3, 1, 1),
    "F.avg_pool2d": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "shuffled": lambda x: torch.channel_shuffle(x, 2),
    "F.conv2d": lambda x: F.conv2d(x, torch.eye(8, dtype=x.dtype)[..., None, None] * 1.25),
}
POLICIES = {
    "count": {"default": {"mode": "keep"}, "rules": [{"match": "first", "mode": "collapse", "k": 2}]},
    "binary": {
        "default": {"mode": "preserve", "k": 2},
        "rules": [{"match": "first", "mode": "collapse", "k": 2, "spikes": "binary"}],
    },
    "twice": {"default": {"mode": "preserve", "k": 4}, "rules": [{"match": "first", "mode": "collapse", "k": 2}]},
}
# A MaxPool of more than a neuron's own spikes has no means to take.
IMPOSSIBLE = {("folded F.max_pool2d", True, "count"), ("folded F.max_pool2d", True, "twice")}


class Net(nn.Module):
    """``change`` acts on spikes behind the first neuron, or on the second one's drives; ``folds``: on folded frames."""

    def __init__(self, change, on_spikes, folds):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = conv(2, 8), conv(8, 8), conv(8, 8)
        self.lif1, self.lif2, self.lif3 = (node("lif", v_threshold=v) for v in (0.2, 0.1, 0.03))
        self.change, self.on_spikes, self.folds = change, on_spikes, folds

    def changed(self, x):
        if not self.folds:
            return self.change(x)
        return self.change(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def forward(self, x):
        x = self.lif1(self.first(x))
        if self.on_spikes:
            return self.lif3(self.third(self.lif2(self.second(self.changed(x)))))
        return self.lif3(self.third(self.lif2(self.changed(self.second(x)))))


def run(net, x, recorded):
    for module in net.modules():
        if hasattr(module, "v_threshold"):
            module.train()  # the older host differentiates no neuron in eval mode
    functional.reset_net(net)
    x = x.clone().requires_grad_(recorded)
    with torch.set_grad_enabled(recorded):
        y = net(x)
        assert 0.01 < y.mean() < 0.9
        found = {"y": y.detach()} | {name: m.v.detach() for name, m in net.named_modules() if hasattr(m, "v_threshold")}
        if recorded:
            (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
            assert x.grad.abs().sum() > 0
            found |= {"x": x.grad} | {name: p.grad for name, p in net.named_parameters()}
    return found


@pairs.parametrize(
    name=[*CHANGES, *(f"folded {name}" for name in CHANGES | FOLDED)], on_spikes=[True, False], policy=POLICIES
)
def test_what_is_fused_ends_collapsed_time_where_the_definition_does(name, on_spikes, policy):
    if (name, on_spikes, policy) in IMPOSSIBLE:
        with pytest.raises(PolicyError, match="COLLAPSE_POOL"):
            sj_tac.plan(Net(FOLDED["F.max_pool2d"], True, True), POLICIES[policy], example_input=frames(6, 3, 2, 8, 8))
        return
    folds = name.startswith("folded ")
    net = Net((CHANGES | FOLDED)[name.removeprefix("folded ")], on_spikes, folds).double()
    x = frames(6, 3, 2, 8, 8, dtype=torch.float64)
    fused, defined = (sj_tac.convert(net, POLICIES[policy], example_input=x, fuse=fuse) for fuse in (True, False))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if "rounded" in name else {"rtol": 1e-9, "atol": 1e-10}
    for recorded in (False, True):
        found, expected = run(fused, x[:5], recorded), run(defined, x[:5], recorded)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, **tolerance, msg=lambda m, key=key: f"{key}: {m}")


HOOKS = {
    "none": lambda m, args, y: None,
    "another value": lambda m, args, y: y * 1.1,
    "a copy": lambda m, args, y: y.clone(),
    "turned": lambda m, args, y: y.flip(-1),
    "written": lambda m, args, y: (y.mul_(1.1), None)[1],
    "summed": lambda m, args, y: summed_in_place(y),
    "looked at": lambda m, args, y: (y.sum(), None)[1],
}


@pytest.mark.parametrize("spikes", ["count", "binary"])
@pytest.mark.parametrize("name", [*HOOKS, "another pool", "a pool of means", "no pool"])
def test_what_a_hook_makes_of_spikes_in_front_of_a_pool(name, spikes):
    x, found = frames(7, 3, 2, 8, 8, dtype=torch.float64), []
    policy = {"default": {"mode": "collapse", "k": 2, "spikes": spikes}}
    for fuse in (True, False):
        torch.manual_seed(0)
        pool = layer.MaxPool2d(2, step_mode="m")
        net = nn.Sequential(
            conv(2, 8), node("lif", v_threshold=0.2), pool, conv(8, 8), node("lif", v_threshold=0.1)
        ).double()
        net = sj_tac.convert(net, policy, example_input=x, fuse=fuse)
        if name in HOOKS:
            net[1].register_forward_hook(HOOKS[name])
        elif name == "no pool":
            net[2] = nn.Identity()
        else:
            net[2] = (layer.MaxPool2d if name == "another pool" else layer.AvgPool2d)(4, step_mode="m")
        found.append([run(net, x, recorded) for recorded in (False, True)])
    for fused, defined in zip(*found, strict=True):
        for key, value in defined.items():
            torch.testing.assert_close(fused[key], value, rtol=1e-9, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("on_spikes", [True, False], ids=["spikes", "drives"])
def test_dropout_that_is_on_makes_every_frame_another(on_spikes, policy):
    x, found = frames(6, 3, 2, 8, 8, dtype=torch.float64), []
    for fuse in (True, False):
        # Off while convert looks, and on while autograd records.
        net = Net(lambda y: F.dropout(y, 0.3, torch.is_grad_enabled()), on_spikes, False).double()
        net = sj_tac.convert(net, POLICIES[policy], example_input=x, fuse=fuse)
        torch.manual_seed(5)
        found.append(run(net, x[:5], True))
    for key, value in found[1].items():
        torch.testing.assert_close(found[0][key], value, rtol=1e-9, atol=1e-10)


class Checkpointed(nn.Module):
    """A layer of the net is run again in the backward."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.again = layer, False

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=True) if self.again else self.layer(x)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "defined"])
def test_a_checkpoint_of_one_layer_keeps_its_gradient(fuse, policy):
    net, found = Net(lambda x: x, True, False).double(), []
    net.second = Checkpointed(net.second)
    net = sj_tac.convert(net, POLICIES[policy], example_input=frames(6, 3, 2, 8, 8, dtype=torch.float64), fuse=fuse)
    for net.second.again in (False, True):
        net.zero_grad()
        found.append(run(net, frames(5, 3, 2, 8, 8, dtype=torch.float64), True))
        found[-1] = {key: value.clone() for key, value in found[-1].items()}
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("folds", [False, True], ids=["frames", "folded"])
def test_gradients_that_are_kept_are_those_of_each_frame(folds):
    """Of frames that are alike behind a collapse, too, as the definition shares a gradient out among them."""
    x, found = frames(6, 3, 2, 8, 8, dtype=torch.float64), []
    for fuse in (True, False):
        kept = []

        def keep(y, kept=kept):
            if y.requires_grad:
                kept.append(retained(y))
            return y

        net = sj_tac.convert(Net(keep, True, folds).double(), "collapse", 2, example_input=x, fuse=fuse)
        kept.clear()
        run(net, x, True)
        found.append(kept[0].grad)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
