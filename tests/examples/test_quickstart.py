"""The quickstart's promises, on the data and the checkpoints that are shipped."""

import json
import sys

import datasets
import nets
import numpy as np
import pytest
import quickstart
import torch
import train
from spikingjelly.activation_based import functional

import sj_tac
from sj_tac.errors import BatchNormMovedWarning

DIGITS = {"preserve k=2": 1.0, "preserve k=4": 1.0, "collapse k=4": 1.0, f"collapse k=T={nets.DIGITS_T}": 1.5}
EVENTS = {"preserve k=2": 97, "preserve k=4": 97}


@pytest.fixture(scope="module")
def digits():
    return quickstart.digits()


@pytest.fixture(scope="module")
def events():
    return quickstart.events()


def test_digits_keep_their_accuracy_without_fine_tuning(digits):
    assert len(digits.labels) >= 1000
    rows = quickstart.measured(digits, 1)
    source = rows[quickstart.SOURCE]
    assert source.accuracy > 0.95
    for name, allowed in DIGITS.items():
        assert 100 * (source.accuracy - rows[name].accuracy) <= allowed, name
        assert rows[name].macs < source.macs
        assert rows[name].firing > 0.01


def test_events_keep_their_predictions_without_fine_tuning(events):
    assert len(events.labels) == 100
    rows = quickstart.measured(events, 1)
    assert rows[quickstart.SOURCE].accuracy > 0.9
    for name, wanted in EVENTS.items():
        assert round(100 * rows[name].agreement) >= wanted, name


def fine_tune(net, frames, labels, steps):
    """Losses of some steps of plain fine-tuning, dropout off."""
    for module in net.modules():
        if "Dropout" in type(module).__name__:
            module.p = 0.0
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    losses = []
    net.train()
    for i in range(steps):
        chosen = torch.arange(i * 25, i * 25 + 25) % len(labels)
        functional.reset_net(net)
        scores = net(frames[:, chosen]).mean(0)
        loss = torch.nn.functional.mse_loss(scores, torch.nn.functional.one_hot(labels[chosen], 10).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    functional.reset_net(net)
    return losses


def test_fine_tuning_with_frozen_bn_and_back_into_the_source_class(events):
    torch.manual_seed(0)
    frames, labels = events.frames, events.labels
    fast = sj_tac.convert(events.net, "preserve", 16)
    sj_tac.freeze_bn(fast)
    losses = fine_tune(fast, frames[:, :75], labels[:75], 30)
    assert sum(losses[-6:]) < 0.7 * sum(losses[:6])
    source = nets.EventNet().eval()
    source.load_state_dict(fast.state_dict(), strict=True)
    with torch.no_grad():
        right = (quickstart.predict(source, frames[:, 75:]) == labels[75:]).float().mean()
    assert right >= 0.8


def test_fine_tuning_with_moving_bn_is_reported(events):
    fast = sj_tac.convert(events.net, "preserve", 4)
    fine_tune(fast, events.frames, events.labels, 1)
    with pytest.warns(BatchNormMovedWarning, match=r"features\.0.*freeze_bn"):
        sj_tac.restore(fast)


def test_the_script_prints_a_table_and_draws(digits, events, monkeypatch, tmp_path, capsys):
    small = [quickstart.Task(t.title, t.net, t.frames[:, :20], t.labels[:20]) for t in (digits, events)]
    monkeypatch.setattr(quickstart, "digits", lambda count: small[0])
    monkeypatch.setattr(quickstart, "events", lambda: small[1])
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--png", str(tmp_path / "q.png"), "--rounds", "1"])
    quickstart.main()
    printed = capsys.readouterr().out
    for words in (
        "accuracy",
        "agreement",
        "firing rate",
        "MACs",
        "speed-up",
        "collapse k=T=16",
        "mixed.yaml",
        "numba, fused",
    ):
        assert words in printed, words
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")


def test_shipped_data_is_small_and_attributed():
    root = quickstart.HERE
    shipped = [*root.joinpath("data").iterdir(), *root.joinpath("checkpoints").iterdir()]
    assert sum(f.stat().st_size for f in shipped) < 4_000_000
    provenance = root.joinpath("data", "PROVENANCE.md").read_text()
    assert all(f.name in provenance for f in shipped if f.suffix in (".npz", ".pt"))


def write_idx(path, array):
    import gzip

    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def test_training_scripts_run_on_a_little_of_the_real_data(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "CHECKPOINTS", tmp_path / "checkpoints")
    monkeypatch.setattr(datasets, "SHIPPED_EVENTS", tmp_path / "events.npz")
    monkeypatch.setattr(datasets, "SHIPPED_DIGITS", tmp_path / "digits.npz")
    archive = datasets.read_recordings(quickstart.HERE / "data" / "nmnist_test_100.npz")
    archive["is_test"] = np.arange(100) % 4 == 0
    few = datasets.pack_recordings(archive, np.arange(100) < 40)
    np.savez_compressed(tmp_path / "few.npz", **few)
    assert few["is_test"].sum() == 10
    again, labels = datasets.event_frames(few, 4)
    assert torch.equal(again, datasets.event_frames(archive, 4)[0][:, :40])
    assert again.sum() == few["offsets"][-1]
    monkeypatch.setattr(
        sys, "argv", ["train.py", "events", "--data", str(tmp_path / "few.npz"), "--epochs", "1", "--out", str(tmp_path)]
    )
    train.main()
    nets.EventNet().load_state_dict(torch.load(tmp_path / "checkpoints" / "events.pt", weights_only=True))

    images, labels = datasets.shipped_digits() if datasets.SHIPPED_DIGITS.exists() else mnist_part()
    for split in ("train", "t10k"):
        write_idx(tmp_path / f"{split}-images-idx3-ubyte.gz", (images[:60] * 255).byte().numpy())
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte.gz", labels[:60].byte().numpy())
    monkeypatch.setattr(
        sys, "argv", ["train.py", "digits", "--data", str(tmp_path), "--epochs", "1", "--out", str(tmp_path)]
    )
    train.main()
    nets.DigitNet().load_state_dict(torch.load(tmp_path / "checkpoints" / "digits.pt", weights_only=True))


def mnist_part():
    with np.load(quickstart.HERE / "data" / "mnist_test_1000.npz") as data:
        return torch.from_numpy(data["images"]).float() / 255, torch.from_numpy(data["labels"]).long()


def test_damaged_data_is_named(tmp_path):
    import gzip

    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(b"\x00\x00\x0d\x01" + b"\x00" * 12))
    with pytest.raises(ValueError, match=r"t10k-images.*is no idx file of uint8"):
        datasets.read_idx(path)
    path.write_bytes(gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x09abc"))
    with pytest.raises(ValueError, match=r"holds 3 values where its header promises \(9,\); download it again"):
        datasets.read_idx(path)


def test_reports_of_the_quickstart_are_plain_data(events):
    fast = sj_tac.convert(events.net, quickstart.MIXED, example_input=events.frames[:, :1])
    values = json.loads(sj_tac.report(fast).to_json())
    assert [(v["status"], v["k"]) for v in values["verdicts"]] == [("converted", 1), ("converted", 4), ("converted", 4)]
