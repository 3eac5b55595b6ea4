"""What a file says of a net's calibration, put into a net that was converted as the file's was."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from sj_tac.definition import noted
from sj_tac.errors import CheckpointError
from sj_tac.rewrites.corrections import Correction
from sj_tac.rewrites.pipeline import RECORD
from sj_tac.support import archive
from sj_tac.support.manifest import Manifest


def corrections(path: Any, manifest: Manifest, content: archive.Content, target: nn.Module) -> dict[str, Correction]:
    """What ``match`` and ``recalibrate`` had written. Raises CheckpointError."""
    modules, found = dict(target.named_modules()), {}
    for name, said in manifest.corrected.items():
        tensors: dict[Literal["before", "after"], dict[str, Tensor]] = {"before": {}, "after": {}}
        for when, values in tensors.items():
            for key in said.names:
                value = content.more.get(f"{when}:{name}:{key}")
                own = getattr(modules.get(name), key, None)
                if value is None or not isinstance(own, Tensor) or value.shape != own.shape:
                    raise CheckpointError(
                        f"{path}: what {key!r} of {name!r} was {when} it was corrected does not fit; damaged"
                    )
                values[key] = value
        found[name] = Correction(said.by, tensors["before"], tensors["after"], said.moved)
    return found


def prepare_norms(path: Any, manifest: Manifest, target: nn.Module) -> None:
    """Let BatchNorms that ``set_k`` gave single frames again keep what is said of them. Raises CheckpointError."""
    said = dict.fromkeys([*manifest.frozen, *manifest.moved])
    if RECORD in target.__dict__:
        matched = [name for name, local in manifest.local.items() if noted.MATCHED in local]
        noted.remember(target, {*said, *matched, *manifest.corrected})
    modules = dict(target.named_modules())
    lost = [name for name in said if not isinstance(modules.get(name), noted.NotedNorm)]
    if lost:
        raise CheckpointError(f"{path} does not fit the model: {lost[0]!r} is no BatchNorm of a converted layer")


def put(target: nn.Module, manifest: Manifest, corrected: dict[str, Correction]) -> None:
    """Write down in a loaded net what was frozen, moved, corrected and matched."""
    for name, module in target.named_modules():
        if isinstance(module, noted.NotedNorm):
            notes = module._tac
            notes.frozen, notes.moved = name in manifest.frozen, name in manifest.moved
            if notes.frozen:
                module.train(target.training)
    record = target.__dict__.get(RECORD)
    if record is not None:
        record.corrected.update(corrected)
        record.matched, record.notes = manifest.matched, tuple(manifest.notes)
        record.frozen = manifest.freezes or bool(manifest.frozen)
