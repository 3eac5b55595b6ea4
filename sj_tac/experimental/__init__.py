"""The paper's other operators, so that its comparison can be run. They are slower than TAC and TAC-TP; that is its finding.

``FTC`` (a learnable biquad for a neuron), ``IMC`` (gates on the information that channels carry) and ``TCC`` (silent frames
skipped, exactly) keep one convolution a frame, so none of them saves what TAC saves. Names here may change without notice.
"""

from sj_tac.experimental.ftc import BiquadNode
from sj_tac.experimental.imc import InformationGate, bsc_information, information_loss, minimum_channels
from sj_tac.experimental.replace import replace
from sj_tac.experimental.tcc import SilentFrameConv2d

__all__ = [
    "BiquadNode",
    "InformationGate",
    "SilentFrameConv2d",
    "bsc_information",
    "information_loss",
    "minimum_channels",
    "replace",
]
