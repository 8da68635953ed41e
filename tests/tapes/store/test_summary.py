"""Facts of a record are the same, whether they are read from the front of its body or from all of its JSON."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from tapereel.tapes import Answer, Call
from tapereel.tapes.store import summary
from tapereel.tapes.tape import step_record

STRINGS = st.text(st.characters(exclude_categories=["Cs"]))


@given(STRINGS, STRINGS, STRINGS, st.randoms(use_true_random=False))
def test_a_step_and_a_call_are_read_with_any_strings_in_any_order(tape: str, by: str, name: str, order: Any) -> None:
    def shuffled(body: dict[str, object]) -> bytes:
        keys = list(body)
        order.shuffle(keys)
        return to_json({key: body[key] for key in keys})

    step = {"t": "step", "tape": tape, "by": by, "role": "action", "kind": name, "content": {"by": "other"}}
    call = {"t": "call", "tape": tape, "call": name, "by": by, "messages": [{"call": "other"}]}
    for write in (to_json, shuffled):
        assert summary.read_step(write(step))[:3] == (by, "action", name)
        assert summary.is_action(write(step))
        assert not summary.is_action(write({**step, "role": "thought"}))
        assert summary.call_id(write(call)) == name


def test_the_records_that_this_version_writes_are_read_from_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(body: bytes) -> dict[str, object]:
        raise AssertionError(f"all of {body[:60]!r} was parsed")

    monkeypatch.setattr(summary, "read_body", parse)
    step = step_record("0" * 22, Answer(text="two"), by="planner/searcher").body()
    assert summary.read_step(step)[:3] == ("planner/searcher", "action", "answer")
    assert summary.call_id(Call(tape="0" * 22, call="t.1", by="agent", at=1.0).body()) == "t.1"
