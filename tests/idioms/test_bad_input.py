"""Folded nets, repeated images and registered classes where the call is not what the sample was."""

import pytest
import torch
from idioms.miniatures import SIZE, N, Private, T, conv, lif
from idioms.test_idioms import convert, make
from spikingjelly.activation_based import functional, layer, neuron
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError

FOLDED = (T, N, 2, SIZE, SIZE)


def test_without_a_sample_a_net_whose_t_is_unusual_says_what_it_needs():
    with pytest.raises(ConversionError, match=r"takes none of the usual shapes .* pass example_input="):
        sj_tac.convert(FixedT())


def test_as_many_samples_as_steps_hide_no_fold():
    found = sj_tac.plan(Private(), example_input=torch.rand(4, 4, 2, SIZE, SIZE))
    assert [v.layer for v in found.converted] == ["features.0.module.0", "features.3.module.0"]


class FixedT(nn.Module):
    """T is an attribute, and the forward unfolds by it."""

    def __init__(self):
        super().__init__()
        self.T, self.conv, self.bn, self.lif = T, conv(2), nn.BatchNorm2d(6), lif()

    def forward(self, x):
        y = self.bn(self.conv(x.flatten(0, 1)))
        return self.lif(y.reshape(self.T, -1, *y.shape[1:])).mean((-1, -2)).mean(0)


def test_a_call_that_fails_leaves_nothing_for_the_next_one_and_arguments_by_name_say_t_too():
    net, x = make("folded", torch.float64)
    fast = convert("folded", net, x, 2)
    with torch.no_grad():
        expected = fast(x)
        functional.reset_net(fast)
        with pytest.raises(RuntimeError, match="to have 2 channels, but got 3 channels instead"):
            fast(torch.rand(T, 4, 3, SIZE, SIZE, dtype=torch.float64))
        functional.reset_net(fast)
        assert torch.equal(fast(x=x), expected)


def test_exact_takes_no_k():
    with pytest.raises(sj_tac.errors.PolicyError, match=r'policy="exact" aggregates nothing, so that k=4'):
        sj_tac.plan(Private(), "exact", 4)


@pytest.mark.parametrize("slices", [True, False])
def test_a_net_that_has_just_run_another_batch(slices):
    """Voltages of 8 samples are in it; the sample has 2, and is run beside the symbols where they do not get through."""

    class Unpacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lif = nn.Conv2d(2, 4, 3, padding=1), neuron.LIFNode(step_mode="m")

        def forward(self, x):
            t, n, _, h, w = x.shape
            y = self.conv(x.flatten(0, 1))
            return self.lif(y.unflatten(0, (t, n)) if slices else y.reshape(t, n, 4, int(h / 1), int(w / 1)))

    net = Unpacked().eval()
    with torch.no_grad():
        net(torch.rand(3, 8, 2, 6, 6))
    kept = net.lif.v
    assert sj_tac.plan(net, example_input=torch.rand(3, 2, 2, 6, 6)).converted
    assert net.lif.v is kept


CONSTANTS = {
    "each sample's": lambda net, y: y * net.sample,
    "each frame's": lambda net, y: y * net.step,
    "each frame's, of one": lambda net, y: y + net.step[: len(y)],
    "the frames' divisor": lambda net, y: net.gain / (y + 3),
    "in place": lambda net, y: y.mul_(net.gain),
}


@pytest.mark.parametrize("constant", CONSTANTS)
def test_what_is_no_constant_of_all_frames_is_refused_or_written(constant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lif = layer.Conv2d(2, 4, 3, padding=1, step_mode="m"), lif()
            for name, size in (("sample", (3, 1, 1, 1)), ("step", (8, 1, 1, 1, 1)), ("gain", (4, 1, 1))):
                self.register_parameter(name, nn.Parameter(torch.rand(size) + 0.5))

        def forward(self, x):
            return self.lif(CONSTANTS[constant](self, self.conv(x)))

    x = torch.rand(1 if constant == "each frame's, of one" else 8, 3, 2, 8, 8)
    (verdict,) = sj_tac.plan(Net().eval(), example_input=x).verdicts
    is_affine = constant in ("in place", "each sample's")
    assert verdict.reason == (None if is_affine else "ONE_STEP" if len(x) == 1 else "NOT_AFFINE")


def test_an_error_that_nothing_converts_says_that_linear_layers_were_not_looked_at():
    net = nn.Sequential(
        layer.Conv2d(2, 4, 3, step_mode="m"), layer.Flatten(step_mode="m"), layer.Linear(144, 5, step_mode="m")
    )
    with pytest.raises(ConversionError, match=r"layers: \[conv, linear\] converts"):
        sj_tac.convert(net.eval(), example_input=torch.rand(3, 2, 2, 8, 8))
