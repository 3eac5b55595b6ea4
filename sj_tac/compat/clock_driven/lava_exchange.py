"""The old ``spikingjelly.clock_driven.lava_exchange``: copies of the old ``neuron.py`` import it."""

from __future__ import annotations

from sj_tac.compat.clock_driven import lost

_OLD = (
    "BatchNorm2d", "CubaLIFNode", "LeakyIntegratorStep", "NXT_to_TNX", "TNX_to_NXT", "avgpool2d_to_lava_synapse_pool",
    "check_conv2d", "check_fc", "conv2d_to_lava_synapse_conv", "lava_neuron_forward", "linear_to_lava_synapse_dense",
    "quantize_8bit", "step_quantize", "to_lava_block_conv", "to_lava_block_dense", "to_lava_block_flatten", "to_lava_neuron",
    "to_lava_neuron_param_dict",
)  # fmt: skip
_BECAME = "with Lava-DL installed, spikingjelly.activation_based.lava_exchange writes nets for it"

__getattr__ = lost("spikingjelly.clock_driven.lava_exchange", dict.fromkeys(_OLD, _BECAME))
