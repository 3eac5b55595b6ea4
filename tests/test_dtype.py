"""Convolutions in bfloat16 without autocast: against the same net whose convolutions are rounded by hand."""

import copy
import pickle
from pathlib import Path

import pairs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from spikingjelly.activation_based import functional, layer
from support import awake, conv, csnn, frames, large_convolutions, node, norm, only_v2, same_state
from test_autocast import residual
from test_random_graphs import build, case, converted, outputs
from torch import nn

import sj_tac
from rewrites import dtypes
from sj_tac import host
from sj_tac.errors import ExportError, PolicyError
from sj_tac.kernels.cpu.launches import Launch
from sj_tac.runtime import deferred

HALF = torch.bfloat16


def chain():
    """Three layers, a MaxPool behind the first: what the kernels run one after the other."""
    torch.manual_seed(0)
    first = [conv(2, 4), norm(4), node("lif"), layer.MaxPool2d(2, step_mode="m")]
    net = nn.Sequential(*first, conv(4, 4), norm(4), node("plif"), conv(4, 4), norm(4), node("if")).eval()
    return awake(net, frames(8, 2, 2, 9, 9))


CALLS = [("preserve", 1), ("preserve", 2), ("preserve", 4), ("collapse", 3)]


@pytest.fixture(autouse=True)
def _instructions(monkeypatch):
    """The tests are about results, which are the same on processors without them."""
    monkeypatch.setattr(dtypes, "_features", lambda: frozenset({"avx512bf16"}))


def rounded(net, names):
    """A converted net, whose convolutions of these names multiply in bfloat16, written out."""
    for name in names:
        module = net.get_submodule(name)

        def in_half(x, weight, bias, padding=module.padding, stride=module.stride):
            bias = None if bias is None else bias.to(HALF)
            return F.conv2d(x.to(HALF), weight.to(HALF), bias, stride, padding).float()

        module._conv_forward = in_half
    return net


def run(net, x):
    """Outputs, voltages, and gradients to the input and all parameters."""
    functional.reset_net(net)
    net.zero_grad()
    x = x.clone().requires_grad_()
    out = net(x)
    # The older host's neurons have no gradients in eval mode.
    assert out.requires_grad or not host.IS_V2
    if out.requires_grad:
        out.square().sum().backward()
    voltages = [m.v for m in net.modules() if hasattr(m, "surrogate_function")]
    return out, voltages, [x.grad, *(p.grad for p in net.parameters())]


def assert_same(net, other, x):
    """Values, voltages and gradients, recorded and not."""
    (out, voltages, gradients), (expected, rest, wanted) = run(net, x), run(other, x)
    assert 0 < expected.mean() < 1
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)
    assert all(torch.equal(v, w) for v, w in zip(voltages, rest, strict=True))
    for found, right in zip(gradients, wanted, strict=True):
        if right is None:
            assert found is None
            continue
        # A gradient through a bfloat16 weight is rounded, whose last bit may turn with the order of a sum.
        assert (found - right).norm() <= 0.01 * right.norm()
    for model in (net, other):
        functional.reset_net(model)
    with torch.no_grad():
        assert torch.equal(net(x), other(x))
        assert torch.equal(net(x), other(x))  # with the voltages of the first
        for found, right in zip(net.modules(), other.modules(), strict=True):
            if hasattr(found, "surrogate_function"):
                assert torch.equal(found.v, right.v)


@pairs.parametrize(make=[csnn, residual, chain], policy=CALLS, fuse=[True, False], last=[False, True])
def test_a_net_is_the_one_that_is_rounded_by_hand(make, policy, fuse, last):
    source, x = make(), frames(6, 2, 2, 9, 9) if make is chain else frames(6, 2, 2, 8, 8)
    source = source.to(memory_format=torch.channels_last) if last else source
    net = sj_tac.convert(source, *policy, fuse=fuse, dtype=HALF)
    names = {v.layer for v in sj_tac.report(net).converted}
    assert names
    assert_same(net, rounded(sj_tac.convert(source, *policy, fuse=fuse), names), x)
    assert (net(x) != sj_tac.convert(source, *policy, fuse=fuse)(x)).any()


