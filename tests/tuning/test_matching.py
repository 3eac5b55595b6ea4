"""match: moments and rates are those of the source, by hooks on the source; what is kept proves nearer."""

import copy

import pytest
import torch
from matched import K, X, fitted, narrow, shared, watched, with_statistics_of
from spikingjelly.activation_based import functional
from support import awake, conv, frames, node, norm, only_v2, same_state
from torch import nn

import sj_tac
from sj_tac.tuning import matching
from sj_tac.tuning.fitting import SKIPPED
from sj_tac.tuning.matching import METHODS


@pytest.mark.parametrize("fuse", [True, False])
def test_moments_are_those_of_the_source_at_every_norm(fuse):
    source = narrow().double()
    x = X.double()
    fast = sj_tac.convert(source, "preserve", K, fuse=fuse)
    # Every second sample is fitted.
    expected, plain = watched(source, x[:, ::2]), watched(shared(source, K, 0.5), x[:, ::2])
    done = fitted(fast, "moments", x)
    got = watched(shared(with_statistics_of(source, fast), K, 0.5), x[:, ::2])
    for name in ("1", "4", "7"):
        for want, have in zip(expected[name], got[name], strict=True):
            torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)
        assert (plain[name][1] < 0.8 * expected[name][1]).any()
    assert done.corrected == ("1", "4", "7")
    assert (done.fitted, done.held_out) == (6, 6)


@pytest.mark.parametrize(("kind", "last"), [("if", False), ("lif", True), ("plif", False)])
def test_rates_are_those_of_the_source_in_every_channel(kind, last):
    source = narrow(lambda: node(kind)).double()
    source = source.to(memory_format=torch.channels_last) if last else source
    x = X.double()
    fast = sj_tac.convert(source, "preserve", K)
    beta = 1.0 if kind == "if" else 0.5
    expected, plain = watched(source, x[:, ::2]), watched(shared(source, K, beta), x[:, ::2])
    done = fitted(fast, "rates", x)
    got = watched(shared(with_statistics_of(source, fast), K, beta), x[:, ::2])
    apart = {True: 0.0, False: 0.0}
    for name in ("2", "5", "8"):
        # A channel of few neurons fires in steps, and a gain has its limits: nearer, and mostly there.
        apart[True] += (got[name] - expected[name]).abs().sum().item()
        apart[False] += (plain[name] - expected[name]).abs().sum().item()
        assert ((got[name] - expected[name]).abs() < 0.02).float().mean() > 0.6
    assert apart[True] < 0.35 * apart[False]
    assert not done.skipped
    # The report is of the others.
    nets = source, shared(source, K, beta), shared(with_statistics_of(source, fast), K, beta)
    expected, plain, got = (watched(net, x[:, 1::2]) for net in nets)
    for row in done.layers:
        assert row.source == pytest.approx(float(expected[row.neuron].mean()), abs=1e-9)
        assert row.before == pytest.approx(float(plain[row.neuron].mean()), abs=1e-6)
        assert row.after == pytest.approx(float(got[row.neuron].mean()), abs=1e-6)


def test_a_neuron_behind_a_convolution_that_is_kept_is_reported_and_keeps_its_rate():
    source, x = narrow(lambda: node("lif")).double(), X.double()
    policy = {"default": {"mode": "preserve", "k": K}, "rules": [{"match": "6", "mode": "keep"}]}
    done = fitted(sj_tac.convert(source, policy), "rates", x)
    assert [row.neuron for row in done.layers] == ["2", "5", "8"]
    expected = watched(source, x[:, 1::2])
    assert [row.source for row in done.layers] == pytest.approx([float(expected[n].mean()) for n in "258"], abs=1e-9)
    assert done.skipped == {"8": SKIPPED}


