"""Splicing, on the character-level tokenizer, where every expected id can be written down by hand."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tapereel as tr
from tapereel.agents import read_tool_calls
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.rendering import Rendered, Renderer, Track
from tapereel.agents.rendering.renderer import RenderError
from tapereel.finetune import rows
from tapereel.tapes import Answer, Call, Status, Tape, TapereelError, Task
from tapereel.tapes.arrays import ints
from tapereel.tapes.errors import UsageError
from tapereel.tapes.records import Begin, End, Identity

TOKENIZER = char_tokenizer()
SYSTEM, USER, ASSISTANT, TOOL, END = 2, 3, 4, 5, 6
TOOLS = (
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"properties": {"a": {}, "b": {}}}},
    },
)


def chars(text: str) -> list[int]:
    return TOKENIZER.convert_tokens_to_ids(list(text))


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def answer(renderer: Renderer, rendered: Rendered, ids: list[int], call: str = "c") -> Track:
    return renderer.track(rendered, call=call, reply=say("assistant", renderer.decode(ids)), completion=ids)


class CountingTokenizer:
    """A tokenizer that counts how often its chat template is rendered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.rendered = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._tokenizer(*args, **more)

    def apply_chat_template(self, *args: Any, **more: Any) -> Any:
        self.rendered += 1
        return self._tokenizer.apply_chat_template(*args, **more)


def test_attempts_at_a_task_render_its_first_prompt_once():
    counting = CountingTokenizer(char_tokenizer())
    renderer = Renderer(counting)
    opening = [say("system", "be brief"), say("user", "1+1?")]
    renderer.prompt([say("user", "a")], TOOLS)  # the first prompts try the template out
    before = counting.rendered
    first, again = renderer.prompt(opening), renderer.prompt([{**message} for message in opening])
    assert counting.rendered - before == 1
    assert (again.ids, again.text, again.messages) == (first.ids, first.text, first.messages)
    first.ids.append(1)
    for asked in ((opening,), ([*opening[:1], say("user", "1+2?")],), (opening, TOOLS), (opening[1:],)):
        assert renderer.prompt(*asked).ids == Renderer(char_tokenizer()).prompt(*asked).ids
    assert counting.rendered - before == 4
    track = answer(renderer, again, chars("2"))
    assert renderer.prompt([*opening, say("assistant", "2"), say("user", "so?")], tracks=(track,)).base is track


def test_a_template_with_the_date_is_rendered_each_time():
    tokenizer = char_tokenizer()
    tokenizer.chat_template = f"{{% set day = strftime_now('%d') %}}{tokenizer.chat_template}"
    counting = CountingTokenizer(tokenizer)
    renderer = Renderer(counting)
    first = renderer.prompt([say("user", "a")])
    before = counting.rendered
    assert [renderer.prompt([say("user", "a")]).ids for _ in range(2)] == [first.ids] * 2
    assert counting.rendered - before == 2


def test_a_message_that_is_not_json_is_left_to_the_template():
    assert "<set>" in Renderer(char_tokenizer()).prompt([{"role": "user", "content": {1, 2}}]).text


def episode(renderer: Renderer, turns: list[dict[str, Any]]) -> tuple[list[Rendered], Tape]:
    """What each prompt was, and the tape of it."""
    begin = Begin(
        tape="t",
        task=Task(),
        task_hash="",
        agent=Identity(name="a"),
        env=Identity(name="e"),
        env_seed=0,
        seed=0,
        at=0.0,
    )
    prompts, bodies = [], [begin.body()]
    messages: list[dict[str, Any]] = []
    tracks: list[Track] = []
    for n, turn in enumerate(turns):
        messages.append(say("user", turn["say"]))
        rendered = renderer.prompt(messages, None, tracks)
        call = Call(
            tape="t",
            call=f"call{n}",
            by="a",
            base=rendered.base.call if rendered.base else None,
            keep=rendered.keep,
            keep_messages=rendered.keep_messages,
            new_messages=rendered.messages[rendered.keep_messages :],
            new_prompt=rendered.new,
            completion=turn["sampled"],
            logprobs=[-1.0] * len(turn["sampled"]),
            text=renderer.decode(turn["sampled"]),
            spans=(("v:0", 0, len(turn["sampled"])),),
            at=0.0,
        )
        tracks = [renderer.track(rendered, call=call.call, reply=call.reply, completion=turn["sampled"])]
        messages.append(call.reply)
        prompts.append(rendered)
        bodies.append(call.body())
    return prompts, Tape.of([*bodies, End(tape="t", status=Status.FINISHED, at=0.0).body()])


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(TOKENIZER)


