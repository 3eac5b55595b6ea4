"""A process whose default device is not where the net is: torch.set_default_device, or a net on the CPU beside a GPU's."""

import contextlib

import pytest
import torch
from spikingjelly.activation_based import functional
from support import csnn, frames

import sj_tac
from sj_tac.errors import SearchError


# Whatever we made on the default device would be on "meta", where there are no numbers.
@pytest.mark.parametrize("mode", ["preserve", "collapse"])
def test_a_net_is_converted_and_runs_where_it_is(mode):
    net, x = csnn(8, size=16), frames(6, 4, 2, 16, 16)
    with torch.no_grad():
        expected = sj_tac.convert(net, mode, 2, example_input=x)(x)
    with torch.device("meta"):
        fast = sj_tac.convert(net, mode, 2, example_input=x)
        with torch.no_grad():
            assert torch.equal(fast(x), expected)
        functional.reset_net(fast)
        fast(x).sum().backward()
    assert expected.std() > 0
    assert all(p.grad.device.type == "cpu" for p in fast.parameters())


def test_a_net_is_matched_searched_and_given_learned_weights_where_it_is():
    net, x = csnn(), frames(6, 32, 2, 8, 8)
    with torch.device("meta"):
        fast = sj_tac.convert(net, "preserve", 2, match=[x])
        sj_tac.match(fast, undo=True)
        sj_tac.recalibrate(fast, [x])
        with contextlib.suppress(SearchError):  # nothing is faster, which is not the question
            sj_tac.search(net, [x], max_drop=0.5, ks=(1, 2), progress=False)
        learned = sj_tac.convert(net, {"default": {"mode": "preserve", "k": 2, "weights": "learned"}}, example_input=x)
    assert {tensor.device.type for tensor in [*fast.state_dict().values(), *learned.state_dict().values()]} == {"cpu"}
