"""Anthropic's Messages API through the gateway: what is read, and what is answered. The official client reads
the answers in `tests/contract/test_clients.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapereel.agents.gateway import Answered, Refused, messages_protocol
from tapereel.agents.gateway.dialect import THOUGHT
from tapereel.finetune import rows
from tapereel.tapes import Sampling, Tape

from .lab import Client, Told, books_close, served, until
from .test_live import Spelled

TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
USER = {"role": "user", "content": "hi"}
LONG = Sampling(max_tokens=400)
CALL = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def read(**fields: Any) -> Any:
    return messages_protocol.read({"model": "m", "max_tokens": 9, "messages": [USER], **fields})


def parsed(events: bytes) -> list[Any]:
    found = []
    for block in events.decode().split("\n\n")[:-1]:
        kind, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def joined(events: list[Any]) -> Any:
    """The message that a client makes of a stream's events."""
    message = events[0]["message"]
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    block["input"] = json.loads(delta["partial_json"])
                else:
                    field = delta["type"].removesuffix("_delta")
                    block[field] += delta[field]
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def test_blocks_become_messages():
    def text(said: str) -> Any:
        return [{"type": "text", "text": said}]

    use: Any = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": "é"}, "cache_control": None}
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "i add."},
                use,
                use | {"id": "d", "input": {"INVALID_JSON": "oh}"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "1"},
                {
                    "type": "tool_result",
                    "tool_use_id": "d",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "is_error": True}]},
    ]

    def call(id: str, arguments: str) -> Any:
        return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}

    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    assert read(messages=sent, system=system).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "i add.",
            "tool_calls": [call("c", '{"a": "é"}'), call("d", "oh}")],
            THOUGHT: "hm",
        },
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "tool", "content": "Error: no", "tool_call_id": "d"},
        {"role": "user", "content": "go on"},
        {"role": "tool", "content": "Error", "tool_call_id": "c"},
    ]
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    ((part,),) = (message["content"] for message in read(messages=[{"role": "user", "content": [shown]}]).messages)
    assert part["image_url"]["url"] == f"data:image/png;base64,{PNG}"


