"""Reads JSON from a model or a client, so that the value can be written again as valid JSON.

Python's parser accepts more than JSON: NaN, numbers too large for a float, and lone surrogates. It also accepts deeply
nested JSON, which exceeds the recursion limit of later code. `read_plain` rejects all of these. Its ValueError is
written for the author of the JSON.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from pydantic import JsonValue

DEPTH = 64
"""Maximum nesting of arrays and objects."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def read_plain(text: str | bytes) -> JsonValue:
    """Return the value that a JSON string holds. Raises a ValueError that names the fault in the string."""
    if isinstance(text, bytes):
        text = text.decode()
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ValueError(f"more than {DEPTH} arrays and objects inside each other") from None
    # Counting brackets is cheap and never underestimates the depth, so most strings need no exact check.
    if text.count("[") + text.count("{") > DEPTH:
        _check_depth(value)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise ValueError(f"half of a character: the surrogate U+{half:04X} without the other one") from None
    return value


def _check_depth(value: Any) -> None:
    """Raise ValueError if the value is nested too deeply. It goes level by level, to avoid recursion."""
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
    raise ValueError(f"{name} isn't a JSON number")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is larger than any float")
    return value


def _int(digits: str) -> int:
    # Python takes quadratic time to convert digits, and refuses more than 4,300 digits with an error of its own.
    if len(digits) > 1000:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
