"""Interchange: tapes as rows of datasets, and rows of conversations as tapes.

`write(tapes, path, format)` and `read(path, run, format)`; on the command line `tapereel export --format` and `tapereel
import`. `Format.loses` lists what a format can't hold.
"""

from .formats import FORMATS, Exchange, Format, read, write
from .record_files import NothingToExport

__all__ = ["FORMATS", "Exchange", "Format", "NothingToExport", "read", "write"]
