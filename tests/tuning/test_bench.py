"""The bench of one model's conversions: its figures against their definitions."""

import json

import pytest
import torch
from support import csnn, frames, only_v2

import sj_tac
from sj_tac.errors import BatchError, ModelTypeError, PolicyError
from sj_tac.support import memory
from sj_tac.tuning.bench import FOLDED, SOURCE, bench

X = frames(6, 12, 2, 8, 8)
LABELS = torch.arange(12) % 3


@pytest.fixture(scope="module")
def found():
    rows = {"k=2": ("preserve", 2), "mine": ({"default": {"mode": "collapse", "k": 3}}, 2)}
    return bench(csnn(), [(X[:, :6], LABELS[:6]), (X[:, 6:], LABELS[6:])], rows, title="net", rounds=1, progress=False)


@torch.no_grad()
def test_accuracy_agreement_and_macs_are_their_definitions(found):
    source = csnn()
    said = source(X).mean(0).argmax(1)
    fast = sj_tac.convert(csnn(), "preserve", 2, example_input=X[:, :1])
    got = fast(X).mean(0).argmax(1)
    assert found[SOURCE].accuracy == pytest.approx((said == LABELS).double().mean().item())
    assert found[SOURCE].agreement == 1
    assert found["k=2"].accuracy == pytest.approx((got == LABELS).double().mean().item())
    assert found["k=2"].agreement == pytest.approx((got == said).double().mean().item())
    macs = sj_tac.report(fast).converted
    assert found["k=2"].macs == sum(v.macs_after for v in macs)
    assert found[SOURCE].macs == sum(v.macs_before for v in macs)
    assert (found.samples, found.timed) == (12, (6, 6, 2, 8, 8))


@only_v2
def test_speed_ups_are_over_the_fastest_of_the_hosts_rows(found):
    best = min(found[SOURCE].ms, found[FOLDED].ms)
    for row in found.rows:
        assert row.speedup == pytest.approx(best / row.ms)
        assert row.host == (row.name in (SOURCE, FOLDED))


def test_table_json_and_picture(found, tmp_path):
    for words in ("agreement %", "firing rate", "k=2", "mine", "fastest SpikingJelly row"):
        assert words in str(found)
    assert found.save(tmp_path / "b.json").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "b.json").read_text())["rows"]) == len(found.rows)


def test_the_table_names_the_memory_mode(monkeypatch):
    monkeypatch.setattr(memory, "_SAID", ["kept"])
    found = bench(csnn(), X, {}, rounds=1, progress=False)
    assert found.machine["memory"] == "kept"
    assert "Memory mode: kept." in " ".join(str(found).split())


def test_without_labels_there_is_no_accuracy_and_bad_input_is_named(tmp_path):
    bare = bench(csnn(), X, {"k=2": ("preserve", 2)}, rounds=1, progress=False)
    assert bare["k=2"].accuracy is None
    assert "-" in str(bare)
    bare.save(tmp_path / "b.json")
    with pytest.raises(PolicyError, match=rf"two rows are named '{SOURCE}'"):
        bench(csnn(), X, {SOURCE: ("preserve", 2)}, progress=False)
    with pytest.raises(PolicyError, match="rounds=0"):
        bench(csnn(), X, {}, rounds=0)
    with pytest.raises(ModelTypeError):
        bench(None, X, {})
    with pytest.raises(BatchError, match="there are no batches"):
        bench(csnn(), [], {})


def test_conversions_are_matched_as_by_hand():
    from sj_tac.tuning.batches import Batch
    from sj_tac.tuning.measure import scores

    source, rows = csnn(), {"k=4": ("preserve", 4)}
    plain = bench(source, X, rows, rounds=1, progress=False)["k=4"]
    matched = bench(source, X, rows, rounds=1, progress=False, match=1 - X)["k=4"]
    net = sj_tac.convert(source, "preserve", 4)
    assert sj_tac.match(net, 1 - X, method="moments", progress=False).method == "moments"
    expected = [scores(n, [Batch(X)]).argmax(1) for n in (source, net)]
    assert matched.agreement == (expected[0] == expected[1]).double().mean().item()
    assert matched.firing != plain.firing
