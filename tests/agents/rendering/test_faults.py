"""A model tests itself: its template writes a call, and its reader reads it back."""

from __future__ import annotations

import copy
import logging

import pytest

from tapereel.agents.rendering.renderer import Renderer
from tapereel.agents.rendering.template import EXAMPLE_TOOL
from tapereel.agents.setup.engine_config import warn_of_faults
from tapereel.tapes import Sampling

from ..families import FAMILIES, tokenizer

UNKNOWN = """{%- for t in tools or [] %}{{ t | tojson }}{% endfor -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] -%}
CALL {{ c.function.name }} {{ c.function.arguments | tojson }} END{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPEC = {
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


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "plain"])
def test_each_known_family_reads_its_own_call(name: str) -> None:
    assert Renderer(tokenizer(name)).faults() == []


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
    (fault,) = Renderer(tokenizer("plain")).faults()
    assert "<eos>" in fault
    assert Renderer(tokenizer("plain"), end_tokens=("<eos>",)).faults() == []


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
    text, end = written
    (id,) = (one for one in renderer.end_ids if renderer.spell([one]) == end)
    for ids in (None, [id]):
        (call,) = renderer.read(text, [EXAMPLE_TOOL], ids=ids).calls
        assert call.arguments == {"key": "pear"}
    assert renderer.read(text, [EXAMPLE_TOOL], ids=[5]).calls == (), "no end token was sampled"
    assert renderer.read(text, [EXAMPLE_TOOL], cut=True).calls == ()
