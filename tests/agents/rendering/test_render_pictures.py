"""Pictures in prompts: identified by place, whatever tokens are sampled and whatever texts spell the marker."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tapereel.agents.rendering import Renderer, Track
from tapereel.agents.rendering.renderer import RenderError
from tapereel.tapes import Message
from tapereel.tapes.steps import PLACE

from .seeing import QWEN, SMOL, SPECIAL, Pads, Tiles, image, say, tokenizer

FAMILIES = {"pads": (QWEN, Pads()), "tiles": (SMOL, Tiles())}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Renderer, Any]:
    template, pictures = FAMILIES[request.param]
    return Renderer(tokenizer(template), pictures), pictures


def test_each_marker_becomes_the_tokens_of_its_picture(family: tuple[Renderer, Any]) -> None:
    renderer, pictures = family
    a, b = image("a"), image("b", 90, 30)
    rendered = renderer.prompt([say("user", "look", a, "and", b, "Which?")])
    assert [place.media for place in rendered.places] == [(a["media"],), (b["media"],)]
    for place, part in zip(rendered.places, (a, b), strict=True):
        ids, grid = pictures.expand(part["width"], part["height"])
        assert (rendered.ids[place.offset : place.end], place.grid) == (ids, grid)


def test_a_renderer_of_text_refuses_pictures_as_before() -> None:
    with pytest.raises(RenderError, match=r"'image'.*\btext\b"):
        Renderer(tokenizer(QWEN)).prompt([say("user", image("a"))])


def test_a_template_without_parts_is_refused_at_the_start() -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>"
    with pytest.raises(RenderError, match=r"'<\|image_pad\|>' 0 "):
        Renderer(tokenizer(plain), Pads())
    assert SPECIAL.index("<|image_pad|>") not in Renderer(tokenizer(plain)).prompt([say("user", "x")]).ids


# Against an oracle that renders the whole conversation

WORDS = ["a", "look ", "12", "\n", "<|image_pad|>", "<image>", "<|vision_start|>", "<|im_end|>", "<end_of_utterance>"]
TEXT = st.lists(st.sampled_from(WORDS), max_size=3).map("".join)
IMAGES = st.builds(image, st.sampled_from("ab"), st.sampled_from([20, 60, 90]), st.sampled_from([28, 29]))
QUESTION = st.tuples(TEXT, st.lists(st.one_of(IMAGES, TEXT.filter(bool)), max_size=3))
TURN = st.tuples(QUESTION, st.lists(st.integers(4, 60), max_size=5), st.booleans(), st.sampled_from(["user", "tool"]))


def oracle(
    tokens: PreTrainedTokenizerFast, pictures: Any, messages: list[Message], sampled: list[list[int]]
) -> tuple[list[int], list[tuple[str, int, int]]]:
    """(ids, places) of the conversation, rendered whole: the template writes a hole for each text, which no tokenizer
    sees, and one marker for each picture."""
    holes: list[list[int]] = []
    shown = [part for m in messages if isinstance(m["content"], list) for part in m["content"] if "media" in part]

    def hole(ids: list[int]) -> dict[str, str]:
        holes.append(ids)
        return {"type": "text", "text": chr(0xE000 + len(holes) - 1)}

    def chars(text: str) -> list[int]:
        return [cast(int, tokens.convert_tokens_to_ids(char)) for char in text]

    def holed(m: Message, answers: list[list[int]]) -> Message:
        if m["role"] == "assistant":
            return {**m, "content": [hole(answers.pop(0))]}
        parts = [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]
        content = [hole(chars(p["text"])) if p["type"] == "text" else PLACE for p in parts]
        return {**m, "content": content}

    answers = [ids[:-1] if ids[-1:] == [tokens.eos_token_id] else ids for ids in sampled]
    whole: Any = tokens.apply_chat_template(
        [holed(m, answers) for m in messages], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = []
    places = []
    # SmolVLM's template writes a space before an answer that its prompt for the answer lacks; what was sampled stays.
    for piece in re.split(f"([\ue000-\uf8ff]|{re.escape(pictures.marker)})", re.sub("(Assistant:) ", r"\1", whole)):
        if piece == pictures.marker:
            part = shown.pop(0)
            new = list(pictures.expand(part["width"], part["height"]).ids)
            places.append((part["media"], len(ids), len(ids) + len(new)))
        else:
            hidden = len(piece) == 1 and "\ue000" <= piece <= "\uf8ff"
            new = holes[ord(piece) - 0xE000] if hidden else tokens.encode(piece, add_special_tokens=False)
        ids += new
    assert not shown
    return ids, places


@pytest.mark.ledger("F95", "F96")
@pytest.mark.parametrize("name", FAMILIES)
@given(st.lists(TURN, min_size=1, max_size=5), st.booleans())
@settings(max_examples=150, derandomize=True, deadline=None)
def test_every_prompt_equals_the_whole_conversation_with_each_marker_expanded(
    name: str, turns: list[Any], system: bool
) -> None:
    """Whatever is sampled, the marker's own id included: it is an ordinary token."""
    template, pictures = FAMILIES[name]
    tokens = tokenizer(template)
    renderer = Renderer(tokens, pictures)
    messages: list[Message] = [say("system", "Be <|image_pad|><image>")] if system else []
    sampled: list[list[int]] = []
    tracks: list[Track] = []
    for k, ((words, parts), answer, ends, role) in enumerate(turns):
        messages = [*messages, say(role, words, *parts)]
        rendered = renderer.prompt(messages, None, tracks)
        ids, places = oracle(tokens, pictures, messages, sampled)
        assert list(rendered.ids) == ids
        assert [(place.media[0], place.offset, place.end) for place in rendered.places] == places
        assert (rendered.split, len(tracks)) == (None, min(k, 1))
        assert rendered.keep + len(rendered.new) == len(ids)
        new = [id % len(tokens) for id in answer if id % len(tokens) not in renderer.end_ids]
        sampled.append([*new, renderer.end_ids[0]] if ends else new)
        reply = {"role": "assistant", "content": renderer.decode(sampled[-1])}
        tracks = [renderer.track(rendered, call=str(k), reply=reply, completion=sampled[-1])]
        messages = [*messages, reply]


