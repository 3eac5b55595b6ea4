"""Functions between convolution and neuron that map each frame linearly by constants: which carry drives, which do not."""

import einops
import pytest
import torch
import torch.nn.functional as F
from defined import given, same
from idioms.miniatures import by_hand
from spikingjelly.activation_based import layer
from support import conv, frames, node
from torch import nn

import sj_tac

C = 8
SQUARE, CUBE = (C, C), (C, C, C)


class Between(nn.Module):
    """``change`` stands between the second conv's norm and its neuron, with a constant or a module of its own.

    ``fold``: it is handed folded frames.
    """

    def __init__(self, change, shape=None, fold=False, outputs=C):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.lif1 = conv(2, C), node("lif", v_threshold=0.2)
        self.conv2, self.bn2, self.lif2 = conv(C, C), layer.BatchNorm2d(C, step_mode="m"), node("lif", v_threshold=0.1)
        self.conv3, self.lif3 = conv(outputs, 4), node("lif", v_threshold=0.03)
        self.change, self.fold = change, fold
        if isinstance(shape, tuple):
            self.constant = nn.Parameter(torch.rand(shape) * 0.4)
        elif shape is not None:
            self.module = shape()

    def forward(self, x):
        x = self.bn2(self.conv2(self.lif1(self.conv1(x))))
        t, n = x.shape[:2]
        x = self.change(self, x.flatten(0, 1)).unflatten(0, (t, n)) if self.fold else self.change(self, x)
        return self.lif3(self.conv3(self.lif2(x)))


def written(x, *pairs):
    """``x``, to places of which constants were written."""
    for index, value in pairs:
        x[index] = value
    return x


HERE = slice(None)


def seven(s):
    return torch.tensor([3, 1, 0, 2, 4, 5, 7, 6])


