"""A norm's map is computed again whenever one of its numbers is another, however it came to be so."""

import copy
import pickle
import threading

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import awake, conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac import host


def net():
    torch.manual_seed(0)
    chain = nn.Sequential(conv(2, 8), norm(8), node("lif"), conv(8, 8), norm(8), node("lif"))
    return awake(chain.eval(), frames(6, 2, 2, 8, 8))


def _data(bn):
    bn.running_mean.data.add_(0.2)


def _in_place(bn):
    bn.weight.mul_(1.5)


def _swap(bn):
    bn.bias.data = bn.bias.data + 0.1


def _new_parameter(bn):
    bn.weight = nn.Parameter(bn.weight * 0.7)


def _loaded(bn):
    bn.load_state_dict({n: x * 1.1 for n, x in bn.state_dict().items() if x.is_floating_point()}, strict=False)


def _learned(bn):
    bn.train()
    bn(torch.randn(4, 2, 8, 5, 5))
    bn.eval()


def _eps(bn):
    bn.eps = 0.3


def _without_bias(bn):
    bn.bias = None


def _without_weight(bn):
    bn.weight = None


def _set(bn):
    bn.running_var.set_(torch.rand(8) + 0.5)


def _numpy(bn):
    bn.running_var.numpy()[3] = 2.5


