"""A model that is looked at once and converted under many policies: each time what ``convert`` makes of it."""

import pytest
import torch
from spikingjelly.activation_based import functional
from support import awake, csnn, frames

import sj_tac
from rewrites import plan
from rewrites.pipeline import Source, convert_with
from sj_tac.errors import ConversionError, PolicyError
from sj_tac.policy import Policy

POLICIES = [
    {"default": {"mode": "preserve", "k": 2}},
    {"default": {"mode": "preserve", "k": 1}},
    {"default": {"mode": "keep"}, "rules": [{"match": "4", "mode": "collapse", "k": 3}]},
    {"default": {"mode": "preserve", "k": 4, "normalize": False}, "rules": [{"match": "0", "mode": "collapse", "k": 2}]},
]


def source():
    x = frames(7, 3, 2, 8, 8)
    return awake(csnn(), x), x


def test_every_conversion_is_that_of_convert():
    net, x = source()
    looked, state = Source(net, ("conv",), example_input=x), {k: v.clone() for k, v in net.state_dict().items()}
    for policy in [*POLICIES, POLICIES[0]]:
        found, expected = looked.convert(Policy.from_dict(policy)), convert_with(net, policy, example_input=x)
        assert sj_tac.report(found).to_dict() == sj_tac.report(expected).to_dict()
        out = found(x)
        assert torch.equal(out, expected(x))
        assert 0 < out.mean() < 1
        # A net of its own: k can be changed, and it can be turned back.
        assert str(sj_tac.set_k(found, 3)) == str(sj_tac.set_k(expected, 3))
        functional.reset_net(found)
        assert torch.equal(sj_tac.restore(found)(x), net(x))
        functional.reset_net(net)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


def test_the_source_is_traced_and_run_once(monkeypatch):
    net, x = source()
    seen = []
    for name in ("trace", "find_axes", "_run_source"):
        done = getattr(plan, name)
        monkeypatch.setattr(plan, name, lambda *args, name=name, done=done: seen.append(name) or done(*args))
    looked = Source(net, ("conv",), example_input=x)
    for policy in POLICIES:
        looked.convert(Policy.from_dict(policy))
    assert seen == ["trace", "_run_source", "find_axes"]


def test_a_bad_policy_leaves_the_next_conversion_alone():
    net, x = source()
    looked = Source(net, ("conv",), example_input=x)
    with pytest.raises(PolicyError, match="matches no"):
        looked.convert(Policy.from_dict({"rules": [{"match": "nothing", "mode": "preserve", "k": 2}]}))
    assert sj_tac.report(looked.convert(Policy.from_dict(POLICIES[0]))).converted


def test_a_model_that_changed_meanwhile_is_noticed_where_it_is_to_be_the_same():
    net, x = source()
    looked = Source(net, ("conv",), example_input=x)
    with torch.no_grad():
        next(net.parameters()).mul_(1.5)
    with pytest.raises(ConversionError):
        looked.convert(Policy.from_dict(POLICIES[1]))
    assert convert_with(net, POLICIES[1], example_input=x)
