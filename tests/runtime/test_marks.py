"""Where collapsed time ends: values carry the mark of it, fused and in the definition, and must lose it alike.

One layer collapses and others do not, so that a mark that is lost, or kept too long, is seen in what comes out.
"""

import pytest
import torch
import torch.nn.functional as F
from comparing import agree, fused_and_defined, run, same
from operations import added
from spikingjelly.activation_based import layer
from support import awake, conv, frames, node
from torch import nn

import sj_tac
from sj_tac.errors import StaleValueError

pytestmark = [
    pytest.mark.filterwarnings("ignore::sj_tac.errors.PlanNotKeptWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]
C = 4
# Seven frames: the last group is no whole one.
X = frames(7, 3, 2, 8, 8, dtype=torch.float64)
POLICIES = {
    "count": {"default": {"mode": "keep"}, "rules": [{"match": "conv1", "mode": "collapse", "k": 2}]},
    "binary": {
        "default": {"mode": "preserve", "k": 2},
        "rules": [{"match": "conv1", "mode": "collapse", "k": 2, "spikes": "binary"}],
    },
    "preserve": {"default": {"mode": "preserve", "k": 2}},
    "count, then more": {"default": {"mode": "collapse", "k": 6}, "rules": [{"match": "conv1", "mode": "collapse", "k": 3}]},
}


def unchanged(x):
    return x


class Net(nn.Module):
    """Three layers; ``change`` acts on the first one's spikes or on the second one's drives."""

    def __init__(self, change=unchanged, on_spikes=True):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2, self.conv3 = conv(2, C), conv(C, C), conv(C, C)
        self.lif1, self.lif2, self.lif3 = node("lif"), node("lif"), node("lif")
        self.change, self.on_spikes = change, on_spikes

    def forward(self, x):
        x = self.lif1(self.conv1(x))
        x = self.conv2(self.change(x)) if self.on_spikes else self.change(self.conv2(x))
        return self.lif3(self.conv3(self.lif2(x)))


def made(net):
    return awake(net.double().eval(), X)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("on_spikes", [True, False], ids=["spikes", "drives"])
def test_dropout_that_is_on_makes_every_frame_another(on_spikes, policy):
    # Off while convert looks, and on while autograd records.
    agree(made(Net(lambda x: F.dropout(x, 0.3, torch.is_grad_enabled()), on_spikes)), POLICIES[policy], X)


@pytest.mark.parametrize("spikes", ["count", "binary"])
def test_a_way_past_the_collapse_has_no_mark_though_its_frames_may_be_alike(spikes):
    """The sample took the way with the collapse, the call takes another: steps are steps."""

    class Either(Net):
        past = False

        def forward(self, x):
            y = x[:, :, :1].expand(-1, -1, C, -1, -1) if self.past else self.lif1(self.conv1(x))
            return self.lif2(self.conv2(y))

    net, rule = made(Either()), {"match": "conv1", "mode": "collapse", "k": 2, "spikes": spikes}
    nets = fused_and_defined(net, {"default": {"mode": "keep"}, "rules": [rule]}, X)
    for x in (X, X[:1].repeat(6, 1, 1, 1, 1)):
        for each in (net, *nets):
            each.past = True
        expected = run(net, x)
        assert 0.01 < expected.values[0].mean() < 0.9
        for each in nets:
            same(run(each, x), expected)


# ---- hooks and looks -----------------------------------------------------------------------------------------------------
HOOKS = {
    "another value": lambda m, args, y: y * 1.1,
    "written": lambda m, args, y: (y.mul_(1.1), None)[1],
    "summed": lambda m, args, y: added(y, y.clone()),
    "looked at": lambda m, args, y: (y.sum(), None)[1],
}
POOLS = {
    "another pool": lambda: layer.MaxPool2d(4, step_mode="m"),
    "no pool": nn.Identity,
}


@pytest.mark.parametrize(
    ("name", "spikes"), [*((n, "count") for n in (*HOOKS, *POOLS)), ("another value", "binary"), ("no pool", "binary")]
)
def test_what_is_made_of_spikes_in_front_of_a_pool(name, spikes):
    torch.manual_seed(0)
    pool = layer.MaxPool2d(2, step_mode="m")
    net = made(nn.Sequential(conv(2, C), node("lif"), pool, conv(C, C), node("lif")))

    def edit(net):
        if name in HOOKS:
            net[1].register_forward_hook(HOOKS[name])
        else:
            net[2] = POOLS[name]()

    agree(net, {"default": {"mode": "collapse", "k": 2, "spikes": spikes}}, X, edit)


@pytest.mark.parametrize("look", ["retain_grad", "register_hook", "data_ptr"])
@pytest.mark.parametrize("between", [(), (layer.Dropout(0.5, step_mode="m"),)], ids=["pool", "dropout, pool"])
def test_the_gradient_of_steps_that_a_pool_takes_means_of_is_refused(look, between):
    """Nothing reads these frames: every step is pooled, and only then the mean is taken."""
    torch.manual_seed(0)
    pool, asked = layer.MaxPool2d(2, step_mode="m"), {"register_hook": (lambda g: None,)}.get(look, ())
    net = made(nn.Sequential(conv(2, C), node("lif"), *between, pool, conv(C, C), node("lif")))
    for mode in ("collapse", "preserve"):
        fast = sj_tac.convert(net, mode, 4)
        before, seen = run(fast, X), []
        handle = fast[1].register_forward_hook(lambda m, args, out: (getattr(out, look)(*asked), None)[1])
        if mode == "collapse":
            with pytest.raises(StaleValueError, match=f"{look}: behind a collapse, the mean of these steps"):
                run(fast, X)
        else:
            same(run(fast, X), before)
        handle.remove()
        fast[1].register_forward_hook(lambda m, args, out, seen=seen: (seen.append(out.sum().item()), None)[1])
        same(run(fast, X), before)
        assert seen[0] > 0


JOINS = {
    "sum": lambda y, i: y + i,
    "difference": lambda y, i: y - i,
    "in place": lambda y, i: y.add_(i),
    "beside": lambda y, i: torch.cat([y, i], 2)[:, :, 1 : C + 1],
}


@pytest.mark.parametrize("first", [{"mode": "collapse", "k": 2}, {"mode": "collapse", "k": 2, "spikes": "binary"}, {"k": 2}])
@pytest.mark.parametrize("join", ["sum", "difference", "in place", "beside"])
def test_drives_of_groups_of_other_sizes_without_a_neuron_in_between(join, first):
    class Drives(Net):
        def forward(self, x):
            x = self.lif1(self.conv1(x))
            return self.lif2(self.change(self.conv2(x), self.conv3(x)))

    rules = [{"match": "conv1"} | first, {"match": "conv3", "k": 4}]
    agree(made(Drives(JOINS[join])), {"default": {"mode": "preserve", "k": 2}, "rules": rules}, X)
