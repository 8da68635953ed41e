"""Conversations drawn by a seed, and a client of each API that plays them over plain HTTP.

The clients share no code with the package's dialects, so they check what a dialect reads and writes.
"""

from __future__ import annotations

import json
import random
from array import array
from dataclasses import dataclass, field
from typing import Any

from tapereel.agents import Completion
from tapereel.agents.rendering import Renderer
from tapereel.tapes import Tape

from ..families import tokenizer
from .lab import Client, Stream, Told

RENDERER = Renderer(tokenizer("qwen3"))
APIS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
SCHEMA: Any = {"type": "object", "properties": {"key": {}, "b": {"type": "integer"}}}
NAMES = ("look", "add")
TOOLS: Any = {
    "chat": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES],
    "responses": [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES],
    "messages": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
}
TEXTS = (
    "",
    "ok",
    " two  spaces ",
    "é 東京 🙂 👩\u200d👩\u200d👧",
    "line\nline\n\n",
    '{"a": 1}',
    "a\\b \"c\" </x> & 'd'",
    "long " * 300,
)
VALUES: tuple[Any, ...] = (
    "",
    "pear",
    "é 東京 🙂",
    "x" * 3000,
    '"}\n',
    0,
    -7,
    12.5,
    None,
    True,
    [1, [2]],
    {"ä": {"b": ""}},
)


@dataclass
class Answer:
    """What a client read: the text and the calls (id, name, arguments as JSON)."""

    text: str
    calls: list[tuple[str, str, str]]


@dataclass
class Talk:
    """One conversation as it is planned. The model's answers are raw text, as it samples them."""

    number: int
    api: str
    stream: bool
    system: str | None
    said: list[str] = field(default_factory=list)
    """The model's answers."""
    heard: list[Any] = field(default_factory=list)
    """What comes before each of them: the user's text, or a list of results (text, whether it is an error)."""


def drawn(count: int, seed: int = 0) -> list[Talk]:
    """Talks of one to six answers: with calls, failing and broken calls, several calls at once and text beside them."""
    rng, talks = random.Random(seed), list[Talk]()
    for number in range(count):
        system = rng.choice([None, "Be brief.", "", "é\n"])
        talk = Talk(number, rng.choice([*APIS]), rng.random() < 0.5, system)
        calls = 0
        for _ in range(rng.randint(1, 6)):
            if calls:
                talk.heard.append([(rng.choice(TEXTS), rng.random() < 0.3) for _ in range(calls)])
            else:
                talk.heard.append(rng.choice(TEXTS) if talk.heard else f"{number}: {rng.choice(TEXTS)}")
            calls = rng.choice([0, 0, 1, 1, 2, 3])
            text = rng.choice(TEXTS) if not calls or rng.random() < 0.5 else ""
            talk.said.append("\n".join([text, *(_call(rng) for _ in range(calls))] if calls else [text]))
        talks.append(talk)
    return talks


def _call(rng: random.Random) -> str:
    arguments = json.dumps({"key": rng.choice(VALUES)} | ({"b": rng.randint(-9, 9)} if rng.random() < 0.3 else {}))
    if rng.random() < 0.1:
        arguments = '{"key": oh}'
    return f'<tool_call>\n{{"name": "{rng.choice(NAMES)}", "arguments": {arguments}}}\n</tool_call>'


class Plays(Told):
    """Answers what the talks say. The number of a talk is in its first user message."""

    def __init__(self, talks: list[Talk]) -> None:
        super().__init__(self._next)
        self._talks = {talk.number: talk for talk in talks}

    def _next(self, messages: list[Any]) -> str:
        first = next(message["content"] for message in messages if message["role"] == "user")
        talk = self._talks[int(first.partition(":")[0])]
        return talk.said[sum(message["role"] == "assistant" for message in messages)]

    @property
    def renderer(self) -> Any:
        return RENDERER

    @property
    def context(self) -> int | None:
        return 100_000

    def _completion(self, text: str, *, end: bool) -> Completion:
        ids = array("i", [*RENDERER._codec._raw(text), *RENDERER.end_ids[:1]])
        spans = (("run:0", 0, len(ids)),)
        return Completion(text=text, ids=ids, logprobs=array("f", [-0.5] * len(ids)), spans=spans, finish="stop")


History = list[Any]
"""Text of the user, an `Answer`, or a list of results (call id, text, whether it is an error), in their order."""


async def play(client: Client, api: str, talk: Talk, stream: bool, sent: list[Any]) -> History:
    """Play a talk to its end, and return it as the client knows it. `sent` gets every body and event that was sent to
    the client, as [kind, JSON]."""
    history: History = []
    for heard in talk.heard:
        if isinstance(heard, str):
            history.append(heard)
        else:
            ids = [id for id, *_ in history[-1].calls]
            history.append([(id, text, bad) for id, (text, bad) in zip(ids, heard, strict=True)])
        history.append(await ask(client, api, request(api, talk.system, history), stream, sent))
    return history


