"""Search: against all policies there are, within its budget, never slower, deterministic; what it refuses and says."""

import itertools
import json
import math
from dataclasses import fields
from functools import cache

import costs
import pytest
import torch
from support import csnn, frames, no_collapse, same_state, time_by_k
from torch import nn

import sj_tac
from sj_tac.errors import BatchError, PolicyError, SearchError
from sj_tac.rewrites.pipeline import convert_with
from sj_tac.tuning.batches import Batch
from sj_tac.tuning.evidence import Trial, frontier
from sj_tac.tuning.measure import scores
from sj_tac.tuning.options import Measurement, MeasurementOptions, Search, SearchOptions

KS = (1, 2, 8)


@cache
def expected():
    return scores(csnn(), [Batch(costs.X)])


def closeness(net, batches):
    """Minus the squared error of the class scores: finer than a count of predictions, and it gets worse as k grows."""
    (frames, _) = batches[0]
    return -(scores(net, [Batch(frames)]) - expected()).square().mean().item()


@pytest.fixture(scope="module")
def everything():
    """Metric and cost of all 3^3 preserve policies of the net."""
    found = {}
    for ks in itertools.product(KS, repeat=3):
        rules = [{"match": name, "mode": "preserve", "k": k} for name, k in zip(("0", "4", "8"), ks, strict=True)]
        policy = {"default": {"mode": "keep"}, "rules": rules}
        net = convert_with(csnn(), policy, example_input=costs.X[:, :1], backend="reference")
        found[ks] = (closeness(net, [(costs.X, None)]), costs.cost(net))
    return found


def ks_of(policy):
    return tuple(rule.k for rule in policy.rules)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
def test_it_is_near_the_best_of_all_policies_and_never_worse_than_a_uniform_one(everything, share):
    """``share``: how many of all policies are within the budget."""
    drop = -sorted((m for m, _ in everything.values()), reverse=True)[round(share * 26)]
    policy = costs.run(max_drop=drop, ks=KS, modes=("preserve",), metric=closeness)
    metric, cost = everything[ks_of(policy)]
    assert metric >= -drop - 1e-9
    fitting = {ks: c for ks, (m, c) in everything.items() if m >= -drop - 1e-9}
    assert cost <= min(c for ks, c in fitting.items() if len(set(ks)) == 1)
    # Of 27 policies it may miss the best, not the best two.
    assert sum(c < cost for c in fitting.values()) <= 1
    assert len(policy.evidence.trials) < 27


@pytest.mark.parametrize("speedup", [1.2, 2.5])
def test_a_wanted_speed_gets_the_best_metric_at_it(everything, speedup):
    policy = costs.run(speedup=speedup, ks=KS, modes=("preserve",), metric=closeness)
    metric, cost = everything[ks_of(policy)]
    source = costs.cost(csnn())
    assert source / cost >= speedup
    fitting = {ks: m for ks, (m, c) in everything.items() if source / c >= speedup}
    assert metric >= max(m for ks, m in fitting.items() if len(set(ks)) == 1)
    assert sum(m > metric for m in fitting.values()) <= 1


def test_the_figures_in_the_evidence_are_those_of_the_nets(everything):
    policy = costs.run(ks=KS, modes=("preserve",), metric=closeness)
    source = costs.cost(csnn())
    for trial in policy.evidence.trials:
        choices = [text.split() for text in trial.choices.values()]
        if all(c[0] == "preserve" for c in choices):
            metric, cost = everything[tuple(int(c[1]) for c in choices)]
            assert (trial.metric, trial.speedup) == pytest.approx((metric, source / cost))
    chosen = policy.evidence[policy.evidence.chosen]
    assert [f"{r.mode} {r.k}" for r in policy.rules] == list(chosen.choices.values())
    assert policy.evidence.source_metric == 0


