"""OpenAI's Responses API through the gateway: what is read, what is answered, and what the official client reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tapereel.agents.gateway import Answered, Refused
from tapereel.agents.gateway import responses_protocol as responses
from tapereel.agents.gateway.dialect import ANSWER
from tapereel.finetune import rows
from tapereel.tapes import Sampling, Tape

from .lab import Client, Told, books_close, served, until
from .test_live import Spelled

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
USER = [{"role": "user", "content": "hi"}]
LONG = Sampling(max_tokens=400)
CALL = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def read(**fields: Any) -> Any:
    return responses.read({"model": "m", "input": "hi", **fields})


def parsed(events: bytes) -> list[Any]:
    """The events of a stream, each of them as the official client's models read it."""
    found = []
    for block in events.decode().split("\n\n")[:-1]:
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        EVENTS.validate_python(event)
        found.append(event)
    return found


def test_items_become_messages():
    sent = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "i add.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "function_call", "call_id": "c3", "name": "add", "arguments": "{}"},
    ]

    def call(id: str) -> Any:
        return {"id": id, "type": "function", "function": {"name": "add", "arguments": "{}"}}

    found = read(input=sent, instructions="add")
    assert (found.instructions, found.previous) == (1, None)
    assert found.messages == [
        {"role": "system", "content": "add"},
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "i add.", "tool_calls": [call("c1"), call("c2")]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
        {"role": "assistant", "content": "", "tool_calls": [call("c3")]},
    ]


def test_calls_and_text_of_one_turn_are_one_message_in_either_order():
    """Haystack sends the thought, the calls and then the text."""
    thought = {"type": "reasoning", "id": None, "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    text = {"role": "assistant", "content": "i add."}
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "3"}
    one = read(input=[*USER, thought, text, call, output]).messages
    assert read(input=[*USER, thought, call, text, output]).messages == one
    assert [message["role"] for message in one] == ["user", "assistant", "tool"]
    split = read(input=[*USER, call, output, text]).messages
    assert [message["role"] for message in split] == ["user", "assistant", "tool", "assistant"]


