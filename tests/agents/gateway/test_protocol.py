"""What a request may say, and how an answer is written: no server, no engine."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapereel.agents.gateway import Answered, Refused, chat_protocol, messages_protocol, responses_protocol
from tapereel.agents.gateway.chat_protocol import token_logprobs
from tapereel.tapes.common.plain_json import read_plain

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def read(**fields: Any) -> Any:
    return chat_protocol.read({"model": "m", "messages": [USER], **fields})


def an_object(body: bytes) -> Any:
    """The body as the server reads it before the route. ValueError for another body."""
    value = read_plain(body)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def test_what_clients_send_is_read():
    found = read(
        temperature=0.5,
        top_p=0.9,
        max_tokens=7,
        max_completion_tokens=5,
        seed=3,
        stop="\n",
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        return_token_ids=True,
        tools=[TOOL],
        n=1,
        user="u",
        metadata={},
        presence_penalty=0,
        tool_choice="auto",
        parallel_tool_calls=True,
    )
    assert (found.temperature, found.top_p, found.max_tokens, found.seed, found.stop) == (0.5, 0.9, 5, 3, ["\n"])
    assert (found.stream, found.wire["include_usage"], found.logprobs, found.token_ids) == (
        True,
        True,
        True,
        True,
    )
    assert found.tools == [TOOL]
    assert read(tools=[TOOL], tool_choice="none").tools == []
    assert read(stream_options={}, stream=True).wire["include_usage"] is False
    assert read(stop=None, seed=None, temperature=None).temperature is None


def test_settings_that_rl_cannot_use_are_read_if_they_change_anything():
    found = read(top_k=5, frequency_penalty=0.3, presence_penalty=0.0, min_p=0.1, repetition_penalty=1)
    assert (found.top_k, found.penalties) == (5, {"frequency_penalty": 0.3, "min_p": 0.1})
    found = messages_protocol.read({"max_tokens": 9, "messages": [USER], "top_k": 5})
    assert (found.top_k, found.penalties) == (5, {})


def test_a_call_in_the_old_form_stays_in_the_conversation():
    call = {"name": "add", "arguments": "{}"}
    sent = [{"role": "assistant", "content": None, "function_call": call}, {"role": "function", "name": "add"}]
    made = {"id": "add", "type": "function", "function": call}
    assert read(messages=[USER, *sent, USER]).messages[1:3] == [
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "", "tool_call_id": "add"},
    ]


FUNCTION = {"name": "add", "description": None, "parameters": {"type": "object", "default": None}, "strict": None}
CHAT: Any = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"id": None, "type": None, "function": FUNCTION}]},
        {"role": "tool", "content": None, "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": FUNCTION, "cache_control": {"type": "ephemeral"}}],
    "stream_options": {"include_usage": None},
    "response_format": {"type": "text", "json_schema": None},
    **{"functions": [], "reasoning_effort": "low", "verbosity": "low", "top_k": -1, "min_p": 0, "stop": None},
}
RESPONSES: Any = {
    "input": [
        {"role": "user", "type": None, "id": None, "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": None, "content": None, "summary": None, "encrypted_content": None},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "namespace": None, "status": None},
        {"type": "function_call_output", "call_id": "c", "output": "3", "id": None},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "text": {"format": None, "verbosity": None},
    **{"context_management": [], "include": None, "metadata": None, "store": None, "stream": None},
}
MESSAGES: Any = {
    "max_tokens": 9,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": None}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": None, "is_error": None}]},
    ],
    "tools": [{"type": None, "name": "add", "description": None, "input_schema": FUNCTION["parameters"]}],
    "tool_choice": {"type": "auto", "name": None, "disable_parallel_tool_use": None},
    **{"mcp_servers": [], "betas": ["x"], "stop_sequences": None},
}


@pytest.mark.parametrize(
    ("dialect", "body"), [(chat_protocol, CHAT), (responses_protocol, RESPONSES), (messages_protocol, MESSAGES)]
)
def test_a_field_that_is_null_or_an_empty_list_counts_as_left_out(dialect: Any, body: Any):
    found = dialect.read(body)
    (tool,) = found.tools
    assert tool == {"type": "function", "function": {"name": "add", "parameters": FUNCTION["parameters"]}}
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool"]
    (call,) = found.messages[1]["tool_calls"]
    if dialect is messages_protocol:
        assert call["function"]["arguments"] == '{"a": null}', "the model's own null is kept"


def test_messages_become_plain():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}, "index": 0}
    sent = [
        {"role": "system", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    assert read(messages=sent).messages == [
        {"role": "system", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"reasoning": "lots"}, "reasoning"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 2}, "top_p"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages"),
        ({"tools": [{}]}, "tools"),
        ({"tools": "all"}, "tools"),
        ({"model": 3}, "model"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(Refused) as refused:
        read(**fields)
    assert refused.value.status == 400
    assert refused.value.param == param
    body: Any = chat_protocol.refusal(refused.value)
    assert (body["error"]["param"], set(body["error"])) == (param, {"message", "type", "param", "code"})


@given(
    st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["model", "messages", "role", "content", "tools", "stop", "tool_calls", "function", "x"]
                    ),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_no_body_does_anything_but_be_read_or_refused(body: bytes):
    with contextlib.suppress(ValueError):
        chat_protocol.read(an_object(body))


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b"",
        b"[]",
    ],
)
def test_what_no_tape_could_hold_is_refused(body: bytes):
    with pytest.raises(ValueError):  # noqa: PT011 - the parser's, or Refused
        chat_protocol.read(an_object(body))


def test_a_pair_of_surrogates_is_a_character():
    body = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert chat_protocol.read(an_object(body)).messages[0]["content"] == "\U0001f600"


def test_a_body_nested_without_end_is_refused():
    for body in (b"[" * 100_000, json.dumps({"messages": [USER], "tools": [nested(400)]}).encode()):
        with pytest.raises(ValueError, match=r"\b64\b"):
            chat_protocol.read(an_object(body))


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"properties": value}
    return {"type": "function", "function": {"name": "add", "parameters": value}}


def streamed(asked: Any, answer: Answered, sent: str) -> list[Any]:
    """The chunks after `sent`."""
    stream = chat_protocol.stream(asked)
    stream.begin(answer.id, answer.created)
    if sent:
        stream.text(sent)
    *events, done, rest = stream.end(answer).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def test_a_stream_holds_what_the_whole_answer_holds():
    text = " two  words\nand a line \n"
    answer = Answered("id", text, "stop", prompt_tokens=3, completion_tokens=2, prompt_ids=[1], ids=[2])
    asked, silent = read(stream_options={"include_usage": True}), read()
    body: Any = chat_protocol.body(asked, answer)
    for n in range(len(text) + 1):
        rest = streamed(asked, answer, text[:n])
        assert text[:n] + "".join(c["choices"][0]["delta"].get("content", "") for c in rest[:-1]) == text
    chunks = streamed(asked, answer, "")
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-2]["choices"][0]["token_ids"] == body["choices"][0]["token_ids"] == [2]
    assert chunks[-1]["usage"] == body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert chunks[-2]["prompt_token_ids"] == body["prompt_token_ids"] == [1]
    assert len(streamed(silent, answer, "")) == len(chunks) - 1


def test_an_unknown_log_prob_is_null():
    known, unknown = token_logprobs(["a", "é"], [-1.0, float("nan")])
    assert (known["logprob"], unknown["logprob"], unknown["bytes"]) == (-1.0, None, [195, 169])
