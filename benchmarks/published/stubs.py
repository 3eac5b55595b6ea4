"""Stand-ins for third parties that published models import and this environment lacks.

Each has only the names that the models use to be built and run. ``install`` registers those of packages that are absent.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Missing:
    """Whatever else is imported from a stand-in; using it says so."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.name} is only a stand-in; install the package to use it")


def module(name: str, **names: Any) -> types.ModuleType:
    """A package of that name whose other attributes exist, too, and fail when they are called."""
    made = types.ModuleType(name)
    made.__path__ = []
    made.__dict__.update(names)

    def other(attribute: str) -> Missing:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{name}.{attribute}")

    made.__dict__["__getattr__"] = other
    return made


class DropPath(nn.Module):
    """Stochastic depth: in eval mode, the only one used here, the identity."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        return x


def rearrange(x: Tensor, pattern: str) -> Tensor:
    """einops.rearrange for permutations, the ones that the models use."""
    before, after = (side.split() for side in pattern.split("->"))
    if sorted(before) != sorted(after):
        raise NotImplementedError(f"rearrange {pattern!r}: this stand-in only permutes; install einops")
    return x.permute([before.index(axis) for axis in after])


def _timm() -> dict[str, types.ModuleType]:
    entries: dict[str, Callable[..., Any]] = {}

    def register_model(build: Callable[..., Any]) -> Callable[..., Any]:
        entries[build.__name__] = build
        return build

    def create_model(name: str, pretrained: bool = False, **options: Any) -> Any:
        return entries[name](**{key: value for key, value in options.items() if value is not None})

    layers = {
        "to_2tuple": lambda value: tuple(value) if isinstance(value, (tuple, list)) else (value, value),
        "trunc_normal_": nn.init.trunc_normal_,
        "DropPath": DropPath,
    }
    return {
        "timm": module("timm"),
        "timm.layers": module("timm.layers", **layers),
        "timm.models": module("timm.models", create_model=create_model, register_model=register_model),
        "timm.models.layers": module("timm.models.layers", **layers),
        "timm.models.registry": module("timm.models.registry", register_model=register_model),
        "timm.models.vision_transformer": module("timm.models.vision_transformer", _cfg=lambda **options: options),
    }


def _einops() -> dict[str, types.ModuleType]:
    return {
        "einops": module("einops", rearrange=rearrange),
        "einops.layers": module("einops.layers"),
        "einops.layers.torch": module("einops.layers.torch"),
    }


class Registry:
    """OpenMMLab's table of classes: ``build`` makes what ``type`` names from the other keys."""

    shared: dict[str, Any] = {}

    def __init__(self, name: str = "", **options: Any) -> None:
        self.name = name

    def register_module(self, name: Any = None, *, module: Any = None, force: bool = False) -> Any:
        if module is not None:
            self.shared[module.__name__] = module
            return module
        return lambda value: self.register_module(module=value)

    def get(self, name: str) -> Any:
        return self.shared[name]

    def build(self, config: dict[str, Any]) -> Any:
        options = dict(config)
        return self.get(options.pop("type"))(**options)


class BaseBackbone(nn.Module):
    """OpenMMLab's base class, without its handling of checkpoints."""

    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__()


def _openmmlab() -> dict[str, types.ModuleType]:
    backbone = "mmpretrain.models.backbones.base_backbone"
    made = {name: module(name) for name in ("mmpretrain", "mmpretrain.models", "mmpretrain.models.backbones")}
    return made | {
        backbone: module(backbone, BaseBackbone=BaseBackbone),
        "mmpretrain.registry": module("mmpretrain.registry", Registry=Registry),
    }


class SequenceWise(nn.Module):
    """A module of frames [N, ...] on a sequence [T, N, ...], with time folded into the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner

    def forward(self, x: Tensor) -> Any:
        return self.module(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def time_to_batch(x: Tensor) -> tuple[Tensor, int]:
    return x.flatten(0, 1), x.shape[1]


def _metavision() -> dict[str, types.ModuleType]:
    name = "metavision_core_ml.core.temporal_modules"
    return {package: module(package) for package in ("metavision_core_ml", "metavision_core_ml.core")} | {
        name: module(name, SequenceWise=SequenceWise, time_to_batch=time_to_batch)
    }


def _empty(*names: str) -> Callable[[], dict[str, types.ModuleType]]:
    return lambda: {name: module(name) for name in names}


# Training scripts import data sets and plots along with the model that they hold; nothing of these is needed to run it.
DATA = ("dvs128_gesture", "cifar10_dvs", "n_caltech101")
UNUSED = ("spikingjelly.datasets", *(f"spikingjelly.datasets.{name}" for name in DATA), "torch.utils.tensorboard")
# Gone in SpikingJelly 2.0; imported for neurons on CUDA that are not built here.
GONE = "spikingjelly.activation_based.auto_cuda"

STANDINS: dict[str, Callable[[], dict[str, types.ModuleType]]] = {
    "timm": _timm,
    "einops": _einops,
    "mmpretrain": _openmmlab,
    "metavision_core_ml": _metavision,
    "cv2": _empty("cv2"),
    "tqdm": _empty("tqdm"),
    "prefetch_generator": _empty("prefetch_generator"),
    # A file that TCJA's repository lacks itself.
    "transfroms": _empty("transfroms"),
}


def install() -> list[str]:
    """Register a stand-in for each of these packages that is absent; their names."""
    made = []
    for package, build in STANDINS.items():
        if importlib.util.find_spec(package) is None:
            sys.modules.update(build())
            made.append(package)
    sys.modules.update(_empty(*UNUSED)())
    if importlib.util.find_spec(GONE) is None:
        sys.modules[GONE] = module(GONE)
    return made


def bare_package(name: str, path: str) -> None:
    """Make a package importable without running its ``__init__``, which would import a whole training pipeline."""
    made = types.ModuleType(name)
    made.__path__ = [path]
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(importlib.import_module(parent), child, made)
