"""Code as it was written for SpikingJelly 0.0.0.0.12, run there and on the installed host: python old_code.py where in out.

where: "old" (nothing is imported in front) or "new" (sj_tac.compat.clock_driven is); in: states to load, or "-"; out: a
file. A last word "14" leaves out what is broken in 0.0.0.0.14.
"""

import itertools
import sys

import torch
import torch.nn as nn

if sys.argv[1] == "new":
    import sj_tac.compat.clock_driven  # noqa: F401

from spikingjelly.clock_driven import base, encoding, functional, layer, neuron, rnn, surrogate

T, N = 6, 3
ON_14 = sys.argv[4:] == ["14"]


class SewBlock(nn.Module):
    """Spikes of two convolutions added to those that come in; containers fold time."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = layer.SeqToANNContainer(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
        self.sn1 = neuron.MultiStepIFNode(detach_reset=True, surrogate_function=surrogate.ATan(), backend="torch")
        self.conv2 = layer.SeqToANNContainer(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
        self.sn2 = neuron.MultiStepParametricLIFNode(init_tau=2.0, detach_reset=True, surrogate_function=surrogate.ATan())

    def forward(self, x):
        return self.sn2(self.conv2(self.sn1(self.conv1(x)))) + x


class Sew(nn.Module):
    """A residual net of the SEW kind."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.sn = neuron.MultiStepIFNode(detach_reset=True)
        self.blocks = nn.Sequential(SewBlock(6), SewBlock(6))
        self.pool = layer.SeqToANNContainer(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = functional.seq_to_ann_forward(x, self.stem)
        return self.fc(self.pool(self.blocks(self.sn(x))))


class OwnContainer(nn.Module):
    """The wrapper that many repositories carry themselves; its keys have a level 'module'."""

    def __init__(self, *args):
        super().__init__()
        self.module = nn.Sequential(*args) if len(args) > 1 else args[0]

    def forward(self, x):
        y = self.module(x.flatten(0, 1))
        return y.view(x.shape[0], x.shape[1], *y.shape[1:])


class Tet(nn.Module):
    """Batch first, own containers, threshold-dependent norms, outputs of every step for the TET loss."""

    def __init__(self):
        super().__init__()
        lif = dict(tau=2.0, decay_input=True, v_reset=None, surrogate_function=surrogate.Sigmoid(), detach_reset=False)
        self.layer1 = nn.Sequential(
            OwnContainer(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)), neuron.MultiStepLIFNode(**lif)
        )
        self.layer2 = layer.SeqToANNContainer(nn.Conv2d(6, 8, 3, padding=1))
        self.norm = layer.MultiStepThresholdDependentBatchNorm2d(1.0, 1.0, 8)
        self.lif = neuron.MultiStepLIFNode(2.0, True, 1.0, 0.0, surrogate.ATan(), True, "torch")
        self.drop = layer.MultiStepDropout(0.3)
        self.fc = OwnContainer(nn.Linear(8 * 64, 5))

    def forward(self, x):
        x = self.layer1(x.transpose(0, 1))
        x = self.drop(self.lif(self.norm(self.layer2(x))))
        return self.fc(x.flatten(2))


class Attention(nn.Module):
    """Spiking self-attention on folded time: Linear and BatchNorm1d on [T * N, ...], neurons on [T, N, ...]."""

    def __init__(self, width=8):
        super().__init__()
        for name in "qkv":
            setattr(self, f"{name}_linear", nn.Linear(width, width))
            setattr(self, f"{name}_bn", nn.BatchNorm1d(width))
            setattr(
                self, f"{name}_lif", neuron.MultiStepLIFNode(tau=2.0, detach_reset=True, backend="cupy" if NEW else "torch")
            )
        self.attn_lif = neuron.MultiStepLIFNode(tau=2.0, v_threshold=0.5, detach_reset=True)

    def project(self, x, name):
        t, n, tokens, width = x.shape
        y = getattr(self, f"{name}_bn")(getattr(self, f"{name}_linear")(x.flatten(0, 1)).transpose(-1, -2)).transpose(-1, -2)
        return getattr(self, f"{name}_lif")(y.reshape(t, n, tokens, width).contiguous())

    def forward(self, x):
        q, k, v = (self.project(x, name) for name in "qkv")
        return self.attn_lif((q @ k.transpose(-2, -1)) @ v * 0.25)


