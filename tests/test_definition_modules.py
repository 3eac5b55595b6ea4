"""The definition's modules against tests/definition.py, which knows nothing of them, and against SpikingJelly at k=1."""

import copy
import pickle

import pairs
import pytest
import torch
from defined import given, same
from definition import Setting, define
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import conv, csnn, frames, node, norm
from torch import nn

from sj_tac.definition import convs, neurons
from sj_tac.definition.frames import Frames, Rule
from sj_tac.errors import CaptureWarning

KINDS = {
    "lif": lambda: node("lif", v_threshold=0.3),
    "lif, soft reset": lambda: node("lif", v_reset=None, tau=3.0, v_threshold=0.3),
    "plif": lambda: node("plif", v_threshold=0.3),
    "if": lambda: node("if", v_threshold=0.6),
}
PLAN = {"0": "2", "4": "6", "8": "9"}  # convolution -> the neuron that it drives


def converted(source, k, plan=PLAN, **sharing):
    """A copy of the net by the definition."""
    net = copy.deepcopy(source)
    neurons.swap(net)
    modules = dict(net.named_modules())
    convs.share(net, {name: convs.Sharing(k, modules[driven], **sharing) for name, driven in plan.items()})
    return net


@pairs.parametrize(kind=KINDS, k=[1, 2, 3, 8], weights=["decay", "uniform"], normalize=[True, False], steps=[1, 4, 7])
def test_a_net_is_its_equations_with_gradients_and_voltages(kind, k, weights, normalize, steps):
    source, x = csnn(make=KINDS[kind]).double(), frames(steps, 2, 2, 8, 8, dtype=torch.float64)
    settings = {name: Setting("preserve", k, driven, weights, normalize) for name, driven in PLAN.items()}
    found = given(converted(source, k, weights=weights, normalize=normalize), x)
    same(found, given(define(source, settings), x), "by the definition")
    if k == 1:
        same(found, given(copy.deepcopy(source), x), "the source", close=0.0 if kind != "plif" else 1e-12)


def test_learned_weights_are_the_softmax_of_their_logits_and_train():
    source, x = csnn().double(), frames(7, 2, 2, 8, 8, dtype=torch.float64)
    decayed = converted(source, 3, {"0": "2"})(x)
    net = converted(source, 3, {"0": "2"}, weights="learned")
    assert torch.allclose(net(x), decayed, rtol=0, atol=1e-12), "they begin at the decay weights"
    logits = torch.tensor([0.1, -0.4, 0.7], dtype=torch.float64)
    net[0].tac_logits.data.copy_(logits)
    functional.reset_net(net)
    sums = [sum(w * f for w, f in zip(torch.softmax(logits[-len(group) :], 0), group, strict=True)) for group in x.split(3)]
    expected = source[0](torch.stack(sums)).repeat_interleave(3, 0)[:7]
    torch.testing.assert_close(net[0](x), expected, rtol=1e-12, atol=1e-12)
    net(x).sum().backward()
    assert net[0].tac_logits.grad.abs().sum() > 0


def test_learned_weights_have_one_key_that_a_checkpoint_of_the_source_need_not_have():
    source = csnn().double()
    net = converted(source, 3, {"0": "2"}, weights="learned")
    assert set(net.state_dict()) - set(source.state_dict()) == {"0.tac_logits"}
    before = net[0].tac_logits.clone()
    net[0].tac_logits.data.zero_()
    assert net.load_state_dict(source.state_dict(), strict=True).missing_keys == []
    assert torch.equal(net[0].tac_logits, before)
    copied = pickle.loads(pickle.dumps(net))
    assert copied.load_state_dict(net.state_dict(), strict=True).unexpected_keys == []
    net[0].sharing.k = 2
    net[0].fit_logits()
    assert len(net[0].tac_logits) == 2
    assert "k=2, weights=learned" in repr(net)
    convs.undo(net)
    assert list(net.state_dict()) == list(source.state_dict())


def test_calls_carry_voltages_on_and_a_reset_begins_anew():
    source, x = csnn().double(), frames(8, 2, 2, 8, 8, dtype=torch.float64)
    net = converted(source, 2)
    with torch.no_grad():
        whole = net(x)
        functional.reset_net(net)
        parts = torch.cat([net(x[:4]), net(x[4:])])
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    functional.reset_net(net)
    assert all(isinstance(m.v, float) for m in net.modules() if isinstance(m, neuron.BaseNode))


