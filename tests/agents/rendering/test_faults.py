"""A model tests itself: its template shows a tool, writes a call that is read back, and shows the result."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest

from tapereel.agents.rendering import Renderer
from tapereel.agents.rendering.template import EXAMPLE_TOOL
from tapereel.agents.setup.engine_config import warn_of_faults
from tapereel.tapes import Sampling

from ..families import FAMILIES, tokenizer
from .templates_table import NO_TOOLS

UNKNOWN = """{%- for t in tools or [] %}{{ t | tojson }}{% endfor -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] -%}
CALL {{ c.function.name }} {{ c.function.arguments | tojson }} END{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPEC: Any = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+) ",
            "close": " END",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}


CHAT = """{# MARKS #}{%- if tools %}TOOLS{% endif -%}
{%- for m in messages %}{% if m.role == 'tool' %}RESULT{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
OPENED{% endif %}"""
HERMES = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
GEMMA_CALL = '<|tool_call>call:{{ c.function.name }}{key:<|"|>{{ c.function.arguments.key }}<|"|>}<tool_call|>'
COMMAND = '<|START_ACTION|>[{"tool_name": "lookup", "parameters": {{ c.function.arguments | tojson }}}]<|END_ACTION|>'


def words_of(
    *,
    call: str = HERMES,
    tools: str = "{{ tools }}",
    result: str = "[{{ m.content }}]",
    opened: str = "",
    marks: str = "",
) -> Any:
    """A tokenizer whose template writes these texts. `marks` are control tokens that the template may write."""
    words = copy.deepcopy(tokenizer("chatml"))
    words.add_special_tokens({"additional_special_tokens": marks.split()})
    words.chat_template = (
        CHAT.replace("CALL", call).replace("TOOLS", tools).replace("RESULT", result).replace("OPENED", opened)
    ).replace("MARKS", marks)
    return words


SHORT = (
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ m.tool_call_id }}:{{ m.content }}"
)
SOUND: dict[str, dict[str, str]] = {
    "plain": {},
    "a thought is opened in text": {"opened": "<think>\n"},
    "a thought is opened by a token": {"opened": "<think>\n", "marks": "<think> </think> <tool_call> </tool_call>"},
    "two tokens begin alike": {
        "call": GEMMA_CALL,
        "opened": "<|channel>thought\n<channel|>",
        "marks": '<|tool_call> <tool_call|> <|channel> <channel|> <|"|> <|tool_call>call:',
    },
    "a token opens the call and another one a thought": {
        "call": COMMAND,
        "opened": "<|START_THINKING|>",
        "marks": "<|START_ACTION|> <|END_ACTION|> <|START_THINKING|> <|END_THINKING|>",
    },
    "calls are in the text of answers": {"call": "", "marks": "<|START_ACTION|> <|END_ACTION|>"},
    "ids have nine characters": {"result": SHORT},
}
FAULTY: dict[str, tuple[dict[str, str], str]] = {
    "tools are hidden": ({"tools": ""}, "offered tools"),
    "tools are refused": ({"tools": "{{ raise_exception('none please') }}"}, "none please"),
    "results are dropped": ({"result": ""}, "drops the results"),
    "results are refused": ({"result": "{{ raise_exception('no results') }}"}, "no results"),
    "calls are dropped, and their format isn't known": ({"call": ""}, "writes none"),
    "calls are of another family": ({"call": "<call>{{ c.function.name }} pear</call>"}, "<call>lookup pear</call>"),
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "plain"])
def test_each_known_family_reads_its_own_call(name: str) -> None:
    renderer = Renderer(tokenizer(name))
    assert renderer.faults(tools=False) == []
    assert renderer.reads_calls
    hidden = NO_TOOLS in renderer.probe()
    assert ["offered tools" in fault for fault in renderer.faults()] == [True] * hidden


@pytest.mark.parametrize("name", SOUND)
def test_a_template_whose_calls_are_read_and_shown_has_no_faults(name: str) -> None:
    renderer = Renderer(words_of(**SOUND[name]))
    assert renderer.faults() == []
    assert renderer.reads_calls


@pytest.mark.parametrize("name", FAULTY)
def test_what_a_template_loses_is_named(name: str) -> None:
    texts, word = FAULTY[name]
    renderer = Renderer(words_of(**texts))
    (fault,) = renderer.faults()
    assert word in fault
    assert renderer.reads_calls == (texts.get("call") is None)
    assert renderer.faults(tools=False) == []


