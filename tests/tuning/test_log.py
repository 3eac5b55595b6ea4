"""The search log: what a kill leaves, full disks, half lines, other searches' logs."""

import fcntl
import json
import resource

import costs
import pytest
import torch
from support import csnn

import sj_tac
from sj_tac.errors import SearchError, WriteError

SMALL = {"ks": (1, 4), "modes": ("preserve",)}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_half_a_last_line_is_cut_and_measured_again(tmp_path):
    log = tmp_path / "log.jsonl"
    first = costs.run(str(log), **SMALL)
    whole = log.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in (1, last, last + 7, len(whole) - 20):  # within the last line, one and a bit, in the header
        log.write_bytes(whole[:-cut])
        assert costs.run(str(log), **SMALL) == first
        assert log.read_bytes() == whole
    names = [entry["name"] for entry in lines(log) if "name" in entry]
    assert names == [t.name for t in first.evidence.trials]


def test_a_full_disk_keeps_what_was_measured(tmp_path):
    log = tmp_path / "log.jsonl"
    first = costs.run(str(log), **SMALL)
    whole = log.read_bytes()
    log.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    kept = log.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "old.json").write_text("old")
    # No file may grow beyond this: the next line is written in part and fails, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept) + 10, limits[1]))
    try:
        with pytest.raises(WriteError, match=r"log\.jsonl cannot be written .* the 4 entries before are safe"):
            costs.run(str(log), **SMALL)
        with pytest.raises(WriteError, match=r"old\.json cannot be written .* what was there before is unchanged") as raised:
            costs.run(out=str(tmp_path / "old.json"), **SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log.read_bytes() == kept
    assert (tmp_path / "old.json").read_text() == "old"
    assert raised.value.policy == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "old.json"]
    costs.run(str(log), **SMALL)
    assert log.read_bytes() == whole


def test_a_log_of_another_search_is_refused_and_kept(tmp_path, monkeypatch):
    log = tmp_path / "log.jsonl"
    costs.run(str(log), time_limit=60, **SMALL)
    before = log.read_bytes()

    def refused(words, call):
        with pytest.raises(SearchError, match=rf"log\.jsonl is the log of another search: {words}"):
            call()
        assert log.read_bytes() == before

    for options, part in (
        ({"ks": (1, 2)}, "the policy space"),
        ({"modes": ("collapse",)}, "the policy space"),
        ({"seed": 1}, "the seed"),
        ({"metric": "agreement"}, "the metric"),
        ({"match": True}, "whether candidates are matched"),
        ({"rounds": 3}, "how speed is measured"),
    ):
        refused(part, lambda options=options: costs.run(str(log), **(SMALL | options)))
    net, more = csnn(), {"cost": costs.cost, "progress": False, "backend": "reference", "log": log, **SMALL}
    refused("the batches differs", lambda: sj_tac.search(net, [(1 - costs.X, costs.labels(net))], **more))
    with torch.no_grad():
        net[0].weight[0, 0, 0, 0] += 1e-3
    refused(r"the model \(its structure or its weights\)", lambda: sj_tac.search(net, costs.X, **more))
    monkeypatch.setattr("sj_tac.tuning.search.this_machine", lambda: "another")
    refused(r"the machine .* and 'another' here", lambda: costs.run(str(log), **SMALL))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a diary\n", "is no search log"),
        (b"half a line of a diary, longer than any header begins", "is no search log"),
        (b'{"kind": "recipes"}\n', "is no search log"),
        (b'{"kind": "sj_tac search log", "version": 9}\n', "of version 9; this one writes version 1"),
        (b"[1, 2]\n", "is no search log"),
        (b"PK\x03\x04\x00\x80binary\n\xff\xfe and its directory", "is no search log"),
        (b'{"kind": "sj_tac search log", "version": 1, "seed": 9}\n{"name": ', "is the log of another search"),
    ],
)
def test_other_files_are_not_taken_for_logs_and_not_touched(tmp_path, content, message):
    log = tmp_path / "x"
    log.write_bytes(content)
    with pytest.raises(SearchError, match=message):
        costs.run(str(log), **SMALL)
    assert log.read_bytes() == content


def test_damage_in_the_middle_and_a_log_in_use_are_named(tmp_path):
    log = tmp_path / "log.jsonl"
    costs.run(str(log), **SMALL)
    found = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*found[:3], b"{broken\n", *found[4:]]))
    with pytest.raises(SearchError, match="is damaged in line 4"):
        costs.run(str(log), **SMALL)
    with pytest.raises(WriteError, match="cannot be opened"):
        costs.run(str(tmp_path), **SMALL)
    log.write_bytes(b"".join(found))
    with log.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SearchError, match="is in use by another search"):
            costs.run(str(log), **SMALL)
