"""What the paper's scripts say about data that is missing or damaged, and about options that mean nothing."""

import gzip
import sys

import datasets
import dvs_gesture
import nmnist
import numpy as np
import pytest
import rate_coded
import torch
from short_runs import SMALL, call, failure, write_idx


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