LEDGER = json.loads((Path(__file__).parents[2] / "ledger" / "rendering.json").read_text("utf-8"))["cases"]


@pytest.mark.ledger("T13", "T14", "T30", "T31", "X10")
@pytest.mark.parametrize("case", LEDGER, ids=lambda case: case["name"])
def test_the_ids_and_targets_of_the_ledger(renderer: Renderer, case: dict[str, Any]) -> None:
    prompts, tape = episode(renderer, case["turns"])
    assert [list(rendered.new) for rendered in prompts] == case["new"]
    assert [rendered.keep for rendered in prompts] == case["keep"]
    (row,) = rows(tape)
    assert row.input_ids.tolist() == case["input_ids"]
    assert row.own.tolist() == case["own"]


def test_a_first_prompt_costs_a_role_token_the_characters_and_an_end_token_a_message(renderer: Renderer) -> None:
    rendered = renderer.prompt([say("system", "Add."), say("user", "1+2")])
    assert list(rendered.ids) == [SYSTEM, *chars("Add."), END, USER, *chars("1+2"), END, ASSISTANT]
    assert (rendered.base, rendered.keep, rendered.keep_messages, rendered.split) == (None, 0, 0, None)
    assert rendered.new == rendered.ids


@pytest.mark.ledger("X10")
def test_the_next_prompt_keeps_every_sampled_id_and_encodes_only_what_came_after(renderer: Renderer) -> None:
    first = renderer.prompt([say("user", "1+2")])
    track = answer(renderer, first, [*chars("c1+2"), END])
    second = renderer.prompt([*track.messages, say("tool", "3")], None, [track])
    assert second.base is track
    assert (second.keep, second.keep_messages, second.split) == (len(track.ids), 2, None)
    assert list(second.new) == [TOOL, *chars("3"), END, ASSISTANT]
    assert second.ids == track.ids + second.new
    assert second.messages[second.keep_messages :] == (say("tool", "3"),)


@pytest.mark.ledger("T31")
def test_a_sampled_control_token_inside_an_answer_stays_the_token_that_was_sampled(renderer: Renderer) -> None:
    sampled = [*chars("a"), USER, *chars("b"), SYSTEM, END]
    track = answer(renderer, renderer.prompt([say("user", "q")]), sampled)
    assert track.messages[-1]["content"] == "a<|user|>b<|system|>"
    later = renderer.prompt([*track.messages, say("user", "r")], None, [track])
    assert later.split is None
    assert list(later.ids) == [USER, *chars("q"), END, ASSISTANT, *sampled, USER, *chars("r"), END, ASSISTANT]


@pytest.mark.ledger("T31")
def test_the_same_characters_sampled_one_by_one_stay_characters(renderer: Renderer) -> None:
    sampled = [*chars("<|user|>"), END]
    track = answer(renderer, renderer.prompt([say("user", "q")]), sampled)
    later = renderer.prompt([*track.messages, say("user", "r")], None, [track])
    assert later.split is None
    assert list(later.ids[4 : 4 + len(sampled)]) == sampled


