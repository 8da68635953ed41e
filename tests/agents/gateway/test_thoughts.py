"""A model's thoughts through the gateway: how each API sends them, and how they come back as they were sampled."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import Completion
from tapereel.agents.gateway import Answered, chat_protocol, messages_protocol, responses_protocol
from tapereel.agents.gateway.dialect import THOUGHT
from tapereel.agents.rendering import Renderer
from tapereel.finetune import rows
from tapereel.tapes import Sampling, Tape

from ..families import tokenizer
from . import test_messages, test_responses
from .lab import Client, books_close, served
from .test_live import Spelled

LONG = Sampling(max_tokens=400)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
THINKS = f"i may write {CALL % 9} ."
SAID = [f"<think>\n{THINKS}\n</think>\n\ni add. {CALL % 1}", "<think>\nit is three.\n</think>\n\ndone"]
"""A thought that quotes a call, then text and a call, and an answer after another thought."""
Thoughts = tuple[str, str, list[str]]
"""Thoughts, text, and the arguments of the calls."""


class Thinks(Spelled):
    """Samples token by token what it is told, as a model of this family."""

    def __init__(self, *says: str, family: str = "", finish: Any = "stop", **options: Any) -> None:
        super().__init__(*says)
        self._own = Renderer(tokenizer(family), **options) if family else super().renderer
        self._finish = finish
        self.let(100_000)

    @property
    def renderer(self) -> Any:
        return self._own

    def _completion(self, text: str, *, end: bool) -> Completion:
        ends = self._own.end_ids[:1] if self._finish == "stop" else ()
        ids = array("i", [*self._own._codec._raw(text), *ends])
        spans = (("run:0", 0, len(ids)),)
        logprobs = array("f", [-0.5] * len(ids))
        return Completion(text=text, ids=ids, logprobs=logprobs, spans=spans, finish=self._finish)


class Api:
    """One of the three APIs, used as its clients use it, and the conversation so far."""

    def __init__(self, name: str, client: Client, *, stream: bool) -> None:
        self.name, self.client, self.stream = name, client, stream
        self.said: list[Any] = [{"role": "user", "content": "go"}]

    async def ask(self, **more: Any) -> Thoughts:
        """Send the conversation, and add the answer to it as a client keeps it."""
        tool: Any = {"name": "add", "parameters": SCHEMA}
        path, messages, tools = {
            "chat": ("chat/completions", "messages", {"type": "function", "function": tool}),
            "responses": ("responses", "input", {"type": "function", **tool}),
            "messages": ("messages", "messages", {"name": "add", "input_schema": SCHEMA}),
        }[self.name]
        fixed = {"max_tokens": 400} if self.name == "messages" else {}
        body = {"model": "m", messages: self.said, "tools": [tools], "stream": self.stream, **fixed, **more}
        status, answer = await self.client("POST", f"/v1/{path}", body)
        assert status == 200, answer
        return getattr(self, f"_{self.name}")(answer)

    def result(self, id: str, text: str) -> None:
        match self.name:
            case "chat":
                self.said.append({"role": "tool", "tool_call_id": id, "content": text})
            case "responses":
                self.said.append({"type": "function_call_output", "call_id": id, "output": text})
            case _:
                block = {"type": "tool_result", "tool_use_id": id, "content": text}
                self.said.append({"role": "user", "content": [block]})

    def thoughts(self, change: Any) -> None:
        """Replace the text of each thought in the conversation. None drops the thoughts."""
        for item in self.said:
            for field in ("reasoning", "reasoning_content"):
                if field in item:
                    item[field] = change and change(item[field])
        if self.name == "responses":
            self.said = [item for item in self.said if change or item.get("type") != "reasoning"]
            for part in (part for item in self.said if item.get("type") == "reasoning" for part in item["content"]):
                part["text"] = change(part["text"])
        for item in self.said:
            if self.name == "messages" and isinstance(item["content"], list):
                item["content"] = [block for block in item["content"] if change or block["type"] != "thinking"]
                for block in item["content"]:
                    if block["type"] == "thinking":
                        block["thinking"] = change(block["thinking"])

    def _chat(self, answer: Any) -> Thoughts:
        if self.stream:
            message: Any = {"role": "assistant", "content": ""}
            for line in answer.splitlines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
                for choice in event["choices"]:
                    for field, piece in choice["delta"].items():
                        if field == "tool_calls":
                            message[field] = [*message.get(field, []), *piece]
                        elif field != "role":
                            message[field] = message.get(field, "") + piece
        else:
            message = answer["choices"][0]["message"]
        self.said.append(message)
        assert message.get("reasoning") == message.get("reasoning_content")
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        return message.get("reasoning", ""), message["content"] or "", calls

    def _responses(self, answer: Any) -> Thoughts:
        if self.stream:
            events = test_responses.parsed(answer.encode())
            items = events[-1]["response"]["output"]
            for event in events:
                if event["type"].endswith("_text.delta"):
                    part = items[event["output_index"]]["content"][event["content_index"]]
                    assert event["type"] == f"response.{part['type']}.delta"
                    part["sent"] = part.get("sent", "") + event["delta"]
            for item in items:
                assert all(part.pop("sent", "") == part["text"] for part in item.get("content", ()))
        else:
            items = answer["output"]
        self.said += items
        texts: Any = {"reasoning": "", "message": ""}
        for item in items:
            if item["type"] in texts:
                texts[item["type"]] += item["content"][0]["text"]
        return texts["reasoning"], texts["message"], [i["arguments"] for i in items if i["type"] == "function_call"]

    def _messages(self, answer: Any) -> Thoughts:
        message = test_messages.joined(test_messages.parsed(answer.encode())) if self.stream else answer
        self.said.append({"role": "assistant", "content": message["content"]})
        texts: Any = {"thinking": "", "text": ""}
        for block in message["content"]:
            assert block["type"] != "thinking" or block["signature"]
            if block["type"] in texts:
                texts[block["type"]] += block[block["type"]]
        calls = [json.dumps(block["input"]) for block in message["content"] if block["type"] == "tool_use"]
        return texts["thinking"], texts["text"], calls

    def last_call(self) -> str:
        match self.name:
            case "chat":
                return self.said[-1]["tool_calls"][0]["id"]
            case "responses":
                return self.said[-1]["call_id"]
            case _:
                return self.said[-1]["content"][-1]["id"]


APIS = pytest.mark.parametrize("name", ["chat", "responses", "messages"])
STREAMED = pytest.mark.parametrize("stream", [False, True])


def scene(path: Path, engine: Thinks, name: str, *, stream: bool, change: Any = str) -> tuple[Tape, list[Thoughts]]:
    """Ask until the model calls no more tools. Before each further request, `change` changes the thoughts."""

    async def play() -> tuple[Tape, list[Thoughts]]:
        async with served(path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            api, found = Api(name, client, stream=stream), list[Thoughts]()
            while True:
                found.append(await api.ask())
                if not found[-1][2]:
                    break
                id = api.last_call()
                api.thoughts(change)
                api.result(id, "3")
            await there.end(tape)
            return there.tape(tape), found

    return asyncio.run(play())


@APIS
@STREAMED
@pytest.mark.parametrize("change", [str, None, lambda text: f"\n{text} "], ids=["sent back", "dropped", "white space"])
def test_thoughts_are_sent_apart_and_come_back_as_they_were_sampled(
    name: str, stream: bool, change: Any, tmp_path: Path
):
    tape, found = scene(tmp_path, Thinks(*SAID), name, stream=stream, change=change)
    assert found == [(THINKS, "i add.", ['{"a": 1}']), ("it is three.", "done", [])]
    assert [call.text for call in tape.calls] == SAID
    assert [call.split for call in tape.calls] == [None, None]
    (row,) = rows(tape)
    assert len(row.own) == sum(len(call.completion or ()) for call in tape.calls) == books_close(tmp_path).sampled


@APIS
@pytest.mark.parametrize("change", [lambda text: text + "!", lambda text: text[:-1]])
def test_a_changed_thought_is_not_the_models(name: str, change: Any, tmp_path: Path):
    tape, found = scene(tmp_path, Thinks(*SAID), name, stream=False, change=change)
    assert found[-1] == ("it is three.", "done", [])
    first, second = tape.calls
    assert second.split is not None
    (echo,) = [message for message in second.messages if message["role"] == "assistant"]
    assert echo["content"] == "i add."  # the changed thought isn't shown to the model
    assert THOUGHT not in echo
    assert first.text == SAID[0]


@APIS
def test_a_changed_answer_is_not_the_models(name: str, tmp_path: Path):
    async def play() -> Tape:
        async with served(tmp_path, Thinks("<think>\na\n</think>\n\none", "two"), sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            api = Api(name, client, stream=False)
            assert await api.ask() == ("a", "one", [])
            api.said = json.loads(json.dumps(api.said).replace("one", "ones"))
            api.said.append({"role": "user", "content": "on"})
            await api.ask()
            await there.end(tape)
            return there.tape(tape)

    assert [call.split is None for call in asyncio.run(play()).calls] == [True, False]


@APIS
@STREAMED
def test_a_thought_without_an_end_is_no_answer_and_no_call(name: str, stream: bool, tmp_path: Path):
    engine = Thinks(f"<think>\ni write {CALL % 1} or", finish="length")
    tape, found = scene(tmp_path, engine, name, stream=stream)
    assert found == [(f"i write {CALL % 1} or", "", [])]
    assert [call.finish for call in tape.calls] == ["length"]


@APIS
@STREAMED
@pytest.mark.parametrize("family", ["r1", "qwen3"])
def test_a_family_thinks_in_its_own_way(family: str, name: str, stream: bool, tmp_path: Path):
    """R1's template begins the thought in the prompt. Qwen3's drops earlier thoughts from the history."""
    thought = "The pear costs 12."
    text = f"{thought}\n</think>\n\nIt is 12." if family == "r1" else f"<think>\n{thought}\n</think>\n\nIt is 12."

    async def play() -> tuple[Tape, list[Thoughts]]:
        async with served(tmp_path, Thinks(text, family=family), sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            api, found = Api(name, client, stream=stream), list[Thoughts]()
            for _ in range(3):
                found.append(await api.ask(tools=[]))
                api.said.append({"role": "user", "content": "again"})
            await there.end(tape)
            return there.tape(tape), found

    tape, found = asyncio.run(play())
    assert found == [(thought, "It is 12.", [])] * 3
    assert [call.split for call in tape.calls] == [None] * 3
    (row,) = rows(tape)
    assert len(row.own) == sum(len(call.completion or ()) for call in tape.calls)


def test_a_template_that_drops_thoughts_starts_a_row_if_the_model_must_read_what_it_writes(tmp_path: Path):
    """The exception: with `history=template`, a prompt is exactly what the template writes, without old thoughts."""

    async def play() -> Tape:
        text = "<think>\nThe pear.\n</think>\n\nIt is 12."
        async with served(tmp_path, Thinks(text, family="qwen3", history="template"), sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            api = Api("chat", client, stream=False)
            await api.ask()
            api.said.append({"role": "user", "content": "again"})
            await api.ask()
            await there.end(tape)
            return there.tape(tape)

    first, second = asyncio.run(play()).calls
    assert (first.split, second.base) == (None, first.call)
    assert second.split is not None
    assert "rewrote the last answer" in second.split


@pytest.mark.parametrize("sent_back", [True, False])
def test_one_of_two_answers_with_the_same_text_is_told_by_its_thought(sent_back: bool, tmp_path: Path):
    said = ["<think>\na\n</think>\n\none", "<think>\nb\n</think>\n\none", "two"]

    async def play() -> Tape:
        async with served(tmp_path, Thinks(*said), sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            first, second = (Api("chat", client, stream=False) for _ in range(2))
            await first.ask()
            await second.ask()
            if not sent_back:
                second.thoughts(None)
            second.said.append({"role": "user", "content": "on"})
            await second.ask()
            await there.end(tape)
            return there.tape(tape)

    a, b, third = asyncio.run(play()).calls
    # Without the thought, the first answer to this prompt is taken: a replay may send the second one sooner.
    assert third.base == (b.call if sent_back else a.call)
    assert third.split is None


@STREAMED
@APIS
def test_thoughts_between_texts_keep_their_order_in_a_stream(name: str, stream: bool, tmp_path: Path):
    said = ["one <think>a</think> two <think>b</think>", "done"]

    async def play() -> tuple[Tape, Api, Thoughts]:
        async with served(tmp_path, Thinks(*said), sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            api = Api(name, client, stream=stream)
            found = await api.ask()
            echo = json.loads(json.dumps(api.said[1:]))
            api.said.append({"role": "user", "content": "on"})
            await api.ask()
            await there.end(tape)
            api.said = echo
            return there.tape(tape), api, found

    tape, api, found = asyncio.run(play())
    assert found == ("a\nb", "one\ntwo", [])
    assert [call.split for call in tape.calls] == [None, None]
    kinds = {
        "chat": lambda: [],
        "responses": lambda: [item["type"] == "reasoning" for item in api.said],
        "messages": lambda: [block["type"] == "thinking" for block in api.said[0]["content"]],
    }[name]()
    assert kinds == ([] if name == "chat" else [False, True, False, True] if stream else [True, False])


def test_a_thought_is_sent_while_it_is_sampled(tmp_path: Path):
    async def play() -> list[str]:
        engine = Thinks("<think>\na long thought\n</think>\n\nyes")
        engine.may = asyncio.Semaphore(14)
        async with served(tmp_path, engine, sampling=LONG) as there:
            _, client = await there.begin(task="t")
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
            headers = {"Authorization": f"Bearer {client.key}"}
            url, found = f"{client.root}/v1/chat/completions", [""]
            async with client.http.post(url, json=body, headers=headers) as answer:
                while not found[0].endswith("a long"):
                    line = await answer.content.readline()
                    event = json.loads(line[6:]) if line.startswith(b"data: {") else {"choices": []}
                    for choice in event["choices"]:
                        found[0] += choice["delta"].get("reasoning", "")
                        assert not choice["delta"].get("content")
                found.append(str(engine.sampled))
                engine.let()
                found.append((await answer.read()).decode())
            return found

    thought, sampled, rest = asyncio.run(play())
    assert (thought, sampled) == ("a long", "14")
    assert '"content":"' in rest


def test_thoughts_that_a_client_sends_are_read():
    def chat(**fields: Any) -> Any:
        (message,) = chat_protocol.read({"messages": [{"role": "assistant", "content": "x", **fields}]}).messages
        return message.get(THOUGHT)

    assert (chat(reasoning_content="a"), chat(reasoning="a"), chat(reasoning=None), chat()) == ("a", "a", None, None)

    def items(*sent: Any) -> list[Any]:
        return [
            (message.get(THOUGHT), message["content"], len(message.get("tool_calls", ())))
            for message in responses_protocol.read({"input": list(sent)}).messages
        ]

    def thought(text: str, id: str | None = None) -> Any:
        return {"type": "reasoning", "id": id, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    def said(text: str, id: str | None = None) -> Any:
        return {"type": "message", "id": id, "role": "assistant", "content": text}

    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}], "encrypted_content": "x"}
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    user = {"role": "user", "content": "u"}
    assert items(thought("a"), said("x"), call) == [("a", "x", 1)]
    assert items(summary, call, call) == [("a", "", 2)]
    assert items(hidden, said("x")) == [(None, "x", 0)]
    assert items(thought("a"), user) == [("a", "", 0), (None, "u", 0)]
    assert items(said("x"), thought("a"), said("y")) == [(None, "x", 0), ("a", "y", 0)]
    one, two = (f"{k}" * 24 for k in (1, 2))
    mixed = [said("x", f"msg_{one}"), thought("a", f"rs_{one}"), said("y", f"msg_{one}2"), thought("b", f"rs_{one}3")]
    assert items(*mixed) == [("ab", "xy", 0)]
    assert items(said("x", f"msg_{one}"), thought("a", f"rs_{two}"), said("y", f"msg_{two}")) == [
        (None, "x", 0),
        ("a", "y", 0),
    ]


@pytest.mark.parametrize("cut", [False, True])
def test_a_stream_of_parts_holds_what_the_whole_answer_holds(cut: bool):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    for text, calls in (("one", ()), ("", (call, call)), ("one", (call,)), ("", ())):
        finish = "length" if cut else "tool_calls" if calls else "stop"
        answer = Answered("0" * 24, text, finish, tool_calls=() if cut else calls, reasoning="so it is", created=7)
        asked = responses_protocol.read({"input": "hi"})
        other = messages_protocol.read({"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]})
        for n in (0, 3, 8):
            stream = responses_protocol.stream(asked)
            sent = stream.begin(answer.id, 7) + (stream.thought(answer.reasoning[:n]) if n else b"")
            events = test_responses.parsed(sent + stream.end(answer))
            assert events[-1]["response"] == json.loads(json.dumps(responses_protocol.body(asked, answer)))
            done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            assert done == events[-1]["response"]["output"]
            blocks = messages_protocol.stream(other)
            sent = blocks.begin(answer.id, 7) + (blocks.thought(answer.reasoning[:n]) if n else b"")
            joined = test_messages.joined(test_messages.parsed(sent + blocks.end(answer)))
            assert joined == json.loads(json.dumps(messages_protocol.body(other, answer)))
