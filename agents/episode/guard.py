"""A guard against agents that can't be replayed: what comes from outside the tape is refused, and its line is named.

An agent's state is its tape. A clock, randomness, a socket or another process that it uses by itself would be another
one when it runs again, so while a guard is on such a use raises `Nondeterministic`. The door has what takes their
place: `llm.now`, `llm.random` and `llm.uuid`. Environments and engines may do as they like.

Clocks, randomness and ids are seen where the agent's own code asks for them, in the event loop's thread, and its own
code is what is no library, and the agent's own package wherever it lives; a library that looks at the clock for a log
line is none of its business. Sockets, processes and devices of randomness are seen wherever they are opened.
docs/replay.md says what is not seen.
"""

from __future__ import annotations

import asyncio
import functools
import random
import secrets
import sys
import sysconfig
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from datetime import date
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

from ...tapes.errors import TapereelError
from .watched import homes_of, without_arguments, without_seed

_CLOCK = "take the time from the door: llm.now(tape)"
_RANDOM = "take randomness from the door: llm.random(tape)"
_UUID = "take an id from the door: llm.uuid(tape)"
_FILE = "a file is named by the door, llm.uuid(tape), or belongs into an environment"
_WORLD = "what reaches outside belongs into an environment, as an action"

_CLOCKS = frozenset(
    {
        "time",
        "time_ns",
        "monotonic",
        "monotonic_ns",
        "perf_counter",
        "perf_counter_ns",
        "process_time",
        "process_time_ns",
        "thread_time",
        "thread_time_ns",
        "clock_gettime",
    }
)
_NOW_UNLESS = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}
"""Functions of `time` that take the clock's time where they are given no more than so many arguments."""
_DATES = frozenset({"now", "utcnow", "today"})
_BYTES = frozenset({"urandom", "getrandom"})
_DRAWN = frozenset({"random", "getrandbits"})
_EVENTS = frozenset(
    {
        "socket.connect",
        "socket.bind",
        "socket.sendto",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "subprocess.Popen",
        "os.system",
        "os.posix_spawn",
        "os.exec",
        "os.fork",
        "open",
    }
)
_DEVICES = frozenset({"/dev/random", "/dev/urandom", "/dev/hwrng"})


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
        self.homes: frozenset[str] = frozenset()
        """Of the agents' code: folders, ending in `/`, and files. They are watched even among installed packages."""
        self._known: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """Agents by id, which is another's once they are gone."""
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

    def watch(self, agent: Any) -> None:
        """Take the agent's package for its own code, wherever that is installed."""
        if id(agent) not in self._known:
            self._known[id(agent)] = agent
            self.homes |= homes_of(agent)

    def refuse(self, what: str, frame: FrameType, remedy: str) -> Nondeterministic:
        """The error for a use by the code in `frame`."""
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        sentence = f"the agent uses {what} at {where}, which no replay can give again: {remedy}"
        self.hits.append(Hit(what, where, sentence))
        return Nondeterministic(sentence)


@contextmanager
def acting(agent: Any) -> Iterator[None]:
    """What runs inside is this agent."""
    guard = _guard.get()
    if guard is None:
        yield
        return
    guard.watch(agent)
    _armed.watch()
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
    """How many guards are on in this thread. Its profile function, which costs at every call of any function, is set
    when an agent acts for the first time; the last guard puts back what was."""

    def __init__(self) -> None:
        self.count = 0
        self.watching = False
        self.before: Any = None

    def add(self) -> None:
        self.count += 1

    def remove(self) -> None:
        self.count -= 1
        if self.count == 0 and self.watching:
            sys.setprofile(self.before)
            self.watching, self.before = False, None

    def watch(self) -> None:
        if self.count and not self.watching:
            self.watching, self.before = True, sys.getprofile()
            sys.setprofile(_profile)
        elif self.count and sys.getprofile() is None:  # Python drops a profile function that raised
            sys.setprofile(_profile)


_armed = _Armed()


def _profile(frame: FrameType, event: str, called: Any) -> None:
    # Called for every function that runs: names are looked at first, since they cost least.
    if event == "c_call":
        if called.__name__ not in _NAMES:
            return
        found, caller = _compiled(called, frame), frame
    elif event == "call":
        if frame.f_code.co_name not in _PYTHON_NAMES or frame.f_code not in _PYTHON:
            return
        found, caller = _interpreted(frame), frame.f_back
    else:
        return
    if found is None or caller is None or not _acting.get():
        return
    guard = _guard.get()
    if guard is not None and _own(caller.f_code.co_filename, guard.homes):
        raise guard.refuse(found[0], caller, found[1])


