"""CUDA programs: the sources of the folder ``src``, specialised by macros, and what their kernels are called with.

Nothing here needs a GPU or a launcher: a program is text, and a launch is numbers and tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sj_tac.errors import BackendError
from sj_tac.kernels.layout import laid

FOLDER = Path(__file__).parent / "src"
# The files of each kernel, in order.
FILES: dict[str, tuple[str, ...]] = {
    "fire_forward": ("numbers.cuh", "neuron.cuh", "steps.cuh", "fire.cu"),
    "fire_backward": ("numbers.cuh", "neuron.cuh", "reduce.cuh", "backward.cu"),
    "fire_backward_pooled": ("numbers.cuh", "neuron.cuh", "reduce.cuh", "windows.cuh", "backward.cu"),
    "fire_pool": ("numbers.cuh", "reduce.cuh", "windows.cuh", "pool.cu"),
    "fire_pool_weights": ("numbers.cuh", "reduce.cuh", "windows.cuh", "pool.cu"),
    "aggregate_forward": ("numbers.cuh", "reduce.cuh", "aggregate.cu"),
    "aggregate_backward": ("numbers.cuh", "reduce.cuh", "aggregate.cu"),
}
# Spikes are to be the host's, which rounds after every operation.
OPTIONS = ("--std=c++17", "--fmad=false")
SHARED = 48 * 1024
# Threads of the backward that a multiprocessor holds at once, at least: 128 registers for each.
RESIDENT = 512
IO = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# struct Call of numbers.cuh, and struct Tensors of backward.cu.
CALL = np.dtype(
    [(name, np.float32) for name in ("tau", "decay", "gain", "rest", "threshold", "alpha", "threshold_again")]
    + [(name, np.int32) for name in ("groups", "steps", "width", "channels", "pixels")]
    + [(name, np.int64) for name in ("frame", "emitted")],
    align=True,
)
TENSORS = (
    "go", "y", "y_again", "residual", "gv", "scale", "shift", "v0", "linear", "rate", "weights", "masks",
    "gy", "g_residual", "gv0", "sums_scale", "sums_shift", "sums_linear", "sums_weights", "scratch",
)  # fmt: skip

# What a kernel is called with: a tensor or None (its address), a number of numpy's, or a struct, by value.
Argument = Tensor | np.generic | np.ndarray | None


@cache
def _text(file: str) -> str:
    return f'#line 1 "{file}"\n{(FOLDER / file).read_text()}\n'


@dataclass(frozen=True)
class Program:
    """One kernel, specialised. Equal programs are compiled once."""

    files: str
    macros: tuple[tuple[str, int], ...]

    @property
    def kernel(self) -> str:
        """The name of its function."""
        return self.files.removesuffix("_pooled")

    @property
    def block(self) -> int:
        """Threads of a block."""
        return dict(self.macros)["BLOCK"]

    def source(self) -> str:
        """The whole text."""
        defines = "".join(f"#define {name} {int(value)}\n" for name, value in self.macros)
        return defines + "".join(_text(file) for file in FILES[self.files])


def program(files: str, **macros: int | bool) -> Program:
    """A program with macros in a fixed order."""
    return Program(files, tuple((name, int(value)) for name, value in sorted(macros.items())))


@dataclass(frozen=True)
class Launch:
    """One launch of a program: how many blocks, with what, and on which device, whatever the arguments are.

    Attributes:
        shared: bytes of shared memory of a block. device: where the tensors are, those in a struct among them.
        together: of a prepared launch, its addresses are one struct, by value, and not an argument each.
    """

    program: Program
    blocks: int
    arguments: tuple[Argument, ...]
    shared: int
    device: torch.device
    together: bool = False


# What runs a launch: cupy_launch.launch, nvrtc_launch.launch, or that of a test.
Launcher = Callable[[Launch], None]
# A launch that is made but for addresses, which come first among its kernel's arguments: called with those, 0 for None.
Ready = Callable[..., None]


def stream(device: int) -> int:
    """The handle of torch's current stream of a device, without an object of Python's around it."""
    found: int = torch._C._cuda_getCurrentRawStream(device)
    return found


def pointing(at: Sequence[int], fixed: Sequence[int], together: bool) -> tuple[array[int], array[int]]:
    """Where the driver finds a kernel's arguments: addresses of tensors, in memory of this call's own, since two threads may
    be here at once; then what lies at ``fixed``. The second array is what it is handed; the first must live as long.
    """
    values = array("Q", at)
    begin = values.buffer_info()[0]
    return values, array("Q", (begin, *fixed) if together else (*range(begin, begin + 8 * len(values), 8), *fixed))


# The smallest program, by which a launcher finds out whether it works.
PROBE = program("aggregate_forward", IO=0, WIDE=0, GROUP=2, WIDTH_V=1, BLOCK=32)


def value(argument: Argument) -> np.generic | np.ndarray:
    """What goes by value: a tensor's address and a number as a scalar of NumPy, a struct as an array of size one."""
    if argument is None or isinstance(argument, Tensor):
        return np.uint64(address(argument))
    return argument


