"""The scripts of the paper's experiments: help, a short run on small data, a kill in mid-epoch, and the files it leaves."""

import json
import sys

import dvs128
import dvs_gesture
import finetune
import nmnist
import numpy as np
import pytest
import quickstart
import rate_coded
import torch
import train
from short_runs import SMALL, call, failure, generated_gestures, gesture_folder


@pytest.mark.parametrize("module", [rate_coded, dvs_gesture, nmnist, finetune, quickstart, train], ids=lambda m: m.__name__)
def test_help_shows_a_command(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert f"python examples/{module.__name__}.py" in capsys.readouterr().out


def check_results(out, key, title):
    content = json.loads((out / "results.json").read_text())
    assert content["key"] == key
    assert title in content["title"]
    assert content["protocol"]["name"] == "quick protocol, changed"
    rows = {(r["name"], r["how"]): r for r in content["rows"]}
    assert rows["baseline", "scratch"]["to_baseline"] == 0
    assert rows["preserve", "converted"]["macs"] < rows["preserve", "converted"]["macs_before"]
    assert {how for _, how in rows} == {"scratch", "converted", "fine-tuned"}
    assert all(0 <= r["accuracy"] <= 100 for r in rows.values())
    assert rows["preserve", "converted"]["train_seconds"] == 0 < rows["preserve", "fine-tuned"]["train_seconds"]
    assert rows["collapse", "converted"]["ms"] > 0
    assert content["machine"]["torch"] == torch.__version__
    return content


def test_nmnist_on_the_shipped_recordings_trains_once_and_says_what_does_not_fit(tmp_path, monkeypatch, capsys):
    options = ("--steps", 4, "--out", tmp_path, "--tensorboard", "--rows", "preserve", "collapse", *SMALL)
    call(monkeypatch, nmnist, *options)
    assert list(tmp_path.rglob("tensorboard/*"))
    assert "30 of 100 are held out" in capsys.readouterr().out
    content = check_results(tmp_path, "nmnist", "100 recordings, 30 held out")
    assert content["train"] + content["test"] == 100
    assert (tmp_path / "results.png").stat().st_size > 10_000
    # The same command again trains nothing.
    monkeypatch.setattr("training._epoch", None)
    call(monkeypatch, nmnist, *options)
    again = json.loads((tmp_path / "results.json").read_text())
    assert [r["accuracy"] for r in again["rows"]] == [r["accuracy"] for r in content["rows"]]
    # Another protocol in the same folder is refused; a result that was damaged is named.
    assert "--out" in failure(monkeypatch, capsys, nmnist, *options, "--batch", 7)
    path = sorted(tmp_path.rglob("result.json"))[0]
    path.write_text(path.read_text()[:40])
    assert "result.json is damaged" in failure(monkeypatch, capsys, nmnist, *options)


@pytest.mark.exhaustive
def test_rate_coded_on_real_digits(digits, tmp_path, monkeypatch):
    call(monkeypatch, rate_coded, "--data", digits, "--out", tmp_path / "run", "--steps", 5, "--seeds", 0, 1, *SMALL)
    content = check_results(tmp_path / "run", "mnist", "MNIST")
    assert (content["train"], content["test"], content["seeds"]) == (96, 40, [0, 1])
    assert all(r["seeds"] == 2 and r["spread"] is not None for r in content["rows"])
    # T=5 at k=2 is 3 convolutions for 5 frames.
    (row,) = [r for r in content["rows"] if (r["name"], r["how"]) == ("TAC (paper)", "converted")]
    assert row["macs_before"] / row["macs"] == pytest.approx(5 / 3, rel=1e-3)
    more = ("--steps", 5, "--printed", "--rows", "baseline", "--fused-baseline", *SMALL)
    call(monkeypatch, rate_coded, "--data", digits, "--out", tmp_path / "printed", *more)
    content = json.loads((tmp_path / "printed" / "results.json").read_text())
    assert (content["title"], content["fused_baseline"]) == ("MNIST, printed net", True)


@pytest.mark.exhaustive
def test_gestures_with_a_policy_of_ones_own(tmp_path, monkeypatch):
    policy = tmp_path / "mine.yaml"
    policy.write_text("version: 1\ndefault: {mode: preserve}\nrules:\n  - {match: features.0, mode: keep}\n")
    sizes = ("--synthetic", "--train-samples", 22, "--test-samples", 22, "--size", 16, "--steps", 4)
    rows = ("--rows", "preserve", "--operators", "FTC", "IMC", "TCC")
    call(monkeypatch, dvs_gesture, *sizes, "--policy", policy, "--out", tmp_path / "run", *rows, *SMALL)
    content = json.loads((tmp_path / "run" / "results.json").read_text())
    rows = [(r["name"], r["how"]) for r in content["rows"]]
    assert rows == [
        ("baseline", "scratch"), ("FTC", "scratch"), ("IMC", "scratch"), ("TCC", "scratch"),
        ("preserve", "scratch"), ("preserve", "converted"), ("policy mine.yaml", "converted"),
        ("baseline", "fine-tuned"), ("preserve", "fine-tuned"), ("policy mine.yaml", "fine-tuned"),
    ]  # fmt: skip
    assert content["title"] == "generated gestures"


def test_dvs128_through_tonic(tmp_path, monkeypatch):
    """tonic's own class, on a folder laid out as its download is; the recordings are generated ones."""
    pytest.importorskip("tonic")
    gesture_folder(tmp_path / "data", generated_gestures(400))
    source = dvs128.load(tmp_path / "data", "auto", 4, 32, 0)
    assert source.split == "tonic's split, 110 / 110"
    frames, labels = next(source.train.load([torch.tensor([0, 5, 11])], [0]))
    assert frames.shape == (4, 3, 2, 32, 32)
    recordings = source.train.dataset.dataset.dataset
    assert [recordings.targets[i] for i in (0, 5, 11)] == labels.tolist()
    for n, i in enumerate((0, 5, 11)):
        events = np.load(recordings.data[i])
        times = events[:, 3] * 1000
        bins = (times - times[0]) * 4 // (times[-1] - times[0] + 1)
        expected = np.zeros((4, 2, 32, 32))
        np.add.at(expected, tuple(c.astype(int) for c in (bins, events[:, 2], events[:, 1] // 4, events[:, 0] // 4)), 1)
        assert np.array_equal(frames[:, n], expected)


@pytest.mark.exhaustive
def test_finetune_goes_on_from_where_it_was(tmp_path, monkeypatch, capsys):
    options = ("--epochs", 1, "--out", tmp_path, "--k", 8, "--bn", "moving", "--distill")
    call(monkeypatch, finetune, *options)
    said = capsys.readouterr().out
    assert "BatchNormMovedWarning" in said
    assert "of 301" in said
    monkeypatch.setattr("training._epoch", None)
    call(monkeypatch, finetune, *options)
    assert capsys.readouterr().out.splitlines() == said.splitlines()[:4]
