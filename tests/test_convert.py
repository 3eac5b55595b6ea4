"""What convert promises about copies, hooks and state, and what set_k, restore and freeze_bn do to a converted net."""

import copy
import functools
import warnings

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import at_rest, conv, csnn, frames, node, norm, same_state
from torch import nn

import sj_tac
from sj_tac.errors import BatchNormMovedWarning, ConversionError, NewParametersWarning


@pytest.fixture
def x():
    return frames(6, 2, 2, 8, 8)


def test_the_users_hooks_see_nothing_of_converting(x):
    net = csnn()
    calls = []
    for module in net.modules():
        module.register_forward_hook(lambda m, a, out: calls.append(type(m)))
        module.register_forward_pre_hook(lambda m, a: calls.append(type(m)))
    fast = sj_tac.convert(net, example_input=x)
    sj_tac.plan(net, example_input=x)
    assert calls == []
    with torch.no_grad():
        fast(x)
    assert len(calls) == 2 * len(list(csnn().modules())) - 2 * sum(1 for m in net.modules() if "ATan" in type(m).__name__)


def test_the_copy_starts_at_rest_and_the_source_keeps_its_state(x):
    net = csnn().train()
    net(x).sum().backward()  # leaves voltages that hang on a graph, which deepcopy alone cannot copy
    voltages = [m.v for m in net.modules() if hasattr(m, "v_threshold")]
    fast = sj_tac.convert(net, example_input=x)
    assert all(m.v == 0.0 for m in fast.modules() if hasattr(m, "v_threshold"))
    assert fast.training
    assert [id(v) for v in voltages] == [id(m.v) for m in net.modules() if hasattr(m, "v_threshold")]


def test_inplace_changes_the_model_itself(x):
    net = csnn()
    expected = at_rest(sj_tac.convert(net, "preserve", 3), x)
    assert sj_tac.convert(net, "preserve", 3, inplace=True) is net
    assert torch.equal(at_rest(net, x), expected)
    assert sj_tac.restore(net, inplace=True) is net
    assert type(net[0]) is layer.Conv2d
    assert "_sj_tac" not in vars(net)


class _Scaling(nn.Module):
    """Writes into a parameter through ``.data`` in the middle of its forward; "lent": and takes it back at the end."""

    def __init__(self, lent):
        super().__init__()
        self.conv, self.lif, self.head, self.out = conv(2, 4), node("lif"), conv(4, 3), node("lif")
        self.lif.v_threshold = self.out.v_threshold = 0.1
        self.gain, self.lent = nn.Parameter(torch.linspace(0.5, 1.5, 4).view(4, 1, 1)), lent

    def forward(self, x):
        drives = self.conv(x) * self.gain
        self.gain.data.mul_(2.0)
        spikes = self.out(self.head(self.lif(drives)))
        if self.lent:
            self.gain.data.div_(2.0)
        return spikes


@pytest.mark.parametrize(("lent", "inplace"), [(True, False), (False, True)])
def test_what_a_forward_writes_into_parameters_is_put_back(x, lent, inplace):
    torch.manual_seed(0)
    net, x = _Scaling(lent).double().eval(), x.double()
    before, source = copy.deepcopy(net.state_dict()), copy.deepcopy(net)
    fast = sj_tac.convert(net, k=1, example_input=x, inplace=inplace)
    assert all(torch.equal(value, before[key]) for key, value in fast.state_dict().items())
    for _ in range(2):
        spikes = at_rest(fast, x)
        torch.testing.assert_close(spikes, at_rest(source, x), rtol=1e-9, atol=1e-9)
        assert 0.05 < spikes.mean() < 0.6
        assert torch.equal(fast.gain, source.gain)


def test_reset_net_knows_the_swapped_neurons(x):
    net = csnn()
    functional.reset_net(net)  # fills the host's cache of modules to reset
    with torch.no_grad():
        fast = sj_tac.convert(net, inplace=True)
        first = fast(x)
        assert not torch.equal(fast(x), first)
        functional.reset_net(fast)
        assert torch.equal(fast(x), first)


def test_tied_modules_and_weights_stay_tied(x):
    net = nn.Sequential(conv(3, 3), norm(3), node("lif", v_threshold=0.2), conv(3, 3), norm(3), node("lif", v_threshold=0.2))
    net[3].weight = net[0].weight
    net.head = net[3]
    fast = sj_tac.convert(net)
    assert fast[3].weight is fast[0].weight
    assert fast.head is fast[3]
    assert list(fast.state_dict()) == list(net.state_dict())
    back = sj_tac.restore(fast)
    assert back[3].weight is back[0].weight


def test_a_child_of_another_model(x):
    outer = nn.Sequential(sj_tac.convert(csnn(), "collapse", 4), nn.Linear(3, 2))
    y = at_rest(outer, x)
    assert y.shape == (6, 2, 2)
    assert torch.equal(y[0], y[3])
    assert not torch.equal(y[3], y[4])
    assert len(sj_tac.report(outer[0]).converted) == 3


def test_set_k_follows_everywhere(x):
    net = csnn()
    for policy in ("preserve", "collapse"):
        fast = sj_tac.convert(net, policy, 4)
        for k in (2, 1, 3):
            report = sj_tac.set_k(fast, k)
            assert {v.k for v in report.converted} == {k}
            assert torch.equal(at_rest(fast, x), at_rest(sj_tac.convert(net, policy, k), x))
            assert same_state(fast, net)
    fast = sj_tac.convert(net, "collapse", 2)
    report = sj_tac.set_k(fast, 4, "0")
    assert [(v.layer, v.k) for v in report.verdicts] == [("0", 4), ("4", 2), ("8", 2), ("13", 4)]
    assert at_rest(fast, x).shape[0] == 6


