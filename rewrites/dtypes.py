"""Which layers may run their convolution in half precision, and why others may not."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sj_tac.errors import BackendFallbackWarning, PolicyError
from sj_tac.kernels.cpu import int8
from sj_tac.policy import SOURCE, Rule, Settings
from sj_tac.rewrites.measure.measured import Shared
from sj_tac.verdicts import Refusal, Verdict

INT8 = "int8"
# What Linux calls the instructions of processors, x86's and Arm's, that multiply in a dtype.
_INSTRUCTIONS = {"bfloat16": ("avx512_bf16", "amx_bf16", "bf16"), "float16": ("avx512_fp16", "amx_fp16", "asimdhp")}
# The first CUDA devices that multiply in it.
_CAPABILITY = {"bfloat16": (8, 0), "float16": (5, 3)}


@cache
def _features() -> frozenset[str]:
    """Words of the processor's features; none where the system has no such list."""
    listed = Path("/proc/cpuinfo")
    return frozenset(listed.read_text().split()) if listed.exists() else frozenset()


def computes_in(dtype: str, device: torch.device) -> bool:
    """Whether a device has instructions for a dtype of floating point; other kinds than CPUs and CUDA's are said to."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _CAPABILITY[dtype]
    return device.type != "cpu" or not _features().isdisjoint(_INSTRUCTIONS[dtype])


def decided(
    model: nn.Module,
    chains: Mapping[str, Shared | Refusal],
    resolved: Mapping[str, tuple[Settings, Rule | None]],
    source: str,
    fused: bool,
) -> tuple[dict[str, Settings], dict[str, str]]:
    """Settings whose ``dtype`` is what a layer's convolution will run in; and by layer why that is not what was asked for.

    Raises:
        PolicyError: a rule names a layer whose convolution cannot run in its dtype.
    """
    settings, wide = {}, {}
    for name, (found, rule) in resolved.items():
        settings[name] = found
        if found.dtype == SOURCE:
            continue
        named, module = rule is not None and rule.is_exact, model.get_submodule(name)
        if not isinstance(chains[name], Shared) or found.mode == "keep":
            pass
        elif why := _impossible(module, found.dtype, fused):
            if named:
                raise PolicyError(f"{source}, rule for {name!r}: dtype: {found.dtype} is impossible there: {why}")
            wide[name] = why
        elif not (named or found.dtype == INT8 or computes_in(found.dtype, device := next(module.parameters()).device)):
            kind = "CPU" if device.type == "cpu" else f"device ({device})"
            why = f"this {kind} has no {found.dtype} instructions, so that it would be slower"
            wide[name] = f"{why}; a rule with the layer's exact name has it all the same"
        else:
            continue
        settings[name] = found.model_copy(update={"dtype": SOURCE})
    return settings, wide


def wide(why: str) -> str:
    """Return what a verdict says of a layer that computes in the net's dtype, although it was to compute in another."""
    return f"in the net's dtype: {why}"


def tell(asked: Mapping[str, str], converted: Collection[str]) -> None:
    """Warn where no converted layer runs in int8 although all were to. asked: by layer, why it does not."""
    why = {asked.get(name, "") for name in converted}
    if len(why) == 1 and INT8 in (told := why.pop()):
        warnings.warn(f"no layer runs in int8: {told}", BackendFallbackWarning, stacklevel=4)


def as_captured(verdicts: Iterable[Verdict], graphs: Iterable[Any]) -> Iterator[Verdict]:
    """Yield verdicts in the dtype that layers were captured in: in int8 where a graph runs them so."""
    seen = [graph.float32() for graph in graphs]
    for verdict in verdicts:
        why = [found[verdict.layer] for found in seen if verdict.layer in found]
        if verdict.dtype == INT8 and seen and all(why):
            detail = "; ".join(filter(None, (verdict.detail, wide(why[-1] if why else "no captured call shares it"))))
            verdict = replace(verdict, dtype=SOURCE, detail=detail)
        yield verdict


def _impossible(module: Any, dtype: str, fused: bool) -> str:
    """Why a convolution cannot run in ``dtype``, on any machine, or in int8 on this one; else empty."""
    if dtype == INT8:
        device = next(module.parameters()).device
        if device.type != "cpu" or not fused:
            return f"int8 runs on a CPU, not on {device}" if fused else "int8 is for kernels, and fuse=False has none"
        if problem := int8.problem():
            return problem
    if not (hasattr(module, "_conv_forward") or isinstance(module, nn.Linear)):
        return f"it is a {type(module).__name__}, whose own forward would have to round"
    if module.weight.dtype != torch.float32:
        return f"its weights are {module.weight.dtype}, and only float32 ones are rounded"
    return ""
