"""``sj_tac.capture`` without a GPU: all but the recording, in whose place a stand-in runs the call again."""

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import at_rest, awake, conv, node, norm
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

import sj_tac
from sj_tac import capturing
from sj_tac.errors import CaptureError, InputError


@pytest.fixture
def recorded(monkeypatch):
    """As CUDA graphs do it: outputs stay where they are, and a replay writes them anew."""

    def record(run, device):
        for _ in range(capturing.WARM_UP):
            run()
        compiled = dict(counters["frames"])
        out = run()
        assert counters["frames"] == compiled  # Dynamo has no place in a recording

        def replay():
            for held, new in zip(tree_leaves(out), tree_leaves(run()), strict=True):
                if held is not None:
                    held.copy_(new)

        return out, replay

    monkeypatch.setattr(capturing, "record", record)
    monkeypatch.setattr(capturing, "_check_device", lambda example: None)


def source():
    torch.manual_seed(0)
    modules = [m for c in (2, 6) for m in (conv(c, 6, bias=False), norm(6), node("lif"), layer.MaxPool2d(2, step_mode="m"))]
    return awake(nn.Sequential(*modules).eval(), clips(1)[0])


def made(converted=True):
    return sj_tac.convert(source(), "preserve", 2) if converted else source()


def clips(count=3):
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(4, 2, 2, 8, 8, generator=generator) < 0.4).float() for _ in range(count)]


@pytest.mark.parametrize("converted", [True, False])
@pytest.mark.parametrize("state", ["reset", "carried"])
def test_calls_begin_at_rest_or_go_on_from_the_one_before(recorded, converted, state):
    net, xs = made(converted), clips()
    call = sj_tac.capture(net, xs[1], state=state)
    for _ in range(2):
        found = [call(x) for x in xs]
        functional.reset_net(net)
        for x, out in zip(xs, found, strict=True):
            with torch.no_grad():
                assert torch.equal(out, net(x))
            assert 0.02 < out.mean() < 0.9
            if state == "reset":
                functional.reset_net(net)
        functional.reset_net(net)
        if state == "carried":
            call.reset()
    assert torch.equal(found[1], at_rest(net, xs[1])) is (state == "reset")


def test_the_net_is_left_at_rest_and_goes_on_by_itself(recorded):
    net = made()
    x = clips(1)[0]
    expected = at_rest(net, x)
    call = sj_tac.capture(net, x, state="carried")
    assert all(isinstance(m.v, float) for m in net.modules() if isinstance(m, neuron.BaseNode))
    with torch.no_grad():
        assert torch.equal(net(x), expected)
    assert torch.equal(call(x), expected)


CHANGES = {
    "a weight": lambda net: net[0].weight.data_ptr() and nn.init.ones_(net[0].weight),
    "another parameter": lambda net: setattr(net[0], "weight", nn.Parameter(net[0].weight.detach() * 2)),
    "a statistic": lambda net: net[1].running_mean.add_(0.1),
    "v_threshold": lambda net: setattr(net[2], "v_threshold", 0.5),
    "k": lambda net: sj_tac.set_k(net, 1),
    "training": lambda net: net.train(),
    "a number that is a tensor": lambda net: setattr(net[2], "v_threshold", torch.tensor(0.5)),
    "a conv's stride": lambda net: setattr(net[0], "stride", (2, 2)),
    "a surrogate": lambda net: setattr(net[2], "surrogate_function", surrogate.Sigmoid(spiking=False)),
    "a hook": lambda net: net[1].register_forward_hook(lambda m, a, out: out * 2),
    "a module": lambda net: net.__setitem__(3, nn.Identity()),
    "restored": lambda net: sj_tac.restore(net, inplace=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_net_that_was_changed_is_not_replayed(recorded, change):
    net = made()
    x = clips(1)[0]
    call = sj_tac.capture(net, x)
    call(x)
    with torch.no_grad():
        CHANGES[change](net)
    with pytest.raises(CaptureError, match="capture it again"):
        call(x)


@pytest.mark.parametrize("wrong", [torch.zeros(4, 1, 2, 8, 8), torch.zeros(4, 2, 2, 8, 8).double(), None])
def test_another_input_is_refused(recorded, wrong):
    call = sj_tac.capture(made(), clips(1)[0])
    with pytest.raises(InputError, match=r"captured for \[4, 2, 2, 8, 8\]"):
        call(wrong)


def test_outputs_of_any_structure_are_tensors_of_their_own(recorded):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = made()

        def forward(self, x):
            y = self.net(x)
            return {"rate": y.mean(0), "all": [y, None]}

    net, xs = Two().eval(), clips(2)
    call = sj_tac.capture(net, xs[0])
    first = call(xs[0])
    kept = first["rate"].clone()
    second = call(xs[1])
    assert torch.equal(first["rate"], kept)
    assert not torch.equal(second["rate"], kept)
    assert second["all"][1] is None


def test_a_forward_that_waits_for_the_gpu_is_named(monkeypatch, recorded):
    def record(run, device):
        run()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(capturing, "record", record)
    net = made()
    with pytest.raises(CaptureError, match=r"stream is capturing.*call the net itself"):
        sj_tac.capture(net, clips(1)[0])
    assert all(isinstance(m.v, float) for m in net.modules() if isinstance(m, neuron.BaseNode))


def test_what_cannot_be_captured():
    net, x = made(), clips(1)[0]
    with pytest.raises(CaptureError, match="the example is on cpu"):
        sj_tac.capture(net, x)
    with pytest.raises(CaptureError, match="training mode"):
        sj_tac.capture(made().train(), x)
    with pytest.raises(CaptureError, match="state='kept'"):
        sj_tac.capture(net, x, state="kept")
    with pytest.raises(InputError, match="one tensor"):
        sj_tac.capture(net, [x])
