"""Interchange: converts tapes to dataset rows, and rows with conversations to tapes.

`write(tapes, path, format)` exports, and `read(path, run, format)` imports. On the command line, these are `tapereel
export --format` and `tapereel import`. `Format.loses` lists what is lost in a format.
"""

from .formats import FORMATS, Exchange, Format, read, write
from .record_files import NothingToExport

__all__ = ["FORMATS", "Exchange", "Format", "NothingToExport", "read", "write"]
