"""match beside whatever else writes into a net, and nets of shapes and outputs that few have."""

import copy

import pytest
import torch
from matched import K, X, fitted, matched, narrow, watched
from spikingjelly.activation_based import functional, layer
from support import awake, conv, frames, node, norm, only_v2, same_state
from torch import nn

import sj_tac
from sj_tac.errors import BatchError, ConversionError, MatchedStatisticsWarning
from sj_tac.schedule import KSchedule
from sj_tac.tuning.batches import Batch
from sj_tac.tuning.comparing import Comparison
from sj_tac.tuning.measure import decoded


def lif():
    return node("lif")


def head(channels):
    pool = layer.AdaptiveAvgPool2d(1, step_mode="m")
    return pool, layer.Flatten(step_mode="m"), layer.Linear(channels, 5, step_mode="m")


def bare():
    """Without norms: biases are what is corrected."""
    torch.manual_seed(0)
    return awake(nn.Sequential(conv(2, 4), lif(), conv(4, 4), lif(), *head(4)).eval(), X)


TAKEN_BACK = {
    "undo": lambda net: sj_tac.match(net, undo=True),
    "set_k": lambda net: sj_tac.set_k(net, 2),
    "restore": sj_tac.restore,
    "again": lambda net: fitted(net, "moments") and sj_tac.match(net, undo=True),
}


def taken_back(net, how):
    made = TAKEN_BACK[how](net)
    return made if how == "restore" else net


@pytest.mark.parametrize("how", list(TAKEN_BACK))
def test_what_the_user_did_since_stays_and_the_rest_goes_back(how):
    source, fast = matched("moments", bare)
    with torch.no_grad():
        fast[0].bias += 1.0
    torch.testing.assert_close(taken_back(fast, how)[0].bias, source[0].bias + 1.0)
    # A module in the place of another is in nobody's way.
    source, fast = matched("moments")
    fast[4] = norm(6)
    own = copy.deepcopy(fast[4].state_dict())
    assert "matched by" not in str(sj_tac.report(fast).notes)
    back = taken_back(fast, how)
    assert all(torch.equal(back[i].running_var, source[i].running_var) for i in (1, 7))
    assert all(torch.equal(v, back[4].state_dict()[k]) for k, v in own.items())


@pytest.mark.parametrize(("how", "make"), [*zip(TAKEN_BACK, [narrow, bare, bare, narrow], strict=True)])
def test_a_checkpoint_that_was_loaded_since_stays(how, make):
    source, fast = matched("moments", make)
    loaded = {k: 1.5 * v if v.is_floating_point() else v for k, v in source.state_dict().items()}
    fast.load_state_dict(loaded)
    back = taken_back(fast, how).state_dict()
    assert all(torch.equal(v, back[k]) for k, v in loaded.items())


@pytest.mark.parametrize("make", [narrow, bare])
def test_what_came_matched_is_not_taken_for_the_source(make):
    source, fast = matched("moments", make)
    state = copy.deepcopy(fast.state_dict())

    def loaded(k=4):
        net = sj_tac.convert(source, "preserve", k)
        net.load_state_dict(state)
        return net

    for action in (
        lambda net: sj_tac.match(net, X),
        lambda net: sj_tac.recalibrate(net, X),
        lambda net: KSchedule(net, {0: 2}),
    ):
        net = loaded()
        with pytest.raises(ConversionError, match=r"came matched in a checkpoint.* load"):
            action(net)
        assert same_state(net, fast)
    with pytest.warns(MatchedStatisticsWarning, match="set_k: "):
        sj_tac.set_k(net, 1)
    with pytest.warns(MatchedStatisticsWarning, match="restore: "):
        sj_tac.restore(net)
    again = sj_tac.convert(source, "preserve", 1)
    with pytest.warns(MatchedStatisticsWarning, match="matched for preserve k=4"):
        again.load_state_dict(net.state_dict())
    # A part of a checkpoint that says nothing of them changes nothing.
    net = loaded()
    net.load_state_dict({list(state)[-1]: state[list(state)[-1]]}, strict=False)
    with pytest.raises(ConversionError, match="came matched"):
        sj_tac.match(net, X)


