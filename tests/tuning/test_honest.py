"""What measuring must not pretend: bounds against the definition, the same net under two names, labels, chance, order."""

import math

import costs
import pytest
import torch
from spikingjelly.activation_based import layer
from support import awake, csnn, frames
from torch import nn

import sj_tac
from sj_tac.errors import BatchError, PolicyError, SearchError, SearchInterrupted
from sj_tac.tuning import bounds
from sj_tac.tuning.batches import Batch
from sj_tac.tuning.holding import split
from sj_tac.tuning.progress import Bar


def binomial(k, n, p):
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


@pytest.mark.parametrize(("k", "n"), [(0, 20), (3, 20), (19, 20), (20, 20), (7, 300)])
def test_bounds_are_those_shares_at_which_what_was_seen_has_the_levels_chance(k, n):
    # None is right after alone, whose share is then at most 1 - 0.05 ** (1 / n).
    before = torch.ones(n, dtype=torch.bool)
    found = bounds.drop(before, torch.arange(n) >= k, 0.1)
    high, low = found.most, found.least + 1 - 0.05 ** (1 / n)
    assert high == 1 if k == n else binomial(k, n, high) == pytest.approx(0.05, rel=1e-6)
    assert low == pytest.approx(0, abs=1e-12) if k == 0 else 1 - binomial(k - 1, n, low) == pytest.approx(0.05, rel=1e-6)
    assert bounds.by_chance(k, n, 0.3) == pytest.approx(1 - (binomial(k - 1, n, 0.3) if k else 0), abs=1e-12)


def test_a_drop_is_within_its_bounds_as_often_as_they_say():
    generator = torch.Generator().manual_seed(0)
    missed = 0
    for _ in range(300):
        draws = torch.rand(60, generator=generator)
        # 10 % are right before alone, 4 % after alone: the drop is 6 %.
        before, after = (draws < 0.1) | (draws > 0.2), (draws > 0.16)
        found = bounds.drop(before, after)
        missed += found.most < 0.06
        assert found.least <= found.seen <= found.most
    assert missed <= 15
    everything = torch.ones(1000, dtype=torch.bool)
    assert bounds.drop(everything, everything).most == pytest.approx(1 - 0.025 ** (1 / 1000), rel=1e-6)
    assert bounds.drop(everything[: bounds.needed(0.01)], everything[: bounds.needed(0.01)]).most <= 0.01


def test_the_same_net_is_tried_once_whatever_it_is_called():
    policy = costs.run(max_drop=2, ks=(1, 2, 4))
    names = [t.name for t in policy.evidence.trials]
    assert "preserve 1" in names
    assert not [name for name in names if "collapse 1" in name]
    made = set()
    for trial in policy.evidence.trials:
        rules = [{"match": n, "mode": c.split()[0], "k": int([*c.split(), 1][1])} for n, c in trial.choices.items()]
        net = sj_tac.convert(csnn(), {"default": {"mode": "keep"}, "rules": rules}, backend="reference")
        shown = []
        for name in ("0", "4", "8"):
            drive = net.get_submodule(name).__dict__.get("_tac")
            shown.append(drive and (drive.frames, drive.span, drive.out))
        assert tuple(shown) not in made, trial.name
        made.add(tuple(shown))


@pytest.mark.parametrize("bad", [7, -1, 255])
def test_labels_that_are_no_classes_are_named(bad):
    labels = costs.labels(csnn())
    labels[5] = bad
    for call in (
        lambda: sj_tac.search(csnn(), [(costs.X, labels)], progress=False),
        lambda: sj_tac.bench(csnn(), [(costs.X, labels)], ["preserve:2"], rounds=1, progress=False),
        lambda: sj_tac.diagnose([(costs.X, labels)], csnn(), permutations=19),
    ):
        with pytest.raises(BatchError, match=rf"labels \[{bad}\] are none of the classes 0 .. 2"):
            call()


