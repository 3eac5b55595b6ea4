"""What happens between the making of a value and its reading is what happens to frames, in training and in inference."""

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import only_v2
from torch import nn

import sj_tac
from sj_tac.errors import StaleValueError

CLOSE = {"rtol": 1e-10, "atol": 1e-11}


class Net(nn.Module):
    """Two chains, whose neurons fire; ``between`` is what the forward does to the first one's spikes."""

    def __init__(self, make=neuron.LIFNode, between=None, channels=4):
        super().__init__()
        torch.manual_seed(0)
        given = {"v_threshold": 0.1, "surrogate_function": surrogate.ATan()}
        self.conv1, self.lif1 = layer.Conv2d(2, channels, 3, padding=1), make(**given)
        self.conv2, self.lif2 = layer.Conv2d(channels, channels, 3, padding=1), make(**given | {"v_threshold": 0.05})
        self.between = between or (lambda net, x: x)
        functional.set_step_mode(self, "m")
        self.double()

    def forward(self, x):
        return self.lif2(self.conv2(self.between(self, self.lif1(self.conv1(x)))))


def frames(steps=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(steps, 2, 2, 8, 8, generator=generator) < 0.4).double()


def both(net, k=2, weights="decay"):
    policy = {"default": {"mode": "preserve", "k": k, "weights": weights}}
    return [sj_tac.convert(net, policy, fuse=fuse) for fuse in (True, False)]


