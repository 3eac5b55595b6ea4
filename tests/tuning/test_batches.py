"""Frames and labels as people have them: of any dtype, [T, N, ...] or [N, T, ...]; what holds none is named."""

import contextlib
import math

import numpy as np
import pytest
import torch
from support import csnn, frames
from torch import nn

import sj_tac
from sj_tac.cli import load
from sj_tac.errors import BatchError, SearchError
from sj_tac.tuning.batches import collect, read

X = frames(8, 6, 2, 8, 8)
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def test_frames_become_what_the_net_computes_in():
    for wanted in (torch.float32, torch.float64):
        net = csnn().to(wanted)
        for dtype in DTYPES:
            (held,) = collect(X.to(dtype), net)
            assert held.frames.dtype is wanted
            assert torch.equal(held.frames, X.to(wanted))
            assert next(read(X.to(dtype))).frames.dtype is (dtype if dtype.is_floating_point else torch.float32)
    x = X.clone()
    x[0, 0, 0, 0, 0] = 1e6
    with pytest.raises(BatchError, match=r"has 1 values that are NaN or infinite as torch\.float16"):
        list(read(x, csnn().half()))


def test_a_single_tensor_a_pair_and_lists_are_batches():
    x, labels = X.to(torch.uint8), torch.zeros(6, dtype=torch.int64)

    def shapes(batches):
        return [(tuple(b.frames.shape[:2]), b.labels is not None) for b in read(batches)]

    assert shapes(x) == [((8, 6), False)]
    assert shapes((x, labels)) == shapes([[x, labels.byte()]]) == [((8, 6), True)]
    assert shapes((x, x)) == shapes(iter([x, x])) == [((8, 6), False)] * 2
    with pytest.raises(BatchError, match="batch 1 has no labels, others have"):
        collect([(x, labels), x], csnn())


WHOLE = torch.rand(4, 3, 1, 2, 2)
BAD = [
    ([], r"there are no batches"),
    (7, r"batches are an iterable .* got int"),
    ({"a": 1}, r"got dict"),
    ([3.5], r"batch 0 is a float"),
    ([torch.rand(4, 4)], r"batch 0 has shape \[4, 4\]; frames are \[T, N, C, H, W\]"),
    ([torch.rand(4, 0, 1, 2, 2)], r"batch 0 is empty: its shape is \[4, 0, 1, 2, 2\]"),
    ([torch.rand(1, 3, 1, 2, 2)], r"batch 0 has one frame a sample \(shape \[1, 3, 1, 2, 2\]\)"),
    ([WHOLE, torch.full((4, 3, 1, 2, 2), math.nan)], r"batch 1 .* 48 values that are NaN"),
    ([WHOLE, torch.rand(5, 3, 1, 2, 2)], r"batch 1 has T = 5 .* before it T = 4"),
    ([WHOLE.to_sparse()], r"batch 0 is sparse \(torch.sparse_coo\); give dense frames"),
    ([WHOLE.to(torch.complex64)], r"batch 0 is complex \(torch.complex64\); give real frames"),
    ([WHOLE.to("meta")], "is on the meta device, without values"),
    ([(WHOLE, torch.zeros(4).long())], r"labels of shape \[4\] .* transpose\(0, 1\)"),
    ([(WHOLE, torch.rand(3))], r"expected 3 class indices"),
    ([(WHOLE, torch.tensor(3))], r"has labels of shape \[\]"),
    ((WHOLE, torch.eye(3)), r"batch 0 has labels of shape \[3, 3\]"),
    ([(WHOLE, "labels")], r"batch 0 has labels that are no numbers \(str: 'labels'\); give class indices"),
    ([(WHOLE, ["cat", "dog", "cat"])], r"has labels that are no numbers \(list: \['cat'"),
    ([(WHOLE, torch.zeros(3, dtype=torch.complex64))], "has labels of which the tensor is complex"),
]


