"""What int8 costs trained nets: python -m benchmarks.int8_fidelity --cache FOLDER --tasks PLIF SEW --seeds 0

Every net is trained here and kept in FOLDER (``matching_nets``). Of each dtype and k: accuracy, and agreement with the
source, a float32 net at k = 1, in percent of samples that were not trained on.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path

import torch

import sj_tac
from benchmarks.matching import Judge, trained
from benchmarks.matching_nets import TASKS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
KS = (1, 2, 4)


def lines(name: str, seed: int, options: Namespace) -> list[str]:
    """Return the table's lines of one net."""
    found = trained(name, TASKS[name], seed, options)
    judge, table = Judge(found.net, *found.test), []
    for k in KS:
        cells = []
        for dtype in DTYPES.values():
            figures = judge(sj_tac.convert(found.net, "preserve", k, dtype=dtype))
            cells.append(f"{100 * figures['accuracy']:.1f} / {100 * figures['agreement']:.1f}")
        table.append(f"| {name} | {seed} | {100 * figures['source']:.1f} | {k} | {' | '.join(cells)} |")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--nmnist", type=Path, help="recordings in place of the shipped ones")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    print(f"| net | seed | source | k | {' | '.join(DTYPES)} |\n|{'---|' * (4 + len(DTYPES))}")
    for name in options.tasks:
        for seed in options.seeds:
            print("\n".join(lines(name, seed, options)), flush=True)


if __name__ == "__main__":
    main()
