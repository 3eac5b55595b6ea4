"""The scripts of the paper's experiments: help, a short run on small data, a kill in mid-epoch, and what bad data gets."""

import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import command
import datasets
import dvs128
import dvs_gesture
import finetune
import gestures
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
from spikingjelly.activation_based import neuron

from sj_tac.runtime.values import Shared

EXAMPLES = Path(rate_coded.__file__).resolve().parent
SCRIPTS = {"rate_coded": rate_coded, "dvs_gesture": dvs_gesture, "nmnist": nmnist, "finetune": finetune}


def write_idx(path, values):
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


@pytest.fixture
def digits(tmp_path):
    """The shipped real digits as the four files of MNIST: 96 to train on, 40 to test."""
    images, labels = datasets.shipped_digits()
    images = (images * 255).round().numpy()
    folder = tmp_path / "mnist"
    folder.mkdir()
    for split, rows in (("train", slice(0, 96)), ("t10k", slice(96, 136))):
        write_idx(folder / f"{split}-images-idx3-ubyte.gz", images[rows])
        write_idx(folder / f"{split}-labels-idx1-ubyte.gz", labels[rows].numpy())
    return folder


def call(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, arguments)])
    command.run(module.main)


def failure(monkeypatch, capsys, module, *arguments):
    """What a call that must fail says on stderr."""
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, module, *arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


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


