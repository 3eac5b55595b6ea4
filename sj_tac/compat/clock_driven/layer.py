"""The old ``spikingjelly.clock_driven.layer``."""

from spikingjelly.activation_based import layer as _host
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from sj_tac.compat.clock_driven import base as base, functional as functional, lost

# What the host has under the same name takes the same arguments, and step_mode="s" behind them. sj_tac reads exact types.
Dropout = _host.Dropout
Dropout2d = _host.Dropout2d
DropConnectLinear = _host.DropConnectLinear
ElementWiseRecurrentContainer = _host.ElementWiseRecurrentContainer
LinearRecurrentContainer = _host.LinearRecurrentContainer
MultiStepContainer = _host.MultiStepContainer
NeuNorm = _host.NeuNorm
PrintShapeModule = _host.PrintShapeModule
SeqToANNContainer = _host.SeqToANNContainer
SynapseFilter = _host.SynapseFilter
# These were multi-step before, under another name.
if issubclass(_host.TemporalWiseAttention, nn.Module):
    MultiStepTemporalWiseAttention = _host.TemporalWiseAttention
MultiStepThresholdDependentBatchNorm1d = _host.ThresholdDependentBatchNorm1d
MultiStepThresholdDependentBatchNorm2d = _host.ThresholdDependentBatchNorm2d
MultiStepThresholdDependentBatchNorm3d = _host.ThresholdDependentBatchNorm3d
for _norm, _plain in (
    (MultiStepThresholdDependentBatchNorm1d, nn.BatchNorm1d),
    (MultiStepThresholdDependentBatchNorm2d, nn.BatchNorm2d),
    (MultiStepThresholdDependentBatchNorm3d, nn.BatchNorm3d),
):
    # 0.0.0.0.14 forgot it, so its classes raise whenever they are called.
    if _norm._check_input_dim is _NormBase._check_input_dim:
        _norm._check_input_dim = _plain._check_input_dim


class MultiStepDropout(_host.Dropout):
    """Dropout of frames [T, N, ...] with one mask for all T."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p, step_mode="m")


class MultiStepDropout2d(_host.Dropout2d):
    """Dropout of channels of frames [T, N, C, H, W] with one mask for all T."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p, step_mode="m")


__getattr__ = lost(
    "spikingjelly.clock_driven.layer",
    {
        "AXAT": "it is two matrix products, A @ x @ A.T",
        "ChannelsPool": "it is a 1d pool over dimension 1: permute, pool, permute",
        "ConvBatchNorm2d": "write nn.Conv2d(bias=False) and nn.BatchNorm2d as 'conv' and 'bn', and keep the keys",
        "DCT": "it is a product with a fixed matrix",
        "MultiStepTemporalWiseAttention": "0.0.0.0.14's is no torch.nn.Module; SpikingJelly 2.0's is",
        "STDPLearner": "spikingjelly.activation_based.learning.STDPLearner has another interface",
    },
)
