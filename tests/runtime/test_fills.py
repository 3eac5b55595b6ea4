"""Constants written to places of a drive, ``x[:, :, 0, :] = values``: what a tensor does that is written in place."""

import pytest
import torch
from idioms.constants import Bordered
from spikingjelly.activation_based import functional, layer
from support import conv, differentiated, frames, node
from torch import nn
from torch.utils.checkpoint import checkpoint

import sj_tac
from sj_tac.runtime.values import Shared

C = 8


class Saved(torch.autograd.Function):
    """A custom Function that keeps its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


class Net(nn.Module):
    """``change`` is handed the net and what its second convolution's norm gives."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.lif1 = conv(2, C), node("lif", v_threshold=0.2)
        self.conv2, self.bn2, self.lif2 = conv(C, C), layer.BatchNorm2d(C, step_mode="m"), node("lif", v_threshold=0.1)
        self.gain = nn.Parameter(torch.linspace(-1, 1, C))
        self.change, self.kinds, self.seen = change, [], None

    def forward(self, x):
        x = self.bn2(self.conv2(self.lif1(self.conv1(x))))
        x = self.change(self, x)
        self.kinds.append(isinstance(x, Shared) and x.intact)
        return self.lif2(x)


def fill(net, x):
    x[:, :, 1] = 0.3
    return x


def fill_by_gain(net, x):
    x[:, :, :, 2] = net.gain[:, None]
    return x


def twice_and_read_between(net, x):
    before = x * 0.5
    x[..., 0:2] = 0.2
    between = x.clone()
    x[..., -1] = net.gain.view(C, 1)
    return x + before - between * 0.25


def views_before_and_behind(net, x):
    before = x.flatten(0, 1)
    x[:, :, 1:3] = 0.4
    return x + before.unflatten(0, x.shape[:2]) * 0.5 + x.flatten(3).view_as(x) * 0.1


def through_a_view(net, x):
    x.flatten(0, 1)[:, 2] = 0.4
    return x


def of_frames_that_were_read(net, x):
    peak = x.max().item()
    x[:, :, 1] = 0.01 * peak
    return x


def without_recording(net, x):
    with torch.no_grad():
        x[:, :, 1] = 0.3
    return x


def in_another_dtype(net, x):
    x[:, :, 1:2] = net.gain.half()[1].view(1, 1, 1)
    return x


def in_a_checkpoint(net, x):
    return checkpoint(lambda t: fill_by_gain(net, t * 1), x, use_reentrant=False)


def in_a_reentrant_checkpoint(net, x):
    return checkpoint(lambda t: fill_by_gain(net, t * 1), x, use_reentrant=True)


def kept_by_a_function(net, x):
    x[:, :, 1] = 0.3
    return Saved.apply(x)


def behind_a_function(net, x):
    x = Saved.apply(x) * 1
    x[:, :, 1] = 0.3
    return x


def what_a_function_gave(net, x):
    y = Saved.apply(x)
    y[:, :, 1] = net.gain[1]
    return y


def what_a_function_gave_through_a_view(net, x):
    y = Saved.apply(x.flatten(0, 1))
    y.unflatten(0, x.shape[:2])[:, :, 1] = 0.3
    return y.view_as(x)


def what_a_function_gave_summed(net, x):
    y = Saved.apply(x)
    y += x
    return y * 0.5


def from_within_a_checkpoint(net, x):
    def part(gain):
        x[:, :, 1] = 0.3
        return x * gain

    return checkpoint(part, net.gain.view(-1, 1, 1) + 1, use_reentrant=False)


def in_inference_mode(net, x):
    with torch.no_grad():
        y = x * 1.0
    with torch.inference_mode():
        y[:, :, 1] = 0.3
    return y * net.gain.view(-1, 1, 1) + x


CHANGES = [
    what_a_function_gave, what_a_function_gave_through_a_view, what_a_function_gave_summed, from_within_a_checkpoint,
    in_inference_mode,
    fill, fill_by_gain, twice_and_read_between, views_before_and_behind, through_a_view, of_frames_that_were_read,
    without_recording, in_another_dtype, in_a_checkpoint, in_a_reentrant_checkpoint, kept_by_a_function, behind_a_function,
]  # fmt: skip
STAYS_SHARED = (fill, fill_by_gain, twice_and_read_between, in_another_dtype)


def run(net, x):
    """Outputs and gradients of a call."""
    return differentiated(net, x)[:2]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("frozen", [False, True])
def test_values_and_gradients_are_those_of_frames_that_are_written(change, frozen):
    net, x = Net(fill).double().eval(), frames(6, 3, 2, 8, 8).double()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not frozen or name == "gain" or name.startswith("conv1"))
    for k in (1, 2, 4):
        fast = sj_tac.convert(net, k=k, example_input=x)
        defined = sj_tac.convert(net, k=k, example_input=x, fuse=False)
        fast.change = defined.change = change
        (y, gradients), (expected, wanted) = run(fast, x), run(defined, x)
        assert torch.equal(y, expected)
        assert 0.02 < y.mean() < 0.6
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-10)
        fast.kinds.clear()
        for mode in (torch.no_grad, torch.inference_mode):
            functional.reset_net(fast)
            with mode():
                assert torch.equal(fast(x), expected)
        if change in STAYS_SHARED:
            assert all(fast.kinds)


