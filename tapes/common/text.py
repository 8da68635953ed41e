"""Formats counts and untrusted text for people. The result holds no control sequence for a terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from functools import cache
from pathlib import Path
from traceback import format_exception
from types import TracebackType

from ..errors import brief_digests

DOCS = Path(__file__).parents[2] / "docs"
"""The folder with the documentation. It is part of the package, so its paths can be printed."""


def counted(n: int, word: str) -> str:
    """Return a count with its noun, such as `1 row` or `2,000 rows`."""
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def safe(text: str) -> str:
    """Return `text` without control characters that a terminal would obey, and with short digests of models. Newlines
    and tabs are kept."""
    return brief_digests("".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text))


def storable(text: str, limit: int = 2000) -> str:
    """Return at most `limit` characters of `text`, without lone surrogates, which JSON can't hold."""
    return text[:limit].encode("utf-8", "backslashreplace").decode()


def tell(text: str) -> None:
    """Print `text` on stderr, escaped, even if foreign code has replaced or closed `sys.stderr`."""
    line = safe(text) + "\n"
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except Exception:
        with contextlib.suppress(OSError):  # no one can read it
            os.write(2, line.encode(errors="backslashreplace"))


class _Escaped(logging.Filter):
    """Escapes a record's message and traceback, because both may quote environments, models and files."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = safe(record.getMessage()), None
        if record.exc_info:
            record.exc_text = safe(logging.Formatter().formatException(record.exc_info))
        return True


def logger(name: str) -> logging.Logger:
    """Return the logger `tapereel.NAME`. It escapes messages, even for handlers that a user adds."""
    made = logging.getLogger(f"tapereel.{name}")
    if not any(isinstance(one, _Escaped) for one in made.filters):
        made.addFilter(_Escaped())
    return made


@cache
def warn_once(log: logging.Logger, sentence: str) -> None:
    """Log a warning, once in this process."""
    log.warning("%s", sentence)


class TerminalHandler(logging.Handler):
    """Prints a record from any logger on stderr, escaped: warnings, the settings that a profile has chosen, and rewards
    before training. Without this handler, a script that calls `tapereel.train` prints only the warnings."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        for name in ("model", "profile", "train"):
            logging.getLogger(f"tapereel.{name}").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        tell(self.format(record))


def guard_terminal() -> None:
    """Escape what Python and its libraries print in this process: log records, warnings, and tracebacks from the
    process, from threads and from finalisers. All of them may quote environments, models and files. The command line
    calls this function in each of its processes."""
    logging.getLogger().addHandler(TerminalHandler())
    logging.captureWarnings(True)
    sys.excepthook = _print_traceback
    threading.excepthook = lambda args: _print_traceback(
        args.exc_type, args.exc_value, args.exc_traceback, f"in thread {args.thread.name if args.thread else '?'}: "
    )
    sys.unraisablehook = lambda args: _print_traceback(
        args.exc_type, args.exc_value, args.exc_traceback, f"ignored in {args.object!r}: "
    )


def _print_traceback(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, where: str = ""
) -> None:
    tell(where + "".join(format_exception(kind, error, trace)).rstrip())
