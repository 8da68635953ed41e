"""JSON that somebody else wrote, a model or a client: what comes out can be written again, by any reader of ours.

Python reads more than JSON has (NaN, numbers beyond all floats, halves of characters), and a text of a thousand
brackets ends a recursion somewhere later. All of that is a ValueError here, in words for whoever wrote it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

DEPTH = 64
"""Arrays and objects inside each other."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def read_plain(text: str | bytes) -> Any:
    """The value. ValueError says what is wrong with it."""
    if isinstance(text, bytes):
        text = text.decode()
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ValueError(f"more than {DEPTH} arrays and objects inside each other") from None
    if text.count("[") + text.count("{") > DEPTH:
        _check_depth(value)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half of a character: a surrogate without the other one") from None
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if any(isinstance(inner, list | dict) for inner in level):
        raise ValueError(f"more than {DEPTH} arrays and objects inside each other")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is beyond all numbers")
    return value


def _int(digits: str) -> int:
    if len(digits) > 1000:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
