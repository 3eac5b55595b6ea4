"""The order test: exact under exchangeability, right on real data, the same however the data come, and in words."""

import itertools
import math
import weakref

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
    "alike pixels": lambda g: (
        torch.randn(6, 4, 1, 1, 1, generator=g).expand(6, 4, 1, 5, 5) + torch.randn(4, 1, 5, 5, generator=g)
    ),
    "heavy tails": lambda g: (
        torch.randn(6, 4, 1, 3, 3, generator=g) / torch.rand(6, 4, 1, 1, 1, generator=g).clamp(min=1e-3)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_false_positives_on_exchangeable_frames_come_at_the_level(kind):
    draws, level = 300, 0.05
    found, alone = [], []
    for draw in range(draws):
        x = KINDS[kind](torch.Generator().manual_seed(draw))
        one = sj_tac.diagnose([x], permutations=199, seed=draw, level=level)
        found.append(one.p_value)
        alone.append(one.ordered)
    # p < 0.05 of a permutation test with 199 re-orderings has probability 9/200 at most; 4 standard deviations round that.
    expected = 9 / 200 * draws
    wrong = sum(p < level for p in found)
    assert abs(wrong - expected) < 4 * math.sqrt(expected * (1 - level)), wrong
    # Not at that level alone: p-values are uniform. And so are those of every sample.
    assert np.mean(found) == pytest.approx(0.5, abs=4 / math.sqrt(12 * draws))
    assert abs(4 * sum(alone) - 4 * expected) < 4 * math.sqrt(4 * expected * (1 - level))


def test_neither_batches_nor_what_else_is_tested_change_anything():
    x = slow_drift(8, 10)
    whole = sj_tac.diagnose([x])
    parts = sj_tac.diagnose(part for part in x.split([3, 1, 6], 1))
    assert (parts.p_value, parts.ordered, parts.samples) == (whole.p_value, whole.ordered, 10)
    assert parts.ratio == pytest.approx(whole.ratio, rel=1e-12)
    assert parts.resolution == pytest.approx(whole.resolution, rel=1e-9)
    assert sj_tac.diagnose([x], seed=1).p_value == pytest.approx(whole.p_value, abs=0.05)


def test_batches_are_let_go_when_they_were_seen():
    seen, alive = [], []

    def stream():
        for i in range(6):
            alive.append(sum(batch() is not None for batch in seen))
            made = frames(6, 21, 1, 4, 4, seed=i)
            seen.append(weakref.ref(made))
            yield made

    assert sj_tac.diagnose(stream(), permutations=19).samples == 6 * 21
    assert max(alive) <= 1


def verdicts(x, count=20, size=32):
    """Verdict and p-value of random subsets."""
    generator = torch.Generator().manual_seed(0)
    chosen = [torch.randperm(x.shape[1], generator=generator)[:size] for _ in range(count)]
    return [(d.verdict, d.p_value) for d in (sj_tac.diagnose([x[:, rows].float()]) for rows in chosen)]


def rate_coded(images):
    return datasets.rate_code(images, 16, torch.Generator().manual_seed(7))


def generated(count):
    return gestures.generate(count, 16, 32, seed=11)[0].float()


def test_shipped_digits_collapse_and_events_and_gestures_are_preserved_until_they_are_shuffled():
    sets = {
        "digits": (rate_coded(datasets.shipped_digits()[0][:300]), "collapse"),
        "events": (datasets.shipped_events(32)[0], "preserve"),
        "gestures": (generated(44), "preserve"),
    }
    for name, (x, expected) in sets.items():
        found = verdicts(x, 4)
        assert [v for v, _ in found].count(expected) >= 3, (name, found)
        if expected == "preserve":
            assert max(p for _, p in found) < 0.01
            flipped = [sj_tac.diagnose([shuffled(x, seed)], permutations=199).verdict for seed in range(4)]
            assert flipped.count("collapse") >= 3
    assert sj_tac.diagnose([sets["digits"][0][:, :200]]).suggested_k == 8


def test_frames_that_alternate_have_order_too():
    x = torch.zeros(10, 8, 1, 4, 4)
    x[::2] = 1
    found = sj_tac.diagnose([x + 0.1 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0))])
    assert (found.verdict, found.suggested_k, found.ordered) == ("preserve", 2, 1)
    assert found.effect < -0.5
    assert "unlike" in found.reasons[1]


def test_equal_frames_collapse_and_what_cannot_be_told_is_undecided():
    direct = torch.rand(1, 5, 1, 6, 6).expand(6, 5, 1, 6, 6)
    found = sj_tac.diagnose([direct])
    assert (found.verdict, found.ratio, found.p_value, found.suggested_k) == ("collapse", 1.0, 1.0, 4)
    assert "direct coding" in found.reasons[1]
    mixed = sj_tac.diagnose([torch.cat([direct, slow_drift(6, 5)], 1)])
    assert "5 samples have frames that are all alike" in mixed.reasons[-1]
    few = sj_tac.diagnose([frames(6, 2, 1, 4, 4)])
    assert (few.verdict, few.suggested_k) == ("undecided", None)
    assert "2 samples are too few" in few.reasons[1]
    assert sj_tac.diagnose([frames(2, 40, 1, 4, 4)]).verdict == "undecided"
    assert sj_tac.diagnose([frames(3, 40, 8, 8, 8)]).verdict == "collapse"


