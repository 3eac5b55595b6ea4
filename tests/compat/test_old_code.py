"""Code and nets of older SpikingJelly versions on the installed host, and against the real SpikingJelly 0.0.0.0.12."""

import os
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
import torch

from sj_tac import host

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IMPORT = "import sj_tac.compat.clock_driven\n"


def python(*command, interpreter=sys.executable, cwd=ROOT, path=ROOT):
    """A Python of its own, because the modules under test change sys.modules for good."""
    there = {**os.environ, "PYTHONPATH": str(path), "PYTHONWARNINGS": "ignore"}
    there.pop("PYTEST_ADDOPTS", None)
    command = [interpreter, *map(str, command)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=cwd, env=there)


def last_line(done):
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("version", [None, pytest.param(hosts.OLDER, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("checks", ["clock_driven_checks.py", "backends_checks.py"])
def test_old_code_runs(checks, version):
    interpreter = sys.executable if version is None else hosts.python_or_skip(version)
    options = "-n", 0, "-q", "-p", "no:cacheprovider", "-W", "ignore"
    done = python("-m", "pytest", *options, HERE / checks, interpreter=interpreter)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_the_package_alone_changes_nothing_and_the_real_one_imported_before_is_refused():
    """0.0.0.0.14 ships a clock_driven; elsewhere an older copy may have been loaded under the name."""
    before = (
        "import sys, types, sj_tac.compat\n"
        "assert 'torch' not in sys.modules and 'spikingjelly' not in sys.modules\n"
        "assert callable(sj_tac.compat.remap_keys) and 'spikingjelly.clock_driven' not in sys.modules\n"
        "sys.modules['spikingjelly.clock_driven'] = types.ModuleType('spikingjelly.clock_driven')\n"
    )
    told = last_line(python("-c", before + IMPORT))
    assert "ImportError: spikingjelly.clock_driven was imported before sj_tac.compat.clock_driven" in told
    assert "put 'import sj_tac.compat.clock_driven' in front" in told


@pytest.mark.parametrize("hides_the_host", [False, True])
def test_an_old_copy_in_the_users_project_is_named(hides_the_host, tmp_path):
    old = tmp_path / "spikingjelly" / "clock_driven"
    old.mkdir(parents=True)
    for folder in (old, old.parent):
        (folder / "__init__.py").write_text("")
    if hides_the_host:
        (old.parent / "activation_based").mkdir()
    told = last_line(python("-c", IMPORT, cwd=tmp_path, path=os.pathsep.join([str(tmp_path), str(ROOT)])))
    installed = Path(host.types.layer.__file__).parents[2 if host.IS_V2 else 1]
    assert "ImportError: 'import spikingjelly' finds the copy in" in told
    assert str(old.parent) in told
    assert str(installed) in told


# ---- the same file under 0.0.0.0.12 and here -------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[hosts.MODERN, hosts.OLDER])
def both(request, tmp_path_factory):
    """What the file gives under 0.0.0.0.12, and on a newer host."""
    folder = tmp_path_factory.mktemp("old")
    for where, version in (("old", hosts.OLDEST), ("new", request.param)):
        done = python(HERE / "old_code.py", where, folder / where, interpreter=hosts.python_or_skip(version))
        assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "old"), torch.load(folder / "new")


def close(new, old):
    """Equal up to the order in which a gradient's terms are added."""
    torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6 * max(1.0, old.abs().max().item()))


@pytest.mark.exhaustive
def test_a_net_has_the_same_keys_draws_and_results(both):
    old, new = (side["net"] for side in both)
    assert old["out"].std() > 0.01
    # The same seed fills it alike, so the constructors draw in the same order.
    assert list(old["state"]) == list(new["state"])
    for what, atol in (("state", 0), ("out", 0), ("v", 2e-6)):
        torch.testing.assert_close(new[what], old[what], rtol=0, atol=atol)
    for key, value in old["grad"].items():
        close(new["grad"][key], value)


@pytest.mark.exhaustive
def test_neurons_step_alike_in_every_setting(both):
    old, new = (side["neurons"] for side in both)
    assert old.keys() == new.keys()
    assert len(old) > 318
    for setting, there in old.items():
        here = new[setting]
        assert there["spikes"].mean() > 0.01, setting
        # 2.0 writes the decay of an input that does not decay as a product with 1 - 1 / tau.
        exact = len(setting) > 2 and (setting[1] or setting[3] == 2.0)
        own = setting[0].startswith("own")
        torch.testing.assert_close(here["spikes"], there["spikes"], rtol=0, atol=0, msg=str(setting))
        torch.testing.assert_close(here["v"], there["v"], rtol=0, atol=0 if exact or own else 2e-6, msg=str(setting))
        close(here["grad"], there["grad"])
        assert (there["w"] is None) == (here["w"] is None)
        if there["w"] is not None:
            assert there["w"].shape == here["w"].shape == ()
            torch.testing.assert_close(here["w"], there["w"], rtol=1e-4, atol=1e-3)


@pytest.mark.exhaustive
def test_an_older_host_alone_is_named():
    assert "pip install 'spikingjelly>=0.0.0.0.14'" in last_line(
        python("-c", IMPORT, interpreter=hosts.python_or_skip(hosts.OLDEST))
    )
