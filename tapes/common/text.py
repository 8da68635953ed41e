"""Numbers and untrusted text, formatted for people. The result holds no control sequence of a terminal."""

from __future__ import annotations

import logging


def number(value: float | None) -> str:
    """A reward or a mean with at most three decimals; `-` for None."""
    return "-" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")


def counted(n: int, word: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def safe(text: str) -> str:
    """`text` without control characters that a terminal would obey; newlines and tabs stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


class _Escaped(logging.Filter):
    """Escapes a record's message and traceback: both quote environments, models and files."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = safe(record.getMessage()), None
        if record.exc_info:
            record.exc_text = safe(logging.Formatter().formatException(record.exc_info))
        return True


def logger(name: str) -> logging.Logger:
    """The logger `tapereel.NAME`. No handler of it, a user's own included, sends a control sequence to a terminal."""
    made = logging.getLogger(f"tapereel.{name}")
    if not any(isinstance(one, _Escaped) for one in made.filters):
        made.addFilter(_Escaped())
    return made
