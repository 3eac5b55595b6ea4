"""How the CPU's kernels are compiled and found, and that they touch no memory but their own."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import node

import sj_tac
from sj_tac.errors import BackendError, BackendFallbackWarning
from sj_tac.functional import fire
from sj_tac.kernels import backends
from sj_tac.kernels.cpu import call, compiling

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """A folder without compiled kernels."""
    monkeypatch.setattr(compiling, "HERE", tmp_path)
    monkeypatch.setattr(backends, "_SAID", set())
    call._find.cache_clear()
    yield tmp_path
    call._find.cache_clear()


def test_without_a_library_nets_run_as_defined_and_one_warning_says_what_helps(no_library):
    y = torch.randn(3, 2, 4, 5, 5)
    with pytest.warns(BackendFallbackWarning, match=r"not compiled in .*C\+\+ compiler.*pip install -e \."):
        out, _ = fire(y, node("lif", v_threshold=0.3), 2)
    assert out.count_nonzero()
    assert torch.equal(fire(y, node("lif", v_threshold=0.3), 2)[0], out)  # pytest would raise a second warning
    sj_tac.functional.aggregate(y[:2], [0.5, 0.5], 2)
    with pytest.raises(BackendError, match=r"backend='cpp': .*not compiled"):
        fire(y, node("lif"), 2, backend="cpp")


def test_a_library_of_other_sources_is_not_loaded(no_library, monkeypatch):
    level = call.level()
    (no_library / f"kernels-{level}-0123456789ab.so").write_bytes(b"of another version")
    assert "not compiled" in call.problem()
    monkeypatch.setattr(compiling, "digest", lambda: "0123456789ab")
    call._find.cache_clear()
    assert "does not load" in call.problem()


def test_a_compiler_that_fails_leaves_no_library_and_says_what_it_said(no_library):
    with pytest.raises(RuntimeError, match=r"(?s)false .*failed with exit status 1"):
        compiling.build(call.level(), ["false"])
    assert not list(no_library.iterdir())


def test_which_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "some compiler")
    assert compiling.compiler() == ["some", "compiler"]
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    assert compiling.compiler() == []
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: name)
    assert compiling.compiler() == [sys.executable, "-m", "ziglang", "c++"]


RUN = """
import faulthandler, sys
sys.path[:0] = ["tests", "tests/kernels"]
import conftest, torch
from fire_cases import build, run, space
from hypothesis import HealthCheck, given, settings, strategies as st
from sj_tac.functional import aggregate
torch.set_num_threads(2)

@settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(space, st.tuples(st.integers(1, 2), st.integers(1, 150), st.integers(3, 40), st.integers(3, 40)))
def every_call(case, shape):
    run("cpp", *build(case | {"shape": shape, "steps": min(case["steps"], 40)}))

every_call()
for shape in ((7, 1), (5, 3, 1030), (4, 2, 17, 3, 3)):
    aggregate(torch.rand(shape, requires_grad=True), torch.rand(3, requires_grad=True), 3).sum().backward()
print("clean")
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.system() != "Linux" or not shutil.which("g++"), reason="needs g++ and its sanitizers")
def test_under_sanitizers(tmp_path):
    """Every read and write of memory, and every shift, overflow and alignment, is checked."""
    package = tmp_path / "sj_tac"
    shutil.copytree(ROOT / "sj_tac", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    environment = {**os.environ, "CXX": "g++ -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"}
    build = [sys.executable, str(package / "kernels/cpu/compiling.py"), call.level()]
    subprocess.run(build, check=True, env=environment, capture_output=True)
    names = ("libasan.so", "libstdc++.so")
    found = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]
    environment |= {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", RUN]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("clean\n"), done.stderr[-6000:]