def test_what_is_kept_is_nearest_to_the_source_on_samples_that_were_not_fitted():
    source = narrow(lambda: node("if")).double()
    x = frames(8, 40, 2, 8, 8, dtype=torch.float64)
    fast = sj_tac.convert(source, "preserve", K)
    done = sj_tac.match(fast, [x[:, :7], x[:, 7:]], progress=False)
    assert [c.method for c in done.candidates] == list(METHODS)
    with torch.no_grad():
        want, have = (torch.log_softmax(net(x[:, 1::2]).mean(0).double(), 1) for net in (source, fast))
    distance = (want.exp() * (want - have)).sum(1).mean().item()
    assert done.after.distance == pytest.approx(distance, rel=1e-5)
    assert done.after.agreement == pytest.approx((want.argmax(1) == have.argmax(1)).double().mean().item())
    assert done.after.distance == min(c.distance for c in done.candidates)
    assert done.after.distance < done.before.distance
    assert done.after.words in str(sj_tac.report(fast).notes)
    assert done.to_dict()["method"] == done.method


def test_at_k_1_there_is_nothing_to_correct():
    source = narrow()
    fast = sj_tac.convert(source, "preserve", 1)
    done = sj_tac.match(fast, X, progress=False)
    assert done.method == "none"
    assert done.corrected == ()
    assert same_state(fast, source)
    assert "no correction came nearer" in str(sj_tac.report(fast).notes)


def test_a_convolution_without_a_norm_is_shifted_by_its_bias():
    torch.manual_seed(0)
    make = lambda: node("lif")  # noqa: E731
    source = nn.Sequential(conv(2, 4), make(), conv(4, 4), make(), conv(4, 4, bias=False), make()).eval()
    source, x = awake(source, X).double(), X.double()
    fast = sj_tac.convert(source, "preserve", K)
    done = fitted(fast, "moments", x)
    assert done.corrected == ("0", "2")
    assert done.before.agreement is None
    given = {}
    for name, net in (
        ("source", source),
        ("plain", shared(source, K, 0.5)),
        ("fast", shared(with_statistics_of(source, fast), K, 0.5)),
    ):
        net[2].register_forward_hook(lambda m, a, out, name=name: given.update({name: out.mean((0, 1, 3, 4)).detach()}))
        net(x[:, ::2])
        functional.reset_net(net)
    torch.testing.assert_close(given["fast"], given["source"], rtol=1e-9, atol=1e-9)
    assert (given["plain"] - given["source"]).abs().max() > 1e-3
    sj_tac.match(fast, undo=True)
    assert same_state(fast, source)


def test_silent_channels_and_scales_of_zero_are_left_alone():
    source = narrow()
    with torch.no_grad():
        source[0].weight[1].zero_()
        source[4].weight[2] = 0.0
        source[1].bias[3] = -50.0
    for method in ("moments", "rates"):
        fast = sj_tac.convert(source, "preserve", 4)
        fitted(fast, method)
        assert all(torch.isfinite(v).all() for v in fast.state_dict().values())
        assert fast[1].running_var[1] == source[1].running_var[1]
        if method == "rates":
            assert fast[4].running_var[2] == source[4].running_var[2]
            assert fast[1].running_var[3] == source[1].running_var[3]
        with torch.no_grad():
            assert torch.isfinite(fast(X)).all()


class Residual(nn.Module):
    """Blocks that add spikes (SEW) and drives (spiking ResNet), with a convolution in the shortcut."""

    def __init__(self, drives):
        super().__init__()
        self.stem = nn.Sequential(conv(2, 4, bias=False), norm(4), node("lif"))
        self.conv, self.norm, self.lif = conv(4, 4, bias=False), norm(4), node("lif")
        self.short, self.short_norm, self.out = conv(4, 4, bias=False, kernel_size=1, padding=0), norm(4), node("if")
        self.drives = drives

    def forward(self, x):
        x = self.stem(x)
        if self.drives:
            return self.out(self.norm(self.conv(x)) + self.short_norm(self.short(x))).mean((3, 4))
        return self.out(self.short_norm(self.short(self.lif(self.norm(self.conv(x))) + x)) + x).mean((3, 4))


