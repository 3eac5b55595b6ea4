"""A drive that several frames share, on its way to a neuron through the user's own sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sj_tac.kernels import reference

# Questions that are answered for the frames without making them.
_ASKING: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")),
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.__len__, Tensor.is_floating_point),
}
_ADDING = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_ADDING_IN_PLACE = {Tensor.add_, Tensor.__iadd__}


class SharedDrive(Tensor):
    """Frames [T, ...] that are known as drives [G, ...], each for several frames, plus frames that were added to them.

    Sums with other frames are only noted, so that the neuron behind can take drives and frames as they are (a residual is
    then added inside ``fire``, and the repeated frames are never written). Whatever else asks for it gets the frames: made
    once, by ``repeat(drives) + residual``, with gradients to both. It never leaves the converted net's call.
    """

    drives: Tensor
    affine: tuple[Tensor, Tensor] | None
    lengths: Sequence[int]
    residual: Tensor | None
    _frames: Tensor | None

    @staticmethod
    def of(
        drives: Tensor,
        lengths: Sequence[int],
        residual: Tensor | None = None,
        affine: tuple[Tensor, Tensor] | None = None,
    ) -> SharedDrive:
        """``lengths[g]`` frames of ``drives[g]``, through an affine map of the channels, plus frames.

        Args:
            drives: [G, N, C, ...]; affine: scale and shift [C] in the accumulation dtype, or None.
            residual: frames [T, N, C, ...] of the drives' dtype, or None.
        """
        shape = (sum(lengths), *drives.shape[1:])
        made: SharedDrive = Tensor._make_wrapper_subclass(
            SharedDrive, shape, dtype=drives.dtype, device=drives.device, requires_grad=False
        )
        made.drives, made.lengths, made.residual, made.affine, made._frames = drives, lengths, residual, affine, None
        return made

    def mapped(self) -> Tensor:
        """The drives behind their affine map."""
        if self.affine is None:
            return self.drives
        scale, shift = (x.view(-1, *[1] * (self.drives.dim() - 3)) for x in self.affine)
        return (self.drives.to(scale.dtype) * scale + shift).to(self.drives.dtype)

    @property
    def is_bare(self) -> bool:
        """Nothing was added, no map is noted, and nobody has the frames."""
        return self.residual is None and self.affine is None and self._frames is None

    def frames(self) -> Tensor:
        """The frames as an ordinary tensor."""
        if self._frames is None:
            self._frames = add_frames(self.mapped(), self.lengths, self.residual)
        return self._frames

    def map(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``function`` of every frame, where it treats all alike; of the drives alone where nothing was added."""
        if self.residual is None and self._frames is None:
            return SharedDrive.of(function(self.mapped()), self.lengths)
        return function(self.frames())

    def plus(self, other: Tensor, in_place: bool) -> Tensor:
        """The sum with frames, noted."""
        if self._frames is not None:
            # Others hold the frames already, and may see what is added in place, as they would in the source net.
            return self._frames.add_(other) if in_place else self._frames + other
        drives, affine = self.drives, self.affine
        if isinstance(other, SharedDrive) and other._frames is None and list(other.lengths) == list(self.lengths):
            drives, affine, added = self.mapped() + other.mapped(), None, other.residual
        else:
            added = other.frames() if isinstance(other, SharedDrive) else other
        residual = self.residual
        if added is not None:
            residual = added if residual is None else residual + added
        if not in_place:
            return SharedDrive.of(drives, self.lengths, residual, affine)
        self.drives, self.affine, self.residual = drives, affine, residual
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if (func in _ADDING or func in _ADDING_IN_PLACE) and len(args) == 2 and not kwargs:
            left, right = args
            in_place = func in _ADDING_IN_PLACE
            if not isinstance(left, SharedDrive) and not in_place:
                left, right = right, left
            fits = isinstance(left, SharedDrive) and isinstance(right, Tensor)
            if fits and left.shape == right.shape and left.dtype == right.dtype and left.device == right.device:
                return left.plus(right, in_place)

        def plain(item: Any) -> Any:
            return item.frames() if isinstance(item, SharedDrive) else item

        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"sj_tac: {func} reached a shared drive below torch's own functions; convert with fuse=False")


def add_frames(drives: Tensor, lengths: Sequence[int], residual: Tensor | None) -> Tensor:
    """``repeat(drives, lengths) + residual``, without writing the repeated drives where all groups are equally long."""
    if residual is None:
        return reference.repeat(drives, lengths)
    if lengths[-1] != lengths[0]:
        return reference.repeat(drives, lengths) + residual
    grouped = residual.reshape(len(lengths), lengths[0], *residual.shape[1:])
    return (grouped + drives.unsqueeze(1)).flatten(0, 1)
