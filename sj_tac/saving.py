"""A converted net as one file without code: its state_dict, its policy, and what was calibrated."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sj_tac import batchnorm, host
from sj_tac.definition.classes import Swapped
from sj_tac.definition.convs import SharedConv
from sj_tac.errors import CheckpointError, ConversionError, refuse_unknown
from sj_tac.operators import TAC, TACTP
from sj_tac.policy import SOURCE, Policy, Settings, nearest
from sj_tac.rewrites import calibration
from sj_tac.rewrites.decide import Span
from sj_tac.rewrites.pipeline import RECORD, Record, check_plain, convert_with, deep_copy, policy_of, record_of, undo
from sj_tac.support import archive, machine
from sj_tac.support.manifest import FORMAT, Corrected, Manifest, parse
from sj_tac.support.tensors import aliases, apart, restride, strides, tie

# What a class fixes and no state_dict holds, of the layers of torch and of SpikingJelly.
_LIBRARIES = ("torch.nn.", "spikingjelly.")
_CONSTANTS = (
    "stride", "padding", "output_padding", "dilation", "groups", "padding_mode", "kernel_size", "ceil_mode", "output_size",
    "eps", "v_threshold", "v_reset", "tau", "decay_input",
)  # fmt: skip


class LoadOptions(TypedDict, total=False):
    """What ``load`` takes by keyword beside how to convert."""

    device: torch.device | str | None
    cast: bool
    inplace: bool


def save(net: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a converted net as one file of plain tensors and text; no code is pickled.

    The file has the net's state_dict, key by key (aggregation weights that are learned among them), its policy as it now is,
    and what was calibrated: the corrections of ``match`` and ``recalibrate`` with what was there before, and frozen
    BatchNorms. It has no voltages, no optimizer and no evidence of a search: as with any state_dict, reset the net. Tied
    tensors are written once, memory formats are kept. The same net gives the same bytes. A checksum of the tensors
    is written, too, which ``load`` compares.

    Args:
        net: a converted net, or one that was written by hand with ``TAC`` and ``TACTP``.
        path: "net.safetensors", which safetensors reads, or "net.pt" ("net.pth"), which ``torch.load(weights_only=True)``
            reads, with the state_dict under "state_dict".

    Raises:
        CheckpointError: another suffix, or what no plain tensor can hold.
        ConversionError: not a converted net.
        WriteError: the system could not write it. A file that stood at ``path`` is then as it was.
    """
    record = _record(net, "save")
    held = net.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = {key: value for key, value in held.items() if isinstance(value, Tensor)}
    _refuse_lazy(tensors)
    tied = aliases(tensors)
    more = {}
    corrected = {} if record is None else record.corrected
    for name, correction in corrected.items():
        for key in correction.before:
            more[f"before:{name}:{key}"], more[f"after:{name}:{key}"] = correction.before[key], correction.after[key]
    norms = {name: norm._tac for name, norm in batchnorm.norms(net).items()}
    manifest = Manifest(
        format=FORMAT,
        model=type(net).__name__,
        versions={name: machine.version_of(name) or "unknown" for name in ("sj_tac", "torch", "spikingjelly")},
        policy=None if record is None else policy_of(net).to_dict(),
        fused=record is None or record.plan.fused,
        layers=_layers(net, record),
        constants=_constants(net),
        tied=tied,
        strides={key: by for key, value in tensors.items() if (by := strides(value))},
        extra={key: _as_text(value, key) for key, value in held.items() if key not in tensors},
        local={key: _as_text(value, f"metadata of {key}") for key, value in getattr(held, "_metadata", {}).items()},
        frozen=[name for name, noted in norms.items() if noted.frozen],
        moved=[name for name, noted in norms.items() if noted.moved],
        corrected={n: Corrected(by=c.by, moved=c.moved, names=list(c.before)) for n, c in corrected.items()},
        matched="" if record is None else record.matched,
        notes=[] if record is None else list(record.notes),
        freezes=record is not None and record.frozen and not any(noted.frozen for noted in norms.values()),
    )

    def text(checksum: str) -> str:
        # Older versions know no ``freezes``, and read what does not need it.
        values = manifest.model_dump(exclude=None if manifest.freezes else {"freezes"})
        return json.dumps(values | {"checksum": checksum}, sort_keys=True)

    archive.write(path, {k: t for k, t in tensors.items() if k not in tied}, more, text)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    example_input: Any = None,
    backend: str = "auto",
    **options: Unpack[LoadOptions],
) -> nn.Module:
    """Convert a model as the net in the file was, and give it that net's state, strictly.

    Args:
        path: what ``sj_tac.save`` wrote.
        model: a fresh model of the net's class, built as that was, in step_mode "m"; left untouched. Of a net written by
            hand: the same by hand.
        example_input: as in ``sj_tac.convert``; a net that needed it there needs it here.
        backend: as in ``sj_tac.convert``.

    Keyword Args:
        device: where the net goes; default: where the model is.
        cast: give the values the model's dtypes where these are others; default False: that is an error.
        inplace: change ``model`` itself; needed where it cannot be deep-copied. It is as it was where an error is raised.

    Returns:
        The net, in the model's training mode, at rest.

    Raises:
        CheckpointError: a file that is cut off, damaged (in a single bit of a tensor, too), not of ``sj_tac.save``, or of
            a newer version; or a model of other keys, shapes, dtypes, shared tensors or constants (v_threshold, stride ...).
        ModelTypeError: ``model`` is no ``torch.nn.Module``.
        TraceError: as ``sj_tac.convert``.
        PolicyError: as ``sj_tac.convert``.
        ConversionError: as ``sj_tac.convert``, of a model that cannot be converted so.
        BackendError: as ``sj_tac.convert``.
    """
    refuse_unknown("load", options, LoadOptions.__annotations__)
    content = archive.read(path)
    manifest = parse(path, content.text)
    _check_sum(path, manifest, content)
    target = _prepared(path, manifest, model, example_input, backend, options.get("inplace", False))
    with _as_it_was(target, target is model and manifest.policy is not None):
        state = _state(path, manifest, content, target, options.get("cast", False))
        layers = _layers(target, target.__dict__.get(RECORD))
        differ = sorted(manifest.layers.keys() ^ layers.keys())
        if differ:
            raise CheckpointError(
                f"{path} does not fit the model: layer {differ[0]!r} is converted, or runs behind a collapse, in one of "
                "them alone; pass the example_input that the net was converted with, or none as then"
            )
        _compare(path, "the net's layer", manifest.layers, layers)
        _compare(path, "the net's", manifest.constants, _constants(target))
        corrected = calibration.corrections(path, manifest, content, target)
        calibration.prepare_norms(path, manifest, target)
    try:
        target.load_state_dict(state)
    except RuntimeError as error:  # of a load_state_dict of the user's own
        raise CheckpointError(f"{path} does not fit the model: {' '.join(str(error).split())[:600]}") from error
    held = target.state_dict(keep_vars=True)
    for key, tensor in held.items():
        if isinstance(tensor, Tensor):
            restride(tensor, manifest.strides.get(key))
    for key, (first, same) in manifest.tied.items():
        tie(target, key, held[first], same)
    calibration.put(target, manifest, corrected)
    device = options.get("device")
    return target if device is None else target.to(device)


