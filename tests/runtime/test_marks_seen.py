"""Behind a count collapse: a look at one side of a sum, or an operation in front of a pool, changes no mark."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, layer, neuron
from torch import nn

import sj_tac

pytestmark = pytest.mark.filterwarnings("ignore::sj_tac.errors.PlanNotKeptWarning")


def conv(before):
    return layer.Conv2d(before, 6, 3, padding=1, step_mode="m")


def lif(threshold):
    return neuron.LIFNode(v_threshold=threshold, step_mode="m")


class Residual(nn.Module):
    """Two values behind one collapse, in a sum or side by side, of which somebody may look at one."""

    def __init__(self, join):
        super().__init__()
        self.conv1, self.lif1, self.conv2, self.lif2 = conv(2), lif(0.3), conv(6), lif(0.3)
        self.join = join

    def forward(self, x):
        i = self.lif1(self.conv1(x))
        return self.lif2(self.join(self.conv2(i), i))


class Written(Residual):
    """What is written in place is frames of its own, beside what is not."""

    def forward(self, x):
        i = self.lif1(self.conv1(x))
        j = i.clone()
        j.sum()
        j += i
        return self.lif2(j * 0.5 + self.conv2(j))


class Pooled(nn.Module):
    def __init__(self, operation, pool):
        super().__init__()
        self.conv, self.lif1, self.pool, self.operation = conv(2), lif(0.2), pool, operation
        self.flatten, self.linear, self.lif2 = layer.Flatten(step_mode="m"), layer.Linear(6 * 16, 8), lif(0.2)
        self.linear.step_mode = "m"

    def forward(self, x):
        return self.lif2(self.linear(self.flatten(self.pool(self.operation(self.lif1(self.conv(x)))))))


def frames():
    torch.manual_seed(2)
    return torch.rand(7, 2, 2, 8, 8, dtype=torch.float64)


def made(kind, *args):
    torch.manual_seed(0)
    net = kind(*args).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2.2)
    return net.train()  # the older host differentiates no neuron in eval mode


def everything(net, x):
    functional.reset_net(net)
    net.zero_grad()
    out = net(x)
    (out * torch.rand(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)).sum().backward()
    found = {"output": out.detach()} | {name: p.grad for name, p in net.named_parameters()}
    return found | {
        f"v {name}": m.v.detach() for name, m in net.named_modules() if isinstance(getattr(m, "v", None), torch.Tensor)
    }


def compare(fast, slow, x):
    seen, wanted = everything(fast, x), everything(slow, x)
    assert 0.02 < wanted["output"].mean() < 0.7
    for name, value in wanted.items():
        torch.testing.assert_close(seen[name], value, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    return seen


JOINS = {
    "sum": lambda y, i: y + i,
    "turned": lambda y, i: i + y,
    "difference": lambda y, i: y - i,
    "in place": lambda y, i: y.add_(i),
    "beside": lambda y, i: torch.cat([y, i], 2)[:, :, 2:8],
}
LOOKS = {
    "nothing": lambda x: None,
    "numpy": lambda x: x.detach().numpy(),
    "as an array": lambda x: np.asarray(x.detach()),
    "data": lambda x: x.data,
    "pointer": lambda x: x.data_ptr(),
    "gradient kept": lambda x: x.retain_grad() if x.requires_grad else None,
    "hook": lambda x: x.register_hook(lambda g: None) if x.requires_grad else None,
    "sum": lambda x: x.sum(),
}


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("policy", ["collapse", "preserve"])
@pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)
def test_who_looks_changes_nothing(join, policy, k):
    net, x = made(Residual, join), frames()
    fast, slow = (sj_tac.convert(copy.deepcopy(net), policy, k, fuse=fuse, example_input=x) for fuse in (True, False))
    plain = compare(fast, slow, x)
    for look in LOOKS.values():
        for module in ("lif1", "conv2"):
            handles = [
                n.get_submodule(module).register_forward_hook(lambda m, a, out, f=look: (f(out), None)[1])
                for n in (fast, slow)
            ]
            seen = compare(fast, slow, x)
            torch.testing.assert_close(seen["output"], plain["output"], rtol=0, atol=1e-9)
            for handle in handles:
                handle.remove()


@pytest.mark.parametrize("k", [2, 3])
def test_what_is_written_beside_what_is_not(k):
    net, x = made(Written, None), frames()
    compare(*(sj_tac.convert(copy.deepcopy(net), "collapse", k, fuse=fuse, example_input=x) for fuse in (True, False)), x)


OPERATIONS = {
    "nothing": lambda x: x,
    "clone": lambda x: x.clone(),
    "scale": lambda x: x * 0.9,
    "negative": lambda x: 1 - x,
    "constant": lambda x: x + 0.1,
    "doubled": lambda x: x + x,
    "cast": lambda x: x.float().double(),
    "pad": lambda x: F.pad(x, (0, 1)),
    "relu": torch.relu,
}


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("how", ["forward", "hook"])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_in_front_of_a_pool_of_averages(operation, how, k):
    x, inside = frames(), how == "forward"
    net = made(Pooled, operation if inside else (lambda x: x), layer.AvgPool2d(2, step_mode="m"))
    fast, slow = (sj_tac.convert(copy.deepcopy(net), "collapse", k, fuse=fuse, example_input=x) for fuse in (True, False))
    if not inside:
        for n in (fast, slow):
            n.lif1.register_forward_hook(lambda m, a, out: operation(out))
    compare(fast, slow, x)