def test_the_printed_table_has_the_choice_the_frontier_and_every_uniform_policy():
    evidence = costs.run(ks=(1, 2, 4), modes=("preserve",), metric=closeness).evidence
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in str(evidence).splitlines() if line.startswith("│")]
    frontier = {t.name for t in evidence.frontier}
    shown = [t for t in evidence.trials if t.name in frontier or len(set(t.choices.values())) == 1]
    assert 2 < len(shown) < len(evidence.trials)
    order = sorted(shown, key=lambda t: -t.speedup)
    assert rows == [["*" if t.name == evidence.chosen else "·" if t.name in frontier else "", t.name] for t in order]


def test_what_is_measured_of_matched_candidates_is_what_a_matched_net_does():
    policy = costs.run(match=True, max_drop=0.03, modes=("preserve",), metric=closeness)
    chosen = policy.evidence[policy.evidence.chosen]
    kept = {trial.matched for trial in policy.evidence.trials}
    assert kept <= {"none", "moments"}
    assert "moments" in kept
    net = sj_tac.convert(csnn(), policy, example_input=costs.X[:, :1], backend="reference")
    if chosen.matched != "none":
        assert f"method='{chosen.matched}'" in " ".join(policy.evidence.notes)
        sj_tac.match(net, costs.X, method=chosen.matched, progress=False)
    assert closeness(net, [(costs.X, None)]) == pytest.approx(chosen.metric)


def test_the_frontier_is_what_nothing_beats():
    trials = [
        Trial({}, str(i), False, m, s)
        for i, (m, s) in enumerate([(0.9, 2), (0.8, 3), (0.85, 2), (0.9, 1), (0.7, 3), (0.5, 9)])
    ]
    assert [t.name for t in frontier([*trials, Trial({}, "no", False, refused="x")])] == ["5", "1", "0"]
    evidence = costs.run(ks=(1, 2, 8)).evidence
    best = evidence.frontier
    for trial in evidence.trials:
        assert trial.refused or any(b.speedup >= trial.speedup and b.metric >= trial.metric for b in best)


def test_the_same_again_and_the_same_whatever_was_asked_before(tmp_path):
    log = tmp_path / "log.jsonl"
    options = {"ks": (1, 2, 4), "modes": ("preserve",)}
    first = costs.run(log, **options)
    logged = log.read_text()
    assert len(logged.splitlines()) == 2 + len(first.evidence.trials)
    assert costs.run(log, **options) == first == costs.run(**options)
    assert log.read_text() == logged
    other = costs.run(log, max_drop=0.3, **options)
    assert other == costs.run(max_drop=0.3, **options)
    assert ks_of(other) != ks_of(first)


def test_the_same_net_is_tried_once_whatever_it_is_called():
    """Behind a collapse by 4 a k of 1, 2 or 4 is one and the same net, in either mode."""
    trials = costs.run(max_drop=2, ks=(1, 2, 4)).evidence.trials
    assert "preserve 1" in [t.name for t in trials]
    behind = set()
    for trial in trials:
        assert "collapse 1" not in trial.name
        first, *rest = (choice.split() for choice in trial.choices.values())
        if first == ["collapse", "4"] and all(rest) and not any(choice == ["keep"] for choice in rest):
            behind.add(trial.name)
    assert behind == {"collapse 4"}


def test_measured_time_decides_between_finalists(monkeypatch, tmp_path):
    """With a clock on which "keep" is fast, layers are kept; with one on which conversion is slow, it says so."""
    x = frames(6, 12, 2, 8, 8)

    def clock(keep):
        def milliseconds(nets, *timing):
            taken = {}
            for name, net in nets.items():
                net = net if isinstance(net, nn.Module) else net()
                found = sj_tac.report(net).verdicts if "_sj_tac" in vars(net) else []
                taken[name] = 10.0 + sum(keep if v.status == "converted" else 0 for v in found)
            return taken

        return milliseconds

    for name in ("milliseconds", "milliseconds_afresh"):
        monkeypatch.setattr(f"sj_tac.tuning.trials.{name}", clock(-1.0))
    policy = sj_tac.search(csnn(), x, max_drop=1, ks=(1, 2), progress=False, out=tmp_path / "e.json")
    assert [r.k for r in policy.rules] == [2, 2, 2]
    assert policy.evidence.final["source"] == 10
    for name in ("milliseconds", "milliseconds_afresh"):
        monkeypatch.setattr(f"sj_tac.tuning.trials.{name}", clock(+1.0))
    with pytest.raises(SearchError, match=r"no policy is faster than the source here.* at 0\.") as raised:
        sj_tac.search(csnn(), x, max_drop=1, ks=(1, 2), progress=False)
    assert raised.value.evidence.chosen == ""
    assert len(raised.value.evidence.trials) > 3