CHANGES = [
    *(_data, _in_place, _swap, _new_parameter, _loaded, _learned, _eps, _without_bias, _without_weight, _set, _numpy),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_norm_is_what_the_next_call_uses(change):
    source = net()
    fast = sj_tac.convert(source, "preserve", 1)
    x = frames(6, 2, 2, 8, 8)
    with torch.no_grad():
        before = fast(x)
        for i, other in ((1, 1), (4, 4)):
            torch.manual_seed(3)
            change(fast[i])
            torch.manual_seed(3)
            change(source[other])
        functional.reset_net(fast)
        functional.reset_net(source)
        after, expected = fast(x), source(x)
    assert not torch.equal(after, before), "a change that changes nothing"
    assert torch.equal(after, expected)


def maps(bn):
    """Scale and shift in float64."""
    mean, var, weight, bias = (x.detach().double() for x in (bn.running_mean, bn.running_var, bn.weight, bn.bias))
    scale = weight / (var + bn.eps).sqrt()
    return scale, bias - mean * scale


def test_the_map_is_right_and_kept():
    bn, known = norm(16).eval(), host.Affine()
    with torch.no_grad():
        for x in (bn.running_mean, bn.running_var, bn.weight, bn.bias):
            x.copy_(torch.rand(16) + 0.1)
        first = host.affine(bn, known)
        assert host.affine(bn, known) is first
        for found, expected in zip(first, maps(bn), strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
        bn.weight.data[3] = 9.0
        second = host.affine(bn, known)
    assert second is not first
    assert second[0][3] != first[0][3]
    torch.testing.assert_close(second[0].double(), maps(bn)[0], rtol=1e-6, atol=1e-7)


def test_a_map_of_inference_mode_serves_a_call_that_records():
    fast = sj_tac.convert(net(), "preserve", 2)
    for parameter in fast[1].parameters():
        parameter.requires_grad_(False)
    x = frames(4, 2, 2, 8, 8)
    with torch.inference_mode():
        fast(x)
    functional.reset_net(fast)
    fast(x).sum().backward()
    assert fast[0].weight.grad.abs().sum() > 0


def test_a_norm_with_gradients_has_them_after_calls_without():
    source = net()
    fast = sj_tac.convert(source, "preserve", 1)
    x = frames(4, 2, 2, 8, 8)
    with torch.no_grad():
        fast(x)
    for model in (fast, source):
        functional.reset_net(model)
        model(x).sum().backward()
    torch.testing.assert_close(fast[1].weight.grad, source[1].weight.grad, rtol=1e-4, atol=1e-4)


def by_torch(bn):
    """Scale and shift, by torch's operations; its square root in float32 may be off by a last bit."""
    scale = 1 / (bn.running_var + bn.eps).double().sqrt().float()
    scale = scale if bn.weight is None else bn.weight * scale
    shift = -bn.running_mean * scale
    return scale, shift if bn.bias is None else bn.bias + shift


@pytest.mark.parametrize("learned", [("weight", "bias"), ("weight",), ("bias",), ()])
def test_a_map_has_the_gradients_of_torchs_operations_to_the_last_bit(learned):
    torch.manual_seed(0)
    bn, known = norm(16).eval(), host.Affine()
    with torch.no_grad():
        for x in (bn.running_mean, bn.weight, bn.bias):
            x.normal_()
        bn.running_var.uniform_(0.01, 4)
    for name, parameter in bn.named_parameters():
        parameter.requires_grad_(name in learned)
    slopes, found = (torch.randn(16), torch.randn(16)), []
    expected = by_torch(bn)
    for by in (host.affine(bn, known), host.affine(bn, known), expected):
        assert all(torch.equal(a, b) for a, b in zip(by, expected, strict=True))
        wanted = [p for p in bn.parameters() if p.requires_grad]
        assert [value.requires_grad for value in by] == ["weight" in learned, bool(learned)]
        pairs = [(value, slope) for value, slope in zip(by, slopes, strict=True) if value.requires_grad]
        found.append(torch.autograd.grad([v for v, _ in pairs], wanted, [g for _, g in pairs]) if wanted else ())
    assert all(torch.equal(a, b) for again in found for a, b in zip(again, found[-1], strict=True))


def test_statistics_that_move_before_the_backward_do_not_move_its_gradients():
    bn, known = norm(4).eval(), host.Affine()
    scale, shift = host.affine(bn, known)
    expected = torch.autograd.grad(by_torch(bn), [bn.weight, bn.bias], (torch.ones(4), torch.ones(4)))
    with torch.no_grad():
        bn.running_var.mul_(3)
        bn.running_mean.add_(1)
        host.affine(bn, known)
    found = torch.autograd.grad((scale, shift), [bn.weight, bn.bias], (torch.ones(4), torch.ones(4)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
def test_a_map_that_was_differentiated_leaves_the_kept_one_without_a_graph():
    bn, known = norm(4).eval(), host.Affine()
    before = host.affine(bn, known)
    with torch.enable_grad():
        assert host.affine(bn, known)[0].requires_grad
    after = host.affine(bn, known)
    assert after is before
    assert not after[0].requires_grad


def test_a_weight_in_another_dtype_than_the_statistics_maps_by_torchs_operations():
    bn = norm(4).eval()
    bn.weight = torch.nn.Parameter(torch.rand(4).bfloat16())
    scale, shift = host.affine(bn, host.Affine())
    for found, expected in zip((scale, shift), by_torch(bn), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    (scale.sum() + shift.sum()).backward()
    assert bn.weight.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_keeps_a_map_of_its_own(copied):
    fast = sj_tac.convert(net(), "preserve", 1)
    x = frames(4, 2, 2, 8, 8)
    with torch.no_grad():
        before = fast(x)
        other = copied(fast)
        other[1].running_mean.data.add_(0.5)
        for model in (fast, other):
            functional.reset_net(model)
        assert torch.equal(fast(x), before)
        assert not torch.equal(other(x), before)


def test_threads_that_share_a_norm_get_its_map():
    bn, known, wrong = norm(8).eval(), host.Affine(), []
    expected = [t.clone() for t in host.affine(bn.requires_grad_(False), host.Affine())]

    def look():
        for _ in range(300):
            found = host.affine(bn, known)
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                wrong.append(found)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("k", [2, 4])
def test_one_map_in_channels_last_has_the_gradients_of_a_contiguous_one(k, training, fuse):
    """torch alone is wrong there: of one sample, whose batch has the stride that a view gives it."""
    torch.manual_seed(0)
    source = nn.Sequential(
        layer.Conv2d(3, 8, 5, 2, 2), layer.BatchNorm2d(8), neuron.LIFNode(v_threshold=0.5), layer.AvgPool2d(3, 1, 1),
        layer.Conv2d(8, 24, 1), layer.BatchNorm2d(24), neuron.LIFNode(v_threshold=0.2),
    ).double()  # fmt: skip
    functional.set_step_mode(source, "m")
    source.train(training)
    x, found = torch.rand(4, 1, 3, 12, 9).double(), []
    for last in (False, True):
        layout = torch.channels_last if last else torch.contiguous_format
        fast = sj_tac.convert(source, "preserve", k, fuse=fuse).to(memory_format=layout)
        y = fast(x.flatten(0, 1).contiguous(memory_format=layout).unflatten(0, (4, 1)))
        assert 0.01 < y.mean() < 0.9
        (y * torch.linspace(-1, 1, y.numel()).double().view(y.shape)).sum().backward()
        found.append((y.detach(), *(p.grad for p in fast.parameters())))
    for ours, expected in zip(*found[::-1], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


def test_memory_that_is_freed_and_brought_back():
    """As sharding and offloading do: other numbers are seen, and none are an error, as of torch's own BatchNorm."""
    source = nn.Sequential(conv(2, 8), norm(8), node("lif", v_threshold=0.3)).eval()
    net, x = sj_tac.convert(source, "preserve", 1), frames(4, 2, 2, 6, 6)

    def both():
        functional.reset_net(source)
        functional.reset_net(net)
        with torch.no_grad():
            return source(x), net(x)

    assert torch.equal(*both())
    for module in (source[1], net[1]):
        for held in (module.weight, module.running_mean):
            numbers = held.detach() * 1.25
            held.untyped_storage().resize_(0)
            held.untyped_storage().resize_(numbers.untyped_storage().nbytes())
            held.data.copy_(numbers)
    expected, found = both()
    assert 0.02 < expected.mean() < 0.9
    assert torch.equal(found, expected)
    net[1].weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"\[8\] has no memory"):
        both()


@pytest.mark.parametrize("size", [8, 64])
def test_a_convolution_whose_memory_was_freed_is_an_error(size):
    """Also where one kernel would run it with the neuron."""
    net = sj_tac.convert(nn.Sequential(conv(2, 8), norm(8), node("lif")).eval(), "preserve", 1)
    net, x = net.to(memory_format=torch.channels_last), frames(8, 4, 2, size, size)
    with torch.no_grad():
        for _ in range(2):
            net(x)
            functional.reset_net(net)
        net[0].weight.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="not allocated"):
            net(x)
