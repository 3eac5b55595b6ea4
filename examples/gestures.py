"""A generated event-camera gesture set whose classes differ only in the order of motion.

Eleven classes, 128 x 128 pixels, on/off events of a moving shape, with background activity and hot pixels. Ten of them come
in pairs, and one of a pair is the other run backwards: "left" is "right" with time reversed. "shake" is its own reversal.

Run backwards, a shape that was brighter than the background makes the events, polarity and all, of a darker one. Both are
equally likely, so the reversal of a recording is a recording of the partner class: what is left of recordings when their
frames are summed over time, or shuffled, is distributed alike in both classes of a pair. Only the order tells them apart.

Events are a Poisson process whose rate is the change of log-brightness over the sensor's threshold, plus noise. A real pixel
also has memory (its last level, a dead time), which is not symmetric under reversal and is left out for that reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from datasets import DataError, binned
from rich.progress import track
from torch import Tensor

from sj_tac.support.files import write_whole

CLASSES = (
    "right", "left", "down", "up", "down-right", "up-left", "clockwise", "counter-clockwise", "approach", "retreat", "shake",
)  # fmt: skip
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
SENSOR = 128
MICRO_STEPS = 48
DURATION_US = 1_000_000
SHAPES = ("disc", "square", "bar", "ring")
EVENT = np.dtype([("t", np.int64), ("x", np.int16), ("y", np.int16), ("p", np.uint8)])


@dataclass(frozen=True)
class Gesture:
    """One recording before its events: what moves, how, and how the sensor sees it. Lengths in pixels, angles in radians."""

    motion: str  # one of CLASSES[0, 2, 4, ...]: the one of a pair that is not reversed
    reverse: bool
    shape: str
    size: float
    tilt: float
    contrast: float  # change of log-brightness between background and shape; negative: the shape is darker
    x: float
    y: float
    extent: float
    phase: float
    turns: float
    ease: float  # how much slower the motion is at its beginning, in (-1, 1)
    noise: float  # background events per pixel and second, of each polarity
    hot: tuple[tuple[int, int], ...]

    @property
    def label(self) -> int:
        return CLASSES.index(self.motion) + self.reverse

    def reversed(self) -> Gesture:
        """The same motion backwards, by a shape of opposite contrast: its events are this one's, in reversed order."""
        return replace(self, reverse=not self.reverse if self.motion != "shake" else False, contrast=-self.contrast)