@pytest.mark.ledger("T14")
@pytest.mark.parametrize("sampled", [chars("12"), [], chars("<|en")], ids=["cut", "nothing", "half an end"])
def test_a_cut_answer_is_closed_as_context_and_no_id_enters_the_completion(
    renderer: Renderer, sampled: list[int]
) -> None:
    track = answer(renderer, renderer.prompt([say("user", "q")]), sampled)
    assert list(track.completion) == sampled
    later = renderer.prompt([*track.messages, say("user", "go on")], None, [track])
    assert later.keep == len(track.ids)
    assert list(later.new) == [END, USER, *chars("go on"), END, ASSISTANT]
    assert later.split is None


@pytest.mark.ledger("T30")
def test_an_answer_is_found_by_position_not_by_its_text(renderer: Renderer) -> None:
    track = answer(
        renderer,
        renderer.prompt([say("user", "yes"), say("assistant", "yes"), say("user", "yes")]),
        [*chars("yes"), END],
    )
    later = renderer.prompt([*track.messages, say("user", "yes")], None, [track])
    assert list(later.new) == [USER, *chars("yes"), END, ASSISTANT]
    assert later.keep == len(track.ids)


def test_the_longest_conversation_is_continued(renderer: Renderer) -> None:
    one = answer(renderer, renderer.prompt([say("user", "q")]), [*chars("a"), END], "one")
    two = answer(renderer, renderer.prompt([*one.messages, say("user", "r")], None, [one]), [*chars("b"), END], "two")
    for tracks in ([one, two], [two, one]):
        third = renderer.prompt([*two.messages, say("user", "s")], None, tracks)
        assert third.base is two


def test_going_back_to_an_earlier_turn_starts_a_row_that_shares_its_ids(renderer: Renderer) -> None:
    one = answer(renderer, renderer.prompt([say("user", "q")]), [*chars("a"), END], "one")
    two = answer(renderer, renderer.prompt([*one.messages, say("user", "r")], None, [one]), [*chars("b"), END], "two")
    other = renderer.prompt([*one.messages, say("user", "s")], None, [two])
    assert other.base is two
    assert other.keep == len(one.ids) + 1
    assert other.keep_messages == 2
    assert "message 2 (user)" in (other.split or "")
    again = renderer.prompt(one.messages[:1], None, [two])
    assert "message 1 " in (again.split or "")
    assert list(again.ids) == [USER, *chars("q"), END, ASSISTANT]
    assert (again.keep, len(again.new)) == (4, 0)


def test_an_unrelated_conversation_shares_nothing_and_says_so(renderer: Renderer) -> None:
    track = answer(renderer, renderer.prompt([say("user", "q")]), [*chars("a"), END])
    other = renderer.prompt([say("user", "else")], None, [track])
    assert (other.base, other.keep) == (None, 0)
    assert "conversation" in (other.split or "")


def test_conversations_that_only_end_alike_are_not_one(renderer: Renderer) -> None:
    track = answer(renderer, renderer.prompt([say("system", "s"), say("user", "q")]), [*chars("a"), END])
    other = renderer.prompt([say("system", "s"), say("user", "z"), track.messages[-1], say("user", "r")], None, [track])
    assert "message 1 (user)" in (other.split or "")
    assert (other.keep, other.keep_messages) == (4, 1)
    assert list(other.ids[:7]) == [SYSTEM, *chars("s"), END, USER, *chars("z"), END, ASSISTANT]


def test_asking_again_after_a_call_that_sampled_nothing_extends_it(renderer: Renderer) -> None:
    track = answer(renderer, renderer.prompt([say("user", "q")]), [])
    again = renderer.prompt([say("user", "q")], None, [track])
    assert (again.keep, len(again.new), again.split) == (len(track.ids), 0, None)


def test_asking_again_after_an_answer_adds_only_what_asks(renderer: Renderer) -> None:
    track = answer(renderer, renderer.prompt([say("user", "q")]), [*chars("a"), END])
    again = renderer.prompt(track.messages, None, [track])
    assert again.split is None
    assert list(again.new) == [ASSISTANT]


