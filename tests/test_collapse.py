"""Collapse in nets that are one chain: where time is compressed, who is stretched, and where frames come back."""

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import awake, conv, csnn, frames, node, norm, recorded, zoo
from torch import nn

import sj_tac
from sj_tac.runtime.borders import definition
from sj_tac.runtime.values import Shared


def rate(x):
    """Frames that were computed; a value has T of them, whatever its rate."""
    return x.expression.compact.shape[0] if isinstance(x, Shared) else x.shape[0]


def collapse_first(k, weights="decay"):
    """The first conv collapses; those behind it preserve, with uniform weights where they aggregate at all."""
    return {
        "default": {"mode": "preserve", "k": k, "weights": "uniform"},
        "rules": [{"match": "0", "mode": "collapse", "k": k, "weights": weights}],
    }


def three_layers(pool):
    torch.manual_seed(0)
    modules = []
    for inputs in (2, 4, 4):
        modules += [conv(inputs, 4, bias=False), norm(4), node("lif", tau=3.0, v_threshold=0.25)]
        modules += [pool(2, step_mode="m")] if pool else []
    return nn.Sequential(*modules).eval()


@pytest.mark.parametrize("pool", [None, layer.MaxPool2d, layer.AvgPool2d])
@pytest.mark.parametrize("steps", [8, 11, 3])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_count_in_the_first_layer_is_preserve_with_uniform_weights_behind_it(k, steps, pool):
    net = three_layers(pool)
    x = frames(steps, 2, 2, 16, 16)
    collapsed = sj_tac.convert(net, collapse_first(k))
    oracle_policy = {
        "default": {"mode": "preserve", "k": k, "weights": "uniform"},
        "rules": [{"match": "0", "weights": "decay"}],
    }
    preserved = sj_tac.convert(net, oracle_policy)
    kinds = (neuron.BaseNode, layer.MaxPool2d)
    with torch.no_grad(), recorded(collapsed, kinds) as got, recorded(preserved, kinds) as expected:
        y, z = collapsed(x), preserved(x)
    # Frames come back at the output: each group's mean, as often as the group has steps.
    starts = list(range(0, steps, k))
    means = torch.cat([z[s : s + k].mean(0, keepdim=True).expand(len(z[s : s + k]), *z.shape[1:]) for s in starts])
    assert 0 < z.mean() < 1
    torch.testing.assert_close(y, means)
    # Bit for bit, at every neuron and every MaxPool behind one: the mean of the oracle's steps, as often as there are steps.
    for name, (spikes,) in got.items():
        groups = [expected[name][0][s : s + k] for s in starts]
        uniform = [sum(f * (1 / len(g)) for f in g).expand(len(g), *g.shape[1:]) for g in groups]
        assert torch.equal(spikes, torch.cat(uniform)), name


class Readout(nn.Module):
    """Chains with a pool behind each, and what may read the last one's spikes: nothing, or a layer and its neuron."""

    def __init__(self, pool, spiking):
        super().__init__()
        self.features = three_layers(pool)
        side = 16 if pool is None else 2
        self.head = nn.Sequential(layer.Flatten(step_mode="m"), layer.Linear(4 * side * side, 5, step_mode="m"))
        if spiking:
            self.head.append(node("plif"))

    def forward(self, x):
        return self.head(self.features(x))


def everything(net, x):
    """Output, input's gradient, voltages."""
    functional.reset_net(net)
    x = x.clone().requires_grad_()
    y = net(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(m.v.detach() for m in net.modules() if isinstance(m, neuron.BaseNode))]


