"""recalibrate: the statistics of aggregated drives, by hand; undone, taken back by restore, all or nothing."""

import copy
import pickle
import warnings

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import conv, csnn, frames, node, norm, same_state
from torch import nn

import sj_tac
from sj_tac.errors import BatchError, BatchNormMovedWarning, ConversionError
from sj_tac.functional import aggregate

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


def test_k1_gives_the_sources_own_statistics_again():
    """With k = 1 it is torch's update_bn of the source on the same frames."""
    source = chain()
    fast = sj_tac.convert(source, "preserve", 1)
    sj_tac.recalibrate(fast, [X.double()])
    expected = copy.deepcopy(source)
    torch.optim.swa_utils.update_bn([X.double()], expected)
    functional.reset_net(expected)
    assert torch.allclose(fast[1].running_mean, expected[1].running_mean, rtol=1e-10)
    assert torch.allclose(fast[1].running_var, expected[1].running_var, rtol=1e-10)


@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_undo_and_restore_put_the_sources_back(policy):
    source = csnn()
    fast = sj_tac.convert(source, policy, 4)
    before = statistics(fast)
    names = sj_tac.recalibrate(fast, X)
    assert names == ["1", "5"]
    assert not same(before, statistics(fast))
    again = pickle.loads(pickle.dumps(copy.deepcopy(fast)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_state(sj_tac.restore(again), source)
        assert not same(before, statistics(fast))  # a copy was restored
        assert sj_tac.recalibrate(fast, undo=True) == names
        assert same(before, statistics(fast))
        assert same_state(sj_tac.restore(fast), source)
    with pytest.raises(ConversionError, match="nothing to undo"):
        sj_tac.recalibrate(fast, undo=True)


def test_twice_is_undone_once_and_set_k_warns():
    fast = sj_tac.convert(csnn(), "preserve", 4)
    before = statistics(fast)
    sj_tac.recalibrate(fast, X)
    sj_tac.recalibrate(fast, 1 - X)
    with pytest.warns(BatchNormMovedWarning, match="no longer fit another k"):
        sj_tac.set_k(fast, 2)
    sj_tac.recalibrate(fast, undo=True)
    assert same(before, statistics(fast))
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
    with pytest.warns(BatchNormMovedWarning):
        assert same(statistics(sj_tac.restore(fast)), moved)


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


def test_frozen_norms_are_re_estimated_and_stay_frozen():
    fast = sj_tac.convert(csnn(), "preserve", 4)
    sj_tac.freeze_bn(fast)
    before = statistics(fast)
    assert sj_tac.recalibrate(fast, X)
    assert not same(before, statistics(fast))
    fast.train()
    assert not fast[1].training


def test_nets_without_norms_and_other_bad_calls():
    bare = nn.Sequential(conv(2, 3), node("lif"), layer.Flatten(step_mode="m")).eval()
    assert sj_tac.recalibrate(sj_tac.convert(bare), X) == []
    with pytest.raises(ConversionError, match="recalibrate: Sequential is not a converted model"):
        sj_tac.recalibrate(csnn(), X)
    with pytest.raises(ConversionError, match="undo=True takes no batches"):
        sj_tac.recalibrate(sj_tac.convert(csnn()), X, undo=True)
