"""What the command line names, as objects: a model's factory, its checkpoint, and data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.cli.named import UsageError as UsageError, called, factory as factory, listed
from sj_tac.rewrites.measure.axes import time_axis
from sj_tac.support import archive
from sj_tac.tuning.batches import as_labels, fitted, unfit
from sj_tac.tuning.measure import run

SUFFIXES = (".npy", ".npz", ".pt")
FRAMES, LABELS = ("frames", "x", "data"), ("labels", "y", "targets")
COUNT = "count them into frames [T, N, C, H, W] first, with tonic.transforms.ToFrame, say"
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
        except Exception as error:  # of modules that read their part of it themselves
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
    if not isinstance(content, dict):
        raise UsageError(f"checkpoint {path} holds a {type(content).__name__}, not a state_dict")
    plain = all(isinstance(value, Tensor) for value in content.values())
    wrapped = [content[key] for key in WRAPPED if isinstance(content.get(key), dict)]
    if not plain and not wrapped:
        raise UsageError(f"checkpoint {path} has keys {list(content)[:8]}; none of {WRAPPED} holds a state_dict")
    found = content if plain else wrapped[0]
    others = [key for key in found if not isinstance(key, str)]
    if others:
        raise UsageError(
            f"checkpoint {path} has the key {others[0]!r} ({type(others[0]).__name__}); those of a state_dict are names"
        )
    return dict(found)


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
        items = listed(found, spec, "data")
        _check_taken(net, items[0] if items else None, batch_first, f"batch 0 of data {spec!r}")
        return [_turned(item) for item in items] if batch_first and net is None else items
    frames, labels = found
    if unfit(frames):
        raise UsageError(f"data {spec!r} {unfit(frames)}")
    if frames.dim() < 3:
        raise UsageError(f"data {spec!r} has shape {list(frames.shape)}; frames are [T, N, C, H, W]")
    if batch_first and net is None:
        frames = frames.transpose(0, 1)
    dim = 0 if batch_first and net is not None else 1
    labels = _labels(labels, frames, dim, spec)
    parts = frames.split(batch_size, dim=dim)
    _check_taken(net, parts[0], batch_first, f"data {spec!r} (frames {list(frames.shape)})")
    if labels is None:
        return list(parts)
    return [(part, labels[i * batch_size : (i + 1) * batch_size]) for i, part in enumerate(parts)]


def _labels(labels: Any, frames: Tensor, dim: int, spec: str) -> Tensor | None:
    """One for each sample, which frames have in dimension ``dim``. Raises UsageError."""
    if labels is None:
        return None
    found = as_labels(labels, f"data {spec!r}")
    if found.dim() == 0:
        raise UsageError(f"data {spec!r} has one label, {found}, for frames {list(frames.shape)}; labels are [N]")
    if len(found) != frames.shape[dim]:
        hint = "; --batch-first is for frames [N, T, ...]" if dim == 1 and len(found) == frames.shape[0] else ""
        order = "[T, N, ...]" if dim == 1 else "[N, T, ...]"
        raise UsageError(f"data {spec!r} has {len(found)} labels for frames {list(frames.shape)}, {order}{hint}")
    return found


def _check_taken(net: nn.Module | None, item: Any, batch_first: bool, where: str) -> None:
    """Raise UsageError where the net is seen to take frames the other way round than they were said to be, or not at all.

    Args:
        item: a batch. where: what an error calls it.
    """
    frames = item[0] if isinstance(item, (tuple, list)) and len(item) == 2 else item
    if net is None or not isinstance(frames, Tensor) or unfit(frames) or frames.dim() < 3 or 0 in frames.shape:
        return
    few = fitted(frames[:2] if batch_first else frames[:, :2], net)
    found = time_axis(net, few)
    if found == 0 and batch_first:
        raise UsageError("--batch-first: this net takes frames [T, N, ...]; turn the data round, and drop --batch-first")
    if found == 1 and not batch_first:
        raise UsageError("this net takes frames [N, T, ...]: give them in that order, with --batch-first")
    # A net whose N is fixed takes its own number of samples only.
    failed = _failure(net, few) and _failure(net, fitted(frames, net))
    if failed:
        order = "[N, T, C, H, W]" if batch_first else "[T, N, C, H, W]"
        raise UsageError(
            f"{where}: {type(net).__name__} does not run on a batch {list(frames.shape)} of it ({failed}); give frames "
            f"{order} of the shape that it takes"
        )


def _failure(net: nn.Module, frames: Tensor) -> str:
    """Why the net does not run on frames; nothing where it does."""
    try:
        with host.looked_at(net):
            run(net, frames)
    except Exception as error:  # of a forward that is the user's
        return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    return ""


def _turned(item: Any) -> Any:
    """A batch the other way round; what is none is refused by who reads batches."""
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return (_turned(item[0]), item[1])
    return item.transpose(0, 1) if isinstance(item, Tensor) and item.dim() > 1 else item


def _file(path: Path) -> Any:
    if path.suffix == ".pt":
        found = _torch_file(path, "data")
        if isinstance(found, (tuple, list)):
            return tuple(found) if len(found) == 2 else list(found)
        return _named(found, path) if isinstance(found, dict) else found
    try:
        with path.open("rb") as file:
            found = np.load(file)
            arrays = {"frames": found} if path.suffix == ".npy" else {name: found[name] for name in found.files}
    except FileNotFoundError:
        raise UsageError(f"data {path} does not exist") from None
    except Exception as error:  # numpy raises anything from EOFError to zipfile.BadZipFile here
        raise UsageError(f"data {path} cannot be read ({type(error).__name__}: {error})") from error
    return _named(arrays, path)


def _named(arrays: dict[str, Any], path: Path) -> tuple[Tensor, Tensor | None]:
    """Return a file's frames and labels, whatever else it holds. Raise UsageError where it has no frames."""
    if {"t", "x", "y", "p"} <= arrays.keys():  # SpikingJelly's layout, where "x" and "y" are neither frames nor labels
        raise UsageError(f"data {path} holds events (arrays {', '.join(arrays)}), not frames; {COUNT}")
    frames = next((arrays[name] for name in FRAMES if name in arrays), None)
    labels = next((arrays[name] for name in LABELS if name in arrays), None)
    if frames is None and len(arrays) == 1:
        (frames,) = arrays.values()
    if not isinstance(frames, (Tensor, np.ndarray)):
        raise UsageError(
            f"data {path} holds {list(arrays)}; frames are expected under 'frames', class indices under 'labels'"
        )
    return _tensor(frames, path), labels if labels is None else _tensor(labels, path)


def _tensor(values: Any, path: Path) -> Any:
    if not isinstance(values, np.ndarray):
        return values
    if values.dtype.names:
        raise UsageError(f"data {path} holds events (fields {', '.join(values.dtype.names)}), not frames; {COUNT}")
    try:
        return torch.from_numpy(values)
    except TypeError as error:
        raise UsageError(f"data {path} cannot be read ({error})") from error
