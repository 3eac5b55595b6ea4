"""Objects that hold tensors, dataclasses and namespaces, as arguments and outputs: what they hold is followed."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import functional
from support import awake, conv, frames, node, norm
from torch import nn

import sj_tac
from rewrites import verify
from sj_tac import host
from sj_tac.errors import TraceError

X = frames(4, 2, 2, 6, 6)


@dataclasses.dataclass(frozen=True)
class Batch:
    frames: torch.Tensor
    labels: Any = None


@dataclasses.dataclass
class Out:
    last: torch.Tensor
    features: Any


@dataclasses.dataclass
class MoreOut(Out):
    more: int = 0


class Net(nn.Module):
    def __init__(self, gives):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(conv(2, 4), norm(4), node("lif"))
        self.b = nn.Sequential(conv(4, 4), norm(4), node("lif"))
        self.gives = gives

    def forward(self, batch):
        y = self.a(batch if isinstance(batch, torch.Tensor) else batch.frames)
        return self.gives(last=self.b(y), features=[y])


@pytest.mark.parametrize("gives", [Out, MoreOut, SimpleNamespace])
@pytest.mark.parametrize("make", [Batch, lambda x: SimpleNamespace(frames=x)])
@pytest.mark.parametrize("k", [1, 2])
def test_a_net_of_records_converts_and_gives_ordinary_frames(k, make, gives):
    source = Net(lambda last, features: last).eval()
    awake(source, X)
    source.gives, batch = gives, make(X)
    fast = sj_tac.convert(source, k=k, example_input=(batch,))
    slow = sj_tac.convert(source, k=k, fuse=False, example_input=(batch,))
    assert [v.layer for v in sj_tac.report(fast).converted] == ["a.0", "b.0"]
    out, expected = fast(batch), slow(batch)
    assert type(out) is gives
    for a, b in ((out.last, expected.last), (out.features[0], expected.features[0])):
        assert type(a) is type(b) is torch.Tensor
        assert torch.equal(a, b)
    assert batch.frames is X
    if k == 1:
        functional.reset_net(source)
        assert torch.equal(out.last, source(batch).last)


def test_outputs_and_samples_of_records_are_looked_into():
    """What a verification compares, and by what it counts the operations of a sample."""
    held = Out(X, [SimpleNamespace(inner=(X + 1,))])
    assert [t.max().item() for t in verify.tensors(held)] == [X.max().item(), X.max().item() + 1]
    source = Net(lambda last, features: last).eval()
    macs = [[v.macs_before for v in sj_tac.plan(source, k=2, example_input=(x,))] for x in (X, Batch(X))]
    assert macs[0] == macs[1] != [None, None]


def test_what_is_more_than_its_names_is_no_record():
    @dataclasses.dataclass(eq=False)
    class Layer(nn.Module):
        width: int = 1

        def __post_init__(self):
            super().__init__()

    assert host.is_record(Batch(X))
    assert host.is_record(MoreOut(X, []))
    for other in (X, {}, (X,), Layer, Batch, object(), 1):
        assert not host.is_record(other)


def test_an_array_is_told_to_become_a_tensor():
    with pytest.raises(TraceError, match=r"NumPy array for 'batch', which no trace can follow: give torch.from_numpy of it"):
        sj_tac.plan(Net(lambda last, features: last).eval(), k=2, example_input=(X.numpy(),))
