"""The grammar of an answer whose form a request demands, as its model's family writes such an answer.

`LLM` makes the grammar, and engines with the capability `grammar` enforce it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import JsonValue

from ...tapes.records import Constraint
from .tool_calls import tool_name

if TYPE_CHECKING:
    from .renderer import Renderer


@dataclass(frozen=True, slots=True)
class Alternative:
    """One form of an answer: `begin`, JSON that matches the schema, `end`."""

    begin: str
    json_schema: dict[str, JsonValue]
    end: str


Grammar = tuple[Alternative, ...]
"""The forms that an answer may have. Empty if it may have any form."""


def answer_grammar(
    constraint: Constraint, tools: Sequence[Mapping[str, JsonValue]], renderer: Renderer, prompt: str
) -> Grammar:
    """Return the grammar of answers that satisfy `constraint`. `tools` are the offered tools, and `prompt` is the text
    of the prompt.

    The grammar is empty if the constraint can't be enforced, because `renderer` doesn't read such an answer as JSON or
    as a call. This is so if the family writes calls in another way, or if the prompt has opened a thought.
    """
    written = renderer.format
    found = list[Alternative]()
    if constraint.json_schema is not None:
        begin, end = written.content
        found.append(Alternative(begin, constraint.json_schema, end))
        if renderer.read(f"{begin}{{}}{end}", tools, prompt=prompt).answer != "{}":
            return ()
    for tool in tools:
        name = tool_name(tool)
        if name not in constraint.tools:
            continue
        if written.call is None:
            return ()
        begin, end = written.call[0].replace("NAME", json.dumps(name)[1:-1]), written.call[1]
        found.append(Alternative(begin, _parameters(tool), end))
        if [call.name for call in renderer.read(f"{begin}{{}}{end}", tools, prompt=prompt).calls] != [name]:
            return ()
    return tuple(found)


def _parameters(tool: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the schema of a tool's arguments, which are any object if the tool has none."""
    function = tool.get("function", tool)
    schema = function.get("parameters") if isinstance(function, Mapping) else None
    return schema if isinstance(schema, dict) and schema else {"type": "object"}
