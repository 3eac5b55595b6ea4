"""Registers, spills and instructions of the CUDA kernels as nets use them most, by NVRTC, for every architecture.

Needs no GPU: the compiler is NVRTC, through ``cuda.bindings``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from datetime import date
from functools import lru_cache

from rich.console import Console
from rich.table import Table

from benchmarks import measure
from sj_tac.kernels.gpu import launchers, program as cuda

# By launcher: CuPy adds a flag of its own to all that it compiles, behind which numbers below 2^-126 are zeros.
FLAGS = {launchers.CUPY: (*cuda.OPTIONS, "-ftz=true"), launchers.NVRTC: cuda.OPTIONS}
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program."""

    ok: bool
    log: str
    registers: int
    spill_bytes: int
    code: bytes = b""

    @property
    def warnings(self) -> str:
        """The log without ptxas' figures."""
        return "\n".join(line for line in self.log.splitlines() if line.strip("\0 ") and "ptxas" not in line)


def nvrtc_version() -> str:
    """Of the NVRTC that compiles here."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def compile_for(program: cuda.Program, architecture: int, launcher: str = launchers.CUPY) -> Compiled:
    """A program as a GPU of this architecture gets it from a launcher, down to machine code."""
    return compile_source(program.source(), architecture, FLAGS[launcher])


def compile_source(source: str, architecture: int, options: tuple[str, ...]) -> Compiled:
    """CUDA source for one architecture, down to machine code."""
    from cuda.bindings import nvrtc

    _, handle = nvrtc.nvrtcCreateProgram(source.encode(), b"sj_tac.cu", 0, [], [])
    flags = [*options, f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v"]
    (status,) = nvrtc.nvrtcCompileProgram(handle, len(flags), [flag.encode() for flag in flags])
    _, size = nvrtc.nvrtcGetProgramLogSize(handle)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(handle, log)
    ok = status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    code = bytearray(nvrtc.nvrtcGetCUBINSize(handle)[1] if ok else 0)
    if ok:
        nvrtc.nvrtcGetCUBIN(handle, code)
    nvrtc.nvrtcDestroyProgram(handle)
    text = log.decode().rstrip("\0")
    used, spilled = re.search(r"Used (\d+) registers", text), re.findall(r"(\d+) bytes spill", text)
    return Compiled(ok, text, int(used[1]) if used else 0, sum(int(n) for n in spilled), bytes(code))


@lru_cache(maxsize=4)
def disassembled(code: bytes) -> str:
    """A kernel's instructions as text; empty without ``nvdisasm``, which Triton brings along."""
    try:
        from triton import knobs

        disassembler = knobs.nvidia.nvdisasm.path
    except (ImportError, AttributeError, RuntimeError):
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=False).stdout


INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/", re.MULTILINE)


def instructions(code: bytes) -> int | None:
    """How many instructions a kernel has, loops counted once; None without ``nvdisasm``."""
    return len(INSTRUCTION.findall(disassembled(code))) or None


@dataclass(frozen=True)
class Loop:
    """From a label to a branch back to it: first instruction, the one behind the last, and how often each is in it."""

    begin: int
    end: int
    counts: Counter[str]

    @property
    def length(self) -> int:
        """Its instructions, each counted once."""
        return self.end - self.begin


