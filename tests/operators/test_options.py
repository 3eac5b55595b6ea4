"""Weights, collapse modes, stretch, BatchNorm statistics, gradients: the options of TAC and TACTP, against definitions."""

import copy

import pairs
import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import conv, frames, node, norm

from sj_tac import TAC, TACTP
from sj_tac.errors import ConversionError, InputError, PolicyError
from sj_tac.rewrites.gate import as_defined, gate_of


def literal_drive(convolution, normalize, x, weights):
    """BN(conv(sum_j w_j x_j)) of one group, frame by frame."""
    aggregated = sum(w * frame for w, frame in zip(weights, x, strict=True))
    return normalize(convolution(aggregated.unsqueeze(0)))


@pytest.mark.parametrize(("weights", "k"), [("decay", 3), ("uniform", 2), ("learned", 5)])
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


@pytest.mark.parametrize(("steps", "pool"), [(4, None), (10, "max"), (10, "avg"), (3, "max")])
def test_count_is_the_mean_of_the_steps_after_the_pool(steps, pool):
    torch.manual_seed(0)
    k = 4
    made = {"max": lambda: layer.MaxPool2d(2, step_mode="m"), "avg": lambda: layer.AvgPool2d(2, step_mode="m")}
    pooling = made[pool]() if pool else None
    parts = [m.double() for m in (conv(), norm(), node("if", v_reset=None, v_threshold=0.6))]
    x = frames(steps, 2, 2, 6, 6, dtype=torch.float64)
    count = TAC(*copy.deepcopy(parts), k, pool=copy.deepcopy(pooling), spikes="count")
    preserve = TACTP(*copy.deepcopy(parts), k, pool=copy.deepcopy(pooling))
    spikes = preserve(x)
    expected = torch.stack([spikes[start : start + k].mean(0) for start in range(0, steps, k)])
    torch.testing.assert_close(count(x), expected)
    torch.testing.assert_close(count.neuron.v, preserve.neuron.v, rtol=1e-9, atol=1e-9)
    in_frames = TAC(*copy.deepcopy(parts), k, pool=copy.deepcopy(pooling), spikes="count", emit="frames")(x)
    torch.testing.assert_close(in_frames, expected.repeat_interleave(k, 0)[:steps])


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


@pytest.mark.parametrize(
    ("build", "decay_input"), [(TACTP, True), (TAC, False), (lambda *p, **o: TAC(*p, spikes="count", **o), True)]
)
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
    for bad in (0, 1.5, True, "2"):
        with pytest.raises(PolicyError, match="k is"):
            TACTP(*parts, k=bad)
    with pytest.raises(PolicyError, match="weights is 'decai'; did you mean 'decay'"):
        TACTP(*parts, weights="decai")
    with pytest.raises(PolicyError, match="softmax"):
        TACTP(*parts, weights="learned", normalize=False)


def test_input_that_is_not_frames():
    operator = TACTP(conv(), norm(), node("lif"))
    for shape in ((2, 2, 5, 5), (0, 2, 2, 5, 5), (4, 2, 3, 5, 5)):
        with pytest.raises(InputError, match=r"layer 'TACTP' takes frames \[T, N, C, H, W\].*C=2.*shape"):
            operator(torch.zeros(shape))


# ---- as one operator, against its own modules one after the other (``fuse=False``) ------------------------------------

POOLS = {
    "none": lambda: None,
    "max": lambda: layer.MaxPool2d(2, step_mode="m"),
    "avg": lambda: layer.AvgPool2d(2, step_mode="m"),
}
BUILDS = {
    "preserve": TACTP,
    "binary": TAC,
    "count": lambda *p, **o: TAC(*p, spikes="count", **o),
    "count in frames": lambda *p, **o: TAC(*p, spikes="count", emit="frames", **o),
    "stretched": lambda *p, **o: TACTP(*p, stretch=2, **o),
}


# Dynamo looks at a voltage that the second call carries on.
@pytest.mark.captured
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pairs.parametrize(build=BUILDS, pool=POOLS, kind=["lif", "plif"])
def test_fused_is_unfused(build, pool, kind):
    torch.manual_seed(0)
    # The norm folded, or learning from the drives; or none.
    normalize = None if build == "binary" else norm().double().train(build == "preserve")
    parts = [conv().double(), normalize, node(kind, v_threshold=0.3).double()]
    fused, unfused = (BUILDS[build](*copy.deepcopy(parts), 4, pool=POOLS[pool](), fuse=f) for f in (True, False))
    for x in (frames(10, 2, 2, 6, 6, dtype=torch.float64), frames(7, 2, 2, 6, 6, seed=1, dtype=torch.float64)):
        expected, got = unfused(x), fused(x)
        assert 0 < expected.mean() < 1
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(fused.neuron.v, unfused.neuron.v, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (got * weight).sum().backward()
    for (name, a), b in zip(unfused.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-8, atol=1e-8, msg=name)
    torch.testing.assert_close(dict(fused.named_buffers()), dict(unfused.named_buffers()))


@pytest.mark.captured
def test_it_pickles_and_copies(tmp_path):
    torch.manual_seed(0)
    operator, x = TACTP(conv(), norm(), node("lif", v_threshold=0.3), 2, pool=layer.MaxPool2d(2)), frames(4, 1, 2, 6, 6)
    with torch.no_grad():
        expected = operator(x)
        operator.neuron.reset()
        torch.save(operator, tmp_path / "operator.pt")
        for other in (copy.deepcopy(operator), torch.load(tmp_path / "operator.pt", weights_only=False)):
            assert torch.equal(other(x), expected)


@pytest.mark.captured
def test_what_dynamo_gives_up_runs_as_it_is_defined():
    """A warning that is an error stops Dynamo in the second call, whose voltage has a gradient; newer torch warns there."""
    parts, x = [conv(), norm(), node("lif", v_threshold=0.3)], frames(4, 1, 2, 6, 6)
    fused, unfused = (TAC(*copy.deepcopy(parts), spikes="count", fuse=f) for f in (True, False))
    for _ in range(2):
        torch.testing.assert_close(fused(x), unfused(x))


@pytest.mark.captured
def test_a_net_of_operators_is_captured_one_by_one_and_compiles_as_a_whole():
    torch.manual_seed(0)
    first = TAC(conv(2, 3), norm(), node("lif", v_threshold=0.2), spikes="count", pool=layer.MaxPool2d(2))
    net = torch.nn.Sequential(first, TACTP(conv(3, 3), norm(), node("lif", v_threshold=0.2), stretch=2)).eval()
    x = frames(7, 2, 2, 8, 8)
    with torch.no_grad():
        found = net(x)
        assert [len(gate_of(operator).capture.graphs) for operator in net] == [1, 1]
        functional.reset_net(net)
        torch.testing.assert_close(torch.compile(net, backend="eager", fullgraph=True)(x), found)
        functional.reset_net(net)
        with as_defined():
            torch.testing.assert_close(net(x), found)
    assert found.shape[0] == 4
    assert 0 < found.mean() < 1
