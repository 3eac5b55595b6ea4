"""The classes that the convs, Linears and containers of converted chains are given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from sj_tac import host
from sj_tac.host import layer
from sj_tac.kernels.reference import first
from sj_tac.runtime.convs import DriveModule
from sj_tac.runtime.expressions import SharedExpression
from sj_tac.runtime.groups import Sums
from sj_tac.runtime.values import Shared


class TACTPConv1d(DriveModule, layer.Conv1d):
    """TAC-TP, "preserve": one convolution for k frames; its drive is shared, so T stays. [T, N, C, L] in and out."""

    _rank = 4


class TACTPConv2d(DriveModule, layer.Conv2d):
    """TAC-TP, "preserve": one convolution for k frames; its drive is shared, so T stays. [T, N, C, H, W] in and out."""

    _rank = 5
    _run = DriveModule._run_2d


class TACTPConv3d(DriveModule, layer.Conv3d):
    """TAC-TP, "preserve": one convolution for k frames; its drive is shared, so T stays. [T, N, C, D, H, W] in and out."""

    _rank = 6


class TACTPConvTranspose1d(DriveModule, layer.ConvTranspose1d):
    """TAC-TP, "preserve", of a transposed convolution. [T, N, C, L] in and out."""

    _counts_input = True
    _rank = 4


class TACTPConvTranspose2d(DriveModule, layer.ConvTranspose2d):
    """TAC-TP, "preserve", of a transposed convolution. [T, N, C, H, W] in and out."""

    _counts_input = True
    _rank = 5


class TACTPConvTranspose3d(DriveModule, layer.ConvTranspose3d):
    """TAC-TP, "preserve", of a transposed convolution. [T, N, C, D, H, W] in and out."""

    _counts_input = True
    _rank = 6


class TACTPLinear(DriveModule, layer.Linear):
    """TAC-TP, "preserve": one product for k frames; its drive is shared, so T stays. [T, N, ..., F] in and out."""


class TACConv1d(DriveModule, layer.Conv1d):
    """TAC, "collapse": one convolution for k frames, which are one behind the neuron. [T, N, C, L] in and out."""

    _rank = 4


class TACConv2d(DriveModule, layer.Conv2d):
    """TAC, "collapse": one convolution for k frames, which are one behind the neuron. [T, N, C, H, W] in and out."""

    _rank = 5
    _run = DriveModule._run_2d


class TACConv3d(DriveModule, layer.Conv3d):
    """TAC, "collapse": one convolution for k frames, which are one behind the neuron. [T, N, C, D, H, W] in and out."""

    _rank = 6


class TACConvTranspose1d(DriveModule, layer.ConvTranspose1d):
    """TAC, "collapse", of a transposed convolution. [T, N, C, L] in and out."""

    _counts_input = True
    _rank = 4


class TACConvTranspose2d(DriveModule, layer.ConvTranspose2d):
    """TAC, "collapse", of a transposed convolution. [T, N, C, H, W] in and out."""

    _counts_input = True
    _rank = 5


class TACConvTranspose3d(DriveModule, layer.ConvTranspose3d):
    """TAC, "collapse", of a transposed convolution. [T, N, C, D, H, W] in and out."""

    _counts_input = True
    _rank = 6


class TACLinear(DriveModule, layer.Linear):
    """TAC, "collapse": one product for k frames, which are one behind the neuron. [T, N, ..., F] in and out."""


class _Folded(DriveModule):
    """Of torch's own layers, whose only argument is called ``input``."""

    _folds = True

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class TACTPFoldedConv1d(_Folded, nn.Conv1d):
    """TAC-TP, "preserve", of torch's own layer: one convolution for k frames. Folded frames [T * N, C, L] in and out."""

    _rank = 4


class TACTPFoldedConv2d(_Folded, nn.Conv2d):
    """TAC-TP, "preserve", of torch's own layer: one convolution for k frames. Folded frames [T * N, C, H, W] in and out."""

    _rank = 5
    _run = DriveModule._run_folded_2d


class TACTPFoldedConv3d(_Folded, nn.Conv3d):
    """TAC-TP, "preserve", of torch's own layer: one convolution for k frames. Folded frames [T * N, C, D, H, W]."""

    _rank = 6


class TACTPFoldedConvTranspose1d(_Folded, nn.ConvTranspose1d):  # type: ignore[misc]
    """TAC-TP, "preserve", of torch's own transposed convolution. Folded frames [T * N, C, L] in and out."""

    _counts_input = True
    _rank = 4