@pytest.mark.parametrize("pool", [None, layer.MaxPool2d, layer.AvgPool2d])
@pytest.mark.parametrize("end", ["features", "linear", "spiking"])
@pytest.mark.parametrize(
    ("first", "second", "k", "steps"),
    [("count", "count", 4, 8), ("count", "count", 3, 7), ("binary", None, 2, 7), ("count", "binary", 2, 7)],
)
def test_who_runs_the_neurons_and_how_modules_are_joined_changes_nothing(pool, end, first, second, k, steps):
    """Kernels, the host's own steps, plain frames between modules, and the net unfused: all are the definition."""
    net = (three_layers(pool) if end == "features" else Readout(pool, end == "spiking")).eval()
    net = awake(net, frames(steps, 2, 2, 16, 16)).double()
    for module in net.modules():
        if isinstance(module, neuron.BaseNode):
            module.train()  # SpikingJelly 0.0.0.0.14 has no gradients in eval mode
    convs = [name for name, module in net.named_modules() if isinstance(module, layer.Conv2d)]
    rules = [{"match": convs[0], "mode": "collapse", "k": k, "spikes": first}]
    if second is not None:
        rules.append({"match": convs[1], "mode": "collapse", "k": k, "spikes": second})
    policy = {"default": {"mode": "preserve" if second is None else "collapse", "k": k}, "rules": rules}
    x = frames(steps, 2, 2, 16, 16, dtype=torch.float64)
    expected = everything(sj_tac.convert(net, policy, example_input=x, fuse=False), x)
    assert expected[0].abs().sum() > 0
    fast = sj_tac.convert(net, policy, example_input=x)
    found = {"kernels": everything(fast, x)}
    with definition(fast):
        found["plain frames"] = everything(fast, x)
    for module in fast.modules():
        if isinstance(module, neuron.BaseNode):
            module.store_v_seq = True
    found["the host's steps"] = everything(fast, x)
    for way, values in found.items():
        for a, b in zip(values, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, way=way: f"{way}: {m}")


def test_every_neuron_behind_a_count_collapse_is_stretched():
    net = csnn()
    report = sj_tac.plan(net, "collapse", 3)
    assert [(v.layer, v.status, v.k) for v in report.verdicts] == [
        ("0", "converted", 3),
        ("4", "converted", 3),
        ("8", "converted", 3),
        ("13", "stretched", 3),
    ]
    fast = sj_tac.convert(net, "collapse", 3)
    x = frames(7, 2, 2, 8, 8)
    rates = {}
    fast[12].register_forward_hook(lambda m, a, out: rates.__setitem__("linear", (len(out), rate(out))))
    with torch.no_grad():
        assert fast(x).shape == net(x).shape
    assert rates["linear"] == (7, 3)
    assert fast[13].v.shape == (2, 6)


def test_output_keeps_t_with_each_groups_true_length_or_stays_in_groups():
    net = csnn()
    x = frames(10, 2, 2, 8, 8)
    with torch.no_grad():
        y = sj_tac.convert(net, "collapse", 4)(x)
        groups = sj_tac.convert(net, {"default": {"mode": "collapse", "k": 4, "emit": "groups"}})(x)
    assert groups.shape == (3, 2, 3)
    assert torch.equal(y, groups.repeat_interleave(torch.tensor([4, 4, 2]), 0))
    assert y.std() > 0


@pytest.mark.parametrize("spikes", ["count", "binary"])
def test_groups_come_out_whatever_the_way(spikes):
    """Fused, in the definition, while somebody watches gradients inside, and compiled."""
    x, net, expected = frames(10, 2, 2, 8, 8), three_layers(None), None
    for i in (2, 5, 8):
        net[i].v_threshold = 0.1
    policy = {"default": {"mode": "collapse", "k": 2, "emit": "groups", "spikes": spikes}}
    for way in ("fused", "defined", "watched", "compiled"):
        made = sj_tac.convert(net, policy, fuse=way != "defined")
        if way == "watched":
            made[3].register_full_backward_hook(lambda m, i, o: None)
        called = torch.compile(made, backend="eager") if way == "compiled" else made
        y = called(x).detach()
        expected = y if expected is None else expected
        assert 0.002 < y.mean() < 0.9
        torch.testing.assert_close(y, expected, msg=lambda m, way=way: f"{way}: {m}")
    assert len(expected) == (5 if spikes == "count" else 2)


@pytest.mark.parametrize("way", ["fused", "defined", "watched"])
def test_folded_frames_come_out_as_they_are(way):
    """Their rows are samples of all frames, of which no group can be told."""

    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = three_layers(None)

        def forward(self, x):
            return self.features(x).flatten(0, 1)

    net, x = Folded(), frames(7, 3, 2, 8, 8)
    policy = {"default": {"mode": "collapse", "k": 2, "emit": "groups"}}
    made = sj_tac.convert(net, policy, example_input=x, fuse=way != "defined")
    if way == "watched":
        made.features[3].register_full_backward_hook(lambda m, i, o: None)
    assert made(x).shape == (21, 4, 8, 8)


