"""Real data for the examples: readers for the files shipped in ``examples/data`` and for the full data sets.

``RateCoded``, ``Frames`` and ``Indexed`` hand samples to training.py, batch by batch.
"""

from __future__ import annotations

import gzip
import itertools
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from event_files import DIGITS, DataError as DataError, check_archive, checked
from torch import Tensor

HERE = Path(__file__).resolve().parent
SHIPPED_DIGITS = HERE / "data" / "mnist_test_1000.npz"
SHIPPED_EVENTS = HERE / "data" / "nmnist_test_100.npz"
SENSOR = 34  # N-MNIST's ATIS crops are 34 x 34 pixels


def read_idx(path: Path) -> np.ndarray:
    """One ``idx`` file of the MNIST family (``.gz``), as an array of uint8.

    Raises:
        DataError: no such file, no idx file of uint8, or shorter than its compression or its own header says.
    """
    try:
        with gzip.open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; --data takes a folder with MNIST's four idx.gz files") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}); download it again") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{path} is no idx file of uint8 (it begins with {content[:4].hex(' ') or 'nothing'})")
    ndim = content[3]
    start = 4 + 4 * ndim
    shape = struct.unpack(f">{ndim}I", content[4:start]) if len(content) >= start else (-1,)
    if len(content) - start != np.prod(shape):
        raise DataError(f"{path} holds {len(content) - start} values where its header promises {shape}; download it again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def mnist(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images [N, 28, 28] in 0..1 (float32) and labels [N] of the original ``idx.gz`` files; split: train or t10k.

    Raises:
        DataError: a file is missing or damaged, is not what its name says, or the two do not belong together.
    """
    images = read_idx(folder / f"{split}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte.gz")
    if images.ndim != 3 or images.shape[1:] != (28, 28):
        raise DataError(f"{folder}: the {split} images have shape {list(images.shape)}, expected [N, 28, 28]")
    if labels.shape != images.shape[:1] or labels.max(initial=0) > 9:
        raise DataError(
            f"{folder}: {split} has {len(images)} images and labels of shape {list(labels.shape)} up to "
            f"{labels.max(initial=0)}; expected one label of 0..9 for each image"
        )
    return torch.from_numpy(images.copy()).float() / 255, torch.from_numpy(labels.copy()).long()


def shipped_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The first 1,000 MNIST test digits: images [1000, 28, 28] in 0..1 (float32) and labels [1000]."""
    with np.load(SHIPPED_DIGITS) as data:
        return torch.from_numpy(data["images"]).float() / 255, torch.from_numpy(data["labels"]).long()


def rate_code(images: torch.Tensor, steps: int, generator: torch.Generator) -> torch.Tensor:
    """Bernoulli (Poisson) rate coding: images [N, H, W] in 0..1 to spikes [steps, N, 1, H, W]."""
    shape = (steps, *images.shape)
    return (torch.rand(shape, generator=generator) < images).float().unsqueeze(2)


def read_recordings(path: Path) -> dict[str, np.ndarray]:
    """An archive of event recordings, as ``pack_recordings`` writes it.

    ``x``, ``y`` (uint8), ``p`` (polarity, packed bits), ``dt_us`` (uint16, time to the event before it within one
    recording), ``offsets`` [recordings + 1] into them, ``label`` and ``is_test`` [recordings].

    Raises:
        DataError: no such file, no whole ``.npz``, or one whose arrays are not these, do not fit each other, or hold a
            recording without events.
    """
    try:
        with path.open("rb") as file:
            data = np.load(file)
            archive = {} if isinstance(data, np.ndarray) else {name: data[name] for name in data.files}
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; it should be an .npz of N-MNIST recordings") from None
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is no whole .npz ({error}); copy it again") from None
    if isinstance(data, np.ndarray):
        raise DataError(f"{path} holds one array {list(data.shape)}, as .npy files do; an .npz of recordings is expected")
    return check_archive(archive, str(path))


def pack_recordings(archive: dict[str, np.ndarray], keep: np.ndarray) -> dict[str, np.ndarray]:
    """Only the recordings where ``keep`` (bool, [recordings]) is true, in the same layout."""
    offsets = archive["offsets"]
    chosen = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in np.flatnonzero(keep)])
    polarity = np.unpackbits(archive["p"])[: offsets[-1]]
    lengths = np.diff(offsets)[keep]
    return {
        "x": archive["x"][chosen],
        "y": archive["y"][chosen],
        "p": np.packbits(polarity[chosen]),
        "dt_us": archive["dt_us"][chosen],
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(offsets.dtype),
        **{name: archive[name][keep] for name in ("label", "mnist_id", "is_test") if name in archive},
    }


