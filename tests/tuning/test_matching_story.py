"""match in the life of a converted net: undone, restored, saved, converted at once; and what it does not take."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from matched import X, fitted, matched, narrow
from spikingjelly.activation_based import layer
from support import csnn, node, same_state
from torch import nn

import sj_tac
from sj_tac.errors import BatchError, ConversionError, MatchedStatisticsWarning, PolicyError

BINARY = {"default": {"mode": "collapse", "k": 4, "spikes": "binary"}}


@pytest.mark.parametrize(("policy", "method"), [("preserve", "both"), ("collapse", "rates"), (BINARY, "moments")])
def test_undo_and_restore_give_the_source_bit_for_bit(policy, method):
    source = csnn(make=lambda: node("if"))
    fast = sj_tac.convert(source, policy, 4)
    keys = list(fast.state_dict())
    done = fitted(fast, method)
    assert list(fast.state_dict()) == keys
    changed = not same_state(fast, source)
    assert changed == bool(done.corrected)
    again = pickle.loads(pickle.dumps(copy.deepcopy(fast)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_state(sj_tac.restore(again), source)
    assert same_state(fast, source) is not changed
    sj_tac.match(fast, undo=True)
    assert same_state(fast, source)
    with pytest.raises(ConversionError, match="not matched"):
        sj_tac.match(fast, undo=True)


def test_twice_starts_from_the_source_again():
    _, fast = matched("moments")
    once = copy.deepcopy(fast.state_dict())
    fitted(fast, "rates", 1 - X)
    fitted(fast, "moments")
    assert all(torch.equal(a, b) for a, b in zip(once.values(), fast.state_dict().values(), strict=True))


def test_a_report_warns_of_deep_nets_of_if_neurons_until_they_are_matched():
    source = narrow(lambda: node("if"))
    (note,) = sj_tac.plan(source, "preserve", 2).notes
    assert note.startswith("ACCURACY_AT_RISK: 3 layers drive IF neurons with hard reset")
    assert not sj_tac.plan(narrow(lambda: node("if", v_reset=None)), "preserve", 2).notes
    assert not sj_tac.plan(narrow(), "preserve", 2).notes
    assert not sj_tac.plan(source, "preserve", 1).notes
    fast = sj_tac.convert(source, "preserve", 4, example_input=X)
    assert any(n.startswith("ACCURACY_AT_RISK") for n in sj_tac.report(fast).notes)
    sj_tac.match(fast, X, progress=False)
    assert not any(n.startswith("ACCURACY_AT_RISK") for n in sj_tac.report(fast).notes)


def test_nothing_else_of_the_net_is_touched():
    fast = sj_tac.convert(narrow(), "preserve", 4).train()
    seen = []
    fast[0].register_forward_hook(lambda *a: seen.append(1))
    state = torch.get_rng_state()
    fitted(fast, "both")
    assert torch.equal(torch.get_rng_state(), state)
    assert not seen
    assert fast.training
    assert not any(m._forward_pre_hooks for m in fast.modules() if isinstance(m, nn.BatchNorm2d))


def test_bad_input_changes_nothing():
    source, fast = matched("moments")
    before = copy.deepcopy(fast.state_dict())
    nan = torch.full_like(X, torch.nan)
    for bad, error, message in (
        ({"batches": [X, nan]}, BatchError, "batch 1 .* NaN"),
        ({"batches": torch.rand(6, 4, 5, 8, 8)}, BatchError, "does not run on"),
        ({"batches": []}, BatchError, "there are no batches"),
        ({"batches": X[:, :1]}, BatchError, "at least two samples"),
        ({"batches": [X, X[..., :6]]}, BatchError, "shapes"),
        ({"batches": X, "method": "mean"}, PolicyError, "method='mean'"),
        ({"batches": X, "method": "none"}, PolicyError, "method='none'"),
        ({"batches": X, "method": None}, PolicyError, "method=None"),
        ({"batches": X, "samples": 0}, PolicyError, "samples=0"),
        ({"batches": X, "samples": 2.5}, PolicyError, r"samples=2\.5"),
        ({"batches": X, "steps": 1.5}, PolicyError, r"steps=1\.5"),
        ({"batches": X, "undo": True}, ConversionError, "takes no batches"),
        ({"batches": X, "sample": 3}, TypeError, "sample"),
    ):
        with pytest.raises(error, match=message):
            sj_tac.match(fast, progress=False, **bad)
        assert all(torch.equal(a, b) for a, b in zip(before.values(), fast.state_dict().values(), strict=True)), bad
    assert "matched by 'moments'" in str(sj_tac.report(fast).notes)
    with pytest.raises(ConversionError, match="not a converted model"):
        sj_tac.match(source, X)
    sj_tac.match(fast, undo=True)
    assert same_state(fast, source)
    with pytest.raises(BatchError):
        sj_tac.convert(source, "preserve", 4, match=nan)
    inplace = copy.deepcopy(source)
    with pytest.raises(BatchError):
        sj_tac.convert(inplace, "preserve", 4, match=nan, inplace=True)
    assert same_state(inplace, source)
    assert type(inplace[0]) is layer.Conv2d


def test_a_matched_checkpoint_loads_anywhere_and_says_where_it_does_not_fit():
    source, fast = matched("moments")
    file = io.BytesIO()
    torch.save(fast.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    plain, usual = copy.deepcopy(source), copy.deepcopy(source.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain.load_state_dict(loaded)  # a class that knows nothing of it
        other = sj_tac.convert(source, "preserve", 4)
        other.load_state_dict(loaded)
    assert same_state(other, fast)
    assert list(other.state_dict()) == list(source.state_dict())
    with pytest.warns(MatchedStatisticsWarning, match=r"matched for preserve k=4, .* at preserve k=2"):
        sj_tac.convert(source, "preserve", 2).load_state_dict(loaded)
    # What it replaced is not known there.
    with pytest.warns(MatchedStatisticsWarning, match="Load the source's checkpoint"):
        sj_tac.restore(other)
    again = sj_tac.convert(source, "preserve", 4)
    again.load_state_dict(copy.deepcopy(other.state_dict()))
    with pytest.warns(MatchedStatisticsWarning):
        sj_tac.restore(again)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_state(sj_tac.restore(fast), source)
        # The source's own checkpoint is the source's again.
        other.load_state_dict(usual)
        assert same_state(sj_tac.restore(other), source)
        assert "matched by" in str(sj_tac.report(fast).notes)
        fast.load_state_dict(usual)
        assert "matched by" not in str(sj_tac.report(fast).notes)
        assert same_state(sj_tac.restore(fast), source)
