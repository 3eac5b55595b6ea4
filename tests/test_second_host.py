"""The quick suite of all that depends on the host, under SpikingJelly 0.0.0.0.14."""

import subprocess

import hosts
import pytest

from sj_tac import host

pytestmark = pytest.mark.exhaustive
# Folders and files, each for a process of its own.
PLACES = [
    "idioms", "operators", "measure", "compat", "tuning", "kernels/test_reference.py", "test_capturing.py",
    "test_collapse.py", "test_convert.py", "test_converted_nets.py", "test_definition_modules.py", "test_definition_ops.py",
    "test_dtype.py", "test_edited.py", "test_gone_around.py", "test_hosts.py", "test_layers.py", "test_other_tools.py",
    "test_policy.py", "test_random_graphs.py", "test_saving.py", "test_schedule.py", "test_zoo.py",
]  # fmt: skip


@pytest.mark.skipif(not host.IS_V2, reason="this is the older host")
@pytest.mark.parametrize("place", PLACES)
def test_the_older_host_passes(place):
    assert (hosts.ROOT / "tests" / place).exists()
    older = hosts.python_or_skip(hosts.OLDER)
    quiet = ["-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning", "-p", "no:cacheprovider"]
    command = [older, "-m", "pytest", "-n", "0", "-q", *quiet, f"tests/{place}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=hosts.ROOT)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
