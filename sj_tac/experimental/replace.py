"""The paper's other operators in a net that is there: around each convolution that drives a neuron one is changed."""

from __future__ import annotations

import copy
from typing import Any, Literal

from torch import nn

from sj_tac import host
from sj_tac.definition.neurons import is_known
from sj_tac.errors import ConversionError
from sj_tac.experimental.ftc import BiquadNode
from sj_tac.experimental.imc import InformationGate
from sj_tac.experimental.tcc import SilentFrameConv2d
from sj_tac.rewrites.plan import look

Operator = Literal["FTC", "IMC", "TCC"]


def replace(model: nn.Module, operator: Operator, example_input: Any = None) -> nn.Module:
    """A copy of ``model`` whose convolutions that alone drive a neuron use another operator of the paper.

    Args:
        model: a SpikingJelly net in step_mode "m", untouched.
        operator: "FTC": every LIFNode, IFNode and ParametricLIFNode becomes ``BiquadNode.like`` it. "IMC": behind every
            neuron comes an InformationGate, which watches the convolution. "TCC": every convolution becomes a
            SilentFrameConv2d with the same parameters.
        example_input: as of ``sj_tac.convert``.

    Returns:
        A net of the same class. TCC keeps the state_dict's keys; FTC adds the biquads' parameters, IMC the gates'.

    Raises:
        ConversionError: no such Conv2d; ValueError: another operator. The model is then as it was.
    """
    if operator not in ("FTC", "IMC", "TCC"):
        raise ValueError(f"replace got operator {operator!r}; it knows 'FTC', 'IMC' and 'TCC'")
    made = copy.deepcopy(model)
    measured = look(made, ("conv",), example_input).measured
    found = [
        (name, shared.neurons[0])
        for name, shared in measured.shared.items()
        if len(shared.neurons) == 1 and measured.sources[shared.neurons[0]] == {name}
    ]
    found = [(conv, neuron) for conv, neuron in found if type(made.get_submodule(conv)) is host.layer.Conv2d]
    if operator == "FTC":  # whose biquad is like a neuron with a decay that is known
        found = [(conv, neuron) for conv, neuron in found if is_known(made.get_submodule(neuron))]
    if not found:
        raise ConversionError(f"{type(model).__name__} has no Conv2d that alone drives a neuron; sj_tac.plan says why")
    for conv, neuron in found:
        _change(made, conv, neuron, operator)
    host.reset(made)
    return made


def _change(model: nn.Module, name: str, neuron: str, operator: Operator) -> None:
    conv: Any = model.get_submodule(name)
    node = model.get_submodule(neuron)
    if operator == "TCC":
        conv.__class__ = SilentFrameConv2d
        return
    if operator == "FTC":
        put: nn.Module = BiquadNode.like(node, conv.out_channels)
    else:
        gate = InformationGate(conv.out_channels)
        gate.watch(conv)
        put = nn.Sequential(node, gate)
    put.to(conv.weight.device)
    parent, _, child = neuron.rpartition(".")
    setattr(model.get_submodule(parent), child, put.train(node.training))
