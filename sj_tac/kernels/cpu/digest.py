"""A digest of a tensor's bits, by which a copy of it in another layout is known to be of the same numbers still.

Versions say nothing of who writes through ``.data``; to compare the numbers themselves would take a second copy of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sj_tac.kernels.cpu import costs
from sj_tac.kernels.cpu.arguments import Array
from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.threads import share

# Numbers that are summed up by themselves: their places among the pieces count, as well as those within a piece.
PIECE = 2**14
_A, _B, _C, _D = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35), np.uint32(0x27D4EB2F)
_15, _13, _16 = np.uint32(15), np.uint32(13), np.uint32(16)


@kernel
def _sums(begin, end, bits, found, unused, none):
    """Two sums [2] of each piece: of a number and its place, mixed as MurmurHash3 ends, and of that mixed once more.

    A number that changes alone changes the first one for certain, as each step can be undone.
    """
    for piece in range(begin, end):
        start = np.uintp(piece * PIECE)
        n = np.uintp(min(PIECE, bits.size - piece * PIECE))
        once, twice = np.uint32(0), np.uint32(0)
        for i in range(n):
            x = np.uint32(bits[start + i] ^ np.uint32(np.uint32(i) * _A))
            x = np.uint32(x * _B)
            x = np.uint32(x ^ (x >> _15))
            x = np.uint32(x * _C)
            x = np.uint32(x ^ (x >> _13))
            once = np.uint32(once + x)
            x = np.uint32(x * _D)
            twice = np.uint32(twice + np.uint32(x ^ (x >> _16)))
        found[piece, 0], found[piece, 1] = once, twice


def digest(numbers: np.ndarray[Any, Any]) -> bytes:
    """The digest of a flat array of float32: 8 bytes for every ``PIECE`` numbers."""
    bits: Array = numbers.view(np.uint32)
    pieces = -(-bits.size // PIECE)
    found = np.empty((pieces, 2), np.uint32)
    share(_sums, pieces, int(bits.size * costs.DIGESTED), bits, found, 0, 0)
    return found.tobytes()