def test_single_layers_and_single_steps():
    source, x = csnn(), frames(6, 2, 2, 8, 8)
    names = [v.layer for v in sj_tac.plan(source).converted]
    policy = {"default": {"k": 2}, "rules": [{"match": names[-1], "dtype": "bfloat16"}]}
    net, expected = sj_tac.convert(source, policy), rounded(sj_tac.convert(source, "preserve", 2), names[-1:])
    assert [v.dtype for v in sj_tac.report(net).converted] == ["source"] * (len(names) - 1) + ["bfloat16"]
    assert_same(net, expected, x)
    for model in (net, expected):
        functional.set_step_mode(model, "s")
        functional.reset_net(model)
    for frame in x:
        assert torch.equal(net(frame), expected(frame))


def test_linear_layers_too():
    source, x = residual(), frames(6, 2, 2, 8, 8)
    policy = {"layers": ["conv", "linear"], "default": {"k": 2, "weights": "uniform", "dtype": "bfloat16"}}
    net = sj_tac.convert(source, policy)
    assert sj_tac.report(net)["head.0"].dtype == "bfloat16"
    seen = []
    net.head[0].register_forward_hook(lambda module, args, y: seen.append((args[0][:], y[:])))
    net(x)
    ((read, found),) = seen
    means = (read[::2] + read[1::2]) / 2
    expected = F.linear(means.to(HALF), net.head[0].weight.to(HALF), net.head[0].bias.to(HALF)).float()
    assert found.dtype == torch.float32
    assert torch.equal(found[::2], expected)
    assert torch.equal(found[1::2], expected)


def test_readers_get_float32():
    """Hooks, kept values and other branches: whatever looks at a layer's frames finds the net's dtype."""
    source, x = csnn(), frames(6, 2, 2, 8, 8)
    net = sj_tac.convert(source, "preserve", 2, dtype=HALF)
    expected = net(x)
    functional.reset_net(net)
    seen = []
    for module in net:
        module.register_forward_hook(lambda module, args, y: seen.extend([args[0] + 0, y + 0]))
    with torch.no_grad():
        assert torch.equal(net(x), expected)
    assert len(seen) >= 10
    assert {y.dtype for y in seen} == {torch.float32}


def test_under_autocast_it_has_no_meaning():
    source, x = csnn(), frames(6, 2, 2, 8, 8)
    net, plain = sj_tac.convert(source, "preserve", 2, dtype=HALF), sj_tac.convert(source, "preserve", 2)
    with torch.autocast("cpu", HALF), torch.no_grad():
        assert torch.equal(net(x), plain(x))
    with torch.no_grad():
        assert torch.equal(net.double()(x.double()), plain.double()(x.double()))


def test_weights_may_be_written_in_any_way():
    """Nothing of the weights is kept that would have to be told."""
    source, x = csnn(), frames(6, 2, 2, 8, 8)
    net = sj_tac.convert(source, "preserve", 2, dtype=HALF)
    name = sj_tac.report(net).converted[0].layer
    with torch.no_grad():
        before = net(x)
        net.get_submodule(name).weight.data.mul_(1.5)
        functional.reset_net(net)
        source.get_submodule(name).weight.data.mul_(1.5)
        found = net(x)
        assert torch.equal(found, sj_tac.convert(source, "preserve", 2, dtype=HALF)(x))
    assert (found != before).any()


def test_it_is_kept_and_taken_back(tmp_path):
    source, x = csnn(), frames(6, 2, 2, 8, 8)
    net = sj_tac.convert(source, "preserve", 2, dtype=HALF)
    copied = copy.deepcopy(net)
    with torch.no_grad():
        expected = net(x)
    assert net.state_dict().keys() == source.state_dict().keys()
    sj_tac.save(net, tmp_path / "net.safetensors")
    for same in (
        sj_tac.load(tmp_path / "net.safetensors", csnn()),
        pickle.loads(pickle.dumps(net)),
        copied,
        sj_tac.convert(source, sj_tac.policy_of(net)),
    ):
        functional.reset_net(same)
        assert torch.equal(same(x), expected)
    functional.reset_net(net)
    restored = sj_tac.restore(net)
    functional.reset_net(restored)
    functional.reset_net(source)
    assert same_state(restored, source)
    assert torch.equal(restored(x), source(x))
    sj_tac.set_k(net, 1)
    functional.reset_net(net)
    assert torch.equal(net(x), sj_tac.convert(source, "preserve", 1, dtype=HALF)(x))


def test_with_an_example_a_net_of_k_1_is_not_held_against_its_source():
    source, x = csnn(), frames(6, 2, 2, 8, 8)
    assert sj_tac.convert(source, "preserve", 1, example_input=x, dtype=HALF) is not None


