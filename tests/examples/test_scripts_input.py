"""What the paper's scripts say about data that is missing or damaged, and about options that mean nothing."""

import gzip

import datasets
import dvs_gesture
import nmnist
import numpy as np
import pytest
import rate_coded
import torch
from short_runs import SMALL, failure, write_idx


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("train-images-idx3-ubyte.gz", lambda b: b[: len(b) // 2], r"train-images-idx3-ubyte.gz is damaged"),
        ("train-images-idx3-ubyte.gz", lambda b: b"", "begins with nothing"),
        ("t10k-labels-idx1-ubyte.gz", lambda b: gzip.compress(gzip.decompress(b)[:-3]), "header promises"),
        ("t10k-labels-idx1-ubyte.gz", lambda b: gzip.compress(b"\0\0\x0d\1\0\0\0\1abcd"), "no idx file of uint8"),
    ],
)
def test_damaged_images_are_named(name, change, text, digits, tmp_path, monkeypatch, capsys):
    (digits / name).write_bytes(change((digits / name).read_bytes()))
    said = failure(monkeypatch, capsys, rate_coded, "--data", digits, "--out", tmp_path / "run", *SMALL)
    assert text in said
    assert name in said
    assert not (tmp_path / "run").exists()


def test_images_of_another_shape_or_none(digits, tmp_path, monkeypatch, capsys):
    write_idx(digits / "train-images-idx3-ubyte.gz", np.zeros((96, 32, 32)))
    said = failure(monkeypatch, capsys, rate_coded, "--data", digits, *SMALL)
    assert "[96, 32, 32], expected [N, 28, 28]" in said
    (digits / "train-images-idx3-ubyte.gz").unlink()
    assert "does not exist" in failure(monkeypatch, capsys, rate_coded, "--data", digits, *SMALL)


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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--epochs", 0), "--epochs 0: at least 1"),
        (("--rate", "nan"), "--rate nan"),
        (("--ks", 1), "k=1 is the baseline"),
        (("--steps", 0), "--steps 0"),
        (("--device", "cuda"), "sees no GPU"),
        (("--policy", "none.yaml"), "none.yaml"),
    ],
)
def test_options_that_can_mean_nothing(arguments, text, monkeypatch, capsys, tmp_path):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said = failure(monkeypatch, capsys, nmnist, "--out", tmp_path, "--quick", *arguments)
    assert text in said
    assert not list(tmp_path.iterdir())
