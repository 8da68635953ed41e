"""Interchange: converts tapes to dataset rows, and rows with conversations to tapes.

`write(tapes, path, format)` exports, like `tapereel export --format` on the command line. `read(path, run, format)`
imports, like `tapereel import`. `Format.loses` lists the parts of a tape that a format can't contain.
"""

from ...tapes.common.extras import lazy_names
from .formats import FORMATS, Exchange, Format, read, write
from .record_files import NothingToExport

__all__ = ["FORMATS", "Exchange", "Format", "NothingToExport", "read", "write"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "formats": "write",
        "record_files": "BadImport",
        "rl_dataset": "collate",
    },
)
