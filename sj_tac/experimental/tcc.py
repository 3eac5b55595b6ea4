"""TCC, "temporal collapse convolution": frames without a spike are not convolved. Exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from sj_tac import host


class SilentFrameConv2d(host.layer.Conv2d):
    """A Conv2d that computes only frames that hold something: of a frame of zeros the output is the bias.

    A frame is one sample at one step; where all its values are 0 it is skipped, and the output is the dense one's.
    Where a gradient with respect to the input is wanted all frames are computed: what reaches a silent frame's neurons
    through their surrogate is not zero. ``skipped`` is the share of frames that the last call left out.

    Source: TCC of J. Qin, arXiv 2603.13810. The TemporalCollapseConv of its library, mlx-snn, goes by the layer's own output
    of the call before and is approximate; what can be skipped without any error are silent inputs.

    Args: those of SpikingJelly's layer.Conv2d. Frames [T, N, C, H, W] (step_mode "m") or [N, C, H, W] ("s").
    """

    skipped: float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        frames = x.flatten(0, 1) if self.step_mode == "m" else x
        if frames.dim() != 4 or (torch.is_grad_enabled() and x.requires_grad):
            self.skipped = 0.0
            result: Tensor = super().forward(x)
            return result
        heard = frames.flatten(1).ne(0).any(1).nonzero().flatten()  # NaN is not 0
        self.skipped = 1 - len(heard) / max(1, len(frames))
        if len(heard) == len(frames):
            y = self._conv_forward(frames, self.weight, self.bias)
        else:
            # One frame is computed in any case: it is where the output's shape and dtype (autocast's, too) come from.
            some = self._conv_forward(frames[heard] if len(heard) else frames[:1], self.weight, self.bias)
            silent = some.new_zeros(()) if self.bias is None else self.bias.to(some.dtype).view(1, -1, 1, 1)
            y = silent.expand(len(frames), *some.shape[1:]).clone()
            if len(heard):
                y = y.index_copy(0, heard, some)
        whole: Tensor = y.unflatten(0, x.shape[:2]) if self.step_mode == "m" else y
        return whole
