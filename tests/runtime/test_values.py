"""What a value is besides its operations: a tensor that can be written, kept, copied and differentiated."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from support import conv, csnn, frames, node, norm
from test_table import KINDS, plain_of
from torch import Tensor, nn

import sj_tac
from sj_tac.errors import PlanNotKeptWarning, StaleValueError
from sj_tac.runtime.values import Frames, Shared, Spikes

KIND = pytest.mark.parametrize("kind", list(KINDS))


@KIND
def test_questions_make_no_frames(kind):
    x, _ = KINDS[kind]()
    plain = plain_of(x)
    assert (x.shape, x.dtype, x.device, x.dim(), len(x), x.numel(), x.ndim, x.size(1)) == (
        plain.shape, plain.dtype, plain.device, plain.dim(), len(plain), plain.numel(), plain.ndim, plain.size(1),
    )  # fmt: skip
    assert x.is_floating_point()
    assert x.requires_grad
    assert x._made is None


def test_no_name_of_ours_is_one_of_torchs():
    names = {n for kind in (Frames, Shared, Spikes) for n in (*vars(kind), *kind.__annotations__)}
    assert {n for n in names if hasattr(Tensor, n) and not n.startswith("__")} == set()


@KIND
def test_frames_are_made_once_and_do_not_alias_what_they_are_made_of(kind):
    x, leaf = KINDS[kind]()
    before = leaf.detach().clone()
    assert x.frames() is x.frames()
    with torch.no_grad():
        x.mul_(0)
    assert torch.equal(leaf, before)


@KIND
def test_copies_and_pickles_are_ordinary_tensors(kind):
    with torch.no_grad():
        x, _ = KINDS[kind]()
    for twin in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert type(twin) is Tensor
        assert torch.equal(twin, x.frames())


@KIND
def test_whatever_reaches_it_below_python_gets_frames_and_gives_gradients(kind):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    x, leaf = KINDS[kind]()
    expected = plain_of(x) * 2
    got = Double.apply(x)
    torch.testing.assert_close(got, expected)
    weight = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), leaf, retain_graph=True)
    (found,) = torch.autograd.grad((got * weight).sum(), leaf)
    torch.testing.assert_close(found, wanted)


@KIND
def test_writing_below_python_raises(kind):
    x, _ = KINDS[kind]()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), pytest.raises(StaleValueError, match=r"x = x\[:\]"):
        x.mul_(2)


def test_a_view_that_is_written_is_seen_by_the_value_and_raises_below_python():
    x, _ = KINDS["shared"]()
    x[0].mul_(0)
    assert x[0].abs().sum().item() == 0

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    with pytest.raises(StaleValueError, match="written through a view"):
        Same.apply(x).sum().backward()


def test_it_prints_and_turns_into_numbers():
    with torch.no_grad():
        x, _ = KINDS["means"]()
    assert repr(x).startswith("tensor(")
    assert x.numpy().shape == (5, 2, 4, 6, 6)
    assert x.sum().item() == pytest.approx(float(plain_of(x).sum()))
    assert len(x.tolist()) == 5


# ---- in a net ------------------------------------------------------------------------------------------------------------


class Uses(nn.Module):
    """Two blocks; what happens between them is given."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(conv(2, 4), norm(4), node("lif", v_threshold=0.3))
        self.b = nn.Sequential(conv(4, 4), norm(4), node("lif", v_threshold=0.3))
        self.between, self.when = between, False

    def forward(self, x):
        x = self.a(x)
        if self.when:
            x = self.between(x)
        return self.b(x)


def test_a_plan_that_is_not_kept_is_told_once_and_reported():
    def writes(x):
        x.add_(0.25)
        return x

    net = sj_tac.convert(Uses(writes).eval(), "preserve", 2)
    x = frames(6, 2, 2, 6, 6)
    with torch.no_grad():
        net(x)
        assert [(v.reads, v.last_read, v.last_gave) for v in sj_tac.report(net).converted] == [
            ("frames", "frames", "sums"), ("sums", "sums", "frames"),
        ]  # fmt: skip
        net.when = True
        with pytest.warns(PlanNotKeptWarning, match=r"layer 'b.0': sums .*was planned.*it was written.*made for add_"):
            net(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(x)
    verdict = sj_tac.report(net)["b.0"]
    assert verdict.last_read == "frames of a value"
    assert verdict.unplanned.startswith("slower than planned: the last call gave it frames of a value")
    assert sj_tac.report(net)["a.0"].frames_made == {"add_": 2}
    assert "slower than planned" in str(sj_tac.report(net))


def test_reading_is_counted_and_changes_nothing():
    seen = []
    net = sj_tac.convert(Uses(lambda x: (seen.append(float(x.mean())), x)[1]).eval(), "preserve", 2)
    x = frames(6, 2, 2, 6, 6)
    with torch.no_grad():
        expected = net(x)
        net.when = True
        sj_tac.host.reset(net)
        assert torch.equal(net(x), expected)
    assert seen
    assert sj_tac.report(net)["a.0"].frames_made == {"mean": 1}
    assert sj_tac.report(net)["b.0"].last_read == "sums"


@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_nothing_of_a_call_outlives_it(policy):
    """No value of the call is alive afterwards."""
    net, x = sj_tac.convert(csnn(), policy, 2), frames(6, 2, 2, 8, 8)
    before = {id(o) for o in gc.get_objects()}
    with torch.no_grad():
        net(x)
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) in (Shared, Spikes) and id(o) not in before]


def test_a_deep_copy_is_linked_again_by_its_first_call():
    fast = copy.deepcopy(sj_tac.convert(csnn(), "preserve", 2))
    with torch.no_grad():
        fast(frames(6, 2, 2, 8, 8))
    assert [v.last_read for v in sj_tac.report(fast).converted] == ["frames", "sums", "sums"]