def test_recalibrated_and_matched_nets_are_told_apart():
    fast = sj_tac.convert(narrow(), "preserve", 4)
    sj_tac.recalibrate(fast, X)
    before = copy.deepcopy(fast.state_dict())
    with pytest.raises(ConversionError, match=r"recalibrate.*undo=True"):
        sj_tac.match(fast, X)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), fast.state_dict().values(), strict=True))
    sj_tac.recalibrate(fast, undo=True)
    fitted(fast, "moments")
    for action in (lambda: sj_tac.recalibrate(fast, X), lambda: KSchedule(fast, {0: 4})):
        with pytest.raises(ConversionError, match="this net is matched"):
            action()
    assert "matched by 'moments'" in str(sj_tac.report(fast).notes)


def test_a_net_that_changes_precision_is_restored():
    source, fast = matched("moments")
    assert same_state(sj_tac.restore(fast.half()), copy.deepcopy(source).half())


def test_linear_layers_on_tokens():
    """[T, N, L, F]: features, which biases belong to, come last."""
    linear = lambda a, b: layer.Linear(a, b, step_mode="m")  # noqa: E731
    torch.manual_seed(0)
    x = frames(8, 12, 6, 20)
    source = awake(nn.Sequential(linear(20, 16), lif(), linear(16, 16), lif(), linear(16, 5)).eval(), x).double()
    fast = sj_tac.convert(source, {"layers": ["conv", "linear"], "default": {"k": 4}}, example_input=x[:, :2].double())
    done = fitted(fast, "moments", x.double())
    assert done.corrected == ("0", "2")
    given = {}
    for name, net in (("source", source), ("fast", fast)):
        net[2].register_forward_hook(lambda m, a, out, name=name: given.update({name: out[:].mean((0, 1, 2)).detach()}))
        net(x[:, ::2].double())
        functional.reset_net(net)
    torch.testing.assert_close(given["fast"], given["source"], rtol=1e-9, atol=1e-9)