def test_a_source_at_chance_is_said():
    right = costs.labels(csnn())
    options = {"max_drop": 1, "ks": (2,), "cost": costs.cost, "backend": "reference", "progress": False, "match": False}
    wrong = sj_tac.search(csnn(), [(costs.X, (right + 1) % 3)], **options)
    assert "SOURCE_AT_CHANCE: the source is right in 0.0000 of 48" in str(wrong.evidence)
    assert "SOURCE_AT_CHANCE" not in str(sj_tac.search(csnn(), [(costs.X, right)], **options).evidence)


@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0, math.inf, "slow"])
def test_a_cost_that_is_none_is_an_error(value):
    with pytest.raises(SearchError, match="it must be a finite number above 0"):
        sj_tac.search(csnn(), costs.X, cost=lambda net: value, progress=False, backend="reference")


def test_held_out_samples_have_no_say_and_judge():
    held = [Batch(frames(3, 10, 2, 4, 4, seed=i), torch.arange(10) + 10 * i) for i in range(2)]
    chosen, rest = split(held, 0.25)
    labels = [torch.cat([b.labels for b in part]).tolist() for part in (chosen, rest)]
    assert len(labels[1]) == 5
    assert sorted(labels[0] + labels[1]) == list(range(20))
    assert torch.equal(rest[0].frames[:, 0], held[0].frames[:, labels[1][0]])
    assert split(held, None)[1] == []
    assert sum(b.samples for b in split(held * 20, None)[1]) == 100
    for share in (-0.1, 1.0, 0.01):
        with pytest.raises(PolicyError, match="holdout="):
            split(held, share)
    evidence = costs.run(holdout=0.25, max_drop=0.01, ks=(1, 2)).evidence
    assert (evidence.samples, evidence.held_out.samples) == (36, 12)
    assert evidence.held_out.source == 1
    assert evidence.held_out.drop == pytest.approx(1 - evidence.held_out.chosen)
    assert "cannot tell whether the drop is within max_drop 0.01: that takes 368 held out" in str(evidence).replace(
        "\n", " "
    )
    assert costs.run(ks=(1, 2)).evidence.held_out is None


