"""An example for a net that was given none: the first of a few usual shapes that its forward takes."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sj_tac import host
from sj_tac.errors import ConversionError
from sj_tac.rewrites.measure.runs import fresh, is_convolution

STEPS, SAMPLES = (4, 8, 10, 16), 2
# Shapes that are tried on fake tensors: a millisecond an operation.
MOST = 35
SIDES = (32, 64, 128, 224, 28, 34, 48)
OTHER_SIDES = tuple(side for side in range(4, 100, 2) if side not in SIDES)


def find_example(net: nn.Module) -> Tensor:
    """Return random events of a shape that ``net`` takes, tried on fake tensors, which compute nothing.

    Raises:
        ConversionError: none of the usual shapes fits.
    """
    # torch logs each failure, and most of these shapes must fail.
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    try:
        kind = next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)
        with host.stack_for(net):
            shape, error = _first_that_fits(net, kind)
    finally:
        logging.getLogger("torch._subclasses.fake_tensor").disabled = False
    if shape is None:
        said = f" ({type(error).__name__}: {str(error)[:120]})" if error is not None else ""
        raise ConversionError(
            f"this {type(net).__name__} takes none of the usual shapes [T, N, C, H, W]{said}; pass example_input=, a batch "
            "of two or more samples"
        ) from error
    x = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.3).to(kind)
    return x.to(next((p.device for p in net.parameters()), torch.device("cpu")))


def _first_that_fits(net: nn.Module, kind: torch.dtype) -> tuple[tuple[int, ...] | None, Exception | None]:
    """Return the first shape that a net takes, and the first error.

    Meta tensors are fast, and nets that make tensors of their own refuse them: then usual shapes are tried on fake ones.
    """
    error: Exception | None = None
    meta = _without_steps(net).to("meta")
    for on_meta in (True, False):
        usual = (shape for shape in _shapes(net) if shape[-1] not in OTHER_SIDES)
        for shape in _shapes(net) if on_meta else itertools.islice(usual, MOST):
            problem = _problem(meta, torch.empty(shape, dtype=kind, device="meta")) if on_meta else None
            if problem is None:
                made = _without_steps(net)  # for each: a forward that failed half way may have stored something
                with FakeTensorMode(allow_non_fake_inputs=True) as fake:
                    problem = _problem(made, fake.from_tensor(torch.empty(shape, dtype=kind)))
            if problem is None:
                return shape, None
            error = error or problem
    return None, error


def _problem(net: nn.Module, x: Tensor) -> Exception | None:
    try:
        with torch.no_grad():
            net(x)
    except Exception as error:
        return error
    return None


def _without_steps(net: nn.Module) -> nn.Module:
    """Return a copy whose neurons of SpikingJelly hand on what they are given: steps change no shape."""
    made = copy.deepcopy(fresh(net)).eval()
    for module in made.modules():
        if isinstance(module, tuple(host.NEURONS)) and host.is_multi_step(module):
            module.forward = lambda x, *args, **kwargs: x
    return made


def _shapes(net: nn.Module) -> Iterator[tuple[int, ...]]:
    convolutions = [m for m in net.modules() if is_convolution(m)]
    if not convolutions:
        width = next((m.in_features for m in net.modules() if isinstance(m, nn.Linear)), 1)
        for tokens in ((), (8,)):
            yield from ((steps, SAMPLES, *tokens, width) for steps in STEPS)
        return
    weight = next(p for p in convolutions[0].parameters() if p.dim() >= 3)
    channels = getattr(convolutions[0], "in_channels", weight.shape[1])
    dims = weight.dim() - 2
    sides = SIDES if dims > 1 else (32, 128, 1024)
    # A Linear layer behind the convolutions fits one size alone, and few nets fix T: sizes first, then T.
    for side in (*sides, *OTHER_SIDES):
        yield (STEPS[0], SAMPLES, channels, *[side] * dims)
    for side in SIDES:  # images, which the net repeats itself
        yield (SAMPLES, channels, *[side] * dims)
    for steps, side in itertools.product(STEPS[1:], sides):
        yield (steps, SAMPLES, channels, *[side] * dims)
    for steps, side in itertools.product(STEPS, SIDES):  # samples first
        yield (SAMPLES, steps, channels, *[side] * dims)