def test_changed_tools_start_a_new_row(renderer: Renderer) -> None:
    track = answer(renderer, renderer.prompt([say("user", "q")], TOOLS), [*chars("a"), END])
    assert list(track.ids[: len(chars("add(a, b): Adds.")) + 3]) == [SYSTEM, *chars("add(a, b): Adds.\n"), END]
    same = renderer.prompt([*track.messages, say("user", "r")], [dict(TOOLS[0])], [track])
    assert same.split is None
    none = renderer.prompt([*track.messages, say("user", "r")], None, [track])
    assert ("tools" in (none.split or ""), none.keep) == (True, 0)
    assert list(none.ids[:3]) == [USER, *chars("q"), END]


def test_between_equal_conversations_the_same_tools_and_then_the_later_one_win(renderer: Renderer) -> None:
    sampled = [*chars("a"), END]
    with_tools = answer(renderer, renderer.prompt([say("user", "q")], TOOLS), sampled, "with")
    without = answer(renderer, renderer.prompt([say("user", "q")]), sampled, "without")
    later = answer(renderer, renderer.prompt([say("user", "q")]), sampled, "later")
    messages = [*without.messages, say("user", "r")]
    assert renderer.prompt(messages, TOOLS, [with_tools, without, later]).base is with_tools
    assert renderer.prompt(messages, None, [without, later, with_tools]).base is later


def test_a_track_made_again_from_a_tape_continues_as_the_first_did(renderer: Renderer) -> None:
    messages = [say("user", "1 <|end|>\n")]
    track = answer(renderer, renderer.prompt(messages, TOOLS), [*chars("ok"), USER, END])
    again = renderer.retrack(
        call="c", messages=track.messages, tools=list(TOOLS), ids=track.ids, completion=track.completion
    )
    assert (again.text, again.marked, again.tools) == (track.text, track.marked, track.tools)
    following = [*track.messages, say("tool", "x")]
    assert renderer.prompt(following, TOOLS, [again]).ids == renderer.prompt(following, TOOLS, [track]).ids


CONTROLS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|pad|>", "<|unk|>")


@pytest.mark.parametrize("role", ["system", "user", "tool"])
@pytest.mark.parametrize("token", CONTROLS)
def test_control_token_text_in_content_is_read_as_characters(renderer: Renderer, role: str, token: str) -> None:
    for content in (token, f"a{token}b", token * 2, f"<|en{token}d|>", token + "\ufdd0"):
        rendered = renderer.prompt([say(role, content)])
        role_id = {"system": SYSTEM, "user": USER, "tool": TOOL}[role]
        assert list(rendered.ids) == [role_id, *chars(content), END, ASSISTANT]


@pytest.mark.parametrize("content", ["\ufdd0", "\ufdd00", "\ufdd01", "<\ufdd01|end|>", "\ufdd0\ufdd01<|end|>\ufdd0"])
def test_content_that_holds_the_mark_itself_comes_through(content: str) -> None:
    tokenizer = char_tokenizer("".join(map(chr, range(32, 127))) + "\ufdd0")
    rendered = Renderer(tokenizer).prompt([say("user", content)])
    assert list(rendered.ids[1:-2]) == tokenizer.convert_tokens_to_ids(list(content))


def test_control_token_text_in_tool_definitions_names_and_calls_is_read_as_characters(renderer: Renderer) -> None:
    tool = {
        "type": "function",
        "function": {"name": "x<|end|>", "description": "<|user|>", "parameters": {"properties": {"<|tool|>": {}}}},
    }
    rendered = renderer.prompt([say("user", "q")], [tool])
    assert list(rendered.ids) == [
        SYSTEM,
        *chars("x<|end|>(<|tool|>): <|user|>\n"),
        END,
        USER,
        *chars("q"),
        END,
        ASSISTANT,
    ]
    call = {"function": {"name": "add", "arguments": {"a": "<|end|>"}}}
    rendered = renderer.prompt([say("user", "q"), say("assistant", "", tool_calls=[call]), say("tool", "3")])
    assert list(rendered.ids) == [
        USER,
        *chars("q"),
        END,
        ASSISTANT,
        *chars('<tool_call>{"name": "add", "arguments": {"a": "<|end|>"}}</tool_call>'),
        END,
        TOOL,
        *chars("3"),
        END,
        ASSISTANT,
    ]
    parts = [{"type": "text", "text": "<|end|>"}]
    assert list(renderer.prompt([say("user", "q"), {"role": "tool", "content": parts}]).ids).count(END) == 2


