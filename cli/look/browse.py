"""Steps through a list of tapes with the keys of a terminal, for the verb `show`."""

from __future__ import annotations

import os
import select
import signal
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
    """Provide a function that waits for a key and returns it, or an empty string if the terminal is closed.

    Python runs a signal's handler between two of its instructions. A Ctrl-C that arrives just before a `read` begins
    would go unnoticed until the next key, so the wait also ends on a byte that the signal itself writes.
    """
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    signalled, by_signal = os.pipe()
    os.set_blocking(by_signal, False)
    previous = signal.set_wakeup_fd(by_signal)

    def key() -> str:
        while terminal not in (ready := select.select([terminal, signalled], [], [])[0]):
            os.read(ready[0], 1)
        return os.read(terminal, 1).decode(errors="replace")

    try:
        tty.setcbreak(terminal)
        yield key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(previous)
        os.close(signalled)
        os.close(by_signal)
