"""A converted net as one ONNX graph: each convolution once for every group of frames, the steps of the neurons unrolled."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import warnings
from ast import literal_eval
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from sj_tac import host
from sj_tac.definition.convs import SharedConv
from sj_tac.errors import ExportError, InputError, StateNotExportedWarning
from sj_tac.quantized import round_weights, write_whole_weights
from sj_tac.rewrites.arguments import as_arguments, copied
from sj_tac.rewrites.gate import as_defined
from sj_tac.rewrites.pipeline import deep_copy, record_of
from sj_tac.rewrites.verify import tensors
from sj_tac.support.files import write_whole
from sj_tac.support.printing import Shown

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# Operators of ONNX that a convolution becomes.
_CONVOLUTIONS = ("Conv", "ConvTranspose")
# What torch notes of every operation: the modules it was called in, and lines of Python with the paths of their files.
_SCOPES, _TRACE = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.stack_trace"


@dataclass(frozen=True)
class Exported(Shown):
    """What was written, and how it compares with the net on the example. ``print`` shows a table.

    Attributes:
        path: the file.
        opset: its ONNX opset.
        nodes: how many operations it has.
        inputs: their shapes by name; a dynamic dimension is a name.
        outputs: likewise.
        convolutions: by layer, the input shape [frames * N, C, H, W] of each Conv: one for a layer that runs once.
        spikes: how many spikes of all neurons differ in onnxruntime from those of the net's definition, and of how many.
        difference: the largest of an output, to the net's own call.
    """

    path: str
    opset: int
    nodes: int
    inputs: dict[str, list[int | str]]
    outputs: dict[str, list[int | str]]
    convolutions: dict[str, list[list[int | str]]]
    spikes: tuple[int, int]
    difference: float
    title: str = field(default="", repr=False)

    def __rich__(self) -> Table:
        differing, total = self.spikes
        said = f"{differing:,} of {total:,} spikes differ, and outputs by up to {self.difference:.3g}"
        caption = f"opset {self.opset}, {self.nodes:,} operations; in onnxruntime {said}"
        table = Table(title=f"{self.title}: {self.path}", caption=caption, caption_justify="left", title_justify="left")
        table.add_column("layer", style="bold")
        table.add_column("convolutions", justify="right")
        table.add_column("their input")
        for layer, shapes in self.convolutions.items():
            table.add_row(layer, str(len(shapes)), str(shapes[0]).replace("'", ""))
        return table


def export_onnx(
    net: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    batch_dim: int | None = None,
    opset: int | None = None,
    tolerance: float = 1e-3,
) -> Exported:
    """Write a converted net as an ONNX file, for the T of an example, and check it in onnxruntime.

    The graph has neither loops nor operators of sj_tac: each convolution once for every k frames, and the steps of the
    neurons one after the other. It begins every run at the neurons' reset values. The net is left as it was.

    Args:
        net: a converted net in eval mode.
        example: frames [T, N, C, H, W], or what else the net takes, a tuple for several arguments. T and k are fixed by it.
        path: of the file, which is written whole or not at all.
        batch_dim: the dimension of the frames that is N, if N is to be free: 1 of [T, N, ...]. None: N is the example's.
        opset: ONNX's, torch's own choice where it is None.
        tolerance: the share of all spikes that may differ from the net's own, on the example. Convolutions add up in another
            order in onnxruntime, so that a drive at the threshold may fall on its other side.

    Raises:
        ImportError: onnx, onnxscript or onnxruntime is not installed.
        ConversionError: no converted net.
        InputError: an example without tensors, or without that dimension.
        ExportError: training mode, hooks of the user's, a forward that torch.export cannot follow, an operation that ONNX
            lacks, a graph that computes something else. Nothing is written then.
        WriteError: the system could not write the file.

    Warns:
        StateNotExportedWarning: neurons carry voltages of an earlier call; the graph does not.
    """
    record = record_of(net, "export_onnx")
    _import_packages()
    arguments = as_arguments(example)
    _check(net, arguments, batch_dim)
    carrying = host.carries_state(net)
    if carrying:
        warnings.warn(
            f"{', '.join(carrying[:3])}{' ...' if len(carrying) > 3 else ''}: the voltages of the call before are not "
            "exported; the graph begins every run at the reset values, as behind functional.reset_net(net)",
            StateNotExportedWarning,
            stacklevel=2,
        )
    cases = [arguments] if batch_dim is None else [arguments, _one_more(arguments, batch_dim)]
    # A copy, so that nothing of what follows is ever seen in the net itself.
    target = deep_copy(net, or_inplace=False)
    with host.looked_at(target):
        own = [_own_call(target, case) for case in cases]
        rounded = round_weights(target)
        defined = [_defined_call(target, case) for case in cases]
        # With one sample more: torch takes a dimension of 1 as fixed.
        program = _exported(target, cases[-1], batch_dim)
    model = _translated(program, opset)
    outputs = len(own[0])
    _name(model, net, outputs, batch_dim)
    write_whole_weights(model, rounded)
    found = [_run(_serialised(model), case) for case in cases]
    _drop(model, outputs)
    content = _serialised(model)
    written = [_run(content, case) for case in cases]
    differing, total, difference = 0, 0, 0.0
    for i, (out, spikes) in enumerate(defined):
        counts = _compare_spikes(spikes, found[i][outputs:], [*_neurons(net)], tolerance)
        differing, total = differing + sum(counts), total + sum(x.numel() for x in spikes)
        difference = max(difference, _compare_outputs(own[i], out, written[i], bool(sum(counts))))
    write_whole(path, lambda draft: draft.write_bytes(content))
    return Exported(
        str(Path(path)), dict(model.opset_imports)[""], sum(node.op_type != "Constant" for node in model.graph),
        _shapes(model.graph.inputs), _shapes(model.graph.outputs), _convolutions(model), (differing, total), difference,
        record.title,
    )  # fmt: skip


def _import_packages() -> None:
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(
                f'export_onnx needs {", ".join(PACKAGES)}, and {name} is missing ({error}): pip install "sj_tac[onnx]"'
            ) from error


def _check(net: nn.Module, arguments: tuple[Any, ...], batch_dim: int | None) -> None:
    """Raise ExportError or InputError where this net cannot be exported with these arguments."""
    if not host.IS_V2:
        raise ExportError("export_onnx needs SpikingJelly 2.0: torch.export cannot follow the neurons of older versions")
    training = [name or type(net).__name__ for name, module in net.named_modules() if module.training]
    if training:
        raise ExportError(f"export_onnx writes inference, and {training[0]!r} is in training mode; call net.eval() first")
    hooked = host.foreign_hooks(net)
    if hooked:
        raise ExportError(
            f"forward hooks of yours hang on {hooked[:3]}: what they do would be written into the graph, or left out of it; "
            "remove them first (of pruning and weight_norm with torch.nn.utils.prune.remove and remove_weight_norm)"
        )
    for name, module in net.named_modules():
        dtype = module.sharing.dtype if isinstance(module, SharedConv) else None
        if dtype not in (None, torch.int8):
            raise ExportError(f"layer {name!r} computes in {dtype}, and ONNX files are float32; convert without dtype")
    given = [x for x in arguments if isinstance(x, Tensor)]
    if not given or len(given) != len(arguments):
        raise InputError(
            f"export_onnx takes tensors as the example, got {[type(x).__name__ for x in arguments]}; a graph has no other "
            "inputs"
        )
    if batch_dim is not None and (len(given) != 1 or not 0 <= batch_dim < given[0].dim()):
        raise InputError(
            f"batch_dim={batch_dim} is a dimension of the one tensor that the net takes, counted from 0; got tensors of "
            f"{[list(x.shape) for x in given]}"
        )


def _one_more(arguments: tuple[Tensor, ...], dim: int) -> tuple[Tensor, ...]:
    """The example with its first sample once more at the end."""
    (x,) = arguments
    return (torch.cat([x, x.narrow(dim, 0, 1)], dim),)


def _neurons(net: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in net.named_modules() if isinstance(module, host.neuron.BaseNode)}


class _Probed(nn.Module):
    """A net that also gives what each of its neurons put out, in the order of the calls."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.seen: list[Tensor] = []
        self.handles = [module.register_forward_hook(self._see) for module in _neurons(net).values()]

    def _see(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.seen += [x[:] for x in tensors(output)]

    def forward(self, *arguments: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        self.seen.clear()
        return tensors(self.net(*arguments)), list(self.seen)


@contextlib.contextmanager
def _probed(net: nn.Module) -> Iterator[_Probed]:
    """The net at rest, with hooks on its neurons."""
    host.reset_memories(net)
    probed = _Probed(net)
    try:
        yield probed
    finally:
        for handle in probed.handles:
            handle.remove()
        host.reset_memories(net)


def _own_call(net: nn.Module, arguments: tuple[Tensor, ...]) -> list[Tensor]:
    """Outputs of the net's own call."""
    host.reset_memories(net)
    return [x.clone() for x in tensors(net(*copied(arguments)))]


def _defined_call(net: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of the net's definition, and of its neurons."""
    with as_defined(), _probed(net) as probed:
        out, seen = probed(*copied(arguments))
        return [x.clone() for x in out], [x.clone() for x in seen]


def _exported(net: nn.Module, arguments: tuple[Tensor, ...], batch_dim: int | None) -> Any:
    """The net's definition and its neurons' spikes as a program of torch.export, without operators of sj_tac."""
    shapes = None if batch_dim is None else (({batch_dim: torch.export.Dim("N", min=1)},),)
    with _probed(net) as probed, warnings.catch_warnings():
        # A neuron's voltage is assigned in its forward, which is what it is for. Every run of the graph begins at rest.
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(probed, copied(arguments), dynamic_shapes=shapes, strict=False)
        except Exception as error:
            free = "" if batch_dim is None else f"; batch_dim={batch_dim} wants a forward that does not ask for N's number"
            raise ExportError(
                f"torch.export cannot follow the forward of {type(net).__name__} ({_brief(error)}): nothing in it may "
                f"hang on the content of tensors{free}"
            ) from error


def _translated(program: Any, opset: int | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = torch.onnx.export(program, dynamo=True, opset_version=opset, optimize=False, verbose=False)
            assert found is not None
            optimizer = importlib.import_module("onnxscript.optimizer")
            # torch would look for patterns to rewrite, too: a third of the time, and onnxruntime is no faster for it.
            optimizer.inline(found.model)
            optimizer.fold_constants_ir(found.model)
            optimizer.remove_unused_nodes(found.model)
        except Exception as error:
            raise ExportError(f"torch.onnx cannot write this net down ({_brief(error)})") from error
    return found.model


def _brief(error: BaseException) -> str:
    """The first line of what is at the bottom of an error that says a lot."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    return f"{type(root).__name__}: {lines[0][:300] if lines else ''}"


def _name(model: Any, net: nn.Module, outputs: int, batch_dim: int | None) -> None:
    """Name inputs after forward's parameters, outputs in order, the free dimension N; and forget whose machine it was."""
    parameters = [*inspect.signature(net.forward).parameters.values()]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for i, value in enumerate(model.graph.inputs):
        value.name = names[i] if i < len(names) else f"input_{i}"
    for i, value in enumerate(model.graph.outputs):
        # The spikes that stand behind the outputs are there for the comparison alone.
        value.name = f"spikes_{i - outputs}" if i >= outputs else "output" if outputs == 1 else f"output_{i}"
    free = None if batch_dim is None else str(model.graph.inputs[0].shape[batch_dim].value)
    for node in model.graph:
        node.metadata_props.pop(_TRACE, None)
    if free is not None:
        made = (value for node in model.graph for value in node.outputs)
        for value in (*model.graph.inputs, *made):
            for i, size in enumerate(value.shape or ()):
                if not isinstance(size, int):
                    value.shape[i] = re.sub(rf"\b{re.escape(free)}\b", "N", str(size.value))


def _drop(model: Any, outputs: int) -> None:
    """Take the spikes off the graph, and what made nothing else."""
    passes: Any = importlib.import_module("onnx_ir.passes.common")
    del model.graph.outputs[outputs:]
    passes.RemoveUnusedNodesPass()(model)


def _serialised(model: Any) -> bytes:
    ir: Any = importlib.import_module("onnx_ir")
    try:
        content: bytes = ir.serde.serialize_model(model).SerializeToString()
    except Exception as error:  # protobuf's own, of files above 2 GiB
        raise ExportError(f"the graph does not fit into one ONNX file ({_brief(error)})") from error
    return content


def _run(content: bytes, arguments: tuple[Tensor, ...]) -> list[Tensor]:
    """What onnxruntime computes, on the CPU."""
    runtime: Any = importlib.import_module("onnxruntime")
    try:
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        given = {name: x.detach().cpu().numpy() for name, x in zip(names, arguments, strict=True)}
        return [torch.from_numpy(found) for found in session.run(None, given)]
    except Exception as error:
        raise ExportError(f"onnxruntime does not run the graph ({_brief(error)})") from error


def _compare_spikes(own: list[Tensor], found: list[Tensor], names: list[str], tolerance: float) -> list[int]:
    """How many spikes of each neuron differ. Raises ExportError where that is more than the tolerance."""
    shapes = [[list(x.shape) for x in some] for some in (own, found)]
    if shapes[0] != shapes[1]:
        raise ExportError(f"the graph's neurons put out {shapes[1]}, the net's {shapes[0]} ({names}); please report this")
    counts = [int((a.cpu() != b).sum()) for a, b in zip(own, found, strict=True)]
    differing, total = sum(counts), sum(x.numel() for x in own)
    if differing > tolerance * total:
        first = next(i for i, count in enumerate(counts) if count)
        where = f"neuron {names[first]!r}" if len(names) == len(counts) else f"the neuron called as number {first}"
        raise ExportError(
            f"{differing:,} of {total:,} spikes differ between the graph and the net, first in {where} "
            f"({counts[first]:,} of {own[first].numel():,}), more than tolerance={tolerance:g}; a forward with random "
            "numbers of its own differs from call to call, and a net near chaos makes many of a few"
        )
    return counts


def _compare_outputs(own: list[Tensor], defined: list[Tensor], found: list[Tensor], tipped: bool) -> float:
    """The largest difference to the net's own output. Raises ExportError where the graph is another function.

    Args:
        defined: the outputs of the definition, whose spikes were compared; tipped: some of those differ.
    """
    largest = 0.0
    for a, b, c in zip(own, defined, found, strict=True):
        if a.shape != c.shape or a.dtype != c.dtype:
            raise ExportError(
                f"the graph puts out {list(c.shape)} of {c.dtype}, the net {list(a.shape)} of {a.dtype}; what the net puts "
                "out hangs on more than its modules; please report this"
            )
        gap = _gap(b, c)
        # NaN is no number below any bound.
        if not tipped and not gap <= 1e-3 * max(1.0, float(b.double().abs().max())):
            raise ExportError(
                f"the outputs differ by {gap:.3g}, and no spike does; what stands behind the neurons is another"
            )
        largest = max(largest, _gap(a, c))
    return largest


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference; 0 of equal tensors, also of infinite ones."""
    a = a.cpu()
    return 0.0 if torch.equal(a, b) else float((a.double() - b.double()).abs().max())


def _shapes(values: Any) -> dict[str, list[int | str]]:
    return {value.name: _shape(value) for value in values}


def _shape(value: Any) -> list[int | str]:
    return [size if isinstance(size, int) else str(size.value) for size in value.shape or ()]


def _convolutions(model: Any) -> dict[str, list[list[int | str]]]:
    """The input shapes of every Conv, by the module that it comes from."""
    found: dict[str, list[list[int | str]]] = {}
    for node in model.graph:
        if node.op_type in _CONVOLUTIONS:
            # From the root to the operation; the net is the submodule "net" of what was exported.
            scopes = literal_eval(node.metadata_props.get(_SCOPES, "['net.?', '']"))
            layer = scopes[-2].removeprefix("net.") if len(scopes) > 1 else "?"
            found.setdefault(layer, []).append(_shape(node.inputs[0]))
    return found
