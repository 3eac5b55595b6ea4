"""The scripts of the paper's experiments: help, a short run on small data, a kill in mid-epoch, and the files it leaves."""

import json
import signal
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path

import dvs128
import dvs_gesture
import finetune
import forks
import nets
import nmnist
import numpy as np
import pytest
import quickstart
import rate_coded
import study
import torch
import train
from datasets import DataError
from short_runs import SMALL, call, failure, generated_gestures, gesture_folder
from spikingjelly.activation_based import neuron

from sj_tac.runtime.values import Shared

EXAMPLES = Path(rate_coded.__file__).resolve().parent
SCRIPTS = {"rate_coded": rate_coded, "dvs_gesture": dvs_gesture, "nmnist": nmnist, "finetune": finetune}


@pytest.mark.parametrize("name", [*SCRIPTS, "quickstart", "train"])
def test_help_shows_a_command_and_the_options(name, monkeypatch, capsys):
    module = {**SCRIPTS, "quickstart": quickstart, "train": train}[name]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"python examples/{name}.py" in said
    if name in ("rate_coded", "dvs_gesture", "nmnist"):
        for option in ("--quick", "--out", "--seeds", "--amp", "--tensorboard", "--save-every", "--device", "--rows"):
            assert option in said


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


def test_rate_coded_on_real_digits(digits, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    call(monkeypatch, rate_coded, "--data", digits, "--out", tmp_path / "run", "--steps", 5, "--seeds", 0, 1, *SMALL)
    content = check_results(tmp_path / "run", "mnist", "MNIST")
    assert (content["train"], content["test"], content["seeds"]) == (96, 40, [0, 1])
    assert all(r["seeds"] == 2 and r["spread"] is not None for r in content["rows"])
    # T=5 at k=2 is 3 convolutions for 5 frames.
    (row,) = [r for r in content["rows"] if (r["name"], r["how"]) == ("TAC (paper)", "converted")]
    assert row["macs_before"] / row["macs"] == pytest.approx(5 / 3, rel=1e-3)
    assert (tmp_path / "run" / "results.png").stat().st_size > 10_000
    # The same command again trains nothing.
    monkeypatch.setattr("training._epoch", None)
    call(monkeypatch, rate_coded, "--data", digits, "--out", tmp_path / "run", "--steps", 5, "--seeds", 0, 1, *SMALL)
    again = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [r["accuracy"] for r in again["rows"]] == [r["accuracy"] for r in content["rows"]]
    # Another protocol in the same folder is refused.
    said = failure(
        monkeypatch, capsys, rate_coded, "--data", digits, "--out", tmp_path / "run", "--steps", 5, *SMALL, "--batch", 7
    )
    assert "--out" in said


def test_the_printed_net_and_a_baseline_that_trains_fused(digits, tmp_path, monkeypatch, capsys):
    asked = ("--data", digits, "--out", tmp_path / "run", "--steps", 5, "--printed", "--rows", "baseline", *SMALL)
    call(monkeypatch, rate_coded, *asked, "--fused-baseline")
    content = json.loads((tmp_path / "run" / "results.json").read_text())
    assert content["title"] == "MNIST, printed net"
    assert content["fused_baseline"]
    rows = {(r["name"], r["how"]): r["train_seconds"] for r in content["rows"]}
    assert rows.keys() == {("baseline", "scratch"), ("baseline", "fine-tuned")}
    assert min(rows.values()) > 0
    folder = tmp_path / "run" / "seed0" / "baseline-k=1-scratch"
    source = nets.PaperImageNet(printed=True)
    source.load_state_dict(torch.load(folder / "last.pt", weights_only=True)["net"])
    assert [m.out_features for m in source.modules() if isinstance(m, torch.nn.Linear)] == [128, 10]
    # What trained another way is not taken for it.
    assert "--out" in failure(monkeypatch, capsys, rate_coded, *asked)


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
    recordings = source.train.dataset.dataset
    assert [recordings.targets[i] for i in (0, 5, 11)] == labels.tolist()
    for n, i in enumerate((0, 5, 11)):
        events = np.load(recordings.data[i])
        kept = events[events[:, 3] < events[0, 3] + 4 * ((events[-1, 3] - events[0, 3]) * 1000 // 4) / 1000]
        bins = (kept[:, 3] - kept[0, 3]) * 4 // (events[-1, 3] - events[0, 3])
        expected = np.zeros((4, 2, 32, 32))
        np.add.at(expected, tuple(c.astype(int) for c in (bins, kept[:, 2], kept[:, 1] // 4, kept[:, 0] // 4)), 1)
        assert np.abs(frames[:, n].numpy() - expected).sum() <= 0.02 * len(events)  # tonic's own rounding of bin edges
    options = ("--size", 16, "--steps", 4, "--rows", "baseline", "--batch", 55, *SMALL)
    call(monkeypatch, dvs_gesture, "--data", tmp_path / "data", "--out", tmp_path / "run", *options)
    content = json.loads((tmp_path / "run" / "results.json").read_text())
    assert content["title"] == "DVS128 Gesture (tonic's split, 110 / 110)"


def test_nmnist_on_the_shipped_recordings(tmp_path, monkeypatch, capsys):
    call(monkeypatch, nmnist, "--steps", 4, "--out", tmp_path, *SMALL)
    assert "30 of 100 are held out" in capsys.readouterr().out
    content = check_results(tmp_path, "nmnist", "100 recordings, 30 held out")
    assert content["train"] + content["test"] == 100


def bin_file(path, events):
    """N-MNIST's own format: 40 bits an event."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = b"".join(bytes([x, y, (p << 7) | (t >> 16)]) + struct.pack(">H", t & 0xFFFF) for x, y, p, t in events)
    path.write_bytes(raw)


def test_nmnist_folder_is_read_as_its_format_says(tmp_path):
    pytest.importorskip("tonic")
    bin_file(tmp_path / "Train" / "3" / "00001.bin", [(1, 2, 1, 100), (33, 0, 0, 70_000), (5, 6, 1, 200_099)])
    bin_file(tmp_path / "Test" / "7" / "00001.bin", [(0, 0, 0, 5), (1, 0, 1, 10)])
    frames, labels, is_test = nmnist.recordings(tmp_path, 2)
    assert labels.tolist() == [3, 7]
    assert is_test.tolist() == [False, True]
    expected = torch.zeros(2, 2, 2, 34, 34)
    expected[0, 0, 1, 2, 1] = expected[0, 0, 0, 0, 33] = expected[1, 0, 1, 6, 5] = 1
    expected[0, 1, 0, 0, 0] = expected[1, 1, 1, 0, 1] = 1
    assert torch.equal(frames, expected)
    bin_file(tmp_path / "Test" / "7" / "00002.bin", [(0, 0, 0, 5)])
    path = tmp_path / "Test" / "7" / "00002.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"00002\.bin is no whole N-MNIST recording \(4 bytes\)"):
        nmnist.recordings(tmp_path, 2)


def test_finetune_goes_on_from_where_it_was(tmp_path, monkeypatch, capsys):
    options = ("--epochs", 1, "--out", tmp_path, "--k", 8, "--bn", "moving", "--distill")
    call(monkeypatch, finetune, *options)
    said = capsys.readouterr().out
    assert "BatchNormMovedWarning" in said
    assert "of 301" in said
    monkeypatch.setattr("training._epoch", None)
    call(monkeypatch, finetune, *options)
    assert capsys.readouterr().out.splitlines() == said.splitlines()[:4]


# The other studies train by the same loop.
@pytest.mark.parametrize("script", ["rate_coded", "finetune"])
def test_a_kill_in_mid_epoch_costs_nothing(script, digits, tmp_path, monkeypatch):
    data = {
        "rate_coded": ["--data", digits, "--steps", 4, "--batch", 6],
        "finetune": ["--epochs", 1],
    }[script]
    study_only = ["--rows", "baseline", "--epochs", 1, "--tune-epochs", 1, "--rounds", 1, "--quick", "--threads", 1]
    options = [*data, "--save-every", 0, *([] if script == "finetune" else study_only)]
    out, whole, said = tmp_path / "killed", tmp_path / "whole", tmp_path / "said.txt"

    def started(folder):
        call = [EXAMPLES / f"{script}.py", *map(str, options), "--out", str(folder)]
        return forks.start(monkeypatch, forks.script, said, *call)

    running = started(out)
    deadline, middle = time.monotonic() + 120, False
    while not middle and time.monotonic() < deadline and running.is_alive():
        time.sleep(0.01)
        for path in out.rglob("last.pt"):
            history = torch.load(path, weights_only=True)["history"]
            middle = history["step"] > 0
    running.kill()
    running.join()
    assert middle, said.read_text()
    assert running.exitcode == -signal.SIGKILL
    for folder in (out, whole):
        done = started(folder)
        done.join()
        assert done.exitcode == 0, said.read_text()
    killed, expected = ({p.relative_to(f): p for p in sorted(f.rglob("last.pt"))} for f in (out, whole))
    assert list(killed) == list(expected)
    assert killed
    for name, path in killed.items():
        ours, theirs = (torch.load(p, weights_only=True)["net"] for p in (path, expected[name]))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name


def test_fine_tuning_can_be_left_out():
    protocol = replace(rate_coded.QUICK, tune_epochs=0)
    rows = study.all_rows(protocol, "features.0")
    assert {row.how for row in rows} == {"scratch", "converted"}
    assert [row for row in study.all_rows(rate_coded.QUICK, "features.0") if row.how != "fine-tuned"] == rows


def test_the_papers_collapse_calls_each_convolution_once_for_k_frames():
    """T = 8, k = 4: 2 frames in every layer, and the neurons behind it take one step on each."""

    def computed(x):
        return (x.expression.compact if isinstance(x, Shared) else x).shape[0]

    task = study.Task("", lambda: None, None, None)
    net = rate_coded.nets.PaperImageNet(4)
    made = study.sj_tac.convert(net.eval(), study.policies(4, task.first)["TAC (paper)"])
    seen = []
    for module in made.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(lambda m, a: seen.append(computed(a[0])))
    steps = []
    made.features[2].register_forward_hook(lambda m, a, out: steps.append(computed(out.pooled[1])))
    with torch.no_grad():
        made(torch.rand(8, 1, 1, 28, 28))
    assert seen == [8, 2] or seen == [2, 2]
    assert isinstance(made.features[2], neuron.LIFNode)
    assert steps == [2]
