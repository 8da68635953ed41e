"""Redaction: text from outside passes through here before it is recorded, logged or printed.

A server may echo the key it received, an exception may quote an address with a password, and a settings object may hold
a token. This module recognises the values of environment variables and settings whose names suggest a secret, the user
and password in an address, bearer tokens, and keys with a known prefix. It can't recognise any other secret, so it is
only a second line of defence. The first line is that settings hold the name of an environment variable, never a key.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from typing import TypeVar
from urllib.parse import unquote

HIDDEN = "[secret]"
"""The text that replaces a secret."""
SHORTEST = 8
"""A secret in an environment variable is recognised only if it has at least this number of characters. A shorter value
may be part of an ordinary word."""

_NAMES = re.compile(r"(?:^|[_-])(?:api_?key|key|token|secret|password|passwd|credentials?|authorization)$", re.I)
_SHAPES = (
    (("://",), re.compile(r"(?<=://)[^\s/@'\":]*+:[^\s/@'\"]*+(?=@)"), HIDDEN),
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
"""The patterns of secrets, as (strings, pattern, replacement). For speed, a pattern is tried only if the text contains
one of its strings."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
_LOGIN = re.compile(r"(?:https?|wss?)://[^/?#]*@", re.I)
_QUERY = re.compile(r"[?&;]([^=&;]+)=[^&;]")
_KEYLIKE = re.compile(r"(?<!\S)(?=\S*\d)(?=\S*[A-Za-z])\S{12,}")

ValueT = TypeVar("ValueT")


def names_secret(name: str) -> bool:
    """Return whether this is the name of a secret. `OPENAI_API_KEY` and `token` are such names, `max_tokens` isn't."""
    return _NAMES.search(name) is not None


def holds_secret(text: str) -> bool:
    """Return whether `text` is an address with a secret: a user, a query such as `?api_key=`, or a recognised key.

    The result is False for longer text that quotes an address.
    """
    if not _ADDRESS.fullmatch(text):
        return False
    named = any(names_secret(unquote(name)) for name in _QUERY.findall(text))
    return named or _LOGIN.match(text) is not None or without_secrets(text) != text


def refuse_secret(url: str, what: str) -> None:
    """Raise ValueError if the address contains a secret, because the secret would be recorded. `what` describes the
    address in the message."""
    if holds_secret(url):
        raise ValueError(
            f"{what} {without_secrets(url)!r} holds a user, a password or a key, which would be recorded; give the "
            "name of the environment variable with the key instead: key_variable"
        )


def environment_secrets() -> list[str]:
    """Return the values of environment variables whose names suggest a secret, longest first.

    One secret may contain another, and hiding the shorter one first would leave the rest of the longer one visible.
    """
    found = {value for name, value in os.environ.items() if len(value) >= SHORTEST and names_secret(name)}
    return sorted(found, key=len, reverse=True)


def without_secrets(text: str, known: Iterable[str] = ()) -> str:
    """Return `text` with its recognised secrets and the strings in `known` hidden. A second call changes nothing."""
    return _hidden(text, [*known, *environment_secrets()])


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        record.msg, record.args, record.exc_info, record.exc_text = without_secrets(text), None, None, None
        return True


def guard_log(name: str) -> None:
    """Hide secrets in everything that the logger of a library writes from now on.

    For a logged exception, only the message is kept, because a traceback quotes lines of code and their values.
    """
    logger = logging.getLogger(name)
    if not any(isinstance(one, _Filter) for one in logger.filters):
        logger.addFilter(_Filter())


def hide(value: ValueT) -> ValueT:
    """Return a JSON value with the secrets in its strings hidden. If a key names a secret, the whole string under it is
    hidden.

    This runs for every episode, so it reads the environment only if a string looks like a key.
    """
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