CARRIED = {
    "flip by name": (lambda s, x: torch.flip(x, dims=(3, 4)),),
    "roll by name": (lambda s, x: torch.roll(x, shifts=2, dims=-1),),
    "product": (lambda s, x: x @ s.constant, SQUARE),
    "product from the left": (lambda s, x: s.constant @ x, SQUARE),
    "products by channel": (lambda s, x: torch.matmul(x, s.constant), CUBE),
    "einsum": (lambda s, x: torch.einsum("tnchw,cd->tndhw", x, s.constant), SQUARE),
    "einsum of a graph": (lambda s, x: torch.einsum("vw, tnchw -> tnchv", s.constant, x), SQUARE),
    "linear": (lambda s, x: F.linear(x, s.constant), SQUARE),
    "convolution": (lambda s, x: F.conv2d(x, s.constant, padding=1, groups=C), (C, 1, 3, 3), True),
    "norm": (lambda s, x: F.batch_norm(x, s.bn2.running_mean, s.bn2.running_var, s.bn2.weight, training=False), None, True),
    "repeated channels": (lambda s, x: x.repeat_interleave(2, dim=2), None, False, 2 * C),
    "channels by index": (lambda s, x: torch.index_select(x, 2, seven(s)),),
    "SyncBatchNorm": (lambda s, x: s.module(x), lambda: nn.SyncBatchNorm(C), True),
    "reflected borders": (lambda s, x: s.module(x), lambda: nn.ReflectionPad2d(1), True),
    "Dropout2d": (lambda s, x: s.module(x), lambda: nn.Dropout2d(0.3), True),
    "halves by unbind": (lambda s, x: torch.cat(x.unflatten(2, (2, 4)).unbind(2), 2),),
    "moved": (lambda s, x: x.movedim(2, -1).flip(2).moveaxis(-1, 2),),
    "time moved": (lambda s, x: x.movedim(0, 1).flip(2).movedim(0, 1),),
    "einops": (lambda s, x: einops.rearrange(x, "t n (a c) h w -> t n (c a) w h", a=2),),
    "shuffled channels": (lambda s, x: torch.channel_shuffle(x, 2), None, True),
    "a border written": (
        lambda s, x: written(
            F.pad(x, [1] * 4),
            *(
                (i, s.constant.view(1, C, 1, 1))
                for i in ((HERE, HERE, slice(0, 1), HERE), (HERE, HERE, slice(-1, None), HERE))
            ),
            *((i, s.constant.view(-1, 1, 1) * 2) for i in ((..., slice(0, 1)), (..., slice(-1, None)))),
        ),
        (C,),
        True,
    ),
    "gains of channels": (lambda s, x: x * s.constant.unsqueeze(-1).unsqueeze(-1) / s.bn2.running_var[:, None, None], (C,)),
    "a parameter's sigmoid": (lambda s, x: x * torch.sigmoid(s.constant) + 0.1, ()),
    "an embedding": (lambda s, x: s.constant - x.neg(), (1, C, 8, 8)),
    "channels that become places": (lambda s, x: F.pixel_shuffle(x, 2), None, True, C // 4),
    "borders of a value": (lambda s, x: F.pad(x, (1, 1, 0, 2), value=0.3), None, True),
    "casts": (lambda s, x: F.dropout(x, 0.2, False).type_as(s.bn2.weight).to(x.dtype), None, True),
    "rows written": (lambda s, x: written(x, ((HERE, HERE, HERE, 1), 0.3), ((..., 2, slice(1, 5)), s.constant)), (C, 4)),
    "channels written by a buffer's": (lambda s, x: written(x, ((HERE, HERE, 1), s.bn2.running_mean[:1] + 0.2)),),
    "frames by name": (lambda s, x: torch.flip(input=x, dims=(3,)),),
    "unbind of time": (lambda s, x: torch.stack(x.unbind(0)),),
    "roll of samples": (lambda s, x: torch.roll(x, 1, 1),),
    "product of samples": (lambda s, x: (s.constant @ x.flatten(2)).view(x.shape), (3, 3)),
    "einsum over samples": (lambda s, x: torch.einsum("tnchw,nm->tmchw", x, s.constant), (3, 3)),
    "written by step": (lambda s, x: written(x, ((..., 0), s.constant)), (6, 1, 1, 1)),
    "written by frames": (lambda s, x: written(x, ((..., slice(0, 2)), x[..., 2:4] * 0.5)),),
    "pad of samples by a module": (lambda s, x: s.module(x.flatten(2)).view(x.shape), lambda: nn.ZeroPad2d((0, 0, 1, -1))),
}
# Over time or samples, by what the frames say themselves, or not told apart.
LEFT_ALONE = {
    "roll of time": (lambda s, x: torch.roll(x, 1, 0),),
    "flip of folded frames": (lambda s, x: x.flip(-4), None, True),
    "product by step": (lambda s, x: x @ s.constant, (6, 1, 1, C, C)),
    "product with itself": (lambda s, x: x @ x.transpose(3, 4) * 0.2,),
    "einsum over time": (lambda s, x: torch.einsum("tnchw,ts->snchw", x, s.constant), (6, 6)),
    "batch statistics": (lambda s, x: F.batch_norm(x, None, None, training=True), None, True),
    "a step written": (lambda s, x: written(x, (1, 0.3)),),
    "written where it is large": (lambda s, x: written(x, (x > 0.5, 0.3)),),
    "pad of time": (lambda s, x: F.pad(x, (0, 0, 0, 0, 0, 0, 0, 0, 1, -1)),),
    "pad of samples, folded": (lambda s, x: F.pad(x, (0, 0, 0, 0, 0, 0, 3, -3)), None, True),
    "whole numbers": (lambda s, x: (8 * x).to(torch.int8).to(x.dtype) / 8,),
    "steps by index": (lambda s, x: x.index_select(0, torch.arange(5, -1, -1)),),
}


# They run at the example's sizes alone.
FIXED = ("product of samples", "written by step")


@pytest.mark.parametrize("which", [*CARRIED, *LEFT_ALONE])
def test_values_gradients_and_voltages(which):
    net = Between(*(CARRIED | LEFT_ALONE)[which]).double().eval()
    x, carried = frames(6, 3, 2, 8, 8).double(), which in CARRIED
    fast = sj_tac.convert(net, k=4, example_input=x)
    names = [v.layer for v in sj_tac.report(fast).converted]
    assert names == (["conv1", "conv2", "conv3"] if carried else ["conv1", "conv3"])
    defined, source = by_hand(net, 4, dict.fromkeys(names)), given(net, x)["output 0"]
    assert 0.02 < source.mean() < 0.6
    for z in (x, frames(7, 1, 2, 8, 8, seed=1).double()) if carried and which not in FIXED else (x,):
        found, expected = given(fast, z), given(defined, z)
        same(found, expected, atol=1e-10)
        same(given(fast, z, grad=False), {n: v for n, v in expected.items() if not n.startswith("gradient")}, atol=1e-10)
        assert z is not x or not torch.equal(expected["output 0"], source)