def test_k_counts_source_steps_behind_a_collapse():
    """Behind a collapse by 2, a layer of k=4 aggregates two frames, weighted beta^2 : 1."""
    net = three_layers(None)
    policy = {"default": {"mode": "preserve", "k": 4}, "rules": [{"match": "0", "mode": "collapse", "k": 2}]}
    fast = sj_tac.convert(net, policy)
    seen = {}
    fast[3].register_forward_hook(lambda m, a, out: seen.update(x=a[0] + 0, y=out + 0, rate=rate(a[0])))
    with torch.no_grad():
        fast(frames(8, 2, 2, 8, 8))
        beta = 1 - 1 / 3
        pair = (beta**2 * seen["x"][0::4] + seen["x"][2::4]) / (beta**2 + 1)
        expected = net[3](pair).repeat_interleave(4, 0)
    assert seen["rate"] == 4
    assert torch.equal(seen["x"][0::2], seen["x"][1::2])
    torch.testing.assert_close(seen["y"], expected)


def test_binary_resets_the_step_and_frames_come_back_at_the_end():
    net = csnn()
    policy = {
        "default": {"mode": "preserve", "k": 1},
        "rules": [{"match": "0", "mode": "collapse", "k": 4, "spikes": "binary"}],
    }
    fast = sj_tac.convert(net, policy)
    x = frames(10, 2, 2, 8, 8)
    rates = {}
    fast[2].register_forward_hook(lambda m, a, out: rates.__setitem__("drive", rate(a[0])))
    fast[5].register_forward_hook(lambda m, a, out: rates.__setitem__("behind", rate(a[0])))
    with torch.no_grad():
        y = fast(x)
        by_hand = sj_tac.TAC(*(sj_tac.restore(fast)[i] for i in (0, 1, 2)), 4)
        groups = by_hand(x)
        for module in list(net)[3:]:
            groups = module(groups)
    assert rates == {"drive": 3, "behind": 3}
    assert fast[5].__class__.__name__ == "TACBatchNorm2d"
    assert y.shape[0] == 10
    assert torch.equal(y, groups.repeat_interleave(torch.tensor([4, 4, 2]), 0))


def test_collapsed_spans_nest():
    net = csnn()
    policy = {
        "rules": [
            {"match": "0", "mode": "collapse", "k": 2, "spikes": "binary"},
            {"match": "4", "mode": "collapse", "k": 3},
            {"match": "8", "mode": "preserve", "k": 6},
        ]
    }
    fast = sj_tac.convert(net, policy)
    counts = {}
    for i in (0, 4, 8, 12):
        fast[i].register_forward_hook(lambda m, a, out, i=i: counts.__setitem__(i, (rate(a[0]), rate(out))))
    with torch.no_grad():
        y = fast(frames(13, 2, 2, 8, 8))
    # 13 frames -> 7 of two -> 3 of three such; the preserve layer makes one conv of two of them, for the means of each.
    assert counts == {0: (13, 7), 4: (7, 3), 8: (3, 2), 12: (3, 3)}
    assert y.shape[0] == 13
    assert torch.equal(y[0], y[5])
    assert sj_tac.report(fast)["8"].macs_after * 13 == sj_tac.report(fast)["8"].macs_before * 2


def test_called_from_outside_it_hands_out_frames_with_the_same_values():
    net = csnn()
    fast = sj_tac.convert(net, "collapse", 4)
    x = frames(10, 2, 2, 8, 8)
    inside = {}
    handles = [fast[i].register_forward_hook(lambda m, a, out, i=i: inside.__setitem__(i, out + 0)) for i in (3, 9)]
    with torch.no_grad():
        fast(x)
        for handle in handles:
            handle.remove()
        for stop in (3, 9):
            functional.reset_net(fast)
            outside = x
            for module in list(fast)[: stop + 1]:
                outside = module(outside)
            assert outside.shape[0] == 10
            torch.testing.assert_close(outside + 0, inside[stop])


def test_single_step_mode_is_the_exact_source_chain():
    net = csnn()
    fast = sj_tac.convert(net, "collapse", 4)
    x = frames(6, 2, 2, 8, 8)
    for model in (net, fast):
        functional.set_step_mode(model, "s")
    with torch.no_grad():
        expected = torch.stack([net(f) for f in x])
        got = torch.stack([fast(f) for f in x])
    assert expected.std() > 0
    assert torch.equal(got, expected)
    functional.set_step_mode(fast, "m")
    functional.reset_net(fast)
    with torch.no_grad():
        assert fast(x).shape[0] == 6


