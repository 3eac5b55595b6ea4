"""A norm's map is computed again whenever one of its numbers is another, however it came to be so."""

import copy
import pickle
import threading

import pytest
import torch
from spikingjelly.activation_based import functional
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
