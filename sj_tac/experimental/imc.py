"""IMC, "information-maximising spike convolution": gates on channels, and a loss that prices what the channels carry."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sj_tac import host


def _entropy(p: Tensor) -> Tensor:
    """Binary entropy in bits; 0 at 0 and 1, with finite gradients."""
    p = p.clamp(1e-7, 1 - 1e-7)
    return -(p * torch.log2(p) + (1 - p) * torch.log2(1 - p))


def bsc_information(rate: Tensor, flip: float = 0.0) -> Tensor:
    """Bits that a step of a spike train carries through a binary symmetric channel that flips with probability ``flip``.

    ``I = H(rate * (1 - flip) + (1 - rate) * flip) - H(flip)``, with H the binary entropy: the entropy of the spike train
    where nothing is flipped, and at rate 1/2 the capacity of the channel, ``1 - H(flip)``.

    Args:
        rate: firing rates in [0, 1], any shape.
        flip: in [0, 1/2].

    Raises:
        ValueError: ``flip`` is not in [0, 1/2].
    """
    if not 0 <= flip <= 0.5:
        raise ValueError(f"bsc_information got flip={flip}; a probability in [0, 0.5]")
    lost = _entropy(torch.tensor(flip, dtype=rate.dtype, device=rate.device)) if flip else 0.0
    return (_entropy(rate * (1 - flip) + (1 - rate) * flip) - lost).clamp(min=0)


def minimum_channels(channels_in: int, rate_in: float, rate_out: float, shrink: float = 1.0, flip: float = 0.0) -> int:
    """Fewest output channels that can carry what comes in: ``ceil(C_in I(rate_in) / I(rate_out) * shrink)``.

    ``shrink`` is ``(H_in W_in) / (H_out W_out)``.

    Raises:
        ValueError: channels at ``rate_out`` carry nothing, so that no number of them is enough.
    """
    came, carried = (
        bsc_information(torch.tensor(rate, dtype=torch.float64, device="cpu"), flip).item() for rate in (rate_in, rate_out)
    )
    if carried < 1e-5:
        raise ValueError(f"minimum_channels got rate_out={rate_out}, flip={flip}: such channels carry no information")
    return math.ceil(channels_in * came / carried * shrink - 1e-9)


class InformationGate(nn.Module, host.StepModule):
    """Spikes times a learnable gate for each channel, ``sigmoid(logit)``; it watches the rates on both sides of a layer.

    Put it behind a neuron. ``information_loss(net)`` then asks the gated channels to carry what comes into the layer, and
    prices open gates; channels whose gate closes may be pruned.

    Source: IMC of J. Qin, arXiv 2603.13810, as defined by the InfoMaxSpikeConv of its library, mlx-snn; the channel that may
    flip spikes is ours, and the library's where ``flip`` is 0.

    Args:
        channels: C of the frames [T, N, C, ...] (step_mode "m") or [N, C, ...] (step_mode "s").
        flip: probability that a spike is lost or added on the way.
        momentum: of the running rates: ``running = (1 - momentum) running + momentum batch``; they move in training mode.
        demand: bits a step that come into the layer, as channels times bits of a channel; set by ``watch``, or by hand.
    """

    running_rate: Tensor
    demand: Tensor

    def __init__(self, channels: int, flip: float = 0.0, momentum: float = 0.01, step_mode: str = "m") -> None:
        super().__init__()
        if channels < 1 or not 0 <= flip <= 0.5:
            raise ValueError(f"InformationGate got {channels} channels, flip={flip}; at least 1, and a flip in [0, 0.5]")
        self.flip, self.momentum = flip, momentum
        self.logit = nn.Parameter(torch.full((channels,), 3.0))
        self.register_buffer("running_rate", torch.full((channels,), 0.1))
        self.register_buffer("demand", torch.zeros(()))
        self.step_mode = step_mode

    @property
    def gates(self) -> Tensor:
        """[C], in (0, 1)."""
        return torch.sigmoid(self.logit)

    def watch(self, layer: nn.Module) -> None:
        """Let ``layer`` (the convolution before) tell the demand: in training mode, the bits of its input channels."""
        layer.register_forward_pre_hook(_Watch(self))

    def forward(self, spikes: Tensor) -> Tensor:
        axis = 2 if self.step_mode == "m" else 1
        if spikes.dim() <= axis or spikes.shape[axis] != len(self.logit):
            raise ValueError(
                f"InformationGate of {len(self.logit)} channels got {list(spikes.shape)} in mode {self.step_mode!r}"
            )
        if self.training:
            rate = spikes.detach().float().mean([d for d in range(spikes.dim()) if d != axis])
            self.running_rate.lerp_(rate.to(self.running_rate.dtype), self.momentum)
        return spikes * self.gates.to(spikes.dtype).view(-1, *[1] * (spikes.dim() - axis - 1))

    def capacity(self) -> Tensor:
        """Bits a step of all channels, each as far as its gate is open."""
        return (self.gates * bsc_information(self.running_rate, self.flip)).sum()

    def extra_repr(self) -> str:
        return f"channels={len(self.logit)}, flip={self.flip}, step_mode={self.step_mode}"


class _Watch:
    """The hook of ``watch``. An object: deep copies of a net follow its reference to the gate, a closure's they share."""

    def __init__(self, gate: InformationGate) -> None:
        self.gate = gate

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        gate = self.gate
        if gate.training:
            x = args[0].detach()
            channels = x.shape[2 if gate.step_mode == "m" else 1]
            came = channels * bsc_information((x != 0).float().mean(), gate.flip)
            gate.demand.lerp_(came.to(gate.demand.dtype), gate.momentum if gate.demand else 1.0)


def information_loss(net: nn.Module, shortage: float = 0.01, gates: float = 0.001) -> Tensor:
    """What to add to the loss: for each gate in ``net``, ``shortage * max(0, demand - capacity) + gates * mean(gate)``.

    Raises:
        ValueError: the net has no InformationGate.
    """
    found = [module for module in net.modules() if isinstance(module, InformationGate)]
    if not found:
        raise ValueError(f"information_loss found no InformationGate in {type(net).__name__}")
    terms = [shortage * (gate.demand - gate.capacity()).clamp(min=0) + gates * gate.gates.mean() for gate in found]
    return torch.stack(terms).sum()
