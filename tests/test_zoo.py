"""SpikingJelly's own nets: keys, counts of chains, reasons, and what they compute, with nets that really fire."""

import copy
import subprocess
import sys

import pytest
import torch
from defined import backend, check, given, same
from spikingjelly.activation_based import functional, neuron
from support import NEEDS_EXAMPLE, ZOO, at_rest, awake, csnn, frames, recorded, same_state
from torch import nn

import sj_tac

QUICK = ("spiking_vgg11_bn", "sew_resnet18")


@pytest.fixture(scope="module", params=[n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in ZOO])
def case(request):
    """A net's name, the net, frames and an example where convert needs one."""
    torch.manual_seed(0)
    builder, (channels, side, _), _, _ = ZOO[request.param]
    side = min(side, 32) if "Net" not in request.param else side
    net, x = builder().eval(), frames(5, 2, channels, side, side, rate=0.3)
    functional.set_step_mode(net, "m")
    return request.param, awake(net, x), x, x if request.param in NEEDS_EXAMPLE else None


def test_plan_gives_every_conv_one_verdict(case):
    name, net, _, example = case
    _, _, chains, reasons = ZOO[name]
    report = sj_tac.plan(net, example_input=example)
    assert [v.layer for v in report.verdicts] == [n for n, m in net.named_modules() if isinstance(m, nn.Conv2d)]
    assert len(report.converted) == chains
    assert sorted(v.reason for v in report.refused) == sorted(reasons)


def test_k_1_gives_every_layers_spikes(case):
    _, net, x, example = case
    fast = sj_tac.convert(net, "preserve", 1, example_input=example, fuse=False)
    with torch.no_grad(), recorded(net) as expected, recorded(fast) as got:
        functional.reset_net(net)
        y, z = net(x), fast(x)
    assert torch.equal(y, z)
    assert list(got) == list(expected)
    for layer, (spikes,) in expected.items():
        rate = spikes.mean().item()
        assert 0.02 < rate < 0.7, f"{layer} fires at {rate}: too silent or too full to compare"
        assert torch.equal(got[layer][0], spikes), layer


@pytest.mark.parametrize("mode", ["preserve", "collapse"])
def test_it_computes_the_definition(case, mode):
    name, net, x, example = case
    net, x = copy.deepcopy(net).double(), x[:3].double()
    options = {"k": 2, "example_input": None if example is None else x}
    if "vgg" in name and mode == "collapse":  # through torch.flatten, of which the definition knows nothing
        options["backend"] = backend(net)
        same(*(given(sj_tac.convert(net, mode, fuse=fuse, **options), x) for fuse in (True, False)))
    else:
        check(net, mode, x, **options)


@pytest.mark.parametrize("k", [1, 2])
def test_keys_and_checkpoints_go_both_ways(case, k):
    _, net, _, example = case
    fast = sj_tac.convert(net, "preserve", k, example_input=example)
    assert type(fast) is type(net)
    assert same_state(net, fast)
    other = {key: value + 1 for key, value in net.state_dict().items()}
    fast.load_state_dict(other, strict=True)
    back = copy.deepcopy(net)
    back.load_state_dict(fast.state_dict(), strict=True)
    assert all(torch.equal(back.state_dict()[key], other[key]) for key in other)
    fast.load_state_dict(copy.deepcopy(net.state_dict()), strict=True, assign=True)
    assert same_state(net, fast)


def test_the_source_is_untouched_and_restore_makes_it_again(case):
    _, net, x, example = case
    expected = at_rest(net, x)
    with torch.no_grad():
        net(x)  # a conversion leaves voltages
    before = copy.deepcopy(net)
    fast = sj_tac.convert(net, "preserve", 4, example_input=example)
    restored = sj_tac.restore(fast)
    for made in (net, restored):
        assert same_state(before, made)
        assert [type(m) for m in made.modules()] == [type(m) for m in before.modules()]
        assert [m.training for m in made.modules()] == [m.training for m in before.modules()]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.modules())
    assert str(restored) == str(net)
    voltages = [(m.v, b.v) for m, b in zip(net.modules(), before.modules(), strict=True) if isinstance(m, neuron.BaseNode)]
    assert voltages
    assert all(torch.equal(v, w) for v, w in voltages)
    assert torch.equal(at_rest(restored, x), expected)


@pytest.mark.exhaustive
def test_it_pickles_into_a_fresh_process(tmp_path):
    net, x = csnn(), frames(7, 2, 2, 8, 8)
    fast = sj_tac.convert(net, "collapse", 2)
    with torch.no_grad():
        expected = fast(x)
    functional.reset_net(fast)
    torch.save((fast, x, expected, list(net.state_dict())), tmp_path / "fast.pt")
    script = (
        "import sys, torch\n"
        "fast, x, expected, keys = torch.load(sys.argv[1], weights_only=False)\n"
        "fast.register_forward_hook(lambda m, a, out: None)\n"  # must not take the place of a hook that was pickled
        "fast[-1].register_forward_hook(lambda m, a, out: None)\n"
        "with torch.no_grad(): y = fast(x)\n"
        "assert torch.allclose(y, expected), 'output'\n"
        "assert list(fast.state_dict()) == keys, 'keys'\n"
        "import sj_tac\n"
        "assert len(sj_tac.report(fast).converted) == 3, 'report'\n"
        "assert type(sj_tac.restore(fast)[0]).__name__ == 'Conv2d', 'restore'\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "fast.pt"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