def test_other_layers_that_drive_neurons():
    made = {
        "Conv1d": ([layer.Conv1d(2, 3, 3, step_mode="m"), layer.BatchNorm1d(3, step_mode="m")], (2, 7)),
        "Conv3d": ([layer.Conv3d(2, 3, 3, padding=1, step_mode="m"), layer.BatchNorm3d(3, step_mode="m")], (2, 3, 5, 4)),
        "Linear": ([layer.Linear(5, 4, step_mode="m")], (5,)),
    }
    for name, (modules, shape) in made.items():
        source = nn.Sequential(*modules, node("lif", v_threshold=0.1)).double().eval()
        x, driven = frames(7, 3, *shape, dtype=torch.float64), str(len(modules))
        sums = torch.stack([sum(0.5 ** (len(g) - 1 - j) * f for j, f in enumerate(g)) for g in x.split(3)])
        sums = sums / torch.tensor([1.75, 1.75, 1.0], dtype=x.dtype).view(-1, *[1] * (x.dim() - 1))
        with torch.no_grad():
            found = converted(source, 3, {"0": driven})(x)
            expected = source[-1](source[:-1](sums).repeat_interleave(3, 0)[:7])
        assert expected.mean() > 0.02, name
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("host_layers", [True, False])
def test_convolutions_in_a_container_take_folded_frames(host_layers):
    torch.manual_seed(0)
    kinds = (layer.Conv2d, layer.BatchNorm2d) if host_layers else (nn.Conv2d, nn.BatchNorm2d)
    inner = kinds[0](2, 4, 3, padding=1), kinds[1](4)
    source = nn.Sequential(layer.SeqToANNContainer(*inner), node("lif", v_threshold=0.1)).double().eval()
    flat = nn.Sequential(conv(2, 4), norm(4), node("lif", v_threshold=0.1)).double().eval()
    flat.load_state_dict(dict(zip(flat.state_dict(), source.state_dict().values(), strict=True)))
    x, seen = frames(7, 3, 2, 6, 6, dtype=torch.float64), []
    rules = Rule("size", argument=0, dim=0), Rule("quotient", argument=0, dim=1)
    net = converted(source, 3, {"0.0": "1"}, frames=Frames(folded=True, rules=rules))
    net[0][0].register_forward_hook(lambda module, args, y: seen.append((args[0].shape, y.shape)))
    with torch.no_grad():
        expected = define(flat, {"0": Setting("preserve", 3, "2")})(x)
        torch.testing.assert_close(net(x), expected, rtol=0, atol=1e-12)
        assert 0.05 < expected.mean() < 0.9
        assert seen == [((21, 2, 6, 6), (21, 4, 6, 6))], "hooks see T frames"
        with pytest.warns(
            CaptureWarning, match=r"'0.0' computes what its source does, for it cannot tell T of its rows \[3,"
        ):
            one = net[0][0](x[0])  # outside of the net's call
        torch.testing.assert_close(one, source[0][0](x[0]), rtol=0, atol=0)
        convs.undo(net)
    assert [type(m) for m in net[0]] == [type(m) for m in source[0]]
    assert not net._forward_pre_hooks
    assert not net._forward_hooks


OTHERS = {
    "folded frames without rules": (lambda: nn.Conv2d(2, 4, 3), "0", r"its Sharing needs Frames\(folded=True"),
    "no module": (lambda: layer.Conv2d(2, 4, 3, step_mode="m"), "9", "the net has no module '9'"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_convolutions_that_cannot_share_are_refused_and_the_net_is_left_alone(case):
    make, name, message = OTHERS[case]
    net = nn.Sequential(make(), node("lif"), conv(4, 4), node("lif"))
    before = [type(m) for m in net.modules()]
    with pytest.raises(ValueError, match=message):
        convs.share(net, {"2": convs.Sharing(2, net[3]), name: convs.Sharing(2, net[1])})
    assert [type(m) for m in net.modules()] == before


def test_a_neuron_with_a_decay_per_channel_steps_by_itself_and_weighs_no_frames():
    source, x = csnn(make=lambda: node("lif", v_threshold=0.3)).double(), frames(6, 2, 2, 8, 8, dtype=torch.float64)
    source[2].tau = torch.full((4, 1, 1), 3.0, dtype=torch.float64)
    net = converted(source, 1, {})
    try:
        expected = source(x)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"the source cannot either: {error}")
    assert torch.equal(net(x), expected)
    with pytest.raises(ValueError, match=r"'0' drives a neuron with several decays: its tau is a tensor of \[4, 1, 1\]"):
        convs.share(net, {"0": convs.Sharing(2, net[2])})


def test_half_voltages_are_carried_on_unrounded():
    source = nn.Sequential(conv(2, 4, padding=1), node("lif", v_threshold=0.1)).bfloat16().eval()
    net, x = converted(source, 2, {"0": "1"}), frames(8, 2, 2, 8, 8).bfloat16()
    with torch.no_grad():
        drives = net[0](x)
        functional.reset_net(net)
        whole, last = net[1](drives), net[1].v
        functional.reset_net(net)
        parts = torch.cat([net[1](part) for part in drives.split(2)])
    assert torch.equal(parts, whole)
    assert torch.equal(net[1].v, last)


def test_weights_that_are_no_parameters():
    """A parametrized w, learned weights as a buffer, and learned weights that are not there."""
    source, x = csnn(make=KINDS["plif"]).double(), frames(6, 2, 2, 8, 8, dtype=torch.float64)
    net = converted(source, 2)
    expected = net(x)
    nn.utils.parametrize.register_parametrization(net[2], "w", nn.Identity())
    functional.reset_net(net)
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)
    net = converted(csnn().double(), 2, {"0": "2"}, weights="learned")
    del net[0].tac_logits
    with pytest.raises(ValueError, match=r"weights='learned', and the convolution has no tac_logits \[k=2\]"):
        net(x)
    net[0].register_buffer("tac_logits", torch.zeros(2, dtype=torch.float64))
    uniform = converted(csnn().double(), 2, {"0": "2"}, weights="uniform")
    functional.reset_net(net)
    torch.testing.assert_close(net(x), uniform(x), rtol=1e-12, atol=1e-12)


