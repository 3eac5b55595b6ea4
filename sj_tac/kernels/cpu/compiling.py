"""Compile the CPU's kernels: src/*.cpp to one shared library for a level of the processor, by any C++ compiler.

setup.py runs this when sj_tac is installed; nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
# What compilers call a level of x86 processors. The lowest is what NumPy asks for, too; other kinds have one, "plain".
LEVELS = {
    "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "v3": ["-march=x86-64-v3"],
    "v2": ["-march=x86-64-v2"],
    "plain": [],
}
# Spikes compare to the last bit with PyTorch's own: no multiplication and addition may become one operation.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"]
# But for what a source says of itself.
FLAGS_OF = {"convolve.cpp": ["-ffp-contract=fast"]}


def digest() -> str:
    """Return what tells libraries of these sources from those of others."""
    found = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:12]


def library(level: str) -> Path:
    """Return where the library for a level lies, compiled or not."""
    return HERE / f"kernels-{level}-{digest()}.so"


def levels_here() -> list[str]:
    """Return the levels of this machine's kind of processor, the fastest first."""
    return ["v4", "v3", "v2"] if platform.machine() in ("x86_64", "AMD64") else ["plain"]


def compiler() -> list[str]:
    """Return the command of a C++ compiler: that of $CXX, the machine's, or ziglang's from the package index; else [].

    [] on Windows, too, where no build was ever tried.
    """
    if platform.system() == "Windows":
        return []
    if os.environ.get("CXX"):
        return os.environ["CXX"].split()
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return [found]
    return [sys.executable, "-m", "ziglang", "c++"] if importlib.util.find_spec("ziglang") else []


def build(level: str, command: list[str]) -> Path:
    """Compile the library for a level, and remove those of other sources.

    Raises:
        RuntimeError: the compiler failed; the message has its command and what it said.
    """
    done = library(level)
    if done.exists():
        return done
    flags = [*FLAGS, *LEVELS[level]]
    if "ziglang" in command:  # which has names of its own, and a target for every machine
        processor = [] if level == "plain" else [f"-mcpu=x86_64_{level}"]
        flags = [*FLAGS, *processor, "-target", f"{platform.machine()}-linux-gnu.2.28"]
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(folder, f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            own = [FLAGS_OF.get(source.name, []) for source in sources]
            parts = zip(own, sources, objects, strict=True)
            list(pool.map(lambda part: _run([*command, *flags, *part[0], "-c", str(part[1]), "-o", str(part[2])]), parts))
        made = Path(folder, done.name)
        # Without the C++ runtime's own library, of which the kernels need nothing.
        _run([*command, "-shared", "-nostdlib++" if "clang" in command[0] or "ziglang" in command else "-static-libstdc++",
              *map(str, objects), "-o", str(made)])  # fmt: skip
        for old in HERE.glob(f"kernels-{level}-*.so"):
            old.unlink()
        made.rename(done)
    return done


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with exit status {done.returncode}:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or levels_here():
        print(build(wanted, compiler()))
