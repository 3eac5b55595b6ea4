"""Runs the CUDA programs on the CPU: the same source, compiled by g++ behind shim.h. A ``launch`` as CuPy's."""

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
MISSING = "" if shutil.which("g++") else "no g++ to compile the CUDA sources for the CPU"
LAUNCHED: list[str] = []


@cache
def folder():
    return Path(tempfile.mkdtemp(prefix="sj_tac_shim_"))


@cache
def library(program):
    text = (
        f'#include "{HERE / "shim.h"}"\n{program.source()}\n'
        'extern "C" void run(int blocks, int threads, size_t shared, void** arguments) '
        f"{{ shim_run(shim_entry<&{program.kernel}>, blocks, threads, shared, arguments); }}\n"
    )
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    source, binary = folder() / f"{name}.cpp", folder() / f"{name}.so"
    source.write_text(text)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]
    done = subprocess.run(["g++", *flags, str(source), "-o", str(binary)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{program.files} {program.macros}\n{done.stderr[:4000]}"
    return ctypes.CDLL(str(binary))


def launch(program, blocks, arguments, shared):
    """Tensors go by address, numbers and structs by value, as CuPy passes them."""
    held = []
    for argument in arguments:
        if argument is None or isinstance(argument, torch.Tensor):
            held.append(np.array(0 if argument is None else argument.data_ptr(), np.uint64))
        else:
            held.append(np.array(argument))
    pointers = (ctypes.c_void_p * len(held))(*[a.__array_interface__["data"][0] for a in held])
    library(program).run(ctypes.c_int(blocks), ctypes.c_int(program.block), ctypes.c_size_t(shared), pointers)
    LAUNCHED.append(program.kernel)
