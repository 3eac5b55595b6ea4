"""Large convolutions that the neuron behind them runs in parts: the same numbers, whatever happens in between."""

import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, layer
from support import large_convolutions
from torch import nn

import sj_tac
from sj_tac.runtime import deferred
from sj_tac.runtime.borders import definition
from sj_tac.runtime.values import Shared
from sj_tac.support import memory
from tests.runtime.test_straight import NEURONS, POOLS, awake, compare


@pytest.fixture(autouse=True)
def parts():
    """How many parts were run; every convolution is large. Set up before a test's own patches, and ended after them."""
    run, found = deferred.Deferred.parts, []

    def counted(self, samples, channels):
        found.append((self.shape[1] // samples) * (self.shape[2] // channels))
        return run(self, samples, channels)

    with large_convolutions(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred.Deferred, "parts", counted)
        yield found


def converted(k=2, node=None, pool=None, layers=3, **more):
    torch.manual_seed(0)
    net = awake(node, pool, layers)
    return sj_tac.convert(net, k=k, example_input=torch.rand(4, 1, 2, 8, 8), **more)


def frames(steps=6, samples=4):
    torch.manual_seed(1)
    return (torch.rand(steps, samples, 2, 8, 8) < 0.4).float()


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("node", NEURONS.values(), ids=NEURONS)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_parts_give_what_the_whole_gives(node, pool, format, parts):
    for k in (1, 2, 4):
        net = converted(k, node, pool, 2 if pool else 3).to(memory_format=format)
        assert 0.02 < compare(net, frames()) < 0.9
        assert max(parts) > 2
        parts.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("samples", [1, 3, 4])
def test_memory_formats_batches_and_doubles(dtype, last, samples, parts):
    net, x = converted(2).to(dtype), frames(5, samples).to(dtype)
    if last:
        net = net.to(memory_format=torch.channels_last)
        x = x.movedim(2, -1).contiguous().movedim(-1, 2)
    with torch.no_grad():
        found = net[0](x)
        assert type(found.expression.held) is deferred.Deferred
        whole, (_, some) = found.expression.compact, next(found.expression.held.parts(1, 4))
        assert deferred.is_channels_last(some) == deferred.is_channels_last(whole)
        torch.testing.assert_close(some, whole[:, :1, :4], rtol=0, atol=0)
    # In float64 a batch of one sample may be summed in another order.
    compare(net, x, exact=dtype is torch.float32)
    assert max(parts) > 1


@pytest.mark.parametrize(
    "options", [{"stride": 2}, {"groups": 2}, {"dilation": 2, "padding": 2}, {"bias": True, "padding": 0}]
)
def test_options_of_the_convolution(options, parts):
    torch.manual_seed(0)
    net = awake()
    net[3] = layer.Conv2d(8, 8, 3, **{"padding": 1, "bias": False, **options}, step_mode="m")
    net = sj_tac.convert(net.eval(), k=2, example_input=torch.rand(4, 1, 2, 8, 8))
    compare(net, frames())
    assert max(parts) > 2


class Block(nn.Module):
    """Two chains with a residual around the second."""

    def __init__(self):
        super().__init__()
        self.one, self.two = awake(layers=1), awake(layers=1)
        self.two[0] = layer.Conv2d(8, 8, 3, padding=1, bias=False, step_mode="m")

    def forward(self, x):
        x = self.one(x)
        return self.two[2](self.two[1](self.two[0](x)) + x)


@pytest.mark.parametrize("k", [1, 2])
def test_a_residual(k, parts):
    torch.manual_seed(0)
    net = sj_tac.convert(Block().eval(), k=k, example_input=torch.rand(4, 1, 2, 8, 8))
    compare(net, frames())
    assert max(parts) > 2


def silent(_):
    """A hook that gives nothing back."""


def _noise_for_the_call(net):
    kept = []

    def before(m, args):
        kept.append(m.weight.data.clone())
        m.weight.data.add_(torch.randn(m.weight.shape, generator=torch.Generator().manual_seed(0)) * 0.1)

    net[3].register_forward_pre_hook(before)
    net[3].register_forward_hook(lambda m, args, out: silent(m.weight.data.copy_(kept.pop())))


def _input_written(net):
    net[0].register_forward_hook(lambda m, args, out: silent(args[0].zero_()))


def _frames_written(net):
    net[3].register_forward_hook(lambda m, args, out: silent(args[0].mul_(0)))


def _frames_written_past_torch(net):
    net[3].register_forward_hook(lambda m, args, out: silent(args[0][0].mul_(0)))


def _drives_scaled(net):
    net[3].register_forward_hook(lambda m, args, out: out * 1.5)


def _drives_scaled_in_place(net):
    net[3].register_forward_hook(lambda m, args, out: out.mul_(1.5))


def _options_changed(net):
    def change(m, args, out):
        m.padding = (0, 0)

    net[3].register_forward_pre_hook(lambda m, args: setattr(m, "padding", (1, 1)))
    net[3].register_forward_hook(change)


def _looked_at(net):
    net[3].register_forward_hook(lambda m, args, out: silent(out.mean()))


BETWEEN = {f.__name__[1:]: f for f in (
    _noise_for_the_call, _input_written, _frames_written, _frames_written_past_torch, _drives_scaled,
    _drives_scaled_in_place, _options_changed, _looked_at,
)}  # fmt: skip


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", BETWEEN.values(), ids=BETWEEN)
def test_what_happens_between_the_convolution_and_its_neuron(change, mode, k, monkeypatch, parts):
    """Against the same net that runs every convolution at once."""
    net = converted(k)
    change(net)
    with mode():
        found = net(frames()).clone()
        voltages = [net[i].v.clone() for i in (2, 5, 8)]
        assert parts
        monkeypatch.setattr(deferred, "LARGE", 1 << 60)
        functional.reset_net(net)
        expected = net(frames())
    assert 0 < expected.mean() < 1 or change is _frames_written
    assert torch.equal(found, expected)
    for ours, i in zip(voltages, (2, 5, 8), strict=True):
        torch.testing.assert_close(ours, net[i].v)


def test_frames_that_are_read_after_the_weights_were_changed():
    net = converted(2, pool=POOLS["2x2"], layers=2)
    with torch.no_grad(), definition(net):
        expected = net[:3](frames())
    functional.reset_net(net)
    with torch.no_grad():
        spikes = net[:3](frames())
        net[0].weight.zero_()
        assert torch.equal(spikes[:], expected)


def test_a_value_that_two_neurons_read():
    torch.manual_seed(0)
    net = converted(2, layers=1)
    other = sj_tac.convert(awake(layers=1), k=2, example_input=torch.rand(4, 1, 2, 8, 8))[2]
    with torch.no_grad():
        value = net[1](net[0](frames()))
        first, second = net[2](value)[:], other(value)[:]
        assert torch.equal(first, second)
        assert 0.02 < first.mean() < 0.9
        with definition(net):
            functional.reset_net(net)
            assert torch.equal(first, net(frames()))


def test_a_part_that_is_kept_for_a_call_with_gradients():
    """A value of a call without gradients, read while autograd records."""
    net = converted(1, layers=1)
    with torch.no_grad():
        value = net[0](frames())
        expected = F.conv2d(frames().flatten(0, 1), net[0].weight, padding=1)
    scale = torch.ones(1, requires_grad=True)
    (value * scale).sum().backward()
    torch.testing.assert_close(scale.grad[0], expected.sum())
    assert not value.requires_grad


def test_a_convolution_that_cannot_be_run_says_so_at_once():
    net = converted(2)
    net[0].padding = (0, 0)
    with torch.no_grad(), pytest.raises(RuntimeError, match="Kernel size"):
        net[0](torch.rand(4, 1, 2, 2, 2))


def deferred_by(net, x):
    with torch.no_grad():
        value = net[0](x)
    return isinstance(value, Shared) and type(value.expression.held) is deferred.Deferred


def test_who_gets_no_part(monkeypatch):
    """Gradients, autocast, a profiler, other dtypes, padding, classes and functions: run at once, as before."""
    net = converted(2)
    assert deferred_by(net, frames())
    value = net[0](frames())
    assert type(value.expression.held) is torch.Tensor
    assert value.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert not deferred_by(net, frames())
    with torch.profiler.profile():
        assert not deferred_by(net, frames())
    assert not deferred_by(converted(2).bfloat16(), frames().bfloat16())
    assert deferred_by(converted(2), frames())
    with monkeypatch.context() as patch:
        patch.setattr(F, "conv2d", lambda *args: torch.conv2d(*args))
        assert not deferred_by(net, frames())
    with monkeypatch.context() as patch:
        patch.setattr(memory, "mode", lambda: "kept")
        assert not deferred_by(net, frames())
    for change in ({"padding_mode": "circular", "_reversed_padding_repeated_twice": [1, 1, 1, 1]}, {"padding": "same"}):
        other = converted(2)
        other[0].__dict__.update(change)
        assert not deferred_by(other, frames())


def test_a_convolution_that_somebody_overrode_is_run_as_it_is():
    net = converted(2)
    net[3]._conv_forward = lambda x, weight, bias: torch.conv2d(x, 2 * weight, bias, padding=1)
    assert 0.02 < compare(net, frames()) < 0.9
    own = net[3]._conv_forward
    del net[3]._conv_forward
    with torch.no_grad():
        net[3].weight.mul_(2)
        expected = net(frames())
        net[3].weight.div_(2)
        net[3]._conv_forward = own
        functional.reset_net(net)
        assert torch.equal(net(frames()), expected)


def test_what_costs_more_to_keep_than_to_run(monkeypatch):
    net = converted(2)
    monkeypatch.setattr(deferred, "SHARE", 1e9)
    assert not deferred_by(net, frames())


@pytest.mark.parametrize(("shape", "groups", "wanted"), [
    ((8, 4, 128, 64, 64), 1, (1, 64)), ((2, 16, 128, 32, 32), 1, (8, 128)), ((8, 6, 128, 16, 16), 1, (6, 128)),
    ((64, 1, 100, 64, 64), 1, (1, 100)), ((16, 1, 128, 128, 128), 32, (1, 128)),
])  # fmt: skip
def test_the_size_of_a_part(shape, groups, wanted, monkeypatch):
    for name, value in {"PART": 8 << 20, "FEWEST": 64, "FEWEST_OF_FEW": 32}.items():
        monkeypatch.setattr(deferred, name, value)
    options = deferred.Options((1, 1), (1, 1), (1, 1), groups)
    made = deferred.Deferred(torch.empty(0), (torch.empty(128, 128, 3, 3), None), options, shape)
    assert made.size_of_part() == wanted


class Constructed(layer.Conv2d):
    """A user's class that adds a constructor alone, and is patched after a net of it was converted."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, 3, padding=1, bias=False, step_mode="m")


def test_a_class_that_is_patched_after_convert(monkeypatch):
    torch.manual_seed(0)
    net = awake()
    for i in (0, 3, 6):
        mine = Constructed(net[i].in_channels, net[i].out_channels)
        mine.load_state_dict(net[i].state_dict())
        net[i] = mine
    net = sj_tac.convert(net, k=2, example_input=torch.rand(4, 1, 2, 8, 8))
    compare(net, frames())
    with torch.no_grad():
        before = net(frames())[:]
        monkeypatch.setattr(Constructed, "forward", lambda self, x: 1.7 * layer.Conv2d.forward(self, x), raising=False)
        functional.reset_net(net)
        assert not torch.equal(net(frames())[:], before)
    assert 0.02 < compare(net, frames()) < 0.9
