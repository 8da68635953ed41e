"""What can go wrong between an environment and those who use it from afar, as one tree.

RemoteError (TapereelError)
├── Unreachable (ConnectionError)   nobody answers there, or not for longer than anyone waits
├── Busy (ConnectionError)          the server, or the pool, had no place for longer than anyone waits
├── SessionLost (ConnectionError)   the other side no longer has the episode: it ended, died or was restarted
├── Refused (PermissionError)       the server takes no such call: a wrong token, a call that it can't read
├── WrongEnvironment (TypeError)    what is served there isn't what was asked for
├── BadAnswer (ValueError)          the other side sent what can't be meant; nothing of it is used
├── Hung (TimeoutError)             a call took longer than it may
└── RemoteFault (RuntimeError)      the environment itself raised; the class has the name of what it raised there

On a tape each of them is a fault of the environment, so its episode is never trained on and is sampled again.
"""

from __future__ import annotations

import re

from ...tapes.errors import TapereelError


class RemoteError(TapereelError):
    """Base of the errors of environments that run elsewhere."""


class Unreachable(RemoteError, ConnectionError):
    """Nobody answers at that address."""


class Busy(RemoteError, ConnectionError):
    """There was no place for one more episode."""


class SessionLost(RemoteError, ConnectionError):
    """The episode's environment is gone; its state can't be brought back by asking again."""


class Refused(RemoteError, PermissionError):
    """The server says no, and would say so again."""


class WrongEnvironment(RemoteError, TypeError):
    """The environment that is served has other kinds of steps, or other effects, than the one asked for."""


class BadAnswer(RemoteError, ValueError):
    """An answer that is too long, no message of the protocol, to another question, or of an undeclared kind."""


class Hung(RemoteError, TimeoutError):
    """A call had no answer in time."""


class RemoteFault(RemoteError, RuntimeError):
    """The environment raised. Its class is called what was raised there, so that a tape tells it as a local one."""

    @staticmethod
    def named(error: str, message: str) -> RemoteFault:
        """The fault of that name; a name that could be no class's is left out."""
        name = error if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]{0,99}", error) else "RemoteFault"
        cls = type(name.rpartition(".")[2] or name, (RemoteFault,), {"__qualname__": name, "__module__": __name__})
        return cls(message)
