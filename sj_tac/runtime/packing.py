"""Convolutions of small maps whose weights stay in the layout that oneDNN computes in.

torch has the weights laid out anew in every call. Where there are many of them and few places to apply them to, as in the
last stages of a ResNet, that takes several times as long as the convolution. Here they are laid out once, and again when
they are others: a digest of all their bits is compared in every call, as versions do not tell who writes through ``.data``.

Whether oneDNN computes the same from them, to the last bit and in the same strides, is tried once for each kind of call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sj_tac.host.arrays import lent
from sj_tac.kernels import reference
from sj_tac.runtime import deferred
from sj_tac.runtime.deferred import Options

# Places of the output [n, H, W] up to which it pays: of more, laying out the weights is a few hundredths of the convolution.
MOST_PLACES = 1024
# Weights from which on it pays: fewer are laid out as fast as their digest is made. Of sums of few of them any order is one.
FEWEST_WEIGHTS = 1024
# Kinds of calls that a layer remembers: sizes of batches and clips that take turns.
KEPT = 16

# What is known of a kind of call: it came once; it may run from a pack; it may not.
ONCE, PACKS, PLAIN = "once", "packs", "plain"


class Pack(NamedTuple):
    """Weights in oneDNN's layout.

    Attributes:
        weight: the parameter that they are of; at, version: where its numbers lay, and how often it had been written.
        lying: its shape and strides; digest: of the bits of its numbers, in the order of memory, at that time.
        dtype: of the pack; packed: the weights, opaque to all but oneDNN.
    """

    weight: Tensor
    at: int
    version: int | None
    lying: tuple[Any, ...]
    digest: bytes
    dtype: torch.dtype
    packed: Tensor

    def is_of(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether the weights are what they were."""
        same = weight is self.weight and weight.data_ptr() == self.at and _version(weight) == self.version
        same = same and dtype is self.dtype and (weight.shape, weight.stride()) == self.lying
        return same and _digest(weight) == self.digest


@dataclass(eq=False)
class Packing:
    """What a layer knows of its calls, and the pack of its weights, if there is one. A copy of the layer starts anew."""

    calls: dict[Any, str] = field(default_factory=dict)
    pack: Pack | None = None

    def __reduce__(self) -> Any:
        return Packing, ()


class _OneDNN(NamedTuple):
    """What torch has of oneDNN: what lays weights out, and what convolves with them."""

    lay_out: Any
    convolve: Any


@cache
def _onednn() -> _OneDNN | None:
    """None where this build of torch has none, or where Numba compiles nothing: a digest would take minutes."""
    from numba import config

    if not torch.backends.mkldnn.is_available() or config.DISABLE_JIT:  # type: ignore[attr-defined,no-untyped-call]
        return None
    try:
        return _OneDNN(torch._C._nn.mkldnn_reorder_conv2d_weight, torch.ops.mkldnn._convolution_pointwise.default)
    except (AttributeError, RuntimeError):
        return None


# In what oneDNN's convolutions multiply float32, also where that is said of more than them; of torch 2.9 and later.
_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", lambda *_: None)


# Whether somebody looks at torch's functions as they are called.
_is_watched: Any = torch._C._len_torch_function_stack


