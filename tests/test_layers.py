"""What else drives a neuron: containers, Conv1d, Conv3d, Linear, average pools, and MaxPools where that is allowed."""

import pairs
import pytest
import torch
from defined import check, given, same
from spikingjelly.activation_based import functional, layer
from support import at_rest, awake, conv, frames, node, norm, only_v2, same_state
from torch import nn

import sj_tac
from sj_tac.errors import PolicyError

M = {"step_mode": "m"}


def lif():
    return node("lif", v_threshold=0.3)


KINDS = {
    "container": (lambda: [layer.SeqToANNContainer(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), lif()], (2, 6, 6), "0.0"),
    "container, avg pool": (
        lambda: [layer.SeqToANNContainer(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.AvgPool2d(2)), lif()], (2, 6, 6), "0.0",
    ),
    "container, norm behind": (lambda: [layer.SeqToANNContainer(nn.Conv2d(2, 3, 3)), norm(3), lif()], (2, 6, 6), "0.0"),
    "container, Conv1d": (lambda: [layer.SeqToANNContainer(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3)), lif()], (2, 7), "0.0"),
    "Conv1d": (lambda: [layer.Conv1d(2, 3, 3, **M), layer.BatchNorm1d(3, **M), lif()], (2, 7), "0"),
    "Conv3d": (lambda: [layer.Conv3d(2, 3, 3, padding=1, **M), layer.BatchNorm3d(3, **M), lif()], (2, 3, 5, 4), "0"),
    "avg pool before the neuron": (lambda: [conv(), norm(), layer.AvgPool2d(2, **M), lif()], (2, 6, 6), "0"),
    "avg pool before the norm": (lambda: [conv(), layer.AvgPool2d(2, **M), norm(), lif()], (2, 6, 6), "0"),
    "Linear": (lambda: [layer.Linear(5, 4, **M), lif()], (5,), "0"),
    "Linear, tokens": (lambda: [layer.Linear(5, 4, **M), lif()], (3, 5), "0"),
    "container, Linear": (lambda: [layer.SeqToANNContainer(nn.Linear(5, 4), nn.BatchNorm1d(4)), lif()], (5,), "0.0"),
}  # fmt: skip


def build(name, steps=7):
    torch.manual_seed(0)
    make, shape, layer_name = KINDS[name]
    x = frames(steps, 3, *shape, dtype=torch.float64)
    net = nn.Sequential(*make(), nn.Identity()).double().eval()
    for module in net.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.5, 2.0)
    return awake(net, x), x, layer_name


def policy(mode, k, **more):
    return {"layers": ["conv", "linear"], "default": {"mode": mode, "k": k, **more}}


