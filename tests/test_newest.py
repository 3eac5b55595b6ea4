"""The newest versions of other packages, where .ci/constraints.txt holds older ones: what a user gets today."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.exhaustive


def held():
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): str(next(iter(r.specifier)).version) for r in found}


def newest():
    """Return what pip would install today, by name."""
    free = {k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"}
    options = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, ".[test]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=free)
    if done.returncode:
        pytest.skip(f"pip resolves nothing here: {done.stderr[-300:]}")
    packages = (found["metadata"] for found in json.loads(done.stdout)["install"])
    return {canonicalize_name(p["name"]): p["version"] for p in packages if p["name"] != "sj_tac"}


def test_conversion_works_with_the_newest_versions(tmp_path):
    before, today = held(), newest()
    moved = {name: version for name, version in today.items() if before.get(name) != version}
    assert "torch" in today
    assert "spikingjelly" in today
    if not moved:
        return
    wanted = [f"{name}=={version}" for name, version in moved.items()]
    python = hosts.environment(tmp_path / "venv", *wanted)
    options = ["-n", "0", "-q", "-p", "no:cacheprovider"]
    command = [python, "-m", "pytest", *options, "tests/test_convert.py", "tests/test_saving.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"with {', '.join(wanted)}:\n{done.stdout[-5000:]}"
