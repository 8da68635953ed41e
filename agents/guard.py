"""A guard against agents that can't be replayed: what comes from outside the tape is refused, and its line is named.

An agent's state is its tape. A clock, randomness, a socket or another process that it uses by itself would be another
one when it runs again, so while a guard is on such a use raises `Nondeterministic`. The door has what takes their
place: `llm.now`, `llm.random` and `llm.uuid`. Environments and engines may do as they like.

Clocks, randomness and ids are seen where the agent's own code asks for them, in the event loop's thread; a library that
looks at the clock for a log line is none of its business. Sockets and processes are seen wherever they are opened.
Global generators of compiled packages (numpy, torch) are not seen.
"""

from __future__ import annotations

import functools
import random
import secrets
import sys
import sysconfig
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from datetime import date
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self

from ..tapes.errors import TapereelError

_CLOCK = "take the time from the door: llm.now(tape)"
_RANDOM = "take randomness from the door: llm.random(tape)"
_UUID = "take an id from the door: llm.uuid(tape)"
_WORLD = "what reaches outside belongs into an environment, as an action"

_CLOCKS = frozenset({"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
                     "process_time_ns", "thread_time", "thread_time_ns", "clock_gettime"})  # fmt: skip
_DATES = frozenset({"now", "utcnow", "today"})
_BYTES = frozenset({"urandom", "getrandom"})
_DRAWN = frozenset({"random", "getrandbits"})
_EVENTS = frozenset({"socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname",
                     "subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork"})  # fmt: skip


class Nondeterministic(TapereelError, RuntimeError):
    """An agent used a clock, randomness, a socket or a process by itself; names the line and what to use instead."""


class Hit(NamedTuple):
    """One use of what isn't on the tape."""

    what: str
    """As `time.time` or `socket.connect`."""
    where: str
    """`file:line in function` of the agent's code."""
    sentence: str
    """What was done, where, and what to do instead."""


_guard: ContextVar[Guard | None] = ContextVar("tapereel_guard", default=None)
_acting: ContextVar[bool] = ContextVar("tapereel_acting", default=False)


class Guard:
    """`with Guard():` around a rollout, or `rollout(..., guard=True)`."""

    def __init__(self) -> None:
        self.hits: list[Hit] = []
        """In order; an agent that swallows the error can't hide them."""
        self._token: Token[Guard | None] | None = None

    @property
    def first(self) -> Hit | None:
        return self.hits[0] if self.hits else None

    def __enter__(self) -> Self:
        _install_audit()
        self._token = _guard.set(self)
        _armed.add()
        return self

    def __exit__(self, *error: object) -> None:
        _armed.remove()
        if self._token is not None:
            _guard.reset(self._token)

    def refuse(self, what: str, frame: FrameType, remedy: str) -> Nondeterministic:
        """The error for a use by the code in `frame`."""
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        sentence = f"the agent uses {what} at {where}, which no replay can give again: {remedy}"
        self.hits.append(Hit(what, where, sentence))
        return Nondeterministic(sentence)


@contextmanager
def acting() -> Iterator[None]:
    """What runs inside is an agent."""
    if _guard.get() is None:
        yield
        return
    _armed.again()
    token = _acting.set(True)
    try:
        yield
    finally:
        _acting.reset(token)


@contextmanager
def outside() -> Iterator[None]:
    """What runs inside is no agent, though one called it: an engine."""
    token = _acting.set(False)
    try:
        yield
    finally:
        _acting.reset(token)


class _Armed(threading.local):
    """How many guards are on in this thread; the first sets its profile function, the last one puts back what was."""

    def __init__(self) -> None:
        self.count = 0
        self.before: Any = None

    def add(self) -> None:
        if self.count == 0:
            self.before = sys.getprofile()
            sys.setprofile(_profile)
        self.count += 1

    def remove(self) -> None:
        self.count -= 1
        if self.count == 0:
            sys.setprofile(self.before)
            self.before = None

    def again(self) -> None:
        """Python drops a profile function that raised."""
        if self.count and sys.getprofile() is None:
            sys.setprofile(_profile)


