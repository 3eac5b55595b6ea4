"""Real data for the examples: readers for the files shipped in ``examples/data`` and for the full data sets."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
SHIPPED_DIGITS = HERE / "data" / "mnist_test_1000.npz"
SHIPPED_EVENTS = HERE / "data" / "nmnist_test_100.npz"
SENSOR = 34  # N-MNIST's ATIS crops are 34 x 34 pixels


def read_idx(path: Path) -> np.ndarray:
    """One ``idx`` file of the MNIST family (``.gz``), as an array of uint8.

    Raises:
        ValueError: the file is not an idx file of uint8, or is shorter than its own header says.
    """
    with gzip.open(path, "rb") as file:
        zero, dtype, ndim = struct.unpack(">HBB", file.read(4))
        if (zero, dtype) != (0, 8):
            raise ValueError(f"{path} is no idx file of uint8 (its magic number is {(zero, dtype, ndim)})")
        shape = struct.unpack(f">{ndim}I", file.read(4 * ndim))
        values = np.frombuffer(file.read(), np.uint8)
    if values.size != np.prod(shape):
        raise ValueError(f"{path} holds {values.size} values where its header promises {shape}; download it again")
    return values.reshape(shape)


def mnist(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 28, 28] in 0..1 (float32) and labels [N] of the original ``idx.gz`` files; split: train or t10k."""
    images = read_idx(folder / f"{split}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte.gz")
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
    """
    with np.load(path) as data:
        return {name: data[name] for name in data.files}


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
        "label": archive["label"][keep],
        "mnist_id": archive["mnist_id"][keep],
        "is_test": archive["is_test"][keep],
    }


def event_frames(archive: dict[str, np.ndarray], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Events counted in ``steps`` bins of equal duration: frames [steps, N, 2, 34, 34] (float32), labels [N].

    Channel 0 counts OFF events, channel 1 ON events.
    """
    offsets = archive["offsets"]
    polarity = np.unpackbits(archive["p"])[: offsets[-1]]
    count = len(offsets) - 1
    frames = np.zeros((steps, count, 2, SENSOR, SENSOR), np.float32)
    for i in range(count):
        events = slice(offsets[i], offsets[i + 1])
        time = np.cumsum(archive["dt_us"][events].astype(np.int64))
        time -= time[0]
        bins = np.minimum(time * steps // (time[-1] + 1), steps - 1)
        np.add.at(frames, (bins, i, polarity[events], archive["y"][events], archive["x"][events]), 1.0)
    return torch.from_numpy(frames), torch.from_numpy(archive["label"].astype(np.int64))


def shipped_events(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The 100 real N-MNIST test recordings: frames [steps, 100, 2, 34, 34] (float32) and labels [100]."""
    return event_frames(read_recordings(SHIPPED_EVENTS), steps)