@pairs.parametrize(name=KINDS, mode=["preserve", "collapse"], k=[1, 3])
def test_every_kind_of_layer(name, mode, k):
    """The definition: the source's own layers on the weighted sums, and its neuron on the repeated drives."""
    net, x, layer_name = build(name)
    fast = sj_tac.convert(net, policy(mode, k), example_input=x)
    verdict = sj_tac.report(fast)[layer_name]
    assert (verdict.status, verdict.macs_after) == ("converted", verdict.macs_before * (-(-7 // k)) // 7)
    assert same_state(net, fast)
    assert str(sj_tac.restore(fast)) == str(net)
    functional.reset_net(net)
    groups, lengths = [], [len(group) for group in x.split(k)]
    for group in x.split(k):
        weights = [0.5 ** (len(group) - 1 - j) for j in range(len(group))]
        groups.append(sum(w / sum(weights) * f for w, f in zip(weights, group, strict=True)))
    with torch.no_grad():
        spikes = net[-2](net[:-2](torch.stack(groups)).repeat_interleave(torch.tensor(lengths), 0))
        if mode == "collapse":
            spikes = torch.cat([g.mean(0, keepdim=True).expand_as(g) for g in spikes.split(k)])
        assert 0.02 < spikes.mean() < 0.9
        torch.testing.assert_close(fast(x), spikes, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_training_learned_weights_and_frozen_norms(name):
    net, x, layer_name = build(name, 6)
    fast = sj_tac.convert(net, policy("preserve", 2, weights="learned"), example_input=x).train()
    norms, key = sj_tac.freeze_bn(fast), f"{layer_name}.tac_logits"
    assert len(norms) == sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
    assert [k for k in fast.state_dict() if k not in net.state_dict()] == [key]
    fast.load_state_dict(net.state_dict(), strict=True)
    # They begin as the decay's weights.
    found, decayed = given(fast, x), given(sj_tac.convert(net, policy("preserve", 2), example_input=x).eval(), x)
    assert found.pop(f"gradient of {key}").abs().sum() > 0
    same(found, decayed)
    moving = sj_tac.convert(net, policy("preserve", 2), example_input=x).train()
    moving(x)
    if norms:
        with pytest.warns(sj_tac.errors.BatchNormMovedWarning):
            sj_tac.restore(moving)


def test_linear_layers_are_converted_only_where_the_policy_says_so():
    net = nn.Sequential(
        conv(), norm(), lif(), layer.Flatten(**M), layer.Linear(3 * 36, 4, **M), lif(), layer.Linear(4, 2, **M)
    )
    assert [v.layer for v in sj_tac.plan(net).verdicts] == ["0"]
    report = sj_tac.plan(net, {"layers": ["conv", "linear"], "rules": [{"match": "4", "k": 4}]})
    assert [(v.layer, v.status, v.reason) for v in report.verdicts] == [
        ("0", "converted", None), ("4", "converted", None), ("6", "refused", "NO_NEURON"),
    ]  # fmt: skip
    only = sj_tac.plan(net, {"layers": ["linear"]})
    assert [v.layer for v in only.converted] == ["4"]
    assert only["0"].status == "kept"
    with pytest.raises(PolicyError, match=r"layers\[0\] is 'conv2d'; did you mean 'conv'"):
        sj_tac.plan(net, {"layers": ["conv2d"]})
    with pytest.raises(PolicyError, match=r"rules\[0\] .match: 4. matches no"):
        sj_tac.plan(net, {"rules": [{"match": "4", "k": 4}]})


@pytest.mark.parametrize("inside", [False, True])
def test_a_max_pool_before_the_neuron_is_refused_unless_it_is_allowed(inside):
    if inside:
        front = [layer.SeqToANNContainer(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.MaxPool2d(3, 2, 1)), lif()]
        name = "0.0"
    else:
        front, name = [conv(), norm(), layer.MaxPool2d(3, 2, 1, **M), lif()], "0"
    torch.manual_seed(0)
    net, x = nn.Sequential(*front, conv(3, 3), norm(3), lif()).double().eval(), frames(6, 2, 2, 6, 6, dtype=torch.float64)
    awake(net, x)
    report = sj_tac.plan(net, example_input=x)
    assert report[name].reason == "NOT_AFFINE"
    assert "approximate: true" in report[name].hint
    with pytest.raises(PolicyError, match="NOT_AFFINE"):
        sj_tac.plan(net, {"rules": [{"match": name, "k": 2}]})
    source = given(net, x)
    functional.reset_net(net)
    for mode in ("preserve", "collapse"):
        allowed = {"default": {"mode": mode, "k": 2}, "rules": [{"match": name, "approximate": True}]}
        report = sj_tac.plan(net, allowed, example_input=x)
        assert [v.status for v in report.verdicts] == ["converted"] * 2
        assert report[name].detail.startswith("approximate: ")
        one = sj_tac.convert(net, allowed | {"default": {"mode": mode, "k": 1}}, example_input=x)
        same(given(one, x), source)


@only_v2
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scale_by_channel", [False, True])
def test_a_net_that_spikingjellys_converter_made_of_an_ann(scale_by_channel):
    """What it puts between a convolution and its neuron scales drives."""
    from spikingjelly.activation_based import ann2snn

    torch.manual_seed(0)
    ann = nn.Sequential(
        *[nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(2)],
        *[nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 10), nn.ReLU()],
    ).eval()
    recipe = ann2snn.RateCodingRecipe([(torch.rand(4, 2, 8, 8), torch.zeros(4))], channel_wise=scale_by_channel)
    net, x = ann2snn.Converter(recipe).convert(ann).double().eval(), torch.rand(5, 3, 2, 8, 8, dtype=torch.float64)
    functional.set_step_mode(net, "m")
    expected, exact = at_rest(net, x), sj_tac.convert(net, k=1, example_input=x, backend="reference")
    assert expected.any()
    torch.testing.assert_close(at_rest(exact, x), expected, rtol=1e-9, atol=1e-9)
    fast = check(net, "preserve", x, k=2, example_input=x)
    assert len(sj_tac.report(fast).converted) == 2
