"""The generated gestures: a class and its partner differ in the order of frames, and in nothing else."""

import datasets
import gestures
import numpy as np
import pytest
import torch


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


def test_binning_is_counting():
    rng = np.random.default_rng(0)
    events = {"t": np.sort(rng.integers(50, 950, 300)), "x": rng.integers(0, 34, 300), "y": rng.integers(0, 34, 300)}
    events["p"] = rng.integers(0, 2, 300)
    expected = np.zeros((7, 2, 17, 17))
    for t, x, y, p in zip(*events.values(), strict=True):
        expected[int((t - 50) * 7 / 900), p, y // 2, x // 2] += 1
    assert np.array_equal(datasets.binned(events, 7, 34, 17, 50, 900), expected)
