"""Every CUDA source compiles with NVRTC for the oldest and newest architectures, without a warning. No GPU is needed."""

from itertools import product

import pytest

from benchmarks import registers
from sj_tac.kernels.gpu import program as cuda

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings to compile with")
try:
    registers.nvrtc_version()
except Exception as error:  # whatever a machine without the library raises
    pytest.skip(f"no NVRTC library: {error}", allow_module_level=True)

# What compiles for these has compiled for those between: sources ask for nothing but 9.0 or later, which lies between them.
ARCHITECTURES = (registers.ARCHITECTURES[0], registers.ARCHITECTURES[-1])

POOL = {"KH": 3, "KW": 3, "SH": 2, "SW": 2, "PH": 1, "PW": 1, "WORDS": 2}
COMMON = {"IO": 0, "WIDE": 0, "LAST": 0, "GROUP": 2}


def programs():
    """All kernels, and between them every value of every macro."""
    for mode, hard in product(range(6), (0, 1)):
        io, last, windows = mode % 3, mode // 3, hard
        macros = registers.neuron(2, io, bool(last), bool(windows), MODE=mode, HARD=hard, WIDE=hard, AFFINE=mode % 2)
        macros |= {"RESIDUAL": last, "MEAN": windows * (io % 2), "WHOLE": io == 0, "GROUP": 2 + io}
        yield cuda.program("fire_forward", **macros, MASKS=0, REST0=last, BLOCK=256)
        more = {"SEGMENTS": 1 + hard, "SURROGATE": mode, "LINEAR_SUMS": hard, "WEIGHT_SUMS": io % 2, "REST0": last}
        more |= {"DETACH": (mode + hard) % 2, "LINEAR": hard or mode == 5}
        yield cuda.program("fire_backward", **macros | registers.backward(macros) | more)
    for mean, last in product((0, 1), (0, 1)):
        macros = registers.neuron(3, 2 * mean, bool(last), False, WIDTH_V=1, GROUP=2 * mean, RESIDUAL=mean)
        yield cuda.program("fire_forward", **macros, MASKS=1, REST0=0, BLOCK=256)
        macros |= registers.backward(macros)
        more = {"SURROGATE": 6, "POOLED": 1, "BLOCK": 64, "LANES": 1 + last, "REACH": 4, "MEAN": mean, "WIDTH_V": 1}
        yield cuda.program("fire_backward_pooled", **macros | POOL | more)
        for kernel in ("fire_pool", "fire_pool_weights"):
            shared = COMMON | {"LAST": last, "GROUP": 2 * mean, "IO": mean}
            yield cuda.program(kernel, **shared, **POOL, MEAN=mean, BLOCK=128, WIDTH_V=1)
    for io in range(3):
        for kernel in ("aggregate_forward", "aggregate_backward"):
            yield cuda.program(kernel, IO=io, WIDE=io == 1, GROUP=2, WIDTH_V=4, BLOCK=128)


def test_a_source_compiles_and_the_compiler_is_really_asked():
    found = registers.compile_for(next(programs()), 90)
    assert found.ok, found.log
    assert not found.warnings, found.log
    broken = cuda.Program("aggregate_forward", (("BLOCK", 32), ("GROUP", 2), ("IO", 0), ("WIDE", 0)))
    found = registers.compile_for(broken, 90)
    assert not found.ok
    assert "WIDTH_V" in found.log


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_source_compiles(architecture):
    seen = set()
    for program in programs():
        found = registers.compile_for(program, architecture)
        assert found.ok, f"{program.files} {dict(program.macros)}\n{found.log}"
        assert not found.warnings, f"{program.files} {dict(program.macros)}\n{found.log}"
        assert found.registers > 0
        seen.add(program.files)
    assert seen == set(cuda.FILES)


@pytest.mark.exhaustive
def test_main_specialisations_keep_their_state_in_registers():
    """Half of the lanes of a multiprocessor at least, and next to nothing spilled."""
    for k, windows in product((1, 2, 4), (False, True)):
        macros = registers.neuron(k, 0, False, windows)
        found = registers.compile_for(cuda.program("fire_forward", **macros, MASKS=0, REST0=1, BLOCK=256), 90)
        assert found.registers <= 64
        assert found.spill_bytes == 0
        inner = registers.loop(found.code)
        assert inner is None or inner <= 70 * k + 10
        found = registers.compile_for(cuda.program("fire_backward", **macros | registers.backward(macros)), 90)
        assert found.registers <= 130
        assert found.spill_bytes == 0
        count = registers.instructions(found.code)
        assert count is None or count <= 5000
