"""set_k changes what kept layers behind a collapse see: their norms keep what is known of them, and say so."""

import copy
import pickle
import warnings

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import awake, conv, frames, node, norm, same_state
from torch import nn

import sj_tac
from sj_tac.errors import BatchError, BatchNormMovedWarning, MatchedStatisticsWarning, PolicyError

X = frames(8, 4, 2, 8, 8, dtype=torch.float64)
NORMS = ("1", "4", "7")


def source():
    torch.manual_seed(0)
    chains = [[conv(i, 3), norm(3), node("lif")] for i in (2, 3, 3)]
    return awake(nn.Sequential(*[module for chain in chains for module in chain]).double().eval(), X)


def behind(k=4, spikes="count"):
    """The first layer collapses; the policy keeps the others, which see fewer frames."""
    rule = {"match": "0", "mode": "collapse", "k": k, "spikes": spikes}
    return {"default": {"mode": "keep"}, "rules": [rule]}


def of(net, name):
    return net.get_submodule(name)


def reestimated(net, batches):
    """What torch's update_bn makes of a net that is at rest before every batch."""
    net = copy.deepcopy(net)
    at_rest = lambda module, args: functional.reset_net(net)  # noqa: E731
    net.register_forward_pre_hook(at_rest)
    torch.optim.swa_utils.update_bn(batches, net)
    return net


def quietly_at(net, k):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchNormMovedWarning)
        sj_tac.set_k(net, k)
    return net


def train(net):
    net.train()
    net(X).mean().backward()
    functional.reset_net(net)
    return net


def moved(warned):
    (found,) = [w for w in warned if issubclass(w.category, BatchNormMovedWarning)]
    assert found.filename == __file__
    return [name for name in ("'0'", "'4'", "'7'") if name in str(found.message)]


@pytest.mark.parametrize(("spikes", "k"), [("count", 1), ("binary", 2)])
def test_what_recalibrate_wrote_is_taken_back_at_another_k(k, spikes):
    plain = source()
    net = sj_tac.convert(plain, behind(spikes=spikes))
    assert sj_tac.recalibrate(net, X) == [*NORMS]
    net.load_state_dict(copy.deepcopy(net.state_dict()))  # which is no new checkpoint
    quietly_at(net, k)
    assert sj_tac.recalibrate(copy.deepcopy(net), undo=True) == [*NORMS]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_state(sj_tac.restore(pickle.loads(pickle.dumps(net))), plain)
        assert same_state(sj_tac.restore(quietly_at(quietly_at(net, 4), 1)), plain)


def test_files_keep_it(tmp_path):
    plain = source()
    net = sj_tac.convert(plain, behind())
    sj_tac.recalibrate(net, X)
    sj_tac.freeze_bn(net)
    quietly_at(net, 1)
    sj_tac.save(net, tmp_path / "net.safetensors")
    again = sj_tac.load(tmp_path / "net.safetensors", source())
    assert same_state(again, net)
    again.train()
    assert not any(of(again, name).training for name in NORMS)
    with pytest.warns(BatchNormMovedWarning) as warned:
        sj_tac.set_k(again, 4)
    assert moved(warned) == ["'0'", "'4'", "'7'"]
    assert sj_tac.recalibrate(again, undo=True) == [*NORMS]
    assert same_state(sj_tac.restore(again), plain)


def test_recalibrate_at_single_frames_is_of_the_norms_that_it_is_needed_for():
    plain = source()
    net = sj_tac.convert(plain, behind(1))
    sj_tac.freeze_bn(net)
    assert sj_tac.recalibrate(net, X) == ["1"]
    net = sj_tac.convert(plain, behind())
    sj_tac.recalibrate(net, X)
    quietly_at(net, 1)
    assert sj_tac.recalibrate(net, X) == [*NORMS]
    expected = reestimated(plain, [X])
    for name in NORMS:
        torch.testing.assert_close(of(net, name).running_var, of(expected, name).running_var)
    sj_tac.recalibrate(net, undo=True)
    assert same_state(sj_tac.restore(net), plain)


