"""FTC, "Fourier temporal convolution": a learnable second-order filter for each channel in place of the membrane's decay."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host

# sigmoid reaches 1.0 in floating point; a pole must not reach the unit circle for any value of its parameter.
LARGEST_RADIUS = 1 - 2.0**-10


class BiquadNode(host.MemoryModule):
    """A spiking neuron whose membrane is a biquad, with parameters of its own for each channel c:

        v[t] = a1 v[t-1] + a2 v[t-2] + b0 x[t] + b1 x[t-1],   s[t] = (v[t] >= v_threshold),   then the reset
        a1 = 2 r cos(theta),  a2 = -r^2,  r = R sigmoid(radius) < 1,  theta = pi sigmoid(angle)

    Its poles are ``r exp(+-i theta)``, inside the unit circle whatever the parameters are, so that it is stable by
    construction. v[t-1] and v[t-2] are voltages after their resets.

    Source: FTC of J. Qin, arXiv 2603.13810, as defined by the FourierTemporalConv of its library, mlx-snn. R is ours: there
    it is 1, which floating point lets a pole reach.

    Args:
        channels: C of the frames [T, N, C, ...] (step_mode "m") or [N, C, ...] (step_mode "s").
        v_threshold, v_reset: as of SpikingJelly's neurons; v_reset None is the soft reset.
        surrogate_function: one of SpikingJelly's; ATan by default.
        detach_reset: whether the reset is kept out of the gradient.
        radius, angle: where r and theta start; 0.9 and pi / 4 as in the source.

    Raises:
        ValueError: a number of channels, radius or angle that cannot be, or frames of another number of channels.
    """

    # Memories: a float until the first step, then [N, C, ...].
    v: Any
    v_before: Any
    x_before: Any

    def __init__(
        self,
        channels: int,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: Any = None,
        detach_reset: bool = False,
        radius: float = 0.9,
        angle: float = math.pi / 4,
        step_mode: str = "m",
    ) -> None:
        super().__init__()
        if channels < 1:
            raise ValueError(f"BiquadNode got {channels} channels; at least 1")
        if not 0 < radius < LARGEST_RADIUS or not 0 < angle < math.pi:
            raise ValueError(f"BiquadNode got radius={radius}, angle={angle}; 0 < radius < {LARGEST_RADIUS}, 0 < angle < pi")
        self.v_threshold, self.v_reset, self.detach_reset = v_threshold, v_reset, detach_reset
        self.surrogate_function = surrogate_function or host.surrogate.ATan()
        self.radius = nn.Parameter(torch.full((channels,), math.log(radius / (LARGEST_RADIUS - radius))))
        self.angle = nn.Parameter(torch.full((channels,), math.log(angle / (math.pi - angle))))
        self.b0 = nn.Parameter(torch.ones(channels))
        self.b1 = nn.Parameter(torch.zeros(channels))
        for name in ("v", "v_before", "x_before"):
            self.register_memory(name, 0.0)
        self.step_mode = step_mode

    @classmethod
    def like(cls, node: Any, channels: int) -> BiquadNode:
        """The biquad nearest to a LIF, IF or PLIF neuron: its threshold, reset, surrogate; below threshold its response.

        With theta near 0 and ``b1 = -r b0`` one of the two poles is cancelled, the other is the neuron's decay (below R).
        """
        with torch.no_grad():
            beta, gain = float(host.decay(node, torch.float64)), float(host.input_gain(node, torch.float64))
        beta = min(max(beta, 1e-3), LARGEST_RADIUS - 1e-3)
        made = cls(channels, node.v_threshold, node.v_reset, node.surrogate_function, node.detach_reset, beta, 1e-2)
        with torch.no_grad():
            made.b0.fill_(gain)
            made.b1.fill_(-beta * gain)
        made.step_mode = node.step_mode
        return made

    def coefficients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """a1, a2, b0, b1, each [C]."""
        r = LARGEST_RADIUS * torch.sigmoid(self.radius)
        theta = math.pi * torch.sigmoid(self.angle)
        return 2 * r * torch.cos(theta), -(r**2), self.b0, self.b1

    def poles(self) -> Tensor:
        """The two poles of each channel's filter, complex [C, 2]: the roots of ``z^2 - a1 z - a2``."""
        a1, a2, _, _ = (value.detach().double() for value in self.coefficients())
        root = torch.sqrt((a1**2 / 4 + a2).to(torch.complex128))
        return torch.stack([a1 / 2 + root, a1 / 2 - root], 1)

    def single_step_forward(self, x: Tensor) -> Tensor:
        return self._steps(x.unsqueeze(0)).squeeze(0)

    def multi_step_forward(self, x_seq: Tensor) -> Tensor:
        return self._steps(x_seq)

    def _steps(self, x: Tensor) -> Tensor:
        if x.dim() < 3 or x.shape[2] != len(self.b0):
            raise ValueError(f"BiquadNode of {len(self.b0)} channels got frames {list(x.shape)}; it takes [T, N, C, ...]")
        shape = (-1, *[1] * (x.dim() - 3))
        a1, a2, b0, b1 = (value.to(x.dtype).view(shape) for value in self.coefficients())
        spikes = []
        for frame in x:
            charged = a1 * self.v + a2 * self.v_before + b0 * frame + b1 * self.x_before
            spike = self.surrogate_function(charged - self.v_threshold)
            resets = spike.detach() if self.detach_reset else spike
            if self.v_reset is None:
                voltage = charged - resets * self.v_threshold
            else:
                voltage = resets * self.v_reset + (1 - resets) * charged
            self.v_before, self.v, self.x_before = self.v, voltage, frame
            spikes.append(spike)
        return torch.stack(spikes)

    def extra_repr(self) -> str:
        return f"channels={len(self.b0)}, v_threshold={self.v_threshold}, v_reset={self.v_reset}, step_mode={self.step_mode}"
