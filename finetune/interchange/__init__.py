"""Interchange: converts tapes to rows of datasets, and rows of conversations to tapes.

The functions are `write(tapes, path, format)` and `read(path, run, format)`. On the command line, these are `tapereel
export --format` and `tapereel import`. `Format.loses` lists what a format can't contain.
"""

from .formats import FORMATS, Exchange, Format, read, write
from .record_files import NothingToExport

__all__ = ["FORMATS", "Exchange", "Format", "NothingToExport", "read", "write"]
