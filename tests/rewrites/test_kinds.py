"""Which subclasses count as the class they come from, and which have something of their own."""

import pytest
import torch
from spikingjelly.activation_based import layer, neuron
from torch import nn

from sj_tac import host


class Constructor(neuron.LIFNode):
    """Nothing but a constructor."""

    label: str = "a"
    sizes = (1, 2)

    def __init__(self):
        super().__init__(tau=3.0, step_mode="m")
        self.more = nn.Parameter(torch.ones(1))

    def helper(self):
        return self.tau

    def extra_repr(self):
        return "mine"


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda: neuron.LIFNode(), neuron.LIFNode),
        (Constructor, neuron.LIFNode),
        (lambda: type("Conv", (nn.Conv2d,), {})(1, 1, 1), nn.Conv2d),
        (lambda: type("Norm", (nn.BatchNorm2d,), {"__doc__": "mine"})(1), nn.BatchNorm2d),
    ],
)
def test_a_constructor_changes_no_kind(made, kind):
    assert host.kind(made()) is kind


OWN = {
    "a method of the base": {"forward": lambda self, x: x},
    "a private method of the base": {"_conv_forward": lambda self, x, w, b: x},
    "a property over a parameter": {"weight": property(lambda self: torch.ones(1, 1, 1, 1))},
    "a constant over a parameter": {"weight": None},
    "a static method": {"make": staticmethod(lambda: 1)},
    "item access": {"__getattr__": lambda self, name: super(nn.Conv2d, self).__getattr__(name)},
    "a tensor": {"scale": torch.ones(1)},
    "a list": {"held": []},
}


@pytest.mark.parametrize("members", OWN.values(), ids=OWN)
def test_whatever_else_a_class_adds_makes_it_one_of_its_own(members):
    # The base's constructor must not meet a property in a parameter's place.
    cls = type("Own", (nn.Conv2d,), dict(members))
    module = nn.Conv2d(1, 1, 1)
    module.__class__ = cls
    assert host.kind(module) is cls


@pytest.mark.parametrize("name", ["forward", "_conv_forward", "extra_repr"])
def test_an_attribute_of_the_instance_that_hides_a_method_makes_its_kind_unknown(name):
    conv = layer.Conv2d(1, 1, 1)
    conv.__dict__[name] = lambda *args: None
    assert host.kind(conv) is host.Unknown


def test_a_parametrized_module_is_of_a_class_of_its_own():
    conv = nn.Conv2d(1, 1, 1)
    torch.nn.utils.parametrizations.weight_norm(conv)
    assert host.kind(conv) is type(conv)


def test_a_registered_class_is_known_and_so_are_its_constructor_only_subclasses():
    class Own(nn.Module):
        def forward(self, x):
            return x

    class Sub(Own):
        def __init__(self):
            super().__init__()

    class Other(Own):
        def forward(self, x):
            return -x

    assert host.kind(Sub()) is Sub
    host.register_neuron(Own, decay=0.5)
    assert host.kind(Sub()) is Own
    assert host.is_registered_neuron(Sub())
    assert host.registered_decay(Sub()) == 0.5
    assert not host.is_registered_neuron(Other())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: host.register_neuron(3), TypeError, "register_neuron takes a subclass of torch.nn.Module, got 3"),
        (lambda: host.register_neuron(nn.Identity()), TypeError, "register the class, not an instance"),
        (lambda: host.register_affine(dict), TypeError, "register_affine takes a subclass"),
        (lambda: host.register_neuron(nn.ReLU, decay=0), ValueError, r"ReLU\): decay=0 must be a number in \(0, 1\]"),
        (lambda: host.register_neuron(nn.ReLU, decay=2.0), ValueError, "decay=2.0"),
    ],
)
def test_wrong_registrations_say_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_decay_out_of_range_is_found_where_it_is_asked_for():
    class Growing(nn.Module):
        pass

    host.register_neuron(Growing, decay=lambda module: 1.5)
    with pytest.raises(ValueError, match=r"the decay registered for Growing gives 1.5; it must be in \(0, 1\]"):
        host.decay(Growing(), torch.float32)
