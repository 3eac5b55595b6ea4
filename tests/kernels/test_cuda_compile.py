"""Every CUDA source compiles with NVRTC for the oldest and newest architectures, without a warning. No GPU is needed."""

import re
from itertools import product

import pytest
import torch

from benchmarks import arithmetic, event_conv, first_layer, registers
from sj_tac.kernels.gpu import launchers, program as cuda

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings to compile with")
try:
    registers.nvrtc_version()
except Exception as error:  # whatever a machine without the library raises
    pytest.skip(f"no NVRTC library: {error}", allow_module_level=True)

# What compiles for these has compiled for those between: sources ask for nothing but 9.0 or later, which lies between them.
ARCHITECTURES = (registers.ARCHITECTURES[0], registers.ARCHITECTURES[-1])

POOL = {"KH": 3, "KW": 3, "SH": 2, "SW": 2, "PH": 1, "PW": 1, "WORDS": 2}
COMMON = {"IO": 0, "WIDE": 0, "LAST": 0, "GROUP": 2}


def test_no_source_asks_for_more_of_its_architecture_than_two_compile():
    for program in programs():
        asked = re.findall(r"__CUDA_ARCH__[^\n]*", program.source())
        assert set(asked) <= {"__CUDA_ARCH__ >= 900"}
    assert ARCHITECTURES[0] < 90 <= ARCHITECTURES[-1]


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
    conv = {"PADDING": 1, "TX": 8, "TY": 2, "TZ": 4, "BLOCK": 64}
    for number, (kernel, windows, last) in enumerate(product((3, 5, 7), (True, False), (False, True))):
        half = number // 2
        width = 4 >> half // 2 if last or not windows else 1
        macros = registers.neuron(1 + half % 3, half % 3, last, windows, WIDTH_V=width)
        macros |= {"MODE": half % 5, "HARD": windows, "WHOLE": half != 1, "MEAN": half == 2, "WIDE": half % 2}
        tile = {"C_IN": 1 + half % 4, "KERNEL": kernel, "STRIDE": 1 + half % 2, "DEEP": (4, 1, 2)[half % 3]}
        lies = {
            "FRAMES_LAST": last,
            "FILTERS_LAST": number % 4 == 3,
            "FITS": number % 3 > 0 or not last,
            "AHEAD": last * (half % 3),
        }
        masks = half == 5
        more = conv | tile | lies | {"BIAS": windows, "MASKS": masks, "REST0": half % 2, "RESIDENT": 1024 * last}
        yield cuda.program("conv_fire_forward", **macros | more | ({"GROUP": 0} if masks else {}))
        yield cuda.program("conv_drives", **macros | more)
    yield cuda.program("norm_affine", IO=0, WIDE=0, BLOCK=128)
    for io in range(3):
        for kernel in ("aggregate_forward", "aggregate_backward"):
            yield cuda.program(kernel, IO=io, WIDE=io == 1, GROUP=2, WIDTH_V=4, BLOCK=128)


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_of_the_sparsity_benchmark_compiles(architecture):
    found = registers.compile_source(event_conv.SOURCE, architecture, registers.FLAGS["cupy"])
    assert found.ok, found.log
    assert not found.warnings, found.log


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


def test_first_layers_in_one_kernel_keep_their_state_in_registers():
    """A quarter of a multiprocessor's lanes at least, next to nothing spilled, and a convolution that is mostly fmaf."""
    for case, dtype in product(first_layer.CASES, (torch.float32, torch.bfloat16)):
        program, shared = registers.layer_1(case, dtype, 2)
        found = registers.compile_for(program, 90)
        assert found.registers <= 128
        assert found.spill_bytes <= 16
        assert shared <= 48 * 1024
        loops = registers.loops(found.code)
        if loops:
            convolving = max(loops, key=lambda one: one.counts["FFMA"] / one.length)
            assert convolving.counts["FFMA"] == dict(program.macros)["KERNEL"] ** 2 * 16
            assert convolving.counts["FFMA"] > 0.8 * convolving.length


def test_first_layers_in_channels_last_keep_theirs_and_take_fewer_instructions():
    """Half of the lanes where filters are 3x3, a few numbers spilled, and no more instructions a drive than contiguous."""
    for case, dtype, k in product(first_layer.CASES, (torch.float32, torch.bfloat16), (1, 4)):
        (program, shared), (contiguous, _) = (registers.layer_1(case, dtype, k, last) for last in (True, False))
        found = registers.compile_for(program, 90)
        assert found.registers <= (64 if first_layer.CASES[case].kernel == 3 else 128)
        assert found.spill_bytes <= 64
        assert shared <= 48 * 1024
        if registers.loops(found.code):
            assert registers.instructions_a_drive(program) < registers.instructions_a_drive(contiguous)


@pytest.mark.parametrize(("precision", "dtype"), [("TF32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_instructions_that_the_arithmetic_counts_for_first_layers_are_the_kernels(precision, dtype):
    for case, counted in arithmetic.DRIVE[precision].items():
        for k, expected in zip(arithmetic.FIRST_KS, counted, strict=True):
            found = registers.instructions_a_drive(registers.layer_1(case, dtype, k)[0])
            if found is None:
                pytest.skip("no nvdisasm")
            assert found == pytest.approx(expected, rel=0.05)


def test_programs_are_compiled_as_their_launcher_compiles_them():
    """CuPy adds -ftz=true: other code for a division than what a launcher of ours gets."""
    macros = registers.neuron(2, 0, False, False, MODE=0)
    program = cuda.program("fire_forward", **macros, MASKS=0, REST0=1, BLOCK=256)
    found = {launcher: registers.compile_for(program, 90, launcher) for launcher in launchers.NAMES}
    assert found["cupy"].ok
    assert found["nvrtc"].ok
    assert found["cupy"].code != found["nvrtc"].code
    assert registers.FLAGS["nvrtc"] == cuda.OPTIONS


def test_the_compiler_is_really_asked():
    broken = cuda.Program("aggregate_forward", (("BLOCK", 32), ("GROUP", 2), ("IO", 0), ("WIDE", 0)))
    found = registers.compile_for(broken, 90)
    assert not found.ok
    assert "WIDTH_V" in found.log


@pytest.mark.parametrize(("precision", "io"), [("TF32", 0), ("bf16", 2)])
def test_the_instructions_that_the_arithmetic_counts_are_those_of_the_kernel(precision, io):
    found = registers.instructions_a_step(io)
    if found is None:
        pytest.skip("no nvdisasm")
    assert found == pytest.approx(arithmetic.STEP[precision], abs=1)
