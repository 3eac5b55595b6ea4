"""Warnings of converted layers about calls that share nothing, or run no kernels."""

import warnings
from typing import Any

from sj_tac.errors import CaptureWarning, ConversionError


def part(root: str) -> None:
    """Warn that a captured net's own call was gone around; Python shows the same warning once."""
    warnings.warn(
        f"a part of this converted {root} was called, or its forward: it runs as it is defined, right and slower. Only a "
        f"call of the {root} itself runs sj_tac's kernels; call that, or convert the part that you call",
        CaptureWarning,
        stacklevel=4,
    )


def unshared(sharing: Any, problem: str, stacklevel: int = 5) -> None:
    """Warn of a call in which a layer (its ``Sharing``) aggregates nothing, and keep the sentence for the report."""
    text = f"convolution {sharing.layer!r} {problem}"
    sharing.unshared[text] = None
    warnings.warn(text, CaptureWarning, stacklevel=stacklevel)


def single(sharing: Any, merges: bool) -> None:
    """Warn that a layer runs single steps, or folded frames, in front of a neuron that runs many.

    Raises:
        ConversionError: the neuron ``merges`` equal drives, which these are not.
    """
    if merges:
        raise ConversionError(
            f"convolution {sharing.layer!r} is in step mode 's', its neuron in 'm', and the neuron makes one step of equal "
            "drives (a binary collapse): set both to the same mode; a tool that sets it is to rewrite the source, before "
            "convert"
        )
    unshared(
        sharing,
        "is in step mode 's', its neuron in 'm': sj_tac shares nothing there, and each frame is computed. Set both to the "
        "same mode; a tool that sets it itself is to rewrite the source, before convert",
    )


def unknown(sharing: Any, shape: tuple[int, ...]) -> None:
    """Warn that a layer cannot tell frames from samples."""
    unshared(
        sharing,
        f"computes what its source does, for it cannot tell T of its rows {list(shape)}: the call's shapes are not like "
        "those of example_input, or a part of the net was called. Call the net itself, or convert it with an example of "
        "this kind",
    )


def counted(layer: str, k: int) -> None:
    """Warn that a counter of operations watches a layer that aggregates frames."""
    warnings.warn(
        f"SpikingJelly's operation counter watches convolution {layer!r} at k = {k}, which takes weighted sums of frames: "
        "no spikes, so that synaptic operations and energies of it do not hold. sj_tac.report(net) lists "
        "multiply-accumulates; for energies count sj_tac.restore(net)",
        CaptureWarning,
        stacklevel=5,
    )


def around(sharing: Any) -> None:
    """Warn that a layer's convolution ran, and no call of the layer that would aggregate its frames."""
    unshared(
        sharing,
        "computed every frame of a call, whatever its k: its weight was used without a call of the layer on all frames. The "
        "forward takes the weight or _conv_forward, sets step mode 's', or passes rows whose T is unknown. Call the layer "
        "on all frames, or convert the net with this forward",
        stacklevel=4,
    )
