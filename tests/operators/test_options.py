"""Weights, collapse modes, stretch, BatchNorm statistics, gradients: the options of TAC and TACTP, against definitions."""

import copy
import re

import pairs
import pytest
import torch
from defined import given, same
from spikingjelly.activation_based import functional, layer
from support import conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac import TAC, TACTP
from sj_tac.errors import ConversionError, InputError, PolicyError
from sj_tac.rewrites.gate import as_defined, gate_of

POOLS = {
    "none": lambda: None,
    "max": lambda: layer.MaxPool2d(2, step_mode="m"),
    "avg": lambda: layer.AvgPool2d(2, step_mode="m"),
}
OPERATORS = {
    "learned": (TACTP, {"weights": "learned"}),
    "uniform, max": (TACTP, {"weights": "uniform"}),
    "paper, avg": (TACTP, {"normalize": False}),
    "binary": (TAC, {}),
    "paper, binary, max": (TAC, {"normalize": False}),
    "count, max": (TAC, {"spikes": "count"}),
    "count in frames, avg": (TAC, {"spikes": "count", "emit": "frames"}),
}


@pairs.parametrize(operator=OPERATORS, kind=["lif", "plif", "if"], k=[2, 3, 8], train=[True, False])
def test_an_operator_is_what_convert_makes_of_its_chain(operator, kind, k, train):
    """Which is compared with its definition elsewhere; the statistics of a short last group are those of its frames."""
    torch.manual_seed(0)
    build, options = OPERATORS[operator]
    pool = [POOLS[name]() for name in ("max", "avg") if operator.endswith(name)]
    chain = nn.Sequential(conv(), norm(), node(kind, v_reset=None, v_threshold=0.3), *pool).double().train(train)
    setting = {"mode": "preserve" if build is TACTP else "collapse", "k": k, "spikes": "binary", "emit": "groups"} | options
    made = build(*copy.deepcopy(chain[:3]), k, pool=copy.deepcopy(pool[0]) if pool else None, fuse=False, **options)
    net = sj_tac.convert(chain, {"default": setting}, fuse=False)
    if "weights" in options and options["weights"] == "learned":
        for logits in (made.conv.tac_logits, net[0].tac_logits):
            logits.data.add_(torch.linspace(-1, 1, k))
    found, expected = (given(of.train(train), frames(10, 2, 2, 6, 6, dtype=torch.float64)) for of in (made, net))
    assert 0 < expected["output 0"].mean() < 1
    names = {"conv": "0", "norm": "1", "neuron": "2"}
    same({re.sub(r"conv|norm|neuron", lambda m: names[m[0]], name): value for name, value in found.items()}, expected)
    assert list(made.state_dict()) == [f"{dict(zip('012', names, strict=True))[n[0]]}{n[1:]}" for n in net.state_dict()]


def test_stretch_makes_a_frame_stand_for_several_steps():
    torch.manual_seed(0)
    parts = [m.double() for m in (conv(), norm(), node("lif", tau=4.0, v_threshold=0.3))]
    x = torch.rand(6, 2, 2, 5, 5, dtype=torch.float64)
    repeated = x.repeat_interleave(2, 0)
    with torch.no_grad():
        # k counts steps: six frames of two steps in groups of three frames are twelve frames in groups of six.
        stretched = TACTP(*copy.deepcopy(parts), 6, stretch=2)
        plainly = TACTP(*copy.deepcopy(parts), 6)
        expected = plainly(repeated).view(6, 2, *x.shape[1:2], 3, 5, 5).mean(1)
        assert 0 < expected.mean() < 1
        torch.testing.assert_close(stretched(x), expected)
        torch.testing.assert_close(stretched.neuron.v, plainly.neuron.v, rtol=0, atol=1e-12)
    with pytest.raises(PolicyError, match=r"k=3 is no multiple of 2, the steps that a frame stands for"):
        TACTP(*copy.deepcopy(parts), 3, stretch=2)


def test_wrong_children_and_options_are_refused_by_name():
    parts = [conv(), norm(), node("lif")]
    with pytest.raises(ConversionError, match=r"TACTP: conv is a Linear; it must be exactly one of .*Conv2d"):
        TACTP(torch.nn.Linear(1, 1), None, node("lif"))
    with pytest.raises(ConversionError, match="TAC: neuron is a Identity"):
        TAC(conv(), None, torch.nn.Identity())
    with pytest.raises(ConversionError, match="track_running_stats=False"):
        TACTP(conv(), layer.BatchNorm2d(3, track_running_stats=False), node("lif"))
    with pytest.raises(ConversionError, match="stretch=0 must be an int of at least 1"):
        TACTP(*parts, stretch=0)
    for bad in (0, 1.5, True, "2"):
        with pytest.raises(PolicyError, match="k is"):
            TACTP(*parts, k=bad)
    with pytest.raises(PolicyError, match="weights is 'decai'; did you mean 'decay'"):
        TACTP(*parts, weights="decai")
    with pytest.raises(PolicyError, match="softmax"):
        TACTP(*parts, weights="learned", normalize=False)