def draw(label: int, generator: torch.Generator) -> Gesture:
    """A random gesture of one class."""

    def between(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator).item()

    def whole(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    name = CLASSES[label]
    reverse = any(label == second for _, second in PAIRS)
    return Gesture(
        motion=CLASSES[label - 1] if reverse else name,
        reverse=reverse,
        shape=SHAPES[whole(len(SHAPES))],
        size=between(9, 18),
        tilt=between(0, math.pi),
        contrast=between(0.6, 1.4) * (1 if whole(2) else -1),
        x=between(48, 80),
        y=between(48, 80),
        extent=between(24, 42),
        phase=between(0, 2 * math.pi),
        turns=between(0.6, 1.1),
        ease=0.0 if name == "shake" else between(-0.4, 0.4),
        noise=between(0.05, 0.4),
        hot=tuple((whole(SENSOR), whole(SENSOR)) for _ in range(whole(4))),
    )


def _pose(g: Gesture, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centre x, y and size of the shape at times u [S] in 0..1."""
    u = 1 - u if g.reverse else u
    u = u + g.ease * u * (1 - u)
    x, y, size = torch.full_like(u, g.x), torch.full_like(u, g.y), torch.full_like(u, g.size)
    along = g.extent * (2 * u - 1)
    if g.motion in ("right", "down-right"):
        x = x + along
    if g.motion in ("down", "down-right"):
        y = y + along
    if g.motion == "clockwise":  # y points down, so growing angles turn clockwise
        angle = g.phase + 2 * math.pi * g.turns * u
        x, y = x + 0.7 * g.extent * torch.cos(angle), y + 0.7 * g.extent * torch.sin(angle)
    if g.motion == "approach":
        size = size * (0.5 + 1.8 * u)
    if g.motion == "shake":
        x = x + 0.6 * g.extent * torch.cos(4 * math.pi * u)
    return x, y, size


def brightness(g: Gesture, u: Tensor) -> Tensor:
    """Log-brightness [S, 128, 128] at times u [S] in 0..1 (0: the background)."""
    grid = torch.arange(SENSOR, dtype=u.dtype)
    cx, cy, size = (value.view(-1, 1, 1) for value in _pose(g, u))
    dx, dy = grid.view(1, 1, -1) - cx, grid.view(1, -1, 1) - cy
    across, along = dx * math.cos(g.tilt) + dy * math.sin(g.tilt), dy * math.cos(g.tilt) - dx * math.sin(g.tilt)
    outside = {
        "disc": lambda: torch.hypot(across, along) - size,
        "square": lambda: torch.maximum(across.abs(), along.abs()) - 0.85 * size,
        "bar": lambda: torch.maximum(across.abs() - 1.5 * size, along.abs() - 0.5 * size),
        "ring": lambda: (torch.hypot(across, along) - size).abs() - 0.3 * size,
    }[g.shape]()
    return g.contrast * torch.sigmoid(-outside)


def rates(g: Gesture, threshold: float = 0.25) -> Tensor:
    """Expected events [MICRO_STEPS, 2, 128, 128] of each micro-step; polarity 0 is off (darker), 1 is on."""
    change = brightness(g, torch.linspace(0, 1, MICRO_STEPS + 1, dtype=torch.float64)).diff(dim=0) / threshold
    expected = torch.stack([(-change).clamp(min=0), change.clamp(min=0)], 1)
    expected += g.noise * DURATION_US / 1e6 / MICRO_STEPS
    for x, y in g.hot:
        expected[:, :, y, x] += 40 / MICRO_STEPS
    return expected


def record(g: Gesture, rng: np.random.Generator) -> np.ndarray:
    """The events of one recording, ordered in time: a structured array of t (us), x, y, p."""
    expected = rates(g).numpy().ravel()
    total = np.cumsum(expected)
    count = rng.poisson(total[-1])
    where = np.searchsorted(total, rng.random(count) * total[-1], side="right").clip(max=expected.size - 1)
    step, p, y, x = np.unravel_index(where, (MICRO_STEPS, 2, SENSOR, SENSOR))
    events = np.empty(count, EVENT)
    events["t"] = ((step + rng.random(count)) * DURATION_US / MICRO_STEPS).astype(np.int64)
    events["x"], events["y"], events["p"] = x, y, p
    return events[np.argsort(events["t"], kind="stable")]


def generate(count: int, steps: int, size: int, seed: int, cache: Path | None = None) -> tuple[Tensor, Tensor]:
    """``count`` recordings, the classes in turn, as frames [steps, count, 2, size, size] (uint8) and labels [count].

    ``cache`` is a folder where they are kept. Raises DataError where what is kept there is damaged.
    """
    path = cache / f"gestures-{count}-{steps}-{size}-{seed}.npz" if cache else None
    if path and path.exists():
        try:
            with path.open("rb") as file, np.load(file) as kept:
                frames, labels = torch.from_numpy(kept["frames"]), torch.from_numpy(kept["labels"])
        except Exception as error:  # numpy raises anything from EOFError to zipfile.BadZipFile here
            raise DataError(f"{path} is damaged ({error}); delete it and it is generated again") from None
        if frames.shape != (steps, count, 2, size, size) or labels.shape != (count,):
            raise DataError(f"{path} holds frames {list(frames.shape)}; delete it and it is generated again")
        return frames, labels
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    frames = torch.empty(steps, count, 2, size, size, dtype=torch.uint8)
    labels = torch.arange(count) % len(CLASSES)
    for i in track(range(count), description="generating gestures", transient=True):
        events = record(draw(int(labels[i]), generator), rng)
        columns = {name: events[name].astype(np.int64) for name in EVENT.names or ()}
        counts = binned(columns, steps, SENSOR, size, 0, DURATION_US)
        frames[:, i] = torch.from_numpy(counts.clip(max=255)).to(torch.uint8)
    if path:
        write_whole(path, lambda temporary: np.savez_compressed(temporary, frames=frames.numpy(), labels=labels.numpy()))
    return frames, labels
