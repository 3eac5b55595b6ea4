"""Two processes that train one net together: its gradients are those of one process that has all samples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import only_v2

SCRIPT = """
import copy, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from spikingjelly.activation_based import functional
from support import awake, conv, frames, node, norm
from torch import nn
import sj_tac

def net_of(mode):
    torch.manual_seed(0)
    chains = [m for c in (2, 8, 8) for m in (conv(c, 8), norm(8), node("lif"))]
    net = awake(nn.Sequential(*chains).eval(), frames(6, 2, 2, 8, 8)).double()
    for lif in net[2::3]:
        lif.train()  # the older host differentiates no neuron in eval mode
    first = {"version": 1, "default": {"mode": "keep"}, "rules": [{"match": "0", "mode": "collapse", "k": 2}]}
    return sj_tac.convert(net, first if mode == "first" else mode, 2)

def spread(net, how):
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,))
    for i in (0, 1, 3, 4, 6, 7):
        fully_shard(net[i], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net

def work(rank, path, how, mode):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    fast = net_of(mode)
    whole, samples = copy.deepcopy(fast), [frames(6, 2, 2, 8, 8, seed=i + 1).double() for i in range(2)]
    model = spread(fast, how)
    y = model(samples[rank])
    y.square().sum().backward()
    for i, x in enumerate(samples):
        functional.reset_net(whole)
        expected = whole(x)
        (expected.square().sum() / 2).backward()
        if i == rank:
            torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    for a, b in zip(fast.parameters(), whole.parameters(), strict=True):
        assert b.grad.abs().sum() > 0
        torch.testing.assert_close(a.grad.full_tensor() if how == "FSDP" else a.grad, b.grad, rtol=1e-9, atol=1e-9)
    for _ in range(2):
        functional.reset_net(fast)
        functional.reset_net(whole)
        with torch.no_grad():
            torch.testing.assert_close(model(samples[rank]), whole(samples[rank]), rtol=1e-9, atol=1e-9)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(work, sys.argv[1:], nprocs=2, start_method="fork")
"""


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("DDP", "preserve"),
        *(pytest.param("FSDP", mode, marks=[pytest.mark.exhaustive, only_v2]) for mode in ("preserve", "collapse", "first")),
    ],
)
def test_two_processes_share_the_gradients_of_one(how, mode, tmp_path):
    """The script's two processes are forked before anything is computed: importing torch three times takes longest."""
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-W", "ignore", str(tmp_path / "script.py"), str(tmp_path / "store"), how, mode]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
