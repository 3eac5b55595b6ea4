"""A function that the user compiled, in the forward of a net that is not compiled."""

import subprocess
import sys

import pytest
import torch
from comparing import reset
from forwards import build, spikes_in

import sj_tac


def _mixed(x, y):
    return (x * 1.5 + y.flip(0)).mean(1, keepdim=True) + x


def _added(x, y):
    return x + y


@pytest.mark.parametrize("mode", ["preserve", "collapse"])
@pytest.mark.parametrize("function", [_mixed, _added])
@pytest.mark.parametrize(("grad", "backend"), [(True, "eager"), (False, "eager"), (True, "aot_eager")])
def test_it_gives_what_it_gives_uncompiled(function, mode, backend, grad):
    fast = sj_tac.convert(build(), mode, 2)
    found = []
    for used in (function, torch.compile(function, backend=backend)):

        def steps(n, x, used=used):
            s = n.a(x)
            return n.head(n.d(n.c(used(n.b(s), s))))

        fast.steps = steps
        reset(fast)
        fast.zero_grad()
        with torch.set_grad_enabled(grad):
            y = fast(spikes_in())
        if grad:
            y.square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in fast.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > (5 if grad else 0)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_no_call_imports_the_compiler():
    script = (
        "import sys, torch, sj_tac; sys.path.insert(0, 'tests'); from support import csnn, frames\n"
        "fast = sj_tac.convert(csnn(), 'preserve', 2); before = 'torch._dynamo' in sys.modules\n"
        "fast(frames(6, 2, 2, 8, 8)).sum().backward()\n"
        "print(before, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert after == before