def test_a_voltage_of_inference_mode_goes_on_into_training():
    net, x = converted(csnn().double(), 2), frames(4, 2, 2, 8, 8, dtype=torch.float64)
    with torch.inference_mode():
        net(x)
    net(x).sum().backward()
    assert net[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["lif", "plif", "container"])
def test_dynamo_captures_a_net_as_one_graph_for_all_t(kind):
    if kind == "container":
        modules = layer.SeqToANNContainer(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), node("lif", v_threshold=0.1)
        rule = Rule("size", argument=0, dim=0)
        net = converted(nn.Sequential(*modules).eval(), 2, {"0.0": "1"}, frames=Frames(folded=True, rules=(rule,)))
    else:
        net = converted(csnn(make=KINDS[kind]), 2)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    captured = torch.compile(net, backend=keep, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for steps in (6, 7, 4):
            x = frames(steps, 2, 2, 8, 8)
            functional.reset_net(net)
            expected = net(x)
            functional.reset_net(net)
            assert torch.equal(captured(x), expected)
    assert len(graphs) == 1
    names = [str(n.target) for n in graphs[0].graph.nodes]
    count = 1 if kind == "container" else 3
    for name, wanted in (("aggregate_frames", count), ("expand_frames", count), ("neuron_steps", count + (count == 3))):
        assert names.count(f"sj_tac.{name}.default") == wanted


CHANGES = {
    "store_v_seq": lambda node: setattr(node, "store_v_seq", True),
    "a surrogate without a fused kernel": lambda node: setattr(node, "surrogate_function", surrogate.LeakyKReLU()),
    "thresholds per channel": lambda node: setattr(node, "v_threshold", torch.full((4, 1, 1), 0.3, dtype=torch.float64)),
    "another threshold": lambda node: setattr(node, "v_threshold", 0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_neuron_that_was_changed_later_steps_as_its_source(change):
    source, x = csnn().double(), frames(6, 2, 2, 8, 8, dtype=torch.float64)
    net = converted(source, 1)
    for one in (source, net):
        one.train()
        one[1].eval()
        one[5].eval()
        one[11].eval()
        CHANGES[change](one[2])
        functional.reset_net(one)
    assert torch.equal(net(x), source(x))
    torch.testing.assert_close(net[2].v, source[2].v, rtol=0, atol=0)


def test_a_net_keeps_keys_classes_and_copies_and_is_turned_back():
    source = csnn().double()
    net, x = converted(source, 2), frames(5, 2, 2, 8, 8, dtype=torch.float64)
    assert net.state_dict().keys() == source.state_dict().keys()
    assert all(isinstance(a, type(b)) for a, b in zip(net.modules(), source.modules(), strict=True))
    with torch.no_grad():
        wanted = net(x)
        for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            functional.reset_net(made)
            assert torch.equal(made(x), wanted)
            assert made[0].sharing.neuron is made[2]
        neurons.undo(net)
        convs.undo(net)
        functional.reset_net(net)
        functional.reset_net(source)
        assert torch.equal(net(x), source(x))
    assert str(net) == str(source)
    assert vars(net[0]).keys() == vars(source[0]).keys()


@pytest.mark.parametrize("k", [1, 2])
def test_half_nets_step_in_float32(k):
    first, second = node("lif", v_threshold=0.1), node("if", v_threshold=0.3)
    modules = [conv(2, 4, padding=1), norm(4), first, conv(4, 4, padding=1), second]
    source = nn.Sequential(*modules).bfloat16().eval()
    net = converted(source, k, {"0": "2", "3": "4"})
    with torch.no_grad():
        y = net(frames(6, 2, 2, 8, 8).bfloat16())
    assert y.dtype is torch.bfloat16
    assert 0.02 < y.float().mean() < 0.9
    assert net[2].v.dtype is net[4].v.dtype is torch.float32
