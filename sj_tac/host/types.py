"""Which of SpikingJelly's types are what: the one place that names them."""

from __future__ import annotations

from typing import Any

from spikingjelly.activation_based import base, layer as layer, neuron as neuron
from torch import nn
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
POOLS: tuple[type[nn.Module], ...] = (
    layer.MaxPool2d,
    layer.AvgPool2d,
    layer.AdaptiveAvgPool2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
)
# The host's own layers that make their weights anew in every call, and are otherwise what their base is.
STANDARDISED: dict[type[nn.Module], type[nn.Module]] = {
    getattr(layer, name): base_class
    for name, base_class in (("WSConv2d", layer.Conv2d), ("WSLinear", layer.Linear))
    if hasattr(layer, name)
}
# Every class whose behaviour is known; of others, ``kinds.kind`` says which of these they come down to.
KNOWN: frozenset[type[nn.Module]] = frozenset(
    {*CONVS, *NORMS, *NEURONS, *ANY_MAX_POOLS, *POOLS, layer.SeqToANNContainer, layer.Linear, layer.VotingLayer}
    | {layer.AvgPool1d, layer.AvgPool3d, layer.AdaptiveAvgPool1d, layer.AdaptiveAvgPool3d, layer.Flatten}
    | {layer.Dropout, layer.Dropout2d, layer.PrintShapeModule, *([layer.Upsample] if hasattr(layer, "Upsample") else [])}
    | {nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear}
    | {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d}
    | {nn.AvgPool1d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d}
    | {nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d}
    | {nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d}
    | {nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d, nn.PixelShuffle, nn.PixelUnshuffle}
    | {nn.Identity, nn.Flatten, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, nn.ChannelShuffle}
)


def is_conv(module: nn.Module) -> bool:
    """Any convolution at all, SpikingJelly's or torch's own, of any dimension."""
    return isinstance(module, _ConvNd)


def is_neuron(module: nn.Module) -> bool:
    """Any spiking neuron, supported or not, subclasses by the user among them."""
    return isinstance(module, neuron.BaseNode) or type(module).__module__.startswith(LIBRARY + "neuron")


def is_multi_step(module: nn.Module) -> bool:
    """False only where the module has a ``step_mode`` and it is not ``"m"``."""
    # The host keeps it here, behind a property; a call asks every one of its modules.
    mode = module.__dict__.get("_step_mode")
    return (getattr(module, "step_mode", "m") if mode is None else mode) == "m"


def uses_batch_statistics(norm: nn.Module) -> bool:
    """True where a BatchNorm keeps no running statistics and so normalises by the batch's own, in eval mode too."""
    return norm._buffers.get("running_mean") is None
