"""Options and limits of every test: the quick suite and the exhaustive one, processes, threads, tables of a fixed width."""

import contextlib
import os
import zlib
from collections.abc import Iterator

# Before torch is imported. Two processes whose waiting threads spin are ten times slower on two cores than one process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["COLUMNS"] = "140"

import pairs
import pytest
import torch
from hypothesis import settings

from sj_tac.kernels.cpu import call
from sj_tac.rewrites.gate import as_defined

# How long an example takes depends on the machine's other load: no deadline.
settings.register_profile("quick", deadline=None, max_examples=12)
settings.register_profile("exhaustive", deadline=None, max_examples=100)
# Most nets of the tests are too small for threads to be worth their start. They start all the same, so that they are tested.
call.ALONE //= 20
if not torch.cuda.is_available():
    # Without a device every seed is kept for later with the stack it was given in: a millisecond for each torch.manual_seed.
    torch.cuda.manual_seed_all = lambda seed: None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run also the tests marked exhaustive, whole products of parameters, and more examples of each property",
    )


def pytest_configure(config: pytest.Config) -> None:
    pairs.EXHAUSTIVE = config.getoption("exhaustive")
    settings.load_profile("exhaustive" if pairs.EXHAUSTIVE else "quick")


def _is_drawn(item: pytest.Item) -> bool:
    """Return whether a test that says nothing of captures runs captured: one of four, with ``--exhaustive``."""
    return pairs.EXHAUSTIVE and zlib.crc32(item.nodeid.encode()) % 4 == 0


@pytest.fixture(autouse=True)
def _captures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run converted nets as they are defined, but in tests marked ``captured``, which pay seconds for each capture; with
    ``--exhaustive`` in one of four others, too.
    """
    is_captured = _is_drawn(request.node) or request.node.get_closest_marker("captured")
    with contextlib.nullcontext() if is_captured else as_defined():
        yield


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one process a core, at most 16; none besides this one for tests that are named one by one."""
    if config.args and all("::" in arg for arg in config.args):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked exhaustive, except those that the command line names."""
    for item in items:
        if _is_drawn(item) and not item.get_closest_marker("captured"):
            # It may do what makes a call run as it is defined, and is not about the warning that says so.
            item.add_marker(pytest.mark.filterwarnings("ignore::sj_tac.errors.CaptureWarning"))
    if config.getoption("exhaustive"):
        return
    named = tuple(arg.split("/")[-1] for arg in config.args if "::" in arg)
    kept, left = [], []
    for item in items:
        wanted = item.get_closest_marker("exhaustive") is None or item.nodeid.split("/")[-1].startswith(named or ("\0",))
        (kept if wanted else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
