"""Frames and labels as people have them: of any dtype; sparse, complex and text ones are named."""

import pytest
import torch
from support import csnn, frames

import sj_tac
from sj_tac.errors import BatchError
from sj_tac.tuning.batches import collect, read

X = frames(8, 6, 2, 8, 8)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("wanted", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_frames_become_what_the_net_computes_in(dtype, wanted):
    (held,) = collect(X.to(dtype), csnn().to(wanted))
    assert held.frames.dtype is wanted
    assert torch.equal(held.frames, X.to(wanted))
    assert next(read(X.to(dtype))).frames.dtype is (dtype if dtype.is_floating_point else torch.float32)


def test_numpys_dtype_is_matched_and_recalibrated_by():
    source = csnn()
    wide, narrow = (sj_tac.convert(source, "collapse", 4) for _ in range(2))
    assert sj_tac.match(wide, X.double()).method == sj_tac.match(narrow, X).method
    again = sj_tac.convert(source, "collapse", 4)
    sj_tac.recalibrate(again, X.double())
    sj_tac.recalibrate(narrow := sj_tac.convert(source, "collapse", 4), X)
    assert all(torch.equal(value, narrow.state_dict()[name]) for name, value in again.state_dict().items())


def test_what_a_smaller_dtype_cannot_hold_is_named():
    x = X.clone()
    x[0, 0, 0, 0, 0] = 1e6
    with pytest.raises(BatchError, match=r"has 1 values that are NaN or infinite as torch\.float16"):
        list(read(x, csnn().half()))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda x: x.to_sparse(), r"batch 0 is sparse \(torch.sparse_coo\); give dense frames"),
        (lambda x: x.to(torch.complex64), r"batch 0 is complex \(torch.complex64\); give real frames"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), r"is quantized \(torch.quint8\)"),
        (lambda x: x.to("meta"), "is on the meta device, without values"),
    ],
)
@pytest.mark.parametrize("net", [None, csnn()])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_hold_no_frames(made, words, net):
    with pytest.raises(BatchError, match=words):
        list(read([made(X)], net))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ("labels", r"batch 0 has labels that are no numbers \(str: 'labels'\); give class indices"),
        (["cat", "dog"] * 3, r"has labels that are no numbers \(list: \['cat'"),
        ([None] * 6, "has labels that are no numbers"),
        (torch.tensor(3), r"has labels of shape \[\]"),
        (torch.zeros(6, dtype=torch.complex64), "has labels of which the tensor is complex"),
        (torch.zeros(6, dtype=torch.int64).to_sparse(), "has labels of which the tensor is sparse"),
    ],
)
def test_labels_that_are_none(labels, words):
    with pytest.raises(BatchError, match=words):
        list(read([(X, labels)]))
