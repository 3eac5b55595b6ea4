"""Bad input: what the error says, and that the model is as it was."""

import copy
import re

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import at_rest, conv, csnn, frames, node, norm, same_state
from torch import nn
from torch.nn.utils import prune

import sj_tac
from sj_tac.errors import BackendError, ConversionError, ModelTypeError, PolicyError


@pytest.fixture
def net():
    return csnn()


@pytest.fixture(autouse=True)
def untouched(net):
    """Whatever the test does wrong, the fixture's model is the same afterwards, class by class."""
    before = copy.deepcopy(net)
    yield
    assert [type(m) for m in net.modules()] == [type(m) for m in before.modules()]
    assert same_state(net, before)
    assert [sorted(vars(m)) for m in net.modules()] == [sorted(vars(m)) for m in before.modules()]


@pytest.mark.parametrize(
    ("call", "thing"),
    [(sj_tac.convert, {"weight": 1}), (sj_tac.plan, None), (sj_tac.report, "model.pt"), (sj_tac.restore, nn.Module)],
)
def test_not_a_module(call, thing):
    with pytest.raises(ModelTypeError, match=r"a model is a torch.nn.Module, got (dict|NoneType|str|type)"):
        call(thing)


def test_single_step_mode(net):
    functional.set_step_mode(net, "s")
    with pytest.raises(ConversionError, match=r"step_mode 's'.*set_step_mode\(model, 'm'\).*\[T, N, C, H, W\]"):
        sj_tac.convert(net, example_input=frames(4, 2, 2, 8, 8)[0])
    assert not sj_tac.plan(net, example_input=frames(4, 2, 2, 8, 8)[0]).converted
    functional.set_step_mode(net, "m")


@pytest.mark.parametrize("k", [0, 1.5, "2", None, True, torch.tensor(2)])
def test_k_that_is_no_positive_int(net, k):
    for inplace in (False, True):
        with pytest.raises(PolicyError, match=r"k=.* must be an int of at least 1"):
            sj_tac.convert(net, "preserve", k, inplace=inplace)


def test_no_chain_found():
    linear = nn.Sequential(layer.Linear(4, 4, step_mode="m"), node("lif"))
    with pytest.raises(ConversionError, match="Sequential has no convolution"):
        sj_tac.convert(linear, example_input=torch.rand(3, 2, 4))
    assert sj_tac.plan(linear, example_input=torch.rand(3, 2, 4)).verdicts == ()
    headless = nn.Sequential(conv(), norm(), nn.ReLU())
    with pytest.raises(
        ConversionError, match=r"no convolution of Sequential can be converted:\n  0: NO_NEURON: it drives no neuron"
    ):
        sj_tac.convert(headless)
    with pytest.raises(ConversionError, match="POLICY_KEEP"):
        sj_tac.convert(csnn(), "keep")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("presrve", r"policy='presrve' is neither a mode nor a file; did you mean 'preserve'"),
        ("auto", r'policy="auto" (is measured|measures on your data): .*convert\(model, "auto", calibration=batches\)'),
        (7, r"policy: a policy is a mapping with default and rules, got int"),
        ({"default": {"mode": "colapse"}}, r"policy: default.mode is 'colapse'; did you mean 'collapse'"),
        ({"default": {"kk": 2}}, r"policy: unknown key 'default.kk'; did you mean 'k'"),
        ({"defaults": {}}, r"policy: unknown key 'defaults'; did you mean 'default'"),
        ({"version": 2}, r"policy: version is 2"),
        ({"default": {"k": 0}}, r"policy: default.k is 0; Input should be greater than or equal to 1"),
        ({"default": {"k": 2.0}}, r"policy: default.k is 2.0; Input should be a valid integer"),
        ({"default": {"normalize": "yes"}}, r"policy: default.normalize is 'yes'; Input should be a valid boolean"),
        ({"rules": [{"match": "0", "mod": "keep"}]}, r"policy: unknown key 'rules\[0\].mod'; did you mean 'mode'"),
        ({"rules": [{"mode": "keep"}]}, r"policy: rules\[0\].match .*Field required"),
        ({"rules": [{"match": "re:(", "mode": "keep"}]}, r"policy: rules\[0\].match is 're:\('; .*no regular expression"),
        (
            {"default": {"weights": "learned"}, "rules": [{"match": "0", "normalize": False}]},
            r"rules\[0\] \(match: 0\).*softmax",
        ),
        (
            {"rules": [{"match": "conv1"}]},
            r"rules\[0\] \(match: conv1\) matches no conv of the model; there are: '0', '4', '8'",
        ),
        (
            {"rules": [{"match": "*"}, {"match": "4", "mode": "keep"}]},
            r"rules\[1\] \(match: 4\) is never reached: rules\[0\] \(match: \*\) takes \['4'\] before it.*narrower rule",
        ),
    ],
)
def test_a_wrong_policy(net, policy, message):
    with pytest.raises(PolicyError, match=message):
        sj_tac.convert(net, policy, inplace=True)
    with pytest.raises(PolicyError, match=message):
        sj_tac.plan(net, policy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"policy file '.*p.yaml' cannot be read: .*No such file"),
        ("", r"p.yaml is empty; the least policy is"),
        ("# only a comment\n", r"p.yaml is empty"),
        ("default: {mode: [", r"p.yaml is no YAML: "),
        ("- match: a", r"p.yaml: a policy is a mapping .*got list"),
        ("default: {mode: perserve}", r"p.yaml: default.mode is 'perserve'; did you mean 'preserve'"),
        ("rules: [{match: conv9}]", r"p.yaml, rules\[0\] \(match: conv9\) matches no conv"),
    ],
)
def test_a_wrong_policy_file(net, tmp_path, content, message):
    path = tmp_path / "p.yaml"
    if content is not None:
        path.write_text(content)
    for policy in (path, str(path)):
        with pytest.raises(PolicyError, match=message):
            sj_tac.convert(net, policy, inplace=True)


