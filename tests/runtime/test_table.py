"""What a forward does with a value between two layers gives what it gives for the frames: values, gradients, voltages.

Each operation acts on spikes and on drives, behind a layer that collapses and behind one that preserves. The fused net is
compared with ``fuse=False``, whose values are frames, and with a call that goes by the trace alone, as compiled ones do.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from comparing import CLOSE, Way, agree, run, same
from operations import FOLDED, FRAMES, SIZE, C, N, T, put
from support import awake, conv, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import PolicyError
from sj_tac.runtime.borders import definition

pytestmark = [
    pytest.mark.filterwarnings("ignore::sj_tac.errors.PlanNotKeptWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


class Trunk(nn.Module):
    """A layer, and two that read it: ``change`` acts on its spikes, and on the drives of the last one's neuron."""

    def __init__(self, change, keeps, summed):
        super().__init__()
        self.change, self.keeps, self.summed = change, keeps, summed
        self.conv1, self.lif1, self.conv2, self.lif2 = conv(2, C), node("lif"), conv(C, C), node("lif")
        self.conv3, self.norm3, self.lif3 = conv(C, C), norm(C), node("lif")
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, C).view(C, 1, 1))

    def forward(self, x):
        spikes = self.lif1(self.conv1(x))
        first = self.change(spikes, spikes * 0.5, self.gain)
        drives = self.conv3(spikes)
        normed = self.norm3(drives)
        normed = normed + spikes if self.summed else normed
        second = self.change(normed, drives, self.gain)
        if self.keeps:
            return self.lif2(self.conv2(first)), self.lif3(second)
        return first, second, self.lif2(self.conv2(spikes)), self.lif3(normed)