def test_refusing_names_the_token_and_the_message(renderer: Renderer) -> None:
    strict = Renderer(TOKENIZER, special_text="refuse")
    with pytest.raises(RenderError, match=r"message 1 \(tool\).*'<\|end\|>'") as error:
        strict.prompt([say("user", "q"), say("tool", "x<|end|>")])
    assert "special_text='split'" in str(error.value)
    with pytest.raises(RenderError, match=r"tool.*'<\|user\|>'"):
        strict.prompt([say("user", "q")], [{"function": {"name": "<|user|>"}}])
    # What the model itself sampled can't be refused: it is on the tape.
    track = answer(strict, strict.prompt([say("user", "q")]), [USER, END])
    assert strict.prompt([*track.messages, say("user", "r")], None, [track]).split is None
    assert isinstance(RenderError(""), TapereelError)
    assert isinstance(RenderError(""), ValueError)


def test_a_tokenizer_that_reads_control_tokens_into_other_text_is_found_out() -> None:
    backend = Tokenizer(models.WordLevel({"<|end|>": 0, "hi": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=True)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}",
    )
    careful = Renderer(tokenizer)
    assert list(careful.prompt([say("user", "hi")]).ids) == [1, 0]
    with pytest.raises(RenderError, match=r"AddedToken\(normalized=False\)"):
        careful.prompt([say("user", "hi <|END|>")])


def test_control_tokens_that_overlap_or_start_alike_are_all_broken_and_the_longest_is_named() -> None:
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["|>!", "<|end|>!!"]})
    for content in ("<|user|>!", "<|end|>!!", "<|end|>!"):
        assert list(Renderer(tokenizer).prompt([say("user", content)]).ids[1:-2]) == chars(content)
    with pytest.raises(RenderError, match=r"'<\|end\|>!!'"):
        Renderer(tokenizer, special_text="refuse").prompt([say("user", "<|end|>!!")])


def test_white_space_and_tokens_that_the_template_does_not_write_are_ordinary_text() -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template += "\n\n"
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("\n\n", "<b>", "<|role|>")])
    ordinary = tokenizer.convert_tokens_to_ids(["\n\n", "<b>"])
    assert list(Renderer(tokenizer).prompt([say("user", "\n\n<b>")]).ids[1:3]) == ordinary
    tokenizer.chat_template += "{# <b> #}{% if false %}<b>{% endif %}"
    assert list(Renderer(tokenizer).prompt([say("user", "<b>")]).ids[1:4]) == chars("<b>")


def test_a_control_token_of_one_character_can_only_be_refused() -> None:
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["☃"]})
    with pytest.raises(RenderError, match=r"'☃'.*character"):
        Renderer(tokenizer).prompt([say("user", "a ☃")])


@pytest.mark.parametrize("sampled", [[*chars("hi"), END], chars("hi"), [END], []])
def test_decode_leaves_out_what_ends_the_answer_and_nothing_else(renderer: Renderer, sampled: list[int]) -> None:
    assert renderer.decode(sampled) == TOKENIZER.decode([id for id in sampled if id != END])
    assert renderer.decode([USER, *sampled]).startswith("<|user|>")


def test_authored_text_becomes_what_an_engine_would_have_sampled(renderer: Renderer) -> None:
    prompt, completion, _ = renderer.authored([say("user", "1+2")], say("assistant", "a3"))
    assert list(prompt) == [USER, *chars("1+2"), END, ASSISTANT]
    assert list(completion) == [*chars("a3"), END]
    call = say("assistant", "", tool_calls=[{"function": {"name": "add", "arguments": {"a": 1}}}])
    written = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert list(renderer.authored([say("user", "q")], call, TOOLS)[1]) == [*chars(written), END]
    assert [(one.name, one.arguments) for one in read_tool_calls(written).calls] == [("add", {"a": 1})]
    # An author can't end the turn early, nor open another's.
    framing = "".join(CONTROLS)
    assert list(renderer.authored([say("user", "q")], say("assistant", framing))[1]) == [*chars(framing), END]