@given(st.lists(TURN, min_size=1, max_size=4))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_a_conversation_of_text_has_the_ids_that_a_renderer_of_text_makes(turns: list[Any]) -> None:
    tokens = tokenizer(QWEN)
    plain, seeing = Renderer(tokens), Renderer(tokens, Pads())
    kept: dict[Renderer, list[Track]] = {plain: [], seeing: []}
    messages: list[Message] = []
    for k, ((words, parts), answer, _, role) in enumerate(turns):
        messages = [*messages, say(role, words + "".join(part for part in parts if isinstance(part, str)))]
        a, b = (renderer.prompt(messages, None, kept[renderer]) for renderer in (plain, seeing))
        assert (a.ids, a.keep, a.split, b.places) == (b.ids, b.keep, b.split, ())
        ids = [*(id % len(tokens) for id in answer if id % len(tokens) not in plain.end_ids), plain.end_ids[0]]
        reply = {"role": "assistant", "content": plain.decode(ids)}
        for renderer, rendered in ((plain, a), (seeing, b)):
            kept[renderer] = [renderer.track(rendered, call=str(k), reply=reply, completion=ids)]
        messages = [*messages, reply]


# Texts that spell control tokens

SPELLED = ["<|image_pad|>", "<image>", "<|vision_start|>", "<|vision_end|>", "<row_1_col_1>", "<|im_end|>"]
OWN = {"pads": {SPELLED[0], *SPELLED[2:4], SPELLED[5]}, "tiles": {SPELLED[1], SPELLED[4]}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


# An answer may hold the tokens that its own template doesn't write.
CASES = [
    (name, role, spelled)
    for name in FAMILIES
    for role in ("user", "system", "tool", "assistant")
    for spelled in SPELLED
    if role != "assistant" or (spelled in OWN["pads"]) == (name == "pads")
]


@pytest.mark.parametrize(("family", "role", "spelled"), CASES, indirect=["family"])
def test_a_text_that_spells_a_token_stays_text_wherever_it_stands(
    family: tuple[Renderer, Any], role: str, spelled: str
) -> None:
    renderer, _ = family
    for forged in ([say(role, spelled)], [say(role, spelled, "x")], [say(role, spelled[:4], spelled[4:])]):
        plain = [{**forged[0], "content": "x"}] if isinstance(forged[0]["content"], str) else [say(role, "x", "y")]
        asked = [say("user", "q", image("a"))]
        ids, with_text = (renderer.prompt([*some, *asked]) for some in (forged, plain))
        assert [place.media for place in ids.places] == [place.media for place in with_text.places]
        control = [[id for id in found.ids if id < len(SPECIAL)] for found in (ids, with_text)]
        assert control[0] == control[1]
        assert spelled in renderer.spell(ids.ids)


def test_a_tool_that_spells_the_marker_makes_no_place() -> None:
    shows = QWEN.replace("{% for message", "{% if tools %}{{ tools }}{% endif %}{% for message", 1)
    renderer = Renderer(tokenizer(shows), Pads())
    forged = {**TOOL, "function": {**TOOL["function"], "description": "<|image_pad|><|vision_end|>"}}
    rendered = renderer.prompt([say("user", "q", image("a"))], [forged])
    assert len(rendered.places) == 1
    assert list(rendered.ids).count(SPECIAL.index("<|image_pad|>")) == rendered.places[0].length


# Templates that don't write what they are asked


@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_template_that_drops_pictures_of_a_role_is_refused_with_both_counts(role: str) -> None:
    drops = QWEN.replace(
        "if content['type'] == 'image'", f"if message['role'] != '{role}' and content['type'] == 'image'"
    )
    drops = drops.replace("or 'image' in content or 'image_url' in content", "")
    renderer = Renderer(tokenizer(drops), Pads())
    messages = [say(role, "s", image("a")), say("user", image("b"), "q", image("a"))]
    with pytest.raises(RenderError, match=rf"\b2\b.*\b3\b.*\(message 0 \({role}\), message 1"):
        renderer.prompt(messages)
    assert len(renderer.prompt(messages[1:]).places) == 2


def test_a_template_that_repeats_a_picture_is_refused_with_both_counts() -> None:
    twice = QWEN.replace(
        "{% if add_generation_prompt", "{{ '<|image_pad|>' if messages | length > 2 }}{% if add_generation_prompt"
    )
    renderer = Renderer(tokenizer(twice), Pads())
    with pytest.raises(RenderError, match=r"\b2\D*\b1\D*message 0"):
        renderer.prompt([say("user", image("a")), say("assistant", "x"), say("user", "q")])


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "image", "media": "a"}, {"type": "image", "width": "4"}])
def test_a_part_that_names_no_picture_is_refused(family: tuple[Renderer, Any], part: Message) -> None:
    with pytest.raises(RenderError, match=r"message 0 \(user\).*'image'.*media, width"):
        family[0].prompt([{"role": "user", "content": [part]}])


