"""Checkpoints whose keys are those of another version, or another wrapper, of the same model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sj_tac.errors import ConversionError, ModelTypeError

# Where training scripts put the state dict in what they save.
WRAPPERS = ("state_dict", "model", "model_state_dict", "net", "state_dict_ema", "model_ema")
# Levels that a wrapper adds to a key: DataParallel's and the old SeqToANNContainer's "module", torch.compile's "_orig_mod".
LEVELS = ("module", "_orig_mod")
_COUNTER = "num_batches_tracked"
_SHOWN = 12


def remap_keys(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The tensors of an older checkpoint under the keys of ``model``, for ``model.load_state_dict(..., strict=True)``.

    A key that ``model`` has stays. Of any other, levels named ``module`` (DataParallel's in front, and those of the older
    ``SeqToANNContainer``, ``layer1.module.0.weight``) or ``_orig_mod`` (torch.compile's) are left out or put in, where that
    gives a key of ``model``. Nothing is dropped, and ``num_batches_tracked`` that torch's BatchNorm did not save yet may be
    missing. How many keys were renamed goes to the logger "sj_tac.compat.keys".

    Args:
        state_dict: a state dict, or what a training script saved around one (``{"state_dict": ...}``, ``"model"``,
            ``"net"``, ...; a whole checkpoint with optimizer and epoch, too).
        model: the model that the keys are for; it is left as it is.

    Raises:
        ModelTypeError: ``model`` is no module.
        ConversionError: keys are left over or missing, two become one, a shape differs, or ``state_dict`` holds no
            tensors. The message names the keys.
    """
    if not isinstance(model, nn.Module):
        raise ModelTypeError(
            f"model is a {type(model).__name__}, not a torch.nn.Module: pass the model that the keys are for"
        )
    given, wanted = _unwrapped(state_dict), model.state_dict()
    found, wrong = _match(given, wanted)
    counted = any(key.endswith(_COUNTER) for key in given)
    for key, value in wanted.items():
        if key not in found:
            if counted or not key.endswith(_COUNTER):
                wrong.append(f"{key} of the model is missing")
        elif isinstance(value, torch.Tensor) and _shape(given[found[key]]) != _shape(value):
            wrong.append(f"{found[key]} has shape {_shape(given[found[key]])}, {key} of the model {_shape(value)}")
    if wrong:
        more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
        raise ConversionError(
            f"{len(wrong)} of the checkpoint's {len(given)} and the model's {len(wanted)} keys do not fit "
            f"{type(model).__name__}: {'; '.join(wrong[:_SHOWN])}{more}. Build the model with the arguments it was "
            "trained with, or rename these first"
        )
    renamed = sum(old != new for new, old in found.items())
    logging.getLogger(__name__).info("renamed %d of %d keys for %s", renamed, len(given), type(model).__name__)
    # Counters that were never saved begin where the model's do.
    return {key: given[found[key]] if key in found else value for key, value in wanted.items()}


def _match(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Which given key is which of the model's, and what is wrong with the others."""
    bare: dict[str, list[str]] = {}
    for key in wanted:
        bare.setdefault(_bare(key), []).append(key)
    found: dict[str, str] = {}
    wrong: list[str] = []
    for key in given:
        # Two keys of the model may differ in such a level alone; then only the exact name will do.
        candidates = [key] if key in wanted else bare.get(_bare(key), [])
        if len(candidates) != 1:
            wrong.append(f"{key} {'may be any of ' + ', '.join(candidates) if candidates else 'is not in the model'}")
        elif candidates[0] in found:
            wrong.append(f"{key} and {found[candidates[0]]} both become {candidates[0]}")
        else:
            found[candidates[0]] = key
    return found, wrong


def _bare(key: str) -> str:
    return ".".join(level for level in key.split(".") if level not in LEVELS)


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _unwrapped(given: Any) -> Mapping[str, Any]:
    """The state dict in what was saved: itself, or what lies under one of the usual names."""
    if not isinstance(given, Mapping):
        what = f"a {type(given).__name__}"
        hint = "pass its state_dict()" if isinstance(given, nn.Module) else "pass what torch.load gave, or its state dict"
        raise ConversionError(f"state_dict is {what}, not a dict of tensors: {hint}")
    inside = [name for name in WRAPPERS if isinstance(given.get(name), Mapping)]
    if len(inside) > 1:
        raise ConversionError(f"the checkpoint holds several state dicts ({', '.join(inside)}): pass the one you want")
    if inside:
        return _unwrapped(given[inside[0]])
    odd = [str(key) for key, value in given.items() if not (isinstance(key, str) and _is_saved(key, value))]
    if not given or odd:
        raise ConversionError(
            f"state_dict holds {'nothing' if not given else 'no tensor under ' + ', '.join(odd[:_SHOWN])}, and no state "
            f"dict under {', '.join(WRAPPERS)}: pass the part of the checkpoint that model.state_dict() wrote"
        )
    return given


def _is_saved(key: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) or key.endswith("_extra_state")