def test_a_schedule_ends_with_the_statistics_of_single_frames_everywhere():
    plain = source()
    batches = [X, frames(8, 4, 2, 8, 8, dtype=torch.float64, seed=1)]
    net = sj_tac.convert(plain, behind())
    schedule = sj_tac.KSchedule(net, {0: 4, 1: 1, 2: 4}, batches=batches)
    schedule.step(0)
    schedule.step(1)
    expected = reestimated(plain, batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sj_tac.restore(net)
    for name in NORMS:
        torch.testing.assert_close(of(found, name).running_mean, of(expected, name).running_mean)
        torch.testing.assert_close(of(found, name).running_var, of(expected, name).running_var)
    schedule.step(2)
    with pytest.warns(BatchNormMovedWarning) as warned:
        sj_tac.restore(net)
    assert moved(warned) == ["'0'", "'4'", "'7'"]


def test_a_schedule_that_fails_gives_every_layer_its_own_k_back():
    """One after the other they would not do: 8 is no multiple of 3."""
    net = sj_tac.convert(
        source(), {"default": {"mode": "collapse", "k": 8}, "rules": [{"match": "0", "mode": "collapse", "k": 2}]}
    )
    before, state = [v.k for v in sj_tac.report(net).converted], copy.deepcopy(net.state_dict())
    for batch in (torch.zeros(2), torch.full_like(X, torch.nan)):
        schedule = sj_tac.KSchedule(net, {0: 3}, batches=[batch])
        with pytest.raises(BatchError):
            schedule.step(0)
        assert [v.k for v in sj_tac.report(net).converted] == before == [2, 8, 8]
        torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)
        assert schedule.current is None


@pytest.mark.parametrize("k", [1, 2])
def test_all_norms_whose_frames_change_are_warned_of(k):
    net = train(sj_tac.convert(source(), behind()))
    with pytest.warns(BatchNormMovedWarning) as warned:
        sj_tac.set_k(net, k)
    assert moved(warned) == ["'0'", "'4'", "'7'"]
    with pytest.warns(BatchNormMovedWarning) as warned:
        sj_tac.restore(net)
    assert moved(warned) == ["'0'", "'4'", "'7'"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sj_tac.set_k(net, k)  # nothing changes


@pytest.mark.parametrize(
    ("default", "ks", "change", "named"),
    [
        ({"mode": "keep"}, {"0": 2, "6": 4}, (8, "6"), "['6']"),
        ({"mode": "preserve", "k": 1}, {"0": 4}, (1, "0"), "['0', '3', '6']"),
    ],
    ids=["frames stay", "a converted layer of k=1 behind a collapse learns from aggregated frames"],
)
def test_norms_are_warned_of_where_their_frames_change(default, ks, change, named):
    rules = [{"match": name, "mode": "collapse", "k": k} for name, k in ks.items()]
    net = train(sj_tac.convert(source(), {"default": default, "rules": rules}))
    with pytest.warns(BatchNormMovedWarning) as warned:
        sj_tac.set_k(net, *change)
    assert named in str(warned[0].message)


@pytest.mark.parametrize("first", [4, 1])
def test_frozen_norms_stay_frozen_and_new_ones_are(first):
    net = sj_tac.convert(source(), behind(first))
    assert sj_tac.freeze_bn(net) == ([*NORMS] if first == 4 else ["1"])
    for k in (4, 1, 4):
        sj_tac.set_k(net, k)
        assert not any(of(net.train(), name).training for name in NORMS)
    assert sj_tac.freeze_bn(net, False) == [*NORMS]
    for k in (4, 1, 4):
        sj_tac.set_k(net, k)
        assert all(of(net.train(), name).training for name in NORMS)


def test_a_file_says_that_norms_are_to_be_frozen_though_none_is_yet(tmp_path):
    def bare():
        torch.manual_seed(0)
        return nn.Sequential(conv(2, 3), node("lif"), conv(3, 3), norm(3), node("lif")).double().eval()

    net = sj_tac.convert(bare(), behind(1))
    assert sj_tac.freeze_bn(net) == []
    sj_tac.save(net, tmp_path / "net.pt")
    again = sj_tac.load(tmp_path / "net.pt", bare())
    for each in (net, again):
        sj_tac.set_k(each, 4)
        assert not each.train()[3].training


def test_norms_in_kept_containers_behind_a_collapse_are_known():
    """A container's norm sees what its convolution does."""
    net = source()
    inside = layer.SeqToANNContainer(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)).double()
    net = nn.Sequential(*net[:3], inside, node("lif"), *net[6:]).eval()
    fast = sj_tac.convert(net, behind())
    names = ["1", "3.1", "6"]
    assert sj_tac.recalibrate(fast, X) == names
    assert sj_tac.freeze_bn(fast) == names
    before = of(fast, "3.1").running_mean.clone()
    train(fast)
    assert torch.equal(of(fast, "3.1").running_mean, before)
    with pytest.warns(BatchNormMovedWarning, match="'3.1'"):
        sj_tac.set_k(fast, 1)
    assert sj_tac.recalibrate(fast, undo=True) == names
    functional.reset_net(fast.eval())
    torch.testing.assert_close(fast(X), net(X), rtol=1e-9, atol=1e-9)


