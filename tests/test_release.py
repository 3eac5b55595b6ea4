"""What is released: a wheel and an sdist that work where nothing of the checkout is, and files that others read."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from sj_tac.kernels.cpu import compiling

ROOT = Path(__file__).resolve().parents[1]
CALL = """
import pathlib, sys
import sj_tac, sj_tac.rewrites, torch
from spikingjelly.activation_based import functional, layer, neuron
net = torch.nn.Sequential(layer.Conv2d(2, 4, 3), layer.BatchNorm2d(4), neuron.LIFNode()).eval()
functional.set_step_mode(net, "m")
fast = sj_tac.convert(net, k=2)
sj_tac.report(fast).to_html(sys.argv[1])
places = [str(pathlib.Path(package.__file__).parent) for package in (sj_tac, sj_tac.rewrites)]
steps = fast(torch.rand(4, 1, 2, 6, 6)).shape[0]
print(steps, sj_tac.report(fast)["0"].kernel.split(",")[0], *places)
"""


def run(*command, cwd, **more):
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=clean, capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist, built outside the checkout, where setuptools finds nothing of an earlier build."""
    pytest.importorskip("build", reason='pip install "sj_tac[test]"')
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    source.mkdir()
    for name in ("README.md", "LICENSE", "MANIFEST.in", "build_backend.py", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source)
    for name in ("sj_tac", "rewrites"):  # sj_tac/rewrites is a symbolic link to rewrites
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ".", cwd=source)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.exhaustive
def test_wheel_and_sdist_have_all_that_runs(built):
    wheel, sdist = built
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as file:
        packed = {name.split("/", 1)[1] for name in file.getnames() if "/" in name}
    wanted = {
        str(Path(place, path.relative_to(ROOT / folder)))
        for folder, place in {"sj_tac": "sj_tac", "rewrites": "sj_tac/rewrites"}.items()
        for path in ROOT.joinpath(folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh", ".j2", ".typed")
    }
    assert wanted <= inside
    assert wanted <= packed
    assert not [name for name in inside if name.split("/")[0] != "sj_tac"]
    assert "py3-none-manylinux_2_28" in wheel.name
    libraries = [name for name in inside if name.endswith(".so")]
    assert {name.split("-")[1] for name in libraries} == set(compiling.levels_here())
    for name in libraries:
        versions = re.findall(rb"GLIBC_2\.(\d+)", zipfile.ZipFile(wheel).read(name))
        assert versions
        assert max(map(int, versions)) <= 28


@pytest.mark.exhaustive
def test_the_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    """Everything but sj_tac is that of this environment."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    place = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path).strip()
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, built[0], cwd=tmp_path)
    Path(place, "others.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    steps, kernel, ours, passes = run(python, "-W", "ignore", "-c", CALL, tmp_path / "page.html", cwd=tmp_path).split()
    assert (steps, kernel) == ("4", "cpp")
    assert Path(ours) == Path(place, "sj_tac")
    assert Path(passes) == Path(place, "sj_tac", "rewrites")
    assert "<table" in (tmp_path / "page.html").read_text()


def test_files_that_others_read():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "bash .ci/run" in workflow
    assert yaml.safe_load(workflow)["jobs"]
    # What runs before a commit is what CI looks at first.
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [h["entry"].split()[0] for h in hooks] == ["ruff", "ruff", "mypy"]
    assert "weights_only" in (ROOT / "SECURITY.md").read_text()
