"""Everything that can go wrong with a tape, as one tree.

TapereelError
├── DuplicateKind (TypeError)       two step classes under one kind
├── NotATape (ValueError)           records that don't make a tape
│   └── Corrupt                     bytes that were durable are not what was written
├── HiddenFromAgent (AttributeError)  the agent's view was asked for what only the trainer may know
├── StillOpen (ValueError)          asked of a running tape what only a closed one has
├── StoreFailed (OSError)           a write or sync failed: nothing more is written by this process
├── Unwritable (TypeError)          a step holds a value that JSON can't
├── NoRun (FileNotFoundError)       there is no run at that path
├── RunExists (FileExistsError)     a new run was asked for where one is
├── NoSuchTape (LookupError)        no tape, or more than one, answers to that id
└── MissingExtra (ImportError)      an optional package is not installed
"""

from __future__ import annotations


class TapereelError(Exception):
    """Base of every error that Tapereel raises on purpose."""


class DuplicateKind(TapereelError, TypeError):
    """Two step classes claim one kind."""


class NotATape(TapereelError, ValueError):
    """Bytes or records that don't make a tape; says where and why."""


class Unwritable(TapereelError, TypeError):
    """A step holds a value that can't stand on a tape; names the field and its type."""


class Corrupt(NotATape):
    """Bytes below the durable frontier, a seal or a pin differ from what was written."""


class HiddenFromAgent(TapereelError, AttributeError):
    """Asked of the agent's view of a tape: rewards, labels and the private part of the task are not there."""


class StillOpen(TapereelError, ValueError):
    """Asked of a tape that has no end yet."""


class StoreFailed(TapereelError, OSError):
    """A write or a sync failed. The writer is poisoned: what was acknowledged is safe, nothing more is accepted."""


class NoRun(TapereelError, FileNotFoundError):
    """There is no run at that path."""


class RunExists(TapereelError, FileExistsError):
    """A new run was asked for where one already is."""


class NoSuchTape(TapereelError, LookupError):
    """No tape answers to that id, or more than one does."""


class MissingExtra(TapereelError, ImportError):
    """An optional package is not installed; names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f'{purpose} needs the package {package!r}, which is not installed: pip install "tapereel[{extra}]"'
        )
        self.package = package
        self.extra = extra


class UsageError(TapereelError, ValueError):
    """Invalid argument, setting or input; a command that raises it exits with code 64."""
