"""KSchedule: k by the epoch, with the statistics of the new k; training goes on, and ends as a net of the source's class."""

import copy
import sys
import types
import warnings

import pytest
import torch
from spikingjelly.activation_based import functional
from support import csnn, frames
from torch import nn

import sj_tac
from sj_tac.errors import BatchError, BatchNormMovedWarning, ConversionError, PolicyError
from sj_tac.schedule import KSchedule, lightning_callback

X = frames(8, 6, 2, 8, 8)
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


def test_curves():
    net = sj_tac.convert(csnn(), "preserve", 2)
    cosine = KSchedule(net, "cosine from 8 to 1", epochs=9)
    found = [cosine.k(epoch) for epoch in range(12)]
    assert found[0] == 8
    assert found[4] in (4, 5)
    assert found[8:] == [1, 1, 1, 1]
    assert found == sorted(found, reverse=True)
    assert [KSchedule(net, "linear from 1 to 4", epochs=4).k(e) for e in range(4)] == [1, 2, 3, 4]


def test_some_layers_alone():
    net = sj_tac.convert(csnn(), "preserve", 4)
    KSchedule(net, {0: 2}, layers="0").step(0)
    assert ks(net) == [2, 4, 4]


def test_statistics_are_those_of_the_new_k_and_the_nets_own():
    source = csnn()
    net = sj_tac.convert(source, "preserve", 8)
    schedule = KSchedule(net, {0: 8, 1: 2, 2: 1}, batches=[X])
    expected = sj_tac.convert(source, "preserve", 2)
    sj_tac.recalibrate(expected, [X])
    schedule.step(0)
    schedule.step(1)
    assert torch.equal(net[1].running_var, expected[1].running_var)
    schedule.step(2)
    statistics = copy.deepcopy(net.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = sj_tac.restore(net)
    assert all(torch.equal(a, b) for a, b in zip(statistics.values(), back.state_dict().values(), strict=True))
    # At k = 1 they are the source's own on these frames.
    plain = copy.deepcopy(source)
    torch.optim.swa_utils.update_bn([X], plain)
    assert torch.allclose(back[1].running_var, plain[1].running_var, rtol=1e-5)
    # A net that ends at another k says so.
    schedule.step(1)
    with pytest.warns(BatchNormMovedWarning):
        sj_tac.restore(net)


def test_training_goes_on_with_the_same_parameters_and_modes():
    torch.manual_seed(0)
    net = sj_tac.convert(csnn(), "preserve", 4).train()
    parameters = [id(p) for p in net.parameters()]
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    schedule = KSchedule(net, {0: 4, 2: 2, 4: 1}, batches=[(X, Y)])
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(30):
            schedule.step(epoch)
            assert net.training
            assert net[1].training
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(X).mean(0), Y)
            loss.backward()
            optimizer.step()
            functional.reset_net(net)
            losses.append(loss.item())
    assert [id(p) for p in net.parameters()] == parameters
    assert losses[-1] < 0.9 * losses[0]
    assert ks(net) == [1, 1, 1]


def test_frozen_norms_stay_frozen():
    net = sj_tac.convert(csnn(), "preserve", 4).train()
    sj_tac.freeze_bn(net)
    KSchedule(net, {0: 2}).step(0)
    assert not net[1].training


def test_bad_input():
    net = sj_tac.convert(csnn(), "preserve", 4)
    for bad, more, message in (
        ({}, {}, "no {epoch: k}"),
        ({0: 0}, {}, "{0: 0}"),
        ({-1: 2}, {}, "{-1: 2}"),
        ({0: 2.0}, {}, "{0: 2.0}"),
        ({0: True}, {}, "{0: True}"),
        ({0: 2}, {"epochs": 3}, "is for a curve"),
        ("cosine from 8", {"epochs": 3}, "is no curve"),
        ("cosine from 8 to 0", {"epochs": 3}, "is no curve"),
        ("cosine from 8 to 1", {}, "needs epochs="),
        ("cosine from 8 to 1", {"epochs": 1}, "at least 2"),
        ({0: 2}, {"batches": iter([X])}, "a list or a DataLoader"),
    ):
        with pytest.raises(PolicyError, match=message):
            KSchedule(net, bad, **more)
    with pytest.raises(PolicyError, match="matches no converted layer"):
        KSchedule(net, {0: 2}, layers="conv9").step(0)
    with pytest.raises(ConversionError, match="not a converted model"):
        KSchedule(csnn(), {0: 2})


def test_batches_that_cannot_be_used_leave_k_as_it_was():
    net = sj_tac.convert(csnn(), "preserve", 4)
    before = copy.deepcopy(net.state_dict())
    schedule = KSchedule(net, {0: 2}, batches=[torch.full_like(X, torch.nan)])
    with pytest.raises(BatchError):
        schedule.step(0)
    assert ks(net) == [4, 4, 4]
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
    assert schedule.current is None


def test_the_lightning_callback(monkeypatch):
    """Against a stand-in for Lightning's base class: the hook's name and arguments are its own."""
    pytorch = types.ModuleType("lightning.pytorch")
    pytorch.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", pytorch)
    net = sj_tac.convert(csnn(), "preserve", 4)
    callback = lightning_callback(KSchedule(net, {0: 4, 1: 2}))
    logged = {}
    module = types.SimpleNamespace(log=lambda name, value, **more: logged.update({name: value}))
    for epoch in (0, 1):
        callback.on_train_epoch_start(types.SimpleNamespace(current_epoch=epoch), module)
    assert ks(net) == [2, 2, 2]
    assert logged == {"k": 2.0}
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(ImportError, match="pip install lightning"):
        lightning_callback(KSchedule(net, {0: 4}))


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
