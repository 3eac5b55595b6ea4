"""Convolutions in bfloat16 without autocast: against the same net whose convolutions are rounded by hand."""

import copy
import pickle

import pairs
import pytest
import torch
import torch.nn.functional as F
from defined import given
from spikingjelly.activation_based import functional, layer
from support import at_rest, awake, conv, csnn, frames, node, norm, only_v2, same_state
from torch import nn

import sj_tac
from sj_tac.errors import ExportError, PolicyError
from sj_tac.rewrites import dtypes

HALF = torch.bfloat16
X = frames(6, 2, 2, 8, 8)


def exact(net):
    """Weights that bfloat16 rounds, and whose sums are exact in float32, in any order, where groups have uniform weights."""
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.weight.data = (module.weight.data * 4096).round() / 4096
            if module.bias is not None:
                module.bias.data.zero_()
    return awake(net.eval(), X)


class Residual(nn.Module):
    """A sum of spikes that two convs read, and a spiking readout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Sequential(conv(i, 4), norm(4), node("lif")) for i in (2, 4, 4))
        self.head = nn.Sequential(layer.Linear(256, 5, step_mode="m"), node("lif"))

    def forward(self, x):
        x = self.parts[0](x)
        x = self.parts[1](x) + x
        return self.head((self.parts[2](x) + x).flatten(2))


CALLS = [("preserve", 1), ("preserve", 2), ("preserve", 4), ("collapse", 4)]


def policy(mode, k, **more):
    return {"default": {"mode": mode, "k": k, "weights": "uniform", **more}}


@pytest.fixture(autouse=True)
def _instructions(monkeypatch):
    """The tests are about results, which are the same on processors without them."""
    monkeypatch.setattr(dtypes, "_features", lambda: frozenset({"avx512_bf16"}))


def rounded(net, names):
    """A converted net, whose convolutions of these names multiply in bfloat16, written out."""
    for name in names:
        module = net.get_submodule(name)

        def in_half(x, weight, bias, padding=module.padding, stride=module.stride):
            bias = None if bias is None else bias.to(HALF)
            return F.conv2d(x.to(HALF), weight.to(HALF), bias, stride, padding).float()

        module._conv_forward = in_half
    return net


def assert_same(net, other, x):
    """Values, voltages and gradients, recorded and not."""
    for grad in (True, False):
        found, expected = given(net, x, grad), given(other, x, grad)
        assert found.keys() == expected.keys()
        assert 0.01 < expected["output 0"].mean() < 1
        assert found["output 0"].dtype == torch.float32
        for name, value in expected.items():
            if name.startswith("gradient"):
                # One through a bfloat16 weight is rounded, whose last bit may turn with the order of a sum. Those of biases
                # are sums of such numbers, of which most cancel: an error of a term is several times that of the sum.
                assert (found[name] - value).norm() <= (0.03 if "bias" in name else 0.01) * value.norm(), name
            else:
                assert torch.equal(found[name], value), name
    with torch.no_grad():
        assert torch.equal(net(x), other(x))  # with the voltages of the call before


@pairs.parametrize(make=[csnn, Residual], call=CALLS, fuse=[True, False], last=[False, True])
def test_a_net_is_the_one_that_is_rounded_by_hand(make, call, fuse, last):
    made = exact(make()).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    net = sj_tac.convert(made, policy(*call, dtype="bfloat16"), fuse=fuse)
    names = {v.layer for v in sj_tac.report(net).converted}
    assert len(names) == 3
    wide = sj_tac.convert(made, policy(*call), fuse=fuse)
    plain = at_rest(wide, X)
    assert_same(net, rounded(wide, names), X)
    assert (net(X) != plain).any()


def test_single_layers_and_single_steps():
    made = exact(csnn())
    names = [v.layer for v in sj_tac.plan(made).converted]
    rules = [{"match": names[-1], "dtype": "bfloat16"}]
    net = sj_tac.convert(made, policy("preserve", 2) | {"rules": rules})
    expected = rounded(sj_tac.convert(made, policy("preserve", 2)), names[-1:])
    assert [v.dtype for v in sj_tac.report(net).converted] == ["source"] * (len(names) - 1) + ["bfloat16"]
    assert_same(net, expected, X)
    for model in (net, expected):
        functional.set_step_mode(model, "s")
        functional.reset_net(model)
    for frame in X:
        assert torch.equal(net(frame), expected(frame))


def test_linear_layers_too():
    net = sj_tac.convert(exact(Residual()), policy("preserve", 2, dtype="bfloat16") | {"layers": ["conv", "linear"]})
    assert sj_tac.report(net)["head.0"].dtype == "bfloat16"
    seen = []
    net.head[0].register_forward_hook(lambda module, args, y: seen.append((args[0][:], y[:])))
    net(X)
    ((read, found),) = seen
    means = (read[::2] + read[1::2]) / 2
    expected = F.linear(means.to(HALF), net.head[0].weight.to(HALF), net.head[0].bias.to(HALF)).float()
    assert found.dtype == torch.float32
    assert expected.std() > 0
    assert torch.equal(found[::2], expected)
    assert torch.equal(found[1::2], expected)


def test_readers_get_float32():
    """Hooks, kept values and other branches: whatever looks at a layer's frames finds the net's dtype."""
    net, seen = sj_tac.convert(exact(csnn()), policy("preserve", 2, dtype="bfloat16")), []
    expected = at_rest(net, X)
    for module in net:
        module.register_forward_hook(lambda module, args, y: seen.extend([args[0] + 0, y + 0]))
    assert (at_rest(net, X) != expected).float().mean() <= 0.01
    assert len(seen) >= 10
    assert {y.dtype for y in seen} == {torch.float32}


def test_under_autocast_and_in_float64_it_has_no_meaning():
    net, plain = (sj_tac.convert(exact(csnn()), "preserve", 2, dtype=dtype) for dtype in (HALF, None))
    with torch.autocast("cpu", HALF), torch.no_grad():
        assert torch.equal(net(X), plain(X))
    with torch.no_grad():
        assert torch.equal(net.double()(X.double()), plain.double()(X.double()))


def test_it_is_kept_and_taken_back(tmp_path):
    made = exact(csnn())
    net = sj_tac.convert(made, policy("preserve", 2, dtype="bfloat16"))
    copied = copy.deepcopy(net)
    expected = at_rest(net, X)
    assert net.state_dict().keys() == made.state_dict().keys()
    sj_tac.save(net, tmp_path / "net.safetensors")
    for same in (
        sj_tac.load(tmp_path / "net.safetensors", exact(csnn())),
        pickle.loads(pickle.dumps(net)),
        copied,
        sj_tac.convert(made, sj_tac.policy_of(net)),
    ):
        assert torch.equal(at_rest(same, X), expected)
    restored = sj_tac.restore(net)
    assert same_state(restored, made)
    assert torch.equal(at_rest(restored, X), at_rest(made, X))
    sj_tac.set_k(net, 1)
    assert torch.equal(at_rest(net, X), at_rest(sj_tac.convert(made, policy("preserve", 1, dtype="bfloat16")), X))


def test_with_an_example_a_net_of_k_1_is_not_held_against_its_source():
    assert sj_tac.report(sj_tac.convert(exact(csnn()), "preserve", 1, example_input=X, dtype=HALF)).converted


def test_a_processor_without_instructions_refuses_unless_the_layer_is_named(monkeypatch):
    monkeypatch.setattr(dtypes, "_features", lambda: frozenset({"avx2"}))
    made = exact(csnn())
    net = sj_tac.convert(made, "preserve", 2, dtype=HALF)
    verdicts = sj_tac.report(net).converted
    assert {v.dtype for v in verdicts} == {"source"}
    assert all("this CPU has no bfloat16 instructions" in v.detail for v in verdicts)
    assert torch.equal(net(X), sj_tac.convert(made, "preserve", 2)(X))
    assert "dtype" not in str(sj_tac.policy_of(net).to_dict())
    named = sj_tac.convert(made, {"rules": [{"match": verdicts[0].layer, "dtype": "bfloat16"}]})
    assert [v.dtype for v in sj_tac.report(named).converted][:2] == ["bfloat16", "source"]


def test_what_processors_have(monkeypatch):
    for names, there in (({"avx512_fp16"}, False), ({"amx_bf16"}, True), ({"bf16"}, True), (set(), False)):
        monkeypatch.setattr(dtypes, "_features", lambda names=names: frozenset(names))
        assert dtypes.computes_in("bfloat16", torch.device("cpu")) is there
    assert dtypes.computes_in("float16", torch.device("meta"))


def test_in_a_container_the_convolution_alone_is_rounded():
    """Its norm stays in float32, as that of a net without the container."""
    inner = layer.SeqToANNContainer(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)).eval()
    own = nn.Sequential(conv(2, 4, padding=1), norm(4), node("lif")).eval()
    own = exact(own)
    for made, of in zip(inner, own, strict=False):
        made.load_state_dict(of.state_dict())
    boxed = nn.Sequential(inner, own[2]).eval()
    first, second = (sj_tac.convert(net, "preserve", 2, dtype=HALF) for net in (own, boxed))
    assert [v.dtype for v in sj_tac.report(second).converted] == ["bfloat16"]
    assert torch.equal(at_rest(second, X), at_rest(first, X))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"dtype": "bf16"}, r"dtype='bf16' is none that convolutions are given"),
        ({"dtype": torch.int16}, r"dtype=torch.int16 is none"),
        ({"dtype": HALF, "policy": "exact"}, "gives the source's spikes"),
        ({"dtype": HALF, "policy": {"default": {"dtype": "float16"}}}, "default says dtype: float16"),
        ({"dtype": HALF, "policy": "auto", "calibration": [torch.rand(2, 2, 2, 8, 8)]}, "drop k=2, fuse=True, dtype"),
        ({"policy": {"default": {"dtype": "bfloat61"}}}, "bfloat16"),
    ],
)
def test_what_is_an_error(call, words):
    made = csnn()
    before = [type(m) for m in made.modules()]
    with pytest.raises(PolicyError, match=words):
        sj_tac.convert(made, **call, inplace=True)
    assert [type(m) for m in made.modules()] == before


@only_v2
def test_it_cannot_be_exported(tmp_path):
    with pytest.raises(ExportError, match=r"computes in torch\.bfloat16"):
        sj_tac.export_onnx(sj_tac.convert(exact(csnn()), "preserve", 2, dtype=HALF), X, tmp_path / "net.onnx")
