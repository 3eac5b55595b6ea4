"""DVS128 Gesture through tonic, or through SpikingJelly's own class: frames [T, 2, size, size] and a label a sample.

The two libraries cut the same recordings into different sets: tonic ships 1,077 training and 264 test samples, SpikingJelly
makes 1,176 and 288. A figure means nothing without the name of its split, so ``Source.split`` carries it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import DataError, Indexed, binned
from event_files import check_table, checked

from sj_tac.support.files import write_whole

SENSOR = 128
CLASSES = 11


@dataclass(frozen=True)
class Source:
    """Training and test data, and the name of the split."""

    train: Indexed
    test: Indexed
    split: str


def blocks(frames: Any, size: int) -> np.ndarray:
    """Events of size x size blocks of the sensor: frames [T, 2, 128, 128] to [T, 2, size, size] (float32)."""
    counts = torch.as_tensor(np.asarray(frames), dtype=torch.float32)
    block = SENSOR // size
    return np.asarray(F.avg_pool2d(counts, block) * block**2)


@dataclass(frozen=True)
class Recordings:
    """DVS128 Gesture as a library reads it, item by item as (frames, label): events are checked, then counted.

    ``dataset``'s items are (events, label), of the files ``paths``; ``to_frames`` takes checked columns t, x, y and p.
    ``is_table``: the library casts a file's numbers, so the file itself is checked first (``event_files.check_table``).
    """

    dataset: Any
    paths: list[str]
    to_frames: Callable[[dict[str, np.ndarray]], np.ndarray]
    is_table: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Raise DataError for a file that cannot be read, or whose events cannot be right (``event_files.checked``)."""
        path = self.paths[index]
        try:
            if self.is_table:
                check_table(np.load(path, mmap_mode="r"), SENSOR, path)
            events, label = self.dataset[index]
            columns = {name: np.asarray(events[name]) for name in "txyp"}
        except DataError:
            raise
        except Exception as error:  # numpy and the libraries raise what they like
            raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}); unpack it again") from None
        if not isinstance(label, (int, np.integer)) or not 0 <= label < CLASSES:
            raise DataError(f"{path} has label {label!r}; labels are integers in 0..{CLASSES - 1}")
        return self.to_frames(checked(columns, SENSOR, path)), int(label)


@dataclass(frozen=True)
class Kept:
    """A data set of (frames, label) that stores each item in a file of ``folder`` when it is first read.

    An item is made anew when its recording has changed since (size or time of modification).
    """

    dataset: Recordings
    folder: Path
    shape: tuple[int, ...]  # of one item's frames, [T, 2, size, size]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Raise DataError as ``Recordings``, and for a stored item that is damaged or has another shape."""
        path, recording = self.folder / f"{index}.npz", Path(self.dataset.paths[index])
        if not recording.exists():
            raise DataError(f"{recording} does not exist any more; unpack the data again")
        now = (recording.stat().st_size, recording.stat().st_mtime_ns)
        if path.exists():
            try:
                with path.open("rb") as file, np.load(file) as kept:
                    frames, label, source = kept["frames"], int(kept["label"]), tuple(kept["source"].tolist())
            except Exception as error:  # numpy raises anything from EOFError to zipfile.BadZipFile here
                raise DataError(f"{path} is damaged ({error}); delete it and it is made again") from None
            if source == now:
                if frames.shape != self.shape:
                    raise DataError(f"{path} holds frames {list(frames.shape)}, not {list(self.shape)}; delete it")
                return frames, label
        frames, label = self.dataset[index]
        write_whole(path, lambda draft: np.savez_compressed(draft, frames=frames, label=label, source=now))
        return frames, label


def _kept(root: Path, library: str, train: bool, found: Recordings, steps: int, size: int, workers: int) -> Indexed:
    folder = root / "frames" / f"{library}-{'train' if train else 'test'}-{steps}-{size}"
    return Indexed(Kept(found, folder, (steps, 2, size, size)), workers)


def with_tonic(root: Path, steps: int, size: int, workers: int) -> Source:
    """Frames of equal duration, kept under ``root``. Downloads where nothing is there. Raises DataError."""
    try:
        import tonic
    except ImportError:
        raise DataError("tonic is not installed: pip install tonic, or use --library spikingjelly") from None

    def counted(events: dict[str, np.ndarray]) -> np.ndarray:
        # tonic's ToFrame drops the events behind the last whole bin, and all events of a recording shorter than T us.
        first, last = int(events["t"][0]), int(events["t"][-1])
        return binned(events, steps, SENSOR, size, first, last - first + 1)

    parts = []
    for train in (True, False):
        try:
            dataset = tonic.datasets.DVSGesture(str(root), train=train)
        except Exception as error:  # urllib, tarfile and tonic's own checks raise what they like
            raise DataError(
                f"tonic finds no DVS128 Gesture under {root} and cannot download it ({type(error).__name__}: {error}); "
                f"put ibmGestureTrain.tar.gz and ibmGestureTest.tar.gz, unpacked, into {root}/DVSGesture, or use --synthetic"
            ) from None
        found = Recordings(dataset, [str(path) for path in dataset.data], counted, is_table=True)
        parts.append(_kept(root, "tonic", train, found, steps, size, workers))
    return Source(parts[0], parts[1], f"tonic's split, {len(parts[0])} / {len(parts[1])}")


def with_spikingjelly(root: Path, steps: int, size: int, workers: int) -> Source:
    """Frames of equally many events, SpikingJelly's recipe, kept under ``root``.

    Its own frames are not read: SpikingJelly makes them of events as they stand, in order or not.

    Raises:
        DataError: nothing is there, or spikingjelly.datasets cannot be imported.
    """
    try:
        from spikingjelly.datasets import integrate_events_by_fixed_frames_number as integrated
        from spikingjelly.datasets.dvs128_gesture import DVS128Gesture
    except (ImportError, RuntimeError, OSError) as error:
        raise DataError(
            f"spikingjelly.datasets cannot be imported ({error}). torch and torchaudio must come from the same CUDA "
            "release (torch 2.11, torchvision 0.26 and torchaudio 2.11 fit); or use --library tonic, which needs neither"
        ) from None

    def counted(events: dict[str, np.ndarray]) -> np.ndarray:
        return blocks(integrated(events, "number", steps, SENSOR, SENSOR), size)

    parts = []
    for train in (True, False):
        try:
            dataset = DVS128Gesture(str(root), train=train, data_type="event")
        except Exception as error:  # whatever reading or unpacking a partial download raises
            raise DataError(
                f"SpikingJelly cannot read DVS128 Gesture under {root} ({type(error).__name__}: {error}); "
                f"put DvsGesture.tar.gz into {root / 'download'}, or use --synthetic"
            ) from None
        found = Recordings(dataset, [str(path) for path, _ in dataset.samples], counted)
        parts.append(_kept(root, "spikingjelly", train, found, steps, size, workers))
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
