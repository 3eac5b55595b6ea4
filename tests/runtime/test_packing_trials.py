"""By what it is known that a packed convolution is torch's own, and of what weights: ways in which that was once wrong."""

import pytest
import torch
from packing_cases import convs, frames, packed, settled, source
from straight_cases import compare
from torch import nn

import sj_tac
from sj_tac.runtime import packing

pytestmark = pytest.mark.skipif(packing._onednn() is None, reason="this build of torch has no oneDNN")


def test_who_looks_at_torchs_functions_sees_convolutions():
    class Doubles(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            return found * 2 if function is torch.conv2d else found

    net, x = packed(1)
    definition = sj_tac.convert(source(), "preserve", 1, fuse=False)
    with torch.no_grad(), Doubles():
        found_ = net(x)
        assert torch.equal(found_, definition(x))
    assert not torch.equal(found_, sj_tac.convert(source(), "preserve", 1)(x))


@pytest.mark.parametrize("make", [torch.zeros_like, lambda w: nn.init.dirac_(w.clone())], ids=["zeros", "dirac"])
def test_weights_that_prove_nothing_are_not_what_is_tried(make, monkeypatch):
    net = sj_tac.convert(source(), "preserve", 1)
    conv, seen = convs(net)[0], []
    conv.weight.data.copy_(make(conv.weight.data))
    pack = packing._packed
    monkeypatch.setattr(
        packing, "_packed", lambda weight, *more: (seen.append(weight.detach().clone()), pack(weight, *more))[1]
    )
    settled(net, frames())
    tried = [weight for weight in seen if not torch.equal(weight, conv.weight)]
    assert len(tried) >= 2
    assert all((weight != 0).all() for weight in tried)


def test_strides_that_change_over_the_same_memory():
    net, x = packed(1)
    conv = convs(net)[1]
    last, numbers = conv.weight.stride(), conv.weight.shape
    contiguous_strides = torch.empty(numbers).stride()
    for strides in (contiguous_strides, last, contiguous_strides, last):
        conv.weight.data = conv.weight.data.as_strided(numbers, strides)
        for _ in range(4):
            compare(net, x)


def test_storage_of_weights_can_still_be_resized():
    net, _ = packed()
    storage = convs(net)[0].weight.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