def test_a_processor_without_instructions_refuses_unless_the_layer_is_named(monkeypatch):
    monkeypatch.setattr(dtypes, "_features", lambda: frozenset({"avx2"}))
    source, x = csnn(), frames(6, 2, 2, 8, 8)
    net = sj_tac.convert(source, "preserve", 2, dtype=HALF)
    verdicts = sj_tac.report(net).converted
    assert {v.dtype for v in verdicts} == {"source"}
    assert all("this CPU has no bfloat16 instructions" in v.detail for v in verdicts)
    assert torch.equal(net(x), sj_tac.convert(source, "preserve", 2)(x))
    assert "dtype" not in str(sj_tac.policy_of(net).to_dict())
    named = sj_tac.convert(source, {"rules": [{"match": verdicts[0].layer, "dtype": "bfloat16"}]})
    assert [v.dtype for v in sj_tac.report(named).converted][:2] == ["bfloat16", "source"]


def test_what_this_processor_has(monkeypatch):
    monkeypatch.undo()
    cpu = Path("/proc/cpuinfo")
    flags = set(cpu.read_text().split()) if cpu.exists() else set()
    if "sse2" in flags:  # an x86 of Linux: its own words for what LLVM has others for
        assert dtypes.computes_in("bfloat16", torch.device("cpu")) is bool(flags & {"avx512_bf16", "amx_bf16"})
    for names, there in (({"avx512fp16"}, False), ({"amx-bf16"}, True), ({"bf16"}, True)):
        monkeypatch.setattr(dtypes, "_features", lambda names=names: frozenset(names))
        assert dtypes.computes_in("bfloat16", torch.device("cpu")) is there
    assert dtypes.computes_in("float16", torch.device("meta"))


def test_a_container_cannot():
    """Its norm and pool would run in bfloat16, too."""
    inner = layer.SeqToANNContainer(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.MaxPool2d(2))
    source = nn.Sequential(inner, node("lif")).eval()
    source[0].step_mode = "m"
    policy = {"default": {"approximate": True}}
    (verdict,) = sj_tac.report(sj_tac.convert(source, policy, dtype=HALF)).converted
    assert verdict.dtype == "source"
    assert "container '0'" in verdict.detail
    with pytest.raises(
        PolicyError, match=r"rule for '0.0': dtype: bfloat16 is impossible there: it sits in the container '0'"
    ):
        sj_tac.convert(source, {"rules": [{"match": "0.0", "dtype": "bfloat16", "approximate": True}]})
    (verdict,) = sj_tac.report(sj_tac.convert(csnn().double()[:3], "preserve", dtype=HALF)).converted
    assert "its weights are torch.float64" in verdict.detail


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"dtype": "bf16"}, r"dtype='bf16' is none that convolutions are given"),
        ({"dtype": torch.int8}, r"dtype=torch.int8 is none"),
        ({"dtype": HALF, "policy": "exact"}, "gives the source's spikes"),
        ({"dtype": HALF, "policy": {"default": {"dtype": "float16"}}}, "default says dtype: float16"),
        ({"dtype": HALF, "policy": "auto", "calibration": [torch.rand(2, 2, 2, 8, 8)]}, "drop k=2, fuse=True, dtype"),
        ({"policy": {"default": {"dtype": "bfloat61"}}}, "bfloat16"),
    ],
)
def test_what_is_an_error(call, words):
    source = csnn()
    before = [type(m) for m in source.modules()]
    with pytest.raises(PolicyError, match=words):
        sj_tac.convert(source, **call, inplace=True)
    assert [type(m) for m in source.modules()] == before


@only_v2
def test_compiled_and_exported(tmp_path):
    source, x = csnn(), frames(6, 2, 2, 8, 8)
    net = sj_tac.convert(source, "preserve", 2, dtype=HALF)
    functional.reset_net(net)
    with torch.no_grad():
        expected = net(x)
        functional.reset_net(net)
        assert torch.equal(torch.compile(net, backend="aot_eager")(x), expected)
    with pytest.raises(ExportError, match=r"computes in torch\.bfloat16"):
        sj_tac.export_onnx(net, x, tmp_path / "net.onnx")


