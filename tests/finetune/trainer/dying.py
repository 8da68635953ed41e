"""`tapereel` on a rank that dies: `python -m tapereel.tests.finetune.trainer.dying RANK PLACE NUMBER ...`.

Rank RANK is killed with SIGKILL when it calls the function PLACE (`module:name`, below `tapereel`) for the NUMBERth
time, or with a negative number, when that call returns. The rest is the command line of `tapereel`.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

from tapereel.cli import main


def set_trap(place: str, number: int) -> None:
    module, _, name = place.partition(":")
    owner: Any = importlib.import_module(f"tapereel.{module}")
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), 0

    def trapped(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        found = function(*given, **named)
        if calls == -number:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, trapped)


if __name__ == "__main__":
    rank, place, number, *words = sys.argv[1:]
    if os.environ["RANK"] == rank:
        set_trap(place, int(number))
    sys.exit(main(words))
