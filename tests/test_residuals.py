"""Residual nets: sums before, between and after neurons; collapse by its definition; sums that travel as groups."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import awake, conv, frames, node, norm, only_v2, recorded, zoo
from torch import nn

import sj_tac
from sj_tac.errors import PlanNotKeptWarning
from sj_tac.runtime.neurons import Unit
from sj_tac.runtime.runs import Run
from sj_tac.runtime.values import Frames, Spikes


def both(net, policy, k, **options):
    return sj_tac.convert(net, policy, k, fuse=False, **options), sj_tac.convert(net, policy, k, **options)


def deep(net):
    """float64, where fused and unfused arithmetic tips no spike over."""
    return net.double(), lambda x: x.double()


@pytest.mark.parametrize("name", ["spiking_resnet18", "sew_resnet18", "ms_resnet18"])
@pytest.mark.parametrize(("policy", "k"), [("preserve", 2), ("preserve", 3), ("collapse", 2)])
def test_fused_residual_nets_are_their_unfused_selves(name, policy, k):
    net, x = zoo(name) if name != "ms_resnet18" or sj_tac.host.IS_V2 else pytest.skip("not in this host")
    net, x = net.double(), x.double()
    example = x if name == "ms_resnet18" else None
    unfused, fused = both(net, policy, k, example_input=example)
    with torch.no_grad():
        expected, got = unfused(x), fused(x)
    assert expected.std() > 0
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    kernels = {v.kernel for v in sj_tac.report(fused).converted}
    assert kernels == {"numba, fused"}


def test_a_residual_is_added_inside_fire_and_never_written_out(monkeypatch):
    net, x = zoo("spiking_resnet18")
    _, fused = both(net, "preserve", 2)
    seen, made = [], []
    begin, as_frames = Run.__init__, Frames.frames
    monkeypatch.setattr(
        Run, "__init__", lambda self, n, i, *a: (seen.append(i.residual is not None), begin(self, n, i, *a))[1]
    )
    monkeypatch.setattr(Frames, "frames", lambda self, reader="": (made.append(reader), as_frames(self, reader))[1])
    with torch.no_grad():
        fused(x)
    # Eight blocks; in three of them the identity is itself a drive (a projection), and both have the same groups.
    assert sum(seen) == 5
    assert len(seen) == 17
    # Frames that the plan knows a conv to read, behind a sum or the last block; none of a drive.
    assert all(v.frames_made == {} for v in sj_tac.report(fused).verdicts)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", ["spiking", "sew", "ms"])
@pytest.mark.parametrize("steps", [6, 7])
def test_training_a_residual_block(kind, frozen, steps):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(conv(2, 4), norm(4), node("plif", v_threshold=0.3))
            self.conv, self.norm, self.node = conv(4, 4), norm(4), node("lif", v_threshold=0.3)
            self.down = nn.Sequential(layer.Conv2d(4, 4, 1, step_mode="m"), norm(4))
            self.last = nn.Sequential(conv(4, 3), norm(3), node("lif", v_threshold=0.3))

        def forward(self, x):
            x = self.stem(x)
            identity = self.down(x)
            if kind == "spiking":
                y = self.norm(self.conv(x))
                y += identity
                x = self.node(y + x)
            elif kind == "ms":
                x = self.norm(self.conv(self.node(x))) + identity
            else:
                x = self.node(self.norm(self.conv(x))) + x
            return self.last(x)

    torch.manual_seed(0)
    net, x = Block().double(), frames(steps, 3, 2, 6, 6, dtype=torch.float64)
    results = []
    for fast in both(net, "preserve", 2):
        fast.train()
        if frozen:
            sj_tac.freeze_bn(fast)
        y = fast(x)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        results.append((y.detach(), {n: p.grad for n, p in fast.named_parameters()}, dict(fast.named_buffers())))
    (y, grads, buffers), (z, fused_grads, fused_buffers) = results
    assert 0.02 < y.mean() < 0.9
    assert torch.equal(y, z)
    for name, gradient in grads.items():
        assert (gradient is None) == (fused_grads[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(fused_grads[name], gradient, rtol=1e-7, atol=1e-9, msg=name)
    for name, value in buffers.items():
        # torch corrects the variance by n / (n - 1) with n the frames it sees: groups here, all frames there.
        torch.testing.assert_close(fused_buffers[name], value, rtol=2e-2 if "var" in name else 1e-9, atol=1e-9, msg=name)


def test_a_sew_stage_runs_at_the_rate_of_its_groups(monkeypatch):
    """Inside a stage sums of spikes travel as sums of groups: through the residual adds, to every conv that reads them."""
    net, x = zoo("sew_resnet18")
    x = x[:4]
    fast = sj_tac.convert(net, "preserve", 2)
    rates, adds = {}, []
    convolve, batch = nn.Conv2d._conv_forward, x.shape[1]
    names = {m: n for n, m in fast.named_modules()}
    monkeypatch.setattr(
        nn.Conv2d,
        "_conv_forward",
        lambda self, y, *a: (rates.__setitem__(names[self], (self._tac.ran, len(y) // batch)), convolve(self, y, *a))[1],
    )

    def sums_of(y):
        return isinstance(y, Spikes) and len(y.sums) == 1 and y._made is None

    for i in (1, 2, 3, 4):
        for block in fast.get_submodule(f"layer{i}"):
            block.register_forward_hook(lambda m, a, y: adds.append(sums_of(y)))
    with torch.no_grad():
        expected = fast(x)
    assert rates["conv1"] == ("frames", 2)
    assert {r for n, r in rates.items() if n[:6] in ("layer1", "layer2", "layer3")} == {("sums", 2)}
    # The last stage ends in a Linear layer, which reads frames; so does everything its sums are tied to.
    assert adds == [True] * 6 + [False] * 2
    assert {rates["layer4.0.conv1"], rates["layer4.0.downsample.0"], rates["layer4.0.conv2"]} == {("sums", 2)}
    # A hook that looks at one reader's input sees frames, and what it saw changes nothing for the reader.
    seen = []
    fast.layer1[0].conv1.register_forward_pre_hook(lambda m, a: seen.append((len(a[0]), float(a[0].sum()))))
    functional.reset_net(fast)
    with torch.no_grad():
        assert torch.equal(fast(x), expected)
    assert seen[0][0] == 4
    assert seen[0][1] > 0
    assert rates["layer1.0.conv1"] == ("sums", 2)


def test_readers_that_want_different_groups_get_frames():
    net, x = zoo("sew_resnet18")
    policy = {
        "default": {"k": 2},
        "rules": [{"match": "layer1.1.conv1", "k": 4}, {"match": "layer2.0.downsample.0", "weights": "uniform"}],
    }
    unfused, fused = both(net.double(), policy, 2)
    seen = []
    fused.layer1[0].register_forward_hook(lambda m, a, y: seen.append(len(y)))
    with torch.no_grad():
        torch.testing.assert_close(fused(x.double()), unfused(x.double()), rtol=1e-9, atol=1e-9)
    assert seen == [5]
    # A time constant that is changed later is noticed, too.
    fused = sj_tac.convert(net, "preserve", 2)
    fused.layer1[0].sn1.tau = 4.0
    slow = sj_tac.convert(net, "preserve", 2, fuse=False)
    slow.layer1[0].sn1.tau = 4.0
    with torch.no_grad(), pytest.warns(PlanNotKeptWarning) as told:
        torch.testing.assert_close(fused(x.double()), slow(x.double()), rtol=1e-9, atol=1e-9)
    assert "was planned, but cannot be used: they are sums of other groups or weights" in str(told[0].message)


def test_collapse_of_a_sew_net_is_preserve_with_uniform_weights_behind_its_stem():
    """The means of sums are the sums of means: the oracle of a chain holds in a net of residual sums, bit for bit."""
    net, x = zoo("sew_resnet18")
    uniform = {"default": {"k": 2, "weights": "uniform"}, "rules": [{"match": "conv1", "weights": "decay"}]}
    for steps in (4, 5):
        collapsed = sj_tac.convert(net, "collapse", 2, example_input=x)
        oracle = sj_tac.convert(net, uniform, fuse=False)
        with torch.no_grad(), recorded(oracle, nn.Module) as expected, recorded(collapsed, neuron.BaseNode) as got:
            collapsed(x[:steps]), oracle(x[:steps])
        assert all(v.status == "converted" for v in sj_tac.report(collapsed).verdicts)
        for name, (spikes,) in got.items():
            reference = expected[name][0]
            assert 0.01 < reference.mean() < 0.8, name
            means = torch.cat([g.mean(0, keepdim=True).expand_as(g) for g in reference.split(2)])
            assert torch.equal(spikes, means), name


@pytest.mark.parametrize("steps", [4, 5])
def test_collapse_of_a_spiking_resnet_by_its_definition(steps):
    """Written out: the stem aggregates; then frames are means, and neurons step twice on each and emit the mean."""
    net, x = zoo("spiking_resnet18")
    net, x = net.double(), x[:steps].double()
    fast = sj_tac.convert(net, "collapse", 2, example_input=x)
    with torch.no_grad():
        got = fast(x)
        beta = 1 - 1 / net.sn1.tau
        groups = [g if len(g) == 1 else (beta * g[:1] + g[1:]) / (beta + 1) for g in x.split(2)]
        lengths = [len(g) for g in x.split(2)]
        functional.reset_net(net)

        def stepped(node, drives, pool=lambda y: y):
            spikes = pool(
                node(torch.cat([d.expand(n, *d.shape[1:]) for d, n in zip(drives.split(1), lengths, strict=True)]))
            )
            return torch.cat([g.mean(0, keepdim=True) for g in spikes.split(lengths)])

        y = stepped(net.sn1, net.bn1(net.conv1(torch.cat(groups))), net.maxpool)
        for block in [*net.layer1, *net.layer2, *net.layer3, *net.layer4]:
            identity = y if block.downsample is None else block.downsample(y)
            y = stepped(block.sn1, block.bn1(block.conv1(y)))
            y = stepped(block.sn2, block.bn2(block.conv2(y)) + identity)
        expected = net.fc(torch.flatten(net.avgpool(y), 2))
    expected = expected.repeat_interleave(torch.tensor(lengths), 0)
    assert got.shape == (steps, 2, 10)
    assert expected.std() > 0
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    statuses = {v.status for v in sj_tac.report(fast).verdicts}
    assert statuses == {"converted"}


def test_where_a_collapse_cannot_begin_it_says_why():
    net, x = zoo("spiking_resnet18")
    policy = {"default": {"mode": "preserve"}, "rules": [{"match": "layer1.0.conv2", "mode": "collapse"}]}
    verdict = sj_tac.plan(net, policy)["layer1.0.conv2"]
    # Its drive meets ordinary frames before its neuron: that is frames, as preserve gives them.
    assert (verdict.status, verdict.mode) == ("converted", "collapse")
    joins = "add() in 'layer1.0' (BasicBlock) joins frames at different rates"
    assert f"frames come back before its neuron: {joins}" in verdict.detail
    with torch.no_grad():
        preserved = {"default": {"mode": "preserve"}}
        assert torch.equal(sj_tac.convert(net, policy)(x), sj_tac.convert(net, preserved)(x))
    policy["rules"][0]["spikes"] = "binary"
    with pytest.raises(sj_tac.errors.PolicyError, match=r"COLLAPSE_BRANCHED: a binary collapse makes one step of several"):
        sj_tac.plan(net, policy)
    del policy["rules"][0]["spikes"]
    # One that begins inside a block's branch ends where the branch joins the frames of the other.
    policy["rules"][0] |= {"match": "layer1.0.conv[1]"}
    fast = sj_tac.convert(net, policy)
    assert isinstance(fast.layer1[0].sn1._tac, Unit)
    assert sj_tac.report(fast)["layer1.0.conv2"].status == "converted"
    with torch.no_grad():
        torch.testing.assert_close(fast(x), sj_tac.convert(net, policy, fuse=False)(x))
    binary = {"default": {"mode": "collapse", "spikes": "binary"}}
    report = sj_tac.plan(net, binary)
    assert report["conv1"].status == "converted"
    assert "a binary collapse makes one step of several" in report["layer1.0.conv2"].detail


def test_a_stateful_chunked_call_and_copies_of_a_residual_net(tmp_path):
    net, x = zoo("spiking_resnet18")
    _, fast = both(net, "preserve", 2)
    with torch.no_grad():
        whole = fast(x[:4])
        functional.reset_net(fast)
        parts = torch.cat([fast(x[:2]), fast(x[2:4])])
        assert torch.equal(whole, parts)
        torch.save(fast, tmp_path / "fast.pt")
        functional.reset_net(fast)
        for twin in (copy.deepcopy(fast), torch.load(tmp_path / "fast.pt", weights_only=False)):
            functional.reset_net(twin)
            assert torch.equal(twin(x[:4]), whole)


@pytest.mark.parametrize("name", ["spiking_resnet18", "sew_resnet18"])
def test_set_k_gives_what_convert_would(name):
    net, x = zoo(name)
    net, x = net.double(), x.double()
    for policy in ("preserve", "collapse"):
        fast = sj_tac.convert(net, policy, 2)
        sj_tac.set_k(fast, 4)
        again = sj_tac.convert(net, policy, 4)
        with torch.no_grad():
            assert torch.equal(fast(x), again(x))
        verdicts = [[(v.layer, v.status, v.k) for v in sj_tac.report(f).verdicts] for f in (fast, again)]
        assert verdicts[0] == verdicts[1]
        sj_tac.set_k(fast, 1, "layer[12].*") if policy == "preserve" else sj_tac.set_k(fast, 1)
        assert fast(x).shape == net(x).shape
        functional.reset_net(net)


@pytest.mark.parametrize("name", ["spiking_resnet18", "sew_resnet18"])
def test_hooks_anywhere_in_a_residual_net_see_ordinary_frames(name):
    net, x = zoo(name)
    net, x = net.double(), x.double()
    unfused, fused = both(net, "preserve", 2)
    with torch.no_grad(), recorded(unfused, nn.Module) as expected, recorded(fused, nn.Module) as got:
        unfused(x), fused(x)
    assert list(got) == list(expected)
    for where, values in got.items():
        for value, wanted in zip(values, expected[where], strict=True):
            assert type(value) is torch.Tensor, where
            torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-9, msg=where)
    seen = []
    for module in fused.layer1[0].bn2, fused.layer1[0].conv2:
        module.register_forward_hook(lambda m, a, y: seen.append(y[:] * 1))
    functional.reset_net(fused)
    functional.reset_net(unfused)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), unfused(x), rtol=1e-9, atol=1e-9)
    assert [type(y) for y in seen] == [torch.Tensor] * 2
    assert all(len(y) == len(x) for y in seen)


@only_v2
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::UserWarning:contextlib", "ignore::FutureWarning")
def test_torch_compile_follows_a_converted_residual_net():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(conv(2, 3), norm(3), node("lif", v_threshold=0.3))
            self.conv, self.norm, self.node = conv(3, 3), norm(3), node("lif", v_threshold=0.3)

        def forward(self, x):
            x = self.stem(x)
            return self.node(self.norm(self.conv(x)) + x) + x

    torch.manual_seed(0)
    net, x = Block().eval(), frames(6, 2, 2, 6, 6)
    for policy in ("preserve", "collapse"):
        fast = sj_tac.convert(net, policy, 2)
        with torch.no_grad():
            expected = fast(x)
            functional.reset_net(fast)
            compiled = torch.compile(fast, backend="eager", fullgraph=True)
            assert torch.equal(compiled(x), expected)
            torch._dynamo.reset()


def test_a_drive_that_several_neurons_and_convs_read():
    """The stem of an MS net: its drive goes to a neuron, to a projection and into the sum, and stays one drive."""

    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.spike = nn.Sequential(conv(2, 3), norm(3)), node("lif", v_threshold=0.3)
            self.conv, self.down = nn.Sequential(conv(3, 3), norm(3)), nn.Sequential(conv(3, 3), norm(3))
            self.last = node("lif", v_threshold=0.3)

        def forward(self, x):
            x = self.stem(x)
            return self.last(self.conv(self.spike(x)) + self.down(x))

    torch.manual_seed(0)
    x = frames(6, 2, 2, 6, 6)
    net = awake(Stem().eval(), x)
    assert [v.status for v in sj_tac.plan(net).verdicts] == ["converted"] * 3
    net.last.tau = 3.0
    assert sj_tac.plan(net)["stem.0"].detail == "its drive reaches 2 neurons of different decay; weighted for 'spike'"
    assert sj_tac.plan(net)["conv.0"].detail == ""
    net.last.tau = 2.0
    still = x[:1].expand(6, -1, -1, -1, -1)
    with torch.no_grad():
        for k in (2, 3):
            for fast in both(net, "preserve", k):
                functional.reset_net(net)
                # On a still image the stem's shared drive is the frames' own: nothing is approximated there.
                with recorded(fast, neuron.BaseNode) as got, recorded(net, neuron.BaseNode) as expected:
                    fast(still), net(still)
                assert (got["spike"][0] != expected["spike"][0]).float().mean() <= 1e-3
