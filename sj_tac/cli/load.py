"""What the command line names, as objects: a model's factory, its checkpoint, and data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rewrites.axes import time_axis
from sj_tac.cli.named import UsageError as UsageError, called, factory as factory
from sj_tac.support import archive
from sj_tac.tuning.batches import Batch

SUFFIXES = (".npy", ".npz", ".pt")
FRAMES, LABELS = ("frames", "x", "data"), ("labels", "y", "targets")
WRAPPED = ("state_dict", "model", "net", "model_state_dict")


def _called(spec: str, what: str) -> Any:
    found = factory(spec, what)
    return found if isinstance(found, (nn.Module, Tensor, list, tuple)) or not callable(found) else called(found, spec, what)


def model(spec: str, checkpoint: Path | None) -> nn.Module:
    """The net that ``package.module:factory`` returns, in eval mode, with the weights of a checkpoint. Raises UsageError."""
    net = _called(spec, "model")
    if not isinstance(net, nn.Module):
        raise UsageError(f"model {spec!r} returned a {type(net).__name__}; a factory returns a torch.nn.Module")
    if checkpoint is not None:
        weights = _weights(checkpoint)
        try:
            net.load_state_dict(weights)
        except RuntimeError as error:
            told = " ".join(str(error).split())
            raise UsageError(f"checkpoint {checkpoint} does not fit {spec}: {told[:600]}") from error
    return net.eval()


def _weights(path: Path) -> dict[str, Any]:
    """A state_dict of torch.save, of safetensors, or of ``sj_tac.save``."""
    if path.suffix in archive.SAFETENSORS:
        from safetensors.torch import load_file

        try:
            content = load_file(path)
        except FileNotFoundError:
            raise UsageError(f"checkpoint {path} does not exist") from None
        except Exception as error:  # of a library whose errors are its own
            raise UsageError(f"checkpoint {path} cannot be read ({type(error).__name__}: {error})") from error
        corrected = any(name.startswith(archive.MORE) for name in content)
    else:
        content = _torch_file(path, "checkpoint")
        corrected = isinstance(content, dict) and archive.KEY in content and bool(content.get("more"))
    if corrected:
        raise UsageError(
            f"checkpoint {path} is a converted net whose statistics were corrected for its k (sj_tac.match, recalibrate); "
            "give the source's checkpoint, or load that net with sj_tac.load"
        )
    return _state_dict(content, path)


def _torch_file(path: Path, what: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"{what} {path} does not exist") from None
    except Exception as error:  # torch raises anything from EOFError to UnpicklingError here
        raise UsageError(
            f"{what} {path} cannot be read as plain tensors ({type(error).__name__}); a file of torch.save with a "
            "state_dict or tensors is wanted, pickled objects are not loaded"
        ) from error


def _state_dict(content: Any, path: Path) -> dict[str, Any]:
    if isinstance(content, dict):
        if all(isinstance(value, Tensor) for value in content.values()):
            return content
        for key in WRAPPED:
            if isinstance(content.get(key), dict):
                return dict(content[key])
        raise UsageError(f"checkpoint {path} has keys {list(content)[:8]}; none of {WRAPPED} holds a state_dict")
    raise UsageError(f"checkpoint {path} holds a {type(content).__name__}, not a state_dict")


def batches(spec: str, batch_size: int, batch_first: bool, net: nn.Module | None = None) -> list[Any]:
    """Batches of frames or (frames, labels), as the net takes them, from a file or from ``package.module:factory``.

    Args:
        spec: a .npy of frames, a .npz or .pt of ``frames`` and, where there are any, ``labels``; or a factory that returns
            batches, a tensor, or a pair (frames, labels).
        batch_size: what a single tensor is divided into. batch_first: frames are [N, T, ...], and the net takes them so;
            without a net they are turned round. net: what takes them.

    Raises:
        UsageError: no such file, another content, a factory that fails, or a net that takes frames the other way round.
    """
    path = Path(spec)
    found: Any
    if path.suffix in SUFFIXES:
        found = _file(path)
    elif ":" in spec:
        found = _called(spec, "data")
    else:
        raise UsageError(f"data {spec!r} is neither a file of frames ({', '.join(SUFFIXES)}) nor package.module:factory")
    if isinstance(found, Tensor):
        found = (found, None)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor)):
        if not isinstance(found, Iterable):
            raise UsageError(
                f"data {spec!r} is a {type(found).__name__}; frames, a pair (frames, labels) or batches are wanted"
            )
        items = list(found)
        _check_order(net, items[0] if items else None, batch_first)
        return [_turned(item) for item in items] if batch_first and net is None else items
    frames, labels = found
    if frames.dim() < 3:
        raise UsageError(f"data {spec!r} has shape {list(frames.shape)}; frames are [T, N, C, H, W]")
    if batch_first and net is None:
        frames = frames.transpose(0, 1)
    dim = 0 if batch_first and net is not None else 1
    if labels is not None and len(labels) != frames.shape[dim]:
        hint = "; --batch-first is for frames [N, T, ...]" if dim == 1 and len(labels) == frames.shape[0] else ""
        order = "[T, N, ...]" if dim == 1 else "[N, T, ...]"
        raise UsageError(f"data {spec!r} has {len(labels)} labels for frames {list(frames.shape)}, {order}{hint}")
    _check_order(net, frames, batch_first)
    parts = frames.split(batch_size, dim=dim)
    if labels is None:
        return list(parts)
    return [(part, labels[i * batch_size : (i + 1) * batch_size]) for i, part in enumerate(parts)]


def _check_order(net: nn.Module | None, item: Any, batch_first: bool) -> None:
    """Raise UsageError where the net is seen to take frames the other way round than they were said to be."""
    frames = item[0] if isinstance(item, (tuple, list)) and len(item) == 2 else item
    if net is None or not isinstance(frames, Tensor) or frames.dim() < 3 or 0 in frames.shape:
        return
    few = Batch(frames[:2] if batch_first else frames[:, :2]).on(net).frames
    found = time_axis(net, few if few.is_floating_point() else few.float())
    if found == 0 and batch_first:
        raise UsageError("--batch-first: this net takes frames [T, N, ...]; turn the data round, and drop --batch-first")
    if found == 1 and not batch_first:
        raise UsageError("this net takes frames [N, T, ...]: give them in that order, with --batch-first")


def _turned(item: Any) -> Any:
    return (item[0].transpose(0, 1), item[1]) if isinstance(item, (tuple, list)) else item.transpose(0, 1)


def _file(path: Path) -> Any:
    if path.suffix == ".pt":
        found = _torch_file(path, "data")
        if isinstance(found, (tuple, list)):
            return tuple(found) if len(found) == 2 else list(found)
        return _named(found, path) if isinstance(found, dict) else found
    try:
        with path.open("rb") as file:
            found = np.load(file)
            if path.suffix == ".npy":
                return torch.from_numpy(found)
            arrays = {name: torch.from_numpy(found[name]) for name in found.files}
    except FileNotFoundError:
        raise UsageError(f"data {path} does not exist") from None
    except Exception as error:  # numpy raises anything from EOFError to zipfile.BadZipFile here
        raise UsageError(f"data {path} cannot be read ({type(error).__name__}: {error})") from error
    return _named(arrays, path)


def _named(arrays: dict[str, Any], path: Path) -> Any:
    frames = next((arrays[name] for name in FRAMES if name in arrays), None)
    labels = next((arrays[name] for name in LABELS if name in arrays), None)
    if frames is None and len(arrays) == 1:
        (frames,) = arrays.values()
    if not isinstance(frames, Tensor):
        raise UsageError(
            f"data {path} holds {list(arrays)}; frames are expected under 'frames', class indices under 'labels'"
        )
    return frames, labels