def test_authored_turns_make_one_row(renderer: Renderer) -> None:
    messages, tracks, whole = [say("user", "1+2+3")], [], []
    for text, result in (("c1+2", "3"), ("c3+3", "6"), ("a6", "")):
        rendered = renderer.prompt(messages, None, tracks)
        reply = say("assistant", text)
        completion = renderer.completion(rendered, reply)
        tracks = [renderer.track(rendered, call=text, reply=reply, completion=completion)]
        assert rendered.split is None
        assert (ints(rendered.ids), completion, ()) == renderer.authored(messages, reply)
        messages, whole = [*messages, reply, say("tool", result)], list(tracks[0].ids)
    assert whole == [
        USER,
        *chars("1+2+3"),
        END,
        ASSISTANT,
        *chars("c1+2"),
        END,
        TOOL,
        *chars("3"),
        END,
        ASSISTANT,
        *chars("c3+3"),
        END,
        TOOL,
        *chars("6"),
        END,
        ASSISTANT,
        *chars("a6"),
        END,
    ]


def test_end_ids_are_probed_from_the_template_and_can_be_added_to() -> None:
    assert Renderer(TOKENIZER).end_ids == (END,)
    more = Renderer(TOKENIZER, end_tokens=("<|pad|>",))
    assert more.end_ids == (END, 0)
    track = answer(more, more.prompt([say("user", "q")]), [*chars("a"), 0])
    assert track.messages[-1]["content"] == "a"
    assert more.prompt([*track.messages, say("user", "r")], None, [track]).new[0] == USER
    with pytest.raises(RenderError, match=r"'<\|eom\|>'"):
        Renderer(TOKENIZER, end_tokens=("<|eom|>",))


def test_where_the_next_turn_ends_an_answer_only_the_end_of_sequence_does() -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    bare = Renderer(tokenizer)
    assert bare.end_ids == (END,)
    for sampled in ([*chars("a"), END], chars("a")):
        track = answer(bare, bare.prompt([say("user", "q")]), sampled)
        later = bare.prompt([*track.messages, say("user", "r")], None, [track])
        assert list(later.ids) == [USER, *chars("q"), ASSISTANT, *sampled, USER, *chars("r"), ASSISTANT]


def test_an_answer_that_ended_otherwise_than_the_template_says_is_rewritten_history() -> None:
    literal = Renderer(TOKENIZER, end_tokens=("<|pad|>",), history="template")
    track = answer(literal, literal.prompt([say("user", "q")]), [*chars("a"), 0])
    later = literal.prompt([*track.messages, say("user", "r")], None, [track])
    assert later.split is not None
    assert later.keep == len(track.ids) - 1


def test_bad_input_is_named_with_its_remedy() -> None:
    bare = char_tokenizer()
    bare.chat_template = None
    with pytest.raises(UsageError, match=r"tokenizer\.chat_template"):
        Renderer(bare)
    with pytest.raises(RenderError, match="prompt"):
        Renderer(TOKENIZER).prompt([])
    with pytest.raises(RenderError, match=r"message 0 \(user\).*'image'"):
        Renderer(TOKENIZER).prompt([{"role": "user", "content": [{"type": "image", "url": "x"}]}])
    with pytest.raises(ValueError, match=r"history.*'both'.*'sampled', 'template'"):
        Renderer(TOKENIZER, history="both")  # type: ignore[arg-type]
    with pytest.raises(RenderError, match="fast"):
        Renderer(object.__new__(type("Slow", (), {"chat_template": "x", "special_tokens_map": {}})))
    endless = char_tokenizer()
    endless.eos_token = None
    endless.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    with pytest.raises(RenderError, match=r"tokenizer\.eos_token"):
        Renderer(endless)
    refusing = char_tokenizer()
    refusing.chat_template = (
        "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        + refusing.chat_template
    )
    with pytest.raises(RenderError, match=r"\b1\b.*\btool\b.*\bhere\b"):
        Renderer(refusing).prompt([say("tool", "x")])


