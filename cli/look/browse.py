"""Steps through a list of tapes with the keys of a terminal, for the verb `show`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...tapes.errors import TapereelError
from ..console import say

STEPS = {"n": 1, "p": -1}
"""How far each key moves in the list."""
END = ("q", "", "\x04")
"""Keys that end: q, a closed terminal and Ctrl-D. Ctrl-C ends too."""


def browse(ids: Sequence[str], at: int, show: Callable[[str], None], tell: Callable[[str], None]) -> None:
    """Show the tape at index `at`, and then the ones that the keys choose. A tape that can't be read is reported on
    stderr."""
    try:
        with _keys() as key:
            while True:
                try:
                    show(ids[at])
                except TapereelError as error:
                    say(f"the tape {ids[at]} can't be shown: {error}")
                tell(f"tape {at + 1:,} of {len(ids):,}: n prints the next one, p the previous one, q ends")
                while (pressed := key()) not in STEPS or not 0 <= at + STEPS[pressed] < len(ids):
                    if pressed in END:
                        return
                at += STEPS[pressed]
    except KeyboardInterrupt:
        return


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Provide a function that waits for a key and returns it, or an empty string if the terminal is closed."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield lambda: os.read(terminal, 1).decode(errors="replace")
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