def test_k_beside_a_policy_that_has_one(net):
    with pytest.raises(PolicyError, match="k=4 is given beside a policy whose default says k: 3"):
        sj_tac.convert(net, {"default": {"k": 3}}, 4)
    assert sj_tac.plan(net, {"default": {"mode": "preserve"}}, 4)["0"].k == 4


def test_converting_a_converted_model(net):
    fast = sj_tac.convert(net)
    for call in (sj_tac.convert, sj_tac.plan):
        with pytest.raises(ConversionError, match=r"cannot be converted again: its module '0' .*restore.*set_k"):
            call(fast)
    with pytest.raises(ConversionError, match=r"its module 'inner.0'"):
        sj_tac.convert(nn.Sequential(__import__("collections").OrderedDict(inner=fast)), inplace=True)
    assert len(sj_tac.report(fast).converted) == 3


@pytest.mark.parametrize("call", [sj_tac.report, sj_tac.restore, sj_tac.freeze_bn, lambda m: sj_tac.set_k(m, 2)])
def test_asking_a_plain_model(net, call):
    with pytest.raises(ConversionError, match=r"Sequential is not a converted model; call sj_tac.convert first"):
        call(net)
    with pytest.raises(ConversionError, match=r"its module '0' is: call .* on that"):
        call(nn.Sequential(sj_tac.convert(net)))


@pytest.mark.parametrize(
    ("policy", "shape"), [("preserve", (2, 2, 8, 8)), ("preserve", (4, 2, 3, 8, 8)), ("collapse", (2,))]
)
def test_input_that_is_not_frames_is_the_sources_own_error(net, policy, shape):
    fast = sj_tac.convert(net, policy, 2)
    with pytest.raises((ValueError, RuntimeError)) as own:
        net(torch.zeros(shape))
    functional.reset_net(net)
    with pytest.raises(own.type, match=re.escape(str(own.value)[:60])):
        fast(torch.zeros(shape))
    assert at_rest(fast, frames(4, 2, 2, 8, 8)).shape == (4, 2, 3)


def test_a_model_that_cannot_be_deep_copied(net):
    pruned = csnn().double()
    prune.random_unstructured(pruned[0], "weight", 0.5)
    pruned(frames(3, 1, 2, 8, 8).double())
    with pytest.raises(ConversionError, match=r"cannot be deep-copied because '0.weight' .*prune.remove.*inplace=True"):
        sj_tac.convert(pruned)
    assert type(pruned[0]) is layer.Conv2d
    # The remedies that the message names do work.
    x = frames(6, 1, 2, 8, 8).double()
    expected = at_rest(pruned, x)
    fast = sj_tac.convert(pruned, "preserve", 1, inplace=True)
    assert fast is pruned
    torch.testing.assert_close(at_rest(fast, x), expected, rtol=1e-9, atol=1e-9)
    fast[0].weight_orig.data.zero_()
    assert not torch.equal(at_rest(fast, x), expected)


def test_backends(net):
    with pytest.raises(
        BackendError, match=r"backend='cuda' is unknown; choose one of \['auto', 'reference', 'cpp', 'cupy', 'nvrtc'\]"
    ):
        sj_tac.convert(net, backend="cuda")
    assert sj_tac.report(sj_tac.convert(net, backend="reference"))["0"].kernel == "reference"


def test_an_example_that_does_not_run(net):
    with pytest.raises(ConversionError, match=r"does not run on example_input of shape \[\[4, 1, 3, 8, 8\]\]"):
        sj_tac.convert(net, example_input=torch.rand(4, 1, 3, 8, 8))


def test_set_k_that_is_refused_changes_nothing(net):
    fast = sj_tac.convert(net, {"default": {"k": 4}, "rules": [{"match": "0", "mode": "collapse", "k": 2}]})
    before = sj_tac.report(fast).to_dict()
    with pytest.raises(PolicyError, match=r"set_k: layer '4' refuses, k=3 is no multiple of 2.*left as it was"):
        sj_tac.set_k(fast, 3, "4")
    with pytest.raises(PolicyError, match=r"layers='conv\*' matches no converted layer; there are: '0', '4', '8'"):
        sj_tac.set_k(fast, 3, "conv*")
    with pytest.raises(PolicyError, match="k=0 must be an int"):
        sj_tac.set_k(fast, 0)
    assert sj_tac.report(fast).to_dict() == before
    assert at_rest(fast, frames(6, 2, 2, 8, 8)).shape[0] == 6
