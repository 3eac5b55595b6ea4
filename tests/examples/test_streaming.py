"""examples/streaming.py: a recording in micro-batches is the recording in one call, where they are whole groups."""

import os
import re
import sys
from functools import partial
from pathlib import Path

import datasets
import dvs128
import nets
import pytest
import quickstart
import streaming
import torch
from datasets import DataError
from short_runs import generated_gestures, gesture_folder
from spikingjelly.activation_based import functional
from torch import nn

import sj_tac


@pytest.fixture(scope="module")
def recordings():
    frames, labels = datasets.shipped_events(nets.EVENTS_T)
    return frames[:, :4].contiguous(), labels[:4]


@pytest.fixture(scope="module")
def source():
    return quickstart.load(nets.EventNet(), "events")


@pytest.mark.parametrize(("k", "chunk"), [(1, 1), (2, 2), (4, 4), (4, 8), (8, 8), (3, 6), (5, 5)])
def test_whole_groups_are_the_whole_recording(source, recordings, k, chunk):
    """32 frames: the last micro-batch of 5 and of 6 is short, as the last group of one call is."""
    frames, _ = recordings
    net = sj_tac.convert(source, "preserve", k)
    with torch.no_grad():
        functional.reset_net(net)
        expected = net(frames)
        functional.reset_net(net)
    steps = list(streaming.stream(net, frames, chunk))
    assert streaming.is_whole(len(frames), chunk, k)
    assert [step.until for step in steps] == [*range(chunk, 32, chunk), 32]
    assert expected.sum() > 0
    # A convolution of fewer frames may add up in another order: spikes that tip over are counted.
    differing = (torch.cat([step.votes for step in steps]) != expected).float().mean()
    assert differing <= 1e-3
    found = streaming.run(net, frames, chunk)
    assert found.agreeing == 4
    assert "are whole groups" in streaming.told(found, 32, chunk, k, 4)


@pytest.mark.parametrize(("k", "chunk"), [(4, 6), (4, 2), (8, 1)])
def test_other_micro_batches_are_something_else_and_say_so(source, recordings, k, chunk):
    frames, _ = recordings
    net = sj_tac.convert(source, "preserve", k)
    found = streaming.run(net, frames, chunk)
    assert not streaming.is_whole(32, chunk, k)
    assert found.difference > 0
    said = streaming.told(found, 32, chunk, k, 4)
    assert f"NO whole groups of k={k}" in said
    assert f"Take a multiple of {k}" in said


def test_voltages_are_carried_and_the_net_is_left_at_rest(source, recordings):
    frames, _ = recordings
    net = sj_tac.convert(source, "preserve", 4)
    votes = torch.cat([step.votes for step in streaming.stream(net, frames, 4)])
    alone = [streaming.whole(net, piece) for piece in frames.split(4)]
    assert not torch.equal(votes, torch.cat(alone))
    again = torch.cat([step.votes for step in streaming.stream(net, frames, 4)])
    assert torch.equal(votes, again)


def test_predictions_over_time_are_those_of_the_frames_seen(source, recordings):
    frames, labels = recordings
    net = sj_tac.convert(source, "preserve", 4)
    found = streaming.run(net, frames, 4)
    assert found.predictions.shape == (8, 4)
    for i, until in enumerate(found.until):
        seen = torch.stack([streaming.whole(net, frames[:until, n : n + 1])[:, 0].mean(0).argmax() for n in range(4)])
        assert torch.equal(found.predictions[i], seen)
    assert (found.predictions[-1] == labels).float().mean() >= 0.75


def test_the_largest_k_within_the_budget_is_chosen():
    def made(k, wait, call):
        return streaming.Candidate(k, wait, call)

    candidates = [made(1, 10.0, 2.0), made(2, 20.0, 2.5), made(4, 40.0, 3.0), made(8, 80.0, 4.0)]
    assert streaming.chosen(candidates, 50).k == 4
    assert streaming.chosen(candidates, 43).k == 4
    assert streaming.chosen(candidates, 42.9).k == 2
    with pytest.raises(DataError, match=r"the least is 12.0 ms at k=1, of which a frame of the camera takes 10.0$"):
        streaming.chosen(candidates, 11)
    with pytest.raises(DataError, match="the camera is faster than the net"):
        streaming.chosen([made(1, 1.0, 2.0)], 50)
    # A larger k keeps up where a smaller one does not.
    assert streaming.chosen([made(1, 1.0, 2.0), made(4, 4.0, 2.5)], 50).k == 4