_armed = _Armed()


def _profile(frame: FrameType, event: str, called: Any) -> None:
    # Called for every function that runs: names are looked at first, since they cost least.
    if event == "c_call":
        if called.__name__ not in _NAMES:
            return
        found, caller = _compiled(called), frame
    elif event == "call":
        if frame.f_code.co_name not in _PYTHON_NAMES or frame.f_code not in _PYTHON:
            return
        found, caller = _interpreted(frame), frame.f_back
    else:
        return
    if found is None or caller is None or not _acting.get() or not _own(caller.f_code.co_filename):
        return
    guard = _guard.get()
    if guard is not None:
        raise guard.refuse(found[0], caller, found[1])


def _compiled(called: Any) -> tuple[str, str] | None:
    """(name, remedy) of a builtin that must not be called."""
    name = called.__name__
    if name in _CLOCKS and called.__module__ == "time":
        return f"time.{name}", _CLOCK
    if name in _DATES and isinstance(called.__self__, type) and issubclass(called.__self__, date):
        return f"{called.__self__.__name__}.{name}", _CLOCK
    if name in _BYTES and called.__module__ == "posix":
        return f"os.{name}", _RANDOM
    if name in _DRAWN and called.__self__ is _GLOBAL:
        return f"random.{name}", _RANDOM
    return None


def _interpreted(frame: FrameType) -> tuple[str, str] | None:
    what, remedy = _PYTHON[frame.f_code]
    if not what.startswith("random."):
        return what, remedy
    own = frame.f_locals.get("self")
    if what == "random.Random()":
        return (what, remedy) if type(own) is random.Random and frame.f_locals.get("x") is None else None
    return (what, remedy) if own is _GLOBAL or isinstance(own, random.SystemRandom) else None


def _python_functions() -> dict[CodeType, tuple[str, str]]:
    """Functions that are written in Python, by their code."""
    found: dict[CodeType, tuple[str, str]] = {}
    for cls in (random.Random, random.SystemRandom):
        for name, method in vars(cls).items():
            if name[0] != "_" and name not in ("seed", "getstate", "setstate") and hasattr(method, "__code__"):
                found[method.__code__] = (f"random.{name}", _RANDOM)
    found[random.Random.__init__.__code__] = ("random.Random()", _RANDOM)
    for name in ("token_bytes", "token_hex", "token_urlsafe", "randbelow"):
        found[getattr(secrets, name).__code__] = (f"secrets.{name}", _RANDOM)
    for name in ("uuid1", "uuid4"):
        found[getattr(uuid, name).__code__] = (f"uuid.{name}", _UUID)
    return found


_GLOBAL = random.random.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of the module `random`."""
_PYTHON = _python_functions()
_PYTHON_NAMES = frozenset(code.co_name for code in _PYTHON)
_NAMES = _CLOCKS | _DATES | _BYTES | _DRAWN


@functools.lru_cache(maxsize=1024)
def _own(file: str) -> bool:
    """Whether a file is the user's: neither Python's, nor an installed package's, nor Tapereel's own."""
    if file.startswith("<") and not file.startswith(("<stdin", "<ipython", "<string")):
        return False
    here = Path(__file__).resolve().parents[1]
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries += [str(here / name) for name in ("tapes", "envs", "agents", "finetune")]
    return not file.startswith(tuple(f"{path}/" for path in libraries))


@functools.cache
def _install_audit() -> None:
    """Once in a process: an audit hook can't be taken away."""
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event not in _EVENTS or not _acting.get():
        return
    guard = _guard.get()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _own(frame.f_code.co_filename):
        frame = frame.f_back
    if guard is not None and frame is not None:
        raise guard.refuse(event, frame, _WORLD)