def test_fields_are_honoured_or_mean_nothing():
    found = read(
        tools=[TOOL | {"description": "adds", "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        stop_sequences=["x"],
        temperature=0.5,
        top_p=0.9,
        stream=True,
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        service_tier="auto",
    )
    assert (found.temperature, found.top_p, found.max_tokens, found.stop, found.stream) == (0.5, 0.9, 9, ["x"], True)
    assert not found.parallel_tool_calls
    function = {"name": "add", "description": "adds", "parameters": TOOL["input_schema"]}
    assert found.tools == [{"type": "function", "function": function}]
    assert read(tools=[TOOL], tool_choice={"type": "none"}).tools == []


def test_a_tool_that_anthropic_would_run_is_left_out():
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]
    found = read(tools=[hosted[0], TOOL, hosted[1]])
    assert found.tools == read(tools=[TOOL]).tools
    assert found.left_out == ("web_search_20250305", "mcp_toolset")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]}, "messages"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"top_k": 0}, "top_k"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": True}, "temperature"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(Refused) as refused:
        read(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    body: Any = messages_protocol.refusal(refused.value)
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert param in body["error"]["message"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["type", "role", "content", "source", "data", "media_type", "id", "text", "input", "x"]
                ),
                inner | st.sampled_from(["user", "assistant", "text", "image", "base64", "tool_use", "tool_result"]),
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_no_messages_do_anything_but_be_read_or_refused(value: Any):
    for fields in ({"messages": value}, {"messages": [value]}, {"system": value}, {"tools": value}):
        with contextlib.suppress(Refused):
            read(**fields)


def test_a_stream_holds_what_the_whole_answer_holds():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    broken = {"id": "d", "type": "function", "function": {"name": "add", "arguments": "oh}"}}
    for text, finish, stopped, calls in [
        ("one two", "stop", None, ()),
        ("one two", "stop", "x", ()),
        ("one", "length", None, ()),
        ("", "stop", None, ()),
        ("", "tool_calls", None, (call, broken)),
        ("i add", "tool_calls", None, (call,)),
    ]:
        answer = Answered("0" * 24, text, finish, stopped, calls, prompt_tokens=3, completion_tokens=2)
        body = json.loads(json.dumps(messages_protocol.body(read(), answer)))
        for n in {0, len(text) // 2, len(text)}:
            stream = messages_protocol.stream(read())
            sent = stream.text(text[:n]) if n else b""
            events = parsed(stream.begin(answer.id, 7) + stream.quiet + sent + stream.end(answer))
            kinds = [event["type"] for event in events]
            assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(body["content"])
            assert kinds[-1] == "message_stop"
            assert joined(events) == body
    (failed,) = parsed(messages_protocol.stream(read()).failed(Refused(502, "the model failed")))
    assert failed == {"type": "error", "error": {"type": "api_error", "message": "the model failed"}}


async def post(client: Client, *messages: Any, **more: Any) -> tuple[int, Any]:
    status, body = await client("POST", "/v1/messages", {"model": "m", "max_tokens": 400, "messages": messages, **more})
    return status, joined(parsed(body.encode())) if isinstance(body, str) else body


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools_is_one_row(stream: bool, tmp_path: Path):
    said = ["i add. " + CALL % 1 + CALL % 2, '<tool_call>{"name": "add", "arguments": oh}</tool_call>', "done"]
    engine = Spelled(*said)
    engine.let(10_000)

    async def scene() -> tuple[Tape, list[Any]]:
        async with served(tmp_path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            messages: list[Any] = [{"role": "user", "content": "go"}]
            answers = []
            while True:
                more = {"tools": [TOOL], "system": "add", "stream": stream}
                status, answer = await post(client, *messages, **more)
                assert status == 200, answer
                answers.append(answer)
                messages.append({"role": "assistant", "content": answer["content"]})
                uses = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
                if not uses:
                    break
                results = [{"type": "tool_result", "tool_use_id": id, "content": "3"} for id in uses]
                messages.append({"role": "user", "content": results})
            await there.end(tape)
            return there.tape(tape), answers

    tape, answers = asyncio.run(scene())
    assert [answer["stop_reason"] for answer in answers] == ["tool_use", "tool_use", "end_turn"]
    assert [block["type"] for block in answers[0]["content"]] == ["text", "tool_use", "tool_use"]
    assert answers[1]["content"][0]["input"] == {"INVALID_JSON": ', "arguments": oh}'}
    assert [answer["usage"]["output_tokens"] for answer in answers] == [len(c.completion or ()) for c in tape.calls]
    assert [call.split for call in tape.calls] == [None] * 3
    (row,) = rows(tape)
    assert len(row.own) == books_close(tmp_path).sampled


def test_stop_reasons_and_the_count_of_a_prompt(tmp_path: Path):
    async def scene() -> Tape:
        async with served(tmp_path, Told(lambda messages: "yes. no. maybe"), sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            _, stopped = await post(client, USER, stop_sequences=["zz", ". "])
            assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ". ")
            assert stopped["content"] == [{"type": "text", "text": "yes"}]
            asked = {"model": "m", "messages": [USER], "tools": [TOOL], "system": "s"}
            status, counted = await client("POST", "/v1/messages/count_tokens", asked)
            assert await client("POST", "/messages/count_tokens", asked) == (status, counted)
            _, answer = await client("POST", "/v1/messages", asked | {"max_tokens": 400})
            assert (status, counted) == (200, {"input_tokens": answer["usage"]["input_tokens"]})
            assert (await client("POST", "/v1/messages/count_tokens", {"messages": 3}))[0] == 400
            await there.end(tape)
            return there.tape(tape)

    assert len([call for call in asyncio.run(scene()).calls if call.engine != "authored"]) == 2
    books_close(tmp_path)


def test_errors_have_the_shape_of_the_api_and_nothing_is_lost(tmp_path: Path):
    async def scene() -> None:
        async with served(tmp_path, Told(), sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            deep = b'{"messages": ' + b"[" * 400_000 + b"]" * 400_000 + b"}"
            hostile = {
                deep: (400, "invalid_request_error"),
                b"[" * 600_000: (413, "request_too_large"),
                b"[]": (400, "invalid_request_error"),
                b'{"x": 1}': (400, "invalid_request_error"),
            }
            for body, (status, kind) in hostile.items():
                got, error = await client("POST", "/v1/messages", body)
                assert (got, error["type"], error["error"]["type"]) == (status, "error", kind)
            got, error = await client.with_key("sk-x")("POST", "/v1/messages", {})
            assert (got, error["error"]["type"]) == (401, "authentication_error")
            assert (await post(client, USER))[1]["content"] == [{"type": "text", "text": "yes"}]
            assert (await there.end(tape))["calls"] == 1

    asyncio.run(scene())
    books_close(tmp_path)


def test_a_client_that_drops_its_stream_leaves_what_was_sampled(tmp_path: Path):
    async def scene() -> Tape:
        engine = Spelled("a long answer")
        async with served(tmp_path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            engine.let(6)
            body = {"model": "m", "max_tokens": 99, "messages": [USER], "stream": True}
            async with client.http.post(
                f"{client.root}/v1/messages", json=body, headers={"x-api-key": client.key}
            ) as answer:
                while b'"text":"g"' not in await answer.content.readline():
                    pass
                answer.close()
            await until(lambda: there.tape(tape).calls)
            await there.end(tape)
            return there.tape(tape)

    (call,) = [call for call in asyncio.run(scene()).calls if call.engine != "authored"]
    assert (call.finish, call.text) == ("cancelled", "a long")


def test_one_conversation_has_the_same_prompts_in_every_dialect(tmp_path: Path):
    """And an answer that one dialect sent is recognised in another."""
    said = ["i add. " + CALL % 1 + CALL % 2, "done"]
    schema: Any = {"type": "object", "properties": {}}
    function = {"name": "add", "parameters": schema}

    async def chat(client: Client) -> list[Any]:
        more = {"tools": [{"type": "function", "function": function}]}
        system, user = {"role": "system", "content": "add"}, {"role": "user", "content": "go"}
        message = (await client.ask(system, user, **more))[1]["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in message["tool_calls"]]
        return [system, user, message, *results]

    async def through_chat(client: Client) -> None:
        conversation = await chat(client)
        await client.ask(*conversation, tools=[{"type": "function", "function": function}])

    async def through_responses(client: Client) -> None:
        body: Any = {"model": "m", "instructions": "add", "tools": [{"type": "function", **function}]}
        items: list[Any] = [{"role": "user", "content": "go"}]
        items += (await client("POST", "/v1/responses", body | {"input": items}))[1]["output"]
        calls = [item["call_id"] for item in items if item.get("type") == "function_call"]
        items += [{"type": "function_call_output", "call_id": id, "output": "3"} for id in calls]
        await client("POST", "/v1/responses", body | {"input": items})

    async def through_messages(client: Client) -> None:
        more = {"system": "add", "tools": [TOOL | {"name": "add"}]}
        _, answer = await post(client, {"role": "user", "content": "go"}, **more)
        uses = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": id, "content": "3"} for id in uses]
        content = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
        await post(client, {"role": "user", "content": "go"}, *content, **more)

    async def through_two(client: Client) -> None:
        _, user, message, *results = await chat(client)
        uses = [
            {"type": "tool_use", "id": c["id"], "name": "add", "input": json.loads(c["function"]["arguments"])}
            for c in message["tool_calls"]
        ]
        made = [{"type": "tool_result", "tool_use_id": r["tool_call_id"], "content": "3"} for r in results]
        echo = [{"type": "text", "text": message["content"]}, *uses]
        content = [user, {"role": "assistant", "content": echo}, {"role": "user", "content": made}]
        await post(client, *content, system="add", tools=[TOOL])

    async def scene(path: Path, way: Any) -> Tape:
        left = list(said)
        async with served(path, Told(lambda messages: left.pop(0)), sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            await way(client)
            await there.end(tape)
            return there.tape(tape)

    ways = [through_chat, through_responses, through_messages, through_two]
    tapes = [asyncio.run(scene(tmp_path / way.__name__, way)) for way in ways]
    prompts = [[list(call.prompt) for call in tape.calls if call.engine != "authored"] for tape in tapes]
    assert len(prompts[0]) == 2
    assert prompts == prompts[:1] * 4
    assert [len(rows(tape)) for tape in tapes] == [1] * 4