def trained(net, x, call=None):
    """Output and gradients by name."""
    functional.reset_net(net)
    net.zero_grad()
    y = (call or net)(x)
    (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return y.detach(), {name: p.grad for name, p in net.named_parameters()}


def same(found, expected):
    assert 0.02 < expected[0].mean() < 0.7
    assert torch.equal(found[0], expected[0])
    for name, gradient in expected[1].items():
        assert (found[1][name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(found[1][name], gradient, **CLOSE)


NEURONS = {"LIF": neuron.LIFNode, "PLIF": neuron.ParametricLIFNode}


@pytest.mark.parametrize("weights", ["decay", "learned"])
@pytest.mark.parametrize("kind", NEURONS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_spikes_that_are_detached_keep_the_gradient_of_what_their_reader_sums_by(kind, weights, k):
    net = Net(NEURONS[kind], lambda net, x: x.detach())
    fused, definition = both(net, k, weights)
    expected = trained(definition, frames())
    same(trained(fused, frames()), expected)
    assert expected[1]["conv1.weight"] is None
    with torch.enable_grad():
        functional.reset_net(fused)
        assert not fused.lif1(fused.conv1(frames())).detach().requires_grad


OPERATIONS = {
    "times": lambda x: x * 0.5,
    "negative": lambda x: -x,
    "sum": lambda x: x + x,
    "cat": lambda x: torch.cat([x, x], 2)[:, :, ::2],
    "flatten and back": lambda x: x.flatten(3).unflatten(3, (8, 8)),
    "chunk": lambda x: torch.cat(x.chunk(2, 2), 2),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", NEURONS)
def test_a_part_that_is_frozen_by_no_grad_stays_frozen(kind, operation, mode):
    def call(net):
        def forward(x):
            with mode():
                x = net.lif1(net.conv1(x))
            if mode is torch.inference_mode:
                x = x.clone() if type(x) is torch.Tensor else x
            return net.lif2(net.conv2(OPERATIONS[operation](x)))

        return forward

    fused, definition = both(Net(NEURONS[kind]))
    expected = trained(definition, frames(), call(definition))
    assert expected[1]["conv1.weight"] is None
    same(trained(fused, frames(), call(fused)), expected)


def clamp_weights(net, x):
    net.lif2.w.data.clamp_(-3, -1)
    return x


def clamp_logits(net, x):
    if hasattr(net.conv2, "tac_logits"):
        net.conv2.tac_logits.data.clamp_(-0.2, 0.2)
    return x


@pytest.mark.filterwarnings("ignore::sj_tac.errors.PlanNotKeptWarning")
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(("between", "weights"), [(clamp_weights, "decay"), (clamp_logits, "learned")])
def test_weights_written_through_data_between_two_layers_in_training(between, weights, k):
    results = []
    for net in both(Net(neuron.ParametricLIFNode, between), k, weights):
        net.lif2.w.data.fill_(1.0)
        if weights == "learned":
            net.conv2.tac_logits.data.copy_(torch.linspace(-3, 3, k))
        results.append(trained(net, frames()))
    same(*results)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("k", [1, 2])
def test_a_voltage_that_is_written_before_spikes_are_read(k, mode):
    found = []
    for net in both(Net(), k):
        kept = []
        net.lif1.register_forward_hook(lambda m, args, out, kept=kept: kept.append(out))
        with mode():
            net(frames())
            before = net.lif1.v
            net(frames(seed=2))
            before.add_(5.0)
            try:
                found.append(kept[-1][:].clone())
            except StaleValueError:
                assert mode is torch.no_grad
                return
    assert torch.equal(*found)
    assert 0.02 < found[0].mean() < 0.7


@pytest.mark.parametrize("change", ["alpha", "spiking", "w"])
def test_a_neuron_that_changes_before_its_spikes_are_read(change):
    results = []
    for net in both(Net(neuron.ParametricLIFNode)):
        kept = []
        net.lif1.register_forward_hook(lambda m, args, out, kept=kept: kept.append(out))
        net(frames())
        if change == "w":
            net.lif1.w.data.sub_(2.0)
        elif change == "alpha":
            net.lif1.surrogate_function.alpha = 9.0
        else:
            net.lif1.surrogate_function.spiking = False
        if change == "w" and not results:
            with pytest.raises(StaleValueError, match="time constant w was changed"):
                kept[0][:].sum()
            return
        y = kept[0][:]
        y.sum().backward()
        results.append((y.detach(), {"conv1.weight": net.conv1.weight.grad}))
    same(*results)


@only_v2
@pytest.mark.parametrize("name", ["tau", "v_reset"])
@pytest.mark.parametrize("k", [1, 2])
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
    assert expected[1][f"lif1.{name}"].abs() > 0
    same(trained(fused, frames()), expected)
    if k == 1:
        same(trained(fused, frames()), trained(net, frames()))
    assert fused.lif1._tac.ran == f"its {name} is trained"


def last(net, x):
    return net.to(memory_format=torch.channels_last), x.flatten(0, 1).contiguous(
        memory_format=torch.channels_last
    ).unflatten(0, x.shape[:2])


def tokens():
    torch.manual_seed(0)
    given = {"v_threshold": 0.1, "surrogate_function": surrogate.ATan()}
    net = nn.Sequential(
        layer.Conv1d(2, 4, 3, padding=1), neuron.LIFNode(**given), layer.Conv1d(4, 4, 3, padding=1), neuron.LIFNode(**given),
        layer.Flatten(), layer.Linear(32, 6), neuron.LIFNode(**given),
    )  # fmt: skip
    functional.set_step_mode(net, "m")
    return net.double(), (torch.rand(6, 2, 2, 8) < 0.4).double()


NETS = {"contiguous": lambda: (Net(), frames()), "channels_last": lambda: last(Net(), frames()), "tokens": tokens}


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("recorded", [True, False])
def test_truncated_backpropagation_detaches_voltages_in_place(make, k, recorded):
    net, x = make()
    results = []
    for converted in both(net, k):
        functional.reset_net(converted)
        outputs = []
        for _ in range(3):
            with torch.set_grad_enabled(recorded):
                y = converted(x)
            if recorded:
                y.square().sum().backward()
            outputs.append(y.detach().clone())
            functional.detach_net(converted)
        results.append((torch.stack(outputs), {name: p.grad for name, p in converted.named_parameters()}))
    same(*results)


def test_a_call_in_inference_mode_before_one_that_trains_without_a_reset():
    results = []
    for net in both(Net(neuron.ParametricLIFNode, lambda net, x: x * 0.5)):
        with torch.no_grad():
            net(frames())
        y = net(frames(seed=2))
        y.sum().backward()
        results.append((y.detach(), {name: p.grad for name, p in net.named_parameters()}))
    same(*results)


def test_on_the_meta_device():
    fused, definition = both(Net(between=lambda net, x: x[:-1]))
    shapes = [net.to("meta")(frames().to("meta")).shape for net in (fused, definition)]
    assert shapes[0] == shapes[1] == (5, 2, 4, 8, 8)


@pytest.mark.parametrize("name", ["steps", "kind", "merges", "means", "folded", "expression", "maker", "sums", "mine"])
def test_attributes_of_the_users_on_frames_are_kept_or_refused(name):
    def between(net, x):
        setattr(x, name, True)
        assert getattr(x, name) is True
        return x

    fused, definition = both(Net(between=between))
    expected = trained(definition, frames())
    if name == "mine":
        same(trained(fused, frames()), expected)
    else:
        with pytest.raises(AttributeError, match=f"'{name}' is an attribute of sj_tac's own"):
            fused(frames())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_frames_of_whole_numbers_are_told_what_to_become(backend):
    fused = sj_tac.convert(Net().float(), "preserve", 2, backend=backend)
    with pytest.raises(ValueError, match=r"got frames \[6, 2, 2, 8, 8\] of torch.uint8.*x\.float\(\)"):
        fused(frames().to(torch.uint8))
