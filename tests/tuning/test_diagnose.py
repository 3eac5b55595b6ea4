"""The order test: exact under exchangeability, right on real data, the same however the data come, and in words."""

import gc
import itertools
import math
import os
import pickle
from functools import cache
from pathlib import Path

import datasets
import gestures
import numpy as np
import pytest
import torch
from spikingjelly.activation_based import layer
from support import csnn, frames, node, recorded
from torch import nn

import sj_tac
from sj_tac.errors import BatchError, ModelTypeError
from sj_tac.tuning.ordering import Ordering

DATA = "SJ_TAC_DATA"
SUBSETS, SUBSET = 20, 32


def slow_drift(steps, samples, seed=0):
    """Frames [T, N, 1, 6, 6] that change a little from one to the next."""
    generator = torch.Generator().manual_seed(seed)
    walk = torch.randn(steps, samples, 1, 6, 6, generator=generator).cumsum(0)
    return walk + 0.3 * torch.randn(walk.shape, generator=generator)


def shuffled(x, seed=0):
    """Every sample's frames in an order of its own."""
    order = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(seed)).argsort(0)
    return torch.gather(x, 0, order.view(*order.shape, *[1] * (x.dim() - 2)).expand_as(x))


def ratio_by_hand(x):
    """Of one sample [T, ...], written out."""
    x = x.double().flatten(1)
    steps = len(x)
    every = [((x[i] - x[j]) ** 2).sum().item() for i in range(steps) for j in range(steps) if i != j]
    near = [((x[i + 1] - x[i]) ** 2).sum().item() for i in range(steps - 1)]
    return (sum(near) / len(near)) / (sum(every) / len(every))


def test_the_ratio_is_the_definition_and_averages_to_one_over_all_orders():
    x = frames(5, 3, 2, 4, 4)
    found = sj_tac.diagnose([x])
    assert found.ratio == pytest.approx(np.mean([ratio_by_hand(x[:, n]) for n in range(3)]), rel=1e-12)
    assert found.effect == pytest.approx(1 - found.ratio)
    orders = [ratio_by_hand(x[list(order), 0]) for order in itertools.permutations(range(5))]
    assert np.mean(orders) == pytest.approx(1, rel=1e-12)
    every = [((x[i, 0] - x[j, 0]) ** 2).sum().item() for i in range(5) for j in range(5) if i != j]
    apart = [((x[i + 2, 0] - x[i, 0]) ** 2).sum().item() for i in range(3)]
    assert sj_tac.diagnose([x[:, :1]]).lags[1] == pytest.approx(np.mean(apart) / np.mean(every), rel=1e-9)


def test_the_p_value_is_that_of_all_orders():
    """With one sample of 5 frames there are 120 orders; the drawn ones must agree with all of them."""
    x = slow_drift(5, 1, seed=3)
    observed = abs(ratio_by_hand(x[:, 0]) - 1)
    every = [abs(ratio_by_hand(x[list(order), 0]) - 1) for order in itertools.permutations(range(5))]
    exact = np.mean([value >= observed - 1e-9 for value in every])
    found = sj_tac.diagnose([x], permutations=9999).p_value
    assert found == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 9999) + 1e-4)


