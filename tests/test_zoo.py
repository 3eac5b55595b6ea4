"""SpikingJelly's own nets: keys, counts of chains, reasons, and k=1 spike for spike, with nets that really fire."""

import copy
import subprocess
import sys

import pytest
import torch
from spikingjelly.activation_based import functional, neuron
from support import NEEDS_EXAMPLE, ZOO, recorded, same_state, zoo
from torch import nn

import sj_tac


@pytest.fixture(scope="module", params=list(ZOO))
def case(request):
    name = request.param
    net, x = zoo(name)
    example = x if name in NEEDS_EXAMPLE else None
    return name, net, x, example


def convs(net):
    return [name for name, m in net.named_modules() if isinstance(m, nn.modules.conv._ConvNd)]


def test_plan_gives_every_conv_one_verdict(case):
    name, net, _, example = case
    _, _, chains, reasons = ZOO[name]
    report = sj_tac.plan(net, example_input=example)
    assert [v.layer for v in report.verdicts] == convs(net)
    assert len(report.converted) == chains
    found = {}
    for verdict in report.refused:
        found[verdict.reason] = found.get(verdict.reason, 0) + 1
    assert found == reasons
    assert len(convs(net)) == chains + sum(reasons.values())


def test_k1_gives_every_layers_spikes(case):
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


def test_preserve_computes_each_layer_from_its_own_aggregated_input(case):
    """Every layer on the input it was given: the drive by the definition, the spikes by the source's own modules."""
    _, net, x, example = case
    k = 2
    fast = sj_tac.convert(net, "preserve", k, example_input=example, fuse=False)
    chains = [v.layer for v in sj_tac.report(fast).converted]
    inputs, outputs = {}, {}
    names = {fast.get_submodule(name): name for name in chains}
    names |= {m: name for name, m in fast.named_modules() if isinstance(m, neuron.BaseNode)}

    def watch(module, args, output):
        inputs[names[module]], outputs[names[module]] = args[0], output

    for module in names:
        module.register_forward_hook(watch)
    functional.reset_net(net)
    with torch.no_grad(), recorded(fast) as spikes:
        fast(x)
        for name, (fired,) in spikes.items():
            assert torch.equal(fired, net.get_submodule(name)(inputs[name])), name
            assert 0.01 < fired.mean() < 0.7, name
        for name in chains:
            source = net.get_submodule(name)
            beta = beta_of(fast.get_submodule(name)._tac.node)
            drives = []
            for start in range(0, len(inputs[name]), k):
                group = inputs[name][start : start + k]
                weights = [beta ** (len(group) - 1 - j) for j in range(len(group))]
                aggregated = sum(w / sum(weights) * f for w, f in zip(weights, group, strict=True))
                drives += [source(aggregated.unsqueeze(0))] * len(group)
            torch.testing.assert_close(outputs[name], torch.cat(drives), rtol=1e-4, atol=1e-5)
            chain = fast._sj_tac.plan.chains[name]
            if chain.direct:
                normalized = net.get_submodule(chain.norm)(outputs[name]) if chain.norm else outputs[name]
                assert torch.equal(inputs[chain.neuron], normalized), name


def beta_of(node):
    if isinstance(node, neuron.IFNode):
        return 1.0
    return 1 - node.w.sigmoid().item() if hasattr(node, "w") else 1 - 1 / node.tau


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
    assigned = sj_tac.convert(net, "preserve", k, example_input=example)
    assigned.load_state_dict(copy.deepcopy(net.state_dict()), strict=True, assign=True)
    assert same_state(net, assigned)


def test_restore_computes_the_source(case):
    _, net, x, example = case
    restored = sj_tac.restore(sj_tac.convert(net, "preserve", 4, example_input=example))
    assert [type(m) for m in restored.modules()] == [type(m) for m in net.modules()]
    assert str(restored) == str(net)
    with torch.no_grad():
        functional.reset_net(net)
        assert torch.equal(restored(x), net(x))


