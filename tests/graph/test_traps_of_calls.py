"""Captured nets that are copied, called by others, with other sizes and numbers: traps 9 to 14."""

import contextlib
import copy
import gc
import io
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from captured import X, agree, blocks, captures, fused, graphs, pair, pair_of, quickly, seen, source
from spikingjelly.activation_based import functional
from support import frames, only_v2

import sj_tac
from sj_tac.definition.convs import SharedConv
from sj_tac.errors import CaptureWarning, ConversionError
from sj_tac.rewrites.gate import gate_of

pytestmark = [only_v2, pytest.mark.captured, pytest.mark.usefixtures("strict")]
every_net = quickly("sew")


@every_net
def test_9_a_part_of_a_net_runs_as_it_is_defined_and_says_so(name):
    net, x = source(name)
    fast, slow = pair(net, x)
    said = pytest.warns(CaptureWarning, match=f"a part of this converted {type(net).__name__} was called")
    with torch.no_grad():
        with said:
            assert torch.equal(fast.forward(x), slow(x))
        part, same = (next(m for m in each.modules() if isinstance(m, SharedConv)) for each in (fast, slow))
        given = torch.rand(4, *part.weight.shape[1:2], 8, 8, dtype=x.dtype)
        given = given.unsqueeze(1) if getattr(part, "step_mode", "s") == "m" else given
        with pytest.warns(CaptureWarning, match=r"a part of this converted|cannot tell T of its rows"):
            assert torch.equal(part(given), same(given))
    assert captures(fast) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(fast, slow, x, rest=True)
        sj_tac.restore(fast, inplace=True).forward(x)


@every_net
def test_10_copies_and_pickles_are_captured_by_their_second_call(name):
    fast, slow, x = pair_of(name)
    agree(fast, slow, x)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    for made in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), torch.load(file, weights_only=False)):
        agree(made, slow, x, calls=2, rest=True)
        assert captures(made) == 1
        assert gate_of(made).net is made


def test_10_nets_that_are_gone_leave_nothing():
    gone = []
    for _ in range(3):
        fast, _ = pair(blocks(checkpointed=()), X)
        fast(X)
        gone.append(weakref.ref(fast))
        del fast
    torch._dynamo.reset()
    for _ in range(3):  # a tensor that C++ held is found by the next round
        gc.collect()
    assert [ref() for ref in gone] == [None] * 3


@every_net
def test_11_other_steps_and_samples_share_two_graphs(name):
    fast, slow, x = pair_of(name)
    steps = [6, 5, 7, 8] if name == "dvs" else [4, 4, 4, 4]
    for T, N in zip(steps, [2, 3, 4, 5], strict=True):
        given = frames(T, N, *x.shape[2:], dtype=x.dtype)
        agree(fast, slow, given, rest=True)
    assert captures(fast) <= 2 + (name == "dvs")
    assert fused(fast)[1] == 0


@every_net
@pytest.mark.parametrize("dtype", [torch.bfloat16, "autocast"])
def test_12_half_numbers(name, dtype):
    net, x = source(name, torch.float32)
    if dtype != "autocast":
        net, x = net.to(dtype), x.to(dtype)
    fast, slow = pair(net, x)
    exact = seen(copy.deepcopy(slow).double(), x.double(), training=True)
    with torch.autocast("cpu", torch.bfloat16) if dtype == "autocast" else contextlib.nullcontext():
        a, b = (seen(each, x, training=True) for each in (fast, slow))
    for name in ("output 0", "gradient of input"):
        assert a[name].dtype is b[name].dtype
        errors = [(found[name].double() - exact[name]).norm() / exact[name].norm() for found in (a, b)]
        assert errors[0] < 1.5 * errors[1] + 0.01, (name, errors)  # rounding flips spikes, in the definition as well
    assert all(v.dtype is torch.float32 for n, v in a.items() if n.startswith("voltage"))


@every_net
def test_12_inference_mode_and_then_training_carries_voltages(name):
    fast, slow, x = pair_of(name)
    for each in (fast, slow):
        with torch.inference_mode():
            each(x)
    agree(fast, slow, x, training=True)


def test_7_replicas_of_a_net_are_refused():
    fast, slow = pair(blocks(checkpointed=()), X)
    with pytest.raises(ConversionError, match=r"cannot be replicated by nn.DataParallel.*DistributedDataParallel"):
        copy.deepcopy(fast)._replicate_for_data_parallel()
    agree(fast, slow, X)
    slow._replicate_for_data_parallel()


def test_11_two_threads_call_a_net_with_other_steps_at_once():
    """SpikingJelly stores one set of voltages a net: only shapes are compared."""
    fast, _ = pair(blocks(checkpointed=()), X)
    found = {}

    def work(steps):
        for _ in range(5):
            try:
                with torch.no_grad():
                    found.setdefault(steps, set()).add(len(fast(frames(steps, 2, 2, 8, 8, dtype=X.dtype))))
            except Exception as error:
                found.setdefault(steps, set()).add(repr(error))

    threads = [threading.Thread(target=work, args=(steps,)) for steps in (4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {4: {4}, 8: {8}}, str(found)


def test_12_an_error_is_the_users_own(monkeypatch):
    monkeypatch.setenv("SJ_TAC_STRICT", "0")
    fast, slow = pair(blocks(checkpointed=()), X)
    for each in (slow, fast):
        with pytest.raises(RuntimeError, match="to have 2 channels, but got 1 channels instead") as raised:
            each(X[:, :, :1])
        assert type(raised.value) is RuntimeError
        functional.reset_net(each)
    agree(fast, slow, X)
    assert captures(fast) >= 1


def test_14_a_graph_shows_its_code_and_names_layers():
    fast, _ = pair(blocks(checkpointed=()), X)
    fast(X)
    text = graphs(fast)[0].code
    assert "conv2d" in text
    assert "blocks_modules_0_modules_0_parameters_weight" in text
