"""Convolutions and Linears of whole numbers from 0 to 255 by weights of 8 bits: torch's own oneDNN operators.

    drives = scale * (w8 * sums) + shift        w8 = round(w / s), s = max |w| / 127 of each output channel

The sum over ``w8 * sums`` is exact. Sums of spikes are whole numbers where the weights of frames are: ``whole_weights``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

MOST = 255  # a uint8's
# Multiplications of a call below which float32 is as fast: torch takes 40 us more to begin one in int8. Of twelve layers of
# 0.3 to 75 million (one thread of an EPYC) those of 2 million and more were 1.2 to 2.4 times as fast, others 0.65 to 0.8.
LEAST_MULTIPLICATIONS = 2_000_000


@cache
def problem() -> str:
    """Return why this machine runs no convolution in int8; empty if it does.

    A processor without VNNI adds products in pairs of 16 bits, which overflow without a word: a convolution of the largest
    numbers tells.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"int8 needs an x86 processor with VNNI instructions, and this one is {platform.machine()}"
    if not torch.cpu._is_vnni_supported():
        return "int8 needs an x86 processor with VNNI instructions, which this one has not"
    try:
        x = torch.full((1, 64, 4, 4), MOST, dtype=torch.uint8)
        w = torch.full((8, 64, 3, 3), 127, dtype=torch.int8)
        one, none = torch.ones(8), torch.zeros(8)
        conv, rows_of = convolution((1, 1), (0, 0), (1, 1)), linear()
        found = conv.run(x, conv.prepack(w), one, none)
        rows = rows_of.run(x[:, :, 0, 0], rows_of.prepack(w[:, :, 0, 0].contiguous()), one, none)
    except Exception as error:  # the operators are private to torch, and may be others in another version
        return f"the int8 operators of torch {torch.__version__} are not those that sj_tac knows ({error})"
    if bool((found != MOST * 127 * 64 * 9).any()) or bool((rows != MOST * 127 * 64).any()):
        asked = os.environ.get("ONEDNN_MAX_CPU_ISA")
        why = f"ONEDNN_MAX_CPU_ISA={asked} turns its VNNI instructions off" if asked else "oneDNN uses no VNNI instructions"
        return f"int8 convolutions are not exact here: {why}"
    return ""


@lru_cache(maxsize=1024)
def whole_weights(groups: tuple[tuple[float, ...], ...], top: int) -> tuple[tuple[tuple[int, ...], ...], int, float]:
    """Return whole weights for groups of frames, all of one sum S <= top; S; and by how much w / S is off at most.

    The smallest S of those with the least error. Decays of 1/2 and 1 are exact: 2^j with S = 2^k - 1, and 1 with S = k.
    """
    shares = [[w / sum(group) for w in group] for group in groups]
    best: tuple[float, int, list[list[int]]] | None = None
    for S in range(1, top + 1):
        found = [_rounded(share, S) for share in shares]
        pairs = ((n, w) for whole, share in zip(found, shares, strict=True) for n, w in zip(whole, share, strict=True))
        error = max(abs(n / S - w) for n, w in pairs)
        if best is None or error < best[0] - 1e-9:
            best = error, S, found
    assert best is not None
    return tuple(map(tuple, best[2])), best[1], best[0]


