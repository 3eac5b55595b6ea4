"""Collapse: where time is compressed, who is stretched, and where frames come back."""

import copy

import pairs
import pytest
import torch
from defined import backend, check, defined, given, same
from spikingjelly.activation_based import functional, layer, neuron
from support import at_rest, awake, conv, csnn, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import PolicyError

M = {"step_mode": "m"}


def three_layers(pool=None):
    torch.manual_seed(0)
    modules = []
    for inputs in (2, 4, 4):
        modules += [conv(inputs, 4, bias=False), norm(4), node("lif", tau=3.0)]
        modules += [pool(2, **M)] if pool else []
    return nn.Sequential(*modules).double().eval()


class Readout(nn.Module):
    """Chains, and what may read the last one's spikes."""

    def __init__(self, pool, *head):
        super().__init__()
        self.features, self.head = three_layers(pool), nn.Sequential(*head).double()

    def forward(self, x):
        return self.head(self.features(x))


def inputs(steps, size=8, seed=0):
    return frames(steps, 2, 2, size, size, dtype=torch.float64, seed=seed)


def first(mode="count", **more):
    """The first conv collapses, those behind it do what ``more`` says."""
    k = more.get("k", 2)
    return {"default": more, "rules": [{"match": "*0", "mode": "collapse", "k": k, "weights": "decay", "spikes": mode}]}


POLICIES = {
    "count": {"default": {"mode": "collapse", "k": 3}},
    "preserved behind": first(mode="count", k=4),
    "binary": first(mode="binary", k=2),
    "binary in binary": {"default": {"mode": "collapse", "k": 4, "spikes": "binary"}},
    "nested": {
        "rules": [
            {"match": "features.0", "mode": "collapse", "k": 2, "spikes": "binary"},
            {"match": "features.[34]", "mode": "collapse", "k": 3},
            {"match": "features.[68]", "mode": "preserve", "k": 6},
        ]
    },
}


@pairs.parametrize(
    pool=[None, layer.MaxPool2d, layer.AvgPool2d], end=["spikes", "linear", "spiking"], policy=POLICIES, steps=[8, 7, 2]
)
def test_values_gradients_and_voltages_are_the_definitions(pool, end, policy, steps):
    side = 16 if pool is None else 2
    head = [] if end == "spikes" else [layer.Flatten(**M), layer.Linear(4 * side * side, 5, **M)]
    net = awake(Readout(pool, *head, *([node("lif")] if end == "spiking" else [])).eval().double(), inputs(8, 16))
    check(net, POLICIES[policy], inputs(steps, 16))


