"""recalibrate: the statistics of aggregated drives. KSchedule: k by the epoch, with the statistics of the new k."""

import sys
import warnings

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import conv, csnn, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import BatchError, BatchNormMovedWarning, ConversionError, PolicyError
from sj_tac.functional import aggregate
from sj_tac.schedule import KSchedule, lightning_callback

X = frames(6, 4, 2, 8, 8)


def chain():
    torch.manual_seed(0)
    return nn.Sequential(conv(2, 3), norm(3), node("lif")).eval().double()


def statistics(net):
    return {k: v.clone() for k, v in net.state_dict().items() if "running" in k or "tracked" in k}


def same(a, b):
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("fuse", [True, False])
def test_statistics_are_the_mean_over_batches_of_those_of_the_drives(fuse):
    source = chain()
    fast = sj_tac.convert(source, "preserve", 2, fuse=fuse)
    batches = [frames(6, 4, 2, 8, 8, dtype=torch.float64, seed=s) for s in (1, 2, 3)]
    before = statistics(fast)
    assert sj_tac.recalibrate(fast, batches) == ["1"]
    means, variances = [], []
    for x in batches:
        drives = source[0](aggregate(x, [1 / 3, 2 / 3], 2)).transpose(1, 2).flatten(2)  # [G, C, N H W]
        drives = drives.transpose(0, 1).flatten(1)
        # The norm sees every drive twice, once for each of its frames; fused, it only seems so.
        seen = drives.repeat(1, 2)
        means.append(seen.mean(1))
        variances.append(seen.var(1))
    assert torch.allclose(fast[1].running_mean, torch.stack(means).mean(0), rtol=1e-9)
    assert torch.allclose(fast[1].running_var, torch.stack(variances).mean(0), rtol=1e-9)
    assert fast[1].num_batches_tracked == before["1.num_batches_tracked"]
    assert fast[1].momentum == source[1].momentum
    assert not fast[1].training
    assert not fast.training


def test_twice_is_undone_once_and_set_k_warns():
    fast = sj_tac.convert(csnn(), "preserve", 4)
    before = statistics(fast)
    sj_tac.recalibrate(fast, X)
    sj_tac.recalibrate(fast, 1 - X)
    with pytest.warns(BatchNormMovedWarning, match="no longer fit another k"):
        sj_tac.set_k(fast, 2)
    sj_tac.recalibrate(fast, undo=True)
    assert same(before, statistics(fast))
    with pytest.raises(ConversionError, match="nothing to undo"):
        sj_tac.recalibrate(fast, undo=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sj_tac.set_k(fast, 4)


def test_statistics_that_training_moved_on_are_not_taken_back():
    fast = sj_tac.convert(csnn(), "preserve", 4)
    sj_tac.recalibrate(fast, X)
    fast.train()
    fast(1 - X)
    functional.reset_net(fast)
    moved = statistics(fast)
    # Frozen ones are re-estimated, and stay frozen.
    sj_tac.freeze_bn(fast)
    assert not fast[1].training
    with pytest.warns(BatchNormMovedWarning):
        assert same(statistics(sj_tac.restore(fast)), moved)
    sj_tac.recalibrate(fast, X)
    assert not same(statistics(fast), moved)
    assert not fast.train()[1].training


def test_a_failure_half_way_changes_nothing():
    fast = sj_tac.convert(csnn(), "preserve", 4).train()
    before = statistics(fast)
    for bad, message in (
        ([X, torch.full_like(X, torch.nan)], "batch 1 .* NaN"),
        ([X, torch.rand(6, 4, 5, 8, 8)], r"does not run on batch 1 of shape \[6, 4, 5, 8, 8\]"),
        ([], "there are no batches"),
    ):
        with pytest.raises(BatchError, match=message):
            sj_tac.recalibrate(fast, bad)
        assert same(before, statistics(fast))
        assert fast.training
        assert fast[1].momentum == 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sj_tac.restore(fast)


def test_nets_without_norms_and_other_bad_calls():
    bare = nn.Sequential(conv(2, 3), node("lif"), layer.Flatten(step_mode="m")).eval()
    assert sj_tac.recalibrate(sj_tac.convert(bare), X) == []
    with pytest.raises(ConversionError, match="recalibrate: Sequential is not a converted model"):
        sj_tac.recalibrate(csnn(), X)
    with pytest.raises(ConversionError, match="undo=True takes no batches"):
        sj_tac.recalibrate(sj_tac.convert(csnn()), X, undo=True)


S = frames(8, 6, 2, 8, 8)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def ks(net):
    return [v.k for v in sj_tac.report(net).converted]


def test_k_by_the_epoch():
    net = sj_tac.convert(csnn(), "preserve", 2)
    schedule = KSchedule(net, {4: 1, 1: 4})
    assert [schedule.step(epoch) for epoch in range(6)] == [None, 4, 4, 4, 1, 1]
    assert ks(net) == [1, 1, 1]
    # Back in time, as where a run is resumed.
    assert schedule.step(2) == 4
    assert ks(net) == [4, 4, 4]
    assert schedule.step(0) is None
    assert ks(net) == [4, 4, 4]
    KSchedule(net, {0: 2}, layers="0").step(0)
    assert ks(net) == [2, 4, 4]


def test_curves():
    net = sj_tac.convert(csnn(), "preserve", 2)
    cosine = KSchedule(net, "cosine from 8 to 1", epochs=9)
    found = [cosine.k(epoch) for epoch in range(12)]
    assert found[0] == 8
    assert found[4] in (4, 5)
    assert found[8:] == [1, 1, 1, 1]
    assert found == sorted(found, reverse=True)
    assert [KSchedule(net, "linear from 1 to 4", epochs=4).k(e) for e in range(4)] == [1, 2, 3, 4]


def test_statistics_are_those_of_the_new_k_and_the_nets_own():
    source = csnn()
    net = sj_tac.convert(source, "preserve", 8)
    schedule = KSchedule(net, {0: 8, 1: 2}, batches=[S])
    expected = sj_tac.convert(source, "preserve", 2)
    sj_tac.recalibrate(expected, [S])
    schedule.step(0)
    schedule.step(1)
    torch.testing.assert_close(net[1].running_var, expected[1].running_var)


def test_training_goes_on_with_the_same_parameters_and_modes():
    torch.manual_seed(0)
    net = sj_tac.convert(csnn(), "preserve", 4).train()
    parameters = [id(p) for p in net.parameters()]
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    schedule = KSchedule(net, {0: 4, 2: 2, 4: 1}, batches=[(S, Y)])
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(15):
            schedule.step(epoch)
            assert net.training
            assert net[1].training
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(S).mean(0), Y)
            loss.backward()
            optimizer.step()
            functional.reset_net(net)
            losses.append(loss.item())
    assert [id(p) for p in net.parameters()] == parameters
    assert losses[-1] < 0.9 * losses[0]
    assert ks(net) == [1, 1, 1]
    sj_tac.freeze_bn(net)
    schedule.step(0)
    assert not net[1].training