class Transformer(nn.Module):
    """A patch stem, one attention block and a head, in the idiom of the spiking transformers."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.lif = neuron.MultiStepLIFNode(tau=2.0, detach_reset=True)
        self.pool = nn.MaxPool2d(2)
        self.attention = Attention()
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        t, n = x.shape[:2]
        y = self.bn(self.conv(x.flatten(0, 1)))
        y = self.lif(y.reshape(t, n, *y.shape[1:]).contiguous())
        y = self.pool(y.flatten(0, 1)).reshape(t, n, 8, -1).transpose(-1, -2)
        return self.head((y + self.attention(y)).mean(2))


class Steps(nn.Module):
    """One step a call, in a loop over time: plain neurons, plain dropout, and what else has a state."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), neuron.ParametricLIFNode(2.5, False, 0.5)
        )
        self.norm = layer.NeuNorm(6, 8, 8)
        self.drop = layer.Dropout2d(0.2)
        self.fc = nn.Sequential(
            nn.Flatten(),
            layer.Dropout(0.3),
            nn.Linear(384, 12),
            neuron.LIFNode(3.0, True, 0.05, surrogate_function=surrogate.SoftSign()),
        )
        self.again = layer.LinearRecurrentContainer(neuron.IFNode(0.2), 12, 12)
        self.feedback = layer.ElementWiseRecurrentContainer(neuron.LIFNode(v_threshold=0.4), lambda y, x: y + x)
        self.filter = layer.SynapseFilter(tau=3.0, learnable=True)

    def forward(self, x):
        return torch.stack([self.filter(self.feedback(self.again(self.fc(self.drop(self.norm(self.conv(f))))))) for f in x])


class Mixed(nn.Module):
    """Containers that step, attention over time, a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.steps = layer.MultiStepContainer(nn.Conv2d(2, 6, 3, padding=1), neuron.IFNode(v_threshold=0.3))
        self.attention = nn.Identity() if ON_14 else layer.MultiStepTemporalWiseAttention(T, 2)
        self.drop = layer.MultiStepDropout2d(0.2)
        self.lstm = rnn.SpikingLSTM(6 * 64, 7, 1, surrogate_function1=surrogate.Erf())

    def forward(self, x):
        return self.lstm(self.drop(self.attention(self.steps(x))).flatten(2))[0]


class OwnMemory(base.MemoryModule):
    """A module of the user's own that keeps state and writes its forward."""

    def __init__(self):
        super().__init__()
        self.register_memory("sum", 0.0)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        self.sum = self.sum * self.scale + x
        return self.sum


class OwnSurrogate(surrogate.SurrogateFunctionBase):
    """A surrogate of the user's own, its parameter passed on by position."""

    def __init__(self, gamma=1.5, spiking=True):
        super().__init__(gamma, spiking)

    @staticmethod
    def spiking_function(x, gamma):
        return surrogate.atan.apply(x, gamma)


class Own(nn.Module):
    """Modules of the user's own: memory, surrogate, and a neuron with only a constructor of its own."""

    class Neuron(neuron.MultiStepLIFNode):
        def __init__(self, **kwargs):
            super().__init__(tau=1.5, surrogate_function=OwnSurrogate(), **kwargs)

    def __init__(self):
        super().__init__()
        self.fc, self.lif, self.memory = nn.Linear(128, 9), Own.Neuron(v_threshold=0.2, detach_reset=True), OwnMemory()

    def forward(self, x):
        y = self.lif(self.fc(x.flatten(2)))
        return torch.stack([self.memory(f) for f in y])


NEW = sys.argv[1] == "new"
NETS = {"sew": Sew, "tet": Tet, "transformer": Transformer, "steps": Steps, "mixed": Mixed, "own": Own}


def run(net, x, training):
    """Two forwards with state kept between them, and a backward of their sum: outputs, gradients, buffers."""
    net.train(training)
    functional.reset_net(net)
    net.zero_grad()
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    first, second = net(x), net(x * 0.7)
    (first.square().sum() + second.square().sum()).backward()
    voltages = {n: m.v.detach() for n, m in net.named_modules() if isinstance(m, neuron.BaseNode)}
    grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    buffers = {n: b.clone() for n, b in net.named_buffers()}
    return {"out": (first.detach(), second.detach()), "v": voltages, "grad": {"x": x.grad, **grads}, "buffers": buffers}


def nets(states):
    """Every net, trained and evaluated: its fresh keys, the state it ran with, what came out."""
    done = {}
    for number, (name, make) in enumerate(NETS.items()):
        torch.manual_seed(number)
        net = make()
        fresh = {k: v.clone() for k, v in net.state_dict().items()}
        if states:
            net.load_state_dict(states[name]["state"], strict=True)
        state = {k: v.clone() for k, v in net.state_dict().items()}
        torch.manual_seed(9)
        # Batch first for the one that transposes.
        x = torch.rand((N, T, 2, 8, 8) if name == "tet" else (T, N, 2, 8, 8)) * 2
        done[name] = {"fresh": fresh, "state": state, "train": run(net, x, True), "eval": run(net, x, False)}
    return done