def test_hashes_tell_tokenizers_templates_and_their_arguments_apart() -> None:
    one, same = Renderer(TOKENIZER), Renderer(char_tokenizer())
    assert (one.tokenizer_hash, one.template_hash, one.hash) == (same.tokenizer_hash, same.template_hash, same.hash)
    assert one.hash == Renderer(TOKENIZER, history="template").hash
    other_words, other_template = char_tokenizer("abc"), char_tokenizer()
    other_template.chat_template += " "
    assert Renderer(other_words).tokenizer_hash != one.tokenizer_hash
    assert Renderer(other_words).template_hash == one.template_hash
    assert Renderer(other_template).template_hash != one.template_hash
    with_argument = Renderer(TOKENIZER, template_kwargs={"enable_thinking": False})
    assert with_argument.template_hash != one.template_hash
    assert (
        len(
            {
                one.hash,
                Renderer(other_words).hash,
                Renderer(other_template).hash,
                with_argument.hash,
                Renderer(TOKENIZER, special_text="refuse").hash,
            }
        )
        == 5
    )


def test_padding_and_truncation_that_others_switch_on_change_nothing() -> None:
    shared = char_tokenizer()
    renderer = Renderer(shared)
    before = renderer.prompt([say("user", "hello <|end|>")]).ids
    shared.backend_tokenizer.enable_padding(length=64)
    shared.backend_tokenizer.enable_truncation(3)
    assert renderer.prompt([say("user", "hello <|end|>")]).ids == before
    assert Renderer(shared).prompt([say("user", "hello <|end|>")]).ids == before
    assert Renderer(shared).tokenizer_hash == renderer.tokenizer_hash


def test_threads_can_share_a_renderer(renderer: Renderer) -> None:
    def work(n: int, found: list[bool]) -> None:
        for i in range(200):
            track = answer(renderer, renderer.prompt([say("user", f"{n}:{i}")]), [*chars(str(i)), END])
            new = renderer.prompt([*track.messages, say("tool", "<|end|>")], None, [track]).new
            found.append(list(new) == [TOOL, *chars("<|end|>"), END, ASSISTANT])

    found: list[bool] = []
    threads = [threading.Thread(target=work, args=(n, found)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 800
    assert all(found)


class Speaks(tr.Environment[Answer]):
    async def reset(self, task: str) -> str:
        return task

    async def step(self, action: Answer) -> tr.Outcome:
        return tr.Outcome(reward=1.0, terminated=True)


@pytest.mark.parametrize(
    ("system", "tasks", "lost"),
    [
        (None, ["ab 1", "b"], None),
        (None, ["ab 1", "ab c1é", "d"], "'c', 'é'"),
        ("cab", ["ab 1", "ab"], "'c'"),
    ],
)
def test_a_run_names_the_characters_that_its_model_has_no_token_for_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, system: str | None, tasks: list[str], lost: str | None
) -> None:
    model = tr.save_tiny_model(tmp_path / "model", "ab 1", size="micro")
    for k in range(2):  # once per run
        caplog.clear()
        settings = {"sampling.max_tokens": 2, "concurrency": 1}
        tr.run(tr.ChatAgent(system), Speaks, tasks, model, out=tmp_path / f"r{k}", settings=settings)
        said = [text for text in caplog.messages if "has no token for" in text]
        assert said == ([f"{model} has no token for {lost}, and reads <|unk|> in the prompt instead"] if lost else [])
    caplog.clear()
    renderer = Renderer(char_tokenizer("ab 1"))
    renderer.faults()
    renderer.probe()
    assert not caplog.messages, "probes aren't a run's prompts"
