"""The quickstart's promises, on the data and the checkpoints that are shipped."""

import sys

import datasets
import nets
import numpy as np
import pytest
import quickstart
import torch
import train
from short_runs import write_idx
from support import time_by_k

import sj_tac

DIGITS = {"preserve k=2": 1.0, "preserve k=4": 1.0, "collapse k=4": 1.0, f"collapse k=T={nets.DIGITS_T}": 1.5}
EVENTS = {"preserve k=2": 0.97, "preserve k=4": 0.97}


@pytest.fixture(scope="module")
def events():
    return quickstart.events()


@pytest.mark.exhaustive
def test_what_the_tables_promise_without_fine_tuning_is_so(events):
    rows = quickstart.measured(digits := quickstart.digits(), 1)
    assert len(digits.labels) >= 1000
    source = rows[quickstart.SOURCE]
    assert source.accuracy > 0.95
    for name, allowed in DIGITS.items():
        assert 100 * (source.accuracy - rows[name].accuracy) <= allowed, name
        assert rows[name].macs < source.macs
        assert rows[name].firing > 0.01
    rows = quickstart.measured(events, 1)
    assert rows[quickstart.SOURCE].accuracy > 0.9
    assert all(rows[name].agreement >= least for name, least in EVENTS.items())


@torch.no_grad()
def test_a_checkpoint_keeps_its_answers_on_real_recordings(events):
    few = quickstart.Task("", events.net, events.frames[:, :50], events.labels[:50])
    source = quickstart.predict(few.net, few.frames)
    assert (source == few.labels).float().mean() > 0.9
    for name in EVENTS:
        policy, k = quickstart.policies(few)[name]
        assert (quickstart.predict(sj_tac.convert(few.net, policy, k), few.frames) == source).float().mean() >= 0.95


def test_the_script_prints_a_table_and_draws(events, monkeypatch, tmp_path, capsys):
    time_by_k(monkeypatch)
    small = [quickstart.Task(t.title, t.net, t.frames[:, :4], t.labels[:4]) for t in (quickstart.digits(4), events)]
    monkeypatch.setattr(quickstart, "digits", lambda count: small[0])
    monkeypatch.setattr(quickstart, "events", lambda: small[1])
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--png", str(tmp_path / "q.png"), "--rounds", "1"])
    quickstart.main()
    printed = capsys.readouterr().out
    for words in ("accuracy", "agreement", "firing rate", "MACs", "speed-up", "collapse k=T=16", "mixed.yaml"):
        assert words in printed, words
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")


def test_shipped_data_is_small_and_attributed():
    root = quickstart.HERE
    shipped = [*root.joinpath("data").iterdir(), *root.joinpath("checkpoints").iterdir()]
    assert sum(f.stat().st_size for f in shipped) < 4_000_000
    provenance = root.joinpath("data", "PROVENANCE.md").read_text()
    assert all(f.name in provenance for f in shipped if f.suffix in (".npz", ".pt"))


def test_training_scripts_run_on_a_little_of_the_real_data(tmp_path, monkeypatch):
    images, labels = datasets.shipped_digits()
    archive = datasets.read_recordings(datasets.SHIPPED_EVENTS)
    monkeypatch.setattr(train, "CHECKPOINTS", tmp_path / "checkpoints")
    monkeypatch.setattr(datasets, "SHIPPED_EVENTS", tmp_path / "events.npz")
    monkeypatch.setattr(datasets, "SHIPPED_DIGITS", tmp_path / "digits.npz")
    archive["is_test"] = np.arange(100) % 4 == 0
    few = datasets.pack_recordings(archive, np.arange(100) < 40)
    np.savez_compressed(tmp_path / "few.npz", **few)
    again, _ = datasets.event_frames(few, 4)
    assert torch.equal(again, datasets.event_frames(archive, 4)[0][:, :40])
    for split in ("train", "t10k"):
        write_idx(tmp_path / f"{split}-images-idx3-ubyte.gz", (images[:60] * 255).round().numpy())
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte.gz", labels[:60].numpy())
    for kind, data, made in (("events", tmp_path / "few.npz", nets.EventNet), ("digits", tmp_path, nets.DigitNet)):
        monkeypatch.setattr(sys, "argv", ["train.py", kind, "--data", str(data), "--epochs", "1", "--out", str(tmp_path)])
        train.main()
        made().load_state_dict(torch.load(tmp_path / "checkpoints" / f"{kind}.pt", weights_only=True))