def test_between_equal_times_the_metric_decides_but_never_for_what_is_slower_than_the_source(monkeypatch):
    time_by_k(monkeypatch)
    x = frames(6, 12, 2, 8, 8)

    def final(one, two):
        taken = {"source": 10.0, "preserve 1": one, "preserve 2": two}
        monkeypatch.setattr(
            "sj_tac.tuning.trials.milliseconds_afresh", lambda make, *rest: {n: taken.get(n, 99.0) for n in make}
        )
        policy = sj_tac.search(csnn(), x, max_drop=1, ks=(1, 2), modes=("preserve",), progress=False, rounds=1)
        return policy.evidence.chosen

    assert final(9.9, 9.7) == "preserve 1"
    assert final(10.1, 9.8) == "preserve 2"
    assert final(9.0, 5.0) == "preserve 2"


def test_it_leaves_the_model_alone_and_what_it_returns_converts(tmp_path, monkeypatch):
    time_by_k(monkeypatch)
    net = csnn().train()
    net[2].register_forward_hook(lambda *args: pytest.fail("the user's hook ran"))
    policy = sj_tac.search(
        net, (costs.X, torch.zeros(48).long()), max_drop=1, ks=(2, 4), progress=False, out=tmp_path / "e.json"
    )
    assert net.training
    assert same_state(net, csnn())
    policy.save(tmp_path / "p.yaml")
    fast = sj_tac.convert(csnn(), tmp_path / "p.yaml")
    assert [v.k for v in sj_tac.report(fast).converted] == [r.k for r in policy.rules if r.mode != "keep"]
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")
    for words in ("Pareto frontier", "check it on others", json.loads((tmp_path / "e.json").read_text())["chosen"]):
        assert words in " ".join(str(policy.evidence).split())


def test_what_cannot_be_reached_is_said_with_the_nearest():
    options = {"ks": (1, 8)}
    with pytest.raises(SearchError, match=r"no policy has accuracy >= 1\.5000: the source has 1\.0000, and the best of"):
        costs.run(max_drop=-0.5, **options)
    fastest = r"no policy reaches 1000x .* the fastest of \d+ tried is '(preserve|collapse) 8'"
    with pytest.raises(SearchError, match=fastest) as raised:
        costs.run(speedup=1000, **options)
    assert raised.value.evidence.trials
    assert costs.run(time_limit=1e-9).evidence.chosen == "preserve 1"  # one candidate is always measured