def _compiled(called: Any, frame: FrameType) -> tuple[str, str] | None:
    """(name, remedy) of a builtin that must not be called so from `frame`."""
    name = called.__name__
    if name in _NOW_UNLESS and called.__module__ == "time":
        return (f"time.{name}", _CLOCK) if without_arguments(frame, _NOW_UNLESS[name]) else None
    if name in _CLOCKS and called.__module__ == "time":
        return f"time.{name}", _CLOCK
    if name in _DATES and isinstance(called.__self__, type) and issubclass(called.__self__, date):
        return f"{called.__self__.__name__}.{name}", _CLOCK
    if name in _BYTES and called.__module__ == "posix":
        return f"os.{name}", _RANDOM
    if name in _DRAWN and isinstance(called.__self__, random.Random):
        return _drawn(f"random.{name}", called.__self__, frame)
    if name == "time" and isinstance(called.__self__, asyncio.AbstractEventLoop):
        return "loop.time", _CLOCK
    return None


def _drawn(what: str, generator: random.Random, frame: FrameType) -> tuple[str, str] | None:
    if generator is _GLOBAL or isinstance(generator, random.SystemRandom):
        return what, _RANDOM
    if not _acting.get():
        return None  # the answer is of no use, and costs
    name = without_seed(generator, frame)
    return None if name is None else (what, f"`{name}` was made without a seed; {_RANDOM}")


def _interpreted(frame: FrameType) -> tuple[str, str] | None:
    what, remedy = _PYTHON[frame.f_code]
    if not what.startswith("random."):
        return what, remedy
    own = frame.f_locals.get("self")
    if what == "random.Random()":
        return (what, remedy) if type(own) is random.Random and frame.f_locals.get("x") is None else None
    return _drawn(what, own, frame.f_back) if isinstance(own, random.Random) and frame.f_back is not None else None


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
    for name in ("mkdtemp", "mkstemp", "mktemp", "NamedTemporaryFile", "TemporaryFile"):
        found[getattr(tempfile, name).__code__] = (f"tempfile.{name}", _FILE)
    found[tempfile.TemporaryDirectory.__init__.__code__] = ("tempfile.TemporaryDirectory", _FILE)
    found[asyncio.BaseEventLoop.time.__code__] = ("loop.time", _CLOCK)
    return found


_GLOBAL = random.random.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of the module `random`."""
_PYTHON = _python_functions()
_PYTHON_NAMES = frozenset(code.co_name for code in _PYTHON)
_NAMES = _CLOCKS | _DATES | _BYTES | _DRAWN | _NOW_UNLESS.keys()


@functools.lru_cache(maxsize=4096)
def _own(file: str, homes: frozenset[str]) -> bool:
    """Whether a file is the user's: an agent's; or neither Python's, nor an installed package's, nor Tapereel's own."""
    here = Path(__file__).resolve().parents[2]
    if file.startswith(tuple(f"{here / name}/" for name in ("tapes", "envs", "agents", "finetune", "cli"))):
        return False
    libraries = [f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    library = max((path for path in libraries if file.startswith(path)), key=len, default="")
    # A project's folder may hold the environment with all that is installed.
    if file in homes or file.startswith(tuple(h for h in homes if h.endswith("/") and h.startswith(library))):
        return True
    if file.startswith("<") and not file.startswith(("<stdin", "<ipython", "<string")):
        return False
    return not library


def is_of_the_user(file: str) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor Tapereel's own."""
    return file != "<string>" and _own(file, frozenset())  # which is what dataclasses call the methods that they make


@functools.cache
def _install_audit() -> None:
    """Once in a process: an audit hook can't be taken away."""
    sys.addaudithook(_audit)


def _audit(
    event: str, args: tuple[Any, ...], events: frozenset[str] = _EVENTS, acting: ContextVar[bool] = _acting
) -> None:
    # The defaults last to the end of the process, when the module's names are gone.
    if event not in events or not acting.get():
        return
    guard = _guard.get()
    if guard is None or (event == "open" and args[0] not in _DEVICES):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _own(frame.f_code.co_filename, guard.homes):
        frame = frame.f_back
    if frame is not None:
        what, remedy = (event, _WORLD) if event != "open" else (f"open({args[0]!r})", _RANDOM)
        raise guard.refuse(what, frame, remedy)
