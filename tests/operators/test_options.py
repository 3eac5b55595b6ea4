"""Weights, collapse modes, stretch, BatchNorm statistics, gradients: the options of TAC and TACTP, against definitions."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import conv, frames, node, norm

from sj_tac import TAC, TACTP
from sj_tac.errors import ConversionError, InputError, PolicyError


def literal_drive(convolution, normalize, x, weights):
    """BN(conv(sum_j w_j x_j)) of one group, frame by frame."""
    aggregated = sum(w * frame for w, frame in zip(weights, x, strict=True))
    return normalize(convolution(aggregated.unsqueeze(0)))


@pytest.mark.parametrize("weights", ["decay", "uniform", "learned"])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_preserve_drives_every_step_of_a_group_alike(weights, k):
    torch.manual_seed(0)
    convolution, normalize, spiking = (m.double() for m in (conv(), norm(), node("lif", tau=3.0, v_threshold=0.4)))
    steps, beta = 8, 1 - 1 / 3.0
    x = frames(steps, 2, 2, 5, 5, dtype=torch.float64)
    operator = TACTP(*copy.deepcopy([convolution, normalize, spiking]), k, weights=weights)
    if weights == "learned":
        with torch.no_grad():
            operator.conv.tac_logits.add_(torch.linspace(-1, 1, k))
    drives = []
    for start in range(0, steps, k):
        group = x[start : start + k]
        length = len(group)
        decay = [beta ** (length - 1 - j) for j in range(length)]
        if weights == "uniform":
            decay = [1.0] * length
        if weights == "learned":
            decay = operator.conv.tac_logits[-length:].exp().tolist()
        drive = literal_drive(convolution, normalize, group, [w / sum(decay) for w in decay])
        drives.append(drive.expand(length, *drive.shape[1:]))
    expected = copy.deepcopy(spiking)(torch.cat(drives))
    assert 0 < expected.mean() < 1
    assert torch.equal(operator(x), expected)


@pytest.mark.parametrize("pool", [None, "max", "avg"])
@pytest.mark.parametrize("steps", [4, 10, 3])
def test_count_is_the_mean_of_the_steps_after_the_pool(steps, pool):
    torch.manual_seed(0)
    k = 4
    made = {"max": lambda: layer.MaxPool2d(2, step_mode="m"), "avg": lambda: layer.AvgPool2d(2, step_mode="m")}
    pooling = made[pool]() if pool else None
    parts = [conv(), norm(), node("if", v_reset=None, v_threshold=0.6)]
    x = frames(steps, 2, 2, 6, 6)
    count = TAC(*copy.deepcopy(parts), k, pool=copy.deepcopy(pooling), spikes="count")
    preserve = TACTP(*copy.deepcopy(parts), k, pool=copy.deepcopy(pooling))
    spikes = preserve(x)
    expected = torch.stack([spikes[start : start + k].mean(0) for start in range(0, steps, k)])
    torch.testing.assert_close(count(x), expected)
    assert torch.equal(count.neuron.v, preserve.neuron.v)

    in_frames = TAC(*copy.deepcopy(parts), k, pool=copy.deepcopy(pooling), spikes="count", emit="frames")
    assert in_frames(x).shape == spikes.shape


def test_stretch_makes_a_frame_stand_for_several_steps():
    torch.manual_seed(0)
    parts = [m.double() for m in (conv(), norm(), node("lif", tau=4.0, v_threshold=0.3))]
    x = torch.rand(6, 2, 2, 5, 5, dtype=torch.float64)
    repeated = x.repeat_interleave(2, 0)
    with torch.no_grad():
        # k counts steps: six frames of two steps in groups of three frames are twelve frames in groups of six.
        stretched = TACTP(*copy.deepcopy(parts), 6, stretch=2)
        plainly = TACTP(*copy.deepcopy(parts), 6)
        expected = plainly(repeated).view(6, 2, *x.shape[1:2], 3, 5, 5).mean(1)
        assert 0 < expected.mean() < 1
        torch.testing.assert_close(stretched(x), expected)
        torch.testing.assert_close(stretched.neuron.v, plainly.neuron.v, rtol=0, atol=1e-12)
    with pytest.raises(PolicyError, match=r"k=3 is no multiple of 2, the steps that a frame stands for"):
        TACTP(*copy.deepcopy(parts), 3, stretch=2)


def test_batch_statistics_weigh_a_tail_by_its_length():
    torch.manual_seed(0)
    k, steps = 4, 10
    x = frames(steps, 2, 2, 6, 6)
    for operator_class in (TACTP, TAC):
        parts = [conv(), norm(), node("lif", tau=2.0, v_threshold=0.3)]
        normalize = copy.deepcopy(parts[1]).train()
        # The definition: the group's drive stands for as many frames as the group has.
        drives = []
        for start in range(0, steps, k):
            group = x[start : start + k]
            weights = [0.5 ** (len(group) - 1 - j) for j in range(len(group))]
            drive = parts[0](sum(w / sum(weights) * f for w, f in zip(weights, group, strict=True)).unsqueeze(0))
            drives.append(drive.expand(len(group), *drive.shape[1:]))
        normalize(torch.cat(drives))
        operator = operator_class(*parts, k).train()
        operator(x)
        torch.testing.assert_close(operator.norm.running_mean, normalize.running_mean)
        torch.testing.assert_close(operator.norm.running_var, normalize.running_var)


@pytest.mark.parametrize("decay_input", [True, False])
@pytest.mark.parametrize("build", [TACTP, TAC, lambda *p, **o: TAC(*p, spikes="count", **o)])
def test_plif_gradients_flow_through_weights_and_decay(build, decay_input):
    """Finite differences in float64, with a surrogate whose forward is smooth, so that the loss has a derivative."""
    torch.manual_seed(0)
    parts = [m.double() for m in (conv(), norm(), node("plif", None, decay_input, v_threshold=0.5))]
    operator = build(*parts, k=3)
    operator.neuron.surrogate_function.set_spiking_mode(False)
    x = torch.rand(7, 2, 2, 5, 5, dtype=torch.float64)

    def loss(w):
        functional.reset_net(operator)
        with torch.no_grad():
            operator.neuron.w.copy_(w)
        y = operator(x)
        return (y * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)).sum()

    w = torch.tensor(0.3, dtype=torch.float64)
    loss(w).backward()
    h = 1e-5
    numeric = (loss(w + h) - loss(w - h)).item() / (2 * h)
    assert abs(numeric) > 1e-3
    assert operator.neuron.w.grad.item() == pytest.approx(numeric, rel=1e-6)


def test_learned_logits_start_at_the_decay_weights_and_train():
    torch.manual_seed(0)
    parts = [m.double() for m in (conv(), norm(), node("lif", tau=5.0, v_threshold=0.4))]
    x = frames(8, 2, 2, 5, 5, dtype=torch.float64)
    learned = TACTP(*copy.deepcopy(parts), 4, weights="learned")
    decayed = TACTP(*copy.deepcopy(parts), 4)
    softmax = torch.softmax(learned.conv.tac_logits, 0)
    expected = torch.tensor([0.8**3, 0.8**2, 0.8, 1], dtype=torch.float64)
    torch.testing.assert_close(softmax, expected / expected.sum())
    assert torch.equal(learned(x), decayed(x))
    learned(x).sum().backward()
    assert learned.conv.tac_logits.grad.abs().sum() > 0
    assert "conv.tac_logits" in learned.state_dict()
    assert "conv.tac_logits" not in TACTP(*copy.deepcopy(parts), 1, weights="learned").state_dict()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_frames_are_summed_in_float32(dtype):
    torch.manual_seed(0)
    parts = [conv().to(dtype), None, node("lif", tau=10.0, v_threshold=0.2)]
    x = torch.rand(8, 2, 2, 5, 5).to(dtype)
    operator = TACTP(*copy.deepcopy(parts), 8)
    weights = [0.9 ** (7 - j) for j in range(8)]
    aggregated = sum(w / sum(weights) * x[j].double() for j, w in enumerate(weights))
    drive = parts[0](aggregated.to(dtype).unsqueeze(0)).expand(8, -1, -1, -1, -1)
    expected = copy.deepcopy(parts[2])(drive.float()).to(dtype)
    # Rounding the float32 sum to half may differ by one unit from rounding the exact sum; few spikes hang on that.
    assert (operator(x) != expected).float().mean() < 0.01


def test_autocast_runs_the_conv_in_half_and_the_neuron_in_float32():
    torch.manual_seed(0)
    operator = TACTP(conv(), norm(), node("lif", v_threshold=0.3), 2)
    x = frames(5, 1, 2, 5, 5)
    with torch.no_grad():
        exact = operator(x)
        functional.reset_net(operator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = operator(x)
    assert y.dtype == torch.bfloat16
    assert operator.neuron.v.dtype == torch.float32
    assert 0 < exact.mean() < 1
    assert (exact != y).float().mean() < 0.05


def test_wrong_children_and_options_are_refused_by_name():
    parts = [conv(), norm(), node("lif")]
    with pytest.raises(ConversionError, match=r"TACTP: conv is a Linear; it must be exactly one of .*Conv2d"):
        TACTP(torch.nn.Linear(1, 1), None, node("lif"))
    with pytest.raises(ConversionError, match="TAC: neuron is a Identity"):
        TAC(conv(), None, torch.nn.Identity())
    with pytest.raises(ConversionError, match="track_running_stats=False"):
        TACTP(conv(), layer.BatchNorm2d(3, track_running_stats=False), node("lif"))
    with pytest.raises(ConversionError, match="stretch=0 must be an int of at least 1"):
        TACTP(*parts, stretch=0)
    for bad in (0, -2, 1.5, True, "2"):
        with pytest.raises(PolicyError, match="k is"):
            TACTP(*parts, k=bad)
    with pytest.raises(PolicyError, match="weights is 'decai'; did you mean 'decay'"):
        TACTP(*parts, weights="decai")
    with pytest.raises(PolicyError, match="softmax"):
        TACTP(*parts, weights="learned", normalize=False)


@pytest.mark.parametrize("shape", [(2, 2, 5, 5), (0, 2, 2, 5, 5), (4, 2, 3, 5, 5), (4,)])
def test_input_that_is_not_frames(shape):
    operator = TACTP(conv(), norm(), node("lif"))
    with pytest.raises(InputError, match=r"layer 'TACTP' takes frames \[T, N, C, H, W\].*C=2.*shape"):
        operator(torch.zeros(shape))