def neurons():
    """Every setting of the multi-step neurons, and the plain ones, step by step."""
    done = {}
    kinds = itertools.product(("LIF", "ParametricLIF", "IF"), (True, False), (0.0, None, -0.2), (2.0, 1.7, 5.0))
    torch.manual_seed(0)
    x = torch.randn(8, 4, 500) * 2.0 + 0.8
    for (kind, decay, v_reset, tau), detach, form in itertools.product(kinds, (True, False), ("ATan", "Sigmoid")):
        if kind == "IF" and (not decay or tau != 2.0):
            continue
        given = {"v_reset": v_reset, "detach_reset": detach, "surrogate_function": getattr(surrogate, form)()}
        if kind != "IF":
            given |= {"decay_input": decay, "tau" if kind == "LIF" else "init_tau": tau}
        for name in (f"MultiStep{kind}Node", f"{kind}Node"):
            done[name, decay, v_reset, tau, detach, form] = stepped(getattr(neuron, name)(**given), x)
    for v_reset in (-0.1, None):
        done["EIFNode", v_reset] = stepped(neuron.EIFNode(v_reset=v_reset, detach_reset=True), x.clamp(-1, 1))
        done["MultiStepEIFNode", v_reset] = stepped(
            neuron.MultiStepEIFNode(v_reset=v_reset, detach_reset=True), x.clamp(-1, 1)
        )
        done["QIFNode", v_reset] = stepped(neuron.QIFNode(v_reset=v_reset, detach_reset=True), x.clamp(-1, 1))
    return done


def stepped(node, x):
    x = x.clone().requires_grad_()
    several = type(node).__name__.startswith("MultiStep")
    y = node(x) if several else torch.stack([node(f) for f in x])
    (y * torch.arange(1, 9).view(-1, 1, 1)).sum().backward()
    w = getattr(node, "w", None)
    return {"spikes": y.detach(), "v": node.v.detach(), "grad": x.grad, "w": w.grad if w is not None else None}


def others():
    """Functions, encoders and surrogates: name to tensor."""
    torch.manual_seed(1)
    x, labels = torch.rand(4, 5) * 0.9, torch.tensor([0, 1, 2, 1])
    done = {"tet": functional.temporal_efficient_training_cross_entropy(torch.randn(T, 4, 5), labels)}
    done["one_hot"] = functional.redundant_one_hot(labels, 3, 2)
    done["first"] = functional.first_spike_index((torch.rand(3, 8) > 0.6).float())
    done["similar"] = functional.spike_similar_loss(x, functional.redundant_one_hot(labels, 3, 1), "gaussian", "mse", 1.0)
    done["dot"] = functional.kernel_dot_product(x, x, "sigmoid", 0.5)
    done["steps"] = functional.multi_step_forward(torch.rand(T, 4, 5), [nn.Flatten(), neuron.LIFNode()])
    given = {
        "latency": encoding.LatencyEncoder(T),
        "log": encoding.LatencyEncoder(T, "log"),
        "poisson": encoding.PoissonEncoder(),
    }
    given |= {
        "phase": encoding.WeightedPhaseEncoder(T),
        "periodic": encoding.PeriodicEncoder((torch.rand(T, 4, 5) > 0.5).float()),
    }
    for name, encoder in given.items():
        done[name] = torch.stack([encoder(x) for _ in range(2 * T)])
    v = torch.linspace(-1.5, 1.5, 401)
    kinds = (
        "PiecewiseQuadratic PiecewiseExp Sigmoid SoftSign ATan NonzeroSignLogAbs Erf PiecewiseLeakyReLU S2NN QPseudoSpike"
    )
    for name in kinds.split():
        for spiking in (True, False):
            z = v.clone().requires_grad_()
            y = getattr(surrogate, name)(spiking=spiking)(z)
            if spiking and not (ON_14 and name == "NonzeroSignLogAbs"):
                y.sum().backward()
                done[name, "gradient"] = z.grad
            done[name, spiking] = y.detach()
    return done


if __name__ == "__main__":
    torch.set_num_threads(1)
    before = None if sys.argv[2] == "-" else torch.load(sys.argv[2])["nets"]
    torch.save({"nets": nets(before), "neurons": neurons(), "others": others()}, sys.argv[3])
