"""DVS128 Gesture through tonic, or through SpikingJelly's own class: frames [T, 2, size, size] and a label a sample.

The two libraries cut the same recordings into different sets: tonic ships 1,077 training and 264 test samples, SpikingJelly
makes 1,176 and 288. A figure means nothing without the name of its split, so ``Source.split`` carries it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import DataError, Indexed
from event_files import checked

SENSOR = 128
CLASSES = 11


@dataclass(frozen=True)
class Source:
    """Training and test data, and the name of the split."""

    train: Indexed
    test: Indexed
    split: str


@dataclass(frozen=True)
class Blocks:
    """Events of size x size blocks of the sensor: frames [T, 2, 128, 128] to [T, 2, size, size]."""

    size: int

    def __call__(self, frames: Any) -> np.ndarray:
        counts = torch.as_tensor(np.asarray(frames), dtype=torch.float32)
        block = SENSOR // self.size
        return np.asarray(F.avg_pool2d(counts, block) * block**2)


@dataclass(frozen=True)
class Recordings:
    """tonic's DVS128 Gesture, item by item as (frames, label): each recording's events are checked, then counted."""

    dataset: Any
    to_frames: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Raise DataError for a file that tonic cannot read, or whose events cannot be right (``event_files.checked``)."""
        path = self.dataset.data[index]
        try:
            events, label = self.dataset[index]
        except Exception as error:  # numpy and tonic raise what they like
            raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}); unpack it again") from None
        found = checked({name: events[name] for name in "txyp"}, SENSOR, str(path))
        in_order = np.empty(len(found["t"]), events.dtype)
        for name, values in found.items():
            in_order[name] = values
        return self.to_frames(in_order), label


def with_tonic(root: Path, steps: int, size: int, workers: int) -> Source:
    """Frames of equal duration, cached under ``root``. Downloads where nothing is there. Raises DataError."""
    try:
        import tonic
    except ImportError:
        raise DataError("tonic is not installed: pip install tonic, or use --library spikingjelly") from None
    frames = tonic.transforms.Compose(
        [tonic.transforms.ToFrame(sensor_size=(SENSOR, SENSOR, 2), n_time_bins=steps), Blocks(size)]
    )
    parts = []
    for train in (True, False):
        try:
            found = Recordings(tonic.datasets.DVSGesture(str(root), train=train), frames)
        except Exception as error:  # urllib, tarfile and tonic's own checks raise what they like
            raise DataError(
                f"tonic finds no DVS128 Gesture under {root} and cannot download it ({type(error).__name__}: {error}); "
                f"put ibmGestureTrain.tar.gz and ibmGestureTest.tar.gz, unpacked, into {root}/DVSGesture, or use --synthetic"
            ) from None
        cache = root / "frames" / f"{'train' if train else 'test'}-{steps}-{size}"
        parts.append(Indexed(tonic.DiskCachedDataset(found, str(cache)), workers))
    return Source(parts[0], parts[1], f"tonic's split, {len(parts[0])} / {len(parts[1])}")


def with_spikingjelly(root: Path, steps: int, size: int, workers: int) -> Source:
    """Frames of equally many events, SpikingJelly's recipe. Raises DataError, also where its package cannot be imported."""
    try:
        from spikingjelly.datasets.dvs128_gesture import DVS128Gesture
    except (ImportError, RuntimeError, OSError) as error:
        raise DataError(
            f"spikingjelly.datasets cannot be imported ({error}). torch and torchaudio must come from the same CUDA "
            "release (torch 2.11, torchvision 0.26 and torchaudio 2.11 fit); or use --library tonic, which needs neither"
        ) from None
    parts = []
    for train in (True, False):
        try:
            found = DVS128Gesture(
                str(root), train=train, data_type="frame", frames_number=steps, split_by="number", transform=Blocks(size)
            )
        except Exception as error:  # whatever reading or unpacking a partial download raises
            raise DataError(
                f"SpikingJelly cannot read DVS128 Gesture under {root} ({type(error).__name__}: {error}); "
                f"put DvsGesture.tar.gz into {root / 'download'}, or use --synthetic"
            ) from None
        parts.append(Indexed(found, workers))
    return Source(parts[0], parts[1], f"SpikingJelly's split, {len(parts[0])} / {len(parts[1])}")


def load(root: Path, library: str, steps: int, size: int, workers: int) -> Source:
    """By the named library; "auto" is tonic where it is installed, else SpikingJelly. Raises DataError."""
    if library == "auto":
        try:
            import tonic  # noqa: F401
        except ImportError:
            library = "spikingjelly"
        else:
            library = "tonic"
    return (with_tonic if library == "tonic" else with_spikingjelly)(root, steps, size, workers)