def test_input_that_is_not_frames():
    operator = TACTP(conv(), norm(), node("lif"))
    for shape in ((2, 2, 5, 5), (0, 2, 2, 5, 5), (4, 2, 3, 5, 5)):
        with pytest.raises(InputError, match=r"layer 'TACTP' takes frames \[T, N, C, H, W\].*C=2.*shape"):
            operator(torch.zeros(shape))


BUILDS = {
    "preserve": TACTP,
    "binary": TAC,
    "count": lambda *p, **o: TAC(*p, spikes="count", **o),
    "count in frames": lambda *p, **o: TAC(*p, spikes="count", emit="frames", **o),
    "stretched": lambda *p, **o: TACTP(*p, stretch=2, **o),
}


# Dynamo looks at a voltage that the second call carries on.
@pytest.mark.captured
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pairs.parametrize(build=BUILDS, pool=POOLS, kind=["lif", "plif"])
def test_fused_is_unfused(build, pool, kind):
    torch.manual_seed(0)
    # The norm folded, or learning from the drives; or none.
    normalize = None if build == "binary" else norm().double().train(build == "preserve")
    parts = [conv().double(), normalize, node(kind, v_threshold=0.3).double()]
    fused, unfused = (BUILDS[build](*copy.deepcopy(parts), 4, pool=POOLS[pool](), fuse=f) for f in (True, False))
    for x in (frames(10, 2, 2, 6, 6, dtype=torch.float64), frames(7, 2, 2, 6, 6, seed=1, dtype=torch.float64)):
        expected, got = unfused(x), fused(x)
        assert 0 < expected.mean() < 1
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(fused.neuron.v, unfused.neuron.v, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (got * weight).sum().backward()
    for (name, a), b in zip(unfused.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-8, atol=1e-8, msg=name)
    torch.testing.assert_close(dict(fused.named_buffers()), dict(unfused.named_buffers()))


@pytest.mark.captured
def test_it_pickles_and_copies(tmp_path):
    torch.manual_seed(0)
    operator, x = TACTP(conv(), norm(), node("lif", v_threshold=0.3), 2, pool=layer.MaxPool2d(2)), frames(4, 1, 2, 6, 6)
    with torch.no_grad():
        expected = operator(x)
        operator.neuron.reset()
        torch.save(operator, tmp_path / "operator.pt")
        for other in (copy.deepcopy(operator), torch.load(tmp_path / "operator.pt", weights_only=False)):
            assert torch.equal(other(x), expected)


@pytest.mark.captured
def test_what_dynamo_gives_up_runs_as_it_is_defined():
    """A warning that is an error stops Dynamo in the second call, whose voltage has a gradient; newer torch warns there."""
    parts, x = [conv(), norm(), node("lif", v_threshold=0.3)], frames(4, 1, 2, 6, 6)
    fused, unfused = (TAC(*copy.deepcopy(parts), spikes="count", fuse=f) for f in (True, False))
    for _ in range(2):
        torch.testing.assert_close(fused(x), unfused(x))


@pytest.mark.captured
def test_a_net_of_operators_is_captured_one_by_one_and_compiles_as_a_whole():
    torch.manual_seed(0)
    first = TAC(conv(2, 3), norm(), node("lif", v_threshold=0.2), spikes="count", pool=layer.MaxPool2d(2))
    net = torch.nn.Sequential(first, TACTP(conv(3, 3), norm(), node("lif", v_threshold=0.2), stretch=2)).eval()
    x = frames(7, 2, 2, 8, 8)
    with torch.no_grad():
        found = net(x)
        assert [len(gate_of(operator).capture.graphs) for operator in net] == [1, 1]
        functional.reset_net(net)
        torch.testing.assert_close(torch.compile(net, backend="eager", fullgraph=True)(x), found)
        functional.reset_net(net)
        with as_defined():
            torch.testing.assert_close(net(x), found)
    assert found.shape[0] == 4
    assert 0 < found.mean() < 1
