"""Nets in int8 against the same nets in float32 with rounded weights, which the definition runs."""

import copy
import os
import re
import subprocess
import sys

import onnx
import onnxruntime
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from spikingjelly.activation_based import functional, layer
from support import NEURONS, awake, conv, frames, node, norm
from torch import nn
from torch.nn.utils import prune

import sj_tac
from sj_tac.errors import BackendFallbackWarning, PolicyError
from sj_tac.kernels.cpu import int8
from sj_tac.rewrites.equations import integers

needs_vnni = pytest.mark.skipif(bool(int8.problem()), reason=int8.problem())
M = {"step_mode": "m"}
POOLS = [None, layer.MaxPool2d(2, **M), layer.MaxPool2d(3, 2, 1, **M), layer.AvgPool2d(2, **M)]


class Net(nn.Module):
    """A first layer, and layers behind each other, of which some add what they read, as SEW blocks do."""

    def __init__(self, kinds, pools, adds):
        super().__init__()
        self.blocks, self.adds = nn.ModuleList(), adds
        for i, (kind, pool) in enumerate(zip(kinds, pools, strict=True)):
            block = [conv(2 if i == 0 else 6, 6, padding=1), norm(6), node(*kind)]
            self.blocks.append(nn.Sequential(*block, *([copy.deepcopy(pool)] if pool else [])))
        self.head: nn.Module = layer.Flatten(**M)

    def forward(self, x):
        for block, adds in zip(self.blocks, self.adds, strict=True):
            y = block(x)
            x = y + x if adds and y.shape == x.shape else y
        return self.head(x)


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    """Small layers, too, and an error of an equation is an error."""
    monkeypatch.setattr(integers, "LEAST_MULTIPLICATIONS", 1)
    monkeypatch.setenv("SJ_TAC_STRICT", "1")


def made(kinds=(("lif",), ("lif",), ("lif",)), pools=(None, None, None), adds=(False, False, False), shape=(6, 2, 2, 9, 8)):
    torch.manual_seed(0)
    net, x = Net(kinds, pools, adds).eval(), frames(*shape)
    features = net(x).shape[-1]
    net.head = nn.Sequential(net.head, layer.Linear(features, 5, **M), node("lif"))
    functional.reset_net(net)
    return awake(net, x), x


def policy(k, **more):
    return {"version": 1, "layers": ["conv", "linear"], "default": {"mode": "preserve", "k": k, **more}}


def asked(net):
    """By layer, why it is not in int8."""
    return {v.layer: v.detail if v.dtype == "source" else "" for v in sj_tac.report(net).converted}


def rounded(net, names):
    net = copy.deepcopy(net)
    for name in names:
        weight = net.get_submodule(name).weight
        w8, scale = int8.rounded(weight)
        weight.data = w8.float() * scale.view(-1, *[1] * (weight.dim() - 1))
    return net


def voltages(net):
    return [m.v for m in net.modules() if hasattr(m, "v_threshold")]


