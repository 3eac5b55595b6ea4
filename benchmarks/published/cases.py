"""The published models that are tried: where their code lies, how each is built, and on what input."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

# Folder of a checkout -> its repository on GitHub.
REPOSITORIES = {
    "spikformer": "ZK-Zhou/spikformer",
    "QKFormer": "zhouchenlin2096/QKFormer",
    "Spike-Driven-Transformer": "BICLab/Spike-Driven-Transformer",
    "Spike-Element-Wise-ResNet": "fangwei123456/Spike-Element-Wise-ResNet",
    "TCJA": "ridgerchu/TCJA",
    "SpikingResformer": "xyshi2000/SpikingResformer",
    "EAS-SNN": "Windere/EAS-SNN",
    "SpikeCLR": "maxime-vaillant/SpikeCLR",
    "Parallel-Spiking-Neuron": "fangwei123456/Parallel-Spiking-Neuron",
    "amazing-cls": "StephenTaylor1998/amazing-cls",
    "SDformerFlow": "yitian97/SDformerFlow",
    "neurobench": "NeuroBench/neurobench",
}

# Of every input: more than one, as frames are folded into the batch.
SAMPLES = 2


@dataclass(frozen=True)
class Case:
    """One model of a repository.

    Attributes:
        repository: the folder of its checkout.
        file: the file of its class, from there.
        build: makes the model from the imported file.
        shape: of the input, of ``SAMPLES`` samples.
        events: the input is events, of a pattern that drifts, and not a standard normal image.
        size: what was made smaller than published; empty where nothing was.
        root: the folder that imports start from, from the checkout; "" for the file's own.
        bare: packages whose ``__init__`` is skipped, as it imports a training pipeline.
        neurons: names of the model's own neuron classes, where they are not SpikingJelly's.
        registered: what the class of a neuron is registered with (``sj_tac.register_neuron``): its decay, of the module.
    """

    repository: str
    file: str
    build: Callable[[ModuleType], Any]
    shape: tuple[int, ...]
    events: bool = False
    size: str = ""
    root: str = ""
    bare: tuple[str, ...] = ()
    neurons: tuple[str, ...] = ()
    registered: Mapping[str, Callable[[Any], float]] = field(default_factory=dict)


def _spikformer_cifar(code: ModuleType) -> Any:
    sizes = {"img_size_h": 32, "img_size_w": 32, "patch_size": 4, "embed_dims": 384, "num_heads": 12}
    return code.spikformer(mlp_ratios=4, in_channels=3, num_classes=10, depths=4, sr_ratios=1, T=4, **sizes)


def _qkformer_cifar(code: ModuleType, classes: int) -> Any:
    sizes = {"img_size_h": 32, "img_size_w": 32, "patch_size": 4, "embed_dims": 384, "num_heads": 8}
    return code.QKFormer(mlp_ratios=4, in_channels=3, num_classes=classes, depths=4, sr_ratios=1, T=4, **sizes)


def _sdt(code: ModuleType, size: int, **options: Any) -> Any:
    return code.sdt(img_size_h=size, img_size_w=size, num_heads=8, mlp_ratios=4, sr_ratios=1, **options)


def _spike_clr(code: ModuleType, name: str) -> Any:
    from spikingjelly.activation_based import surrogate

    options = {"decay_input": False, "surrogate_function": surrogate.ATan(), "backend": "cupy"}
    head = importlib.import_module("models.finetuning").FinetuningModule
    return head(getattr(code, name)(in_channels=2, **options), 512, 10)


def _psn_sew(code: ModuleType, kind: str) -> Any:
    """Their SEW ResNet takes any neuron and hands T to it; LIFNode has no such parameter."""
    from spikingjelly.activation_based import neuron, surrogate

    def build(T: int, **options: Any) -> Any:
        if kind == "PSN":
            return neuron.PSN(T=T, surrogate_function=surrogate.ATan())
        return neuron.LIFNode(surrogate_function=surrogate.ATan(), detach_reset=True, **options)

    return code.sew_resnet18(cnf="ADD", pe=None, spiking_neuron=build, T=4)


def _yolo(code: ModuleType, full: bool) -> Any:
    """SYOLOX-S: a spiking backbone with an analog pyramid, or both spiking."""
    from spikingjelly.activation_based import surrogate

    if not full:
        return code.SpikingYOLOPAFPN(0.33, 0.5, in_dim=2, act="silu", spike_fn=surrogate.ATan(2.0))
    pyramid = code.YOLOPAFPN(0.33, 0.5, in_dim=2, act="silu")
    return importlib.import_module("yolox.utils.utils_snn").convert_to_spiking(pyramid, spike_fn=surrogate.ATan(2.0))


def _flow(code: ModuleType, kind: str) -> Any:
    """train_DSEC_supervised_SDformerFlow_en4.yml, on a smaller crop and fewer blocks."""
    from spikingjelly.activation_based import functional

    unet = {
        "name": "MS_SpikingformerFlowNet_en4", "encoding": "voxel", "norm_input": "minmax", "num_bins": 10,
        "base_num_channels": 48, "kernel_size": 3, "activations": ["relu", None], "final_activation": None,
        "mask_output": True, "norm": None, "use_upsample_conv": False,
        "spiking_neuron": {
            "num_steps": 10, "v_th": 0.1, "v_reset": None, "neuron_type": kind, "surrogate_fun": "surrogate.ATan()",
            "tau": 2.0, "detach_reset": True, "spike_norm": "BN",
        },
    }  # fmt: skip
    swin = {
        "use_arc": ["swinv1", "MS_PED_Spiking_PatchEmbed_Conv_sfn"], "swin_depths": [2, 2, 2, 2],
        "swin_num_heads": [3, 6, 12, 24], "swin_out_indices": [0, 1, 2, 3], "swin_patch_size": [1, 1, 2, 2],
        "window_size": [2, 3, 3], "pretrained_window_size": [0, 0, 0], "mlp_ratio": 4, "input_size": [96, 128],
    }  # fmt: skip
    net = code.MS_SpikingformerFlowNet_en4(unet, swin)
    net.init_weights()
    functional.set_step_mode(net, "m")
    return net


_GESTURE: dict[str, Any] = {"layers": [1, 1, 2, 4], "width": [64, 128, 256, 512], "in_channels": 2}
_AMAZING_LIF = {"type": "LIFNode", "v_reset": None, "detach_reset": True, "surrogate_function": {"type": "Sigmoid"}}
_AMAZING_IF = {"type": "IFNode", "surrogate_function": {"type": "ATan"}}


def _amazing(code: ModuleType, name: str, **options: Any) -> Any:
    return getattr(code, name)(**options)


def _amazing_spikformer(code: ModuleType) -> Any:
    """Their LayerNorm, which forward never calls, does not fit torch since 2.1: it is left out."""
    neuron = {"type": "LIFNode", "tau": 2.0, "detach_reset": True}
    return code.SpikformerDVS(neuron_cfg=neuron, norm_layer=lambda dim, step_mode: nn.Identity())


def _amazing_resnet(code: ModuleType, name: str, block: str) -> Any:
    options = {"layers": [2, 2, 2, 2], "width": [64, 128, 256, 512], "stride": [1, 2, 2, 2], "in_channels": 3}
    return getattr(code, name)(block_type=block, neuron_cfg=_AMAZING_IF, **options)


_amazing_case = partial(Case, "amazing-cls", root=".", bare=("amzcls", "amzcls.models", "amzcls.utils"))
_BACKBONES = "amzcls/models/backbone/"
_yolo_case = partial(Case, "EAS-SNN", root=".", bare=("yolox.models", "yolox.utils"), events=True, shape=(3, 2, 2, 256, 256))
_SNN = "models/STSwinNet_SNN/Spiking_STSwinNet.py"

CASES: dict[str, Case] = {
    "Spikformer, CIFAR10": Case("spikformer", "cifar10/model.py", _spikformer_cifar, (2, 3, 32, 32)),
    "Spikformer, CIFAR10-DVS": Case(
        "spikformer", "cifar10dvs/model.py", lambda code: code.spikformer(), (2, 16, 2, 128, 128), events=True
    ),
    "Spikformer-8-512, ImageNet": Case("spikformer", "imagenet/model.py", lambda code: code.spikformer(), (2, 3, 224, 224)),
    "QKFormer, CIFAR10": Case("QKFormer", "cifar10/model.py", partial(_qkformer_cifar, classes=10), (2, 3, 32, 32)),
    "QKFormer, CIFAR100": Case("QKFormer", "cifar100/model.py", partial(_qkformer_cifar, classes=100), (2, 3, 32, 32)),
    "QKFormer, CIFAR10-DVS": Case(
        "QKFormer", "cifar10-dvs/model.py", lambda code: code.QKFormer(), (2, 16, 2, 128, 128), events=True
    ),
    "QKFormer, DVS-Gesture": Case(
        "QKFormer", "dvs128-gesture/model.py", lambda code: code.QKFormer(), (2, 16, 2, 128, 128), events=True
    ),
    "QKFormer-10-384, ImageNet": Case(
        "QKFormer", "imagenet/qkformer.py", lambda code: code.QKFormer_10_384(T=4), (2, 3, 224, 224)
    ),
    "SDT-2-256, CIFAR10": Case(
        "Spike-Driven-Transformer", "model/spikeformer.py", root=".", shape=(2, 3, 32, 32),
        build=partial(
            _sdt, size=32, patch_size=4, in_channels=3, num_classes=10, embed_dims=256, depths=2, pooling_stat="0011"
        ),
    ),
    "SDT-2-256, CIFAR10-DVS": Case(
        "Spike-Driven-Transformer", "model/spikeformer.py", root=".", shape=(2, 10, 2, 64, 64), events=True,
        build=partial(
            _sdt, size=64, patch_size=4, num_classes=10, embed_dims=256, depths=2, T=10, pooling_stat="0011", dvs_mode=True,
            TET=True,
        ),
    ),
    "SDT-8-384, ImageNet": Case(
        "Spike-Driven-Transformer", "model/spikeformer.py", root=".", shape=(2, 3, 224, 224),
        build=partial(_sdt, size=224, patch_size=16, in_channels=3, num_classes=1000, embed_dims=384, depths=8),
    ),
    "SEW ResNet-18, ImageNet": Case(
        "Spike-Element-Wise-ResNet", "imagenet/sew_resnet.py",
        lambda code: code.sew_resnet18(T=4, connect_f="ADD"), (2, 3, 224, 224),
    ),
    "SEW ResNet-50, ImageNet": Case(
        "Spike-Element-Wise-ResNet", "imagenet/sew_resnet.py",
        lambda code: code.sew_resnet50(T=4, connect_f="ADD"), (2, 3, 224, 224),
    ),
    "Spiking ResNet-18, ImageNet": Case(
        "Spike-Element-Wise-ResNet", "imagenet/spiking_resnet.py", lambda code: code.spiking_resnet18(T=4), (2, 3, 224, 224)
    ),
    "7B SEW net, DVS-Gesture": Case(
        "Spike-Element-Wise-ResNet", "dvsgesture/smodels.py", lambda code: code.SEWResNet("ADD"), (2, 16, 2, 128, 128), True
    ),
    "7B spiking net, DVS-Gesture": Case(
        "Spike-Element-Wise-ResNet", "dvsgesture/smodels.py", lambda code: code.SpikingResNet(), (2, 16, 2, 128, 128), True
    ),
    "SEW net, CIFAR10-DVS": Case(
        "Spike-Element-Wise-ResNet", "cifar10dvs/smodels.py", lambda code: code.SEWResNet("ADD"), (2, 16, 2, 128, 128), True
    ),
    "TCJA, DVS-Gesture": Case("TCJA", "src/dvs128.py", lambda code: code.CextNet(128), (2, 20, 2, 128, 128), True),
    "TCJA, CIFAR10-DVS": Case("TCJA", "src/cifar10dvs.py", lambda code: code.VGGNet(), (2, 10, 2, 128, 128), True),
    "TCJA, N-Caltech101": Case("TCJA", "src/caltech101.py", lambda code: code.CextNet(64), (2, 14, 2, 180, 240), True),
    "TCJA with TET, CIFAR10-DVS": Case(
        "TCJA", "src/tet/models/VGG_models.py", lambda code: code.VGGSNN_TCJA(), (2, 10, 2, 48, 48), True, root="src",
        neurons=("LIFSpike",),
    ),
    "SpikingResformer-Ti, ImageNet": Case(
        "SpikingResformer", "models/spikingresformer.py",
        lambda code: code.spikingresformer_ti(T=4), (2, 3, 224, 224), root=".",
    ),
    "SpikingResformer, DVS-Gesture": Case(
        "SpikingResformer", "models/spikingresformer.py",
        lambda code: code.spikingresformer_dvsg(T=16, num_classes=11, img_size=64), (2, 16, 3, 64, 64), True, root=".",
    ),
    "SpikingResformer, CIFAR10": Case(
        "SpikingResformer", "models/spikingresformer.py",
        lambda code: code.spikingresformer_cifar(T=4, num_classes=10, img_size=32), (2, 3, 32, 32), root=".",
    ),
    "SYOLOX-S backbone": _yolo_case("yolox/models/spiking_yolo_pafpn.py", partial(_yolo, full=False)),
    "SYOLOX-S, spiking pyramid": _yolo_case("yolox/models/yolo_pafpn.py", partial(_yolo, full=True)),
    "SpikeCLR, SEW ResNet-18": Case(
        "SpikeCLR", "models/backbones/sew_resnet.py", partial(_spike_clr, name="SEWResNet18"), (4, 2, 2, 48, 48), True,
        root=".",
    ),
    "SpikeCLR, separable ResNet": Case(
        "SpikeCLR", "models/backbones/sew_resnet.py", partial(_spike_clr, name="SEWResNet18Sep"), (4, 2, 2, 48, 48), True,
        root=".",
    ),
    "SpikeCLR, VGG9": Case(
        "SpikeCLR", "models/backbones/spiking_vgg.py", partial(_spike_clr, name="SpikingVGG9"), (4, 2, 2, 48, 48), True,
        root=".",
    ),
    "PSN, CIFAR10": Case(
        "Parallel-Spiking-Neuron", "cifar10/train_cf10.py", lambda code: code.CIFAR10Net(256, "if5", 4), (4, 2, 3, 32, 32),
        neurons=("IFNode5",),
    ),
    "SEW ResNet-18 with PSN, ImageNet": Case(
        "Parallel-Spiking-Neuron", "imagenet/sew_resnet.py", partial(_psn_sew, kind="PSN"), (2, 3, 224, 224),
        neurons=("PSN",),
    ),
    "SEW ResNet-18 with LIF, ImageNet": Case(
        "Parallel-Spiking-Neuron", "imagenet/sew_resnet.py", partial(_psn_sew, kind="LIF"), (2, 3, 224, 224)
    ),
    "sliding PSN, CIFAR10-DVS": Case(
        "Parallel-Spiking-Neuron", "cifar10dvs/models.py", lambda code: code.VGGPSN(), (2, 10, 2, 48, 48), True,
        neurons=("MaskedSlidingPSN",),
    ),
    "LIF with TEBN, CIFAR10-DVS": Case(
        "Parallel-Spiking-Neuron", "cifar10dvs/models.py", lambda code: code.VGGSNN(), (2, 10, 2, 48, 48), True,
        neurons=("LIFSpike",),
    ),
    "LIF, sequential CIFAR10": Case(
        "Parallel-Spiking-Neuron", "sequential_cifar/train_secf10.py",
        lambda code: code.CIFAR10Net(128, "lif", 32, 10), (2, 3, 32, 32),
    ),
    "GLIF, sequential CIFAR10": Case(
        "Parallel-Spiking-Neuron", "sequential_cifar/train_secf10.py",
        lambda code: code.CIFAR10Net(128, "glif", 32, 10), (2, 3, 32, 32), neurons=("LIFSpike_CW",),
    ),
    "AmazingCls VGG-11, CIFAR10-DVS 48x48": _amazing_case(
        _BACKBONES + "vgg/vgg.py", partial(_amazing, name="VGG11R48x48", neuron_cfg=_AMAZING_LIF, **_GESTURE),
        (10, 2, 2, 48, 48), True,
    ),
    "AmazingCls legacy VGG-11, CIFAR10-DVS 48x48": _amazing_case(
        _BACKBONES + "vgg/vgg_legacy.py", partial(_amazing, name="VGG11R48x48Legacy"), (10, 2, 2, 48, 48), True,
        neurons=("LIFSpike",),
    ),
    "AmazingCls state VGG-11, CIFAR10-DVS": _amazing_case(
        _BACKBONES + "vgg/vgg_state.py",
        partial(
            _amazing, name="StateVGG11", h=48, w=48, **_GESTURE,
            neuron_cfg={"type": "StateLIFNode", "surrogate_function": {"type": "Sigmoid"}},
        ),
        (10, 2, 2, 48, 48), True, size="48x48 for 128x128",
    ),
    "AmazingCls MS-ResNet-18, CIFAR10": _amazing_case(
        _BACKBONES + "resnet/ms_resnet.py", partial(_amazing_resnet, name="MSResNetCifar", block="MSBasicBlock"),
        (4, 2, 3, 32, 32),
    ),
    "AmazingCls SEW ResNet, bottlenecks, CIFAR10": _amazing_case(
        _BACKBONES + "resnet/sew_resnet.py", partial(_amazing_resnet, name="SEWResNetCifar", block="SEWBottleneck"),
        (4, 2, 3, 32, 32),
    ),
    "AmazingCls SEW ResNet-18, ImageNet": _amazing_case(
        _BACKBONES + "resnet/sew_resnet.py", partial(_amazing_resnet, name="SEWResNet", block="SEWBasicBlock"),
        (4, 2, 3, 224, 224),
    ),
    "AmazingCls Spikformer, CIFAR10-DVS": _amazing_case(
        _BACKBONES + "spikformer/spikformer_dvs.py", _amazing_spikformer, (10, 2, 2, 128, 128), True
    ),
    "SDformerFlow with PSN, DSEC": Case(
        "SDformerFlow", _SNN, partial(_flow, kind="psn"), (2, 10, 2, 96, 128), True, root=".", neurons=("PSN",),
        size="96x128 for 288x384, 48 channels for 96, windows 3x3 for 9x9, 8 blocks for 12",
    ),
    "SDformerFlow with LIF, DSEC": Case(
        "SDformerFlow", _SNN, partial(_flow, kind="lif"), (2, 10, 2, 96, 128), True, root=".",
        size="96x128 for 288x384, 48 channels for 96, windows 3x3 for 9x9, 8 blocks for 12",
    ),
    "NeuroBench detector": Case(
        "neurobench", "examples/obj_detection/obj_det_model.py", lambda code: code.Vanilla_lif(cin=6, cout=256, base=16),
        (10, 2, 6, 128, 128), True, size="128x128 for 360x640",
    ),
    "NeuroBench gesture net": Case(
        "neurobench", "examples/dvs_gesture/snn.py", lambda code: code.Net(), (2, 2, 32, 32), True
    ),
}  # fmt: skip


def _gated_decay(node: Any) -> float:
    """GLIF's: what its gate leaves of the membrane, a channel; the weights of a group need one number."""
    alpha, tau = node.alpha.sigmoid(), node.tau.sigmoid()
    return float((1 - alpha * (1 - tau)).mean())


# The same models once more, with the author's neuron registered.
_REGISTERED: dict[str, Mapping[str, Callable[[Any], float]]] = {
    "GLIF, sequential CIFAR10": {"LIFSpike_CW": _gated_decay},
    "AmazingCls state VGG-11, CIFAR10-DVS": {"StateLIFNode": lambda node: 1 - 1 / node.tau},
}
CASES |= {f"{name}, registered": replace(CASES[name], registered=decays) for name, decays in _REGISTERED.items()}
