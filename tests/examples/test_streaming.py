"""examples/streaming.py: a recording in micro-batches is the recording in one call, where they are whole groups."""

import datasets
import nets
import pytest
import quickstart
import streaming
import torch
from datasets import DataError
from short_runs import call, failure
from spikingjelly.activation_based import functional

import sj_tac


@pytest.fixture(scope="module")
def recordings():
    # In float64, in which the order of a sum moves no spike across a threshold.
    frames, labels = datasets.shipped_events(nets.EVENTS_T)
    return frames[:, :4].double().contiguous(), labels[:4]


@pytest.fixture(scope="module")
def source():
    return quickstart.load(nets.EventNet(), "events").double()


@pytest.mark.parametrize(("k", "chunk"), [(1, 1), (4, 8), (3, 6), (5, 5)])
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
    torch.testing.assert_close(torch.cat([step.votes for step in steps]), expected, rtol=1e-9, atol=1e-9)
    found = streaming.run(net, frames, chunk)
    assert found.agreeing == 4
    assert "are whole groups" in streaming.told(found, 32, chunk, k, 4)


@pytest.mark.parametrize(("k", "chunk"), [(4, 6), (8, 1)])
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
    assert (votes - torch.cat(alone)).abs().max() > 0.01
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
    made = streaming.Candidate
    candidates = [made(1, 10.0, 2.0), made(2, 20.0, 2.5), made(4, 40.0, 3.0), made(8, 80.0, 4.0)]
    assert streaming.chosen(candidates, 43).k == 4
    assert streaming.chosen(candidates, 42.9).k == 2
    with pytest.raises(DataError, match=r"the least is 12.0 ms at k=1, of which a frame of the camera takes 10.0$"):
        streaming.chosen(candidates, 11)
    with pytest.raises(DataError, match="the camera is faster than the net"):
        streaming.chosen([made(1, 1.0, 2.0)], 50)
    # A larger k keeps up where a smaller one does not.
    assert streaming.chosen([made(1, 1.0, 2.0), made(4, 4.0, 2.5)], 50).k == 4


def test_the_script_prints_and_draws_and_says_where_no_window_can_be_opened(monkeypatch, tmp_path, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    call(monkeypatch, streaming, "--k", 4, "--chunk", 6, "--recordings", 2, "--live", "--png", tmp_path / "out.png")
    said = " ".join(capsys.readouterr().out.split())
    assert "NO whole groups of k=4" in said
    assert "No window: matplotlib's backend here is agg" in said
    assert (tmp_path / "out.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layout", "dvs128"], "needs --data, --checkpoint"),
        (["--checkpoint", "missing.pt"], "--checkpoint missing.pt does not fit EventNet"),
        (["--chunk", 0], "--chunk 0: at least 1"),
        (["--budget-ms", "nan"], "--budget-ms nan"),
        (["--frame-ms", -1], "--frame-ms -1"),
    ],
)
def test_wrong_input_is_one_sentence(monkeypatch, capsys, arguments, words):
    assert words in failure(monkeypatch, capsys, streaming, *arguments)