def test_the_suggested_k_follows_how_slowly_frames_change():
    fast = sj_tac.diagnose([slow_drift(16, 12)])
    slow = sj_tac.diagnose([slow_drift(16, 12).repeat_interleave(4, 0)])
    assert fast.suggested_k < slow.suggested_k <= 16
    # Of what neighbours share, groups of 2 keep the mean of all four pairs: two of a frame with itself, two of neighbours.
    kept = 100 * (2 + 2) / 4
    assert f"{kept:.0f} % at k = 2" in fast.reasons[-1]
    common = [1 - ratio for ratio in fast.lags[:3]]
    kept = (4 * common[0] + 2 * (3 * common[0] + 2 * common[1] + common[2])) / (16 * common[0])
    assert f"{100 * kept:.0f} % at k = 4" in fast.reasons[-1]


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
    assert "the net" in str(found)
    assert found.to_dict()["layers"]["8"]["samples"] == 24


def test_convolutions_that_see_time_folded_into_the_batch_are_tested_as_well():
    chain = nn.Sequential(layer.SeqToANNContainer(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), node("lif")).eval()
    x = slow_drift(6, 5).expand(6, 5, 2, 6, 6).contiguous()
    found = sj_tac.diagnose([x], chain)
    assert found.layers["0.0"].ratio == pytest.approx(found.ratio)


class Ordered(nn.Module):
    """The class is whether the first half of the frames had more spikes than the second."""

    def __init__(self):
        super().__init__()
        self.conv = layer.Conv2d(1, 1, 1, step_mode="m")

    def forward(self, x):
        count = x.mean((2, 3, 4))
        first, second = count[: len(x) // 2].mean(0), count[len(x) // 2 :].mean(0)
        return torch.stack([first - second, second - first], 1)


def test_the_accuracy_of_a_net_that_needs_the_order_decides():
    x, labels = frames(8, 80, 1, 6, 6, rate=0.3), torch.arange(80) % 2
    rates = torch.where(labels == 0, 0.5, 0.1)[None, :, None, None, None]
    x[:4] = (torch.rand(4, 80, 1, 6, 6, generator=torch.Generator().manual_seed(1)) < rates).float()
    found = sj_tac.diagnose([(x[:, i : i + 20], labels[i : i + 20]) for i in (0, 20, 40, 60)], Ordered(), permutations=99)
    by = found.reordered
    assert (by.samples, by.accuracy, by.chance, by.verdict) == (80, 1.0, 0.5, "preserve")
    assert by.reversed == 0.0
    assert 0.2 < by.shuffled < 0.8
    assert found.verdict == "preserve"
    assert "needs the order, which is what decides" in str(found)


def test_a_net_that_does_not_look_at_order_has_no_use_for_it_however_alike_neighbours_are():
    alike = frames(8, 200, 2, 8, 8)[:1].expand(8, -1, -1, -1, -1) + 0.01 * torch.arange(8).view(8, 1, 1, 1, 1)
    sums = nn.Sequential(layer.Conv2d(2, 1, 1, step_mode="m"), layer.Flatten(step_mode="m")).eval()
    options = {"permutations": 99, "decode": lambda y: y.mean(0)[:, :4]}
    with torch.no_grad():
        truth = sums(alike).mean(0)[:, :4].argmax(1)
    found = sj_tac.diagnose([(alike, truth)], sums, **options)
    assert (found.reordered.verdict, found.verdict, found.suggested_k) == ("collapse", "collapse", 8)
    assert "Frames alone would say preserve" in str(found)
    unlabeled = sj_tac.diagnose(alike, sums, permutations=99)
    assert (unlabeled.verdict, unlabeled.reordered) == ("preserve", None)
    assert "Measured is whether neighbouring frames are alike" in str(unlabeled)
    # At chance accuracy says nothing, and with few samples it cannot tell.
    guess = sj_tac.diagnose([(alike, torch.arange(200) % 4)], sums, **options)
    assert (guess.reordered.verdict, guess.verdict) == ("undecided", "preserve")
    few = sj_tac.diagnose([(alike[:, :6], truth[:6])], sums, **options)
    assert few.reordered.verdict == "undecided"


@pytest.mark.parametrize("shape", [(10, 2, 32, 32), (10, 28, 28)])
def test_one_recording_is_not_taken_for_samples(shape):
    with pytest.raises(BatchError, match=r"look like one recording.*unsqueeze\(1\)"):
        sj_tac.diagnose(torch.rand(shape))
    assert sj_tac.diagnose(torch.rand(shape).unsqueeze(1), permutations=19).samples == 1
    assert sj_tac.diagnose((torch.rand(shape), torch.zeros(shape[1]).long()), permutations=19).samples == shape[1]


def test_bad_input():
    x = frames(4, 3, 1, 4, 4)
    for wrong in ({"level": 1.5}, {"level": 1.0}, {"margin": 0}, {"permutations": 18}):
        with pytest.raises(ValueError, match=r"level=.* must be in \(0, 1\)"):
            sj_tac.diagnose([x], **wrong)
    with pytest.raises(ModelTypeError, match=r"diagnose: a model is a torch\.nn\.Module, got int"):
        sj_tac.diagnose([x], 3)
    with pytest.raises(BatchError, match=r"Sequential does not run on batch 0 of shape \[4, 3, 1, 4, 4\]"):
        sj_tac.diagnose([x], csnn())
