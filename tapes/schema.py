"""The union of all record types, and the rules for extending it.

A later version may add an optional field, a kind of record or a member of an enumeration (docs/concepts/store.md, "The
schema"). This version can't know what the addition means and doesn't guess. Instead, `parse_record` raises a
NewerRecord that names the addition.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from .errors import NewerRecord, NotATape, short_repr
from .records import (
    Begin,
    Call,
    Commit,
    End,
    Files,
    Label,
    Lead,
    Open,
    Publish,
    Reward,
    Seal,
    StepRecord,
    Tokens,
    Use,
    Void,
)

AnyRecord = Annotated[
    Begin
    | StepRecord
    | Call
    | Reward
    | End
    | Label
    | Tokens
    | Use
    | Void
    | Open
    | Publish
    | Lead
    | Files
    | Commit
    | Seal,
    Field(discriminator="t"),
]

_validator = TypeAdapter[AnyRecord](AnyRecord).validator


def parse_record(body: bytes) -> AnyRecord:
    """Return the record in `body` (JSON).

    Raises NewerRecord if this version doesn't know a part of the record and the rest is valid. For any other invalid
    record, raises pydantic's ValidationError. Both are ValueErrors.
    """
    try:
        return _validator.validate_json(body, by_name=False, by_alias=True)
    except ValidationError as error:
        unknown = [_unknown(one) for one in error.errors()]
        if None in unknown:
            raise
        raise NewerRecord(" and ".join(dict.fromkeys(filter(None, unknown)))) from error


def read_record(body: bytes, place: str) -> AnyRecord:
    """Read a record as `parse_record` does. `place` states in errors where the record is, such as `record 3`. Raises
    NewerRecord in the same cases, and NotATape if the record can't be read for another reason."""
    try:
        return parse_record(body)
    except NewerRecord as error:
        raise NewerRecord(error.part, place) from error
    except ValueError as error:
        raise NotATape(f"{place} can't be read: {reason_of(error)}") from error


def reason_of(error: ValueError) -> str:
    """Return a description, in one line, of the first fault that `parse_record` found."""
    if not isinstance(error, ValidationError):
        return str(error).splitlines()[0]
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join([".".join(map(str, first["loc"])), first["msg"]]).removeprefix(": ")


def _unknown(error: ErrorDetails) -> str | None:
    """Return the part that this version doesn't know, or None if the record is wrong in another way."""
    name = ".".join(str(part) for part in error["loc"][1:])
    match error["type"]:
        case "extra_forbidden":
            return f'the field "{name}"'
        case "union_tag_invalid" if not error["loc"]:
            return f'the type "{error["ctx"]["tag"]}"' if "ctx" in error else "an unknown type"
        case "enum" | "literal_error" if isinstance(error["input"], str):
            return f'the value {short_repr(error["input"])} of the field "{name}"'
        case _:
            return None