def test_a_time_limit_ends_it_with_the_best_so_far(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr("sj_tac.tuning.search.time.monotonic", lambda: float(next(now)))
    policy = costs.run(time_limit=8)
    assert "the time limit ended it" in policy.evidence.stopped
    assert 1 <= len(policy.evidence.trials) < 12


def test_refused_combinations_are_tried_once_and_never_chosen():
    policy = costs.run(ks=(2, 3), modes=("collapse", "preserve"), max_drop=2)
    refused = [t for t in policy.evidence.trials if t.refused]
    assert refused  # a collapse by 2 before a k of 3
    assert all("K_NOT_WHOLE" in t.refused for t in refused)
    assert policy.evidence.chosen not in [t.name for t in refused]
    # NaN is no JSON.
    plain = json.loads(policy.evidence.to_json(), parse_constant=lambda text: pytest.fail(text))
    assert sum("metric" not in trial for trial in plain["trials"]) == len(refused)


def test_a_layer_that_refuses_a_mode_is_searched_in_the_others():
    net = no_collapse()
    options = {"max_drop": 1, "ks": (1, 2), "cost": costs.cost, "progress": False, "backend": "reference"}
    policy = sj_tac.search(net, costs.X, modes=("collapse", "preserve"), **options)
    assert [(r.mode, r.k) for r in policy.rules] == [("preserve", 2)]
    with pytest.raises(SearchError, match=r"no layer may be converted alike in modes \('collapse',\): .*COLLAPSE_FOLDED"):
        sj_tac.search(net, costs.X, modes=("collapse",), **(options | {"ks": (2,)}))


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (BatchError, 'metric="accuracy" needs labels', {"metric": "accuracy"}),
        (PolicyError, r"metric='acuracy': there are 'accuracy', 'agreement'", {"metric": "acuracy"}),
        (SearchError, r"metric .*returned nan .* must be a finite number", {"metric": lambda net, batches: math.nan}),
        (SearchError, r"metric .*returned None .* must be a finite number", {"metric": lambda net, batches: None}),
        (PolicyError, "max_drop=nan", {"max_drop": math.nan}),
        (PolicyError, r"speedup=0\.5 must be at least 1", {"speedup": 0.5}),
        (PolicyError, "time_limit=0 must be positive", {"time_limit": 0}),
        (PolicyError, "rounds=0", {"rounds": 0}),
        (PolicyError, r"modes=\(\) leaves nothing", {"modes": ()}),
        (PolicyError, "layers", {"layers": ("convolution",)}),
        (PolicyError, "each a sequence", {"ks": 4}),
        (PolicyError, "holdout=1", {"holdout": 1.0}),
    ],
)
def test_bad_options(kind, message, options):
    with pytest.raises(kind, match=message):
        sj_tac.search(csnn(), frames(6, 4, 2, 8, 8), progress=False, **options)


def test_auto_diagnoses_searches_and_gives_the_net_that_its_evidence_measured(monkeypatch):
    time_by_k(monkeypatch)
    x = frames(8, 40, 2, 8, 8)
    fast = sj_tac.convert(csnn(), "auto", calibration=(x[:, i : i + 20] for i in (0, 20)), example_input=x[:, :1])
    report = sj_tac.report(fast)
    assert report.converted
    assert report.evidence.diagnosis.verdict == "collapse"
    assert report.evidence.samples == 40
    assert report.to_dict()["evidence"]["chosen"] == report.evidence.chosen
    assert "Order is noise" in str(report)
    chosen = report.evidence[report.evidence.chosen]
    assert (f"matched by '{chosen.matched}'" in str(report.notes)) == (chosen.matched != "none")
    parts = [Batch(x[:, i : i + 20]) for i in (0, 20)]
    predictions = [scores(net, parts).argmax(1) for net in (csnn(), fast)]
    agreed = (predictions[0] == predictions[1]).double().mean().item()
    assert agreed == pytest.approx(chosen.metric)
    assert agreed >= 0.99
    assert sj_tac.set_k(fast, 2).evidence is None
    assert "evidence" not in sj_tac.report(sj_tac.convert(csnn())).to_dict()


def test_linear_layers_are_searched_where_they_are_asked_for():
    policy = costs.run(layers=("conv", "linear"), max_drop=1, ks=(1, 2))
    assert [r.match for r in policy.rules] == ["0", "4", "8", "12"]
    assert [v.k for v in sj_tac.report(sj_tac.convert(csnn(), policy)).converted] == [2, 2, 2, 2]


def test_auto_says_what_it_needs():
    with pytest.raises(PolicyError, match=r'calibration= is for policy="auto"; with policy=.preserve.'):
        sj_tac.convert(csnn(), calibration=costs.X)
    with pytest.raises(PolicyError, match="drop k=4"):
        sj_tac.convert(csnn(), "auto", 4, calibration=costs.X)


@pytest.mark.parametrize(("typed", "made"), [(SearchOptions, Search), (MeasurementOptions, Measurement)])
def test_a_type_checker_knows_every_option_and_that_each_may_be_left_out(typed, made):
    assert set(typed.__annotations__) | {"rounds"} == {field.name for field in fields(made)} | {"rounds"}
    assert not typed.__required_keys__