def _check_sum(path: Any, manifest: Manifest, content: archive.Content) -> None:
    """Raise CheckpointError where the tensors are not those that were written; format 1 cannot say."""
    if manifest.checksum and archive.checksum(content.state, content.more) != manifest.checksum:
        raise CheckpointError(
            f"{path} is damaged: its tensors are not those that were written (their checksum is another one); copy the file "
            "again, or save the net again"
        )


def _record(net: Any, action: str) -> Record | None:
    """What a converted net carries; None of one that was written by hand. Raises ConversionError, ModelTypeError."""
    inner = (
        isinstance(net, nn.Module) and RECORD not in net.__dict__ and not any(RECORD in m.__dict__ for m in net.modules())
    )
    if inner and any(isinstance(m, (TAC, TACTP)) for m in net.modules()):
        return None
    return record_of(net, action)


def _refuse_lazy(tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor):
            raise CheckpointError(f"save: {key!r} has no shape yet; run the net once")


def _layers(net: nn.Module, record: Record | None) -> dict[str, dict[str, Any]]:
    """What converted layers do, and at which rate others run behind a collapse."""
    if record is None:
        operators = {name: m for name, m in net.named_modules() if isinstance(m, (TAC, TACTP))}
        return {
            f"{name}.conv".lstrip("."): _said(m.settings, Span(1, m.stretch)) | {"emit": m.settings.emit}
            for name, m in operators.items()
        }
    modules, found = dict(net.named_modules()), {}
    for name, place in record.plan.places.items():
        if name in modules and parametrize.is_parametrized(modules[name]) and not hasattr(modules[name], "_is_made_of"):
            raise CheckpointError(
                f"save: layer {name!r} was parametrized after it was converted, which a fresh model cannot be made to be; "
                "torch.nn.utils.parametrize.remove_parametrizations first"
            )
        if not isinstance(modules.get(name), SharedConv):
            raise CheckpointError(
                f"save: layer {name!r} was converted, and another module stands there now; a fresh model could not be made "
                "the same. sj_tac.restore the net, and convert it as it is now"
            )
        found[name] = _said(place.settings, place.span)
        if place.settings.dtype != SOURCE:
            found[name]["dtype"] = f"torch.{place.settings.dtype}"
    for name, span in record.plan.stretched.items():
        found[name] = _said(None, span)
    return found