class Ordered(nn.Module):
    """Three steps behind each other: the class is whether the first half of the frames had more spikes than the second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.by = layer.Conv2d(1, 1, 1, step_mode="m"), True

    def forward(self, x):
        half = len(x) // 2
        count = x.mean((2, 3, 4))
        other = count[half:].mean(0) if self.by else torch.full_like(count[0], 0.3)
        return torch.stack([count[:half].mean(0) - other, other - count[:half].mean(0)], 1)


def test_the_accuracy_on_reordered_frames_decides():
    x = frames(8, 80, 1, 6, 6, rate=0.3)
    rates = torch.where(torch.arange(80) % 2 == 0, 0.5, 0.1)
    x[:4] = (
        torch.rand(4, 80, 1, 6, 6, generator=torch.Generator().manual_seed(1)) < rates[None, :, None, None, None]
    ).float()
    labels = torch.arange(80) % 2
    found = sj_tac.diagnose([(x[:, i : i + 20], labels[i : i + 20]) for i in (0, 20, 40, 60)], Ordered(), permutations=99)
    by = found.reordered
    assert (by.samples, by.accuracy, by.chance, by.verdict) == (80, 1.0, 0.5, "preserve")
    assert by.reversed == 0.0
    assert 0.2 < by.shuffled < 0.8
    assert found.verdict == "preserve"
    assert "needs the order, which is what decides" in str(found)
    # A net that does not look at order has no use for it, however alike neighbouring frames are.
    alike = frames(8, 200, 2, 8, 8)[:1].expand(8, -1, -1, -1, -1) + 0.01 * torch.arange(8).view(8, 1, 1, 1, 1)
    sums = nn.Sequential(layer.Conv2d(2, 1, 1, step_mode="m"), layer.Flatten(step_mode="m")).eval()
    with torch.no_grad():
        truth = sums(alike).mean(0)[:, :4].argmax(1)
    found = sj_tac.diagnose([(alike, truth)], sums, permutations=99, decode=lambda y: y.mean(0)[:, :4])
    assert (found.reordered.verdict, found.verdict, found.suggested_k) == ("collapse", "collapse", 8)
    assert "Frames alone would say preserve" in str(found)
    unlabeled = sj_tac.diagnose(alike, sums, permutations=99)
    assert (unlabeled.verdict, unlabeled.reordered) == ("preserve", None)
    assert "Measured is whether neighbouring frames are alike" in str(unlabeled)
    # At chance accuracy says nothing, and with few samples it cannot tell.
    guess = sj_tac.diagnose([(alike, torch.arange(200) % 4)], sums, permutations=99, decode=lambda y: y.mean(0)[:, :4])
    assert (guess.reordered.verdict, guess.verdict) == ("undecided", "preserve")
    few = sj_tac.diagnose([(alike[:, :6], truth[:6])], sums, permutations=99, decode=lambda y: y.mean(0)[:, :4])
    assert few.reordered.verdict == "undecided"


@pytest.mark.parametrize("shape", [(10, 2, 32, 32), (10, 28, 28)])
def test_one_recording_is_not_taken_for_samples(shape):
    with pytest.raises(BatchError, match=r"look like one recording.*unsqueeze\(1\)"):
        sj_tac.diagnose(torch.rand(shape))
    assert sj_tac.diagnose(torch.rand(shape).unsqueeze(1), permutations=19).samples == 1
    assert sj_tac.diagnose((torch.rand(shape), torch.zeros(shape[1]).long()), permutations=19).samples == shape[1]


def test_an_interrupted_search_has_the_best_so_far(tmp_path):
    calls = []

    def cost(net):
        calls.append(net)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return costs.cost(net)

    with pytest.raises(SearchInterrupted) as raised:
        sj_tac.search(
            csnn(), costs.X, cost=cost, max_drop=1, progress=False, backend="reference", match=False, log=tmp_path / "l"
        )
    assert isinstance(raised.value, KeyboardInterrupt)
    assert len(raised.value.evidence.trials) == 3
    assert "goes on from" in raised.value.evidence.stopped
    assert sj_tac.convert(csnn(), raised.value.policy)


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sj_tac.tuning.progress.BETWEEN", 0.0)
    with Bar("search", None, True) as bar:
        bar.expect(3)
        bar.note("preserve 2 (accuracy 0.9, 3.00x)")
        for name in ("a", "b", "c", "d"):
            bar.step(name)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4
    assert said[0].startswith(
        "search: 1 of about 3 in 0:00, about 0:00 left; best so far: preserve 2 (accuracy 0.9, 3.00x); a"
    )
    assert said[3].startswith("search: 4 of about 5 in")
    assert all("\x1b" not in line for line in said)
    with Bar("search", 3, False) as bar:
        bar.step("a")
    assert capsys.readouterr().err == ""


def test_bench_names_rows_by_what_was_asked_for(tmp_path):
    sj_tac.Policy.from_dict({"default": {"k": 4}}).save(tmp_path / "p.yaml")
    net = awake(csnn(), costs.X)
    found = sj_tac.bench(net, costs.X, ["preserve:2", tmp_path / "p.yaml"], rounds=1, progress=False)
    assert [row.name for row in found.rows][-2:] == ["preserve k=2", str(tmp_path / "p.yaml")]
    assert found[str(tmp_path / "p.yaml")].macs * 2 == found["preserve k=2"].macs
    for wrong, words in (
        ("preserve:2", "are a list"),
        ([{"default": {"k": 2}}], "has no name"),
        (["preserve:x"], "after a colon"),
    ):
        with pytest.raises(PolicyError, match=words):
            sj_tac.bench(net, costs.X, wrong, rounds=1, progress=False)


def test_a_mode_with_its_k_is_a_policy_everywhere():
    assert [v.k for v in sj_tac.plan(csnn(), "collapse:4").converted] == [4, 4, 4]
    for text, words in (
        ("preserve:", "write the k after a colon"),
        ("preserve:0", "write the k"),
        ("collapse:99999", "1 to 65,536"),
        ("keep:2", "write the k"),
        ("preserve:\uff12", "write the k"),
    ):
        with pytest.raises(PolicyError, match=words):
            sj_tac.plan(csnn(), text)
    with pytest.raises(PolicyError, match="k=8 is given beside policy='preserve:4'"):
        sj_tac.plan(csnn(), "preserve:4", 8)