@lru_cache(maxsize=1024)
def _whole_sums(weights: tuple[float, ...], steps: int, top: int) -> tuple[Tensor, int, float]:
    k = len(weights)
    tail = [weights[k - steps % k :]] if steps % k else []
    groups, S, error = whole_weights(tuple([weights] * (steps >= k) + tail), top)
    by_step = [*(groups[0] * (steps // k)), *(groups[-1] if tail else ())]
    with torch.inference_mode(False):
        return torch.tensor(by_step, dtype=torch.float32), S, error


def whole_sums(weights: tuple[float, ...], by: Tensor | None, steps: int, top: int) -> tuple[Tensor, int, float]:
    """Return one whole weight for each of T steps, [T]; their sum S in a group; and by how much they are off at most.

    Args:
        weights, by: of a group of k steps: numbers, or a tensor [k].
    """
    return _whole_sums(weights if by is None else tuple(by.tolist()), steps, top)


def _rounded(shares: list[float], S: int) -> list[int]:
    """Return whole numbers of sum S: rounded down, and up where most is missing."""
    whole = [int(w * S + 1e-9) for w in shares]
    missing = sorted(range(len(shares)), key=lambda j: whole[j] - shares[j] * S)
    for j in missing[: S - sum(whole)]:
        whole[j] += 1
    return whole


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight in int8, and its scale [C] by output channel: the weight is about their product."""
    rows = weight.detach().flatten(1)
    scale = rows.abs().amax(1).clamp_min(torch.finfo(weight.dtype).tiny) / 127
    return (rows / scale[:, None]).round().to(torch.int8).view(weight.shape), scale


class Operator:
    """One layer's operator: what torch made of its weight is kept until the weight is another.

    Weights are compared by version, address and about a thousand of their numbers.

    Args:
        prepack: takes a weight in int8. run: takes whole numbers, what prepack gave, scale and shift [C].
    """

    def __init__(self, prepack: Callable[[Tensor], Tensor], run: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        self.prepack, self.run = prepack, run
        # Replaced as a whole: another thread may be reading it.
        self._known: tuple[Any, Tensor, Tensor, Tensor] | None = None
        self._folded: tuple[Any, Tensor, Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, S: int, norm: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return drives in float32 of whole numbers x, S times the frames; norm: (scale, shift) [C] behind them, or None."""
        pack, own = self._pack(weight)
        known, parts = self._folded, (own, S, norm)
        add = torch.zeros_like(own) if bias is None else bias.detach()
        if known is None or any(a is not b for a, b in zip(known[0], parts, strict=True)) or not torch.equal(known[1], add):
            scale, shift = own / S, add.clone()
            if norm is not None:
                scale, shift = scale * norm[0], shift * norm[0] + norm[1]
            known = self._folded = parts, add.clone(), scale, shift
        return self.run(x, pack, known[2], known[3])

    def _pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        known, numbers = self._known, weight.detach()
        place = (weight._version if not weight.is_inference() else 0, weight.data_ptr(), weight.shape, weight.stride())
        step = max(1, weight.numel() // 1000)
        if weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last):
            sample = numbers.as_strided((weight.numel() // step,), (step,))
        else:  # with gaps, or numbers that stand for several
            sample = numbers.flatten()[::step]
        if known is None or known[0] != place or not torch.equal(known[1], sample):
            with torch.inference_mode(False):
                w8, scale = rounded(numbers)
                known = self._known = place, sample.clone(), self.prepack(w8.contiguous()), scale
        return known[2], known[3]


def convolution(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Operator:
    """Return a Conv2d; its output is in channels_last."""
    how = list(stride), list(padding), list(dilation), 1

    def prepack(w8: Tensor) -> Tensor:
        return torch.ops.onednn.qconv_prepack(w8, torch.ones(len(w8)), 1.0, 0, *how, None)  # type: ignore[no-any-return]

    def run(x: Tensor, pack: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        zero = torch.zeros(len(scale), dtype=torch.int)
        found: Tensor = torch.ops.onednn.qconv2d_pointwise(
            x, 1.0, 0, pack, scale, zero, shift, *how, 1.0, 0, torch.float32, "none", [], ""
        )
        return found

    return Operator(prepack, run)


def linear() -> Operator:
    """Return a Linear, of rows [.., features]."""

    def prepack(w8: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_prepack(w8, None)  # type: ignore[no-any-return]

    def run(x: Tensor, pack: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        zero, rows = torch.zeros(len(scale), dtype=torch.int), x.flatten(0, -2)
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 0, pack, scale, zero, shift, 1.0, 0, torch.float32, "none", [], ""
        )
        return found.view(*x.shape[:-1], -1)

    return Operator(prepack, run)