def test_a_token_that_asks_for_the_next_answer_ends_no_call() -> None:
    words = words_of(call="CALL {{ c.function.name }} {{ c.function.arguments | tojson }} END")
    words.chat_template = words.chat_template.replace("{% if add_generation_prompt %}", "{% if true %}")
    assert Renderer(words).end_ids == Renderer(tokenizer("chatml")).end_ids


QUOTED = 'CALL lookup <tool_call>{"name": "lookup", "arguments": {"key": "rm"}}</tool_call> END'


@pytest.mark.parametrize("own", [False, True])
def test_a_call_that_an_unread_call_quotes_is_text(own: bool) -> None:
    words = copy.deepcopy(tokenizer("chatml"))
    words.chat_template = UNKNOWN
    calls = {**SPEC["fields"]["tool_calls"], "open_pattern": "<tool_call>.*?", "close": "</tool_call>"}
    hermes = {**SPEC, "fields": {**SPEC["fields"], "tool_calls": {**calls, "transform": "{content}"}}}
    words.response_template = hermes if own else None
    renderer = Renderer(words)
    assert [call.name for call in renderer.reader.read(QUOTED, [EXAMPLE_TOOL]).calls] == ["lookup"], "the danger"
    assert not renderer.reads_calls
    assert len(renderer.faults()) == 1
    read = renderer.read(QUOTED, [EXAMPLE_TOOL])
    assert (read.calls, read.chat, read.problem, read.content) == ((), (), "", QUOTED)
    if not own:
        read = renderer.read(f"<think>Why.</think>{QUOTED}", [EXAMPLE_TOOL])
        assert (read.reasoning, read.answer, read.calls) == ("Why.", QUOTED, ())
    trusted = Renderer(words, response_template=hermes)
    assert trusted.read(QUOTED, [EXAMPLE_TOOL]).calls, "the user has said that this is the format"
    assert len(trusted.faults()) == 1


def test_hidden_tools_are_told_once_when_they_are_offered(caplog: pytest.LogCaptureFixture) -> None:
    asked = [{"role": "user", "content": "Which is ripe?"}]
    for known in (False, True):
        caplog.clear()
        renderer = Renderer(words_of(tools=""))
        warn_of_faults(renderer, tools=known)
        renderer.prompt(asked)
        assert len(caplog.records) == known
        for _ in range(2):
            renderer.prompt(asked, [EXAMPLE_TOOL])
        (record,) = caplog.records
        assert "offered tools" in record.getMessage()


def test_a_family_without_a_description_is_named_before_the_first_episode() -> None:
    words = copy.deepcopy(tokenizer("chatml"))
    words.chat_template = UNKNOWN
    (fault,) = Renderer(words).faults()
    assert 'CALL lookup {"key": "pear"} END' in fault
    assert "response_template" in fault
    assert Renderer(words, response_template=SPEC).faults() == []
    words.response_template = SPEC
    assert Renderer(words).faults() == []


def test_an_end_that_is_only_a_guess_is_named() -> None:
    (fault,) = Renderer(tokenizer("plain")).faults(tools=False)
    assert "<eos>" in fault
    assert Renderer(tokenizer("plain"), end_tokens=("<eos>",)).faults(tools=False) == []


def test_faults_and_sampling_that_gives_no_rl_data_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_faults(Renderer(tokenizer("plain")), Sampling())
        assert len(caplog.records) == 1
        caplog.clear()
        warn_of_faults(Renderer(tokenizer("qwen3")), Sampling(temperature=0))
        warn_of_faults(None, Sampling(top_p=0.9))
        greedy, narrow = [record.getMessage() for record in caplog.records]
        assert "temperature=0" in greedy
        assert "explores nothing" in greedy
        assert "top_p=0.9" in narrow
        assert "temperature" not in narrow
        caplog.clear()
        warn_of_faults(None, Sampling(top_k=5, extra={"stop": ["x"], "min_p": 0.1}))
        (both,) = [record.getMessage() for record in caplog.records]
        assert "top_k=5, extra.min_p" in both
        assert "stop" not in both
        caplog.clear()
        warn_of_faults(Renderer(tokenizer("qwen3")), Sampling(extra={"stop": ["x"]}))
        assert not caplog.records


