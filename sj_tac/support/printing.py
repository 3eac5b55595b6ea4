"""Results that print as a table and turn into plain data."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import asdict
from typing import Any

from rich.console import Console


class Shown:
    """Base of result dataclasses that have a ``__rich__``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        text = io.StringIO()
        # The terminal's width; wide enough for the reasons where there is no terminal. In a notebook rich would display the
        # table by itself, and the text would be empty; the kernel asks for colours, which are no text.
        width = shutil.get_terminal_size((140, 24)).columns
        Console(file=text, width=width, force_jupyter=False, force_terminal=False).print(*self.parts())
        return text.getvalue()

    def parts(self) -> list[Any]:
        """What is printed, one after the other."""
        return [self]
