"""Ctrl-C: a measurement that is interrupted has what was finished until then, whole, and says that it is not all."""

import json
from dataclasses import replace
from functools import partial

import matched
import pytest
import torch
from matched import narrow
from support import csnn, frames, interrupt, same_state, time_by_k

import sj_tac
from sj_tac.errors import MeasurementInterrupted
from sj_tac.tuning import bench, diagnosis, fitting, matching, measure, reordering, sensitivity

X = frames(6, 16, 2, 8, 8)
LABELS = torch.arange(16) % 3


@pytest.fixture
def stop(monkeypatch):
    """Ctrl-C in the n-th call of a function; times are those of ``time_by_k``."""
    time_by_k(monkeypatch)

    return partial(interrupt, monkeypatch)


def ended(call):
    with pytest.raises(KeyboardInterrupt) as raised:
        call()
    assert type(raised.value) is MeasurementInterrupted
    return raised.value.found, str(raised.value)


def settings(**more):
    return sj_tac.sensitivity(csnn(), X, ks=(2, 3), rounds=1, progress=False, **more)


def test_sensitivity_has_the_settings_that_were_measured(stop, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    whole, told = settings(), []
    stop(sensitivity, "_effect", 6)
    found, said = ended(settings)
    assert said == "sensitivity was interrupted after 5 of 12 settings"
    assert (found.interrupted, whole.interrupted) == (True, False)
    assert found.effects == whole.effects[:5]
    assert "interrupted" in str(found)
    monkeypatch.setattr(Axes, "text", lambda self, x, y, text, **how: told.append(text))
    assert found.save(tmp_path / "found.json").exists()
    assert json.loads((tmp_path / "found.json").read_text())["interrupted"] is True
    # Of two layers four settings each, in two maps; three were not measured, which is no refusal.
    assert told.count("") == 2 * 3
    assert "refused" not in told


def rows():
    batches = [(X[:, :8], LABELS[:8]), (X[:, 8:], LABELS[8:])]
    return sj_tac.bench(csnn(), batches, ("preserve:2", "collapse:2"), rounds=2, progress=False)


@pytest.mark.parametrize(
    ("holder", "name", "number", "missing", "timed"),
    [(bench, "scores", 3, 1, False), (measure, "_seconds", 1, 0, False), (measure, "_seconds", 2, 0, True)],
)
def test_bench_has_the_rows_that_were_finished(stop, tmp_path, holder, name, number, missing, timed):
    whole = rows()
    # Without the row of folded norms, where the host has none.
    extra = len(whole.rows) - 4
    stop(holder, name, number)
    found, said = ended(rows)
    count = 2 if missing else len(whole.rows)
    assert said.startswith(f"bench was interrupted after {count} of {4 + extra} rows; ")
    assert [replace(r, ms=None, speedup=None) for r in found.rows] == [
        replace(r, ms=None, speedup=None) for r in whole.rows[:count]
    ]
    assert all((r.ms is not None and r.speedup is not None) is timed for r in found.rows)
    assert found.interrupted
    assert "(interrupted)" in str(found)
    assert found.save(tmp_path / "rows.json").exists()
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["ms"] == found.rows[0].ms


@pytest.mark.parametrize(
    ("holder", "name", "call", "said"),
    [
        (sensitivity, "milliseconds", settings, "sensitivity was interrupted before a layer was measured"),
        (bench, "scores", rows, "bench was interrupted before a row was finished"),
        (diagnosis, "_refuse_recording", lambda: sj_tac.diagnose(X), "diagnose was interrupted before a batch was seen"),
    ],
)
def test_nothing_is_found_before_the_first(stop, holder, name, call, said):
    stop(holder, name, 1)
    assert ended(call) == (None, said)


def test_an_interrupted_match_is_no_row_of_a_bench(stop):
    stop(matching, "Fit", 2)
    with pytest.raises(KeyboardInterrupt) as raised:
        sj_tac.bench(csnn(), X, ("preserve:2", "preserve:4"), rounds=1, match=X, progress=False)
    assert type(raised.value) is KeyboardInterrupt


def test_match_keeps_the_nearest_of_what_was_compared(stop):
    source = narrow()
    fast, other = sj_tac.convert(source, "preserve", matched.K), sj_tac.convert(source, "preserve", matched.K)
    expected = sj_tac.match(other, matched.X, method="moments", progress=False)
    stop(matching, "Fit", 2)
    found, said = ended(lambda: sj_tac.match(fast, matched.X, progress=False))
    assert [c.method for c in found.candidates] == ["none", "moments"]
    assert found.method == expected.method == "moments"
    assert said == "match was interrupted; of ['none', 'moments'] the net keeps the nearest, 'moments'"
    assert found.interrupted
    assert "not all methods were tried" in str(found)
    assert same_state(fast, other)
    assert not same_state(fast, source)
    sj_tac.match(fast, undo=True)
    assert same_state(sj_tac.restore(fast), source)


@pytest.mark.parametrize("number", [1, 3])
def test_match_leaves_the_net_as_it_was_before_the_first_method_is_whole(stop, number):
    source = narrow()
    fast = sj_tac.convert(source, "preserve", 4)
    stop(fitting.Fit, "_to_moments", number)
    found, said = ended(lambda: sj_tac.match(fast, matched.X, progress=False))
    assert (found, said) == (None, "match was interrupted before a method was compared; the net is as it was")
    assert same_state(fast, source)
    assert "matched" not in str(sj_tac.report(fast).notes)
    assert same_state(sj_tac.restore(fast), source)


@pytest.mark.parametrize(
    ("holder", "name", "number"),
    [(diagnosis, "_refuse_recording", 3), (diagnosis, "is_scores", 3), (reordering, "check_labels", 8)],
)
def test_diagnose_says_what_the_batches_until_then_say(stop, holder, name, number):
    """The batch that is interrupted counts nowhere, however far it got."""
    batches = [(X[:, i : i + 4], LABELS[i : i + 4]) for i in range(0, 16, 4)]
    net = None if name == "_refuse_recording" else csnn()
    expected = sj_tac.diagnose(batches[:2], net, permutations=99)
    stop(holder, name, number)
    found, said = ended(lambda: sj_tac.diagnose(batches, net, permutations=99))
    assert said == "diagnose was interrupted after 2 batches, 8 samples"
    assert found == replace(expected, interrupted=True)
    assert len(found.layers) == (0 if net is None else 3)
    assert "8 samples of T = 6, interrupted" in str(found)
