"""The generated gestures: a class and its partner differ in the order of frames, and in nothing else."""

import datasets
import gestures
import numpy as np
import pytest
import torch

STEPS, SIZE = 8, 16


@pytest.mark.parametrize("label", range(len(gestures.CLASSES)))
def test_a_reversed_recording_is_one_of_the_partner_class(label):
    partner = {**dict(gestures.PAIRS), **{b: a for a, b in gestures.PAIRS}}.get(label, label)
    for seed in range(2):
        gesture = gestures.draw(label, torch.Generator().manual_seed(seed))
        assert gesture.label == label
        assert gesture.reversed().label == partner
        forwards, backwards = gestures.rates(gesture), gestures.rates(gesture.reversed())
        torch.testing.assert_close(forwards.flip(0), backwards, rtol=1e-9, atol=1e-9)
        assert forwards.sum() > 5000
        # The frames are not the same in both directions, or there would be nothing to tell.
        if partner != label:
            assert (forwards - backwards).abs().sum() > 0.2 * forwards.sum()


@pytest.fixture(scope="module")
def pairs():
    """Frames [T, 300, 2, 16, 16] and labels of the ten classes that come in pairs."""
    frames, labels = gestures.generate(330, STEPS, SIZE, seed=5)
    paired = labels < 10
    return frames[:, paired].float(), labels[paired]


def within_pairs(features, labels):
    """Right answers of a classifier for each pair (ridge regression on the features), over 5 x 30 test recordings."""
    right = 0
    for first, second in gestures.PAIRS:
        chosen = ((labels == first) | (labels == second)).nonzero().flatten()
        x = features[chosen].flatten(1).double()
        x = (x - x.mean(0)) / x.std(0).clamp(min=1e-6)
        y = (labels[chosen] == first).double() * 2 - 1
        order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))
        train, test = order[:30], order[30:]
        kernel = x @ x.T
        weights = torch.linalg.solve(
            kernel[train][:, train] + 0.1 * kernel.diagonal().mean() * torch.eye(30, dtype=torch.float64), y[train]
        )
        right += int(((kernel[test][:, train] @ weights).sign() == y[test]).sum())
    return right


# 150 test recordings at chance: 75 +- 6.1; four standard deviations.
LOW, HIGH = 50, 100


@pytest.mark.exhaustive
def test_without_the_order_of_frames_a_classifier_is_at_chance_between_partners(pairs):
    frames, labels = pairs
    assert len(labels) == 300
    assert LOW < within_pairs(frames.sum(0), labels) < HIGH
    shuffled = frames.clone()
    for n in range(len(labels)):
        shuffled[:, n] = frames[torch.randperm(STEPS, generator=torch.Generator().manual_seed(n)), n]
    assert LOW < within_pairs(shuffled.sum(2).transpose(0, 1), labels) < HIGH


@pytest.mark.exhaustive
def test_with_the_order_the_same_classifier_tells_them_apart(pairs):
    frames, labels = pairs
    assert within_pairs(frames.sum(2).transpose(0, 1), labels) > HIGH
    # Classes of different pairs are told apart by the sums alone: a line to the right is wider than high, an orbit not.
    lines, orbits = (frames[:, labels == first].sum((0, 1, 2)) for first in (0, 6))
    assert lines.sum(1).max() > 1.3 * lines.sum(0).max()
    assert orbits.sum(1).max() < 1.1 * orbits.sum(0).max()


def test_binning_is_counting():
    rng = np.random.default_rng(0)
    events = {"t": np.sort(rng.integers(50, 950, 300)), "x": rng.integers(0, 34, 300), "y": rng.integers(0, 34, 300)}
    events["p"] = rng.integers(0, 2, 300)
    expected = np.zeros((7, 2, 17, 17))
    for t, x, y, p in zip(*events.values(), strict=True):
        expected[int((t - 50) * 7 / 900), p, y // 2, x // 2] += 1
    assert np.array_equal(datasets.binned(events, 7, 34, 17, 50, 900), expected)