SMALL = ("--quick", "--epochs", 1, "--tune-epochs", 1, "--ks", 2, "--rounds", 1)


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
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    recorded = [gestures.record(gestures.draw(label, generator), rng)[:400] for label in range(11)]
    root = tmp_path / "data" / "DVSGesture"
    for part in ("Train", "Test"):
        for user in range(1, 11):
            folder = root / f"ibmGesture{part}" / f"user{user:02}_lab"
            folder.mkdir(parents=True)
            for label, events in enumerate(recorded):
                columns = np.stack([events["x"], events["y"], events["p"], events["t"] // 1000], 1)
                np.save(folder / f"{label}.npy", columns.astype(np.float64))
        (root / f"ibmGesture{part}.tar.gz").write_bytes(b"")
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


def started(arguments, cwd):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command_line = [sys.executable, str(EXAMPLES / arguments[0]), *map(str, arguments[1:])]
    return subprocess.Popen(
        command_line, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("script", ["rate_coded", "nmnist", "dvs_gesture", "finetune"])
def test_a_kill_in_mid_epoch_costs_nothing(script, digits, tmp_path):
    data = {
        "rate_coded": ["--data", digits, "--steps", 4, "--batch", 6],
        "nmnist": ["--steps", 4, "--batch", 5],
        "dvs_gesture": [
            "--synthetic",
            "--train-samples",
            66,
            "--test-samples",
            22,
            "--size",
            16,
            "--steps",
            8,
            "--batch",
            4,
        ],
        "finetune": ["--epochs", 1],
    }[script]
    study_only = ["--rows", "baseline", "--epochs", 1, "--tune-epochs", 1, "--rounds", 1, "--quick", "--threads", 1]
    arguments = [f"{script}.py", *data, "--save-every", 0, *([] if script == "finetune" else study_only)]
    out = tmp_path / "killed"
    running = started([*arguments, "--out", out], tmp_path)
    deadline, middle = time.monotonic() + 120, False
    while not middle and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.01)
        for path in out.rglob("last.pt"):
            history = torch.load(path, weights_only=True)["history"]
            middle = history["step"] > 0
    running.send_signal(signal.SIGKILL)
    said, _ = running.communicate()
    assert middle, said
    whole = tmp_path / "whole"
    outputs = []
    for folder in (out, whole):
        done = started([*arguments, "--out", folder], tmp_path)
        outputs.append(done.communicate()[0])
        assert done.returncode == 0, outputs[-1]
    killed, expected = ({p.relative_to(f): p for p in sorted(f.rglob("last.pt"))} for f in (out, whole))
    assert list(killed) == list(expected)
    assert killed
    for name, path in killed.items():
        ours, theirs = (torch.load(p, weights_only=True)["net"] for p in (path, expected[name]))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name


def damaged_digits(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("train-images-idx3-ubyte.gz", lambda b: b[: len(b) // 2], r"train-images-idx3-ubyte.gz is damaged"),
        ("train-images-idx3-ubyte.gz", lambda b: b"", "begins with nothing"),
        ("t10k-images-idx3-ubyte.gz", lambda b: b[:50] + bytes([b[50] ^ 255]) + b[51:], "t10k-images-idx3-ubyte.gz"),
        ("t10k-labels-idx1-ubyte.gz", lambda b: b"<html>404</html>", "t10k-labels-idx1-ubyte.gz is damaged"),
        ("t10k-labels-idx1-ubyte.gz", lambda b: gzip.compress(gzip.decompress(b)[:-3]), "header promises"),
        ("t10k-labels-idx1-ubyte.gz", lambda b: gzip.compress(b"\0\0\x0d\1\0\0\0\1abcd"), "no idx file of uint8"),
    ],
)
def test_damaged_images_are_named(name, change, text, digits, tmp_path, monkeypatch, capsys):
    damaged_digits(digits, name, change)
    said = failure(monkeypatch, capsys, rate_coded, "--data", digits, "--out", tmp_path / "run", *SMALL)
    assert text in said
    assert name in said
    assert not (tmp_path / "run").exists()


def test_images_of_another_shape_and_labels_that_do_not_fit(digits, tmp_path, monkeypatch, capsys):
    write_idx(digits / "train-images-idx3-ubyte.gz", np.zeros((96, 32, 32)))
    said = failure(monkeypatch, capsys, rate_coded, "--data", digits, *SMALL)
    assert "[96, 32, 32], expected [N, 28, 28]" in said
    write_idx(digits / "train-images-idx3-ubyte.gz", np.zeros((95, 28, 28)))
    assert "95 images and labels of shape [96]" in failure(monkeypatch, capsys, rate_coded, "--data", digits, *SMALL)
    (digits / "train-images-idx3-ubyte.gz").unlink()
    said = failure(monkeypatch, capsys, rate_coded, "--data", digits, *SMALL)
    assert "does not exist" in said
    assert "four idx.gz files" in said


def test_recordings_that_are_missing_or_damaged(tmp_path, monkeypatch, capsys):
    said = failure(monkeypatch, capsys, nmnist, "--data", tmp_path / "none.npz", *SMALL)
    assert "none.npz does not exist" in said
    cut = tmp_path / "cut.npz"
    cut.write_bytes(datasets.SHIPPED_EVENTS.read_bytes()[:5000])
    assert "cut.npz is no whole .npz" in failure(monkeypatch, capsys, nmnist, "--data", cut, *SMALL)
    other = tmp_path / "other.npz"
    np.savez(other, x=np.zeros(3))
    assert "lacks dt_us, is_test, label" in failure(monkeypatch, capsys, nmnist, "--data", other, *SMALL)
    archive = datasets.read_recordings(datasets.SHIPPED_EVENTS)
    np.savez(other, **{**archive, "x": archive["x"][:-1]})
    assert "do not fit" in failure(monkeypatch, capsys, nmnist, "--data", other, *SMALL)
    said = failure(monkeypatch, capsys, nmnist, "--hold-out", 95, *SMALL)
    assert "--hold-out 95 of 100" in said


def test_dvs128_that_cannot_be_had_says_what_to_do(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tonic")
    monkeypatch.setattr(
        "tonic.dataset.download_and_extract_archive", lambda *a, **k: (_ for _ in ()).throw(OSError("offline"))
    )
    said = failure(monkeypatch, capsys, dvs_gesture, "--data", tmp_path / "none", *SMALL)
    assert "cannot download it (OSError: offline)" in said
    assert "--synthetic" in said
    for broken in (None, RuntimeError("PyTorch and TorchAudio were compiled with different CUDA versions")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "spikingjelly.datasets.dvs128_gesture", None)
            if broken is not None:
                patch.setattr("builtins.__import__", raising(broken))
            said = failure(monkeypatch, capsys, dvs_gesture, "--data", tmp_path, "--library", "spikingjelly", *SMALL)
        assert "spikingjelly.datasets cannot be imported" in said
        assert "--library tonic" in said


def raising(error):
    real = __import__

    def importing(name, *arguments, **keywords):
        if name.startswith("spikingjelly.datasets"):
            raise error
        return real(name, *arguments, **keywords)

    return importing


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--epochs", 0), "--epochs 0: at least 1"),
        (("--rate", -1), "--rate -1"),
        (("--rate", "nan"), "--rate nan"),
        (("--ks", 1), "k=1 is the baseline"),
        (("--steps", 0), "--steps 0"),
        (("--device", "cuda"), "sees no GPU"),
        (("--policy", "none.yaml"), "none.yaml"),
        (("--rows", "tac"), "invalid choice"),
    ],
)
def test_options_that_can_mean_nothing(arguments, text, monkeypatch, capsys, tmp_path):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said = failure(monkeypatch, capsys, nmnist, "--out", tmp_path, "--quick", *arguments)
    assert text in said
    assert not list(tmp_path.iterdir())


def test_a_damaged_result_is_named(digits, tmp_path, monkeypatch, capsys):
    options = ("--data", digits, "--out", tmp_path / "run", "--steps", 4, "--rows", "baseline", *SMALL)
    call(monkeypatch, rate_coded, *options)
    (path, _) = sorted((tmp_path / "run").rglob("result.json"))
    path.write_text(path.read_text()[:40])
    assert "result.json is damaged" in failure(monkeypatch, capsys, rate_coded, *options)


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