def _said(settings: Settings | None, span: Span) -> dict[str, Any]:
    """What a layer does, of a converted one or of one that is kept, in the words of files of format 1."""
    rate = {"merged": span.rate, "stretch": span.stretch}
    if settings is None:
        return {"mode": "stretched"} | rate
    return settings.model_dump(include={"mode", "k", "weights", "normalize", "spikes"}) | rate


def _constants(net: nn.Module) -> dict[str, dict[str, Any]]:
    """What a class fixed of each layer of a library: a stride, a threshold."""
    found = {}
    for name, module in net.named_modules():
        # The first that a conversion did not put there.
        kind: Any = next(c for c in type(module).__mro__ if not issubclass(c, Swapped))
        kind = host.known_class(kind)
        if not f"{kind.__module__}.".startswith(_LIBRARIES):
            continue
        # What a state_dict has is loaded, not compared.
        loaded = {
            **module._parameters,
            **{n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set},
        }
        held = {key: _constant(getattr(module, key)) for key in _CONSTANTS if hasattr(module, key) and key not in loaded}
        plain = {key: value for key, value in held.items() if value is not Ellipsis}
        if isinstance(module, host.neuron.BaseNode):
            plain["neuron"] = kind.__name__
        if plain:
            found[name] = plain
    return found


def _constant(value: Any) -> Any:
    """A constant as JSON has it; Ellipsis of what is none."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(v, (bool, int, float, str, type(None))) for v in value):
        return list(value)
    if isinstance(value, torch.Tensor) and value.numel() <= 4096 and not value.is_complex():
        return value.tolist()
    return Ellipsis


def _alike(a: Any, b: Any) -> bool:
    """Equal, or numbers that are as near as a float32 is to what was written into it."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_alike, a, b))
    numbers = all(type(x) in (int, float) for x in (a, b))
    return bool(a == b or (numbers and math.isclose(a, b, rel_tol=1e-6)))


def _as_text(value: Any, key: str) -> Any:
    """A value that JSON gives back as it was. Raises CheckpointError."""
    try:
        if json.loads(json.dumps(value)) == value:
            return value
    except (TypeError, ValueError, RecursionError):
        pass
    raise CheckpointError(
        f"save: {key!r} of the state_dict is a {type(value).__name__} that text cannot hold; a tensor, or dicts of names, "
        "lists, numbers and text can be written (pickled objects are not)"
    )


