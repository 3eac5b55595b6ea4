"""The loop that the scripts share: what a kill, a second process or a damaged file does to it."""

import copy
from dataclasses import replace

import pytest
import torch
import training
from datasets import Frames, RateCoded
from support import csnn
from training import Recipe, RunError, fit, predict

import sj_tac

RECIPE = Recipe(epochs=2, batch=8, rate=1e-2, seed=3)


def data(count=40):
    generator = torch.Generator().manual_seed(0)
    return Frames((torch.rand(4, count, 2, 8, 8, generator=generator) < 0.4).float(), torch.arange(count) % 3, shift=1)


class Killed(Exception):
    pass


class KilledAt:
    """Data that ends in an exception after some batches, as a kill would."""

    def __init__(self, inner, batches):
        self.inner, self.left = inner, batches

    def __len__(self):
        return len(self.inner)

    def load(self, rows, seeds):
        for batch in self.inner.load(rows, seeds):
            if not self.left:
                raise Killed
            self.left -= 1
            yield batch


@pytest.mark.parametrize(("converted", "batches"), [(True, 1), (False, 3), (True, 5), (True, 7)])
def test_a_killed_run_goes_on_to_what_it_would_have_been(tmp_path, converted, batches):
    def fresh():
        net = csnn()
        return sj_tac.convert(net, "preserve", 2) if converted else net

    whole = fresh()
    expected = fit(whole, data(), RECIPE)
    with pytest.raises(Killed):
        fit(fresh(), KilledAt(data(), batches), RECIPE, tmp_path, save_every=0)
    kept = training.read_checkpoint(tmp_path / "last.pt")["history"]
    assert (kept["epoch"], kept["step"]) == divmod(batches, 5)
    again = fresh()
    history = fit(again, data(), RECIPE, tmp_path, save_every=0)
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert [r["loss"] for r in history.rows] == [r["loss"] for r in expected.rows]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    # Once more: nothing is left to do, and the weights are there.
    third = fresh()
    assert fit(third, KilledAt(data(), 0), RECIPE, tmp_path).epoch == 2
    assert torch.equal(third.state_dict()["0.weight"], whole.state_dict()["0.weight"])
    assert not list(tmp_path.glob(".*"))


def test_it_learns_and_predicts():
    """Images whose class is where their light is."""
    labels = torch.arange(90) % 3
    images = torch.full((90, 8, 8), 0.1)
    for n, label in enumerate(labels):
        images[n, :, 3 * label : 3 * label + 2] = 0.9
    task = RateCoded(images, labels, 6)
    net = csnn()
    net[0] = type(net[0])(1, 4, 3, padding=1, bias=False, step_mode="m")
    fit(net, task, Recipe(4, 10, 1e-2, "rate"))
    predictions, truth = predict(net, task, 16)
    assert torch.equal(truth, labels)
    assert (predictions == truth).float().mean() > 0.9


def test_frozen_norms_do_not_move_and_moving_ones_do():
    for freeze in (True, False):
        net = csnn()
        before = copy.deepcopy(net.state_dict())
        fit(net, data(), replace(RECIPE, freeze_norms=freeze, amp=freeze))
        assert torch.equal(net.state_dict()["1.running_mean"], before["1.running_mean"]) == freeze
        assert not torch.equal(net.state_dict()["0.weight"], before["0.weight"])


def test_a_folder_of_another_run_or_a_damaged_one_is_not_touched(tmp_path):
    fit(csnn(), data(), RECIPE, tmp_path)
    path = tmp_path / "last.pt"
    content = path.read_bytes()
    with pytest.raises(RunError, match=r"was trained with .*'epochs': 2.*asks for .*'epochs': 3"):
        fit(csnn(), data(), replace(RECIPE, epochs=3), tmp_path)
    with pytest.raises(RunError, match="does not fit this net"):
        fit(csnn(channels=5), data(), RECIPE, tmp_path)
    assert path.read_bytes() == content
    for damaged in (content[: len(content) // 2], b"", b"no checkpoint"):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=r"last\.pt is no whole checkpoint .*delete it"):
            fit(csnn(), data(), RECIPE, tmp_path)
    torch.save([1], path)
    with pytest.raises(RunError, match="holds a list"):
        fit(csnn(), data(), RECIPE, tmp_path)


def test_a_loss_that_is_no_number_ends_the_run_with_the_place(tmp_path):
    def explodes(out, labels, frames):
        return training.spike_count(out, labels, frames) * float("nan")

    with pytest.raises(RunError, match=r"the loss is nan in epoch 0, step 0; lower --rate"):
        fit(csnn(), data(), RECIPE, tmp_path, loss=explodes)
    assert not (tmp_path / "last.pt").exists()


def test_every_process_of_a_torchrun_has_an_equal_share_of_each_batch():
    alone = training.shares(22, RECIPE, 1, training.Workers())
    parts = [training.shares(22, RECIPE, 1, training.Workers(rank, 2)) for rank in (0, 1)]
    assert [len(rows) for rows in alone] == [8, 8, 6]
    for whole, first, second in zip(alone, *parts, strict=True):
        assert len(first) == len(second)
        assert torch.cat([first, second]).sort().values.tolist() == whole.sort().values.tolist()
