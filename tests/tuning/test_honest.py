"""What measuring must not pretend: bounds against the definition, labels, chance, samples held out, costs, progress."""

import math

import costs
import pytest
import torch
from support import csnn, frames

import sj_tac
from sj_tac.errors import BatchError, PolicyError, SearchError
from sj_tac.tuning import bounds
from sj_tac.tuning.batches import Batch
from sj_tac.tuning.holding import split
from sj_tac.tuning.progress import Bar


def binomial(k, n, p):
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


@pytest.mark.parametrize(("k", "n"), [(0, 20), (3, 20), (20, 20), (7, 300)])
def test_bounds_are_those_shares_at_which_what_was_seen_has_the_levels_chance(k, n):
    # None is right after alone, whose share is then at most 1 - 0.05 ** (1 / n).
    before = torch.ones(n, dtype=torch.bool)
    found = bounds.drop(before, torch.arange(n) >= k, 0.1)
    high, low = found.most, found.least + 1 - 0.05 ** (1 / n)
    assert found.seen == k / n
    assert high == 1 if k == n else binomial(k, n, high) == pytest.approx(0.05, rel=1e-6)
    assert low == pytest.approx(0, abs=1e-12) if k == 0 else 1 - binomial(k - 1, n, low) == pytest.approx(0.05, rel=1e-6)
    won = bounds.drop(torch.arange(n) >= k, before, 0.1)
    assert won == pytest.approx((-found.seen, -found.most, -found.least))
    assert bounds.by_chance(k, n, 0.3) == pytest.approx(1 - (binomial(k - 1, n, 0.3) if k else 0), abs=1e-12)


def test_as_many_samples_are_needed_as_would_do_if_none_were_lost():
    for budget in (0.01, 0.1):
        enough = torch.ones(bounds.needed(budget), dtype=torch.bool)
        assert bounds.drop(enough, enough).most <= budget < bounds.drop(enough[1:], enough[1:]).most
    assert bounds.needed(0) == bounds.needed(1) == 0
    assert bounds.chance(torch.tensor([0, 1, 1, 2])) == 0.5


@pytest.mark.parametrize("bad", [3, -1])
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


@pytest.mark.parametrize("value", [math.nan, 0.0, math.inf, "slow"])
def test_a_cost_that_is_none_is_an_error(value):
    with pytest.raises(SearchError, match="it must be a finite number above 0"):
        sj_tac.search(csnn(), costs.X, cost=lambda net: value, progress=False, backend="reference")


def test_samples_are_held_out_evenly_from_all_batches():
    held = [Batch(frames(3, 10, 2, 4, 4, seed=i), torch.arange(10) + 10 * i) for i in range(2)]
    chosen, rest = split(held, 0.25)
    labels = [torch.cat([b.labels for b in part]).tolist() for part in (chosen, rest)]
    assert [len(b.labels) for b in rest] == [2, 3]
    assert sorted(labels[0] + labels[1]) == list(range(20))
    assert torch.equal(rest[0].frames[:, 0], held[0].frames[:, labels[1][0]])
    assert split(held, None)[1] == []
    assert sum(b.samples for b in split(held * 20, None)[1]) == 100
    for share in (-0.1, 1.0, 0.01):
        with pytest.raises(PolicyError, match="holdout="):
            split(held, share)


def test_held_out_samples_have_no_say_and_judge():
    evidence = costs.run(holdout=0.25, max_drop=0.01, ks=(1, 2)).evidence
    assert (evidence.samples, evidence.held_out.samples) == (36, 12)
    assert evidence.held_out.source == 1
    assert evidence.held_out.drop == pytest.approx(1 - evidence.held_out.chosen)
    told = " ".join(str(evidence).split())
    assert "cannot tell whether the drop is within max_drop 0.01: that takes 368 held out" in told
    assert "One of 36 samples is 0.0278 of accuracy, its standard error about 0.0278" in told
    assert "max_drop 0.01 is less than one sample" in told
    assert costs.run(ks=(1, 2)).evidence.held_out is None
    # Even at the least it drops by more than this.
    words = evidence.held_out.words("accuracy", evidence.held_out.least - 0.01)
    assert any(said.startswith("BUDGET_EXCEEDED") for said in words)
    assert len(evidence.held_out.words("accuracy", None)) == len(evidence.held_out.words("accuracy", 1.0)) == 1


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
    bar.begun, bar.done, bar.total = 0.0, 3, 4
    assert bar.line("x", 5400.0).startswith("search: 3 of about 4 in 1:30:00, about 30:00 left; ")
    with Bar("search", 3, False) as bar:
        bar.step("a")
    assert capsys.readouterr().err == ""


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
