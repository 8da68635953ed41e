"""The errors of Tapereel, as one tree.

TapereelError
├── NotATape (ValueError)           the records don't make a tape
│   ├── NewerRecord                 a newer version wrote a part that this one doesn't know
│   └── Corrupt                     durable bytes differ from those that were written
├── HiddenFromAgent (AttributeError)  an agent asked its view of a tape for hidden data
├── RunStopped                  the run ended before its work was done, since no model can answer
├── StrayCancellation (RuntimeError)  a task was cancelled without a request from its caller
├── StoreFailed (OSError)           a write or sync failed, and this process writes nothing more
├── Unwritable (TypeError)          a step holds a value that JSON can't represent
├── BadPicture (ValueError)         a file, image or array can't become a picture
├── NoSuchTape (LookupError)        no tape has that id, or more than one does
├── MissingExtra (ImportError)      an optional package is not installed
└── UsageError (ValueError)         an argument, a setting or input is invalid
    ├── OtherVersion            another version wrote the settings of a run
    └── BadArgument (TypeError)     an argument has a wrong type or value
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import Repr
from typing import Literal, NamedTuple

USE_ITS_VERSION = "use the version that wrote it (9dc43d5 is the last commit that reads runs of unreleased commits)"
"""The remedy for a run that another version wrote."""
_LONGEST = 16_000
"""Maximum length of an error message in characters. A library may put a whole answer into a message, and redaction
reads the whole message."""
_short = Repr()
_short.maxstring, _short.maxother, _short.maxdict = 60, 60, 0  # a dict may hold a secret under any key
StopReason = Literal["away", "key", "model", "budget"]
"""Why a run stopped. `away`: no server answered. `key`: the API key was rejected. `model`: the server doesn't have the
model, or has other weights. `budget`: the money or the quota is spent."""


_DIGEST = re.compile(r"(\.gguf@[0-9a-f]{12})[0-9a-f]{52}\b", re.IGNORECASE)


def brief_digests(text: str) -> str:
    """Return `text` for people: of the digest in a model's name (`x.gguf@...`), twelve digits are left."""
    return _DIGEST.sub(r"\1", text)


class TapereelError(Exception):
    """Base class of all errors that Tapereel raises on purpose."""

    def __str__(self) -> str:
        return brief_digests(super().__str__())


class NotATape(TapereelError, ValueError):
    """Bytes or records don't make a tape. The message says where and why."""


class Unwritable(TapereelError, TypeError):
    """A step holds a value that can't be written to a tape. The message names the field and its type."""


class BadPicture(TapereelError, ValueError):
    """A file, image or array can't become a picture, or a picture's bytes are missing. The message names the source,
    the reason and the remedy."""


class NewerRecord(NotATape):
    """This version doesn't know a part of a record, which a newer version wrote. The rest of the record is valid."""

    def __init__(self, part: str, record: str = "a record") -> None:
        super().__init__(f"{record} has {part}, which this version doesn't know: use the version that wrote it")
        self.part = part
        """The unknown part, in a form such as `the field "seconds"`."""


class Corrupt(NotATape):
    """Durable bytes of a run have changed: lines that a frontier, a seal or a pin covers, or a file with a recorded
    hash."""


class HiddenFromAgent(TapereelError, AttributeError):
    """An agent asked its view of a tape for rewards, labels or the private part of the task."""


class RunStopped(TapereelError):
    """A run ended early, because no later request to the model can succeed. The run can be resumed."""

    reason: StopReason


class StoreFailed(TapereelError, OSError):
    """A write or a sync failed. The writer is poisoned: it accepts no more records. Acknowledged records are safe."""


class StrayCancellation(TapereelError, RuntimeError):
    """Code raised CancelledError although its caller had not cancelled it."""


class NoSuchTape(TapereelError, LookupError):
    """No tape has the given id, or several ids start with it."""


class MissingExtra(TapereelError, ImportError):
    """An optional package is not installed. The message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f'{purpose} needs the package {package!r}, which is not installed: pip install "tapereel[{extra}]"'
        )
        self.package = package
        self.extra = extra


class UsageError(TapereelError, ValueError):
    """An argument, a setting or input is invalid. A command that raises it exits with code 64."""


class OtherVersion(UsageError):
    """Another version of Tapereel wrote a run's settings. A command that needs these settings exits with code 2."""

    def __init__(self, config: str, why: str) -> None:
        super().__init__(f"this version can't read {config}: {why}; {USE_ITS_VERSION}")


class BadArgument(UsageError, TypeError):
    """An argument of a Python call has a wrong type or value."""


def error_message(error: BaseException) -> str:
    """Return the beginning of `str(error)`. This also works for an error in user code whose `__str__` raises."""
    try:
        return str(error)[:_LONGEST]
    except BaseException as second:
        return f"(no message: its __str__ raised {type(second).__qualname__})"


def short_repr(value: object) -> str:
    """Return the beginning of `repr(value)` for an error message. This works even if the value's `__repr__` raises."""
    try:
        return " ".join(_short.repr(value).split())
    except ValueError:  # an int with thousands of digits
        return "a number"


# Remedies. A message on a lower floor gives its remedy by a key and in its own words. If an upper floor has a command
# or a setting for it, `offer` replaces these words. So a user of the command line reads a command, and no lower floor
# knows it.


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
