"""Forwards and tools that compute a converted layer's convolution without calling the layer: one warning, and the report."""

import warnings

import pytest
import torch
from spikingjelly.activation_based import layer
from support import node, only_v2
from test_other_tools import X, output, packed, source
from torch import nn

import sj_tac
from sj_tac.errors import CaptureWarning, ConversionError


def rows(layer, x):
    """The layer in step mode "s", on folded frames."""
    layer.step_mode = "s"
    return layer(x)


AROUND = {
    "step mode s": rows,
    "_conv_forward": lambda layer, x: layer._conv_forward(x, layer.weight, layer.bias),
    "torch's own forward": nn.Conv2d.forward,
    "its weight": lambda layer, x: nn.functional.conv2d(x, layer.weight, layer.bias, padding=1),
}


@pytest.mark.captured
@pytest.mark.parametrize(("how", "fuse"), [*((how, True) for how in AROUND), *((how, False) for how in [*AROUND][:3])])
def test_a_forward_that_goes_around_a_converted_layer_is_said_to_share_nothing_there(how, fuse):
    """A forward that was replaced after convert. Of a weight that is taken, only a captured call can know."""
    fast = sj_tac.convert(source(), "preserve", 2, example_input=X, fuse=fuse)
    around = AROUND[how]
    fast.forward = lambda x: fast[1:](around(fast[0], x.flatten(0, 1)).unflatten(0, x.shape[:2]))
    with pytest.warns(CaptureWarning, match="convolution '0' .*each frame|convolution '0' computed every frame"):
        output(fast)
    assert [note for note in sj_tac.report(fast).notes if "convolution '0'" in note]
    del fast.forward
    fast[0].step_mode = "m"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = output(fast)
    torch.testing.assert_close(found, output(sj_tac.convert(source(), "preserve", 2, example_input=X)), rtol=0, atol=0)


@pytest.mark.captured
def test_a_layer_that_is_gone_around_is_said_to_share_nothing_at_the_next_k_too():
    fast = sj_tac.convert(source(), "preserve", 1, example_input=X)
    fast.forward = lambda x: fast[1:](AROUND["_conv_forward"](fast[0], x.flatten(0, 1)).unflatten(0, x.shape[:2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output(fast)
    sj_tac.set_k(fast, 2)
    with pytest.warns(CaptureWarning, match="convolution '0' computed every frame of a call, whatever its k"):
        output(fast)


@only_v2
def test_a_net_that_a_tool_rebuilt_is_not_reported_on_and_the_error_says_which_net_is():
    changed = packed(sj_tac.convert(source(), "preserve", 2, example_input=X))
    with pytest.raises(
        ConversionError, match=r"holds layers of one \('0.conv'\): call report on the net that sj_tac.convert"
    ):
        sj_tac.report(changed)


@only_v2
@pytest.mark.parametrize(("fuse", "k"), [(True, 2), (False, 2), (False, 1)])
def test_spikingjellys_counters_are_said_to_count_sums_of_frames_for_spikes(fuse, k):
    """SynOpCounter finds no spikes in front of an aggregating layer, and counts nothing there."""
    op_counter = pytest.importorskip("spikingjelly.activation_based.op_counter")

    def counted(net):
        counter = op_counter.SynOpCounter()
        with op_counter.DispatchCounterMode([counter]):
            output(net)
        return counter.get_total()

    fast = sj_tac.convert(source(), "preserve", k, example_input=X, fuse=fuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = counted(fast)
    told = [w for w in caught if "operation counter watches convolution '0' at k = 2" in str(w.message)]
    assert bool(told) is (k == 2)
    expected = counted(source())
    assert expected > 0
    assert found == (0 if k == 2 else expected)
    assert counted(sj_tac.restore(fast)) == expected


@pytest.mark.parametrize(("dims", "kind"), [(1, layer.Conv1d), (2, layer.Conv2d), (3, layer.Conv3d)])
def test_macs_of_a_refused_layer_are_those_of_one_sample(dims, kind):
    """T is 6 and N is 4: dividing by T would show 2 / 3 of them."""
    of = {"kernel_size": 3, "padding": 1, "bias": False, "step_mode": "m"}
    net = nn.Sequential(kind(2, 4, **of), node("lif", v_threshold=0.1), kind(4, 5, **of)).eval()
    found = sj_tac.plan(net, "preserve", 2, example_input=torch.rand(6, 4, 2, *[8] * dims)).verdicts
    each = 6 * 8**dims * 3**dims
    assert [(v.status, v.macs_before) for v in found] == [("converted", each * 2 * 4), ("refused", each * 4 * 5)]
