"""The search log: kills, full disks, half lines, other searches' logs."""

import json
import resource
import signal
import time

import costs
import forks
import pytest
import torch
from support import csnn

import sj_tac
from sj_tac.errors import SearchError, WriteError


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_ten_kills_and_the_policy_is_that_of_an_uninterrupted_search(tmp_path, monkeypatch):
    expected = costs.run()
    log, out = tmp_path / "log.jsonl", tmp_path / "policy.yaml"
    kills, seen = 0, []
    generator = torch.Generator().manual_seed(0)
    while kills < 10:
        process = forks.start(monkeypatch, costs.save, log, out, 0.1)
        before = log.stat().st_size if log.exists() else 0
        while process.is_alive() and (not log.exists() or log.stat().st_size <= before):
            time.sleep(0.01)
        # At some moment within the next two or three candidates.
        time.sleep(0.3 * torch.rand((), generator=generator).item())
        assert process.is_alive(), process.exitcode
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        seen.append(len(log.read_bytes().splitlines()))
    assert not out.exists()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]
    last = forks.start(monkeypatch, costs.save, log, out)
    last.join()
    assert last.exitcode == 0
    assert sj_tac.Policy.load(out) == expected
    names = [entry["name"] for entry in lines(log) if "name" in entry]
    assert len(names) == len(set(names))  # nothing was measured twice
    assert names == [t.name for t in expected.evidence.trials]


def test_half_a_last_line_is_cut_and_measured_again(tmp_path):
    log = tmp_path / "log.jsonl"
    first = costs.run(str(log))
    whole = log.read_bytes()
    for cut in (1, 30, len(whole.splitlines(keepends=True)[-1]) + 7):
        log.write_bytes(whole[:-cut])
        assert costs.run(str(log)) == first
        assert log.read_bytes() == whole
    log.write_bytes(whole[:20])  # killed in the header
    assert costs.run(str(log)) == first


def test_a_full_disk_keeps_what_was_measured(tmp_path):
    log = tmp_path / "log.jsonl"
    costs.run(str(log))
    whole = log.read_bytes()
    log.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    kept = log.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "old.json").write_text("old")
    # No file may grow beyond this: the next line is written in part and fails, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept) + 10, limits[1]))
    try:
        with pytest.raises(WriteError, match=r"log\.jsonl cannot be written .* the 4 entries before are safe"):
            costs.run(str(log))
        with pytest.raises(WriteError, match=r"old\.json cannot be written .* what was there before is unchanged") as raised:
            costs.run(out=str(tmp_path / "old.json"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log.read_bytes() == kept
    assert (tmp_path / "old.json").read_text() == "old"
    assert raised.value.policy == costs.run()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "old.json"]
    costs.run(str(log))
    assert log.read_bytes() == whole


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"ks": (1, 2)}, "the policy space"),
        ({"modes": ("preserve",)}, "the policy space"),
        ({"seed": 1}, "the seed"),
        ({"metric": "agreement"}, "the metric"),
        ({"rounds": 3}, "how speed is measured"),
    ],
)
def test_a_log_of_another_search_is_refused_and_kept(tmp_path, options, part):
    log = tmp_path / "log.jsonl"
    costs.run(str(log), time_limit=60)
    before = log.read_bytes()
    with pytest.raises(SearchError, match=rf"log\.jsonl is the log of another search: {part}"):
        costs.run(str(log), **options)
    assert log.read_bytes() == before


def test_a_log_of_another_model_or_other_data_or_another_machine_is_refused(tmp_path, monkeypatch):
    log = str(tmp_path / "log.jsonl")
    options = {"ks": (2,), "cost": costs.cost, "max_drop": 1, "progress": False, "backend": "reference", "log": log}
    net = csnn()
    sj_tac.search(net, costs.X, **options)
    with torch.no_grad():
        net[0].weight[0, 0, 0, 0] += 1
    with pytest.raises(SearchError, match=r"the model \(its structure or its weights\) differs"):
        sj_tac.search(net, costs.X, **options)
    with pytest.raises(SearchError, match="the batches differs"):
        sj_tac.search(csnn(), 1 - costs.X, **options)
    monkeypatch.setattr("sj_tac.tuning.search.this_machine", lambda: "another")
    with pytest.raises(SearchError, match=r"the machine .* differs, .* there and 'another' here"):
        sj_tac.search(csnn(), costs.X, **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a diary\n", "is no search log"),
        (b"half a line of a diary, longer than any header begins", "is no search log"),
        (b'{"kind": "recipes"}\n', "is no search log"),
        (b'{"kind": "sj_tac search log", "version": 9}\n', "of version 9; this one writes version 1"),
        (b"[1, 2]\n", "is no search log"),
        (b"first line\nand a last one without a newline", "is no search log"),
        (b"PK\x03\x04\x00\x80binary\n\xff\xfe and its directory", "is no search log"),
        (b'{"name": 1}\n{"name": 2}\n{"name"', "is no search log"),
        (b'{"kind": "sj_tac search log", "version": 1, and then something else', "is no search log"),
        (b'{"kind": "sj_tac search log", "version": 1, "seed": 9}\n{"name": ', "is the log of another search"),
    ],
)
def test_other_files_are_not_taken_for_logs_and_not_touched(tmp_path, content, message):
    log = tmp_path / "x"
    log.write_bytes(content)
    with pytest.raises(SearchError, match=message):
        costs.run(str(log))
    assert log.read_bytes() == content


def test_damage_in_the_middle_and_a_log_in_use_are_named(tmp_path):
    log = tmp_path / "log.jsonl"
    costs.run(str(log))
    found = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*found[:3], b"{broken\n", *found[4:]]))
    with pytest.raises(SearchError, match="is damaged in line 4"):
        costs.run(str(log))
    with pytest.raises(WriteError, match="cannot be opened"):
        costs.run(str(tmp_path))
    import fcntl

    log.write_bytes(b"".join(found))
    with log.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SearchError, match="is in use by another search"):
            costs.run(str(log))
