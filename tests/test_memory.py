"""Keeping the process's memory: page faults of large blocks end, and where there is nothing to be done it says so."""

import ctypes
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import sj_tac
from sj_tac.support import machine, memory

on_glibc = pytest.mark.skipif(memory._glibc() is None, reason="the allocator is not glibc's")


def in_a_process(script):
    """What a script prints, as JSON, in a process of its own: what is said to the allocator holds for all of one."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BLOCKS = """
import json, resource, statistics, torch, sj_tac
from sj_tac.support import machine, memory
def faults(rounds=10, of=statistics.mean):  # of a block of 64 MiB
    seen = []
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(64 << 18).fill_(1.0)
        seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return of(seen)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20
found, least = {"before": faults(), "modes": [memory.mode()]}, resident()
try:
    with memory.kept_meanwhile():
        faults(30)  # the allocator finds its way
        found["meanwhile"] = faults(of=statistics.median)  # a block now and then finds no place that was kept
        found["modes"].append(memory.mode())
        found["held"] = resident() - least
        raise KeyError
except KeyError:
    found["modes"].append(memory.mode())
found |= {"left": resident() - least, "after": faults()}
with memory.kept_meanwhile():
    found["did"] = [sj_tac.keep_memory(), sj_tac.keep_memory()]
faults(30)
found["modes"].append(machine.describe()["memory"])
print(json.dumps(found | {"asked": faults(of=statistics.median)}))
"""


@on_glibc
def test_memory_is_kept_for_as_long_as_it_takes_or_from_when_it_is_asked_for():
    found = in_a_process(BLOCKS)
    assert found["modes"] == ["default", "default", "default", "kept"]
    # Pages may be of 2 MiB where the system makes them so; then there are few of them, but still some.
    assert found["before"] >= 64 // 2
    assert found["meanwhile"] <= found["before"] / 50, found
    assert found["held"] > 32, found
    assert found["left"] < 32, found
    assert found["after"] >= 64 // 2
    # Who asks for it to stay so is not overruled.
    assert found["did"] == [True, True]
    assert found["asked"] <= found["before"] / 50, found


@pytest.mark.parametrize("problem", [OSError, TypeError, "musl", "jemalloc"])
def test_where_the_allocator_is_not_glibcs_nothing_is_done_and_it_says_so(problem, monkeypatch):
    def library(name):
        if not isinstance(problem, str):
            raise problem  # Windows: no such library, or None is no name of one
        if problem == "musl":
            return SimpleNamespace(malloc=ctypes.CFUNCTYPE(None)())
        functions = {"gnu_get_libc_version": None, "mallopt": lambda *numbers: pytest.fail(f"mallopt{numbers}")}
        return SimpleNamespace(malloc=ctypes.CFUNCTYPE(None)(id(name)), **functions)

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # torch may ask NVML's library
    monkeypatch.setattr(memory, "_SAID", [])
    monkeypatch.setattr(memory, "VARIABLES", ())
    assert sj_tac.keep_memory() is False
    assert memory.mode() == machine.describe()["memory"] == "default"


@pytest.mark.parametrize(("threshold", "maximum", "trim", "did"), [(1, 0, 1, 1), (0, 1, 1, 1), (0, 0, 1, 0), (1, 1, 0, 0)])
def test_what_an_older_glibc_refuses_is_said_another_way(threshold, maximum, trim, did, monkeypatch):
    takes, said = {memory.M_MMAP_THRESHOLD: threshold, memory.M_MMAP_MAX: maximum, memory.M_TRIM_THRESHOLD: trim}, []
    answers = SimpleNamespace(mallopt=lambda what, value: said.append((what, value)) or takes[what])
    monkeypatch.setattr(memory, "_glibc", lambda: answers)
    monkeypatch.setattr(memory, "_SAID", [])
    assert memory.keep_memory() is bool(did)
    assert (memory.mode() == "kept") is bool(did)
    assert ((memory.M_MMAP_MAX, 0) in said) is not threshold


def test_the_mode_names_what_the_environment_says(monkeypatch):
    monkeypatch.setattr(memory, "_SAID", [])
    for name in memory.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert memory.mode() == "default"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
    assert memory.mode() == "default"
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4000000000")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
    assert memory.mode() == "MALLOC_MMAP_THRESHOLD_=4000000000 GLIBC_TUNABLES=glibc.malloc.tcache_count=0"
