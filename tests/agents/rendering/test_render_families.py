"""The templates and tokenizers of the families: what is kept, what is encoded, and what starts a new row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.rendering import Renderer, Track
from tapereel.agents.rendering.renderer import RenderError
from tapereel.finetune import rows
from tapereel.tapes import Call, Status, Tape, Task
from tapereel.tapes.errors import UsageError
from tapereel.tapes.records import Begin, End, Identity

from ..families import FAMILIES, tokenizer

KEEPS_ANSWERS = ["chatml", "qwen25", "deepseek", "llama3", "mistral", "gemma", "llama2", "phi3"]
"""Families whose template shows an earlier answer as it was, but for white space around it."""
TURNS = [
    ("What is 47 times 83?", "The answer is 3901."),
    ("Für zwölf Äpfel 🙂?", "12 €, naïve\n\nIs it?"),
    ("  spaces  and\ttabs \n", '{"result": "ripe"}'),
    ("東京", "yes"),
    ("<table>", "- one\n- two"),
]
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "lookup", "arguments": {"key": "pear"}}}


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def whole(name: str, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> list[int]:
    """What transformers makes of the conversation when all of it is encoded at once."""
    return tokenizer(name).apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
    )


def sample(
    renderer: Renderer,
    messages: list[dict[str, Any]],
    ids: list[int],
    tracks: list[Track],
    tools: Any = None,
    reply: dict[str, Any] | None = None,
) -> Track:
    rendered = renderer.prompt(messages, tools, tracks)
    reply = reply or say("assistant", renderer.decode(ids))
    return renderer.track(rendered, call=str(len(messages)), reply=reply, completion=ids)


def encode(name: str, text: str) -> list[int]:
    return tokenizer(name).encode(text, add_special_tokens=False)


@pytest.mark.ledger("T31", "X10")
@pytest.mark.parametrize("history", ["sampled", "template"])
@pytest.mark.parametrize("name", KEEPS_ANSWERS)
def test_spliced_ids_equal_the_whole_conversation_encoded_at_once(name: str, history: Any) -> None:
    renderer, messages, tracks = Renderer(tokenizer(name), history=history), [], []
    for question, text in TURNS:
        messages.append(say("user", question))
        rendered = renderer.prompt(messages, None, tracks)
        assert list(rendered.ids) == whole(name, messages)
        assert rendered.split is None
        reply = say("assistant", text)
        completion = renderer.completion(rendered, reply)
        tracks = [renderer.track(rendered, call=question, reply=reply, completion=completion)]
        messages.append(reply)


@pytest.mark.parametrize("name", FAMILIES)
def test_authored_text_decodes_to_itself_and_ends_as_the_template_ends_it(name: str) -> None:
    renderer, end = Renderer(tokenizer(name)), tokenizer(name).convert_tokens_to_ids(ENDS[name][0])
    for _, text in TURNS:
        _, completion, _ = renderer.authored([say("user", "q")], say("assistant", text))
        assert renderer.decode(completion) == BEFORE.get(name, "") + text
        assert [at for at, id in enumerate(completion) if id == end] == [len(completion) - 1]


@pytest.mark.parametrize(
    ("name", "history"), [*((name, "sampled") for name in FAMILIES), *((name, "template") for name in KEEPS_ANSWERS)]
)
def test_what_was_sampled_is_kept_however_it_was_tokenized(name: str, history: Any) -> None:
    renderer = Renderer(tokenizer(name), history=history)
    space = "Ġ" if FAMILIES[name].kind == "bytes" else "▁"
    odd = tokenizer(name).convert_tokens_to_ids(list("The answer is 3901.".replace(" ", space)))
    assert renderer.decode(odd) == "The answer is 3901."
    assert odd != encode(name, "The answer is 3901.")
    if name == "llama2":  # whose template writes a space in front of the end
        odd.append(tokenizer(name).convert_tokens_to_ids("▁"))
    track = sample(renderer, [say("user", "q")], [*odd, renderer.end_ids[0]], [])
    later = renderer.prompt([*track.messages, say("user", "r")], None, [track])
    assert later.split is None
    assert list(later.ids[: later.keep]) == [*whole(name, [say("user", "q")]), *odd, renderer.end_ids[0]]


@pytest.mark.ledger("T14")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", ["The ans", "naïve 🚀"])
def test_a_cut_answer_is_closed_as_the_template_closes_it(name: str, text: str) -> None:
    renderer = Renderer(tokenizer(name))
    cut = encode(name, text)[:-1]
    if text.endswith("🚀"):
        assert renderer.decode(cut).endswith("\ufffd"), "the cut should split a character"
    ended = sample(renderer, [say("user", "q")], [*cut, renderer.end_ids[0]], [])
    track = sample(renderer, [say("user", "q")], cut, [])
    assert list(track.ids[-len(cut) :]) == cut
    following = [*track.messages, say("user", "r")]
    later = renderer.prompt(following, None, [track])
    behind_end = list(renderer.prompt([*ended.messages, say("user", "r")], None, [ended]).new)
    closing = {"plain": [], "llama2": encode(name, "</s> </s>")[1:], "harmony": encode(name, "<|end|>")}.get(
        name, [renderer.end_ids[0]]
    )
    assert list(later.new) == [*closing, *behind_end]
    assert later.split is None


BEFORE = {"qwen3": "<think>\n\n</think>\n\n", "harmony": "<|channel|>final<|message|>"}
"""What a template shows in front of a last answer's text."""
ENDS = {
    "qwen25": ["<|im_end|>"],
    "harmony": ["<|return|>", "<|call|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "chatml": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "llama3": ["<|eot_id|>"],
    "mistral": ["</s>"],
    "gemma": ["<end_of_turn>", "<eos>"],
    "llama2": ["</s>"],
    "phi3": ["<|end|>", "<|endoftext|>"],
    "r1": ["<｜end▁of▁sentence｜>"],
    "plain": ["<eos>"],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_ends_an_answer_is_read_off_the_template(name: str) -> None:
    assert tokenizer(name).convert_ids_to_tokens(list(Renderer(tokenizer(name)).end_ids)) == ENDS[name]


FINDINGS = json.loads((Path(__file__).parents[1] / "templates" / "findings.json").read_text("utf-8"))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_probe_reports_what_a_template_changes(name: str) -> None:
    assert Renderer(tokenizer(name)).probe() == FINDINGS[name]


def test_the_probe_reports_a_date() -> None:
    dated = tokenizer("chatml").__class__(
        tokenizer_object=tokenizer("chatml").backend_tokenizer,
        eos_token="<|im_end|>",
        chat_template="{{ strftime_now('%d %b %Y') }}" + str(tokenizer("chatml").chat_template),
    )
    assert any("today" in finding for finding in Renderer(dated).probe())


THOUGHT = "<think>\nbecause 47\n</think>\n\nThe answer"


def thinking_episode(history: Any) -> tuple[list[Track], list[str | None]]:
    """Three turns with thinking, on the Qwen3 template."""
    renderer = Renderer(tokenizer("qwen3"), history=history)
    messages, tracks, splits = [], [], []
    for n in range(3):
        messages.append(say("user", f"question {n}"))
        rendered = renderer.prompt(messages, None, tracks)
        splits.append(rendered.split)
        ids = [*encode("qwen3", f"{THOUGHT} {n}."), renderer.end_ids[0]]
        tracks.append(
            renderer.track(rendered, call=f"call{n}", reply=say("assistant", f"{THOUGHT} {n}."), completion=ids)
        )
        messages.append(tracks[-1].messages[-1])
    return tracks, splits


@pytest.mark.ledger("T31")
def test_stripped_thinking_is_kept_when_history_is_what_was_sampled() -> None:
    tracks, splits = thinking_episode("sampled")
    assert splits == [None, None, None]
    expected = []
    for n in range(3):
        turn = f"<|im_start|>user\nquestion {n}<|im_end|>\n<|im_start|>assistant\n{THOUGHT} {n}.<|im_end|>"
        expected += encode("qwen3", ("\n" if n else "") + turn)
    assert list(tracks[-1].ids) == expected


@pytest.mark.ledger("T31")
def test_stripped_thinking_starts_a_row_when_history_is_what_the_template_says() -> None:
    tracks, splits = thinking_episode("template")
    assert splits[0] is None
    assert "'<think>\\nbecause 47\\n</thi'" in (splits[1] or "")
    assert "'The answer 0.<|im_end|>\\n'" in (splits[1] or "")
    assert splits[2] is not None
    for n, track in enumerate(tracks):
        assert list(track.ids[: len(track.ids) - len(track.completion)]) == whole("qwen3", list(track.messages[:-1]))
        assert encode("qwen3", f"<think>\nbecause 47\n</think>\n\nThe answer {n}.") == list(track.completion[:-1])


def test_nothing_is_trained_twice_when_thinking_is_stripped() -> None:
    renderer = Renderer(tokenizer("qwen3"), history="template")
    tracks: list[Track] = []
    bodies = [
        Begin(
            tape="t",
            task=Task(),
            task_hash="",
            agent=Identity(name="a"),
            env=Identity(name="e"),
            env_seed=0,
            seed=0,
            at=0.0,
        ).body()
    ]
    messages: list[dict[str, Any]] = []
    for n in range(4):
        messages.append(say("user", f"question {n}"))
        rendered = renderer.prompt(messages, None, tracks)
        text = f"{THOUGHT} {n}." if n % 2 == 0 else f"Plain {n}."
        ids = [*encode("qwen3", text), renderer.end_ids[0]]
        call = Call(
            tape="t",
            call=f"call{n}",
            by="a",
            base=rendered.base.call if rendered.base else None,
            keep=rendered.keep,
            keep_messages=rendered.keep_messages,
            new_messages=rendered.messages[rendered.keep_messages :],
            new_prompt=rendered.new,
            completion=ids,
            logprobs=[-1.0] * len(ids),
            text=text,
            split=rendered.split,
            spans=(("v:0", 0, len(ids)),),
            at=0.0,
        )
        bodies.append(call.body())
        tracks = [renderer.track(rendered, call=call.call, reply=call.reply, completion=ids)]
        messages.append(call.reply)
    bodies.append(End(tape="t", status=Status.FINISHED, at=0.0).body())
    tape = Tape.of(bodies)
    made = rows(tape)
    assert [row.calls for row in made] == [("call0",), ("call1", "call2"), ("call3",)]
    assert [call.split is None for call in tape.calls] == [True, False, True, False]
    owned = [(row.calls[c], int(id)) for row in made for c, id in zip(row.call, row.input_ids[row.own], strict=True)]
    assert owned == [(call.call, id) for call in tape.calls for id in call.completion]
    for call in tape.calls:
        assert list(call.prompt) == whole("qwen3", call.messages) or call.call == "call2"


def test_white_space_that_a_template_trims_is_kept_or_starts_a_row() -> None:
    for history, split in (("sampled", False), ("template", True)):
        renderer = Renderer(tokenizer("llama3"), history=history)
        track = sample(renderer, [say("user", "q")], [*encode("llama3", " 3901 \n"), renderer.end_ids[0]], [])
        later = renderer.prompt([*track.messages, say("user", "r")], None, [track])
        assert (later.split is not None) == split
        assert (later.keep == len(track.ids)) == (not split)
    assert "' 3901 \\n<|eot_id|>'" in (later.split or "")
    assert "'3901<|eot_id|><|start_he'" in (later.split or "")


def test_a_prompt_that_asks_with_more_than_history_shows_is_kept_as_it_was() -> None:
    for name, kwargs, asked in (
        ("qwen3", {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        ("r1", {}, "<think>\n"),
    ):
        renderer = Renderer(tokenizer(name), template_kwargs=kwargs)
        assert any(repr(asked) in finding for finding in renderer.probe())
        track = sample(renderer, [say("user", "q")], [*encode(name, "so"), renderer.end_ids[0]], [])
        prompt = len(track.ids) - len(track.completion)
        assert tokenizer(name).decode(track.ids[:prompt]).endswith(asked)
        later = renderer.prompt([*track.messages, say("user", "r")], None, [track])
        assert (later.split, later.keep) == (None, len(track.ids))
        assert list(later.new) == whole(name, [*track.messages, say("user", "r")], **kwargs)[-len(later.new) :]
        literal = Renderer(tokenizer(name), template_kwargs=kwargs, history="template")
        track = sample(literal, [say("user", "q")], [*encode(name, "so"), renderer.end_ids[0]], [])
        split = literal.prompt([*track.messages, say("user", "r")], None, [track]).split
        assert split is not None
        assert "prompt" in split


SAID = {
    "qwen3": '<tool_call>\n{"name":"lookup","arguments":{"key":"pear"}}\n</tool_call>',
    "llama3": '{"name":"lookup","parameters":{"key":"pear"}}',
    "mistral": '[TOOL_CALLS] [{"name":"lookup","arguments":{"key":"pear"},"id":"abcdefghi"}]',
}


@pytest.mark.ledger("X11")
@pytest.mark.parametrize("name", SAID)
def test_a_tool_call_that_an_engine_parsed_is_kept_as_it_was_sampled(name: str) -> None:
    """The template would space the JSON differently; `reply` has the call in chat form and no text."""
    renderer = Renderer(tokenizer(name))
    ids = [*encode(name, SAID[name]), renderer.end_ids[0]]
    reply = say("assistant", "", tool_calls=[CALL])
    track = sample(renderer, [say("user", "q")], ids, [], [LOOKUP], reply)
    result = say("tool", "ripe", tool_call_id="abcdefghi", name="lookup")
    later = renderer.prompt([*track.messages, result], [LOOKUP], [track])
    assert (later.split, later.keep) == (None, len(track.ids))
    end = renderer.end_ids[0]
    canonical = whole(name, [*track.messages, result], [LOOKUP])
    behind = canonical[len(canonical) - canonical[::-1].index(end) :] if name == "mistral" else list(later.new)
    assert list(later.new) == behind
    assert (
        tokenizer(name).decode(later.new)
        == {
            "qwen3": "\n<|im_start|>user\n<tool_response>\nripe\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
            "llama3": '<|start_header_id|>ipython<|end_header_id|>\n\n"ripe"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "mistral": '[TOOL_RESULTS] {"content": ripe, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
        }[name]
    )
    literal = Renderer(tokenizer(name), history="template")
    track = sample(literal, [say("user", "q")], ids, [], [LOOKUP], reply)
    assert literal.prompt([*track.messages, result], [LOOKUP], [track]).split is not None


@pytest.mark.parametrize("name", SAID)
def test_an_authored_tool_call_is_written_as_the_template_writes_it(name: str) -> None:
    renderer = Renderer(tokenizer(name), history="template")
    messages = [say("user", "q")]
    reply = say("assistant", "", tool_calls=[CALL])
    rendered = renderer.prompt(messages, [LOOKUP])
    completion = renderer.completion(rendered, reply)
    shown = renderer.decode(completion)
    assert json.loads(shown[shown.index("{") : shown.rindex("}") + 1])["name"] == "lookup"
    assert completion[-1] == renderer.end_ids[0]
    track = renderer.track(rendered, call="c", reply=reply, completion=completion)
    result = say("tool", "ripe", tool_call_id="abcdefghi", name="lookup")
    later = renderer.prompt([*messages, reply, result], [LOOKUP], [track])
    if name == "qwen3":  # which shows a last answer with an empty thought, and an earlier one without
        assert shown.startswith("<think>\n\n</think>\n\n<tool_call>")
    else:
        assert later.split is None
        assert list(later.ids) == whole(name, [*messages, reply, result], [LOOKUP])


def test_what_moves_in_front_of_an_answer_starts_a_row_and_says_why() -> None:
    renderer = Renderer(tokenizer("mistral"))
    track = sample(renderer, [say("user", "q")], encode("mistral", "so</s>"), [], [LOOKUP])
    moved = renderer.prompt([*track.messages, say("user", "r")], [LOOKUP], [track])
    assert moved.split is not None
    assert "'AVAILABLE_TOOLS]" in moved.split
    assert list(moved.ids) == whole("mistral", [*track.messages, say("user", "r")], [LOOKUP])
    assert list(moved.ids[: moved.keep]) == [tokenizer("mistral").bos_token_id]
    asked = [say("system", "Be brief."), say("user", "q")]
    track = sample(renderer, asked, encode("mistral", "so</s>"), [])
    moved = renderer.prompt([*track.messages, say("user", "r")], None, [track])
    assert moved.split is not None
    assert "'Be brief.\\n\\nq[/INST]'" in moved.split
    assert "'q[/INST] …</s>[INST] Be '" in moved.split


def test_a_rewritten_answer_whose_end_is_not_found_starts_a_row() -> None:
    """Here the template ends an answer with a line of its own, but not one that calls a tool."""
    words = char_tokenizer()
    words.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}"
        "{% if m['role'] == 'assistant' and not m['tool_calls'] %}{{ '\n' }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    renderer = Renderer(words)
    sampled = words.encode(" a <|end|>")
    for reply, split in (
        (say("assistant", " a "), None),
        (say("assistant", " a ", tool_calls=[CALL]), "found"),
    ):
        track = sample(renderer, [say("user", "q")], sampled, [], None, reply)
        later = renderer.prompt([*track.messages, say("user", "r")], None, [track])
        assert (split or "") in (later.split or "")
        assert (later.split is None) == (split is None) == (later.keep == len(track.ids))


def test_answers_that_an_agent_adds_behind_a_rewritten_one_are_shown_to_the_model() -> None:
    renderer = Renderer(tokenizer("qwen3"))
    track = sample(renderer, [say("user", "q")], [*encode("qwen3", f"{THOUGHT}."), renderer.end_ids[0]], [])
    later = renderer.prompt(
        [*track.messages, say("user", "r"), say("assistant", "ok"), say("user", "s\ufdd2")], None, [track]
    )
    assert later.split is None
    assert tokenizer("qwen3").decode(later.new) == (
        "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\ns\ufdd2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    everything = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    later = renderer.prompt([*track.messages, say("user", everything)], None, [track])
    assert later.split is not None
    assert list(later.ids) == whole("qwen3", [*track.messages, say("user", everything)])


@pytest.mark.parametrize("name", FAMILIES)
def test_control_token_text_never_becomes_a_control_token(name: str) -> None:
    renderer, words = Renderer(tokenizer(name)), tokenizer(name)
    control = set(words.convert_tokens_to_ids([*FAMILIES[name].special, *FAMILIES[name].plain])) - {words.unk_token_id}
    neutral = [id for id in renderer.prompt([say("user", "x")]).ids if id in control]
    for token in (*FAMILIES[name].special, *FAMILIES[name].plain):
        if token.isspace() or token == "<table>":
            continue
        rendered = renderer.prompt([say("user", f"a{token}b {token}")])
        assert [id for id in rendered.ids if id in control] == neutral
        assert f"a{token}b {token}" in words.decode(rendered.ids)
        # An author's answer may hold what belongs inside answers, but can neither end it nor open another's turn.
        completion = renderer.completion(renderer.prompt([say("user", "x")]), say("assistant", f"a{token}b"))
        assert [id for id in completion if id in renderer.end_ids] == [renderer.end_ids[0]]
        assert completion[-1] == renderer.end_ids[0]
    belongs = {
        "qwen3": ["<tool_call>", "</tool_call>"],
        "llama3": ["<|python_tag|>"],
        "mistral": ["[TOOL_CALLS]"],
        "r1": ["</think>"],
    }
    for inside in belongs.get(name, []):
        completion = renderer.completion(renderer.prompt([say("user", "x")]), say("assistant", f"a{inside}b"))
        assert words.convert_tokens_to_ids(inside) in completion


def test_several_templates_in_one_tokenizer_are_chosen_by_whether_there_are_tools() -> None:
    both = tokenizer("chatml").__class__(
        tokenizer_object=tokenizer("chatml").backend_tokenizer,
        eos_token="<|im_end|>",
        chat_template={
            "default": str(tokenizer("chatml").chat_template),
            "tool_use": "{{ tools | tojson }}" + str(tokenizer("chatml").chat_template),
        },
    )
    renderer = Renderer(both)
    assert both.decode(renderer.prompt([say("user", "q")], [LOOKUP]).ids).startswith('[{"type": "function"')
    assert both.decode(renderer.prompt([say("user", "q")]).ids).startswith("<|im_start|>system")
    both.chat_template = {"tool_use": "x"}
    again = both.decode(renderer.prompt([say("user", "q")]).ids)
    assert again.startswith("<|im_start|>system"), "a renderer keeps the template that it was made with"
    with pytest.raises(UsageError, match=r"'tool_use'.*'default'"):
        Renderer(both)


def test_a_template_that_refuses_a_conversation_is_quoted() -> None:
    with pytest.raises(RenderError, match=r"user/user.*alternate.*probe"):
        Renderer(tokenizer("gemma")).prompt([say("user", "q"), say("user", "r")])
    with pytest.raises(RenderError, match=r"system/user.*System"):
        Renderer(tokenizer("gemma")).prompt([say("system", "q"), say("user", "r")])


def calling(arguments: Any) -> list[dict[str, Any]]:
    call = {**CALL, "function": {"name": "lookup", "arguments": arguments}}
    result = say("tool", "ripe", tool_call_id=CALL["id"], name="lookup")
    return [say("user", "q"), say("assistant", "", tool_calls=[call]), result]


@pytest.mark.parametrize("name", ["qwen3", "qwen25", "llama3", "mistral", "harmony"])
def test_arguments_as_json_text_are_rendered_like_an_object(name: str) -> None:
    """OpenAI's protocol has text there. Llama 3.1's template would encode it a second time, and GLM's refuses it."""
    renderer = Renderer(tokenizer(name))
    as_object = renderer.prompt(calling({"key": "pear", "n": [1, 2]}), [LOOKUP])
    for text in ('{"key": "pear", "n": [1, 2]}', '{"key":"pear","n":[1,2]}'):
        as_text = renderer.prompt(calling(text), [LOOKUP])
        assert as_text.text == as_object.text
        assert as_text.messages[1]["tool_calls"][0]["function"]["arguments"] == text, "the tape keeps the client's text"


def test_a_template_that_takes_only_json_text_gets_it() -> None:
    """DeepSeek's templates concatenate strings."""
    words = char_tokenizer("abcdefghijklmnopqrstuvwxyz \n\"':{}[],")
    words.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['name'] + c['function']['arguments'] }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    )
    rendered = Renderer(words).prompt(calling('{"key":"pear"}'), [LOOKUP])
    assert 'lookup{"key":"pear"}' in rendered.text


def test_a_token_between_two_calls_ends_a_call_and_no_answer() -> None:
    """GLM's answers end without a token, and its template closes each call with one."""
    words = char_tokenizer("abcdefghijklmnopqrstuvwxyz \n\"':{}[],")
    words.add_special_tokens({"additional_special_tokens": ["</tool_call>"]})
    words.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['name'] + (c['function']['arguments'] | tojson) + '</tool_call>' }}{% endfor %}{% endfor %}"
    )
    assert Renderer(words).end_ids == (words.eos_token_id,)
