"""The families' templates in conversations with tools, thinking and parallel calls, and the table of results."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapereel.agents.rendering import Renderer

from ..families import tokenizer
from .templates_table import NAMES, PAGE, SCENARIOS, TOOL, calls, page, play, results, sampled, say, table

PARALLEL = ["qwen25", "qwen3", "mistral", "deepseek"]
"""Families whose template shows several calls of one answer."""


@pytest.mark.ledger("T31")
def test_the_table_in_the_docs_is_what_the_templates_do() -> None:
    text = PAGE.read_text("utf-8")
    assert page(text, table()) == text, "run python -m tests.agents.rendering.templates_table"


@pytest.mark.ledger("T31")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "mistral"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_was_sampled_stays_in_one_row(name: str, scenario: Any) -> None:
    played = play(name, scenario, "sampled")
    assert played.refused or (played.rows, played.forwarded) == (1, played.ids)


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_calls_and_their_results_are_what_the_template_says(name: str) -> None:
    renderer, words = Renderer(tokenizer(name), history="template"), tokenizer(name)
    messages = [say("user", "Which is ripe?")]
    reply = say("assistant", "", tool_calls=calls("pear", "plum"))
    rendered = renderer.prompt(messages, [TOOL])
    completion = renderer.completion(rendered, reply)
    text = renderer.decode(completion)
    assert [text.count(f'"{key}"') for key in ("pear", "plum")] == [1, 1]
    assert [id for id in completion if id in renderer.end_ids] == [completion[-1]]
    messages += [reply, *results("pear", "plum")]
    track = renderer.track(rendered, call="c", reply=reply, completion=completion)
    later = renderer.prompt(messages, [TOOL], [track])
    whole = words.apply_chat_template(
        messages, tools=[TOOL], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(later.ids) == whole
    assert (later.split is None) == (name != "qwen3"), "which shows a last answer with an empty thought"
    said = words.decode(later.ids)
    assert said.count("pear is ripe") == said.count("plum is ripe") == 1


def test_gpt_oss_keeps_its_analysis_and_closes_earlier_answers_in_its_own_way() -> None:
    renderer, words = Renderer(tokenizer("harmony")), tokenizer("harmony")
    first = renderer.prompt([say("user", "q")])
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so"
    completion = words.encode(f"{text}<|return|>", add_special_tokens=False)
    track = renderer.track(first, call="c", reply=say("assistant", renderer.decode(completion)), completion=completion)
    assert renderer.decode(completion) == text
    later = renderer.prompt([*track.messages, say("user", "r")], None, [track])
    assert later.split is None
    assert words.decode(later.new) == "<|start|>user<|message|>r<|end|><|start|>assistant"
    cut = renderer.track(first, call="c", reply=say("assistant", text), completion=completion[:-1])
    later = renderer.prompt([*cut.messages, say("user", "r")], None, [cut])
    assert words.decode(later.new) == "<|end|><|start|>user<|message|>r<|end|><|start|>assistant"


def test_gpt_oss_ends_a_call_in_its_own_way() -> None:
    renderer, words = Renderer(tokenizer("harmony")), tokenizer("harmony")
    first, reply = renderer.prompt([say("user", "q")], [TOOL]), say("assistant", "", tool_calls=calls("pear"))
    authored = renderer.completion(first, reply)
    assert words.decode(authored) == (
        ' to=functions.lookup<|channel|>commentary json<|message|>{"key": "pear"}<|call|>'
    )
    completion = sampled("harmony", renderer, first, reply)
    assert list(completion) != list(authored), "the engine spaced it otherwise"
    track = renderer.track(first, call="c", reply=reply, completion=completion)
    later = renderer.prompt([*track.messages, *results("pear")], [TOOL], [track])
    assert (later.split, later.keep) == (None, len(track.ids))
    assert words.decode(later.new) == (
        '<|start|>functions.lookup to=assistant<|channel|>commentary<|message|>"pear is ripe"<|end|><|start|>assistant'
    )


def test_deepseek_begins_an_answer_as_it_shows_it_and_drops_its_thinking() -> None:
    words = tokenizer("deepseek")
    for kwargs, opens in (({}, "</think>"), ({"thinking": True}, "<think>")):
        renderer = Renderer(words, template_kwargs=kwargs)
        first = renderer.prompt([say("user", "q")])
        assert words.decode(first.ids).endswith("<｜Assistant｜>" + opens)
    answer = "because</think>so"
    completion = [*words.encode(answer, add_special_tokens=False), renderer.end_ids[0]]
    track = renderer.track(first, call="c", reply=say("assistant", answer), completion=completion)
    later = renderer.prompt([*track.messages, say("user", "r")], None, [track])
    assert (later.split, words.decode(later.new)) == (None, "<｜User｜>r<｜Assistant｜><think>")
    literal = Renderer(words, template_kwargs={"thinking": True}, history="template")
    shown = words.decode(literal.prompt([*track.messages, say("user", "r")], None, [track]).ids)
    assert shown.endswith("<｜User｜>q<｜Assistant｜></think>so<｜end▁of▁sentence｜><｜User｜>r<｜Assistant｜><think>")


WORDS = [
    "a",
    " 12",
    "\n",
    "é",
    "東京",
    "🙂",
    "<think>",
    "</think>",
    "<|end|>",
    "<|call|>",
    "{}",
    "<｜User｜>",
    "<tool_call>",
    "[TOOL_CALLS]",
    "<|im_end|>",
]
TEXT = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)
TURN = st.tuples(TEXT, st.integers(0, 2), TEXT)
"""What the user says, how many calls the answer makes, and the text of it (or of the results)."""


@pytest.mark.ledger("T31")
@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama3", "harmony", "deepseek"])
@settings(max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck))
@given(turns=st.lists(TURN, min_size=1, max_size=4))
def test_any_conversation_with_tools_is_one_row_whose_ids_are_what_was_sampled(name: str, turns: Any) -> None:
    """Whatever users, tools and answers say: nothing sampled is encoded again, and no text becomes a control token."""
    renderer, words = Renderer(tokenizer(name)), tokenizer(name)
    ends = set(renderer.end_ids)
    messages: list[dict[str, Any]] = []
    tracks: list[Any] = []
    expected: list[int] = []
    for k, (question, count, text) in enumerate(turns):
        messages.append(say("user", question))
        keys = ["pear", "plum"][: min(count, 2 if name in PARALLEL else 1)]
        for asked, reply in (
            [([], say("assistant", "", tool_calls=calls(*keys))), (results(*keys), None)] if keys else [([], None)]
        ):
            messages += [{**result, "content": text} for result in asked]
            rendered = renderer.prompt(messages, [TOOL], tracks)
            assert rendered.split is None
            assert list(rendered.ids[: len(expected)]) == expected
            said = reply or say("assistant", f"so {k}")
            completion = sampled(name, renderer, rendered, said)
            told = reply or say("assistant", renderer.decode(completion))
            assert [id for id in completion if id in ends] == [completion[-1]]
            tracks = [renderer.track(rendered, call=str(len(messages)), reply=told, completion=completion)]
            expected = [*rendered.ids, *completion]
            messages.append(told)
    assert json.dumps(messages)
    assert list(tracks[0].ids) == expected
    assert words.decode(expected)
