"""setuptools' build backend, which asks the package index for a C++ compiler where this machine has none."""

import platform

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from setup import compiling


def _with_compiler(wanted):
    return wanted if compiling().compiler() or platform.system() == "Windows" else [*wanted, "ziglang"]


def get_requires_for_build_wheel(config_settings=None):
    return _with_compiler(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings=None):
    return _with_compiler(build_meta.get_requires_for_build_editable(config_settings))
