"""Files of plain tensors and one text: safetensors, or what ``torch.load(weights_only=True)`` reads. No code in either."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sj_tac.errors import CheckpointError
from sj_tac.support.files import write_whole

SAFETENSORS, TORCH = (".safetensors",), (".pt", ".pth")
KEY = "sj_tac"
# In front of the names of tensors that are not the net's own, where a file has no folders.
MORE = "sj_tac:"
_ZIP = b"PK\x03\x04"


class Content(NamedTuple):
    """What such a file holds: a state_dict's tensors, other tensors, and a text that says what both are."""

    state: dict[str, Tensor]
    more: dict[str, Tensor]
    text: str


def checksum(state: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> str:
    """SHA-256 of plain tensors: names, dtypes, shapes and every byte, in the order of names."""
    found = hashlib.sha256()
    for kind, tensors in (("state_dict", state), ("more", more)):
        for name in sorted(tensors):
            tensor = tensors[name]
            found.update(repr((kind, name, str(tensor.dtype), list(tensor.shape))).encode())
            found.update(_bytes_of(tensor))
    return f"sha256:{found.hexdigest()}"


def _bytes_of(tensor: Tensor) -> Any:
    """What a tensor holds, as memory that hashlib reads without a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def write(
    path: str | os.PathLike[str], state: Mapping[str, Tensor], more: Mapping[str, Tensor], text: Callable[[str], str]
) -> None:
    """Write all or nothing; the suffix says which kind of file. Twice the same content gives the same bytes.

    Args:
        state, more, text: as in ``Content``; the text is made of the tensors' ``checksum``.

    Raises:
        CheckpointError: another suffix, or a tensor that cannot be written. WriteError: the system could not write it.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (*SAFETENSORS, *TORCH):
        raise CheckpointError(
            f"{path}: the suffix says what is written: {', '.join(SAFETENSORS)} (safetensors), or {', '.join(TORCH)} "
            "(read by torch.load with weights_only=True)"
        )
    state, more = _plain(state, path), _plain(more, path)
    content = Content(state, more, text(checksum(state, more)))
    made = _safetensors(content, path) if suffix in SAFETENSORS else _torch(content)
    write_whole(path, lambda draft: draft.write_bytes(made))


def _plain(tensors: Mapping[str, Tensor], path: Any) -> dict[str, Tensor]:
    """Contiguous copies on the CPU, none of which shares memory with another."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            what = "on the meta device, without values" if tensor.device.type == "meta" else f"of layout {tensor.layout}"
            raise CheckpointError(f"{path}: {name!r} is a tensor {what}; only plain, dense tensors can be written")
        # Of the memory it has, nothing but itself is written.
        found[name] = tensor.detach().cpu().contiguous().clone()
    return found


def _torch(content: Content) -> bytes:
    file = io.BytesIO()  # into a file of a name, torch writes the name as well
    torch.save({KEY: content.text, "state_dict": content.state, "more": content.more}, file)
    return file.getvalue()


def _safetensors(content: Content, path: Any) -> bytes:
    from safetensors.torch import save

    clash = [name for name in content.state if name.startswith(MORE)]
    if clash:
        raise CheckpointError(f"{path}: the name {clash[0]!r} begins with {MORE!r}, which is kept for what is not the net's")
    try:
        # One entry of metadata: the order of several is not settled.
        return save(content.state | {MORE + name: tensor for name, tensor in content.more.items()}, {KEY: content.text})
    except KeyError as error:
        raise CheckpointError(f"{path}: safetensors has no dtype {error}; write a .pt instead") from None


def read(path: str | os.PathLike[str]) -> Content:
    """What ``write`` wrote. Which kind of file it is, its first bytes say.

    Raises:
        CheckpointError: no such file, one that is cut off or damaged, one that holds pickled objects, or one that
            ``sj_tac.save`` did not write.
    """
    try:
        with Path(path).open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    content = _read_torch(path) if head == _ZIP else _read_safetensors(path)
    for name, tensor in (content.state | content.more).items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
            raise CheckpointError(f"{path}: {name!r} is no plain, dense tensor; the file is damaged")
    return content


def _foreign(path: Any, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds {what}, and was not written by sj_tac.save; load a state_dict into the model as ever "
        "(model.load_state_dict), then sj_tac.convert it"
    )


def _read_torch(path: Any) -> Content:
    try:
        with Path(path).open("rb") as file:  # of a path, torch may go by its suffix
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises anything from EOFError to UnpicklingError here
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({type(error).__name__}): it is cut off or damaged, or holds pickled "
            "objects, as torch.save(net) writes them, which are not loaded"
        ) from None
    if not isinstance(found, dict) or set(found) != {KEY, "state_dict", "more"} or not isinstance(found[KEY], str):
        raise _foreign(path, f"keys {list(found)[:4]}" if isinstance(found, dict) else f"a {type(found).__name__}")
    state, more = found["state_dict"], found["more"]
    if not isinstance(state, dict) or not isinstance(more, dict):
        raise _foreign(path, "no state_dict")
    return Content(state, more, found[KEY])


def _read_safetensors(path: Any) -> Content:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            text = (file.metadata() or {}).get(KEY)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} is no file of safetensors, or it is cut off or damaged: {error}") from None
    if text is None:
        raise _foreign(path, "tensors alone")
    more = {name.removeprefix(MORE): tensor for name, tensor in tensors.items() if name.startswith(MORE)}
    return Content({name: tensor for name, tensor in tensors.items() if not name.startswith(MORE)}, more, text)