def test_fields_are_honoured_or_mean_nothing():
    found = read(
        tools=[TOOL | {"strict": True, "description": None}],
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        stream=True,
        parallel_tool_calls=False,
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        reasoning={"effort": "low"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        store=False,
        metadata={"a": "b"},
        truncation="auto",
        tool_choice="auto",
        prompt_cache_key="k",
        user="u",
    )
    assert (found.temperature, found.top_p, found.max_tokens, found.stream) == (0.5, 0.9, 7, True)
    assert (found.parallel_tool_calls, found.logprobs) == (False, True)
    function = {"name": "add", "parameters": TOOL["parameters"], "strict": True}
    assert found.tools == [{"type": "function", "function": function}]
    assert read(tools=[TOOL], tool_choice="none").tools == []


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
CUSTOM = {"type": "custom", "name": "run", "description": "runs", "format": GRAMMAR}
SPACE = {"type": "namespace", "name": "space", "description": "tools", "tools": [TOOL, CUSTOM]}


def test_every_tool_that_the_client_runs_is_a_function_and_what_openai_runs_is_left_out():
    more = {"type": "additional_tools", "role": "developer", "tools": [SPACE]}
    found = read(tools=[{"type": "web_search", "external_web_access": False}, TOOL, CUSTOM], input=[more, *USER])
    add, run, space_add, space_run = (tool["function"] for tool in found.tools)
    names = [add["name"], run["name"], space_add["name"], space_run["name"]]
    assert names == ["add", "run", "space__add", "space__run"]
    assert add | {"name": ""} == space_add | {"name": ""}
    assert run | {"name": ""} == space_run | {"name": ""}
    assert run["parameters"]["required"] == ["input"]
    assert run["parameters"]["properties"]["input"] == {
        "type": "string",
        "description": "Text in this lark grammar:\nstart: /a+/",
    }
    assert (found.left_out, [message["role"] for message in found.messages]) == (("web_search",), ["user"])


@pytest.mark.parametrize(("tool", "namespace"), [(CUSTOM, None), (SPACE, "space")])
def test_a_call_of_a_custom_tool_comes_and_goes_as_text(tool: Any, namespace: str | None):
    name = "run" if namespace is None else f"{namespace}__run"
    asked = read(tools=[tool])
    wrong = ['{"cmd": "a"}', '{"input": 1}', '{"input": "a", "b": 1}', "oh}", "[" * 5000]
    for arguments, text in [('{"input": "a\\né"}', "a\né"), *((each, each) for each in wrong)]:
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
        answer = Answered("0" * 24, "", "tool_calls", tool_calls=(call,))
        body: Any = responses.body(asked, answer)
        Response.model_validate(body)
        (item,) = body["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "run", text)
        assert (item.get("namespace"), item["id"]) == (namespace, "ctc_" + "0" * 25)
        events = parsed(responses.stream(asked).end(answer))
        assert [e.get("delta", e.get("input")) for e in events if "custom_tool_call_input" in e["type"]] == [text, text]
        assert events[-1]["response"]["output"] == [item]
        output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
        back, result = read(tools=[tool], input=[item, output]).messages
        sent = {"input": text}
        assert back["tool_calls"][0]["function"]["name"] == name
        assert json.loads(back["tool_calls"][0]["function"]["arguments"]) == sent
        assert result == {"role": "tool", "content": "done", "tool_call_id": "c"}
        reference = [{"type": "item_reference", "id": item["id"]}]
        assert read(input=reference).messages == [{"role": "assistant", ANSWER: "0" * 24, "tool_calls": [0]}]


def test_a_call_next_to_a_reference_belongs_to_the_answer_unless_its_id_is_of_another():
    """Vercel's SDK refers to a thought and to the text, and sends the call."""
    name, other = "0" * 24, "1" * 24
    call = {"type": "function_call", "name": "add", "arguments": "{}"}
    references = [{"type": "item_reference", "id": f"{kind}_{name}"} for kind in ("rs", "msg")]
    for id in (f"call_{name}0", "an engine's own"):
        (message,) = read(input=[*references, {**call, "call_id": id}]).messages
        assert (message[ANSWER], [one["id"] for one in message["tool_calls"]]) == (name, [id])
    messages = read(input=[*references, {**call, "call_id": f"call_{other}0"}]).messages
    assert [ANSWER in message for message in messages] == [True, False]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "custom_tool_call"}]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}]}, "input"),
        ({"input": [3]}, "input"),
        ({"tools": [{"type": "computer"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "n", "format": {"type": "json"}}]}, "tools"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "computer"}]}]}, "input"),
        ({"tools": "all"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text"),
        ({"truncation": "some"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"include": ["everything"]}, "include"),
        ({"seed": 3}, "seed"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(Refused) as refused:
        read(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["input", "type", "role", "content", "tools", "id", "text", "output", "name", "x"]),
                inner
                | st.sampled_from(["message", "function_call", "item_reference", "input_text", "user"])
                | st.sampled_from(["custom_tool_call", "additional_tools", "custom", "namespace", "web_search"]),
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_no_input_does_anything_but_be_read_or_refused(value: Any):
    with contextlib.suppress(Refused):
        read(input=value)
    with contextlib.suppress(Refused):
        read(tools=value)


def test_a_stream_holds_what_the_whole_answer_holds():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    shapes: list[tuple[str, str, tuple[Any, ...]]] = [
        ("one two", "stop", ()),
        ("one", "length", ()),
        ("", "stop", ()),
        ("", "tool_calls", (call, call)),
        ("i add", "tool_calls", (call,)),
    ]
    for text, finish, calls in shapes:
        answer = Answered("0" * 24, text, finish, tool_calls=calls, prompt_tokens=3, completion_tokens=2, created=7)
        asked = read(tools=[TOOL], metadata={"a": "b"}, instructions="i")
        body: Any = json.loads(json.dumps(responses.body(asked, answer)))
        Response.model_validate(body)
        for n in {0, len(text) // 2, len(text)}:
            stream = responses.stream(asked)
            events = parsed(stream.begin(answer.id, 7) + (stream.text(text[:n]) if n else b"") + stream.end(answer))
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            kinds = [event["type"].removeprefix("response.") for event in events]
            assert kinds[:2] == ["created", "in_progress"]
            assert kinds[-1] == body["status"] == ("incomplete" if finish == "length" else "completed")
            assert events[-1]["response"] == body
            assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == body["output"]
            for kind in ("output_text", "function_call_arguments"):
                pieces = "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta")
                whole = [e.get("text", e.get("arguments")) for e in events if e["type"] == f"response.{kind}.done"]
                assert pieces == "".join(whole)
            for begun, ended in (
                ("output_item.added", "output_item.done"),
                ("content_part.added", "content_part.done"),
            ):
                assert kinds.count(begun) == kinds.count(ended)
    failed = parsed(responses.stream(read()).failed(Refused(502, "the model failed")))
    assert (failed[0]["type"], failed[0]["response"]["error"]["code"]) == ("response.failed", "server_error")


async def post(client: Client, **body: Any) -> tuple[int, Any]:
    return await client("POST", "/v1/responses", {"model": "m", **body})


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_asks_with_tools_and_its_conversation_is_one_row(stream: bool, tmp_path: Path):
    said = ["i add. " + CALL % 1 + CALL % 2, CALL % 3, "done"]
    engine = Spelled(*said)
    engine.let(10_000)

    async def ask(api: openai.AsyncOpenAI, **more: Any) -> Response:
        if not stream:
            return await api.responses.create(model="m", tools=[TOOL], **more)
        async with api.responses.stream(model="m", tools=[TOOL], **more) as events:
            async for _ in events:
                pass
            return await events.get_final_response()

    async def scene() -> Tape:
        async with served(tmp_path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            async with openai.AsyncOpenAI(base_url=there.gateway.url, api_key=client.key) as api:
                items: list[Any] = [{"role": "user", "content": "go"}]
                while True:
                    answer = await ask(api, input=items, instructions="add")
                    items += [item.to_dict() for item in answer.output]
                    calls = [item for item in answer.output if item.type == "function_call"]
                    if not calls:
                        break
                    items += [{"type": "function_call_output", "call_id": c.call_id, "output": "3"} for c in calls]
                assert answer.output_text == "done"
                assert answer.usage is not None
                assert answer.usage.output_tokens == len("done") + 1
            await there.end(tape)
            return there.tape(tape)

    tape = asyncio.run(scene())
    assert [call.split for call in tape.calls] == [None] * 3
    (row,) = rows(tape)
    assert len(row.own) == sum(len(call.completion or ()) for call in tape.calls) == books_close(tmp_path).sampled


def test_a_conversation_continues_by_its_id(tmp_path: Path):
    said = iter([CALL % 1, "two", "three", "four"])

    async def scene() -> tuple[Tape, list[Any]]:
        async with served(tmp_path, Told(lambda messages: next(said)), sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            _, one = await post(client, input="go", instructions="be brief", tools=[TOOL])
            result = {"type": "function_call_output", "call_id": one["output"][0]["call_id"], "output": "3"}
            more = {"instructions": "be brief", "tools": [TOOL]}
            _, two = await post(client, input=[result], previous_response_id=one["id"], **more)
            reference = {"type": "item_reference", "id": two["output"][0]["id"]}
            await post(client, input="more", previous_response_id=two["id"], instructions="be long")
            call = {"type": "item_reference", "id": one["output"][0]["id"]}
            items = [{"role": "user", "content": "go"}, call, result, reference, {"role": "user", "content": "on"}]
            await post(client, input=items, **more)
            another, other = await there.begin(task="u")
            refused = [
                await post(client, input="x", previous_response_id="resp_nothing"),
                await post(other, input="x", previous_response_id=one["id"]),  # an answer of another tape
                await post(client, input=[{"type": "item_reference", "id": "msg_nothing"}]),
                await post(other, input=[call]),
                await post(client, input=[{"type": "item_reference", "id": call["id"] + "1" * 4301}]),
            ]
            for open_ in (tape, another):
                await there.end(open_)
            return there.tape(tape), refused

    tape, refused = asyncio.run(scene())
    first, second, third, fourth = tape.calls
    assert (second.base, fourth.base, second.split, fourth.split) == (first.call, second.call, None, None)
    said_third = [message["content"] for message in third.messages if message["role"] != "assistant"]
    assert said_third == ["be long", "go", "3", "more"]
    assert [message["role"] for message in fourth.messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user")
    ]
    for (status, body), param in zip(refused, ["previous_response_id"] * 2 + ["input"] * 3, strict=True):
        assert (status, body["error"]["param"]) == (400, param)
        assert body["error"]["code"] == "previous_response_not_found"


def test_what_is_sent_next_to_a_reference_counts(tmp_path: Path):
    """A reference stands for its own item. A call that the client changed or dropped isn't in the next prompt."""

    def refer(item: Any) -> dict[str, Any]:
        return {"type": "item_reference", "id": item["id"]}

    async def scene() -> tuple[Tape, Any]:
        said = iter([f"i add. {CALL % 1} {CALL % 2}", *["done"] * 9])
        async with served(tmp_path, Told(lambda messages: next(said)), sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            _, answer = await post(client, input="go", tools=[TOOL])
            text, one, two = answer["output"]
            changed, written = {**two, "arguments": '{"a": 5}'}, {**text, "content": "i don't."}
            for items in (
                [refer(text), refer(one), refer(two)],
                [refer(text), one, {**two, "arguments": '{"a":2}'}],
                [refer(text), one, changed],
                [refer(text), refer(one), changed],
                [refer(text), one],
                [refer(text)],
                [refer(one), written, two],
            ):
                results = [
                    {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
                    for item in (one, two)
                    if item["id"] in [sent["id"] for sent in items]
                ]
                go, on = ({"role": "user", "content": text} for text in ("go", "on"))
                await post(client, input=[go, *items, *results, on], tools=[TOOL])
            refused = await post(client, input=[{"type": "item_reference", "id": f"{one['id']}9"}])
            await there.end(tape)
            return there.tape(tape), refused

    tape, refused = asyncio.run(scene())
    assert refused[0] == 400
    assert refused[1]["error"]["code"] == "previous_response_not_found"
    first, *following = [call for call in tape.calls if call.messages[0]["content"] == "go"]
    sent = [call.messages[1] for call in following]
    sampled = [*first.prompt, *(first.completion or ())]
    held = [list(call.prompt[: len(sampled)]) == sampled for call in following]
    assert held == [True, True, *[False] * 5]
    assert sent[:2] == [first.reply] * 2
    assert [
        (message["content"], [call["function"]["arguments"] for call in message.get("tool_calls", ())])
        for message in sent[2:]
    ] == [
        ("i add.", ['{"a": 1}', '{"a": 5}']),
        ("i add.", ['{"a": 1}', '{"a": 5}']),
        ("i add.", ['{"a": 1}']),
        ("i add.", []),
        ("i don't.", ['{"a": 1}', '{"a": 2}']),
    ]


def test_errors_have_the_shape_of_the_api_and_nothing_is_lost(tmp_path: Path):
    async def scene() -> None:
        async with served(tmp_path, Told(), sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            deep = b'{"input": ' + b"[" * 400_000 + b"]" * 400_000 + b"}"
            for body, status in (
                (deep, 400),
                (b"[" * 600_000, 413),
                (b"[", 400),
                ({"input": 3}, 400),
                ({"input": "x", "y": 1}, 400),
            ):
                got, error = await client("POST", "/v1/responses", body)
                assert (got, set(error["error"])) == (status, {"message", "type", "param", "code"})
            assert (await client.with_key("sk-x")("POST", "/v1/responses", {}))[0] == 401
            assert (await post(client, input="hi"))[1]["output"][0]["content"][0]["text"] == "yes"
            assert (await there.end(tape))["calls"] == 1

    asyncio.run(scene())
    books_close(tmp_path)


def test_a_client_that_drops_its_stream_leaves_what_was_sampled(tmp_path: Path):
    async def scene() -> Tape:
        engine = Spelled("a long answer")
        async with served(tmp_path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            engine.let(6)
            async with openai.AsyncOpenAI(base_url=there.gateway.url, api_key=client.key) as api:
                stream = await api.responses.create(model="m", input="hi", stream=True)
                text = ""
                async for event in stream:
                    text += event.delta if event.type == "response.output_text.delta" else ""
                    if text == "a long":
                        break
                await stream.close()
            await until(lambda: there.tape(tape).calls)
            await there.end(tape)
            return there.tape(tape)

    (call,) = [call for call in asyncio.run(scene()).calls if call.engine != "authored"]
    assert (call.finish, call.text) == ("cancelled", "a long")