def test_norms_learn_in_float32():
    torch.manual_seed(0)
    chain = nn.Sequential(conv(2, 8, bias=False), norm(8), node("lif")).eval()
    x = frames(4, 2, 2, 8, 8)
    net = sj_tac.convert(awake(chain, x), "preserve", 2, dtype=HALF).train()
    statistics = net[1].running_mean.clone()
    net(x)
    assert net[1].running_mean.dtype == torch.float32
    assert (net[1].running_mean != statistics).any()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_kernels_read_and_write_bfloat16_between_such_layers(k, monkeypatch):
    """Drives, and what one reader alone sums; every other layer's frames stay in float32."""
    source, x = chain(), frames(8, 2, 2, 9, 9)
    seen, original = [], Launch.__call__

    def fire(self, y, *arguments):
        out, v = original(self, y, *arguments)
        seen.append((y.dtype, out.dtype, v.dtype))
        return out, v

    monkeypatch.setattr(Launch, "__call__", fire)
    net = sj_tac.convert(source, "preserve", k, dtype=HALF)
    names = [v.layer for v in sj_tac.report(net).converted]
    with torch.no_grad():
        out = net(x)
    wide = torch.float32
    assert seen == [(HALF, HALF, wide)] * (len(names) - 1) + [(HALF, wide, wide)]
    assert [v.last_read for v in sj_tac.report(net).converted] == ["frames"] + ["sums"] * (len(names) - 1)
    seen.clear()
    alone = sj_tac.convert(source, {"default": {"k": k}, "rules": [{"match": names[1], "dtype": "bfloat16"}]})
    with torch.no_grad():
        alone(x)
    assert seen == [(wide, HALF, wide), (HALF, wide, wide), *[(wide, wide, wide)] * (len(names) - 2)]
    functional.reset_net(net)
    assert torch.equal(net(x), out)


@pytest.mark.parametrize("last", [False, True])
def test_large_convolutions_in_parts(last):
    """Where an output would be given back to the system, the neuron runs the convolution in parts, in its dtype."""
    source, x = chain(), frames(8, 4, 2, 9, 9)
    source = source.to(memory_format=torch.channels_last) if last else source
    for k in (1, 2):
        net = sj_tac.convert(source, "preserve", k, dtype=HALF)
        names = [v.layer for v in sj_tac.report(net).converted]
        expected = rounded(sj_tac.convert(source, "preserve", k), names)
        with torch.no_grad(), large_convolutions():
            # A part's sums may be taken in another order, and rounded to the next number of bfloat16.
            assert (net(x) != expected(x)).float().mean() <= 0.01
            assert type(net[0](x).expression.held) is deferred.Deferred


def test_sums_of_another_dtype_are_for_their_reader_alone():
    """The reader is patched after the neuron ran, or the call goes under autocast: frames are made again."""
    source, x = chain(), frames(8, 2, 2, 9, 9)
    for k in (1, 2):
        net = sj_tac.convert(source, "preserve", k, dtype=HALF)
        name = sj_tac.report(net).converted[1].layer
        reader = net.get_submodule(name)

        def widen(module, args):
            module._tac.dtype = None

        plain = sj_tac.convert(
            source, {"default": {"k": k, "dtype": "bfloat16"}, "rules": [{"match": name, "dtype": "source"}]}
        )
        handle = reader.register_forward_pre_hook(widen)
        with torch.no_grad():
            assert torch.equal(net(x), plain(x))
        handle.remove()


# Always the same ones: a sum in another order may be rounded to the next number of bfloat16, and tip a spike.
@settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case)
def test_random_graphs(drawn):
    """Fused is unfused, recorded and in inference mode, and nearly so in parts; what comes out is float32."""
    net, x, _, policy = build(drawn)
    net, x = net.float(), x.float()
    policy["default"] = policy["default"] | {"dtype": "bfloat16"}
    policy["rules"] = [rule | {"dtype": "source"} if drawn["seed"] % 3 else rule for rule in policy["rules"]]
    fast = converted(net, policy, x)
    if fast is None:
        return
    expected = outputs(converted(net, policy, x, fuse=False), x)
    found = outputs(fast, x)
    with torch.inference_mode():
        assert all(torch.equal(a, b) for a, b in zip(outputs(fast, x), found, strict=True))
    with large_convolutions():
        in_parts = outputs(fast, x)
    functional.reset_net(fast)
    recorded = fast(x)
    recorded = recorded if isinstance(recorded, tuple) else (recorded,)
    for a, b, c, d in zip(found, expected, recorded, in_parts, strict=True):
        assert a.dtype == b.dtype == c.dtype == d.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(c, b, rtol=1e-4, atol=1e-5)
        assert (d - b).abs().mean() <= 0.02
