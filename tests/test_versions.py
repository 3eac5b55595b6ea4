"""The graph engine under other versions of torch: each in an environment of its own, which is thrown away."""

import os
import shutil
import subprocess
from pathlib import Path

import hosts
import pytest
from support import only_v2

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.exhaustive, only_v2]
# torchvision, which SpikingJelly imports, fits one torch alone.
VERSIONS = {"2.6.0": "0.21.0", "2.8.0": "0.23.0", "2.11.0": "0.26.0", "newest": "newest"}
# One net captured, hooks and patches in front of the gate, a checkpoint, numbers that change, and every equation.
PARTS = "(dvs and (definition or test_3 or test_10)) or (change and hook) or outside or test_1_ or test_equations"


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("version", VERSIONS)
def test_capture_gate_and_equations_under_another_torch(version, tmp_path):
    pair = [f"torch=={version}", f"torchvision=={VERSIONS[version]}"]
    try:
        python = hosts.environment(tmp_path, *(["torch", "torchvision"] if version == "newest" else pair), alone=False)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no torch {version}: {error.stderr.decode(errors='replace')[-300:]}")
    try:
        command = [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/graph", "-k", PARTS]
        clean = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
        found = subprocess.check_output([python, "-c", "import torch; print(torch.__version__)"], text=True)
    finally:
        shutil.rmtree(tmp_path)
    assert found.startswith(version) or version == "newest"
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