def test_what_is_no_schedule():
    net = sj_tac.convert(csnn(), "preserve", 4)
    for bad, more, message in (
        ({}, {}, "no {epoch: k}"),
        ({0: 0}, {}, "{0: 0}"),
        ({0: 4, -1: 2}, {}, "{-1: 2}"),
        ({0: 2.0}, {}, "{0: 2.0}"),
        ({0: True}, {}, "{0: True}"),
        ({0: 2}, {"epochs": 3}, "is for a curve"),
        ("cosine from 8", {"epochs": 3}, "is no curve"),
        ("cosine from 8 to 0", {"epochs": 3}, "is no curve"),
        ("cosine from 8 to 1", {}, "needs epochs="),
        ("cosine from 8 to 1", {"epochs": 1}, "at least 2"),
        ({0: 2}, {"batches": iter([S])}, "a list or a DataLoader"),
    ):
        with pytest.raises(PolicyError, match=message):
            KSchedule(net, bad, **more)
    with pytest.raises(PolicyError, match="matches no converted layer"):
        KSchedule(net, {0: 2}, layers="conv9").step(0)
    with pytest.raises(ConversionError, match="not a converted model"):
        KSchedule(csnn(), {0: 2})


def test_the_lightning_callback_says_what_it_needs(monkeypatch):
    """tests/docs/test_lightning.py trains with it."""
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(ImportError, match="pip install lightning"):
        lightning_callback(KSchedule(sj_tac.convert(csnn(), "preserve", 4), {0: 4}))


def test_k_that_somebody_else_changed_meanwhile():
    net = sj_tac.convert(csnn(), "preserve", 8)
    schedule = KSchedule(net, {0: 8, 5: 4})
    schedule.step(0)
    sj_tac.set_k(net, 1)  # for a look at the validation set
    assert schedule.step(1) == 8
    assert ks(net) == [8, 8, 8]
    sj_tac.set_k(net, 1, "0")
    schedule.step(2)
    assert ks(net) == [8, 8, 8]
