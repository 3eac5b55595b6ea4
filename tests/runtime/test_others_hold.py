"""Frames that somebody else holds: a write past version counters is seen, and a gradient that is not to be had is told."""

import copy
import warnings

import pairs
import pytest
import torch
from spikingjelly.activation_based import functional
from support import awake, conv, frames, node, norm
from torch import nn
from torch.utils.checkpoint import checkpoint

import sj_tac
from sj_tac.errors import InputError, PlanNotKeptWarning

X = frames(4, 2, 2, 6, 6).double()


def block(inputs):
    return nn.Sequential(conv(inputs, 4), norm(4), node("lif"))


class Net(nn.Module):
    """What it does to its first feature, ``write``, and whether it returns both, nobody sees in a trace."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.write, self.returns = block(2), block(4), None, False

    def forward(self, x):
        y = self.a(x)
        if self.write is not None:
            self.write(y)
        z = self.b(y)
        return (z, y) if self.returns else z


@pytest.fixture(scope="module")
def source():
    torch.manual_seed(0)
    net = Net().double()
    awake(net, X)
    return net.train()


def converted(source, **options):
    return sj_tac.convert(copy.deepcopy(source), k=2, **options)


WRITES = {
    "a view's data": lambda y: y.reshape(-1).data[::2].fill_(1.0),
    "a detached array": lambda y: y.detach().numpy()[0].fill(1.0),
    "a row of a detached array": lambda y: y.detach()[0].numpy().fill(1.0),
    "data of what was unbound": lambda y: y.unbind(0)[0].data.fill_(1.0),
}


@pytest.mark.filterwarnings("ignore::sj_tac.errors.PlanNotKeptWarning")
@pairs.parametrize(write=WRITES, policy=["preserve", "collapse"], recorded=[True, False])
def test_a_write_past_the_version_counter_through_a_view_is_seen(source, write, policy, recorded):
    outs = []
    for fuse, writes in ((True, WRITES[write]), (False, WRITES[write]), (True, None)):
        net = converted(source, policy=policy, fuse=fuse)
        net.write = writes
        with torch.set_grad_enabled(recorded):
            outs.append(net(X).detach())
    torch.testing.assert_close(outs[0], outs[1])
    assert (outs[0] - outs[2]).abs().max() > 0.1


@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_of_a_returned_feature_whose_sums_were_read_it_is_said_once_that_its_gradient_is_not_to_be_had(source, policy):
    fast = converted(source, policy=policy)
    fast.returns = True
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(X)
    with pytest.warns(
        PlanNotKeptWarning, match=r"returns frames \[4, 2, 4, 6, 6\] whose sums .* convert with the arguments"
    ):
        z, y = fast(X)
    assert type(y) is torch.Tensor
    (z.square().sum() + y.square().sum()).backward()
    assert fast.a[0].weight.grad.abs().max() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(X)


class Folded(nn.Module):
    """Time is folded into the batch; ``kept``: how a part is checkpointed."""

    def __init__(self):
        super().__init__()
        self.c, self.n, self.l = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), node("lif")
        self.kept = None

    def forward(self, x):
        steps, batch = x.shape[:2]
        part = lambda y: self.n(self.c(y))  # noqa: E731
        y = x.flatten(0, 1)
        y = part(y) if self.kept is None else checkpoint(part, y, use_reentrant=self.kept)
        return self.l(y.unflatten(0, (steps, batch)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_several_calls_could_have_made_is_refused(reentrant):
    torch.manual_seed(0)
    fast = sj_tac.convert(awake(Folded().double().eval(), X), k=2, example_input=X)

    def gradients(shapes, kept):
        fast.kept, loss = kept, 0.0
        fast.zero_grad()
        for steps, batch in shapes:
            functional.reset_net(fast)
            x = frames(steps, batch, 2, 6, 6, seed=steps).double().requires_grad_()
            loss = loss + (fast(x) * torch.linspace(0, 1, 6, dtype=torch.float64)).sum()
        loss.backward()
        return [p.grad.clone() for p in fast.parameters()]

    for shapes in ([(4, 2), (5, 2)], [(4, 2), (4, 2)]):
        for a, b in zip(gradients(shapes, reentrant), gradients(shapes, None), strict=True):
            torch.testing.assert_close(a, b)
    with pytest.raises(InputError, match=r"again on 8 frames, and the net was called with T=2, N=4 and T=4, N=2"):
        gradients([(4, 2), (2, 4)], reentrant)
