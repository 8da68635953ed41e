"""Random conversations: what is recorded as deltas is what the engine saw, and every completion has one place.

Several agents speak in turn, each with branches, cut and cancelled answers, re-asked prompts and fresh conversations;
the sampled ids are random, so they are neither canonical tokenisations nor even valid text.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.rendering import Rendered, Renderer, Track
from tapereel.finetune import rows
from tapereel.tapes import Call, Message, Status, Tape, Task
from tapereel.tapes.arrays import ints
from tapereel.tapes.records import Begin, End, Identity, Tools

from ..families import FAMILIES, tokenizer

QUICK = settings(max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))
WORDS = [
    "a",
    "the pear",
    " 12",
    "\n",
    "\n\n",
    "  ",
    "é",
    "東京",
    "🙂",
    "🚀",
    "\ufdd0",
    "\ufffd",
    "</think>",
    "<think>",
    "<|end|>",
    "<|im_end|>",
    "<|im_start|>system\n",
    "<|eot_id|>",
    "<｜User｜>",
    "[/INST]",
    "</s>",
    "<|user|>",
    "<end_of_turn>",
    "<tool_response>",
    "<table>",
    "{{ bos_token }}",
    "Ax",
    "Qx",
]
TEXT = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "F <|end|>", "parameters": {"properties": {}}}}]


@st.composite
def a_turn(draw: st.DrawFn) -> dict[str, Any]:
    """One call: who asks, from where in which conversation, what, with which tools, and what is sampled."""
    return {
        "path": draw(st.sampled_from(["main", "main", "main/helper"])),
        "start": draw(st.sampled_from(["leaf", "leaf", "leaf", "earlier", "again", "fresh"])),
        "which": draw(st.integers(0, 7)),
        "says": draw(TEXT),
        "tools": draw(st.sampled_from([None, None, None, TOOLS])),
        "sampled": draw(st.lists(st.integers(0, 10**6), max_size=6)),
        "end": draw(st.sampled_from([True, True, False])),
    }


@dataclass
class Episode:
    """What a door would do with a renderer: tracks by path, and a tape's call records."""

    renderer: Renderer
    size: int
    """Ids that the engine samples from."""
    tracks: dict[str, list[Track]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    seen: list[array[int]] = field(default_factory=list)
    """The prompt ids that the engine was given, by call."""
    asked: list[tuple[Message, ...]] = field(default_factory=list)

    def play(self, turn: dict[str, Any]) -> Rendered:
        tracks = self.tracks.setdefault(turn["path"], [])
        messages = self._messages(turn, tracks)
        rendered = self.renderer.prompt(messages, turn["tools"], tracks)
        ends = self.renderer.end_ids
        sampled = [id % self.size for id in turn["sampled"] if id % self.size not in ends]
        completion = ints([*sampled, ends[turn["which"] % len(ends)]] if turn["end"] else sampled)
        call = Call(
            tape="t",
            call=f"call{len(self.calls)}",
            by=turn["path"],
            base=rendered.base.call if rendered.base is not None else None,
            keep=rendered.keep,
            keep_messages=rendered.keep_messages,
            new_messages=rendered.messages[rendered.keep_messages :],
            new_prompt=rendered.new,
            completion=completion,
            logprobs=[-0.5] * len(completion),
            text=self.renderer.decode(completion),
            spans=(("v:0", 0, len(completion)),),
            finish="stop" if turn["end"] else "cancelled",
            tools=Tools(hash="h") if turn["tools"] else None,
            split=rendered.split,
            at=0.0,
        )
        track = self.renderer.track(rendered, call=call.call, reply=call.reply, completion=completion)
        if rendered.base is not None and rendered.split is None and turn["which"] % 2:
            tracks.remove(rendered.base)
        tracks.append(track)
        self.calls.append(call)
        self.seen.append(rendered.ids)
        self.asked.append(rendered.messages)
        return rendered

    def _messages(self, turn: dict[str, Any], tracks: list[Track]) -> tuple[Message, ...]:
        question: Message = {"role": "user", "content": turn["says"]}
        if turn["start"] == "fresh" or not tracks:
            return (question,)
        track = tracks[-1] if turn["start"] == "leaf" else tracks[turn["which"] % len(tracks)]
        if turn["start"] == "again":
            return track.messages[:-1]
        kept = track.messages
        if turn["start"] == "earlier":
            kept = kept[: len(kept) // 4 * 2]
        return (*kept, question)

    def tape(self) -> Tape:
        begin = Begin(
            tape="t",
            task=Task(),
            task_hash="",
            agent=Identity(name="main"),
            env=Identity(name="e"),
            env_seed=0,
            seed=0,
            at=0.0,
        )
        end = End(tape="t", status=Status.FINISHED, at=0.0)
        return Tape.of([record.body() for record in (begin, *self.calls, end)])


def check(episode: Episode) -> None:
    """The tape, read back from its bytes, says what the engine saw; each completion is own in exactly one row."""
    tape = episode.tape()
    for call, ids, messages in zip(tape.calls, episode.seen, episode.asked, strict=True):
        assert call.prompt == ids
        assert tuple(call.messages) == messages
    made = rows(tape)
    owned = [(row.calls[c], int(id)) for row in made for c, id in zip(row.call, row.input_ids[row.own], strict=True)]
    assert sorted(owned) == sorted((call.call, id) for call in episode.calls for id in call.completion or ())
    length = {
        call.call: len(ids) + len(call.completion or ()) for call, ids in zip(episode.calls, episode.seen, strict=True)
    }
    spoke: set[str] = set()
    for call in episode.calls:
        extends = call.base is not None and call.keep == length[call.base]
        assert (call.split is None) == (extends or call.by not in spoke)
        spoke.add(call.by)


def renderers() -> list[Any]:
    made = [pytest.param("tiny", history, id=f"tiny-{history}") for history in ("sampled", "template")]
    return made + [
        pytest.param(name, history, id=f"{name}-{history}") for name in FAMILIES for history in ("sampled", "template")
    ]


def make(name: str, history: Any) -> tuple[Renderer, int]:
    words = char_tokenizer() if name == "tiny" else tokenizer(name)
    return Renderer(words, history=history), len(words)


@pytest.mark.ledger("T30", "T31")
@pytest.mark.parametrize(("name", "history"), renderers())
def test_concatenated_deltas_are_what_the_engine_saw(name: str, history: Any) -> None:
    renderer, size = make(name, history)

    @QUICK
    @given(st.lists(a_turn(), min_size=1, max_size=9))
    def run(turns: list[dict[str, Any]]) -> None:
        episode = Episode(renderer, size)
        for turn in turns:
            episode.play(turn)
        check(episode)

    run()


@QUICK
@given(st.lists(a_turn(), min_size=1, max_size=9))
def test_on_the_tiny_template_every_prompt_is_written_down_by_hand(turns: list[dict[str, Any]]) -> None:
    words = char_tokenizer()
    episode = Episode(Renderer(words), len(words))

    def spelled(text: str) -> list[int]:
        return [words.unk_token_id if (id := words.convert_tokens_to_ids(char)) is None else id for char in text]

    held: dict[str, list[int]] = {}
    for turn in turns:
        rendered = episode.play({**turn, "tools": None})
        spliced = rendered.base if rendered.split is None else None
        expected = list(held[spliced.call]) if spliced is not None else []
        if spliced is not None and rendered.keep_messages == len(spliced.messages) and expected[-1] != 6:
            expected.append(6)
        for message in rendered.messages[rendered.keep_messages if spliced is not None else 0 :]:
            role = words.convert_tokens_to_ids(f"<|{message['role']}|>")
            expected += [role, *spelled(message["content"]), 6]
        # A prompt that is asked again after a call that sampled nothing asks already.
        asks = spliced is not None and rendered.keep_messages < len(spliced.messages)
        assert list(rendered.ids) == (expected if asks else [*expected, 4])
        held[episode.calls[-1].call] = [*rendered.ids, *(episode.calls[-1].completion or ())]


@pytest.mark.ledger("T14", "T31")
@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "mistral", "gemma", "llama2", "phi3"])
def test_what_is_added_is_what_the_whole_conversation_has_behind_the_answer(name: str) -> None:
    """Against transformers, which encodes the whole conversation at once: behind the control token that ends the last
    answer its ids and the spliced ones are the same, and in front of it the sampled ids stand as they were."""
    words, family = tokenizer(name), FAMILIES[name]
    renderer = Renderer(words)
    end = renderer.end_ids[0]
    control = set(words.convert_tokens_to_ids([*family.special, *family.plain]))
    unmarked = st.lists(
        st.sampled_from([word for word in WORDS if not any(c in word for c in "<[\ufdd0")]), max_size=5
    ).map("".join)

    @QUICK
    @given(
        st.lists(
            st.tuples(unmarked, st.lists(st.integers(0, len(words) - 1), max_size=6), st.booleans()),
            min_size=2,
            max_size=5,
        )
    )
    def run(turns: list[tuple[str, list[int], bool]]) -> None:
        messages: list[Message] = []
        tracks: list[Track] = []
        for says, sampled, ended in turns:
            messages.append({"role": "user", "content": says})
            rendered = renderer.prompt(messages, None, tracks)
            if tracks:
                behind = words.apply_chat_template(
                    messages, tokenize=True, return_dict=False, add_generation_prompt=True
                )
                ends = words.apply_chat_template(messages[:-1], tokenize=True, return_dict=False).count(end)
                place = [at for at, id in enumerate(behind) if id == end][ends - 1]
                was_cut = tracks[0].completion[-1:] != array("i", [end])
                closing = words.encode("</s> </s>")[1:-1] if name == "llama2" and was_cut else []
                assert list(rendered.new) == [*closing, *behind[place + (not was_cut) :]]
                assert list(rendered.ids[: rendered.keep]) == list(tracks[0].ids)
                assert rendered.split is None
            ids = [id for id in sampled if id not in control] + ([end] if ended else [])
            reply = {"role": "assistant", "content": renderer.decode(ids)}
            tracks = [renderer.track(rendered, call="c", reply=reply, completion=ids)]
            messages.append(reply)

    run()


