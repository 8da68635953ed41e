"""JSON from outside: what is read can be written again, and everything else is refused in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue, TypeAdapter

from tapereel.tapes.common.plain_json import DEPTH, read_plain

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_what_json_can_hold_comes_through(value: Any, ascii_: bool):
    text = json.dumps(value, ensure_ascii=ascii_)
    assert read_plain(text) == read_plain(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, str(DEPTH)),
        ("[" * (DEPTH + 1) + "]" * (DEPTH + 1), str(DEPTH)),
        ('{"a":' * 400 + "1" + "}" * 400, str(DEPTH)),
        ("[NaN]", "^NaN"),
        ('{"a": -Infinity}', "^-Infinity"),
        ("1e999", "^1e999"),
        ("9" * 5000, "5000"),
        (r'"\ud800"', "half"),
        ('"\ud800"', "half"),
        ('{"a": ', "Expecting value"),
        (b'"\xff"', "invalid start byte"),
        ("", "Expecting value"),
    ],
)
def test_what_no_reader_of_ours_could_write_again_is_refused(text: str | bytes, says: str):
    with pytest.raises(ValueError, match=says):
        read_plain(text)


def test_the_deepest_that_is_taken_can_be_recorded():
    value = read_plain("[" * DEPTH + "]" * DEPTH)
    assert TypeAdapter(JsonValue).validate_python(value) == value
    assert read_plain(r'"\ud83d\ude00"') == "\U0001f600"
