"""Secrets stay out of what is recorded, logged and said: where text comes from outside, it passes here first.

A server may echo the key it was sent, an exception may quote an address with a password, a settings object may hold a
token. Known are the values of environment variables whose name says what they are, values under such a name, addresses
with user and password, bearer tokens and keys that show their maker. What else is secret nobody can tell from its text;
so this is the second line, and the first is that keys are given by the name of their variable only.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from typing import TypeVar
from urllib.parse import unquote

HIDDEN = "[secret]"
"""What stands in a secret's place."""
SHORTEST = 8
"""Characters of the shortest environment value that is taken for a secret; shorter ones stand in ordinary words."""

_NAMES = re.compile(r"(?:^|[_-])(?:api_?key|key|token|secret|password|passwd|credentials?|authorization)$", re.I)
_SHAPES = (
    (("://",), re.compile(r"(?<=://)[^\s/@'\"]*:[^\s/@'\"]*(?=@)"), HIDDEN),
    (("earer", "asic"), re.compile(r"\b([Bb](?:earer|asic))\s+(?=\S*[\d=])[\w.~+/=-]{8,}"), rf"\1 {HIDDEN}"),
    (
        ("key=", "oken=", "ecret=", "word="),
        re.compile(r"([?&](?:[\w-]*[_-])?(?:api_?key|key|token|secret|password)=)(?!\[secret\])[^&\s'\"]+"),
        rf"\1{HIDDEN}",
    ),
    (
        ("sk-", "hf_", "gh", "xox", "AKIA", "AIza"),
        re.compile(r"\b(?:sk-|hf_|gh[pousr]_|xox[a-z]-|AKIA|AIza)[\w-]{12,}"),
        HIDDEN,
    ),
)
"""(text that must be there at all, what is searched then, what takes its place)."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
_LOGIN = re.compile(r"(?:https?|wss?)://[^/?#]*@", re.I)
_QUERY = re.compile(r"[?&;]([^=&;]+)=[^&;]")
_KEYLIKE = re.compile(r"(?<!\S)(?=\S*\d)(?=\S*[A-Za-z])\S{12,}")

ValueT = TypeVar("ValueT")


def names_secret(name: str) -> bool:
    """Whether a setting or variable of this name holds a secret: `OPENAI_API_KEY`, `token`, but not `max_tokens`."""
    return _NAMES.search(name) is not None


def holds_secret(text: str) -> bool:
    """Whether a text is an address that opens what it leads to: by a user, by a query like `?api_key=`, or by a key
    that is known as one. A longer text that has such an address in it is none."""
    if not _ADDRESS.fullmatch(text):
        return False
    named = any(names_secret(unquote(name)) for name in _QUERY.findall(text))
    return named or _LOGIN.match(text) is not None or without_secrets(text) != text


def environment_secrets() -> list[str]:
    """Values of the environment's variables that are secrets by their name, longest first."""
    found = {value for name, value in os.environ.items() if len(value) >= SHORTEST and names_secret(name)}
    return sorted(found, key=len, reverse=True)


def without_secrets(text: str, known: Iterable[str] = ()) -> str:
    """`text` with every secret in it hidden; `known` are further ones. Applying it again changes nothing."""
    return _hidden(text, [*known, *environment_secrets()])


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        record.msg, record.args, record.exc_info, record.exc_text = without_secrets(text), None, None, None
        return True


def guard_log(name: str) -> None:
    """Hide the secrets in all that the logger of a library says from now on. Of an error it logs, the message alone is
    kept: tracebacks quote what was read."""
    logger = logging.getLogger(name)
    if not any(isinstance(one, _Filter) for one in logger.filters):
        logger.addFilter(_Filter())


def hide(value: ValueT) -> ValueT:
    """A JSON value with the secrets in its strings hidden, and all of what stands under a secret's name. The
    environment is asked only where a string looks like a key: this is done for every episode."""
    hidden: object = value
    if isinstance(value, str):
        hidden = _hidden(value, environment_secrets() if _KEYLIKE.search(value) else ())
    elif isinstance(value, dict):
        hidden = {
            key: HIDDEN if isinstance(one, str) and one and names_secret(str(key)) else hide(one)
            for key, one in value.items()
        }
    elif isinstance(value, list):
        hidden = [hide(one) for one in value]
    return hidden  # type: ignore[return-value]


def _hidden(text: str, known: Iterable[str]) -> str:
    for secret in known:
        if secret:
            text = text.replace(secret, HIDDEN)
    for signs, pattern, instead in _SHAPES:
        if any(sign in text for sign in signs):
            text = pattern.sub(instead, text)
    return text


def bearer(header: str | None) -> str:
    """The token in an Authorization header of the scheme Bearer, whose name has no case; empty where there is none."""
    found = re.fullmatch(r"bearer ([\x21-\x7e]{1,1000})", header or "", re.IGNORECASE)
    return found[1] if found else ""
