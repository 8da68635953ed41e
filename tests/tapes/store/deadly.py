"""A disk for new processes, which import it by the name of this module."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import BinaryIO

from tapereel.tapes.store import Disk


class Deadly(Disk):
    """A disk on which a process dies, other than the one that made it."""

    def open(self, path: Path) -> BinaryIO:
        if multiprocessing.parent_process() is not None:
            os._exit(7)
        return super().open(path)
