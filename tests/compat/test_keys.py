"""Keys of older checkpoints: what is renamed, and what is said about the rest."""

import logging

import pairs
import pytest
import torch
from spikingjelly.activation_based import layer, neuron
from torch import nn

from sj_tac.compat import remap_keys
from sj_tac.errors import ConversionError, ModelTypeError


class Wrapped(nn.Module):
    """The container that older versions had, and many repositories carry: a level 'module' in its keys."""

    def __init__(self, *args):
        super().__init__()
        self.module = nn.Sequential(*args)


def net(container=layer.SeqToANNContainer):
    torch.manual_seed(0)
    return nn.Sequential(
        container(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), neuron.ParametricLIFNode(), container(nn.Conv2d(4, 3, 3))
    )


def same(found, model):
    want = model.state_dict()
    assert type(found) is dict
    assert list(found) == list(want)
    assert all(torch.equal(found[key], value) for key, value in want.items())
    model.load_state_dict(found, strict=True)


WRAPPERS = [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": {"net": s}, "optimizer": {}}]


@pairs.parametrize(
    wrapper=WRAPPERS, prefix=["", "module.", "module._orig_mod."], container=[layer.SeqToANNContainer, Wrapped]
)
def test_levels_come_and_go(wrapper, prefix, container, caplog):
    caplog.set_level(logging.INFO, "sj_tac.compat.keys")
    model = net()
    given = {f"{prefix}{key}": value for key, value in net(container).state_dict().items()}
    before = dict(given)
    same(remap_keys(wrapper(given), model), model)
    assert given.keys() == before.keys()
    assert f"renamed {len(given.keys() - model.state_dict())} of {len(given)} keys" in caplog.text
    # The other way, too: into a model that has the level.
    there = net(Wrapped)
    same(remap_keys({f"{prefix}{key}": value for key, value in model.state_dict().items()}, there), there)


def test_counters_that_were_never_saved_stay_the_models():
    model = net()
    given = {k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    same(remap_keys(given, model), model)


def changed(key, value):
    given = net(Wrapped).state_dict() | {key: value}
    return {name: found for name, found in given.items() if found is not None}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (changed("head.weight", torch.zeros(2)), "head.weight is not in the model"),
        (changed("2.module.0.bias", None), "2.0.bias of the model is missing"),
        (changed("2.module.0.bias", torch.zeros(5)), r"2.module.0.bias has shape \(5,\), 2.0.bias of the model \(3,\)"),
        (changed("2.0.bias", torch.zeros(3)), "both become 2.0.bias"),
        ({"0.0.weight": torch.zeros(1)}, r"9 of the checkpoint's 1 and the model's 10 keys do not fit Sequential"),
        ({}, "holds nothing"),
        ({"epoch": 3, "weights": [1]}, "no tensor under epoch, weights"),
        ({"state_dict": {"a": torch.ones(1)}, "model": {"a": torch.ones(1)}}, r"several state dicts \(state_dict, model\)"),
        (net(), "pass its state_dict"),
        ("model.pt", "is a str"),
    ],
)
def test_what_does_not_fit_is_named(given, told):
    model = net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ConversionError, match=told):
        remap_keys(given, model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_two_keys_that_differ_in_a_level_alone_are_not_guessed():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "module": nn.ModuleDict({"a": nn.Linear(2, 2)})})
    same(remap_keys(model.state_dict(), model), model)
    with pytest.raises(ModelTypeError, match="is a dict"):
        remap_keys({}, {})
    with pytest.raises(ConversionError, match=r"may be any of a.weight, module.a.weight"):
        remap_keys({f"module.module.{k}": v for k, v in model.state_dict().items()}, model)