def test_percentiles_are_those_of_the_calls(recordings):
    found = streaming.Streamed([4], torch.zeros(1, 1), [float(ms) for ms in range(101)], 0.0, 1)
    assert found.percentiles() == {50: 50.0, 95: 95.0, 99: 99.0}


def test_how_long_a_frame_lasts():
    archive = datasets.read_recordings(datasets.SHIPPED_EVENTS)
    first = archive["dt_us"][: archive["offsets"][1]].sum() / 1000
    assert 200 < first < 400
    assert streaming.frame_milliseconds(None, 32) == pytest.approx(300 / 32, rel=0.1)


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["streaming.py", *map(str, arguments)])
    streaming.main()


def test_the_script_prints_and_draws(monkeypatch, tmp_path, capsys):
    png = tmp_path / "out.png"
    call(monkeypatch, "--k", 4, "--chunk", 6, "--recordings", 2, "--png", png)
    said = " ".join(capsys.readouterr().out.split())
    assert "NO whole groups of k=4" in said
    assert "p95" in said
    assert "p99" in said
    assert png.stat().st_size > 5000


@pytest.fixture
def gesture_net(tmp_path, monkeypatch):
    """A small net in the place of the 5 blocks of 128 channels, and its checkpoint; its neurons fire."""
    small = partial(nets.GestureNet, channels=4, blocks=2)
    monkeypatch.setattr(nets, "GestureNet", small)
    torch.manual_seed(0)
    net = small(dvs128.CLASSES, size=32)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.bias, 0.0, 2.0)
    with torch.no_grad():
        net.classifier[2].weight.mul_(4)
        net.classifier[2].bias.uniform_(0.0, 3.0)
    torch.save(net.state_dict(), tmp_path / "gestures.pt")
    return net.eval()


def on_gestures(tmp_path, *more):
    asked = ("--layout", "dvs128", "--data", tmp_path, "--checkpoint", tmp_path / "gestures.pt", "--frame-ms", 50)
    return (*asked, "--size", 32, "--png", tmp_path / "out.png", *more)


def test_gestures_as_tonic_lays_them_out(gesture_net, monkeypatch, tmp_path, capsys):
    pytest.importorskip("tonic")
    gesture_folder(tmp_path, generated_gestures(4000))
    seen = []
    run = streaming.run
    monkeypatch.setattr(streaming, "run", lambda net, frames, chunk: seen.append(frames) or run(net, frames, chunk))
    call(monkeypatch, *on_gestures(tmp_path, "--steps", 8, "--recordings", 3, "--budget-ms", 400))
    said = " ".join(capsys.readouterr().out.split())
    # The largest k whose frames and call fit: 8 frames of 50 ms leave no time for the net.
    assert re.search(r"│ 4 │ 200\.0 │ [\d.]+ │ 2[\d.]+ │ yes │ │ 8 │ 400\.0 │ [\d.]+ │ 4[\d.]+ │ no │", said)
    assert "6 micro-batches of 4 frames" in said
    assert "are whole groups of k=4" in said
    assert "predictions are the same in 3 of 3 recordings" in said
    assert (tmp_path / "out.png").stat().st_size > 5000
    (frames,) = seen
    assert frames.shape == (8, 3, 2, 32, 32)
    assert 3900 <= frames[:, 0].sum() <= 4000  # tonic leaves out what is behind the last whole microsecond
    assert streaming.whole(gesture_net, frames).sum() > 0


FRAGMENT = "dvs128gesture-fragments/EDABK_stimuli_class2_user29_lab.txt"


