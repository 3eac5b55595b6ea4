"""The old ``spikingjelly.clock_driven.functional``."""

from spikingjelly.activation_based.functional import (
    first_spike_index as first_spike_index,
    kaiming_normal_conv_linear_weight as kaiming_normal_conv_linear_weight,
    kernel_dot_product as kernel_dot_product,
    multi_step_forward as multi_step_forward,
    redundant_one_hot as redundant_one_hot,
    reset_net as reset_net,
    seq_to_ann_forward as seq_to_ann_forward,
    set_threshold_margin as set_threshold_margin,
    spike_similar_loss as spike_similar_loss,
    temporal_efficient_training_cross_entropy as temporal_efficient_training_cross_entropy,
)

from sj_tac.compat.clock_driven import lost, neuron as neuron

_FUSE = "torch.nn.utils.fusion.fuse_conv_bn_eval(conv, bn) makes the same convolution"
__getattr__ = lost(
    "spikingjelly.clock_driven.functional",
    {
        "spike_cluster": "copy the function from SpikingJelly 0.0.0.0.12 if the loss needs it",
        "fused_conv2d_weight_of_convbn2d": _FUSE,
        "fused_conv2d_bias_of_convbn2d": _FUSE,
        "scale_fused_conv2d_weight_of_convbn2d": _FUSE + ", and its weight can be scaled",
        "scale_fused_conv2d_bias_of_convbn2d": _FUSE + ", and its bias can be scaled",
        "fuse_convbn2d": _FUSE,
    },
)
