"""Bytes, FLOPs and the time floor of DVSGestureNet's convolutional layers on an H200, on paper: for SpikingJelly and sj_tac.

    python -m benchmarks.arithmetic            # the tables of docs/gpu.md

Counted is what must cross the device's memory once: every tensor that an operator reads or writes, weights left out. A layer
of SpikingJelly (conv with BN folded in, Triton neuron, pool): conv reads its input and writes y, the neuron reads y and
writes spikes and the charged voltages (float32), the pool reads spikes and writes a quarter. A layer of sj_tac: conv reads
the aggregated input and writes y, both T/k frames; ``fire`` reads y and writes the next layer's aggregate and the last
voltages. Beside the bytes stands what a neuron step costs in instructions, which no k makes fewer: a kernel of neurons takes
the longer of the two.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks import first_layer

# An H200: 90 % of the bytes a second of its specification, and its dense FLOP/s.
BANDWIDTH = 4.3e12
PEAK = {"TF32": 495e12, "bf16": 989e12}
ITEM = {"TF32": 4, "bf16": 2}
# Instructions of one step of one neuron (benchmarks.registers.instructions_a_step), and how many an H200 starts a second:
# 132 multiprocessors, 128 lanes, 1.98 GHz.
STEP = {"TF32": 6.5, "bf16": 6.3}
ISSUED = 132 * 128 * 1.98e9


@dataclass(frozen=True)
class Layer:
    """A convolution 3 x 3 with padding, then BN, neuron and a 2x2 MaxPool."""

    inputs: int
    outputs: int
    size: int

    def numbers(self, channels: int, batch: int) -> int:
        """Of one frame with these channels."""
        return batch * channels * self.size**2


@dataclass(frozen=True)
class Cost:
    """Of one layer, or of all."""

    conv_bytes: float
    other_bytes: float
    flops: float
    neuron_bytes: float
    neuron_steps: float

    def seconds(self, precision: str) -> float:
        """The convolution is bound by its bytes or FLOPs, the neurons by bytes or instructions, the rest by its bytes."""
        conv = max(self.conv_bytes / BANDWIDTH, self.flops / PEAK[precision])
        neurons = max(self.neuron_bytes / BANDWIDTH, self.neuron_steps * STEP[precision] / ISSUED)
        return conv + neurons + self.other_bytes / BANDWIDTH


LAYERS = [Layer(2 if i == 0 else 128, 128, 128 >> i) for i in range(5)]


def host(layer: Layer, steps: int, batch: int, item: int) -> Cost:
    """SpikingJelly's best case: BN folded, the neuron's spikes in the precision of y, its voltages in float32."""
    frame_in, frame = layer.numbers(layer.inputs, batch), layer.numbers(layer.outputs, batch)
    conv = steps * (frame_in + frame) * item
    neuron = steps * frame * (item + item + 4)
    pool = steps * frame * 1.25 * item
    return Cost(conv, pool, flops(layer, steps, batch), neuron, steps * frame)


def ours(layer: Layer, k: int, steps: int, batch: int, item: int) -> Cost:
    """sj_tac, preserve with the same k in every layer."""
    frame_in, frame, groups = layer.numbers(layer.inputs, batch), layer.numbers(layer.outputs, batch), steps // k
    conv = groups * (frame_in + frame) * item
    # The first layer's input has to be aggregated once; the others' arrives so.
    aggregate = (steps + groups) * frame_in * item if layer is LAYERS[0] and k > 1 else 0
    fire = groups * frame * 1.25 * item + frame * 4
    return Cost(conv, aggregate, flops(layer, groups, batch), fire, steps * frame)


def flops(layer: Layer, frames: int, batch: int) -> float:
    """Of the convolution."""
    return 2.0 * 9 * layer.inputs * frames * layer.numbers(layer.outputs, batch)


def table(precision: str, steps: int = 16, batch: int = 16) -> str:
    """Markdown: GB and GFLOP of each layer, and the floor in ms."""
    item = ITEM[precision]
    kinds = {"SpikingJelly": lambda layer: host(layer, steps, batch, item)}
    kinds |= {f"k={k}": lambda layer, k=k: ours(layer, k, steps, batch, item) for k in (1, 2, 4)}
    head = ["layer", *(f"{name}: GB, GFLOP, ms" for name in kinds), "floor over k=1, 2, 4"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    totals = dict.fromkeys(kinds, 0.0)
    for layer in LAYERS:
        cells = [f"{layer.inputs} -> {layer.outputs}, {layer.size} x {layer.size}"]
        for name, cost_of in kinds.items():
            cost = cost_of(layer)
            totals[name] += cost.seconds(precision)
            moved = (cost.conv_bytes + cost.other_bytes + cost.neuron_bytes) / 1e9
            cells.append(f"{moved:.2f}, {cost.flops / 1e9:.0f}, {1e3 * cost.seconds(precision):.3f}")
        times = [cost_of(layer).seconds(precision) for cost_of in kinds.values()]
        cells.append(", ".join(f"{times[0] / t:.1f}x" for t in times[1:]))
        lines.append(f"| {' | '.join(cells)} |")
    first, *rest = totals.values()
    sums = [f"{1e3 * total:.3f} ms" for total in totals.values()]
    lines.append(f"| all | {' | '.join(sums)} | {', '.join(f'{first / t:.1f}x' for t in rest)} |")
    return "\n".join(lines)


# Instructions of one kernel that convolves and fires, for one drive of one neuron at k = 1, 2, 4: the convolution's fmaf, k
# steps, and all around them (benchmarks.registers.instructions_a_drive). The CUDA cores' FLOP/s are in them: an fmaf is one.
DRIVE = {
    "TF32": {"2 -> 128, 3x3, 2x2 pool": (44, 50, 63), "2 -> 64, 3x3, no pool": (44, 52, 66),
             "3 -> 64, 7x7 stride 2, 3x3 pool": (225, 228, 251)},
    "bf16": {"2 -> 128, 3x3, 2x2 pool": (46, 53, 65), "2 -> 64, 3x3, no pool": (48, 56, 71),
             "3 -> 64, 7x7 stride 2, 3x3 pool": (230, 231, 254)},
}  # fmt: skip
FIRST_KS = (1, 2, 4)


@dataclass(frozen=True)
class First:
    """A first layer by cuDNN and ``fire``, and in one kernel: GB, GFLOP of the convolution, and the floors in ms."""

    apart_bytes: float
    together_bytes: float
    flops: float
    apart: float
    together: float


def first(case: str, precision: str, k: int, steps: int = 16, batch: int = 16) -> First:
    """Both ways of a layer; its input is aggregated before either, which is not counted."""
    inputs, outputs, kernel, stride, size, pool = first_layer.CASES[case]
    item, groups = ITEM[precision], steps // k
    frame, frame_in = batch * outputs * (size // stride) ** 2, batch * inputs * size**2
    written = groups * frame * (1.0 if pool is None else 0.25) * item + frame * 4
    if pool is not None and pool[0] == 3:
        written += 2 * frame * 4 * -(-steps // 32)  # bits, written and read
    flops = 2.0 * kernel**2 * inputs * groups * frame
    conv, neurons = groups * (frame_in + frame) * item, groups * frame * item + written
    apart = max(conv / BANDWIDTH, flops / PEAK[precision])
    apart += max(neurons / BANDWIDTH, steps * frame * STEP[precision] / ISSUED)
    # Frames that are somebody else's are copied; sums are nobody's.
    together = groups * frame_in * item * (3 if k == 1 else 1) + written
    instructions = groups * frame * DRIVE[precision][case][FIRST_KS.index(k)]
    return First(conv + neurons, together, flops, apart, max(together / BANDWIDTH, instructions / ISSUED))


def first_table() -> str:
    """Markdown: what one kernel saves, on paper, for each layer, precision and k."""
    head = [
        "layer",
        "precision",
        "k",
        "GFLOP",
        "GB, two kernels",
        "GB, one",
        "floor, two kernels, ms",
        "floor, one, ms",
        "ratio",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for case in first_layer.CASES:
        for precision in PEAK:
            for k in FIRST_KS:
                found = first(case, precision, k)
                cells = [case, precision, str(k), f"{found.flops / 1e9:.1f}"]
                cells += [f"{n / 1e9:.2f}" for n in (found.apart_bytes, found.together_bytes)]
                cells += [f"{1e3 * n:.3f}" for n in (found.apart, found.together)]
                lines.append(f"| {' | '.join((*cells, f'{found.apart / found.together:.2f}x'))} |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for precision in PEAK:
        print(f"{precision}\n\n{table(precision)}\n")
    print(f"A first layer in one kernel\n\n{first_table()}")


if __name__ == "__main__":
    main()
