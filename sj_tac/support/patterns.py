"""Names of layers against the patterns of policies: exact, globs, and regular expressions that end in time."""

from __future__ import annotations

import fnmatch
import functools
import math
import re
import time
from typing import Any

from sj_tac.errors import PolicyError

LENGTH = 500
# Seconds that the regular expressions of one call may take; backtracking can take longer than anybody lives.
SECONDS = 0.25
# Copies of a part that counts such as {3} make, multiplied: the expression is compiled with all of them.
COPIES = 1000


def problem(pattern: str) -> str:
    """What is wrong with a pattern; empty where nothing is."""
    if len(pattern) > LENGTH:
        return f"a pattern has {LENGTH} characters at most, not {len(pattern)}; use several rules"
    if not pattern.startswith("re:"):
        return ""
    counts = [max(1, *(int(n or 1) for n in pair)) for pair in re.findall(r"\{(\d*),?(\d*)\}", pattern)]
    if math.prod(counts) > COPIES:
        return f"{pattern!r} repeats a part more than {COPIES} times by counts; write + or *"
    try:
        _compiled(pattern[3:])
    except RecursionError:
        return f"{pattern!r} is nested too deep"
    except _errors() as error:
        return f"{pattern!r} is no regular expression: {error}"
    return ""


def _errors() -> tuple[type[Exception], ...]:
    import regex

    return (regex.error, ValueError, OverflowError)


@functools.lru_cache(maxsize=256)
def _compiled(expression: str) -> Any:
    import regex  # Python's own expressions, and a time limit

    return regex.compile(expression)


class Matcher:
    """Matches names to patterns, with one time limit for all of them. Make one for each call."""

    def __init__(self) -> None:
        self.left = SECONDS

    def __call__(self, name: str, pattern: str) -> bool:
        """Whether a qualified name is an exact name, of a glob ("layer4.*") or of a regular expression ("re:...").

        Raises:
            PolicyError: no regular expression, or one that takes too long.
        """
        if not pattern.startswith("re:"):
            return name == pattern or fnmatch.fnmatchcase(name, pattern)
        wrong = problem(pattern)
        if wrong:
            raise PolicyError(wrong)
        begun = time.perf_counter()
        try:
            if self.left > 0:
                return _compiled(pattern[3:]).fullmatch(name, timeout=self.left) is not None
        except TimeoutError:
            pass
        finally:
            self.left -= time.perf_counter() - begun
        raise PolicyError(
            f"{pattern!r} takes too long: matching was stopped at {name!r} after {SECONDS:g} s; repetitions inside "
            "repetitions, as (a+)+, try every way to divide a name. Write a glob, or one repetition"
        )