def test_every_neuron_behind_a_count_collapse_is_stretched_and_every_conv_computes_groups():
    net, x = csnn().double(), inputs(7)
    fast = sj_tac.convert(net, "collapse", 3, example_input=x)
    report = sj_tac.report(fast)
    statuses = [("0", "converted", 3), ("4", "converted", 3), ("8", "converted", 3), ("13", "stretched", 3)]
    assert [(v.layer, v.status, v.k) for v in report.verdicts] == statuses
    assert all(v.macs_after * 7 == v.macs_before * 3 for v in report.converted)
    policy = {
        "rules": [
            {"match": "0", "mode": "collapse", "k": 2, "spikes": "binary"},
            {"match": "4", "mode": "collapse", "k": 3},
            {"match": "8", "mode": "preserve", "k": 6},
        ]
    }
    fast = sj_tac.convert(net, policy, example_input=inputs(13))
    with torch.no_grad():
        y = fast(inputs(13))
    # 13 frames -> 7 of two -> 3 of three such; the preserve layer makes one conv of two of them, for the means of each.
    assert torch.equal(y[0], y[5])
    assert [v.macs_after * 13 // v.macs_before for v in sj_tac.report(fast).converted] == [7, 3, 2]


@pytest.mark.captured
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("spikes", ["count", "binary"])
def test_groups_come_out_captured_and_not(spikes, fuse):
    net, x = awake(three_layers(), inputs(10)), inputs(10)
    default = {"mode": "collapse", "k": 2, "spikes": spikes}
    fast = sj_tac.convert(net, {"default": default | {"emit": "groups"}}, fuse=fuse, backend=backend(net, spikes))
    y, expected = at_rest(fast, x), given(defined(net, sj_tac.convert(net, {"default": default})), x)["output 0"]
    # Each binary collapse groups the groups of the one before it.
    torch.testing.assert_close(y, expected[:: 2 if spikes == "count" else 8], rtol=1e-9, atol=1e-9)
    assert y.std() > 0


def test_learned_weights_behind_a_collapse_are_shared_out_where_a_hook_tells_its_frames_apart():
    """k=4 behind a collapse by 2 learns two weights; each is for two frames once these are no longer alike."""
    torch.manual_seed(0)
    net = nn.Sequential(conv(2, 4), node("lif", v_threshold=0.3), conv(4, 4), node("lif", v_threshold=1e9)).double().eval()
    x, seen = frames(8, 2, 2, 8, 8, dtype=torch.float64), []
    default = {"mode": "preserve", "k": 4, "weights": "learned"}
    fast = sj_tac.convert(net, {"default": default, "rules": [{"match": "0", "mode": "collapse", "k": 2}]})
    fast[2].tac_logits.data = torch.tensor([0.0, 1.0], dtype=torch.float64)

    def changed(module, args, spikes):
        seen.append(spikes * torch.linspace(0.5, 2, 8, dtype=torch.float64).view(-1, 1, 1, 1, 1))
        return seen[-1]

    fast[1].register_forward_hook(changed)
    with torch.no_grad():
        fast(x)
        first, last = torch.softmax(torch.tensor([0.0, 1.0], dtype=torch.float64), 0) / 2
        sums = torch.stack([first * (a + b) + last * (c + d) for a, b, c, d in torch.cat([seen[0]]).split(4)])
        net[3](net[2](sums).repeat_interleave(4, 0))
    torch.testing.assert_close(fast[3].v, net[3].v, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("first", "last", "count"), [("frames", "groups", 5), ("groups", "frames", 10)])
def test_the_last_collapse_says_in_what_the_output_comes(first, last, count):
    net = awake(three_layers(), inputs(10))
    *_, name = [v.layer for v in sj_tac.plan(net).converted]
    default = {"mode": "collapse", "k": 2, "emit": first}
    fast = sj_tac.convert(net, {"default": default, "rules": [{"match": name, "emit": last}]})
    assert len(fast(inputs(10))) == count


@pytest.mark.parametrize("fuse", [True, False])
def test_folded_frames_come_out_as_they_are(fuse):
    """Their rows are samples of all frames, of which no group can be told."""

    class Folded(Readout):
        def forward(self, x):
            return self.features(x).flatten(0, 1)

    policy = {"default": {"mode": "collapse", "k": 2, "emit": "groups"}}
    assert sj_tac.convert(Folded(None), policy, example_input=inputs(7), fuse=fuse)(inputs(7)).shape == (14, 4, 8, 8)


def test_single_step_mode_is_the_source():
    net, x = csnn(), inputs(6).float()
    fast = sj_tac.convert(net, "collapse", 4)
    for model in (net, fast):
        functional.set_step_mode(model, "s")
    with torch.no_grad():
        expected, got = (torch.stack([model(frame) for frame in x]) for model in (net, fast))
        assert expected.std() > 0
        assert torch.equal(got, expected)
        functional.set_step_mode(fast, "m")
        functional.reset_net(fast)
        assert fast(x).shape[0] == 6


def test_a_neuron_of_ones_own_emits_means_and_a_kept_conv_gets_groups():
    class Slow(neuron.LIFNode):
        def multi_step_forward(self, x_seq):
            return super().multi_step_forward(x_seq)

    net = nn.Sequential(
        *[conv(2, 4), norm(4), node("lif"), conv(4, 4), norm(4), node("lif"), conv(4, 4), Slow(**M)]
    ).double()
    policy = {"default": {"mode": "collapse", "k": 2}, "rules": [{"match": "3", "mode": "keep"}]}
    net = awake(net.eval(), inputs(5))
    fast = sj_tac.convert(net, policy, example_input=inputs(5), fuse=False)
    expected = [("0", "converted", 2), ("3", "stretched", 2), ("5", "stretched", 2), ("6", "converted", 2)]
    assert [(v.layer, v.status, v.k) for v in sj_tac.report(fast).verdicts] == expected
    known = copy.deepcopy(net)
    known[7].__class__ = neuron.LIFNode
    same(given(fast, inputs(5)), given(check(known, policy, inputs(5)), inputs(5)))


class Branched(nn.Module):
    """A residual block of the spiking kind, whose second conv's drive meets ordinary frames before its neuron."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(conv(2, 4), norm(4), node("lif"))
        self.conv1, self.sn1, self.conv2, self.sn2 = conv(4, 4), node("lif"), conv(4, 4), node("lif")

    def forward(self, x):
        x = self.stem(x)
        return self.sn2(self.conv2(self.sn1(self.conv1(x))) + x)


def test_where_a_collapse_cannot_begin_it_says_why():
    net, x = awake(Branched().double().eval(), inputs(7)), inputs(7)
    policy = {"default": {"mode": "preserve"}, "rules": [{"match": "conv2", "mode": "collapse"}]}
    fast = check(net, policy, x)
    verdict = sj_tac.report(fast)["conv2"]
    assert (verdict.status, verdict.mode) == ("converted", "collapse")
    assert "frames come back before 'sn2': frames at different rates meet in front of it" in verdict.detail
    # That is frames, as preserve gives them.
    same(given(fast, x), given(sj_tac.convert(net, "preserve"), x))
    policy["rules"][0]["spikes"] = "binary"
    with pytest.raises(PolicyError, match="COLLAPSE_BRANCHED: 'sn2': frames at different rates meet"):
        sj_tac.plan(net, policy)
    report = sj_tac.plan(net, {"default": {"mode": "collapse", "spikes": "binary"}})
    assert report["stem.0"].status == "converted"
    assert report["conv2"].reason == "COLLAPSE_BRANCHED"
    # One that begins inside the branch ends where the branch joins the frames of the other.
    policy["rules"][0] = {"match": "conv?", "mode": "collapse"}
    check(net, policy, x)
    check(net, "collapse", x, k=3)
