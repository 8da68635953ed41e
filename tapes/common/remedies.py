"""Remedies: what a user can do about a problem, in the words of the floor that offers it.

A message on a lower floor gives its remedy by a key and in its own words. If an upper floor has a command or a setting
for it, `offer` replaces these words. So a user of the command line reads a command, and no lower floor knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Command(NamedTuple):
    """A command line that an upper floor has for a run. `{run}` in `line` is the run's path, quoted for a shell."""

    line: str
    purpose: str = ""
    trained: bool = False
    """Whether it is only for training runs."""


_remedies: dict[str, str] = {}
_checks: list[Command] = []
_looks: list[Command] = []


def offer(remedies: Mapping[str, str], checks: list[Command], looks: list[Command]) -> None:
    """Set the words of an upper floor: its remedies by key, and its commands that check and show a run."""
    _remedies.clear()
    _remedies.update(remedies)
    _checks[:], _looks[:] = checks, looks


def remedy(key: str, own: str, **values: object) -> str:
    """The remedy in the words of the upper floor, or `own` if no floor offers one. The words of the upper floor may
    contain these values and `{own}`."""
    return _remedies[key].format(own=own, **values) if key in _remedies else own


def check_commands(trained: bool) -> list[Command]:
    """The commands that check a run. Without `trained`, those that check training are left out."""
    return [one for one in _checks if trained or not one.trained]


def show_commands() -> list[Command]:
    """The commands that show a run."""
    return _looks