class Fork(nn.Module):
    """One norm that two neurons read."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(conv(2, 4), norm(4), lif())
        self.conv, self.norm, self.a, self.b = conv(4, 4), norm(4), lif(), node("if")

    def forward(self, x):
        drive = self.norm(self.conv(self.first(x)))
        return self.a(drive).mean((3, 4)) + self.b(drive).mean((3, 4))


@pytest.mark.parametrize("between", ["norm", "fork"])
def test_rates_are_left_alone_where_a_gain_would_be_written_elsewhere_than_it_was_fitted(between):
    torch.manual_seed(0)
    if between == "fork":
        net, skipped = Fork(), {"a", "b"}
    else:
        net, skipped = nn.Sequential(conv(2, 4), norm(4), norm(4), lif(), *head(4)), {"3"}
    source = awake(net.eval(), X).double()
    fast = sj_tac.convert(source, "preserve", 4, example_input=X[:, :2].double())
    done = fitted(fast, "rates", X.double())
    assert set(done.skipped) == skipped


def test_rates_are_of_samples_from_all_batches():
    """Sorted by class, as data sets are: the first sixteen samples are not like the rest."""
    x = torch.cat([frames(8, 32, 2, 8, 8, rate=0.1), frames(8, 96, 2, 8, 8, rate=0.5, seed=1)], 1)
    source = narrow(lambda: node("if"))
    fast = sj_tac.convert(source, "preserve", K)
    done = fitted(fast, "rates", x)
    assert done.fitted == 64
    true = watched(source, x[:, ::2][:, :64])["2"].mean().item()
    assert done.layers[0].source == pytest.approx(true, rel=0.05)


@only_v2
def test_batch_first_scores_of_as_many_steps_as_samples():
    class BatchFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = narrow()

        def forward(self, x):
            return self.net(x.transpose(0, 1)).transpose(0, 1)

    x = frames(8, 16, 2, 8, 8, dtype=torch.float64).transpose(0, 1).contiguous()
    source = BatchFirst().double().eval()
    fast = sj_tac.convert(source, "preserve", 4, example_input=x[:3])
    done = fitted(fast, "moments", x)
    with torch.no_grad():
        want, have = (torch.log_softmax(net(x[1::2]).mean(1), 1) for net in (source, fast))
    assert done.after.agreement == (want.argmax(1) == have.argmax(1)).double().mean().item()
    # Where T and N differ, an output that puts time first is told from one that does not.
    batch, output = Batch(X, None, batch_first=True), torch.rand(8, 12, 5)
    assert torch.equal(decoded(output, batch, None, ""), output.mean(0))
    assert torch.equal(decoded(output.transpose(0, 1), batch, None, ""), output.mean(0))


def test_outputs_that_are_no_classes():
    source = narrow()
    source[11] = layer.Linear(6, 1, step_mode="m")  # a regression
    done = sj_tac.match(sj_tac.convert(source, "preserve", 4), X, progress=False)
    assert done.before.agreement is None
    assert done.before.distance > 0
    silent = nn.Sequential(conv(2, 4, bias=False), norm(4), node("lif", v_threshold=1e6)).eval()
    assert sj_tac.match(sj_tac.convert(silent, "preserve", 4), X, progress=False).method == "none"
    with torch.no_grad():
        source[11].bias.fill_(torch.nan)
    with pytest.raises(BatchError, match="NaN or infinite"):
        sj_tac.match(sj_tac.convert(source, "preserve", 4), X, progress=False)


def test_search_goes_on_without_matching_where_it_cannot():
    batches = [frames(8, 4, 2, 8, 8), frames(8, 4, 2, 12, 12)]
    options = {"progress": False, "rounds": 1, "ks": (1, 2), "modes": ("preserve",), "max_drop": 1.0}
    evidence = sj_tac.search(narrow(), batches, cost=lambda net: 1.0, **options).evidence
    assert any("Candidates were not matched: match fits all samples at once" in note for note in evidence.notes)
    assert {trial.matched for trial in evidence.trials} == {""}


def test_a_net_that_cannot_be_copied_is_a_clear_error():
    source = narrow()
    source.kept = 2 * source[0].weight
    with pytest.raises(ConversionError, match="measured on a copy"):
        sj_tac.convert(source, "preserve", 4, inplace=True, match=X)
    assert type(source[0]) is layer.Conv2d


def test_a_bias_of_two_convolutions_is_shifted_once():
    torch.manual_seed(0)
    net = nn.Sequential(conv(2, 4), lif(), conv(4, 4), lif(), *head(4)).eval()
    net[2].bias = net[0].bias
    source = awake(net, X)
    fast = sj_tac.convert(source, "preserve", 4)
    assert fitted(fast, "moments").corrected == ("0",)
    assert same_state(sj_tac.restore(fast), source)


def test_maps_of_groups_are_compared_as_the_frames_that_they_stand_for():
    """``emit: groups`` changes nothing of what a correction is worth."""
    x = frames(10, 16, 2, 8, 8)
    source = awake(narrow()[:6], x)
    found = {}
    for emit in ("frames", "groups"):
        fast = sj_tac.convert(source, {"default": {"mode": "collapse", "k": 4, "emit": emit}})
        assert len(fast(x)) == (10 if emit == "frames" else 3)
        found[emit] = sj_tac.match(fast, x, method="both", steps=3, progress=False).candidates
    for a, b in zip(found["frames"], found["groups"], strict=True):
        assert (a.method, a.agreement) == (b.method, None)
        assert a.distance == pytest.approx(b.distance, rel=1e-4)
    assert len({c.distance for c in found["groups"]}) > 1


def test_outputs_of_other_shapes_cannot_be_compared():
    compared = Comparison(narrow()[:3], [Batch(X, None)], None, 0)
    with pytest.raises(BatchError, match=r"the outputs of Sequential are \[\d+\] numbers.* emit: groups, .*decode="):
        compared("none", nn.Sequential(*narrow()[:3], nn.Flatten(2), nn.Linear(384, 7)))
