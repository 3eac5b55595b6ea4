"""Other SpikingJelly versions to test with, each in an environment that shares every other package with this one.

``python tests/hosts.py 0.0.0.0.14`` makes that environment, if it is not there, and prints the path of its Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
MODERN, OLDER, OLDEST = "2.0.0", "0.0.0.0.14", "0.0.0.0.12"


def environment(folder: Path, *packages: str, alone: bool = True) -> Path:
    """Make a virtual environment that has these packages (``name==version``) of its own and shares all others with this one.

    Args:
        alone: without what the packages need; False installs that, too.

    Returns:
        The path of its Python.

    Raises:
        subprocess.CalledProcessError: pip cannot install one of them.
    """
    interpreter = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, capture_output=True)
    own = subprocess.check_output(
        [interpreter, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
    )
    # A line of code, not a path: an editable sj_tac is found by .pth files, which only addsitedir reads.
    Path(own.strip(), "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    install = [interpreter, "-m", "pip", "install", "--quiet", "--ignore-installed", *packages]
    install += ["--no-deps"] if alone else []
    free = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    subprocess.run(install, check=True, capture_output=True, env=free)
    return interpreter


def python(version: str) -> str:
    """Return the path of a Python that has SpikingJelly ``version``.

    Raises:
        subprocess.CalledProcessError: pip cannot install that version.
    """
    folder = ROOT / ".ci" / f"venv-spikingjelly-{version}"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            environment(folder, f"spikingjelly=={version}")
            (folder / "complete").touch()
    return str(folder / "bin" / "python")


def python_or_skip(version: str) -> str:
    """Return ``python(version)``; skip the test where pip cannot install that version."""
    try:
        return python(version)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no SpikingJelly {version}: {error.stderr.decode(errors='replace')[-300:]}")


if __name__ == "__main__":
    print(python(sys.argv[1]))
