"""k=1 is the original layer: SpikingJelly's spikes, state and gradients, bit for bit, from the same calls."""

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
    return [spikes.detach(), v.detach(), *gradients, *module.buffers()]


def operators(*parts):
    """The chain as TACTP, TAC binary and TAC count, with k=1."""
    for build in (
        lambda *p: TACTP(*p, k=1, fuse=False),
        lambda *p: TAC(*p, k=1, fuse=False),
        lambda *p: TAC(*p, k=1, spikes="count", fuse=False),
    ):
        yield build(*(copy.deepcopy(p) for p in parts))


def check(parts, chunks, training=None):
    """The same bits of everything, in the same dtypes."""
    source = plain(*parts)
    source = source if training is None else source.train(training)
    expected = run(source, list(source.parameters()), chunks)
    assert expected[0].count_nonzero() > 0
    for operator in operators(*parts):
        operator = operator if training is None else operator.train(training)
        found = run(operator, list(operator.parameters()), chunks)
        for a, b in zip(expected, found, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.mark.parametrize("number", range(max(len(SURROGATES), len(NEURONS))))
def test_every_neuron_and_surrogate(number):
    (kind, v_reset, decay_input), surrogate = NEURONS[number % len(NEURONS)], SURROGATES[number % len(SURROGATES)]
    dtype = (torch.float32, torch.float64)[number % 2]
    torch.manual_seed(0)
    # Within reach from where the voltage rests, so that even one frame can fire.
    threshold = (v_reset or 0.0) + 0.1
    more = {"surrogate_function": surrogate, "detach_reset": number % 4 < 2, "v_threshold": threshold}
    parts = [m.to(dtype) for m in (conv(), norm(), node(kind, v_reset, decay_input, **more))]
    for steps in ((3, 1, 2), (1, 9)):
        check(parts, [frames(t, 2, 2, 5, 5, dtype=dtype, seed=t) for t in steps])


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"stride": 2}, "batch"),
        ({"padding": 2, "dilation": 2}, "none"),
        ({"padding_mode": "reflect", "stride": (1, 2)}, "batch"),
        ({"padding": "same", "groups": 2, "outputs": 4}, "batch"),
        ({"bias": False, "kernel_size": (1, 3)}, "none"),
        pytest.param({"padding_mode": "circular"}, "threshold", marks=only_v2),
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [False, True])
def test_every_conv_and_norm(options, kind, training):
    torch.manual_seed(2)
    convolution = conv(**options)
    channels = convolution.out_channels
    normalize = {
        "batch": lambda: norm(channels),
        "threshold": lambda: layer.ThresholdDependentBatchNorm2d(1.0, 1.0, channels),
        "none": lambda: None,
    }[kind]()
    check([convolution, normalize, node("plif", v_threshold=0.2)], [frames(4, 2, 2, 6, 6)], training)
