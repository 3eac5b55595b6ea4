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


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for precision in PEAK:
        print(f"{precision}\n\n{table(precision)}\n")


if __name__ == "__main__":
    main()
