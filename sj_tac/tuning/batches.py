"""The batches that a user hands over: read, checked, and named in errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac.errors import BatchError
from sj_tac.rewrites.measure.axes import time_axis


@dataclass(frozen=True)
class Batch:
    """Frames [T, N, ...] (floating point; of the model's dtype, if there is a model) and labels [N] (integer class indices).

    ``labels`` are None where there are none.

    Attributes:
        batch_first: the net takes [N, T, ...].
    """

    frames: Tensor
    labels: Tensor | None = None
    batch_first: bool = False

    @property
    def steps(self) -> int:
        return self.frames.shape[0]

    @property
    def samples(self) -> int:
        return self.frames.shape[1]

    @property
    def given(self) -> Tensor:
        """The frames as the net takes them."""
        return self.frames.transpose(0, 1).contiguous() if self.batch_first else self.frames

    def fresh(self) -> Tensor:
        """Return a copy of ``given``: a forward may write into its input, which is the caller's own tensor."""
        return self.given.clone()

    def example(self) -> Tensor:
        """A few samples as the net takes them: as few as tell T from N, whether time is folded or not."""
        samples = 3 if self.steps == 2 else 2
        chosen = [i % self.samples for i in range(samples)]
        return Batch(self.frames[:, chosen], None, self.batch_first).given

    def on(self, model: nn.Module) -> Batch:
        """The batch on the model's device."""
        device = next((t.device for t in [*model.parameters(), *model.buffers()]), self.frames.device)
        labels = None if self.labels is None else self.labels.to(device)
        return Batch(self.frames.to(device), labels, self.batch_first)


def read(batches: Any, model: nn.Module | None = None) -> Iterator[Batch]:
    """Every batch, checked; they are read one by one, so that memory does not grow with the data.

    Args:
        batches: an iterable (a list, a DataLoader, a generator) of frames [T, N, C, H, W] or of (frames, labels) with
            labels [N]; a single tensor or pair of tensors counts as one batch. Frames become what the net's weights are,
            such as float32; without a net, whole numbers do.
        model: the net that takes them; where that takes [N, T, ...], so are the frames. Whether it does is tried.

    Raises:
        BatchError: no batch at all, something else than frames, sparse or complex ones, no sample, one frame, T that
            changes, NaN or infinite frames, or labels that do not fit.
    """
    steps = None
    dtype = None if model is None else _dtype(model)
    number = -1
    batch_first = False
    for number, item in enumerate(_items(batches)):
        if number == 0 and model is not None:
            batch_first = _takes_batch_first(model, item)
        batch = _checked(item, number, batch_first, dtype)
        if steps not in (None, batch.steps):
            raise BatchError(
                f"batch {number} has T = {batch.steps} frames (shape {list(batch.frames.shape)}), those before it "
                f"T = {steps}; bin all recordings into the same number of frames"
            )
        steps = batch.steps
        yield batch
    if number < 0:
        raise BatchError("there are no batches: the iterable is empty, or a generator that was read before")


def collect(batches: Any, model: nn.Module) -> list[Batch]:
    """All batches, in memory and where the model is, so that every candidate sees the same. Raises BatchError."""
    found = [batch.on(model) for batch in read(batches, model)]
    labelled = [batch.labels is not None for batch in found]
    if any(labelled) and not all(labelled):
        raise BatchError(
            f"batch {labelled.index(False)} has no labels, others have; give labels with all batches or with none"
        )
    return found


def as_given(batches: Any, model: nn.Module) -> list[Any]:
    """All batches as a net takes them, in memory, so that they can be read more than once. Raises BatchError."""
    return [b.given if b.labels is None else (b.given, b.labels) for b in collect(batches, model)]


def _items(batches: Any) -> Iterable[Any]:
    if isinstance(batches, Tensor):
        return [batches]
    if isinstance(batches, tuple) and len(batches) == 2 and all(isinstance(part, Tensor) for part in batches):
        frames, labels = batches
        # Two batches of frames are one dimension alike; labels are [N].
        if labels.dim() == 1 or labels.dim() != frames.dim():
            return [batches]
    if not isinstance(batches, Iterable) or isinstance(batches, (str, bytes, dict)):
        raise BatchError(
            f"batches are an iterable of frames [T, N, C, H, W] or of (frames, labels), got {type(batches).__name__}"
        )
    return batches


def _takes_batch_first(model: nn.Module, item: Any) -> bool:
    """Whether the net takes frames [N, T, ...], by trial on a few of them; nothing is said of what cannot be run."""
    frames = item[0] if isinstance(item, (tuple, list)) and len(item) == 2 else item
    if not isinstance(frames, Tensor) or unfit(frames) or frames.dim() < 3 or 0 in frames.shape:
        return False
    few = fitted(frames[:2], model), fitted(frames[:, :2], model)
    return time_axis(model, few[1]) != 0 and time_axis(model, few[0]) == 1


def _dtype(model: nn.Module) -> torch.dtype | None:
    return next((t.dtype for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()), None)


def fitted(frames: Tensor, model: nn.Module) -> Tensor:
    """Frames on the model's device, of its dtype."""
    return Batch(_cast(frames, _dtype(model))).on(model).frames


def _cast(frames: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None:
        return frames.to(dtype)
    return frames if frames.is_floating_point() else frames.float()


def unfit(frames: Tensor) -> str:
    """Why a tensor can hold no frames, whatever its shape, and what to do; nothing where it can."""
    if frames.is_nested:
        return "is a nested tensor; bin all recordings into the same number of frames"
    if frames.layout is not torch.strided:
        return f"is sparse ({frames.layout}); give dense frames: frames.to_dense()"
    if frames.is_quantized:
        return f"is quantized ({frames.dtype}); give plain frames: frames.dequantize()"
    if frames.is_complex():
        return f"is complex ({frames.dtype}); give real frames: their magnitude, or both parts as channels"
    return "is on the meta device, without values" if frames.device.type == "meta" else ""


def _checked(item: Any, number: int, batch_first: bool, dtype: torch.dtype | None) -> Batch:
    frames, labels = item, None
    if isinstance(item, (tuple, list)) and len(item) == 2:
        frames, labels = item
    if not isinstance(frames, Tensor):
        raise BatchError(
            f"batch {number} is a {type(item).__name__}; a batch is a tensor of frames [T, N, C, H, W] or (frames, labels)"
        )
    if unfit(frames):
        raise BatchError(f"batch {number} {unfit(frames)}")
    shape = list(frames.shape)
    if frames.dim() < 3:
        raise BatchError(f"batch {number} has shape {shape}; frames are [T, N, C, H, W] (at least [T, N, features])")
    if 0 in shape:
        raise BatchError(f"batch {number} is empty: its shape is {shape}, for [T, N, C, H, W]")
    if batch_first:
        frames = frames.transpose(0, 1)
        shape = list(frames.shape)
    labels = _labels(labels, shape, number)
    if shape[0] < 2:
        raise BatchError(
            f"batch {number} has one frame a sample (shape {shape}); with T = 1 there is no time to aggregate. Time comes "
            "first: [T, N, C, H, W]"
        )
    frames = _cast(frames, dtype)
    if not torch.isfinite(frames).all():
        bad = int((~torch.isfinite(frames)).sum())
        raise BatchError(
            f"batch {number} (shape {shape}) has {bad} values that are NaN or infinite as {frames.dtype}; "
            "mend or drop those samples"
        )
    return Batch(frames, labels, batch_first)


def _labels(labels: Any, shape: list[int], number: int) -> Tensor | None:
    if labels is None:
        return None
    labels = as_labels(labels, f"batch {number}")
    if labels.dim() != 1 or labels.is_floating_point() or len(labels) != shape[1]:
        swapped = labels.dim() >= 1 and len(labels) == shape[0]
        hint = "; the frames look like [N, T, ...]: transpose(0, 1) puts time first" if swapped else ""
        raise BatchError(
            f"batch {number} has labels of shape {list(labels.shape)} ({labels.dtype}) for frames {shape}; "
            f"expected {shape[1]} class indices [N]{hint}"
        )
    found: Tensor = labels.long()
    return found


def as_labels(labels: Any, where: str) -> Tensor:
    """Labels as a tensor, of whatever shape. Raises BatchError: text, and what else is none."""
    try:
        found = labels if isinstance(labels, Tensor) else torch.as_tensor(labels)
    except Exception as error:  # torch raises TypeError, ValueError and RuntimeError here
        told = repr(labels)
        told = told if len(told) < 60 else told[:60] + " ..."
        raise BatchError(
            f"{where} has labels that are no numbers ({type(labels).__name__}: {told}); give "
            "class indices [N], 0 for the first class"
        ) from error
    if unfit(found):
        raise BatchError(f"{where} has labels of which the tensor {unfit(found)}")
    return found