KINDS = {
    "Bernoulli": lambda g: (torch.rand(6, 4, 1, 5, 5, generator=g) < torch.rand(4, 1, 5, 5, generator=g)).float(),
    "alike pixels": lambda g: (
        torch.randn(6, 4, 1, 1, 1, generator=g).expand(6, 4, 1, 5, 5) + torch.randn(4, 1, 5, 5, generator=g)
    ),
    "heavy tails": lambda g: (
        torch.randn(6, 4, 1, 3, 3, generator=g) / torch.rand(6, 4, 1, 1, 1, generator=g).clamp(min=1e-3)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_false_positives_on_exchangeable_frames_come_at_the_level(kind):
    draws, level = 500, 0.05
    found = []
    for draw in range(draws):
        x = KINDS[kind](torch.Generator().manual_seed(draw))
        found.append(sj_tac.diagnose([x], permutations=199, seed=draw).p_value)
    wrong = sum(p < level for p in found)
    # p < 0.05 of a permutation test with 199 re-orderings has probability 9/200 at most; 4 standard deviations round that.
    expected = 9 / 200 * draws
    assert abs(wrong - expected) < 4 * math.sqrt(expected * (1 - level)), wrong
    # Not at that level alone: p-values are uniform.
    assert np.mean(found) == pytest.approx(0.5, abs=4 / math.sqrt(12 * draws))


def test_neither_batches_nor_what_else_is_tested_change_anything():
    x = slow_drift(8, 10)
    whole = sj_tac.diagnose([x])
    parts = sj_tac.diagnose(part for part in x.split([3, 1, 6], 1))
    assert (parts.p_value, parts.ordered, parts.samples) == (whole.p_value, whole.ordered, 10)
    assert parts.ratio == pytest.approx(whole.ratio, rel=1e-12)
    assert sj_tac.diagnose([x], seed=1).p_value == pytest.approx(whole.p_value, abs=0.05)


def test_memory_does_not_grow_with_the_data():
    found, sizes = Ordering(99, 0.05, 0), []
    for i in range(30):
        found.add(frames(6, 20, 1, 4, 4, seed=i))
        sizes.append(len(pickle.dumps(found)))
    assert max(sizes) - min(sizes) < 100
    alive = []

    def stream():
        for i in range(12):
            gc.collect()
            alive.append(sum(t.dim() == 5 and t.shape[1] == 21 for t in gc.get_objects() if type(t) is torch.Tensor))
            yield frames(6, 21, 1, 4, 4, seed=i)

    assert sj_tac.diagnose(stream()).samples == 12 * 21
    assert max(alive) <= 4  # what came before is let go: the batch of before, its checked self and loop variables


def verdicts(x, count=SUBSETS, size=SUBSET):
    """Verdict and p-value of random subsets."""
    generator = torch.Generator().manual_seed(0)
    chosen = [torch.randperm(x.shape[1], generator=generator)[:size] for _ in range(count)]
    return [(d.verdict, d.p_value) for d in (sj_tac.diagnose([x[:, rows].float()]) for rows in chosen)]


def rate_coded(images):
    return datasets.rate_code(images, 16, torch.Generator().manual_seed(7))


@cache
def generated():
    return gestures.generate(110, 16, 32, seed=11)[0].float()


def test_shipped_digits_collapse_and_events_and_gestures_are_preserved():
    sets = {
        "digits": (rate_coded(datasets.shipped_digits()[0]), "collapse"),
        "events": (datasets.shipped_events(32)[0], "preserve"),
        "gestures": (generated(), "preserve"),
    }
    for name, (x, expected) in sets.items():
        found = verdicts(x, 10)
        assert [v for v, _ in found].count(expected) >= 9, (name, found)
        if expected == "preserve":
            assert max(p for _, p in found) < 0.01


@pytest.mark.skipif(not os.environ.get(DATA), reason=f"{DATA} names no folder with mnist, fashion-mnist and nmnist-small")
def test_full_data_sets_are_told_apart_at_most_one_wrong_of_eighty():
    folder = Path(os.environ[DATA])
    sets = [(rate_coded(datasets.mnist(folder / name, "t10k")[0]), "collapse") for name in ("mnist", "fashion-mnist")]
    archive = datasets.read_recordings(folder / "nmnist-small" / "nmnist_small_events.npz")
    sets += [(datasets.event_frames(archive, 32)[0], "preserve"), (generated(), "preserve")]
    found = [(v, p, expected) for x, expected in sets for v, p in verdicts(x)]
    assert len(found) == 80
    assert sum(v != expected for v, _, expected in found) <= 1, found
    assert all(p < 0.05 for v, p, _ in found if v == "preserve")


@pytest.mark.parametrize("name", ["events", "gestures"])
def test_shuffling_time_flips_the_verdict(name):
    x = datasets.shipped_events(32)[0] if name == "events" else generated()
    assert sj_tac.diagnose([x]).verdict == "preserve"
    flipped = [sj_tac.diagnose([shuffled(x, seed)]).verdict for seed in range(10)]
    assert flipped.count("collapse") >= 9


def test_frames_that_alternate_have_order_too():
    x = torch.zeros(10, 8, 1, 4, 4)
    x[::2] = 1
    found = sj_tac.diagnose([x + 0.1 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0))])
    assert (found.verdict, found.suggested_k) == ("preserve", 2)
    assert found.effect < -0.5
    assert "unlike" in found.reasons[1]


def test_equal_frames_collapse_and_what_cannot_be_told_is_undecided():
    direct = torch.rand(1, 5, 1, 6, 6).expand(6, 5, 1, 6, 6)
    found = sj_tac.diagnose([direct])
    assert (found.verdict, found.ratio, found.p_value) == ("collapse", 1.0, 1.0)
    assert "direct coding" in found.reasons[1]
    mixed = sj_tac.diagnose([torch.cat([direct, slow_drift(6, 5)], 1)])
    assert "5 samples have frames that are all alike" in mixed.reasons[-1]
    few = sj_tac.diagnose([frames(6, 2, 1, 4, 4)])
    assert (few.verdict, few.suggested_k) == ("undecided", None)
    assert "2 samples are too few" in few.reasons[1]
    assert sj_tac.diagnose([frames(2, 40, 1, 4, 4)]).verdict == "undecided"