def test_gradients_of_a_constant_alone():
    net, x = Net(fill_by_gain).double().eval(), frames(6, 3, 2, 8, 8).double()
    net.requires_grad_(False)
    net.gain.requires_grad_()
    fast = sj_tac.convert(net, k=2, example_input=x)
    expected = run(sj_tac.convert(net, k=2, example_input=x, fuse=False), x)
    found = run(fast, x)
    assert torch.equal(found[0], expected[0])
    assert expected[1]["gain"].abs().max() > 0
    torch.testing.assert_close(found[1]["gain"], expected[1]["gain"], rtol=1e-9, atol=1e-10)


def test_the_gradient_of_what_was_written_is_to_be_had():
    def watched(net, x):
        x[:, :, 1] = 0.3
        x.retain_grad()
        net.seen = x
        return x

    net, x = Net(fill).double().eval(), frames(6, 3, 2, 8, 8).double()
    fast, defined = (sj_tac.convert(net, k=2, example_input=x, fuse=fuse) for fuse in (True, False))
    fast.change = defined.change = watched
    assert torch.equal(run(fast, x)[0], run(defined, x)[0])
    assert defined.seen.grad.abs().max() > 0
    torch.testing.assert_close(fast.seen.grad, defined.seen.grad, rtol=1e-9, atol=1e-10)


def fill_it(x):
    x[:, :, 1] = 0.3


def sum_it(x):
    x += x * 0.5


def scale_it(x):
    x *= 0.5


class SavedBeside(Saved):
    """The same, with another input that wants a gradient."""

    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x)
        return x * 2 + gain.sum()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return None, (gradient * x).sum((0, 1, 3, 4))


@pytest.mark.parametrize("write", [fill_it, sum_it, scale_it])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_function_kept_must_not_be_written(write, frozen):
    def kept_and_written(net, x):
        y = SavedBeside.apply(x, net.gain)
        write(x)
        return x + y

    net, x = Net(fill).double().eval(), frames(6, 3, 2, 8, 8).double()
    net.requires_grad_(not frozen)
    net.gain.requires_grad_()
    for fuse in (True, False):
        made = sj_tac.convert(net, k=2, example_input=x, fuse=fuse)
        made.change = kept_and_written
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(made, x)


@pytest.mark.parametrize("write", [fill_it, sum_it, scale_it])
@pytest.mark.parametrize("through", ["base", "view", "another view", "no grad"])
def test_a_function_that_reads_a_view_of_what_was_written_since(write, through):
    """Or what was written through a view: gradients are those of what is read."""

    def viewed(net, x):
        view, other = x.flatten(0, 1), x[..., :]
        if through == "no grad":
            with torch.no_grad():
                write(x)
        else:
            write({"base": x, "view": view, "another view": other}[through])
        return Saved.apply(view).view_as(x) + Saved.apply(x) * 0.5 + other * 0.1

    net, x = Net(fill).double().eval(), frames(6, 3, 2, 8, 8).double()
    fast, defined = (sj_tac.convert(net, k=2, example_input=x, fuse=fuse) for fuse in (True, False))
    fast.change = defined.change = viewed
    (y, gradients), (expected, wanted) = run(fast, x), run(defined, x)
    assert torch.equal(y, expected)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("index", "value"),
    [((..., 0), torch.ones(5)), ((slice(None), slice(None), C), 1.0), ((slice(None),) * 5, torch.ones(C + 1, 1, 1))],
)
def test_what_does_not_fit_is_torchs_own_error(index, value):
    def wrong(net, x):
        x[index] = value
        return x

    net, x = Net(fill).eval(), frames(6, 3, 2, 8, 8)
    fast = sj_tac.convert(net, k=2, example_input=x)
    fast.change = net.change = wrong
    found = []
    for made in (fast, net):
        with pytest.raises((RuntimeError, IndexError)) as error, torch.no_grad():
            made(x)
        found.append((error.type, str(error.value)))
    assert found[0] == found[1]


def test_the_norm_with_a_border_of_published_nets_stays_shared():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv1, self.lif1 = nn.Conv2d(2, C, 3, padding=1), node("lif", v_threshold=0.2)
            self.conv2, self.norm, self.conv3 = nn.Conv2d(C, C, 1), Bordered(C), nn.Conv2d(C, C, 3, groups=C)
            self.lif2 = node("lif", v_threshold=0.1)

        def forward(self, x):
            t, n = x.shape[:2]
            x = self.lif1(self.conv1(x.flatten(0, 1)).unflatten(0, (t, n)))
            return self.lif2(self.conv3(self.norm(self.conv2(x.flatten(0, 1)))).unflatten(0, (t, n)))

    net, x = Block().eval(), frames(6, 3, 2, 8, 8)
    fast = sj_tac.convert(net, k=2, example_input=x)
    with torch.no_grad():
        fast(x)
    found = sj_tac.report(fast)
    assert found["conv3"].last_read == "shared"
    assert not any(found[name].frames_made for name in ("conv2", "conv3"))
