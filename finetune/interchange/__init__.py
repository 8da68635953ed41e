"""Interchange: tapes in the formats of others, and theirs as tapes.

`write(tapes, path, format)` and `read(path, run, format)`; on the command line `tapereel export --format` and `tapereel
import`. Each format says what it can't hold (`Format.loses`). What comes in is not trusted: see `files`.
"""

from .formats import FORMATS, Exchange, Format, read, write
from .trace_files import NothingToExport

__all__ = ["FORMATS", "Exchange", "Format", "NothingToExport", "read", "write"]