@pytest.mark.parametrize("name", ["tiny", *FAMILIES])
def test_no_content_makes_a_control_token(name: str) -> None:
    """The control tokens of a prompt are those of the same conversation with harmless content."""
    renderer, _ = make(name, "sampled")
    words = char_tokenizer() if name == "tiny" else tokenizer(name)
    control = {
        id
        for id, token in words.added_tokens_decoder.items()
        if token.special or token.content in str(words.chat_template)
    } - {words.unk_token_id}
    pieces = [
        piece
        for token in words.added_tokens_decoder.values()
        for piece in (token.content, token.content[:3], token.content[3:])
        if piece
    ]
    content = st.lists(st.sampled_from([*pieces, "a", " ", "\ufdd0", "1", "\n"]), max_size=6).map("".join)

    @QUICK
    @given(content, content)
    def run(one: str, two: str) -> None:
        def controls(*contents: str) -> list[int]:
            turns = zip(("user", "assistant", "user"), contents, strict=True)
            prompt = renderer.prompt([{"role": role, "content": content} for role, content in turns])
            return [id for id in prompt.ids if id in control]

        assert controls(one, "x", two) == controls("x", "x", "x")
        rendered = renderer.prompt([{"role": "user", "content": one}])
        completion = renderer.completion(rendered, {"role": "assistant", "content": two})
        assert [id for id in completion if id in renderer.end_ids] == list(completion[-1:])

    run()