def _prepared(path: Any, manifest: Manifest, model: Any, example_input: Any, backend: str, inplace: bool) -> nn.Module:
    """The model, converted by the file's policy; of a net that was written by hand, as it is."""
    if manifest.policy is not None:
        check_plain(model)
    elif _record(model, "load") is not None:
        raise ConversionError(f"load: {path} holds a net that was written by hand, and the model is a converted one")
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise CheckpointError(f"load: {key!r} of the model is on the meta device; model.to_empty(device='cpu') first")
    if manifest.policy is not None:
        policy = Policy.from_dict(manifest.policy, f"the policy in {path}")
        return convert_with(
            model, policy, example_input=example_input, backend=backend, fuse=manifest.fused, inplace=inplace
        )
    target: nn.Module = model
    if inplace:
        return target
    target = deep_copy(model)
    host.reset(target)
    return target


@contextmanager
def _as_it_was(target: nn.Module, converted: bool) -> Iterator[None]:
    """Undo a conversion in place where the file does not fit."""
    try:
        yield
    except BaseException:
        if converted:
            undo(target)
            delattr(target, RECORD)
        raise


def _compare(path: Any, what: str, saved: Mapping[str, Mapping[str, Any]], here: Mapping[str, Mapping[str, Any]]) -> None:
    for name in saved.keys() & here.keys():
        for key, value in saved[name].items():
            if key in here[name] and not _alike(here[name][key], value):
                raise CheckpointError(
                    f"{path} does not fit the model: {what} {name!r} has {key}={value!r}, and this model {key}="
                    f"{here[name][key]!r}; build the model as the net was built"
                )


def _state(path: Any, manifest: Manifest, content: archive.Content, target: nn.Module, cast: bool) -> Any:
    """The state_dict to load, after a look whether all of it fits."""
    held = target.state_dict(keep_vars=True)
    found: dict[str, Any] = {**content.state, **manifest.extra}
    for key, (first, _) in manifest.tied.items():
        if first not in content.state:
            raise CheckpointError(f"{path}: {key!r} is to be {first!r}, which it does not have; it is damaged")
        found[key] = content.state[first]
    missing, unknown = [key for key in held if key not in found], [key for key in found if key not in held]
    if missing or unknown:
        names = [f"it has no {missing[:5]}"] if missing else []
        names += [f"the model has no {unknown[:5]} ({nearest(unknown[0], held)})"] if unknown else []
        raise CheckpointError(f"{path} ({manifest.model}) does not fit this {type(target).__name__}: {'; '.join(names)}")
    for key, value in held.items():
        _check_tensor(path, key, found[key], value, cast)
    shared = apart(aliases({k: v for k, v in held.items() if isinstance(v, Tensor)}), manifest.tied)
    if shared:
        raise CheckpointError(f"{path} does not fit the model: it shares one tensor for {shared}, which the net had apart")
    state = type(held)((key, found[key]) for key in held)
    state._metadata = {key: dict(value) for key, value in manifest.local.items()}  # type: ignore[attr-defined]
    return state


def _check_tensor(path: Any, key: str, value: Any, wanted: Any, cast: bool) -> None:
    if not isinstance(value, Tensor) or not isinstance(wanted, Tensor):
        if isinstance(value, Tensor) is not isinstance(wanted, Tensor):
            raise CheckpointError(f"{path} does not fit the model: {key!r} is a tensor in one of them alone")
        return
    if any(size > 1 and step == 0 for size, step in zip(wanted.shape, wanted.stride(), strict=True)):
        raise CheckpointError(
            f"load: {key!r} of the model is expanded, which torch does not write to; register its .clone()"
        )
    if value.shape != wanted.shape:
        raise CheckpointError(
            f"{path} does not fit the model: {key!r} is {list(value.shape)} there, and {list(wanted.shape)} in the model"
        )
    if value.dtype != wanted.dtype and not cast:
        raise CheckpointError(
            f"{path} does not fit the model: {key!r} is {value.dtype} there, and {wanted.dtype} in the model; give the "
            f"model that dtype first (model.to({value.dtype})), or cast=True, which rounds where it must"
        )