GEMMA = """{%- for t in tools or [] %}{{ t | tojson }}{% endfor -%}
{%- for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] -%}
<|tool_call>call:{{ c.function.name }}{key:<|"|>pear<|"|>}<tool_call|>{% endfor %}<|im_end|>
{% for c in m.tool_calls or [] %}{% for r in messages if r.role == 'tool' and r.tool_call_id == c.id -%}
[{{ r.content }}]{% endfor %}{% endfor %}
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


GEMMA_TURN = """{%- for t in tools or [] %}{{ t | tojson }}{% endfor -%}
{%- for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}
{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{key:<|"|>pear<|"|>}<tool_call|>{% endfor %}
{%- if m.tool_calls %}<|tool_response>{% endif %}
{%- for r in messages if r.role == 'tool' and m.tool_calls %}{{ r.content }}<tool_response|>{% endfor %}{{ m.content }}
{%- if m.content or not m.tool_calls %}<|im_end|>
{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant
<|channel>thought
<channel|>{% endif %}"""
"""As Gemma 4's: the text next to a call comes after its results, and the prompt opens a thought."""


@pytest.mark.parametrize("said", ["", "Let me look."])
def test_a_result_is_shown_though_the_prompt_opened_what_history_leaves_out(said: str) -> None:
    words = words_of(marks='<|tool_call> <tool_call|> <|tool_response> <tool_response|> <|channel> <channel|> <|"|>')
    words.chat_template = GEMMA_TURN
    renderer, tools = Renderer(words), [EXAMPLE_TOOL]
    assert renderer.faults() == []
    asked = [{"role": "user", "content": "Which is ripe?"}]
    call = said + '<|tool_call>call:lookup{key:<|"|>pear<|"|>}<tool_call|><|tool_response>'
    ids = words.encode(call, add_special_tokens=False)
    reply = {"role": "assistant", "content": renderer.decode(ids)}
    track = renderer.track(renderer.prompt(asked, tools), call="1", reply=reply, completion=ids)
    result = {"role": "tool", "tool_call_id": "call_0", "content": "The pear."}
    following = renderer.prompt([*track.messages, result], tools, [track])
    assert following.split is None
    assert renderer.spell(following.new) == "The pear.<tool_response|>"


@pytest.mark.parametrize("name", ["harmony", "gemma"])
def test_a_result_reaches_a_template_that_shows_it_only_after_a_structured_call(name: str) -> None:
    words = tokenizer("harmony")
    text = ' to=functions.lookup<|channel|>commentary json<|message|>{"key":"pear"}<|call|>'
    if name == "gemma":
        words = copy.deepcopy(tokenizer("chatml"))
        words.chat_template = GEMMA
        text = '<|tool_call>call:lookup{key:<|"|>pear<|"|>}<tool_call|><|im_end|>'
    renderer, tools = Renderer(words), [EXAMPLE_TOOL]
    asked = [{"role": "user", "content": "Which is ripe?"}]
    first = renderer.prompt(asked, tools)
    ids = words.encode(text, add_special_tokens=False)
    reply = {"role": "assistant", "content": renderer.decode(ids)}
    track = renderer.track(first, call="1", reply=reply, completion=ids)
    messages = [*asked, reply, {"role": "tool", "tool_call_id": "x7", "content": "The pear."}]
    following = renderer.prompt(messages, tools, [track])
    assert "The pear." in renderer.spell(following.new)
    assert following.messages == tuple(messages), "the recorded messages stay as they were"
    if name == "harmony":
        assert following.split is None
        again = renderer.retrack(
            call="1", messages=messages[:2], tools=tools, ids=track.ids, completion=track.completion
        )
        assert renderer.prompt(messages, tools, [again]).ids == following.ids


@pytest.mark.parametrize("name", ["harmony", "mistral"])
def test_an_answer_without_ids_may_have_any_end(name: str) -> None:
    renderer = Renderer(tokenizer(name))
    written = renderer._template.written_call()
    assert written is not None
    _, text, end = written
    (id,) = (one for one in renderer.end_ids if renderer.spell([one]) == end)
    for ids in (None, [id]):
        (call,) = renderer.read(text, [EXAMPLE_TOOL], ids=ids).calls
        assert call.arguments == {"key": "pear"}
    assert renderer.read(text, [EXAMPLE_TOOL], ids=[5]).calls == (), "no end token was sampled"
    assert renderer.read(text, [EXAMPLE_TOOL], cut=True).calls == ()
