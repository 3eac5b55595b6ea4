"""The paper's other operators in a net that is there: in each chain that ``sj_tac.convert`` finds one module is changed."""

from __future__ import annotations

import copy
from typing import Any, Literal

from torch import nn

from sj_tac import host
from sj_tac.errors import ConversionError
from sj_tac.experimental.ftc import BiquadNode
from sj_tac.experimental.imc import InformationGate
from sj_tac.experimental.tcc import SilentFrameConv2d
from sj_tac.rewrites.chains import Chain
from sj_tac.rewrites.plan import analyse

Operator = Literal["FTC", "IMC", "TCC"]


def replace(model: nn.Module, operator: Operator, example_input: Any = None) -> nn.Module:
    """A copy of ``model`` whose conv -> norm -> neuron chains use another operator of the paper.

    Args:
        model: a SpikingJelly net in step_mode "m", untouched.
        operator: "FTC": every neuron becomes ``BiquadNode.like`` it. "IMC": behind every neuron comes an InformationGate,
            which watches the convolution. "TCC": every convolution becomes a SilentFrameConv2d with the same parameters.
        example_input: as of ``sj_tac.convert``.

    Returns:
        A net of the same class. TCC keeps the state_dict's keys; FTC adds the biquads' parameters, IMC the gates'.

    Raises:
        ConversionError: no Conv2d chain; ValueError: another operator. The model is then as it was.
    """
    if operator not in ("FTC", "IMC", "TCC"):
        raise ValueError(f"replace got operator {operator!r}; it knows 'FTC', 'IMC' and 'TCC'")
    made = copy.deepcopy(model)
    chains = [
        c for c in analyse(made, "preserve", 1, example_input, "reference", False).chains.values() if isinstance(c, Chain)
    ]
    chains = [c for c in chains if c.direct and type(made.get_submodule(c.conv)) is host.layer.Conv2d]
    if not chains:
        raise ConversionError(f"{type(model).__name__} has no Conv2d that alone drives a neuron; sj_tac.plan says why")
    for chain in chains:
        _change(made, chain, operator)
    host.reset(made)
    return made


def _change(model: nn.Module, chain: Chain, operator: Operator) -> None:
    conv: Any = model.get_submodule(chain.conv)
    node = model.get_submodule(chain.neuron)
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
    parent, _, name = chain.neuron.rpartition(".")
    setattr(model.get_submodule(parent), name, put.train(node.training))
