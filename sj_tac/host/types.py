"""Which of SpikingJelly's types are what: the one place that names them."""

from __future__ import annotations

import math
from typing import Any

from spikingjelly.activation_based import base, layer as layer, neuron as neuron
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

# For modules of ours that keep state, or have a step mode, as the host's do.
MemoryModule: Any = base.MemoryModule
StepModule: Any = base.StepModule
LIBRARY = "spikingjelly.activation_based."
IS_V2 = hasattr(base.MemoryModule, "materialize_states")
# Exact types only: a subclass may have other dynamics, and swapping its class would lose them.
CONVS: tuple[type[nn.Module], ...] = (
    *(layer.Conv2d, layer.Conv1d, layer.Conv3d),
    *(layer.ConvTranspose2d, layer.ConvTranspose1d, layer.ConvTranspose3d),
)
LINEARS: tuple[type[nn.Module], ...] = (layer.Linear,)
# Containers that fold time into the batch and run torch's own layers, or the host's in step_mode "s".
CONTAINERS: tuple[type[nn.Module], ...] = (layer.SeqToANNContainer,)
INNER_CONVS: tuple[type[nn.Module], ...] = (
    *(*CONVS, nn.Conv2d, nn.Conv1d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose1d, nn.ConvTranspose3d),
)
INNER_LINEARS: tuple[type[nn.Module], ...] = (*LINEARS, nn.Linear)
PLAIN_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm2d, nn.BatchNorm1d, nn.BatchNorm3d)
NORMS: tuple[type[nn.Module], ...] = (
    layer.BatchNorm2d,
    layer.BatchNorm1d,
    layer.BatchNorm3d,
    layer.ThresholdDependentBatchNorm2d,
)
NEURONS: tuple[type[nn.Module], ...] = (neuron.LIFNode, neuron.IFNode, neuron.ParametricLIFNode)
MAX_POOLS: tuple[type[nn.Module], ...] = (layer.MaxPool2d,)
# MaxPools of any kind: not linear, so that a mean of steps, or a drive, must not pass one.
ANY_MAX_POOLS: tuple[type[nn.Module], ...] = (
    layer.MaxPool1d,
    layer.MaxPool2d,
    layer.MaxPool3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool2d,
)
AVG_POOLS: tuple[type[nn.Module], ...] = (
    layer.AvgPool1d,
    layer.AvgPool2d,
    layer.AvgPool3d,
    layer.AdaptiveAvgPool1d,
    layer.AdaptiveAvgPool2d,
    layer.AdaptiveAvgPool3d,
)
INNER_AVG_POOLS: tuple[type[nn.Module], ...] = (*AVG_POOLS, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool2d)
POOLS: tuple[type[nn.Module], ...] = (
    layer.MaxPool2d,
    layer.AvgPool2d,
    layer.AdaptiveAvgPool2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
)
FUSED_POOLS: tuple[type[nn.Module], ...] = (layer.MaxPool2d, layer.AvgPool2d)
FOLDED_FUSED_POOLS: tuple[type[nn.Module], ...] = (nn.MaxPool2d, nn.AvgPool2d)
DROPOUTS: tuple[type[nn.Module], ...] = (layer.Dropout, layer.Dropout2d)
# What a weighted sum of frames may pass through, because it treats all frames alike and is linear in them.
LINEAR_IN_TIME: tuple[type[nn.Module], ...] = (
    *(layer.Dropout, layer.Dropout2d, *AVG_POOLS, layer.Flatten, nn.Identity, layer.PrintShapeModule),
    *([layer.Upsample] if hasattr(layer, "Upsample") else []),
)
# What treats every frame [N, ...] alike, linear or with a constant on top: weights that sum to 1 may pass.
AFFINE: tuple[type[nn.Module], ...] = (*CONVS, *LINEARS, *NORMS, layer.VotingLayer, nn.Linear)
# What treats every frame alike, with a constant on top, or in training a mask of its own: drives may pass, sums may not.
PER_FRAME: tuple[type[nn.Module], ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# The same, where a frame has the dimensions that they reach.
PADS: tuple[type[nn.Module], ...] = (
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
)
SHUFFLES: tuple[type[nn.Module], ...] = (nn.PixelShuffle, nn.PixelUnshuffle)

# torch's own layers on folded frames [T * N, ...]: each sees one frame at a time.
FOLDED_CONVS: tuple[type[nn.Module], ...] = (
    *(nn.Conv2d, nn.Conv1d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose1d, nn.ConvTranspose3d),
)
FOLDED_LINEARS: tuple[type[nn.Module], ...] = (nn.Linear,)
FOLDED_MAX_POOLS: tuple[type[nn.Module], ...] = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
FOLDED_LINEAR: tuple[type[nn.Module], ...] = (
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.Identity, nn.Flatten, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, nn.ChannelShuffle),
)
# The host's own layers that make their weights anew in every call, and are otherwise what their base is.
STANDARDISED: dict[type[nn.Module], type[nn.Module]] = {
    getattr(layer, name): base_class
    for name, base_class in (("WSConv2d", layer.Conv2d), ("WSLinear", layer.Linear))
    if hasattr(layer, name)
}
# Every class whose behaviour is known; of others, ``kinds.kind`` says which of these they come down to.
KNOWN: frozenset[type[nn.Module]] = frozenset(
    {*CONVS, *LINEARS, *CONTAINERS, *INNER_CONVS, *INNER_LINEARS, *PLAIN_NORMS, *NORMS, *NEURONS, *ANY_MAX_POOLS}
    | {*INNER_AVG_POOLS, *POOLS, *LINEAR_IN_TIME, *AFFINE, *PER_FRAME, *PADS, *SHUFFLES}
    | {*FOLDED_CONVS, *FOLDED_LINEARS, *FOLDED_MAX_POOLS, *FOLDED_LINEAR}
)