class Net(nn.Module):
    """One trunk for a collapse, and one for what is preserved."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        x = torch.rand(T, N, C, SIZE, SIZE, dtype=torch.float64)
        with torch.no_grad():
            shape = change(x * 1, x * 0.5, torch.ones(C, 1, 1, dtype=x.dtype)).shape
        keeps = len(shape) == 5 and shape[:3] == x.shape[:3]
        self.a, self.b = Trunk(change, keeps, False), Trunk(change, keeps, True)

    def forward(self, x):
        return *self.a(x), *self.b(x)


def folded(operation):
    """The operation of frames whose time is folded into the batch."""

    def change(x, y, gain):
        found = operation(x.flatten(0, 1), y.flatten(0, 1), gain)
        return found.unflatten(0, x.shape[:2]) if len(found) == x.shape[0] * x.shape[1] else found

    return change


def frames():
    return torch.rand(T, N, 2, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def made(change):
    return awake(Net(change).double().eval(), frames())


ROUNDED = CLOSE | {"rtol": 1e-5, "atol": 1e-5}
POLICIES = {
    name: {
        "default": {"mode": "preserve", "k": k},
        "rules": [{"match": "a.conv1", "mode": "collapse", "k": 2, "spikes": spikes}],
    }
    for name, k, spikes in (("count", 2, "count"), ("binary", 2, "binary"), ("count, then more", 4, "count"))
}


def check(net, policy, close=CLOSE, traced=True):
    fused = agree(net, policy, frames(), close=close)
    if traced:
        expected = run(fused, frames(), Way("no_grad"))
        with definition(fused, traced=True):
            same(run(fused, frames(), Way("no_grad")), expected, "by the trace", close)


def rows(names):
    """Every operation with every policy: in the quick suite with one that collapses by counts or in binary."""
    for i, name in enumerate(names):
        for j, policy in enumerate(POLICIES):
            yield pytest.param(name, policy, marks=[pytest.mark.exhaustive] * (j != i % 2))


# Written in place behind a collapse, these have other values where a call goes by the trace alone.
UNTRACED = ("moved in place", "put through a view")
UNTRACED_FOLDED = ("difference in place", "put")


@pytest.mark.parametrize(("name", "policy"), list(rows(FRAMES)))
def test_an_operation(name, policy):
    check(made(FRAMES[name]), POLICIES[policy], ROUNDED if "rounded" in name else CLOSE, name not in UNTRACED)


@pytest.mark.parametrize(("name", "policy"), list(rows(FOLDED)))
def test_an_operation_on_folded_frames(name, policy):
    traced = name not in UNTRACED_FOLDED or policy != "binary"
    check(made(folded(FOLDED[name])), POLICIES[policy], ROUNDED if "rounded" in name else CLOSE, traced)


@pytest.mark.xfail(strict=True, reason="waits for 'One graph: equations and a gate in place of lazy values'")
@pytest.mark.parametrize("name", UNTRACED_FOLDED)
def test_a_write_behind_a_binary_collapse_is_the_same_in_a_compiled_call(name):
    check(made(folded(FOLDED[name])), POLICIES["binary"])


def watched(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 2)


BEFORE = {
    "written": lambda x: x.mul_(1.5),
    "a view of it written": lambda x: x.flatten(0, 1)[3:5].add_(0.25),
    "its data written": lambda x: x.data.sub_(0.25),
    "read": lambda x: x.sum(),
    "watched": watched,
}


@pytest.mark.parametrize("name", ["sum", "put between views"])
@pytest.mark.parametrize("before", BEFORE)
def test_an_operation_on_what_was_written_read_or_watched(before, name):
    def change(x, y, gain):
        BEFORE[before](x)
        return FRAMES[name](x, x * 0.5, gain)

    check(made(change), POLICIES["count" if name == "sum" else "binary"], traced=before != "a view of it written")


@pytest.mark.xfail(strict=True, reason="waits for 'One graph: equations and a gate in place of lazy values'")
@pytest.mark.parametrize("policy", ["count", "count, then more"])
def test_a_hook_on_a_value_sees_the_gradient_of_what_was_made_of_it_before(policy):
    """Converted, it sees the part alone that was made after it: the gradients are wrong in silence."""

    def change(x, y, gain):
        y = x * 0.5
        watched(x)
        return x + y

    check(made(change), POLICIES[policy])


@pytest.mark.parametrize("name", ["put two times", "by a parameter", "a Function, summed", "sum"])
def test_an_operation_in_a_net_whose_layers_are_frozen(name):
    net = made(FRAMES[name])
    for parameter, value in net.named_parameters():
        value.requires_grad_("gain" in parameter or parameter.startswith("b.conv1"))
    check(net, POLICIES["count"])


@pytest.mark.parametrize(
    "refused",
    [
        lambda x: x.flatten(0, 1).unflatten(0, (-1, -1)),
        lambda x: x.reshape(11, -1),
        lambda x: x.flatten(3, 1),
        lambda x: x.transpose(0, 9),
        lambda x: x.unsqueeze(9),
        lambda x: torch.cat([x, x[..., :2]], 2),
        lambda x: x + torch.ones(7),
        lambda x: x.mean(9),
        lambda x: x.split(0, 2),
        lambda x: put(x, (..., 0), torch.ones(5)),
        lambda x: put(x, (slice(None), slice(None), C), 1.0),
    ],
)
def test_what_torch_refuses_is_refused_in_its_words(refused):
    with pytest.raises((RuntimeError, IndexError)) as expected:
        refused(torch.zeros(T, N, C, SIZE, SIZE))
    ran = []

    def change(x, y, gain):
        if ran:
            with pytest.raises(type(expected.value), match=re.escape(str(expected.value)[:20])):
                refused(x)
        return x

    net = made(change)
    fused = sj_tac.convert(net, "preserve", 2, example_input=frames())
    ran.append(True)
    with torch.no_grad():
        fused(frames())


def test_a_max_pool_of_spikes_has_no_means_to_take():
    def change(x, y, gain):
        return F.max_pool2d(x.flatten(0, 1), 3, 1, 1).unflatten(0, x.shape[:2])

    net = made(change)
    check(net, POLICIES["binary"])
    with pytest.raises(PolicyError, match="COLLAPSE_POOL"):
        sj_tac.plan(net, POLICIES["count"], example_input=frames())