@pytest.mark.parametrize(("batches", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_holds_no_frames_or_labels_is_named(batches, message):
    for model in (None, csnn()):
        with pytest.raises(BatchError, match=message):
            list(read(batches, model))


N, T = 6, 7


class Turned(nn.Module):
    """Takes [N, T, ...]."""

    def __init__(self):
        super().__init__()
        self.net = csnn()

    def forward(self, x):
        return self.net(x.transpose(0, 1)).mean(0)


@pytest.fixture(scope="module")
def turned():
    return Turned().eval()


@pytest.mark.parametrize("samples", [N, T], ids=["N is not T", "N is T"])
def test_batches_are_read_as_the_net_takes_them(turned, samples):
    x = frames(samples, T, 2, 8, 8, rate=0.5)
    (batch,) = read([(x, torch.arange(samples) % 3)], turned)
    assert batch.frames.shape[:2] == (T, samples)
    assert torch.equal(batch.given, x)
    assert batch.example().shape[:2] == (2, T)
    (other,) = read([x.transpose(0, 1)], csnn())
    assert other.frames.shape[:2] == (T, samples)
    assert torch.equal(other.given, x.transpose(0, 1))
    with pytest.raises(BatchError, match=r"labels of shape \[2\].*expected \d class indices"):
        list(read([(x, torch.zeros(2, dtype=torch.int64))], turned))


def test_everything_that_measures_takes_them(turned):
    x, labels = frames(N, T, 2, 8, 8, rate=0.5), torch.arange(N) % 3
    assert sj_tac.diagnose([(x, labels)], turned, permutations=19).verdict
    found = sj_tac.sensitivity(turned, [(x, labels)], [2], ["preserve"], rounds=1, progress=False)
    assert {row.layer for row in found.effects} >= {"net.0", "net.4"}
    fast = sj_tac.convert(turned, example_input=x[:2])
    assert sj_tac.recalibrate(fast, [(x, labels)])


def test_macs_are_those_of_one_sample(turned):
    macs = [
        [v.macs_before for v in sj_tac.plan(net, example_input=x).verdicts]
        for net, x in ((csnn(), frames(T, N, 2, 8, 8)), (turned, frames(N, T, 2, 8, 8)))
    ]
    assert macs[0] == macs[1]
    assert all(macs[0])


def test_the_command_line_says_which_way_round_a_net_takes_them(turned, tmp_path):
    x = frames(N, T, 2, 8, 8, rate=0.5)
    path = str(tmp_path / "data.npz")
    np.savez(path, frames=x.numpy(), labels=(torch.arange(N) % 3).numpy())
    assert [len(part) for part, _ in load.batches(path, 4, True, turned)] == [4, 2]
    with pytest.raises(load.UsageError, match=r"6 labels for frames \[6, 7, 2, 8, 8\], \[T, N, ...\]; --batch-first is for"):
        load.batches(path, 4, False, turned)
    np.savez(path, frames=x.numpy())
    with pytest.raises(load.UsageError, match=r"this net takes frames \[N, T, ...\]: give them in that order, with --batch"):
        load.batches(path, 4, False, turned)
    with pytest.raises(load.UsageError, match=r"--batch-first: this net takes frames \[T, N, ...\]"):
        load.batches(path, 4, True, csnn())


class Writes(nn.Module):
    """A net that scales its input in place."""

    def __init__(self):
        super().__init__()
        self.body = csnn()

    def forward(self, x):
        x.mul_(0.9)
        return self.body(x)


CALLERS = {
    "diagnose": lambda net, fast, batches: sj_tac.diagnose(batches, net, permutations=20),
    "bench": lambda net, fast, batches: sj_tac.bench(net, batches, ["preserve:2"], rounds=1, progress=False),
    "sensitivity": lambda net, fast, batches: sj_tac.sensitivity(net, batches, ks=(2,), rounds=1, progress=False),
    "search": lambda net, fast, batches: sj_tac.search(net, batches, ks=(2,), rounds=1, max_drop=1.0, progress=False),
    "match": lambda net, fast, batches: sj_tac.match(fast, batches, progress=False),
    "recalibrate": lambda net, fast, batches: sj_tac.recalibrate(fast, batches),
    "report": lambda net, fast, batches: sj_tac.report(fast, batches),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_a_net_that_writes_into_its_input_leaves_the_callers_batches_as_they_are(caller):
    x = frames(6, 12, 2, 8, 8)
    batches, net = [(x.clone(), torch.arange(12) % 3)], Writes().eval()
    fast = sj_tac.convert(net, "preserve", 2, example_input=x[:, :2])
    with contextlib.suppress(SearchError):  # on a busy machine no policy is faster
        CALLERS[caller](net, fast, batches)
    assert torch.equal(batches[0][0], x)
