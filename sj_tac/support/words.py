"""What errors say."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """ "did you mean ...?", or the first names there are."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"there are: {', '.join(map(repr, names[:8]))}{' ...' if len(names) > 8 else ''}"