def convolve(conv: Any, x: Tensor) -> Tensor | None:
    """What a Conv2d makes of folded frames [n, C, H, W] in their dtype, from packed weights; None where it must run itself.

    Args:
        conv: runs the forward of its library's class, on parameters of its own.
    """
    own = conv.__dict__
    parameters, packing = own["_parameters"], own["_tac"].packing
    weight, bias = parameters["weight"], parameters["bias"]
    if x.device.type != "cpu":
        packing.pack = None
        return None
    # So many places that it cannot pay, whatever the stride.
    if torch.is_grad_enabled() or x.numel() > 4 * MOST_PLACES * own["in_channels"] or _is_watched():
        return None
    # All by which torch convolves one way or another.
    kind = (
        x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), weight.dtype, bias is None,
        own["stride"], own["padding"], own["dilation"], own["groups"], own["padding_mode"],
        torch.get_num_threads(), torch._C._get_mkldnn_enabled(), _precision("mkldnn", "conv"),
    )  # fmt: skip
    known = packing.calls.get(kind)
    if known is PLAIN:
        return None
    options = deferred.options_of(conv)
    if known is None or options is None:
        _note(packing, kind, ONCE if options is not None and _may(conv, x, options) else PLAIN)
        return None
    if not deferred.is_plain(conv, x, weight, bias, x.dtype):
        return None
    pack = packing.pack
    if pack is not None and not pack.is_of(weight, x.dtype):
        # They may be other ones in every call: what comes next decides whether they are laid out again.
        packing.pack = None
        return None
    if known is ONCE:
        _note(packing, kind, PACKS if _is_the_same(x, weight, bias, options) else PLAIN)
        return convolve(conv, x)
    if pack is None:
        pack = packing.pack = _packed(weight, x, options)
    return _run(pack, x, bias, options)


def _note(packing: Packing, kind: tuple[Any, ...], known: str) -> None:
    if len(packing.calls) >= KEPT:
        packing.calls.clear()
    packing.calls[kind] = known


def _may(conv: Any, x: Tensor, options: Options) -> bool:
    """Whether calls of this kind are worth a trial."""
    weight = conv._parameters["weight"]
    shape = deferred.output_shape(x[None], weight, options)
    return (
        shape is not None
        and conv._tac.backend != reference.NAME
        and weight.dtype is torch.float32
        # torch itself crashes in some dilated convolutions in bfloat16.
        and (x.dtype is torch.float32 or (x.dtype is torch.bfloat16 and options.dilation == (1, 1)))
        and weight.numel() >= FEWEST_WEIGHTS
        and shape[1] * math.prod(shape[3:]) <= MOST_PLACES
        and any(weight.permute(dims).is_contiguous() for dims in ((0, 1, 2, 3), (0, 2, 3, 1)))
        and _onednn() is not None
    )


def _digest(weight: Tensor) -> bytes:
    """Of the numbers of weights as they lie in memory, side by side."""
    from sj_tac.kernels.cpu import digest  # it imports Numba

    return digest.digest(lent(weight, np.uint32))


def _version(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version


def _packed(weight: Tensor, x: Tensor, options: Options) -> Pack:
    """A pack of weights for frames like ``x``."""
    onednn = _onednn()
    assert onednn is not None
    stride, padding, dilation, groups = options
    # The digest first: who writes meanwhile is found out by the next call.
    before, at, version = _digest(weight), weight.data_ptr(), _version(weight)
    with torch.inference_mode(False), torch.no_grad():  # it outlives the call that it was made in
        laid_out = weight.detach().to(x.dtype).to_mkldnn()
        packed = onednn.lay_out(laid_out, padding, stride, dilation, groups, list(x.shape))
    return Pack(weight, at, version, (weight.shape, weight.stride()), before, x.dtype, packed)


def _run(pack: Pack, x: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    onednn = _onednn()
    assert onednn is not None
    stride, padding, dilation, groups = options
    bias = None if bias is None else bias.to(x.dtype)
    y: Tensor = onednn.convolve(x, pack.packed, bias, padding, stride, dilation, groups, "none", [], "")
    return y


def _is_the_same(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> bool:
    """Whether packs give what torch's convolution does, bit for bit and in the same strides, of frames like ``x``.

    Tried on numbers without zeros, weights too: of few spikes, or of weights that are zero as yet, sums in another order may
    be the same by chance.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        return torch.empty_like(like).copy_(torch.randn(like.shape, generator=generator, device="cpu"))

    for _ in range(2):
        frames, weights, added = drawn(x), drawn(weight), None if bias is None else drawn(bias)
        wanted = torch.conv2d(frames, weights.to(x.dtype), None if added is None else added.to(x.dtype), *options)
        try:
            found = _run(_packed(weights, frames, options), frames, added, options)
        except RuntimeError:
            return False
        if found.stride() != wanted.stride() or found.dtype is not wanted.dtype or not torch.equal(found, wanted):
            return False
    return True