def is_conv(module: nn.Module) -> bool:
    """Any convolution at all, SpikingJelly's or torch's own, of any dimension."""
    return isinstance(module, _ConvNd)


def held_weight(layer: Any) -> Tensor:
    """What a conv or Linear holds of its weight: the parameter, or the first of those that it is made of.

    To ask for ``layer.weight`` itself would make it, which a spectral norm in training counts as a step of its own.
    """
    held: Tensor | None = layer._parameters.get("weight")
    return next(layer.parameters()) if held is None else held


def filter_size(layer: Any) -> int:
    """Multiplications of one filter of a conv or Linear; of a transposed conv, those of one element of its input."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    channels = layer.out_channels if is_transposed(layer) else layer.in_channels
    return int(channels // layer.groups * math.prod(layer.kernel_size))


def is_transposed(module: nn.Module) -> bool:
    return isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))


def is_norm(module: nn.Module) -> bool:
    """Any normalisation layer, supported or not."""
    return isinstance(module, (_NormBase, nn.GroupNorm, nn.LayerNorm)) or type(module).__module__ == LIBRARY + "layer.bn"


def is_neuron(module: nn.Module) -> bool:
    """Any spiking neuron, supported or not, subclasses by the user among them."""
    return isinstance(module, neuron.BaseNode) or type(module).__module__.startswith(LIBRARY + "neuron")


def is_leaf(module: nn.Module) -> bool:
    """What torch.fx must not look into: step modules (they branch on ``step_mode``) and the library's own layers.

    Blocks of the user's own may derive from the library's bases, which makes them no layers.
    """
    if isinstance(module, base.StepModule):
        return not _is_block(module)
    return type(module).__module__.startswith(LIBRARY + "layer")


def _is_block(module: nn.Module) -> bool:
    """Whether a step module is the user's own, has nothing of the library's but its bases, and holds layers."""
    bases = {kind for kind in type(module).__mro__ if kind.__module__.startswith(LIBRARY)}
    return bases <= {base.StepModule, base.MemoryModule} and any(
        is_conv(m) or isinstance(m, nn.Linear) for m in module.modules()
    )


def is_composite(module: nn.Module) -> bool:
    """A layer of the library that is built of multi-step modules, as its attention is: torch.fx may look into it."""
    return is_leaf(module) and not isinstance(module, base.StepModule) and any(True for _ in module.children())


def is_multi_step(module: nn.Module) -> bool:
    """False only where the module has a ``step_mode`` and it is not ``"m"``."""
    # The host keeps it here, behind a property; a call asks every one of its modules.
    mode = module.__dict__.get("_step_mode")
    return (getattr(module, "step_mode", "m") if mode is None else mode) == "m"


def single_steps(module: nn.Module) -> str:
    """How a module takes one step a call, in words; "" where it takes all of them, as far as that can be told."""
    if not is_multi_step(module):
        return "is in step_mode 's'"
    inside = looped(module)
    return f"calls its {inside} once a step; put the {inside} there by itself, in step_mode 'm'" if inside else ""


def looped(module: nn.Module) -> str:
    """The class of a neuron in a container that is handed all frames, and calls what it holds once a step; "" of others."""
    inside = module.modules() if isinstance(module, layer.MultiStepContainer) else ()
    return next((type(m).__name__ for m in inside if is_neuron(m)), "")


def uses_batch_statistics(norm: nn.Module) -> bool:
    """True where a BatchNorm keeps no running statistics and so normalises by the batch's own, in eval mode too."""
    return norm._buffers.get("running_mean") is None
