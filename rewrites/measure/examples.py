"""An example for a net that was given none: the first of a few usual shapes that its forward takes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sj_tac.errors import ConversionError
from sj_tac.rewrites.measure.runs import fresh, is_convolution

STEPS, SAMPLES = (4, 8, 10, 16), 2
SIDES = (32, 64, 128, 224, 28, 34, 48)


def find_example(net: nn.Module) -> Tensor:
    """Return random events of a shape that ``net`` takes, tried on fake tensors, which compute nothing.

    Raises:
        ConversionError: none of the usual shapes fits.
    """
    # torch logs each failure, and most of these shapes must fail.
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    try:
        return _example(net)
    finally:
        logging.getLogger("torch._subclasses.fake_tensor").disabled = False


def _example(net: nn.Module) -> Tensor:
    error: Exception | None = None
    for shape in _shapes(net):
        made = fresh(net, hooks=False).eval()  # for each: a forward that failed half way has stored voltages
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
                made(fake.from_tensor(torch.empty(shape)))
        except Exception as raised:
            error = error or raised
            continue
        generator = torch.Generator().manual_seed(0)
        x = (torch.rand(shape, generator=generator) < 0.3).to(next((p.dtype for p in net.parameters()), torch.float32))
        return x.to(next((p.device for p in net.parameters()), torch.device("cpu")))
    raise ConversionError(
        f"this {type(net).__name__} takes none of the usual shapes [T, N, C, H, W] ({type(error).__name__}: "
        f"{str(error)[:120]}); pass example_input=, a batch of two or more samples"
    ) from error


def _shapes(net: nn.Module) -> Iterator[tuple[int, ...]]:
    convolutions = [m for m in net.modules() if is_convolution(m)]
    if not convolutions:
        return
    weight = next(p for p in convolutions[0].parameters() if p.dim() >= 3)
    channels = getattr(convolutions[0], "in_channels", weight.shape[1])
    dims = weight.dim() - 2
    for steps, side in itertools.product(STEPS, SIDES if dims > 1 else (32, 128, 1024)):
        yield (steps, SAMPLES, channels, *[side] * dims)
    for side in SIDES:  # images, which the net repeats itself
        yield (SAMPLES, channels, *[side] * dims)
    for steps, side in itertools.product(STEPS, SIDES):  # samples first
        yield (SAMPLES, steps, channels, *[side] * dims)