def test_the_source_is_untouched(case):
    _, net, x, example = case
    with torch.no_grad():
        functional.reset_net(net)
        net(x)
    before = copy.deepcopy(net)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
    sj_tac.convert(net, "preserve", 2, example_input=x if example is None else example)
    sj_tac.plan(net, example_input=example)
    assert same_state(before, net)
    assert [type(m) for m in net.modules()] == [type(m) for m in before.modules()]
    assert [m.training for m in net.modules()] == [m.training for m in before.modules()]
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
    pairs = zip(net.modules(), before.modules(), strict=True)
    states = [(m.v, b.v) for m, b in pairs if isinstance(m, neuron.BaseNode)]
    assert states
    assert all(torch.equal(v, w) for v, w in states)


@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_survives_copies_and_wrappers(case, policy, tmp_path):
    """deepcopy, pickling, an optimiser step, an EMA by names, functional_call, set_step_mode, nesting: keys stay."""
    _, net, x, example = case
    fast = sj_tac.convert(net, policy, 2, example_input=example)
    with torch.no_grad():
        expected = fast(x)

        functional.reset_net(fast)
        assert torch.equal(fast(x), expected)

        twin = copy.deepcopy(fast)
        functional.reset_net(twin)
        assert torch.equal(twin(x), expected)
        assert same_state(net, twin)

        functional.reset_net(fast)
        by_source = torch.func.functional_call(fast, dict(net.state_dict()), (x,))
        assert torch.equal(by_source, expected)

        functional.set_step_mode(fast, "s")
        functional.set_step_mode(fast, "m")
        functional.reset_net(fast)
        assert torch.equal(fast(x), expected)

        outer = nn.Sequential(copy.deepcopy(fast), nn.Identity())
        functional.reset_net(outer)
        assert torch.equal(outer(x), expected)
        assert list(outer.state_dict()) == [f"0.{key}" for key in net.state_dict()]

        average = {key: p.clone() for key, p in fast.named_parameters()}
        for key, p in net.named_parameters():
            average[key].mul_(0.9).add_(p, alpha=0.1)
        twin.load_state_dict(average, strict=False)
        assert same_keys(twin, net)

    fast.train()
    functional.reset_net(fast)
    optimizer = torch.optim.SGD(fast.parameters(), 0.1)
    fast(x).sum().backward()
    optimizer.step()
    assert same_keys(fast, net)
    assert not all(torch.equal(a, b) for a, b in zip(fast.parameters(), net.parameters(), strict=True))


def same_keys(a, b):
    names = [n for n, _ in a.named_parameters()] == [n for n, _ in b.named_parameters()]
    return list(a.state_dict()) == list(b.state_dict()) and names


@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_pickles_into_a_fresh_process(policy, tmp_path):
    net, x = zoo("CIFAR10DVSNet")
    fast = sj_tac.convert(net, policy, 2)
    with torch.no_grad():
        expected = fast(x)
    functional.reset_net(fast)
    torch.save((fast, x, expected, list(net.state_dict())), tmp_path / "fast.pt")
    script = (
        "import sys, torch\n"
        "fast, x, expected, keys = torch.load(sys.argv[1], weights_only=False)\n"
        "fast.register_forward_hook(lambda m, a, out: None)\n"  # must not take the place of a hook that was pickled
        "fast.conv_fc[-1].register_forward_hook(lambda m, a, out: None)\n"
        "with torch.no_grad(): y = fast(x)\n"
        "assert torch.equal(y, expected), 'output'\n"
        "assert list(fast.state_dict()) == keys, 'keys'\n"
        "import sj_tac\n"
        "assert len(sj_tac.report(fast).converted) == 4, 'report'\n"
        "assert type(sj_tac.restore(fast).conv_fc[0]).__name__ == 'Conv2d', 'restore'\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "fast.pt"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