class TACTPFoldedConvTranspose2d(_Folded, nn.ConvTranspose2d):  # type: ignore[misc]
    """TAC-TP, "preserve", of torch's own transposed convolution. Folded frames [T * N, C, H, W] in and out."""

    _counts_input = True
    _rank = 5


class TACTPFoldedConvTranspose3d(_Folded, nn.ConvTranspose3d):  # type: ignore[misc]
    """TAC-TP, "preserve", of torch's own transposed convolution. Folded frames [T * N, C, D, H, W] in and out."""

    _counts_input = True
    _rank = 6


class TACTPFoldedLinear(_Folded, nn.Linear):
    """TAC-TP, "preserve", of torch's own layer: one product for k frames. Folded frames [T * N, ..., F] in and out."""


class _Container(DriveModule, layer.SeqToANNContainer):
    def inner(self) -> Any:
        return self[0]

    def _learns(self) -> bool:
        """Whether a norm in it takes statistics of what it is handed, and has to know what a frame stands for."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in self)

    def _run(self, frames: Tensor, x: Any = None, wanted: Sums | None = None) -> Tensor:
        if wanted is None or wanted.sums_nothing or not self._learns():
            return self._layer(frames)
        value: Any = self._layer(Shared.of(SharedExpression(frames, wanted.groups)))
        mapped: Tensor = value.expression.mapped() if isinstance(value, Shared) else first(value, wanted.groups.frames)
        return mapped

    def _run_repeated(self, summed: Tensor, repeat: Callable[[Tensor], Tensor]) -> Tensor:
        if not self._learns():
            return super()._run_repeated(summed, repeat)
        conv, *others = self
        narrowing = self._narrowing(summed)
        with narrowing or nullcontext():
            y = conv(summed.flatten(0, 1))
        y = y if narrowing is None else y.to(summed.dtype)
        y = repeat(y.reshape(*summed.shape[:2], *y.shape[1:]))
        folded = y.flatten(0, 1)
        for module in others:
            folded = module(folded)
        return folded.reshape(*y.shape[:2], *folded.shape[1:])

    @property
    def _counts_input(self) -> bool:  # type: ignore[override]
        return host.is_transposed(self[0])

    def macs(self) -> tuple[int, int] | None:
        # Pools behind the conv hide how large its own output was; the first run of the source net has seen it.
        pools = any(isinstance(m, (*host.ANY_MAX_POOLS, *host.INNER_AVG_POOLS)) for m in self)
        return None if pools else super().macs()


class TACTPSeqToANNContainer(_Container):
    """TAC-TP, "preserve", of a container conv -> [norm] -> [pool]; frames in and out."""


class TACSeqToANNContainer(_Container):
    """TAC, "collapse", of a container conv -> [norm] -> [pool]; frames in and out."""


DRIVE_SWAPS: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
    "preserve": {
        layer.Conv1d: TACTPConv1d,
        layer.Conv2d: TACTPConv2d,
        layer.Conv3d: TACTPConv3d,
        layer.Linear: TACTPLinear,
        layer.ConvTranspose1d: TACTPConvTranspose1d,
        layer.ConvTranspose2d: TACTPConvTranspose2d,
        layer.ConvTranspose3d: TACTPConvTranspose3d,
        nn.ConvTranspose1d: TACTPFoldedConvTranspose1d,
        nn.ConvTranspose2d: TACTPFoldedConvTranspose2d,
        nn.ConvTranspose3d: TACTPFoldedConvTranspose3d,
        nn.Conv1d: TACTPFoldedConv1d,
        nn.Conv2d: TACTPFoldedConv2d,
        nn.Conv3d: TACTPFoldedConv3d,
        nn.Linear: TACTPFoldedLinear,
        layer.SeqToANNContainer: TACTPSeqToANNContainer,
    },
    "collapse": {
        layer.Conv1d: TACConv1d,
        layer.Conv2d: TACConv2d,
        layer.Conv3d: TACConv3d,
        layer.ConvTranspose1d: TACConvTranspose1d,
        layer.ConvTranspose2d: TACConvTranspose2d,
        layer.ConvTranspose3d: TACConvTranspose3d,
        layer.Linear: TACLinear,
        layer.SeqToANNContainer: TACSeqToANNContainer,
    },
}