def assert_alike(found, wanted):
    """Spikes, but for those at a threshold, which another order of sums may turn over."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert (found - wanted).abs().gt(1e-4).float().mean() < 2e-3


def is_exact(sharing, steps, top):
    weights, by, _ = sharing.operands(torch.float32, None)
    return int8.whole_sums(tuple(weights), by, steps, top)[2] < 1e-6


def check(net, fast, x, k, **how):
    """A net in int8, and the one with rounded weights as it is defined: two calls."""
    with torch.no_grad():
        found = [fast(x), fast(x.flip(0))]
    names = [name for name, why in asked(fast).items() if not why]
    slow = sj_tac.convert(rounded(net, names), policy(k, **how), fuse=False, example_input=x)
    with torch.no_grad():
        wanted = [slow(x), slow(x.flip(0))]
    for a, b in zip(found, wanted, strict=True):
        assert_alike(a, b)
    for a, b in zip(voltages(fast), voltages(slow), strict=True):
        assert_alike(a, b)
    functional.reset_net(fast)
    return names


@needs_vnni
@pytest.mark.captured
@settings(max_examples=max(6, settings().max_examples // 2), deadline=None)
@given(
    kinds=st.lists(st.sampled_from(NEURONS), min_size=3, max_size=3),
    pools=st.lists(st.sampled_from(POOLS), min_size=3, max_size=3),
    adds=st.lists(st.booleans(), min_size=3, max_size=3),
    k=st.sampled_from([1, 2, 3, 4, 8]),
    steps=st.integers(3, 9),
    last=st.booleans(),
    weights=st.sampled_from(["decay", "uniform"]),
)
def test_chains_with_pools_and_sums_are_those_of_rounded_weights(kinds, pools, adds, k, steps, last, weights):
    net, x = made(kinds, pools, adds, (steps, 2, 2, 9, 8))
    if last:
        net = net.to(memory_format=torch.channels_last)
    fast = sj_tac.convert(net, policy(k, dtype="int8", weights=weights), example_input=x)
    # Whole weights may be the nearest ones alone, where the last group is a short one and many spikes are added up.
    top = 255 // ((1 + sum(adds)) * (4 if POOLS[3] in pools else 1))
    assume(all(is_exact(module.sharing, steps, top) for module in fast.modules() if hasattr(module, "sharing")))
    names = check(net, fast, x, k, weights=weights)
    refused = {name: why for name, why in asked(fast).items() if why}
    assert refused.pop("blocks.0.0").endswith("what it reads is not known to be spikes, or sums of them")
    # Spikes and means of four are numbers of two scales.
    mixes = any(adds) and POOLS[3] in pools
    assert all(
        "would not fit into eight bits" in why or (mixes and "not known to be spikes" in why) for why in refused.values()
    )
    assert len(names) + len(refused) == 3
    assert mixes or k > 3 or not refused


@needs_vnni
@pytest.mark.captured
def test_a_net_in_int8_goes_through_all_that_a_net_goes_through(tmp_path):
    net, x = made(adds=(False, True, True))
    fast = sj_tac.convert(net, policy(2, dtype="int8"), example_input=x)
    assert [v.dtype for v in sj_tac.report(fast).converted] == ["int8"] * 4
    assert len(check(net, fast, x, 2)) == 3
    code = sj_tac.report(fast).graphs[0].code
    assert code.count("layer_in_int8") >= 3
    assert "real" not in code  # all that reads spikes reads them as whole numbers
    # Another batch and T, another k, another weight and norm.
    check(net, fast, frames(5, 3, 2, 9, 8, seed=1), 2)
    sj_tac.set_k(fast, 3)
    check(net, fast, x, 3)
    for one in (net, fast):
        one.blocks[1][0].weight.data[:, 1].neg_()
        one.blocks[1][1].running_var.mul_(0.7)
        one.blocks[2][1].bias.data.add_(0.1)
    check(net, fast, x, 3)
    # Copies, files, and back.
    sj_tac.save(fast, tmp_path / "net.pt")
    for other in (copy.deepcopy(fast), sj_tac.load(tmp_path / "net.pt", copy.deepcopy(net), example_input=x)):
        with torch.no_grad():
            other(x)  # a copy's first call runs as it is defined
            functional.reset_net(other)
            assert torch.equal(other(x), fast(x))
        functional.reset_net(fast)
    assert list(fast.state_dict()) == list(net.state_dict())
    back = sj_tac.restore(fast)
    with torch.no_grad():
        assert torch.equal(back(x), net(x))


@needs_vnni
@pytest.mark.captured
def test_a_layer_with_little_to_do_stays_in_float32(monkeypatch):
    net, x = made()
    monkeypatch.setattr(integers, "LEAST_MULTIPLICATIONS", 6 * 6 * 9 * 8 * 6 * 9 + 1)
    for repeats, is_in_int8 in ((1, False), (2, True)):  # of 3 * 2 frames at k = 2, then of 3 * 4
        fast = sj_tac.convert(net, policy(2, dtype="int8"), example_input=x)
        with torch.no_grad():
            fast(x.repeat(1, repeats, 1, 1, 1))
        assert ("multiplications a call are too few" in asked(fast)["blocks.1.0"]) is not is_in_int8


@needs_vnni
@pytest.mark.captured
def test_training_is_in_float32_and_the_report_says_so():
    net, x = made()
    fast, plain = (sj_tac.convert(net, policy(2, **more), example_input=x) for more in ({"dtype": "int8"}, {}))
    found, wanted = (one(x) for one in (fast, plain))
    assert torch.equal(found, wanted)
    for one in (found, wanted):
        one.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(fast.parameters(), plain.parameters(), strict=True))
    assert all(why == "in the net's dtype: gradients are recorded" for why in asked(fast).values())
    functional.reset_net(fast)
    check(net, fast, x, 2)
    assert not asked(fast)["blocks.1.0"]


@needs_vnni
@pytest.mark.captured
def test_a_graph_is_rewritten_for_the_gradients_that_it_records_whoever_asks():
    """At another k a report rewrites the graphs that it shows, also those with gradients, and the next call some."""
    net, x = made()
    fast, plain = (sj_tac.convert(net, policy(2, **more), example_input=x) for more in ({"dtype": "int8"}, {}))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            fast(x)
        functional.reset_net(fast)
    sj_tac.set_k(fast, 3), sj_tac.set_k(plain, 3)
    with torch.no_grad():
        fast(x)
        sj_tac.report(fast)
    functional.reset_net(fast)
    for one in (fast, plain):
        one.zero_grad()
        one(x).sum().backward()
    for a, b in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    functional.reset_net(fast)
    assert sj_tac.report(fast)["blocks.1.0"].dtype == "int8"
    assert check(net, fast, x, 3)


@needs_vnni
@pytest.mark.captured
def test_maps_that_leave_a_contiguous_net_are_contiguous_and_a_dropout_in_eval_is_nothing():
    torch.manual_seed(0)
    layers = conv(2, 6, padding=1), norm(6), node("lif"), nn.Dropout(0.5), conv(6, 6, padding=1), norm(6), node("lif")
    net, x = nn.Sequential(*layers).eval(), frames(4, 2, 2, 6, 6)
    net = awake(net, x)
    fast = sj_tac.convert(net, policy(2, dtype="int8"))
    with torch.no_grad():
        out = fast(x)
    assert not asked(fast)["4"]
    assert out.view(4, 2, -1).any()
    last = sj_tac.convert(net.to(memory_format=torch.channels_last), policy(2, dtype="int8"))
    with torch.no_grad():
        assert last(x).flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    # A bias that is written behind the net's back counts at once.
    fast[4].bias.data.add_(1.0)
    functional.reset_net(fast)
    with torch.no_grad():
        assert not torch.equal(fast(x), out)


class OneNeuron(nn.Module):
    """One neuron behind three convolutions: each call begins with the voltage of the one before."""

    def __init__(self):
        super().__init__()
        self.convs, self.neuron = nn.ModuleList(conv(i, 6, padding=1) for i in (2, 6, 6)), node("lif", v_threshold=0.3)

    def forward(self, x):
        x = self.neuron(self.convs[0](x))
        return self.neuron(self.convs[2](self.neuron(self.convs[1](x)) + x))


@needs_vnni
@pytest.mark.captured
@pytest.mark.parametrize("k", [1, 2])
def test_a_neuron_that_is_called_again_begins_with_its_voltage(k):
    torch.manual_seed(0)
    net, x = OneNeuron().eval(), frames(6, 2, 2, 6, 6)
    fast = sj_tac.convert(net, policy(k, dtype="int8"), example_input=x)
    assert check(net, fast, x, k)


@needs_vnni
@pytest.mark.captured
def test_a_weight_that_each_call_computes_stays_in_float32():
    """A mask of torch.nn.utils.prune, of which one number changes between two calls."""
    net, x = made()
    prune.random_unstructured(net.blocks[1][0], "weight", 0.2)
    net.blocks[1][0].weight = net.blocks[1][0].weight.detach()  # what can be copied; the next call computes it
    fast, plain = (sj_tac.convert(net, policy(2, **more), example_input=x) for more in ({"dtype": "int8"}, {}))
    for one in (fast, plain):
        with torch.no_grad():
            one(x)
        one.blocks[1][0].weight_mask[0, 0] = 0
        functional.reset_net(one)
    with torch.no_grad():
        fast(x), plain(x)
    assert "computed in each call" in asked(fast)["blocks.1.0"]
    assert torch.equal(voltages(fast)[1], voltages(plain)[1])


@needs_vnni
@pytest.mark.captured
def test_a_layer_that_no_equation_saw_is_not_said_to_be_in_int8():
    net, x = made()
    net.blocks[1][0].padding_mode = "circular"
    net.blocks[1][0]._reversed_padding_repeated_twice = [1, 1, 1, 1]
    fast = sj_tac.convert(net, policy(2, dtype="int8"), example_input=x)
    with torch.no_grad():
        fast(x)
    assert asked(fast)["blocks.1.0"].endswith("no Conv2d or Linear reads its input as it is")


@needs_vnni
@pytest.mark.captured
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda net: setattr(net.blocks[1][0], "groups", 2) or _halve(net.blocks[1][0]), "in groups is no faster"),
        (lambda net: net.blocks[0].append(nn.Tanh()), "not known to be spikes"),
        (lambda net: net.double(), "it computes in torch.float64|weights are torch.float64"),
    ],
)
def test_layers_that_stay_in_float32_say_why(change, why):
    net, x = made()
    change(net)
    x = x.to(next(net.parameters()).dtype)
    fast = sj_tac.convert(net, policy(2, dtype="int8"), example_input=x)
    with torch.no_grad():
        found = fast(x)
        assert re.search(why, asked(fast)["blocks.1.0"])
        functional.reset_net(fast)
        if "spikes" not in why:
            check(net, fast, x, 2)
    assert found.dtype == x.dtype


def _halve(module):
    module.weight.data = module.weight.data[:, : module.weight.shape[1] // 2].clone()


def test_a_machine_without_its_instructions_says_so_and_computes_in_float32(monkeypatch):
    monkeypatch.setattr(
        int8, "problem", lambda: "int8 needs an x86 processor with VNNI instructions, which this one has not"
    )
    net, x = made()
    with pytest.warns(BackendFallbackWarning, match="no layer runs in int8: int8 needs an x86 processor with VNNI"):
        fast = sj_tac.convert(net, "preserve", 2, dtype=torch.int8, example_input=x)
    assert all("VNNI" in why for why in asked(fast).values())
    plain = sj_tac.convert(net, "preserve", 2, example_input=x)
    with torch.no_grad():
        assert torch.equal(fast(x), plain(x))
    rules = {"version": 1, "rules": [{"match": "blocks.1.0", "dtype": "int8"}]}
    with pytest.raises(PolicyError, match=r"rule for 'blocks\.1\.0': dtype: int8 is impossible there: int8 needs an x86"):
        sj_tac.convert(net, rules, example_input=x)
    with pytest.warns(BackendFallbackWarning, match="int8 is for kernels, and fuse=False has none"):
        sj_tac.convert(net, "preserve", 2, dtype=torch.int8, fuse=False, example_input=x)


@needs_vnni
@pytest.mark.captured
def test_an_onnx_file_has_the_weights_of_layers_in_int8_as_such(tmp_path):
    net, x = made(adds=(False, True, True))
    net.eval()
    fast = sj_tac.convert(net, policy(2, dtype="int8"), example_input=x)
    written = sj_tac.export_onnx(fast, x, tmp_path / "net.onnx", batch_dim=1)
    assert written.spikes[0] <= 1e-3 * written.spikes[1]
    kinds = {i.name: i.data_type for i in onnx.load(tmp_path / "net.onnx").graph.initializer}
    whole = [name for name, kind in kinds.items() if kind == onnx.TensorProto.INT8]
    assert {"net.blocks.1.0.weight.whole", "net.blocks.2.0.weight.whole"} < set(whole)
    assert len(whole) == 3  # and of the Linear
    assert "net.blocks.0.0.weight" in kinds
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        assert_alike(torch.from_numpy(found), fast(x))


@needs_vnni
def test_onednn_that_is_told_to_use_no_vnni_is_found_out():
    script = "from sj_tac.kernels.cpu import int8; print(int8.problem())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ONEDNN_MAX_CPU_ISA=AVX2 turns its VNNI instructions off" in done.stdout