def test_a_region_ends_before_what_is_fixed_in_time():
    class Readout(nn.Module):
        """Weighs the steps: needs every frame."""

        def forward(self, x):
            return (x * torch.arange(6.0).view(-1, 1, 1, 1, 1)).mean(0)

    net = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3), layer.AvgPool2d(2, step_mode="m"), Readout()).eval()
    fast = sj_tac.convert(net, "collapse", 4)
    x = frames(6, 2, 2, 8, 8)
    with torch.no_grad():
        assert fast(x).shape == net(x).shape


def test_a_functional_mean_over_time_sees_frames():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = csnn()

        def forward(self, x):
            return self.body(x).mean(0)

    net = Net().eval()
    x = frames(10, 2, 2, 8, 8)
    with torch.no_grad():
        expected = sj_tac.convert(net.body, "collapse", 4)(x).mean(0)
        got = sj_tac.convert(net, "collapse", 4)(x)
    assert torch.equal(got, expected)


def test_a_neuron_with_other_dynamics_gets_frames_and_a_kept_conv_is_stretched():
    class Slow(neuron.LIFNode):
        def multi_step_forward(self, x_seq):
            return super().multi_step_forward(x_seq)

    net = nn.Sequential(
        conv(2, 4), norm(4), node("lif", v_threshold=0.2),
        conv(4, 4), norm(4), node("lif", v_threshold=0.2),
        conv(4, 4), Slow(step_mode="m", v_threshold=0.2),
    ).eval()  # fmt: skip
    policy = {"default": {"mode": "collapse", "k": 2}, "rules": [{"match": "3", "mode": "keep"}]}
    report = sj_tac.plan(net, policy)
    assert [(v.layer, v.status, v.reason) for v in report.verdicts] == [
        ("0", "converted", None),
        ("3", "stretched", None),
        ("5", "stretched", None),
        ("6", "refused", "UNSUPPORTED_NEURON"),
    ]
    fast = sj_tac.convert(net, policy)
    counts = []
    for i in (3, 6, 7):
        fast[i].register_forward_hook(lambda m, a, out: counts.append((rate(a[0]), rate(out))))
    with torch.no_grad():
        fast(frames(5, 1, 2, 6, 6))
    assert counts == [(3, 3), (5, 5), (5, 5)]


def test_training_in_collapsed_time_gives_gradients_and_ragged_statistics():
    net = csnn().train()
    fast = sj_tac.convert(net, "collapse", 4)
    x = frames(6, 2, 2, 8, 8)
    fast(x).mean(0).sum().backward()
    assert all(p.grad is not None for p in fast.parameters())
    assert fast[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["DVSGestureNet LIF", "spiking_vgg11_bn"])
def test_collapse_of_zoo_nets_that_are_one_chain(name):
    net, x = zoo(name)
    with torch.no_grad():
        expected = net(x)
        fast = sj_tac.convert(net, "collapse", 2)
        assert fast(x).shape == expected.shape
        assert len(sj_tac.report(fast).stretched) == 2
        # k=1 collapses nothing.
        one = sj_tac.convert(net, "collapse", 1)
        functional.reset_net(net)
        assert torch.equal(one(x), expected)


@pytest.mark.parametrize("change", [lambda x: x.roll(1, 1), lambda x: x.flip(2), lambda x: torch.channel_shuffle(x, 2)])
def test_collapsed_time_ends_where_folded_drives_are_moved(change):
    """As in the trace: what is behind sees frames, fused and as the definition."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.convs = nn.ModuleList([conv(2, 8), conv(8, 8), conv(8, 4)])
            self.lifs = nn.ModuleList([node("lif", v_threshold=v) for v in (0.2, 0.1, 0.03)])

        def forward(self, x):
            x = self.convs[1](self.lifs[0](self.convs[0](x)))
            y = change(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            return self.lifs[2](self.convs[2](self.lifs[1](y)))

    net, x = Net().double().eval(), frames(6, 3, 2, 8, 8).double()
    fused = sj_tac.convert(net, "collapse", 2, example_input=x)
    defined = sj_tac.convert(net, "collapse", 2, example_input=x, fuse=False)
    with torch.no_grad():
        spikes = fused(x)
        assert torch.equal(spikes, defined(x))
    assert 0.05 < spikes.mean() < 0.6
