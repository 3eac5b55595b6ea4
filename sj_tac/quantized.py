"""Weights of layers in int8 in an ONNX graph: whole numbers and a DequantizeLinear, a quarter of the bytes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac.definition.convs import SharedConv
from sj_tac.kernels.cpu import int8
from sj_tac.rewrites.gate import gate_of

Rounded = Mapping[str, tuple[Tensor, Tensor]]


def round_weights(net: nn.Module) -> Rounded:
    """Round the weights of the layers that run in int8, in place: by parameter, the whole numbers, and their scale [C].

    A layer that was asked to, and that no captured call has run in float32, counts among them.
    """
    gate = gate_of(net)
    seen = [] if gate is None else [graph.float32() for graph in gate.capture.graphs]
    found = {}
    for name, module in net.named_modules():
        if isinstance(module, SharedConv) and module.sharing.dtype is torch.int8:
            why = [reasons[module.sharing.layer] for reasons in seen if module.sharing.layer in reasons]
            if not why or not all(why):
                weight: Any = module.weight
                w8, scale = int8.rounded(weight)
                # Another parameter: torch's exporter may have kept numbers of this one.
                module.weight = nn.Parameter(w8.to(weight.dtype) * scale.view(-1, *[1] * (weight.dim() - 1)))
                module.sharing.dtype = None
                found[f"{name}.weight"] = w8, scale
    return found


def write_whole_weights(model: Any, weights: Rounded) -> None:
    """Put whole numbers and a DequantizeLinear in the place of the weights of these names, in a model of onnx_ir."""
    ir: Any = importlib.import_module("onnx_ir")
    graph = model.graph
    constants = [node for node in graph if node.op_type == "Constant" and "value" in node.attributes]
    held = [(value, value.const_value) for value in graph.initializers.values()]
    held += [(node.outputs[0], node.attributes["value"].as_tensor()) for node in constants]
    for value, tensor in held:
        found = _rounded(torch.from_numpy(tensor.numpy()), value.name, weights)
        if found is None:
            continue
        w8, scale, axis = found
        stored = []
        for kind, numbers in (("whole", w8), ("scale", scale)):
            tensor = ir.tensor(numbers.contiguous().cpu().numpy(), name=f"{value.name}.{kind}")
            made = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            graph.register_initializer(made)
            stored.append(made)
        node = ir.node("DequantizeLinear", stored, {"axis": axis})
        node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = f"{value.name}.rounded", value.shape, value.type
        for reader, place in list(value.uses()):
            reader.replace_input_with(place, node.outputs[0])
        graph.insert_before(graph[0], node)
        if value.name in graph.initializers:
            del graph.initializers[value.name]
        else:
            graph.remove(value.producer(), safe=True)


def _rounded(stored: Tensor, name: str, weights: Rounded) -> tuple[Tensor, Tensor, int] | None:
    """Return the whole numbers of a weight, their scale, and its dimension; None for what is no such weight."""
    for key, (w8, scale) in weights.items():
        if name == key or name.endswith(f".{key}"):
            return w8, scale, 0
        # torch turns the weight of a Linear, and gives it another name.
        if w8.dim() == 2 and stored.shape == w8.t().shape and torch.equal(stored, (w8 * scale[:, None]).t().cpu()):
            return w8.t(), scale, 1
    return None