@pytest.mark.parametrize(("drives", "method"), [(False, "rates"), (False, "moments"), (True, "moments"), (True, "both")])
def test_residual_nets(drives, method):
    torch.manual_seed(2)
    source = awake(Residual(drives).eval(), X).double()
    x = X.double()
    expected = watched(source, x[:, ::2])
    fast = sj_tac.convert(source, "preserve", K)
    done = fitted(fast, method, x)
    functional.reset_net(fast)
    assert done.skipped == ({"out": SKIPPED} if drives and method != "moments" else {})
    if method == "moments":
        got = watched(sj_tac.convert(with_statistics_of(source, fast), "preserve", K, fuse=False), x[:, ::2])
        for name in ("stem.1", "norm", "short_norm"):
            torch.testing.assert_close(got[name], expected[name], rtol=1e-6, atol=1e-6)
    elif not drives:
        got = watched(sj_tac.convert(with_statistics_of(source, fast), "preserve", K, fuse=False), x[:, ::2])
        assert (got["out"] - expected["out"]).abs().max() < 0.02
    assert same_state(sj_tac.restore(fast), source)


class Folded(nn.Module):
    """Time folded into the batch by hand, batch first."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.lif = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), node("lif")
        self.deep, self.deep_norm, self.out = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), node("if")

    def forward(self, x):
        x = x.transpose(0, 1)
        T, N = x.shape[:2]
        x = self.lif(self.norm(self.conv(x.flatten(0, 1))).unflatten(0, (T, N)))
        x = self.out(self.deep_norm(self.deep(x.flatten(0, 1))).unflatten(0, (T, N)))
        return x.mean((0, 3, 4))


@only_v2
@pytest.mark.parametrize("method", ["moments", "rates"])
def test_folded_batch_first_nets(method):
    torch.manual_seed(0)
    x = X.transpose(0, 1).contiguous()
    source = awake(Folded().eval(), x).double()
    fast = sj_tac.convert(source, "preserve", K, example_input=x[:3].double())
    expected = watched(source, x[::2].double())
    done = fitted(fast, method, x.double())
    assert done.corrected == ("norm", "deep_norm")
    unfused = sj_tac.convert(with_statistics_of(source, fast), "preserve", K, example_input=x[:3].double(), fuse=False)
    got = watched(unfused, x[::2].double())
    if method == "rates":
        assert all((got[n] - expected[n]).abs().max() < 0.02 for n in ("lif", "out"))
    else:
        rows = {row.neuron: row for row in done.layers}
        others = watched(unfused, x[1::2].double())
        assert rows["lif"].after == pytest.approx(float(others["lif"].mean()), abs=1e-6)
    assert same_state(sj_tac.restore(fast), source)


def test_decode():
    source = narrow()

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = copy.deepcopy(source)

        def forward(self, x):
            y = self.net(x)
            return {"scores": y, "last": y[-1]}

    fast = sj_tac.convert(Two().eval(), "preserve", 4)
    assert sj_tac.match(fast, X, progress=False).before.agreement is None
    done = sj_tac.match(fast, X, progress=False, decode=lambda out: out["scores"].mean(0))
    assert done.before.agreement is not None


def test_distilling_comes_nearer_on_what_it_was_fitted_and_is_kept_where_it_does_elsewhere(monkeypatch):
    source = narrow(lambda: node("if"))
    x = frames(8, 40, 2, 8, 8)
    fast = sj_tac.convert(source, "preserve", K)
    done = sj_tac.match(fast, x, method="rates", steps=40, progress=False)
    assert [c.method for c in done.candidates] == ["none", "rates", "distilled"]
    assert done.after.distance == min(c.distance for c in done.candidates)

    def distance(net):
        with torch.no_grad():
            a, b = (n(x[:, ::2]).mean(0) for n in (source, net))
        functional.reset_net(source)
        functional.reset_net(net)
        return (a - b).square().mean().item()

    far = sj_tac.convert(source, "preserve", K)
    monkeypatch.setattr(matching, "_nearest", lambda tried: "distilled" if "distilled" in tried else "rates")
    before = distance(far)
    done = sj_tac.match(far, x, method="rates", steps=40, progress=False)
    assert done.method == "distilled"
    assert distance(far) < 0.7 * before
    # The definition of a plain net with these statistics is what the distilled net computes.
    with torch.no_grad():
        plain = shared(with_statistics_of(source, far), K, 1.0)
        assert (plain(x).mean(0) - far(x).mean(0)).abs().max() < 0.1
    assert all(p.requires_grad for p in far.parameters())
    functional.reset_net(far)
    assert same_state(sj_tac.restore(far), source)
