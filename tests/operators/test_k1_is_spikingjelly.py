"""k=1 is the original layer: SpikingJelly's spikes, state and gradients, bit for bit."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import NEURONS, SURROGATES, conv, frames, node, norm, only_v2, plain

from sj_tac import TAC, TACTP


def run(module, parameters, chunks):
    """Spikes, final voltage, input and parameter gradients over several calls in a row."""
    functional.reset_net(module)
    torch.manual_seed(0)  # PoissonPass draws
    inputs = [c.clone().requires_grad_() for c in chunks]
    spikes = torch.cat([module(x) for x in inputs])
    (spikes * torch.linspace(-1, 1, spikes.numel(), dtype=spikes.dtype).view_as(spikes)).sum().backward()
    v = next(m.v for m in module.modules() if hasattr(m, "v_threshold"))
    gradients = [x.grad for x in inputs] + [p.grad for p in parameters]
    return [spikes.detach(), v.detach(), *gradients]


def operators(*parts):
    """The chain as TACTP, TAC binary and TAC count, with k=1."""
    for build in (
        lambda *p: TACTP(*p, k=1, fuse=False),
        lambda *p: TAC(*p, k=1, fuse=False),
        lambda *p: TAC(*p, k=1, spikes="count", fuse=False),
    ):
        yield build(*(copy.deepcopy(p) for p in parts))


def assert_same_bits(expected, got):
    for a, b in zip(expected, got, strict=True):
        assert a is not None
        assert b is not None
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("detach_reset", [False, True])
@pytest.mark.parametrize(("kind", "v_reset", "decay_input"), NEURONS)
def test_every_neuron_and_surrogate(kind, v_reset, decay_input, detach_reset, surrogate):
    # Every neuron with every surrogate in both dtypes, and every surrogate in both with and without detach_reset.
    dtype = (torch.float32, torch.float64)[(NEURONS.index((kind, v_reset, decay_input)) + detach_reset) % 2]
    torch.manual_seed(0)
    spiking = node(kind, v_reset, decay_input, surrogate_function=surrogate, detach_reset=detach_reset, v_threshold=0.1)
    parts = [m.to(dtype) for m in (conv(), norm(), spiking)]
    chunks = [frames(t, 2, 2, 5, 5, dtype=dtype, seed=t) for t in (3, 1, 2)]
    source = plain(*parts)
    expected = run(source, list(source.parameters()), chunks)
    assert expected[0].count_nonzero() > 0
    for operator in operators(*parts):
        assert_same_bits(expected, run(operator, list(operator.parameters()), chunks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "v_reset", "decay_input"), NEURONS)
def test_every_number_of_frames(kind, v_reset, decay_input, dtype):
    for steps in (1, 2, 3, 4, 7, 8, 9, 16, 17):  # and 18 less these
        torch.manual_seed(steps)
        # Within reach from where the voltage rests, so that even one frame can fire.
        spiking = node(kind, v_reset, decay_input, v_threshold=(v_reset or 0.0) + 0.1)
        parts = [m.to(dtype) for m in (conv(), norm(), spiking)]
        chunks = [frames(t, 1, 2, 6, 5, dtype=dtype, seed=t) for t in (steps, 18 - steps, 1)]
        source = plain(*parts)
        expected = run(source, list(source.parameters()), chunks)
        assert expected[0].count_nonzero() > 0
        for operator in operators(*parts):
            assert_same_bits(expected, run(operator, list(operator.parameters()), chunks))


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"padding": 0},
        {"padding": 2, "dilation": 2},
        {"padding_mode": "circular"},
        {"padding_mode": "reflect", "stride": (1, 2)},
        {"padding": "same"},
        {"groups": 2, "outputs": 4},
        {"bias": False, "kernel_size": (1, 3)},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["batch", pytest.param("threshold", marks=only_v2), "none"])
def test_every_conv_and_norm(options, kind):
    torch.manual_seed(2)
    convolution = conv(**options)
    channels = convolution.out_channels
    normalize = {
        "batch": lambda: norm(channels),
        "threshold": lambda: layer.ThresholdDependentBatchNorm2d(1.0, 1.0, channels),
        "none": lambda: None,
    }[kind]()
    parts = [convolution, normalize, node("plif", v_threshold=0.2)]
    for training in (False, True):
        source = plain(*parts).train(training)
        expected = run(source, list(source.parameters()), [frames(4, 2, 2, 6, 6)])
        for operator in operators(*parts):
            operator.train(training)
            assert_same_bits(expected, run(operator, list(operator.parameters()), [frames(4, 2, 2, 6, 6)]))
            statistics = zip(source.buffers(), operator.buffers(), strict=True)
            assert all(torch.equal(a, b) for a, b in statistics)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "v_reset", "decay_input"), NEURONS)
def test_half_inputs_keep_a_float32_voltage(kind, v_reset, decay_input, dtype):
    torch.manual_seed(3)
    convolution, spiking = conv().to(dtype), node(kind, v_reset, decay_input, v_threshold=0.05)
    x = frames(7, 2, 2, 5, 5, dtype=dtype)
    drive = convolution(x)
    assert drive.dtype == dtype

    # The definition: the host's neuron in float32 on the half drive; spikes in the drive's dtype.
    reference = copy.deepcopy(spiking)
    expected = reference(drive.float()).to(dtype)
    assert 0 < expected.float().mean() < 1
    for operator in operators(convolution, None, spiking):
        got = operator(x)
        assert got.dtype == dtype
        assert operator.neuron.v.dtype == torch.float32
        assert torch.equal(got, expected)
        assert torch.equal(operator.neuron.v, reference.v)


def test_store_v_seq_is_the_hosts():
    torch.manual_seed(4)
    parts = [conv(), norm(), node("lif", store_v_seq=True, v_threshold=0.3)]
    x = frames(5, 1, 2, 4, 4)
    source = plain(*parts)
    source(x)
    for operator in operators(*parts):
        operator(x)
        assert torch.equal(operator.neuron.v_seq, source[-1].v_seq)