def test_bn_that_moved_is_reported(x):
    fast = sj_tac.convert(csnn(), "preserve", 2).train()
    fast(x)
    with pytest.warns(BatchNormMovedWarning, match=r"restore: the running statistics of \['0', '4'\] .*freeze_bn"):
        sj_tac.restore(fast)
    with pytest.warns(BatchNormMovedWarning, match=r"set_k: the running statistics of \['0', '4'\]"):
        sj_tac.set_k(fast, 8)
    one = sj_tac.convert(csnn(), "preserve", 1).train()
    one(x)
    # A checkpoint brings statistics of its own.
    fast.load_state_dict(csnn().state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sj_tac.restore(fast)
        assert sj_tac.restore(one)[1].num_batches_tracked == 1


def test_frozen_bn_stays_frozen_and_trainable(x):
    net = csnn()
    fast = sj_tac.convert(net, "preserve", 2)
    assert sj_tac.freeze_bn(fast) == ["1", "5"]
    fast.train()
    assert fast.training
    assert not fast[1].training
    fast(x).sum().backward()
    assert fast[1].weight.grad is not None
    assert torch.equal(fast[1].running_mean, net[1].running_mean)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sj_tac.restore(fast)
    sj_tac.freeze_bn(fast, False)
    assert fast[1].training
    functional.reset_net(fast)
    fast(x)
    assert not torch.equal(fast[1].running_mean, net[1].running_mean)


def test_learned_weights_are_one_key_a_layer_and_not_dropped_by_accident(x):
    net, x = csnn().double(), x.double()
    policy = {"default": {"mode": "preserve", "k": 3, "weights": "learned"}}
    fast = sj_tac.convert(net, policy)
    extra = [key for key in fast.state_dict() if key not in net.state_dict()]
    assert extra == ["0.tac_logits", "4.tac_logits", "8.tac_logits"]
    assert "k=3, weights=learned" in repr(fast)
    fast.load_state_dict(net.state_dict(), strict=True)
    fast.load_state_dict(fast.state_dict(), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), sj_tac.convert(net, "preserve", 3)(x), rtol=1e-9, atol=1e-9)
    sj_tac.set_k(fast, 2)  # nothing was trained yet, so nothing is lost
    assert fast[0].tac_logits.shape == (2,)

    fast.train()
    sj_tac.freeze_bn(fast)
    functional.reset_net(fast)
    optimizer = torch.optim.SGD(fast.parameters(), 0.5)
    fast(x).mean(0)[:, 0].sum().backward()
    optimizer.step()
    for action in (lambda: sj_tac.restore(fast), lambda: sj_tac.set_k(fast, 4)):
        with pytest.raises(ConversionError, match=r"would throw away the trained aggregation weights.*drop_learned=True"):
            action()
    sj_tac.set_k(fast, 2)
    trained = fast[0].tac_logits.detach().clone()
    functional.reset_net(fast)  # voltages on a graph cannot be deep-copied, converted or not
    assert torch.equal(copy.deepcopy(fast)[0].tac_logits, trained)
    assert list(sj_tac.restore(fast, drop_learned=True).state_dict()) == list(net.state_dict())
    with pytest.warns(NewParametersWarning, match=r"set_k: tac_logits of \['0', '4', '8'\] are new parameters"):
        sj_tac.set_k(fast, 4, drop_learned=True)
    assert fast[0].tac_logits.shape == (4,)


class _KeptInTraining(nn.Sequential):
    """A norm that stays in training mode, as adaptation at test time has it: a forward in eval mode moves its statistics."""

    def train(self, mode=True):
        super().train(mode)
        self[4].train()
        return self


@pytest.mark.parametrize("inplace", [False, True])
def test_statistics_that_a_forward_moves_in_eval_mode_are_put_back(x, inplace):
    torch.manual_seed(0)
    net = _KeptInTraining(*(m for i in (2, 4) for m in (conv(i, 4), norm(4), node("lif", v_threshold=0.3)))).eval()
    before, source = copy.deepcopy(net), copy.deepcopy(net)
    fast = sj_tac.convert(net, k=1, example_input=x, inplace=inplace)
    assert same_state(net, before)
    assert same_state(fast, before)
    sj_tac.plan(source, example_input=x)
    sj_tac.diagnose([x], source)
    assert same_state(source, before)
    with torch.no_grad():
        spikes = source(x)
        torch.testing.assert_close(fast(x), spikes)
    assert 0.05 < spikes.mean() < 0.6
    assert not torch.equal(source[4].running_mean, before[4].running_mean)


def test_a_function_that_holds_a_module_would_be_shared_by_the_copy(x):
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.run = inner, functools.partial(lambda run, x: run(x), lambda x: inner(x))

        def forward(self, x):
            return self.run(x)

    net = nn.Sequential(*csnn()[:3], Wrapped(layer.Linear(8, 8, step_mode="m")))
    assert len(sj_tac.plan(net, example_input=x).converted) == 1
    net[0].size = lambda: sum(p.numel() for p in net[0].parameters())  # which no forward calls
    with pytest.raises(
        ConversionError, match=r"'3.run' is a function that holds its module '3.inner', which a copy would share"
    ):
        sj_tac.convert(net, example_input=x)
    assert sj_tac.convert(net, example_input=x, inplace=True) is net


def test_what_torch_compile_made_is_told_apart(x):
    with pytest.raises(ConversionError, match=r"is what torch.compile made of a Sequential; convert that one, and compile"):
        sj_tac.convert(torch.compile(csnn()), example_input=x)
