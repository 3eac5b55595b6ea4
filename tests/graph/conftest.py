"""Captures cost a second each: the quick suite may make 400."""

import pytest

from sj_tac.rewrites.capture import Capture

LIMIT = 400


@pytest.fixture(scope="session", autouse=True)
def _few_captures(request):
    count, backend = 0, Capture.backend

    def counted(self, gm, examples):
        nonlocal count
        count += 1
        return backend(self, gm, examples)

    Capture.backend = counted
    yield
    Capture.backend = backend
    assert count <= LIMIT or request.config.getoption("exhaustive"), f"{count} captures in one process"


@pytest.fixture
def strict(monkeypatch):
    """Errors of equations and of Dynamo are errors."""
    monkeypatch.setenv("SJ_TAC_STRICT", "1")