@pytest.mark.skipif(
    not (Path(os.environ.get("SJ_TAC_DATA", "")) / FRAGMENT).is_file(), reason=f"SJ_TAC_DATA names no folder with {FRAGMENT}"
)
def test_a_real_gesture(gesture_net, monkeypatch, tmp_path, capsys):
    """Ten frames of 50 ms, 32 x 32, of a recording of the data set, as events again: what is streamed is those frames."""
    pytest.importorskip("tonic")
    lines = (Path(os.environ["SJ_TAC_DATA"]) / FRAGMENT).read_text().splitlines()
    bits = torch.tensor([[int(c) for c in line] for line in lines if line[:1] in ("0", "1")]).view(10, 32, 32)
    t, y, x = bits.nonzero().T.double()
    # An event for each pixel; the last one ends the recording after ten whole frames.
    events = torch.stack([4 * x, 4 * y, torch.ones_like(x), 50 * t + 25], 1)
    events[0, 3] = 0
    last = events[-1].clone()
    last[3] = 500
    gesture_folder(tmp_path, [torch.cat([events, last[None]]).numpy()] * 11)
    seen = []
    run = streaming.run
    monkeypatch.setattr(streaming, "run", lambda net, frames, chunk: seen.append(frames) or run(net, frames, chunk))
    call(monkeypatch, *on_gestures(tmp_path, "--steps", 10, "--recordings", 1, "--k", 2))
    assert "whole groups of k=2" in capsys.readouterr().out
    assert torch.equal(seen[0][:, 0, 1], bits.float())
    assert not seen[0][:, 0, 0].any()


def test_a_folder_without_gestures_and_another_checkpoint_are_one_sentence(gesture_net, monkeypatch, tmp_path):
    pytest.importorskip("tonic")
    monkeypatch.setattr(
        "tonic.dataset.download_and_extract_archive", lambda *a, **k: (_ for _ in ()).throw(OSError("offline"))
    )
    with pytest.raises(DataError, match="tonic finds no DVS128 Gesture under"):
        call(monkeypatch, *on_gestures(tmp_path))
    gesture_folder(tmp_path, generated_gestures(100))
    torch.save({}, tmp_path / "gestures.pt")
    with pytest.raises(DataError, match=r"gestures.pt does not fit"):
        call(monkeypatch, *on_gestures(tmp_path, "--steps", 4))


def test_live_without_a_window_says_so_and_writes_the_plot(monkeypatch, tmp_path, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    png = tmp_path / "out.png"
    call(monkeypatch, "--k", 8, "--recordings", 1, "--live", "--png", png)
    said = " ".join(capsys.readouterr().out.split())
    assert "No window: matplotlib's backend here is agg" in said
    assert png.stat().st_size > 5000


def test_live_draws_every_micro_batch_at_the_cameras_pace(source, recordings, monkeypatch):
    """As with a window, but that the pauses are counted and not waited for."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.setattr(streaming, "HEADLESS", ())
    frames, _ = recordings
    plot = streaming.Plot(live=True)
    assert plot.live
    drawn = []

    def pause(seconds):
        lines = plot.votes.get_lines()
        drawn.append((seconds, torch.stack([torch.tensor(line.get_ydata()) for line in lines])))

    monkeypatch.setattr(plot.pyplot, "pause", pause)
    net = sj_tac.convert(source, "preserve", 8)
    plot.follow(net, frames[:, :1], 8, 1e6)
    votes = torch.cat([step.votes for step in streaming.stream(net, frames[:, :1], 8)])[:, 0]
    assert [len(shown[0]) for _, shown in drawn] == [1, 2, 3, 4]
    for i, (seconds, shown) in enumerate(drawn):
        assert 7000 < seconds < 8000  # 8 frames of 1,000 s less the call
        torch.testing.assert_close(shown[:, -1], votes[: 8 * (i + 1)].mean(0).double(), rtol=1e-5, atol=1e-6)
    plot.pyplot.close(plot.figure)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layout", "dvs128"], "needs --data, --checkpoint"),
        (["--checkpoint", "missing.pt"], "--checkpoint missing.pt does not fit EventNet"),
    ],
)
def test_wrong_input_is_one_sentence(monkeypatch, arguments, words):
    with pytest.raises(DataError, match=words):
        call(monkeypatch, *arguments)


@pytest.mark.parametrize("arguments", [["--chunk", 0], ["--budget-ms", "nan"], ["--frame-ms", -1], ["--recordings", 0]])
def test_numbers_that_can_mean_nothing_end_at_once(monkeypatch, capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err
