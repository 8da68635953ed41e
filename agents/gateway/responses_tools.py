"""The tools of OpenAI's Responses API, as functions. `responses_protocol` uses this module.

A model of one's own knows only functions, so every tool that the client runs becomes one:

    function   itself. In a namespace its name is NAMESPACE__NAME.
    custom     a function with one argument, `input`, which holds the free text. The model is shown the tool's grammar,
               which isn't enforced.
    HOSTED     left out, because OpenAI would run it. With `tool_choice` auto, a model need not call it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field, JsonValue

from ...tapes.common.plain_json import read_plain
from ...tapes.records import Message


class Place(NamedTuple):
    """The tool that a function stands for."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @property
    def function(self) -> str:
        """The function's name."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class Function(BaseModel):
    """A function. Fields that are ignored belong to OpenAI's search for tools and to its interpreter."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    """Sent on to the template as in the chat API. It isn't enforced."""

    def chat(self, name: str) -> dict[str, JsonValue]:
        """Return the function in the chat format, with this name."""
        function = self.model_dump(exclude={"type", "name"}, exclude_none=True)
        return {"type": "function", "function": {"name": name, **function}}


class _Format(BaseModel):
    type: Literal["text", "grammar"]
    syntax: str = ""
    definition: str = ""


class Custom(BaseModel):
    """A tool whose argument is free text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: _Format | None = None

    def chat(self, name: str) -> dict[str, JsonValue]:
        """Return the function in the chat format, with this name."""
        text: dict[str, JsonValue] = {"type": "string"}
        if self.format is not None and self.format.type == "grammar":
            text["description"] = f"Text in this {self.format.syntax} grammar:\n{self.format.definition}"
        described: dict[str, JsonValue] = {} if self.description is None else {"description": self.description}
        parameters: JsonValue = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


class Namespace(BaseModel):
    """Tools with a common prefix. Its description isn't shown to the model."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[Annotated[Function | Custom, Field(discriminator="type")]]


class Hosted(BaseModel):
    """A tool that OpenAI would run."""

    type: Literal[
        "code_interpreter",
        "file_search",
        "image_generation",
        "mcp",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]


Tool = Annotated[Function | Custom | Namespace | Hosted, Field(discriminator="type")]


def functions(tools: Iterable[Function | Custom | Namespace | Hosted]) -> Iterator[tuple[Place, dict[str, JsonValue]]]:
    """Yield the tools that the client runs, each as a function in the chat format."""
    for tool in tools:
        if isinstance(tool, Hosted):
            continue
        namespace = tool.name if isinstance(tool, Namespace) else None
        for one in tool.tools if isinstance(tool, Namespace) else (tool,):
            place = Place(one.type, one.name, namespace)
            yield place, one.chat(place.function)


def asked_call(place: Place, call_id: str, argument: str) -> Message:
    """Return a call that the client sent, in the chat format. `argument` is JSON, or the text of a custom tool."""
    arguments = json.dumps({"input": argument}, ensure_ascii=False) if place.kind == "custom" else argument
    return {"id": call_id, "type": "function", "function": {"name": place.function, "arguments": arguments}}


def item_of(place: Place, id: str, call: Message) -> dict[str, str]:
    """Return the item of a call in an answer. `id` ends the item's id.

    If the model wrote other arguments than `input` for a custom tool, the client gets the arguments as its text.
    """
    arguments = call["function"]["arguments"]
    custom = place.kind == "custom"
    argument: dict[str, str] = {"input": _free_text(arguments)} if custom else {"arguments": arguments}
    return {
        "id": f"{'ctc' if custom else 'fc'}_{id}",
        "type": "custom_tool_call" if custom else "function_call",
        **argument,
        "call_id": call["id"],
        "name": place.name,
        **({} if place.namespace is None else {"namespace": place.namespace}),
    }


def _free_text(arguments: str) -> str:
    try:
        value = read_plain(arguments)
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments
