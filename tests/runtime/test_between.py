"""What happens between the making of a value and its reading is what happens to frames, in training and in inference."""

import pairs
import pytest
import torch
from comparing import Way, run, same
from operations import Saved
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import only_v2
from torch import nn

import sj_tac
from sj_tac.errors import StaleValueError


class Net(nn.Module):
    """Two chains, whose neurons fire; ``between`` acts on the first one's spikes, ``behind`` on the second one's drives."""

    def __init__(self, make=neuron.LIFNode, between=None, channels=4):
        super().__init__()
        torch.manual_seed(0)
        given = {"v_threshold": 0.1, "surrogate_function": surrogate.ATan()}
        self.conv1, self.lif1 = layer.Conv2d(2, channels, 3, padding=1), make(**given)
        self.conv2, self.lif2 = layer.Conv2d(channels, channels, 3, padding=1), make(**given | {"v_threshold": 0.05})
        self.between, self.behind, self.seen = between or (lambda net, x: x), lambda net, x: x, None
        self.gain = nn.Parameter(torch.linspace(-1, 1, channels))
        functional.set_step_mode(self, "m")
        self.double()

    def forward(self, x):
        return self.lif2(self.behind(self, self.conv2(self.between(self, self.lif1(self.conv1(x))))))


def frames(steps=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(steps, 2, 2, 8, 8, generator=generator) < 0.4).double()


def both(net, k=2, weights="decay"):
    policy = {"default": {"mode": "preserve", "k": k, "weights": weights}}
    return [sj_tac.convert(net, policy, fuse=fuse) for fuse in (True, False)]


def trained(net, x, call=None):
    return run(net, x, Way(train=True), **({} if call is None else {"call": call}))


def agree(found, expected):
    assert 0.02 < expected.values[0].mean() < 0.7
    same(found, expected)


NEURONS = {"LIF": neuron.LIFNode, "PLIF": neuron.ParametricLIFNode}


@pairs.parametrize(weights=["decay", "learned"], kind=NEURONS, k=[2, 1, 3])
def test_spikes_that_are_detached_keep_the_gradient_of_what_their_reader_sums_by(kind, weights, k):
    net = Net(NEURONS[kind], lambda net, x: x.detach())
    fused, definition = both(net, k, weights)
    expected = trained(definition, frames())
    agree(trained(fused, frames()), expected)
    assert "conv1.weight" not in expected.gradients
    functional.reset_net(fused)
    assert not fused.lif1(fused.conv1(frames())).detach().requires_grad


OPERATIONS = {
    "negative": lambda x: -x,
    "cat": lambda x: torch.cat([x, x], 2)[:, :, ::2],
    "flatten and back": lambda x: x.flatten(3).unflatten(3, (8, 8)),
}


@pairs.parametrize(mode=[torch.no_grad, torch.inference_mode], operation=OPERATIONS, kind=NEURONS)
def test_a_part_that_is_frozen_by_no_grad_stays_frozen(kind, operation, mode):
    def call(net, x):
        with mode():
            x = net.lif1(net.conv1(x))
        if mode is torch.inference_mode:
            x = x.clone() if type(x) is torch.Tensor else x
        return net.lif2(net.conv2(OPERATIONS[operation](x))) * 1

    fused, definition = both(Net(NEURONS[kind]))
    expected = trained(definition, frames(), call)
    assert "conv1.weight" not in expected.gradients
    agree(trained(fused, frames(), call), expected)


@pytest.mark.parametrize("change", ["alpha", "w"])
def test_a_neuron_that_changes_before_its_spikes_are_read(change):
    """They are what they were; or refused, as only the neuron knows how to make them."""
    results = []
    for net in both(Net(neuron.ParametricLIFNode)):
        kept = []
        net.lif1.register_forward_hook(lambda m, args, out, kept=kept: kept.append(out))
        net(frames())
        if change == "w":
            net.lif1.w.data.sub_(2.0)
            with pytest.raises(StaleValueError, match="time constant w was changed"):
                kept[0][:].sum()
            return
        net.lif1.surrogate_function.alpha = 9.0
        y = kept[0][:]
        y.sum().backward()
        results.append((y.detach(), net.conv1.weight.grad))
    torch.testing.assert_close(*results)
    assert 0.02 < results[0][0].mean() < 0.7


