"""The story on one page: choose a policy where none is given, look at the model, decide, swap."""

from __future__ import annotations

from typing import Any

from torch import nn

from sj_tac.conversion import convert_with
from sj_tac.errors import PolicyError
from sj_tac.tuning.search import choose


def convert(
    model: nn.Module,
    policy: Any = "preserve",
    k: int = 2,
    *,
    example_input: Any = None,
    backend: str = "auto",
    fuse: bool = True,
    inplace: bool = False,
    calibration: Any = None,
) -> nn.Module:
    """A copy of ``model`` whose Conv -> BatchNorm -> LIF chains run one convolution for every ``k`` frames.

    Args:
        model: a SpikingJelly net in step_mode "m"; input [T, N, C, H, W]. It is left untouched.
        policy: "preserve" (T stays: event data), "collapse" (T/k frames: rate-coded data), "keep", a dict, a ``Policy``,
            the path of a YAML file, or "auto": ``sj_tac.diagnose`` and ``sj_tac.search`` on ``calibration``, with defaults.
        k: frames per convolution where the policy does not say.
        example_input: a real input; needed by models that ask their input's shape in forward. With it the report has MACs,
            and the converted net is run: its output must have the source's shape and be finite, and at k=1 be the same.
        backend: "auto" (numba on the CPU, cupy on CUDA, else reference), or the name of a kernel that must run.
        fuse: run each chain as one operator where the graph allows; False keeps every module's own work, the definition.
        inplace: change ``model`` itself; needed where it cannot be deep-copied.
        calibration: for "auto" alone: a few batches of frames [T, N, C, H, W] or (frames, labels). With labels at most a
            point of accuracy is lost on them; without, the predictions of 99 % stay. The report carries the evidence.

    Returns:
        The same class with the same parameter names and state_dict keys; ``sj_tac.report`` says what became of each layer.

    Raises:
        ModelTypeError, TraceError, PolicyError, BackendError, and ConversionError: no chain, converted before, no deep copy,
        or the converted net fails on ``example_input`` (then it names the first layer that differs). With "auto" also
        BatchError and SearchError: no policy is faster. The model is then as it was.
    """
    evidence = None
    if isinstance(policy, str) and policy == "auto":
        if calibration is None:
            raise PolicyError(
                'policy="auto" measures on your data: convert(model, "auto", calibration=batches), with a few batches of '
                "frames [T, N, C, H, W] or (frames, labels)"
            )
        if k != 2 or not fuse:
            raise PolicyError(f'policy="auto" chooses k for each layer and measures fused kernels; drop k={k}, fuse={fuse}')
        policy = choose(model, calibration, backend=backend)
        evidence = policy.evidence
    elif calibration is not None:
        raise PolicyError(f'calibration= is for policy="auto"; with policy={policy!r} there is nothing to choose')
    return convert_with(
        model, policy, k, example_input=example_input, backend=backend, fuse=fuse, inplace=inplace, evidence=evidence
    )