def failed(call: Launch, by: str, error: Exception) -> BackendError:
    """What the user reads of a launch that failed: the kernel, where, by what, why, and a way out."""
    return BackendError(
        f"the CUDA kernel {call.program.kernel} failed on {call.device} with {by} ({dict(call.program.macros)}): "
        f'{type(error).__name__}: {error}; backend="reference" runs without it'
    )


def address(x: Tensor | None) -> int:
    """Where a tensor's numbers begin; 0 for None."""
    return 0 if x is None else x.data_ptr()


def addresses(**named: Tensor | None) -> list[int]:
    """Of struct Tensors, in its order."""
    return [address(named[name]) for name in TENSORS]


def dense(x: Tensor, last: bool, dtype: torch.dtype) -> Tensor:
    """Frames [..., C, H, W] without gaps, in channels_last or contiguous; a copy where they are not.

    They begin where a vector of any width may: the kernels read several numbers at once, and a slice begins anywhere.
    """
    x = laid(x.detach().to(dtype), last)
    return x if x.data_ptr() % 16 == 0 else x.clone()


def vector(x: Tensor | None) -> Tensor | None:
    """A small tensor in float32."""
    return None if x is None else x.detach().to(torch.float32).contiguous()


def widest(limit: int, run: int, total: int, *frames: Tensor | None, pairs: bool = False) -> int:
    """How many slots of a run a thread may take at once: a power of two up to ``limit``, by the run and all alignments.

    Args:
        run: slots side by side; total: all slots, of which many threads should have one each; pairs: two numbers a slot.
    """
    width = limit
    while width > 1:
        bytes_at_once = [x.element_size() * width * (2 if pairs else 1) for x in frames if x is not None]
        pointers = [x.data_ptr() for x in frames if x is not None]
        fits = all(p % b == 0 for p, b in zip(pointers, bytes_at_once, strict=True))
        if fits and run % width == 0 and total // width >= 2**16:
            break
        width //= 2
    return width


def needs_wide(*counts: int) -> bool:
    """Whether positions up to these counts overflow 32 bits, a block's overhang included."""
    return max(counts) >= 2**31 - 2**16


def power(n: int, limit: int) -> int:
    """The least power of two that is not below ``n``, up to ``limit``."""
    return min(limit, 1 << max(0, n - 1).bit_length())


def tally(block: int, sums: int, blocks: int, device: torch.device) -> tuple[Tensor | None, int]:
    """Room for ``sums`` numbers of every thread: (None, bytes of shared memory), or scratch memory where it is too small."""
    size = max(1, sums) * block * 4
    if size <= SHARED:
        return None, size
    return torch.empty(blocks * sums * block, dtype=torch.float32, device=device), block * 4


def segment(neurons: int, k: int, groups: int) -> int:
    """Drives of a segment, of whose steps the backward keeps a thread's voltages in registers: 64 numbers, or one drive's.

    As few segments as that allows, all alike where a number of drives not much smaller divides them all.
    """
    most = min(groups, 8, max(1, 64 // neurons // k))  # more drives have too many addresses
    alike = next((n for n in range(most, most // 2, -1) if groups % n == 0), 0)
    return alike or -(-groups // -(-groups // most))