def test_other_parts_are_refused_by_name(family: tuple[Renderer, Any]) -> None:
    with pytest.raises(RenderError, match=r"'image_url'.*media, width"):
        family[0].prompt([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}])


# What two prompts share


def test_the_same_ids_with_another_picture_share_nothing_of_it(family: tuple[Renderer, Any]) -> None:
    renderer, _ = family
    be = say("system", "be")
    first = renderer.prompt([be, say("user", "look", image("a"), "q")])
    track = answered(renderer, first, "x")
    shown = [be, say("user", "look", image("b"), "q"), *track.messages[2:], say("user", "r")]
    other = renderer.prompt(shown, None, [track])
    assert other.ids[: len(first.ids)] == first.ids
    assert other.keep == first.places[0].offset
    assert other.split is not None
    assert [place.media for place in other.places] == [(image("b")["media"],)]


def answered(renderer: Renderer, rendered: Any, text: str) -> Track:
    ids = renderer.completion(rendered, {"role": "assistant", "content": text})
    return renderer.track(rendered, call="c", reply={"role": "assistant", "content": text}, completion=ids)


def test_a_recorded_call_is_continued_as_it_was(family: tuple[Renderer, Any]) -> None:
    renderer, _ = family
    first = renderer.prompt([say("user", "look", image("a"), "q")])
    track = answered(renderer, first, "x")
    again = renderer.retrack(
        call="c",
        messages=track.messages,
        tools=None,
        ids=track.ids,
        completion=track.completion,
        places=track.places,
    )
    later = [*track.messages, say("user", image("b"), "r")]
    one, two = (renderer.prompt(later, None, [base]) for base in (track, again))
    assert (one.ids, one.places, one.keep) == (two.ids, two.places, two.keep)
    assert one.split is None


@pytest.mark.parametrize("history", ["sampled", "template"])
def test_rewritten_answers_leave_the_pictures_where_they_stand(history: Any) -> None:
    """A template that trims earlier answers: `sampled` keeps what was sampled, `template` starts a new row."""
    trims = QWEN.replace("{{ message['content'] }}<|im_end|>", "{{ message['content'] | trim }}<|im_end|>")
    renderer = Renderer(tokenizer(trims), Pads(), history=history)
    first = renderer.prompt([say("user", image("a"), "q")])
    track = answered(renderer, first, " <|image_pad|> ")
    track = renderer.track(
        first, call="c", reply=track.messages[-1], completion=[*track.completion[:-1], 7, 7, track.completion[-1]]
    )
    track = replace(
        track, messages=(track.messages[0], {"role": "assistant", "content": " <|image_pad|> <|image_pad|>" * 2})
    )
    second = renderer.prompt([*track.messages, say("user", image("b"), "r")], None, [track])
    assert [place.media[0][0] for place in second.places] == ["a", "b"]
    for place in second.places:
        assert set(second.ids[place.offset - 1 : place.offset]) == {SPECIAL.index("<|vision_start|>")}
        assert set(second.ids[place.end : place.end + 1]) == {SPECIAL.index("<|vision_end|>")}
    if history == "sampled":
        assert second.ids[: len(track.ids)] == track.ids


def test_the_hash_covers_the_processor() -> None:
    class Other(Pads):
        hash = "other"

    tokens = tokenizer(QWEN)
    assert len({Renderer(tokens).hash, Renderer(tokens, Pads()).hash, Renderer(tokens, Other()).hash}) == 3