@only_v2
@pytest.mark.parametrize(("name", "k"), [("tau", 1), ("v_reset", 2)])
def test_a_trained_number_has_the_gradient_that_the_host_gives_it(name, k):
    def make(**given):
        made = neuron.LIFNode(**given | {"surrogate_function": surrogate.Rect()})
        value = nn.Parameter(torch.tensor(2.0 if name == "tau" else 0.0, dtype=torch.float64))
        delattr(made, name)
        made.register_parameter(name, value)
        return made

    net = Net(make)
    fused, definition = both(net, k)
    expected = trained(definition, frames())
    assert expected.gradients[f"lif1.{name}"].abs() > 0
    agree(trained(fused, frames()), expected)
    if k == 1:
        agree(trained(fused, frames()), trained(net, frames()))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_frames_of_whole_numbers_are_told_what_to_become(backend):
    fused = sj_tac.convert(Net().float(), "preserve", 2, backend=backend)
    with pytest.raises(ValueError, match=r"got frames \[6, 2, 2, 8, 8\] of torch.uint8.*x\.float\(\)"):
        fused(frames().to(torch.uint8))


# ---- writes into what others keep ----------------------------------------------------------------------------------------
def written(change, frozen=False):
    """The net fused and unfused; ``change``, of drives, is what the trace has not seen."""
    net = Net()
    net.requires_grad_(not frozen).gain.requires_grad_()
    nets = both(net)
    for each in nets:
        each.behind = change
    return nets


def fill(x):
    x[:, :, 1] = 0.3


def add(x):
    x += x * 0.5


def scale(x):
    x *= 0.5


WRITES = pytest.mark.parametrize("write", [fill, add, scale])


class SavedBeside(torch.autograd.Function):
    """Keeps its input, for the gradient of another that it has."""

    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x)
        return x * 2 + gain.sum()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return None, (gradient * x).sum((0, 1, 3, 4))


@pytest.mark.parametrize("frozen", [False, True])
@WRITES
def test_what_a_function_kept_must_not_be_written(write, frozen):
    def change(net, x):
        y = SavedBeside.apply(x, net.gain)
        write(x)
        return x + y

    for net in written(change, frozen):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(net, frames())


@pytest.mark.parametrize("through", ["base", "view", "another view", "no grad"])
@WRITES
def test_a_function_reads_a_view_of_what_was_written_since(write, through):
    def change(net, x):
        view, other = x.flatten(0, 1), x[..., :]
        if through == "no grad":
            with torch.no_grad():
                write(x)
        else:
            write({"base": x, "view": view, "another view": other}[through])
        return Saved.apply(view).view_as(x) + Saved.apply(x) * 0.5 + other * 0.1

    fused, defined = written(change)
    same(run(fused, frames(), Way("input")), run(defined, frames(), Way("input")))


def test_the_gradient_of_what_was_written_is_to_be_had():
    def change(net, x):
        fill(x)
        x[..., 2] = net.gain[:, None]
        x.retain_grad()
        net.seen = x
        return x

    fused, defined = written(change)
    same(run(fused, frames()), run(defined, frames()))
    assert defined.seen.grad.abs().max() > 0
    torch.testing.assert_close(fused.seen.grad, defined.seen.grad, rtol=1e-9, atol=1e-10)


def test_spikes_that_are_written_after_they_were_added_to_drives():
    def between(net, x):
        net.seen = x
        return x

    def behind(net, x):
        x = x + net.seen
        net.seen.mul_(0.0)
        return x

    found = []
    for net in both(Net(between=between)):
        net.behind = behind
        found.append(run(net, frames(), Way("no_grad")))
    agree(*found)
