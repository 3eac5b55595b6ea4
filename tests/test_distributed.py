"""Two processes that train one net together: its gradients are those of one process that has all samples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import only_v2

DDP = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from spikingjelly.activation_based import functional
from support import csnn, frames
import sj_tac

def fast_net():
    net = csnn()
    net[11].p = 0.0
    fast = sj_tac.convert(net, "preserve", 2).train()
    sj_tac.freeze_bn(fast)
    return fast

def loss(y): return (y * torch.linspace(-1, 1, y.shape[2])).mean(0).sum() / y.shape[1]

def work(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    whole = fast_net()
    loss(whole(frames(6, 4, 2, 8, 8))).backward()
    model = torch.nn.parallel.DistributedDataParallel(fast_net())
    x = frames(6, 4, 2, 8, 8)[:, rank * 2 : rank * 2 + 2]
    loss(model(x)).backward()
    for a, b in zip(model.module.parameters(), whole.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 1e-5 * b.grad.abs().max().clamp_min(1e-2)
    assert {v.kernel for v in sj_tac.report(model.module).converted} == {"numba, fused"}
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(work, sys.argv[1:], nprocs=2, start_method="fork")
"""

FSDP = """
import copy, os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from spikingjelly.activation_based import functional
from support import awake, conv, frames, node, norm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import sj_tac

def net_of(mode):
    torch.manual_seed(0)
    chains = [m for c in (2, 8, 8) for m in (conv(c, 8), norm(8), node("lif"))]
    net = awake(nn.Sequential(*chains).eval(), frames(6, 2, 2, 8, 8))
    first = {"version": 1, "default": {"mode": "keep"}, "rules": [{"match": "0", "mode": "collapse", "k": 2}]}
    return sj_tac.convert(net, first if mode == "first" else mode, 2)

def work(rank, path, mode):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    fast = net_of(mode)
    whole, mesh = copy.deepcopy(fast), init_device_mesh("cpu", (2,))
    for i in (0, 1, 3, 4, 6, 7):
        fully_shard(fast[i], mesh=mesh)
    fully_shard(fast, mesh=mesh)
    samples = [frames(6, 2, 2, 8, 8, seed=i + 1) for i in range(2)]
    y = fast(samples[rank])
    y.square().sum().backward()
    for i, x in enumerate(samples):
        functional.reset_net(whole)
        expected = whole(x)
        (expected.square().sum() / 2).backward()
        assert i != rank or torch.equal(expected, y)
    for a, b in zip(fast.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-4)
    for _ in range(3):
        functional.reset_net(fast)
        functional.reset_net(whole)
        with torch.no_grad():
            assert torch.equal(fast(samples[rank]), whole(samples[rank]))
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(work, sys.argv[1:], nprocs=2, start_method="fork")
"""


def run(script, path, *arguments):
    """Run a script whose two processes are forked before anything is computed: importing torch three times takes longest."""
    (path / "script.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-W", "ignore", str(path / "script.py"), str(path / "store"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_ddp_processes_share_the_gradients_of_one(tmp_path):
    run(DDP, tmp_path)


@only_v2
@pytest.mark.parametrize("mode", ["preserve", "collapse", "first"])
def test_two_processes_that_shard_every_conv_and_norm(mode, tmp_path):
    run(FSDP, tmp_path, mode)