def test_the_suggested_k_follows_how_slowly_frames_change():
    fast = sj_tac.diagnose([slow_drift(16, 12)])
    slow = sj_tac.diagnose([slow_drift(16, 12).repeat_interleave(4, 0)])
    assert fast.suggested_k < slow.suggested_k <= 16
    assert sj_tac.diagnose([rate_coded(datasets.shipped_digits()[0][:200])]).suggested_k == 8


def test_with_a_model_every_layers_input_is_tested_and_the_model_is_left_alone():
    net, x = csnn().train(), frames(6, 12, 2, 8, 8)
    net[2].register_forward_hook(lambda *args: pytest.fail("the user's hook ran"))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    found = sj_tac.diagnose([x, x.flip(1)], net)
    assert list(found.layers) == ["0", "4", "8"]
    assert found.layers["0"].ratio == pytest.approx(found.ratio)
    net[2]._forward_hooks.clear()
    net.eval()
    with torch.no_grad(), recorded(net, nn.MaxPool2d) as outputs:
        net(x)
    expected = np.mean([ratio_by_hand(outputs["3"][0][:, n]) for n in range(12)])
    assert found.layers["4"].ratio == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert sj_tac.diagnose([x], net).layers["4"] == sj_tac.diagnose([x], net).layers["4"]
    words = str(found)
    assert "the net" in words
    assert found.to_dict()["layers"]["8"]["samples"] == 24


def test_convolutions_that_see_time_folded_into_the_batch_are_tested_as_well():
    chain = nn.Sequential(layer.SeqToANNContainer(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), node("lif")).eval()
    x = slow_drift(6, 5).expand(6, 5, 2, 6, 6).contiguous()
    found = sj_tac.diagnose([x], chain)
    assert found.layers["0.0"].ratio == pytest.approx(found.ratio)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], r"there are no batches"),
        (7, r"batches are an iterable .* got int"),
        ({"a": 1}, r"got dict"),
        ([3.5], r"batch 0 is a float"),
        ([torch.rand(4, 4)], r"batch 0 has shape \[4, 4\]; frames are \[T, N, C, H, W\]"),
        ([torch.rand(4, 0, 1, 2, 2)], r"batch 0 is empty: its shape is \[4, 0, 1, 2, 2\]"),
        ([torch.rand(1, 3, 1, 2, 2)], r"batch 0 has one frame a sample \(shape \[1, 3, 1, 2, 2\]\)"),
        ([torch.rand(4, 3, 1, 2, 2), torch.full((4, 3, 1, 2, 2), math.nan)], r"batch 1 .* 48 values that are NaN"),
        ([torch.rand(4, 3, 1, 2, 2), torch.rand(5, 3, 1, 2, 2)], r"batch 1 has T = 5 .* before it T = 4"),
        ([(torch.rand(4, 3, 1, 2, 2), torch.zeros(4).long())], r"labels of shape \[4\] .* transpose\(0, 1\)"),
        ([(torch.rand(4, 3, 1, 2, 2), torch.rand(3))], r"expected 3 class indices"),
    ],
)
def test_bad_batches_are_named(batches, message):
    with pytest.raises(BatchError, match=message):
        sj_tac.diagnose(batches)


def test_other_bad_input():
    x = frames(4, 3, 1, 4, 4)
    with pytest.raises(ValueError, match=r"level=1.5 must be in \(0, 1\)"):
        sj_tac.diagnose([x], level=1.5)
    with pytest.raises(ModelTypeError, match=r"diagnose: a model is a torch\.nn\.Module, got int"):
        sj_tac.diagnose([x], 3)
    with pytest.raises(BatchError, match=r"Sequential does not run on batch 0 of shape \[4, 3, 1, 4, 4\]"):
        sj_tac.diagnose([x], csnn())


def test_a_single_tensor_a_pair_and_whole_numbers_are_batches():
    x = (frames(6, 8, 2, 4, 4) * 3).to(torch.uint8)
    one = sj_tac.diagnose(x)
    assert one.samples == 8
    assert sj_tac.diagnose((x, torch.zeros(8, dtype=torch.int64))) == one
    assert sj_tac.diagnose([[x, torch.zeros(8, dtype=torch.uint8)]]) == one
    assert sj_tac.diagnose((x, x)).samples == 16
