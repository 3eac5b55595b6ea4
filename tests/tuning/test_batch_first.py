"""Nets that take [N, T, ...]: batches are as the net takes them, whoever measures."""

import numpy as np
import pytest
import torch
from idioms.miniatures import Transformer
from idioms.test_idioms import make
from support import frames

import sj_tac
from sj_tac.cli import load
from sj_tac.errors import BatchError
from sj_tac.tuning.batches import read

N, T = 6, 7


def data(first=N, second=T):
    return frames(first, second, 2, 8, 8, rate=0.5), torch.arange(first) % 4


@pytest.fixture(scope="module")
def net():
    return make("batch first")[0]


@pytest.mark.parametrize("samples", [N, T], ids=["N is not T", "N is T"])
def test_batches_are_read_as_the_net_takes_them(net, samples):
    x, labels = data(samples)
    (batch,) = read([(x, labels)], net)
    assert batch.frames.shape[:2] == (T, samples)
    assert torch.equal(batch.given, x)
    assert batch.example().shape[:2] == (2, T)
    first, _ = make("folded")
    (other,) = read([x.transpose(0, 1)], first)
    assert other.frames.shape[:2] == (T, samples)
    assert torch.equal(other.given, x.transpose(0, 1))


def test_labels_are_those_of_the_samples(net):
    x, _ = data()
    with pytest.raises(BatchError, match=r"labels of shape \[7\].*expected 6 class indices"):
        list(read([(x, torch.zeros(T, dtype=torch.int64))], net))


def test_everything_that_measures_takes_them(net):
    x, labels = data()
    batches = [(x, labels)]
    assert sj_tac.diagnose(batches, net, permutations=19).verdict
    found = sj_tac.sensitivity(net, batches, [2], ["preserve"], rounds=1, progress=False)
    assert {row.layer for row in found.effects} >= {"stem.conv1", "stem.conv2"}
    fast = sj_tac.convert(net, example_input=x[:2])
    assert sj_tac.recalibrate(fast, batches)
    report = sj_tac.report(fast)
    assert "the input 'x' has time in dimension 1 and samples in dimension 0" in report.notes


def test_macs_are_those_of_one_sample():
    first, x = make("folded")
    turned = make("batch first")[0]
    turned.load_state_dict(first.state_dict())
    macs = [
        [v.macs_before for v in sj_tac.plan(net, example_input=z).verdicts]
        for net, z in ((first, x), (turned, x.transpose(0, 1)))
    ]
    assert macs[0] == macs[1]
    assert all(macs[0])


def test_the_command_line_says_which_way_round_a_net_takes_them(net, tmp_path):
    x, labels = data()
    path = tmp_path / "data.npz"
    np.savez(path, frames=x.numpy(), labels=labels.numpy())
    held = load.batches(str(path), 4, True, net)
    assert [len(part) for part, _ in held] == [4, 2]
    with pytest.raises(load.UsageError, match=r"6 labels for frames \[6, 7, 2, 8, 8\], \[T, N, ...\]; --batch-first is for"):
        load.batches(str(path), 4, False, net)
    np.savez(path, frames=x.numpy())
    with pytest.raises(load.UsageError, match=r"this net takes frames \[N, T, ...\]: give them in that order, with --batch"):
        load.batches(str(path), 4, False, net)
    with pytest.raises(load.UsageError, match=r"--batch-first: this net takes frames \[T, N, ...\]"):
        load.batches(str(path), 4, True, Transformer().eval())
