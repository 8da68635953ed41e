"""Interchange: converts tapes to the trace formats of other frameworks, and back.

`write(tapes, path, format)` and `read(path, run, format)`; on the command line `tapereel export --format` and `tapereel
import`. `Format.loses` lists what a format can't hold. Imported files are not trusted: see `trace_files`.
"""

from .formats import FORMATS, Exchange, Format, read, write
from .trace_files import NothingToExport

__all__ = ["FORMATS", "Exchange", "Format", "NothingToExport", "read", "write"]
