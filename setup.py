"""Compile the CPU's kernels when sj_tac is installed or built; everything else is in pyproject.toml."""

import importlib.util
import platform
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDER = Path(__file__).parent / "sj_tac/kernels/cpu"


def compiling():
    """Load sj_tac/kernels/cpu/compiling.py without sj_tac, which imports torch."""
    spec = importlib.util.spec_from_file_location("compiling", FOLDER / "compiling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """Compile the kernels for every level of this kind of processor."""

    def run(self):
        kernels = compiling()
        command = kernels.compiler()
        if not command:
            print("sj_tac: no C++ compiler; its nets will run in plain PyTorch on a CPU", file=sys.stderr)
        made = []
        for level in kernels.levels_here() if command else ():
            try:
                made.append(kernels.build(level, command))
            except RuntimeError as error:
                print(f"sj_tac: no kernels for processors of level {level}: {error}", file=sys.stderr)
        super().run()
        for library in made if not self.editable_mode else ():
            shutil.copy2(library, Path(self.build_lib, "sj_tac/kernels/cpu"))


class WheelForAnyPython(bdist_wheel):
    """A wheel with machine code in it, but of no version of Python."""

    def get_tag(self):
        _, _, system = super().get_tag()
        if system.startswith("linux_") and platform.libc_ver()[0] == "glibc":
            # The kernels need nothing newer of glibc (tests/test_release.py looks).
            system = f"manylinux_2_28_{system.removeprefix('linux_')}"
        return "py3", "none", system


class WithKernels(Distribution):
    def has_ext_modules(self):
        return bool(compiling().compiler())


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForAnyPython}, distclass=WithKernels)
