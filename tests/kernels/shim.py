"""Runs CUDA sources on the CPU: the same text, compiled by g++ behind shim.h, on host memory."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
MISSING = "" if shutil.which("g++") else "no g++ to compile the CUDA sources for the CPU"
# The names of the kernels that ran, in order.
LAUNCHED: list[str] = []


FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]


def build(*arguments):
    """g++'s complaint, or ""."""
    done = subprocess.run(["g++", *FLAGS, *map(str, arguments)], capture_output=True, text=True, check=False)
    return done.stderr[:4000] if done.returncode else ""


@cache
def folder():
    """Where the builds go, with the header compiled in advance: by itself it takes longer than a kernel.

    The processes of one run of pytest share it.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if not run:
        made = Path(tempfile.mkdtemp(prefix="sj_tac_shim_"))
    else:
        made = Path(tempfile.gettempdir(), f"sj_tac_shim_{run}")
        made.mkdir(mode=0o700, exist_ok=True)
    header = made / "shim.h"
    whole(header, lambda part: shutil.copy(HERE / "shim.h", part))
    whole(Path(f"{header}.gch"), lambda part: compiled("-x", "c++-header", header, "-o", part))
    return made


def whole(path, make):
    """Have ``make`` write a file that another process may write as well: it is there whole, or not at all."""
    if not path.exists():
        part = path.with_name(f"{os.getpid()}.{path.name}")
        make(part)
        part.replace(path)


def compiled(*arguments):
    assert not (wrong := build(*arguments)), wrong


@cache
def library(source, kernel):
    text = (
        f'#include "shim.h"\n{source}\n'
        'extern "C" int run(int blocks, int threads, size_t shared, void** arguments) '
        f"{{ return shim_run(shim_entry<&{kernel}>, blocks, threads, shared, arguments); }}\n"
        f'extern "C" int describe(char* kinds, int* sizes) {{ return shim_describe(&{kernel}, kinds, sizes); }}\n'
    )
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    written, binary = folder() / f"{name}.cpp", folder() / f"{name}.so"
    whole(written, lambda part: part.write_text(text))
    whole(binary, lambda part: compiled(written, "-o", part))
    return ctypes.CDLL(str(binary))


@cache
def parameters(source, kernel):
    """Kind ("pointer", "integer", "float", "struct") and bytes of each of a kernel's parameters, as g++ sees them."""
    kinds, sizes = ctypes.create_string_buffer(64), (ctypes.c_int * 64)()
    count = library(source, kernel).describe(kinds, sizes)
    names = {"p": "pointer", "i": "integer", "f": "float", "s": "struct"}
    return [(names[kinds.raw[i : i + 1].decode()], sizes[i]) for i in range(count)]


def block_of(source):
    """Threads of a block that the text was specialised for."""
    return int(next(line for line in source.splitlines() if line.startswith("#define BLOCK ")).split()[2])


def run(source, kernel, blocks, shared, addresses):
    """A kernel on ``blocks`` blocks; ``addresses``: where each argument's value lies, as cuLaunchKernel takes them."""
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    wrote = library(source, kernel).run(
        ctypes.c_int(blocks), ctypes.c_int(block_of(source)), ctypes.c_size_t(shared), pointers
    )
    assert not wrote, f"{kernel}: block {wrote - 1} wrote past its {shared} bytes of shared memory"
    LAUNCHED.append(kernel)