async def ask(client: Client, api: str, body: Any, stream: bool, sent: list[Any]) -> Answer:
    if not stream:
        status, whole = await client("POST", APIS[api], body)
        assert status == 200, whole
        sent.append([api, whole])
        return READ[api](whole)
    headers = {"Authorization": f"Bearer {client.key}"}
    async with client.http.post(client.root + APIS[api], json={**body, "stream": True}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        events = await Stream(answer).rest()
    if api == "chat":
        assert events.pop() == "[DONE]"
    sent += [[f"{api}-event", event] for event in events]
    return READ_EVENTS[api](events)


def request(api: str, system: str | None, history: History) -> Any:
    """The JSON of a request with this conversation."""
    return {"model": "m", **WRITE[api](system, history), "tools": TOOLS[api]}


def _result(text: str, bad: bool) -> str:
    """What a program writes as the result where the API has no field for an error."""
    return f"Error: {text}" if bad else text


def _to_chat(system: str | None, history: History) -> Any:
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    for one in history:
        if isinstance(one, str):
            messages.append({"role": "user", "content": one})
        elif isinstance(one, Answer):
            calls = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in one.calls]
            messages.append(
                {"role": "assistant", "content": one.text or None, **({"tool_calls": calls} if calls else {})}
            )
        else:
            messages += [{"role": "tool", "tool_call_id": id, "content": _result(t, bad)} for id, t, bad in one]
    return {"messages": messages}


def _to_responses(system: str | None, history: History) -> Any:
    items: list[Any] = []
    for one in history:
        if isinstance(one, str):
            items.append({"role": "user", "content": one})
        elif isinstance(one, Answer):
            if one.text or not one.calls:
                text = {"type": "output_text", "text": one.text, "annotations": []}
                items.append({"type": "message", "role": "assistant", "content": [text]})
            items += [{"type": "function_call", "call_id": i, "name": n, "arguments": a} for i, n, a in one.calls]
        else:
            items += [{"type": "function_call_output", "call_id": i, "output": _result(t, bad)} for i, t, bad in one]
    return {"input": items, **({} if system is None else {"instructions": system})}


def _to_messages(system: str | None, history: History) -> Any:
    messages: list[Any] = []
    for one in history:
        if isinstance(one, str):
            messages.append({"role": "user", "content": one})
        elif isinstance(one, Answer):
            uses = [{"type": "tool_use", "id": i, "name": n, "input": _object(a)} for i, n, a in one.calls]
            text = [{"type": "text", "text": one.text}] if one.text or not uses else []
            messages.append({"role": "assistant", "content": [*text, *uses]})
        else:
            results = [{"type": "tool_result", "tool_use_id": i, "content": t, "is_error": bad} for i, t, bad in one]
            messages.append({"role": "user", "content": results})
    return {"messages": messages, "max_tokens": 9999, **({} if system is None else {"system": system})}


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return {"INVALID_JSON": arguments}


def _arguments(value: Any) -> str:
    return value["INVALID_JSON"] if [*value] == ["INVALID_JSON"] else json.dumps(value)


def _of_chat(whole: Any) -> Answer:
    message = whole["choices"][0]["message"]
    calls = [
        (one["id"], one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])
    ]
    return Answer(message["content"] or "", calls)


def _of_responses(whole: Any) -> Answer:
    text = [part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"]]
    items = [item for item in whole["output"] if item["type"] == "function_call"]
    return Answer("".join(text), [(item["call_id"], item["name"], item["arguments"]) for item in items])


def _of_messages(whole: Any) -> Answer:
    text = [block["text"] for block in whole["content"] if block["type"] == "text"]
    uses = [block for block in whole["content"] if block["type"] == "tool_use"]
    return Answer("".join(text), [(use["id"], use["name"], _arguments(use["input"])) for use in uses])


def _of_chunks(events: list[Any]) -> Answer:
    found = Answer("", [])
    for chunk in events:
        for choice in chunk["choices"]:
            found.text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                assert call["index"] == len(found.calls)
                found.calls.append((call["id"], call["function"]["name"], call["function"]["arguments"]))
    assert events[-1]["choices"][0]["finish_reason"] == ("tool_calls" if found.calls else "stop")
    return found


def _of_response_events(events: list[Any]) -> Answer:
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert events[-1]["type"] == "response.completed"
    whole = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    found = _of_responses(whole)
    deltas = {"text": "", "arguments": ""}
    for event in events:
        if event["type"] == "response.output_text.delta":
            deltas["text"] += event["delta"]
        elif event["type"] == "response.function_call_arguments.delta":
            deltas["arguments"] += event["delta"]
    assert deltas == {"text": found.text, "arguments": "".join(arguments for *_, arguments in found.calls)}
    return found


def _of_message_events(events: list[Any]) -> Answer:
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            block["text" if delta["type"] == "text_delta" else "json"] += delta.get("text", delta.get("partial_json"))
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    return _of_messages({"content": blocks})


WRITE: Any = {"chat": _to_chat, "responses": _to_responses, "messages": _to_messages}
READ: Any = {"chat": _of_chat, "responses": _of_responses, "messages": _of_messages}
READ_EVENTS: Any = {"chat": _of_chunks, "responses": _of_response_events, "messages": _of_message_events}


def prompts(tape: Tape) -> list[list[int]]:
    return [[*call.prompt] for call in tape.calls]


def history_of(tape: Tape) -> tuple[str | None, History]:
    """The recorded conversation: its system message, and the rest up to the last answer."""
    last = tape.calls[-1]
    system: str | None = None
    history: History = []
    for message in [*last.messages, last.reply]:
        content = message["content"] or ""
        assert isinstance(content, str)
        if message["role"] == "system":
            system = content
        elif message["role"] == "user":
            history.append(content)
        elif message["role"] == "assistant":
            calls = [(one["id"], one["function"]) for one in message.get("tool_calls") or ()]
            history.append(Answer(content, [(id, one["name"], one["arguments"]) for id, one in calls]))
        else:
            result = (message["tool_call_id"], content.removeprefix("Error: "), content.startswith("Error: "))
            if isinstance(history[-1], list):
                history[-1].append(result)
            else:
                history.append([result])
    return system, history
