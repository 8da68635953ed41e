"""Events of a stream, and the answer they add up to, whatever pieces they come in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapereel.agents import Request
from tapereel.agents.engines.servers import Chat
from tapereel.agents.engines.transport import BadAnswer
from tapereel.agents.engines.transport.sse import LONGEST, ChunkStream, Events
from tapereel.tapes import Sampling

from ....finetune.loop.lab import RENDERER


def chunk(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, **choice}]}


def logprob(value: float) -> dict[str, Any]:
    return {"content": [{"token": "a", "logprob": value, "top_logprobs": []}]}


CHUNKS = [
    {**chunk(), "prompt_token_ids": [4, 5]},
    chunk(token_ids=[8], logprobs=logprob(-0.5)),
    chunk(token_ids=[9], logprobs=logprob(-1.0)),
    chunk(
        token_ids=[2],
        logprobs=logprob(-0.25),
        finish_reason="stop",
        weight_versions=[{"version": "r:1", "start": 0, "end": 3}],
    ),
    {"choices": [], "usage": {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}},
]


def stream_of(chunks: list[Any], end: str = "\n\n") -> bytes:
    events = [json.dumps(one, ensure_ascii=False) for one in chunks] + ["[DONE]"]
    return "".join(f": ping{end[: len(end) // 2]}data: {event}{end}" for event in events).encode()


@given(st.sampled_from(["\n\n", "\r\n\r\n", "\r\r"]), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_events_are_the_same_in_whatever_pieces_they_come(end: str, sizes: list[int]) -> None:
    data, at, k = stream_of([*CHUNKS, {"text": "ü\u2028𝄞"}], end), 0, 0
    events, found = Events(), []
    while at < len(data):
        found += events.feed(data[at : at + sizes[k % len(sizes)]])
        at, k = at + sizes[k % len(sizes)], k + 1
    found += events.feed(b"\n")  # a CR at the very end may be half of a line's end
    assert [json.loads(event) for event in found[:-1]] == [*CHUNKS, {"text": "ü\u2028𝄞"}]
    assert found[-1] == "[DONE]"


def test_lines_of_one_event_are_joined_and_other_fields_passed_over() -> None:
    assert Events().feed(b"event: x\nid: 7\ndata: a\ndata:b\nretry: 1\n\n\n\ndata: c\n\n") == ["a\nb", "c"]


@pytest.mark.parametrize("data", [b"data: \xff\xfe\n\n", b"data: " + b"a" * (LONGEST + 1)])
def test_a_stream_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(BadAnswer):
        Events().feed(data)


def folded(chunks: list[Any], *, done: bool = True) -> ChunkStream:
    stream = ChunkStream()
    for one in chunks:
        stream.feed(json.dumps(one))
    if done:
        stream.feed("[DONE]")
    return stream


def test_the_chunks_add_up_to_the_answer() -> None:
    found = Chat().parse(folded(CHUNKS).answer())
    assert (list(found.ids), list(found.logprobs), found.finish) == ([8, 9, 2], [-0.5, -1.0, -0.25], "stop")
    assert found.spans == (("r:1", 0, 3),)
    assert found.prompt is not None
    assert list(found.prompt) == [4, 5]
    assert (found.usage.prompt_tokens, found.usage.cached_tokens) == (2, 1)


def test_what_came_before_a_cut_is_an_aborted_answer() -> None:
    found = Chat().parse(folded(CHUNKS[:3], done=False).answer(cut=True))
    assert (list(found.ids), found.finish, found.spans) == ([8, 9], "abort", None)
    with pytest.raises(BadAnswer, match="`tapereel serve model`"):
        Chat().parse(folded(CHUNKS[:1], done=False).answer(cut=True))


@pytest.mark.parametrize(
    ("chunks", "match"),
    [
        (CHUNKS[:3], "before"),
        ([*CHUNKS[:2], {"error": {"message": "out of memory", "code": 500}}], "memory"),
        ([{"choices": [{"index": 1}]}], "'index': 1"),
        (["text"], 'broke.*"text"'),
    ],
)
def test_a_stream_that_breaks_off_is_no_answer(chunks: list[Any], match: str) -> None:
    with pytest.raises(BadAnswer, match=match):
        folded(chunks).answer()


def test_nothing_may_follow_the_end() -> None:
    stream = folded(CHUNKS)
    with pytest.raises(BadAnswer, match="after"):
        stream.feed(json.dumps(CHUNKS[1]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt_token_ids": None}, "prompt.*missing"),
        ({"choices": [{"token_ids": None, "logprobs": None, "finish_reason": "stop"}]}, "`tapereel serve model`"),
        ({"choices": [{"token_ids": [8], "logprobs": {"content": []}, "finish_reason": "stop"}]}, " 1 .* 0 "),
    ],
)
def test_fields_that_a_server_ignored_are_missed(change: dict[str, Any], match: str) -> None:
    with pytest.raises(BadAnswer, match=match):
        Chat().parse({**folded(CHUNKS).answer(), **change})


def test_tools_are_offered_and_arguments_are_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "ü"}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = ({"type": "function", "function": {"name": "f"}},)
    request = Request(
        messages=messages, prompt=RENDERER.prompt(messages[:1]).ids, seed=1, sampling=Sampling(), tools=tools
    )
    body = Chat({"enable_thinking": False}).body(request, model="m", request_id="x", stops=(2,))
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"x": "ü"}'
    assert (body["tools"], body["tool_choice"]) == (list(tools), "none")
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert (body["return_token_ids"], body["logprobs"], body["stream"]) == (True, True, True)
    assert "content" in messages[1]
    assert isinstance(call["function"]["arguments"], dict), "the caller's messages stay as they are"
