"""What a record's body leaves out, and that it leaves out nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_core import from_json

from tapereel.tapes import Call, Sampling, Task
from tapereel.tapes.records import Begin, Identity
from tapereel.tapes.schema import parse_record

ALIKE: dict[str, Any] = {
    "a": 1,
    "first_temperature": None,
    "min_tokens": 0,
    "ignore_eos": False,
    "barred": None,
    "conversation": "",
    "b": 2,
}
"""Names that a body leaves out, where they are somebody's data."""


def call(**fields: Any) -> Call:
    return Call(tape="t", call="t.1", by="agent", at=1.0, **fields)


@pytest.mark.parametrize(
    "record",
    [
        call(messages=({"role": "user", "content": "x", "more": ALIKE},)),
        call(sampling=Sampling(extra=ALIKE)),
        call(sampling=Sampling(extra=ALIKE, first_temperature=10.0), conversation="main"),
        call(sampling=Sampling(extra=ALIKE, min_tokens=2), barred=(3, 5)),
        call(sampling=Sampling(ignore_eos=True)),
        call(tool_calls=({"function": ALIKE},), sampling=Sampling(extra=ALIKE)),
        call(),
        Begin(
            tape="t",
            task=Task(public=ALIKE),
            task_hash=Task(public=ALIKE).hash,
            agent=Identity(name="a"),
            env=Identity(name="e"),
            env_seed=1,
            seed=2,
            split="train",
            at=1.0,
            sampling=Sampling(extra=ALIKE),
        ),
    ],
    ids=["message", "extra", "told", "least", "endless", "tool call", "plain", "task"],
)
def test_a_body_leaves_out_what_isnt_told_and_keeps_what_looks_like_it(record: Call | Begin) -> None:
    body = record.body()
    assert parse_record(body) == record
    plain = from_json(body)
    assert ("conversation" in plain) == bool(isinstance(record, Call) and record.conversation)
    assert record.sampling is not None
    later = ("first_temperature", "min_tokens", "ignore_eos")
    assert {*plain["sampling"]}.intersection(later) == {name for name in later if getattr(record.sampling, name)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.5},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"max_tokens": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_tokens": -1},
        {"first_temperature": 0.0},
        {"first_temperature": float("inf")},
    ],
)
def test_sampling_that_no_engine_could_do_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling.model_validate(wrong)
