"""A terminal without a device."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """Collects the text that is written to it. Its width is the value of COLUMNS."""

    def isatty(self) -> bool:
        return True
