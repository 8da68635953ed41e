"""Columns: arrays of int32 or float32 values, such as token ids and log-probs. In JSON, a column is the base64 of its
little-endian bytes, with 4 bytes for each value.

Each float32 keeps its bits when a column is written and read, so digests and log-probs stay equal. Decimal text would
not guarantee this.
"""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema


def ints(values: Iterable[int] = ()) -> array[int]:
    """Return an int32 array. Raises OverflowError if a value doesn't fit into int32."""
    return array("i", values)


def floats(values: Iterable[float] = ()) -> array[float]:
    """Return a float32 array. Use NaN for an unknown value, because 0.0 is a valid log-prob."""
    return array("f", values)


def encode(values: array[int] | array[float]) -> str:
    """Return the little-endian bytes as base64."""
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")


def decode(typecode: Literal["i", "f"], text: str) -> array[int] | array[float]:
    """Return the array that `encode` wrote as `text`. Raises ValueError if `text` doesn't hold an array."""
    values = array(typecode)
    try:
        values.frombytes(binascii.a2b_base64(text, strict_mode=True))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not a base64 column of 4-byte values: {error}") from None
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _column(typecode: Literal["i", "f"]) -> Any:
    def validate(value: Any) -> array[int] | array[float]:
        if isinstance(value, str):
            return decode(typecode, value)
        if isinstance(value, array) and value.typecode == typecode:
            return value
        try:
            return array(typecode, value)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"not a column of numbers: {error}") from None

    return validate


Ints = Annotated[
    array,
    PlainValidator(_column("i")),
    PlainSerializer(encode, return_type=str),
    WithJsonSchema({"type": "string", "contentEncoding": "base64", "description": "little-endian int32 array"}),
]
Floats = Annotated[
    array,
    PlainValidator(_column("f")),
    PlainSerializer(encode, return_type=str),
    WithJsonSchema({"type": "string", "contentEncoding": "base64", "description": "little-endian float32 array"}),
]
