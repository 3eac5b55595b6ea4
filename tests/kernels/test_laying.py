"""Frames laid out for a first layer's kernel: zeros around them, pixels or columns, however they lay; against ``F.pad``."""

import pytest
import torch
import torch.nn.functional as F
from conv_cases import last

from sj_tac.kernels.cpu.conv_launches import Convolution
from sj_tac.kernels.cpu.conv_sources import with_border

LIES = {
    "contiguous": torch.Tensor.contiguous,
    "channels_last": last,
    "with gaps": lambda x: F.pad(x, [1, 2])[..., 1:-2],
    "another order": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:, :1].contiguous().expand_as(x),
}


def frames(inputs, lies, dtype):
    """[3, 2, C, H, W] of numbers that bfloat16 rounds."""
    x = torch.randn(3, 2, inputs, 5, 8, generator=torch.Generator().manual_seed(0))
    return LIES[lies](x).to(dtype)


def conv(inputs, narrow, above, before, last, size=(5, 8)):
    return Convolution(inputs, *size, 3, 3, 1, 1, above, before, False, (), last, False, narrow)


def padded(x, above, before, high, wide):
    height, width = x.shape[3:]
    return F.pad(x, [before, wide - width - before, above, high - height - above])


def in_pairs(x):
    """[..., C, H, W] in bfloat16 with a channel of zeros behind an odd one."""
    return F.pad(x.bfloat16(), [0, 0, 0, 0, 0, x.shape[-3] % 2])


def bits(x):
    return x.contiguous().flatten().view(torch.int16)


@pytest.mark.parametrize("border", [(1, 1, 7, 10), (0, 0, 5, 8), (2, 0, 9, 11), (0, 3, 6, 12)])
@pytest.mark.parametrize("inputs", [1, 2, 3, 4])
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels(dtype, lies, inputs, border):
    above, before, high, wide = border
    x = frames(inputs, lies, dtype)
    expected = padded(x, *border)
    found = torch.from_numpy(with_border(conv(inputs, True, above, before, True), x, high, wide))
    assert torch.equal(found.view(torch.int16), bits(in_pairs(expected).movedim(2, -1)))
    if dtype is torch.float32:
        found = torch.from_numpy(with_border(conv(inputs, False, above, before, True), x, high, wide))
        assert torch.equal(found, expected.movedim(2, -1).flatten())


@pytest.mark.parametrize("border", [(1, 1, 7, 10), (0, 0, 5, 8), (2, 0, 9, 12), (0, 3, 6, 12)])
@pytest.mark.parametrize("inputs", [1, 2, 3, 4])
@pytest.mark.parametrize("lies", ["contiguous", "with gaps", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_even_columns_and_odd_ones(dtype, lies, inputs, border):
    above, before, high, wide = border
    x, spare = frames(inputs, lies, dtype), 16
    expected = padded(x, *border)
    expected = torch.cat([expected[..., 0::2], expected[..., 1::2]], -1)
    found = torch.from_numpy(with_border(conv(inputs, True, above, before, False), x, high, wide, spare))
    assert not found[-spare:].any()
    pairs = in_pairs(expected).unflatten(2, (-1, 2)).movedim(3, -1)
    assert torch.equal(found[:-spare].view(torch.int16), bits(pairs))
    if dtype is torch.float32:
        found = torch.from_numpy(with_border(conv(inputs, False, above, before, False), x, high, wide, spare))
        assert torch.equal(found[:-spare], expected.flatten())
        assert not found[-spare:].any()


@pytest.mark.parametrize("last", [True, False])
def test_large_ones_by_several_threads(last):
    """More than one thread takes alone; infinite numbers and what is no number among them."""
    x = torch.randn(8, 4, 2, 64, 64)
    x[0, 0, 0, 0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    expected = F.pad(x, [1, 1, 1, 1])
    lying = expected.movedim(2, -1) if last else torch.cat([expected[..., 0::2], expected[..., 1::2]], -1)
    found = torch.from_numpy(with_border(conv(2, False, 1, 1, last, (64, 64)), x, 66, 66))
    assert torch.equal(found.view(torch.int32), lying.contiguous().flatten().view(torch.int32))