def loops(code: bytes) -> list[Loop]:
    """A kernel's loops, in the order of their ends; none without ``nvdisasm``."""
    labels: dict[str, int] = {}
    names: list[str] = []
    found = []
    for line in disassembled(code).splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif INSTRUCTION.match(line):
            name = re.search(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", line)
            names.append(name[1] if name else "")
            branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
            if branch and branch[1] in labels:
                begin = labels[branch[1]]
                found.append(Loop(begin, len(names), Counter(names[begin:])))
    return found


def loop(code: bytes) -> int | None:
    """How many instructions its longest loop has, from a label to the branch back to it; None where nothing can say."""
    return max((one.length for one in loops(code)), default=0) or None


def neuron(k: int, io: int, last: bool, windows: bool, **more: int) -> dict[str, int]:
    """Macros of a hard-reset LIF (tau a power of two) behind a BatchNorm, T = 16, for a next layer of the same k."""
    width = (4 if last or io else 2) if windows else (8 if io else 4)
    return {
        "IO": io, "WIDE": 0, "LAST": last, "GROUP": k if k > 1 else 0, "MODE": 2, "HARD": 1, "AFFINE": 1, "WINDOWS": windows,
        "WIDTH_V": width, "K": k, "MEAN": 0, "RESIDUAL": 0, "WHOLE": 1, **more,
    }  # fmt: skip


def backward(macros: dict[str, int]) -> dict[str, int]:
    """What the backward has more: fine-tuning with fixed weights, so sums for scale and shift alone, T = 16."""
    windows = macros["WINDOWS"]
    width = 1 if windows else 4
    groups = 16 // macros["K"]
    segment = cuda.segment(width * (4 if windows else 1), macros["K"], groups)
    return {
        "WIDTH_V": width, "GROUPS_OF_SEGMENT": segment, "SEGMENTS": groups // segment, "RESIDENT": cuda.RESIDENT,
        "SURROGATE": 1, "REST0": 1, "DETACH": 1, "LINEAR": 0, "POOLED": 0, "BLOCK": 128,
        "LANES": (64 if macros["IO"] and windows else 32) if macros["LAST"] else 1, "LINEAR_SUMS": 0, "WEIGHT_SUMS": 0,
    }  # fmt: skip


def specialisations() -> dict[str, cuda.Program]:
    """By a name that says what they are for."""
    found = {}
    for io, dtype in ((0, "float32"), (2, "bfloat16")):
        for last in (False, True):
            for windows in (True, False):
                for k in (1, 2, 4, 8):
                    layout = ", channels_last" if last else ""
                    name = f"{dtype}{layout}, {'2x2 pool' if windows else 'no pool'}, k={k}"
                    macros = neuron(k, io, last, windows)
                    found[f"forward, {name}"] = cuda.program("fire_forward", **macros, MASKS=0, REST0=1, BLOCK=256)
                    found[f"backward, {name}"] = cuda.program("fire_backward", **macros | backward(macros))
    return found


def instructions_a_step(io: int, architecture: int = 90) -> float | None:
    """Of the forward behind a 2x2 pool, for one step of one neuron: what k = 8 has more than k = 4."""
    counts = []
    for k in (4, 8):
        macros = neuron(k, io, False, True)
        program = cuda.program("fire_forward", **macros, MASKS=0, REST0=1, BLOCK=256)
        counts.append(instructions(compile_for(program, architecture).code))
    if counts[0] is None or counts[1] is None:
        return None
    return (counts[1] - counts[0]) / (4 * 4 * macros["WIDTH_V"])


def shown(row: dict[str, int | None]) -> str:
    """A cell of the table."""
    spilled = f" ({row['spill_bytes']} B)" if row["spill_bytes"] else ""
    counts = "".join(f" / {row[name]}" for name in ("instructions", "loop") if row[name])
    return f"{row['registers']}{spilled}{counts}"


def page_table(rows: dict[str, dict[str, dict[str, int | None]]], architecture: str = "sm_90") -> str:
    """The table of docs/gpu.md: forward, then backward, of each kind of call and k."""
    ks = (1, 2, 4, 8)
    lines = [f"| forward; backward | {' | '.join(f'k={k}' for k in ks)} |", "|---" * (len(ks) + 1) + "|"]
    kinds = dict.fromkeys(name.removeprefix("forward, ").rsplit(", ", 1)[0] for name in rows if name.startswith("forward"))
    for kind in kinds:
        cells = [
            "; ".join(shown(rows[f"{way}, {kind}, k={k}"][architecture]) for way in ("forward", "backward")) for k in ks
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, action="append", help="only these (default: all supported)")
    parser.add_argument(
        "--only", action="append", help="only kernels whose names begin so; the others stay as they were found"
    )
    options = parser.parse_args()
    architectures = options.arch or list(ARCHITECTURES)
    console, rows = Console(width=130), {}
    if options.only:
        before = json.loads(max(measure.RESULTS.glob("cuda-registers-*.json")).read_text())
        assert before["nvrtc"] == nvrtc_version(), f"the rows that are kept are of NVRTC {before['nvrtc']}"
        rows = before["kernels"]
    table = Table(title=f"registers (bytes spilled where any) / instructions, NVRTC {nvrtc_version()}", title_justify="left")
    table.add_column("kernel")
    for architecture in architectures:
        table.add_column(f"sm_{architecture}", justify="right")
    for name, program in specialisations().items():
        if options.only and not name.startswith(tuple(options.only)):
            continue
        compiled = {f"sm_{a}": compile_for(program, a) for a in architectures}
        rows[name] = {
            a: {
                "registers": c.registers,
                "spill_bytes": c.spill_bytes,
                "instructions": instructions(c.code),
                "loop": loop(c.code),
            }
            for a, c in compiled.items()
        }
        console.print(name, shown(next(iter(rows[name].values()))))
        table.add_row(name, *(shown(row) for row in rows[name].values()))
    console.print(table)
    path = measure.RESULTS / f"cuda-registers-{date.today().isoformat()}.json"
    path.write_text(json.dumps({"nvrtc": nvrtc_version(), "kernels": rows}, indent=1) + "\n")
    console.print(f"Written: {path}")


if __name__ == "__main__":
    main()