def binned(events: dict[str, np.ndarray], steps: int, sensor: int, size: int, start: int, duration: int) -> np.ndarray:
    """Events counted in ``steps`` bins of equal duration: [steps, 2, size, size] (float32), channel 0 off, channel 1 on.

    ``events`` (int64): t from ``start`` over ``duration`` (us); x, y below ``sensor``, which becomes size x size blocks; p.
    """
    t, x, y, p = (events[name] for name in ("t", "x", "y", "p"))
    bins = ((t - start) * steps // duration).clip(0, steps - 1)
    flat = ((bins * 2 + p) * size + y * size // sensor) * size + x * size // sensor
    return np.bincount(flat, minlength=steps * 2 * size * size).reshape(steps, 2, size, size).astype(np.float32)


def event_frames(archive: dict[str, np.ndarray], steps: int, where: str = "the archive") -> tuple[Tensor, Tensor]:
    """Events counted in ``steps`` bins of equal duration: frames [steps, N, 2, 34, 34] (float32), labels [N].

    Channel 0 counts OFF events, channel 1 ON events. ``where``: how errors call the archive.

    Raises:
        DataError: an event is outside the sensor, or before the first of its recording (``event_files.checked``).
    """
    offsets = archive["offsets"].astype(np.int64)
    polarity = np.unpackbits(archive["p"])[: offsets[-1]]
    frames = []
    for i, (begin, end) in enumerate(itertools.pairwise(offsets)):
        columns = {name: values[begin:end] for name, values in {"x": archive["x"], "y": archive["y"], "p": polarity}.items()}
        times = np.cumsum(archive["dt_us"][begin:end].astype(np.int64))
        events = checked({"t": times, **columns}, SENSOR, f"{where}, recording {i}")
        frames.append(frames_of(events, steps))
    return torch.from_numpy(np.stack(frames, 1)), torch.from_numpy(archive["label"].astype(np.int64))


def frames_of(events: dict[str, np.ndarray], steps: int) -> np.ndarray:
    """Return one N-MNIST recording, its events in order of time, as [steps, 2, 34, 34] (float32)."""
    first, last = int(events["t"][0]), int(events["t"][-1])
    return binned(events, steps, SENSOR, SENSOR, first, last - first + 1)


def nmnist_folder(root: Path, train: bool, steps: int) -> tuple[Tensor, Tensor]:
    """N-MNIST through tonic, from its Train/ or Test/ in ``root`` (or ``root``/NMNIST): as ``event_frames``.

    Raises:
        DataError: tonic is not installed, nothing is there and it cannot be downloaded, or a recording is damaged.
    """
    try:
        from tonic.datasets import NMNIST
        from tonic.io import read_mnist_file
    except ImportError:
        raise DataError("a folder of N-MNIST is read by tonic, which is not installed: pip install tonic") from None
    part = "Train" if train else "Test"
    try:
        files = sorted((root / part).rglob("*.bin"))
        if files:
            found = [(path, path.parent.name) for path in files]
        else:
            listed = NMNIST(str(root), train=train)
            found = [(Path(path), str(label)) for path, label in zip(listed.data, listed.targets, strict=True)]
    except Exception as error:  # urllib, zipfile and tonic's own checks raise what they like
        raise DataError(
            f"no N-MNIST recordings under {root / part} and tonic cannot download them ({type(error).__name__}: {error})"
        ) from None
    frames = []
    for path, label in found:
        if label not in map(str, range(DIGITS)):
            raise DataError(f"{path} is in a folder {label!r}; N-MNIST's folders are the digits 0 to 9")
        raw = np.frombuffer(path.read_bytes(), np.uint8)
        if not len(raw) or len(raw) % 5:
            raise DataError(f"{path} is no whole N-MNIST recording ({len(raw)} bytes; five an event); unpack it again")
        events = read_mnist_file(str(path), NMNIST.dtype)
        columns = {name: np.asarray(events[name]) for name in "txyp"}
        frames.append(frames_of(checked(columns, SENSOR, str(path)), steps))
    return torch.from_numpy(np.stack(frames, 1)), torch.tensor([int(label) for _, label in found])


def shipped_events(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The 100 real N-MNIST test recordings: frames [steps, 100, 2, 34, 34] (float32) and labels [100]."""
    return event_frames(read_recordings(SHIPPED_EVENTS), steps)


@dataclass
class RateCoded:
    """Images [N, H, W] in 0..1 as Bernoulli spike trains of ``steps`` frames, drawn anew for every batch's seed."""

    images: Tensor
    labels: Tensor
    steps: int

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, rows: list[Tensor], seeds: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen, seed in zip(rows, seeds, strict=True):
            generator = torch.Generator().manual_seed(seed)
            yield rate_code(self.images[chosen], self.steps, generator), self.labels[chosen]


@dataclass
class Frames:
    """Event frames [T, N, C, H, W] held in memory (any dtype); each sample moved by up to ``shift`` pixels."""

    frames: Tensor
    labels: Tensor
    shift: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, rows: list[Tensor], seeds: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen, seed in zip(rows, seeds, strict=True):
            frames = self.frames[:, chosen].float()
            if self.shift:
                frames = shifted(frames, self.shift, torch.Generator().manual_seed(seed))
            yield frames, self.labels[chosen]


@dataclass
class Indexed:
    """A data set on disk whose items are (frames [T, C, H, W], label), read by ``workers`` processes.

    ``load`` raises DataError where an item cannot be read: a cache of frames that is damaged, say.
    """

    dataset: Any
    workers: int = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, rows: list[Tensor], seeds: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        batches = [chosen.tolist() for chosen in rows]
        loader = torch.utils.data.DataLoader(
            self.dataset, batch_sampler=batches, num_workers=self.workers, collate_fn=_stack, generator=torch.Generator()
        )
        try:
            yield from loader
        except DataError:
            raise
        except Exception as error:  # of the library whose files these are
            last = str(error).strip().splitlines()[-1] if str(error).strip() else ""
            raise DataError(
                f"{type(self.dataset).__name__}: a sample cannot be read ({type(error).__name__}: {last}); "
                "delete the frames that were kept of it and they are made again"
            ) from error


def _stack(items: list[tuple[Any, int]]) -> tuple[Tensor, Tensor]:
    frames = torch.stack([torch.as_tensor(np.asarray(frames), dtype=torch.float32) for frames, _ in items], 1)
    return frames, torch.tensor([int(label) for _, label in items])


def shifted(frames: Tensor, limit: int, generator: torch.Generator | None = None) -> Tensor:
    """Every sample of [T, N, C, H, W] moved by its own offset of up to ``limit`` pixels (zeros move in)."""
    height, width = frames.shape[-2:]
    padded = F.pad(frames, (limit,) * 4)
    corners = torch.randint(0, 2 * limit + 1, (frames.shape[1], 2), generator=generator).tolist()
    return torch.stack([padded[:, n, :, y : y + height, x : x + width] for n, (y, x) in enumerate(corners)], 1)


def split_off(labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of about ``count`` held-out samples, every class in proportion, and of the rest."""
    generator = torch.Generator().manual_seed(seed)
    held: list[Tensor] = []
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        chosen = torch.randperm(len(members), generator=generator)[: max(1, round(count * len(members) / len(labels)))]
        held.append(members[chosen])
    test = torch.cat(held).sort().values
    keep = torch.ones(len(labels), dtype=torch.bool)
    keep[test] = False
    return test, keep.nonzero().flatten()
