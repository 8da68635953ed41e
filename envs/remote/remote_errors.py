"""The errors of remote environments, as one tree.

RemoteError (TapereelError)
├── Unreachable (ConnectionError)   no server answers within the client's patience
├── Busy (ConnectionError)          the server, or the pool, had no free place within the client's patience
├── SessionLost (ConnectionError)   the other side no longer has the episode: it ended, died or was restarted
├── Refused (PermissionError)       the server rejects the call: a wrong token, a call that it can't read
├── WrongEnvironment (TypeError)    the served environment isn't the expected one
├── BadAnswer (ValueError)          the other side sent an invalid message; no part of it is used
├── Hung (TimeoutError)             a call exceeded its time limit
└── RemoteFault (RuntimeError)      the environment itself raised; the class has the name of the original exception

On a tape, each of these errors is a fault of the environment. The episode is never trained on and is sampled again.
"""

from __future__ import annotations

import re

from ...tapes.errors import TapereelError


class RemoteError(TapereelError):
    """Base of the errors of remote environments."""


class Unreachable(RemoteError, ConnectionError):
    """No server answers at that address."""


class Busy(RemoteError, ConnectionError):
    """The server or the pool has no free place for another episode."""


class SessionLost(RemoteError, ConnectionError):
    """The environment of the episode is gone. A retry can't recover its state."""


class Refused(RemoteError, PermissionError):
    """The server rejects the call. A retry would be rejected too."""


class WrongEnvironment(RemoteError, TypeError):
    """The kinds of steps or the effect of the served environment differ from the expected ones."""


class BadAnswer(RemoteError, ValueError):
    """An answer is too long, is not a message of the protocol, belongs to another call, or is of an undeclared kind."""


class Hung(RemoteError, TimeoutError):
    """A call was not answered in time."""


class RemoteFault(RemoteError, RuntimeError):
    """The environment raised an exception. The class has the name of the original exception, so a tape records the same
    cause as for a local environment."""

    @staticmethod
    def named(error: str, message: str) -> RemoteFault:
        """Return a fault with the class name `error`, or a RemoteFault if `error` is not a valid class name."""
        name = error if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]{0,99}", error) else "RemoteFault"
        cls = type(name.rpartition(".")[2] or name, (RemoteFault,), {"__qualname__": name, "__module__": __name__})
        return cls(message)