def test_freezing_at_single_frames_leaves_norms_alone_that_are_to_learn_from_them():
    net = quietly_at(train(sj_tac.convert(source(), behind())), 1)
    assert sj_tac.freeze_bn(net) == ["1"]
    assert of(net.train(), "4").training


def test_a_matched_checkpoint_is_still_known_at_single_frames(tmp_path):
    net = sj_tac.convert(source(), behind())
    for name in NORMS:  # as if "moments" had come nearest
        of(net, name)._tac.matched = of(net, name)._tac.fits
    again = sj_tac.convert(source(), behind())
    again.load_state_dict(net.state_dict())
    with pytest.warns(MatchedStatisticsWarning, match="set_k: "):
        sj_tac.set_k(again, 1)
    sj_tac.save(again, tmp_path / "net.pt")
    with pytest.warns(MatchedStatisticsWarning) as warned:
        again = sj_tac.load(tmp_path / "net.pt", source())
    assert any("at the source's rate" in str(w.message) for w in warned)
    with pytest.warns(MatchedStatisticsWarning, match=r"restore: .*'7'"):
        sj_tac.restore(again)


def learning(k):
    return sj_tac.convert(source(), {"default": {"mode": "collapse", "k": k, "weights": "learned"}})


@pytest.mark.parametrize(("first", "ks"), [(1, {0: 1, 2: 4}), (4, "linear from 4 to 1")])
def test_a_schedule_refuses_learned_weights_whose_number_would_change(first, ks):
    net = learning(first)
    with pytest.raises(PolicyError, match=r"KSchedule: k=\d gives \['0'\] another number of learned .*layers=.*decay"):
        sj_tac.KSchedule(net, ks, epochs=4 if isinstance(ks, str) else None)
    assert sj_tac.KSchedule(net, {0: first}).step(0) == first


def test_a_schedule_of_other_layers_leaves_learned_weights_alone():
    rules = [{"match": "0", "weights": "learned"}]
    net = sj_tac.convert(source(), {"default": {"mode": "preserve", "k": 4}, "rules": rules})
    assert sj_tac.KSchedule(net, {0: 2}, layers="re:[36]").step(0) == 2
    rules[0] |= {"match": "3"}
    net = sj_tac.convert(source(), {"default": {"mode": "collapse", "k": 4}, "rules": rules})
    # Behind the collapse of the first its groups are what that leaves of them.
    with pytest.raises(PolicyError, match=r"k=2 gives \['3'\]"):
        sj_tac.KSchedule(net, {0: 2}, layers="0")
