"""Turns conversations into prompts. A prompt keeps the ids of an earlier call and adds new ids for everything that came
after it.

The template is rendered in full for every prompt, because only the full text shows whether the template rewrote
history. If it didn't, the prompt keeps the ids of the earlier prompt and of the *sampled* completion, and only the text
after them is encoded. Encoding sampled text again could give other ids, and training would then use the wrong tokens.
If the template did rewrite history, the setting `history` decides what happens:

- `sampled` keeps the sampled ids if only earlier answers were rewritten (thinking dropped, white space trimmed). After
  any other change (tools, system prompt, observations), a new row starts.
- `template` starts a new row after every rewrite, so that the model always reads exactly what the template writes.

`Rendered.split` says why a new row starts. If a length limit or a cancellation cut an answer off, the next prompt adds
the text that should have ended the answer, as context. The completion itself keeps exactly the sampled ids.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import JsonValue

from ...tapes.arrays import ints
from ...tapes.common.plain_json import read_plain
from ...tapes.messages import frames_of, video_in
from ...tapes.places import Place, keys, shared_length
from ...tapes.records import Message
from ...tapes.steps import PLACES, content_parts
from .codec import (
    ChatTokenizer,
    Codec,
    RenderError,
    digest,
    plain,
)
from .incremental_decoder import IncrementalDecoder
from .response_reader import choose_reader
from .response_templates import FORMATS, format_of
from .template import EXAMPLE_CALL, EXAMPLE_TOOL, Template, template_text
from .tool_calls import CallReader, CallsRead

if TYPE_CHECKING:
    from ..vision.vision import PictureTokens

log = logging.getLogger(__name__)

_BLANKS = "".join(map(chr, range(0xFDD2, 0xFDF0)))
"""Unicode noncharacters. One of them replaces the text of answers in comparisons that must ignore this text."""

KEPT = 32
"""Number of first prompts that a renderer keeps."""
SHOWN = 120
"""Maximum characters of a call that a sentence quotes."""

_REPLACE = "replace chat_template.jinja in the model's folder with a template that shows them"
_ASKED: tuple[Message, ...] = ({"role": "user", "content": "Qx"},)

__all__ = ["RenderError", "Rendered", "Renderer", "Track"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Track:
    """A conversation that ends with the answer to one call. Created by `Renderer.track` or `Renderer.retrack`."""

    call: str
    """Id of the call that gave the last answer."""
    messages: tuple[Message, ...]
    """The conversation, including the last answer."""
    ids: array[int]
    """All ids (int32), first the prompt's and then the completion's."""
    completion: array[int]
    """The sampled ids (int32) at the end of `ids`. The last one ends the turn, unless the answer was cut off."""
    tools: tuple[dict[str, JsonValue], ...] | None
    """The tools that the model was offered, or None if there were no tools."""
    text: str
    """The prompt as the template rendered it, with marks wherever content has the text of a control token."""
    marked: tuple[Message, ...]
    """`messages` with marks wherever they have the text of a control token."""
    marked_tools: Any
    """`tools` with marks wherever they have the text of a control token."""
    places: tuple[Place, ...] = ()
    """Where pictures are in `ids`, in order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rendered:
    """One call's prompt, as the difference from an earlier call: ids = base.ids[:keep] + new."""

    base: Track | None
    """The earlier call's track, or None if the prompt shares nothing with an earlier call."""
    keep: int
    """Number of leading ids shared with the base. If all of the base's ids are shared, the call extends the base. If
    not, a new row starts, and sharing ids only saves storage."""
    keep_messages: int
    """Number of leading messages shared with the base."""
    ids: array[int]
    """All prompt ids (int32)."""
    new: array[int]
    """The ids (int32) after the shared ones."""
    split: str | None
    """Why the call starts a new row. None if it extends the base, or if there were no tracks to extend."""
    messages: tuple[Message, ...]
    """All messages in the prompt."""
    tools: tuple[dict[str, JsonValue], ...] | None
    text: str
    """The prompt as the template rendered it, with marks as in `Track.text`."""
    marked: tuple[Message, ...]
    """The prompt's messages, with marks as in `Track.marked`."""
    marked_tools: Any
    cut: int = 0
    """Number of tokens by which the prompt is shorter than the conversation's, because messages were left out."""
    cut_messages: int = 0
    """Number of messages that were left out. `messages` doesn't contain them."""
    places: tuple[Place, ...] = ()
    """Where pictures are in `ids`, in order."""


class Renderer:
    """Turns conversations into token ids, and completions into text, for one tokenizer and its chat template.

    Callers keep the tracks, so a renderer has no conversation of its own. Threads and episodes can share it.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        pictures: PictureTokens | None = None,
        *,
        history: Literal["sampled", "template"] = "sampled",
        special_text: Literal["split", "refuse"] = "split",
        template_kwargs: Mapping[str, JsonValue] | None = None,
        end_tokens: Sequence[str] = (),
        response_template: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """`pictures` knows the model's tokens for pictures and videos. If it is None, messages with pictures raise
        RenderError. `template_kwargs`, such as `{"enable_thinking": False}`, are passed to the template. `end_tokens`
        are further tokens that end an answer, in addition to the template's own end token and the end of sequence. For
        Llama 3 with tools, this is `("<|eom_id|>",)`. `response_template` describes how the model writes calls and
        thoughts. If it is None, the tokenizer's own is used, or a known one that fits the chat template."""
        for name, value, known in (
            ("history", history, ("sampled", "template")),
            ("special_text", special_text, ("split", "refuse")),
        ):
            if value not in known:
                raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(map(repr, known))}")
        self.history = history
        self.special_text = special_text
        self.template_kwargs: Mapping[str, JsonValue] = dict(template_kwargs or {})
        """The arguments that are passed to the template along with messages and tools."""
        self._kept = lru_cache(KEPT)(self._prompt_of)
        self._special = tokenizer.special_tokens_map
        self._codec = Codec(tokenizer, template_text(tokenizer), special_text=special_text)
        self._template = Template(tokenizer, self._codec, template_kwargs or {}, end_tokens)
        own, self._set = getattr(tokenizer, "response_template", None), response_template is not None
        self.reader: CallReader = choose_reader(
            response_template, own, template_text(tokenizer), self._codec.control, raw=self._template.writes_raw
        )
        """Reads calls and thoughts in the model's answers."""
        self.format = format_of(template_text(tokenizer), self._codec.control)
        """How the model's family writes calls and content."""
        hermes = FORMATS["hermes"]
        named = self.format is not hermes or hermes.marks[0] in template_text(tokenizer)
        self._known = self._set or own is not None or named
        """Whether the format of calls is known. If not, `reader` reads Hermes' format."""
        self._named = getattr(tokenizer, "name_or_path", None) or "the model"
        self._told_of_lost = False
        self.offered = False
        """Whether tools were offered. The first time, warnings name what the model doesn't see, or what isn't read."""
        self.pictures = pictures
        """Knows the model's tokens for pictures and videos. None if the model can't read pictures."""
        self.marker: int | None = None if pictures is None else self._codec.control.get(pictures.marker)
        """The id that the template writes once for each picture, before the picture's tokens replace it."""
        self._markers: dict[int, str] = {}
        """The kind of place that each marker stands for (`image` or `video`), by the marker's id."""
        framing = (
            self._template.framing if pictures is None else self._template.framing | self._around_a_picture(pictures)
        )
        self._framing = self._codec.pattern(framing)
        self.end_ids: tuple[int, ...] = self._template.end_ids
        """Ids that end an answer. The template's own comes first."""
        self._before_end = self._template.ending.removesuffix(self._template.end_text)
        self.tokenizer_hash: str = self._codec.hash
        """SHA-256 (hex) of the tokenizer."""
        self.template_hash: str = self._template.hash
        """SHA-256 (hex) of the chat template and the arguments passed to it."""
        seen = [] if pictures is None else [pictures.hash]
        self.hash: str = digest(self.tokenizer_hash, self.template_hash, special_text, *seen)
        """SHA-256 (hex) of everything that determines the ids of authored text, which no model sampled."""

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, JsonValue]] | None = None,
        tracks: Sequence[Track] = (),
    ) -> Rendered:
        """Render the prompt for the next answer in the conversation `messages`. If possible, its ids continue the track
        that shares the most messages with this conversation.

        All attempts at a task begin with the same prompt. So the renderer keeps the last prompts that it rendered
        without tracks, unless the template writes the date.
        """
        messages, tools = tuple(messages), tuple(tools) if tools else None
        if tools and not self.offered:
            self.offered = True
            for fault in self._tool_faults():
                log.warning("%s", fault)
        if tracks or self._template.dated:
            return self._prompt(messages, tools, tracks)
        try:
            asked = json.dumps((messages, tools))
        except TypeError:  # not JSON: the template may refuse it with a reason
            return self._prompt(messages, tools)
        found = self._kept(asked)
        return replace(found, messages=messages, tools=tools, ids=found.ids[:], new=found.new[:])

    def warn_of_lost(self, rendered: Rendered) -> None:
        """Log a warning the first time that a run's prompt has characters that the tokenizer has no token for."""
        if self._told_of_lost or self._codec.unknown is None or self._codec.unknown not in rendered.new:
            return
        text = "".join(_texts(rendered.messages[rendered.keep_messages :]))
        if lost := self._codec.lost(text):
            self._told_of_lost = True
            shown = ", ".join(map(repr, lost[:5])) + ", ..." * (len(lost) > 5)
            unknown = self._codec.token(self._codec.unknown)
            log.warning("%s has no token for %s, and reads %s in the prompt instead", self._named, shown, unknown)

    def _prompt_of(self, asked: str) -> Rendered:
        """Render the prompt for messages and tools that are written as JSON."""
        messages, tools = json.loads(asked)
        return self._prompt(tuple(messages), tools and tuple(tools))

    def _prompt(
        self,
        messages: tuple[Message, ...],
        tools: tuple[dict[str, JsonValue], ...] | None,
        tracks: Sequence[Track] = (),
    ) -> Rendered:
        base, shared = _longest(messages, tools, tracks)
        marked, marked_tools = self._mark(messages, tools, base, shared)
        if self._template.needs_calls:
            marked = self._with_calls(messages, marked, tools)
        text = self._template.render(marked, marked_tools)
        pictures = self._pictures_of(marked, text)
        tail, split = None, None
        if base is not None:
            tail, split = self._continue(base, shared, messages, tools, marked, marked_tools, text)
        elif tracks:
            split = _unshared(messages, len(tracks))
        if base is not None and tail is not None:
            keep = len(base.ids)
            new, places = self._expanded(self._codec.encode(tail, after=self.end_ids[0]), pictures, keep)
            ids, places = base.ids + new, base.places + places
        else:
            ids, places = self._expanded(self._codec.encode(text), pictures, 0)
            keep = _shared_ids(base, ids, places)
            new = ids[keep:]
            if base is not None and keep == len(base.ids):
                split = None
        return Rendered(
            base=base,
            keep=keep,
            keep_messages=shared,
            ids=ids,
            new=new,
            split=split,
            messages=messages,
            tools=tools,
            text=text,
            marked=marked,
            marked_tools=marked_tools,
            places=places,
        )

    def track(self, rendered: Rendered, *, call: str, reply: Message, completion: Sequence[int]) -> Track:
        """Return the track after `completion` was sampled for `rendered`. Later prompts show this answer as `reply`."""
        completion = ints(completion)
        return Track(
            call=call,
            messages=(*rendered.messages, reply),
            ids=rendered.ids + completion,
            completion=completion,
            tools=rendered.tools,
            text=rendered.text,
            marked=(*rendered.marked, self._mark_one(reply, len(rendered.messages))),
            marked_tools=rendered.marked_tools,
            places=rendered.places,
        )

    def retrack(
        self,
        *,
        call: str,
        messages: Sequence[Message],
        tools: Sequence[dict[str, JsonValue]] | None,
        ids: array[int],
        completion: array[int],
        places: tuple[Place, ...] = (),
    ) -> Track:
        """Return a recorded call's track. `messages` must include the reply, and `ids` must include the completion."""
        messages, tools = tuple(messages), tuple(tools) if tools else None
        marked, marked_tools = self._mark(messages, tools, None, 0)
        if self._template.needs_calls:
            marked = self._with_calls(messages, marked, tools)
        return Track(
            call=call,
            messages=messages,
            ids=ids,
            completion=completion,
            tools=tools,
            marked=marked,
            marked_tools=marked_tools,
            text=self._template.render(marked[:-1], marked_tools),
            places=places,
        )

    def completion(self, rendered: Rendered, reply: Message) -> array[int]:
        """Return the ids that an engine would have sampled for `reply`, including the id that ends the turn. Used for
        text that no model sampled."""
        said = self._mark_one(reply, len(rendered.messages))
        full = self._template.render((*rendered.marked, said), rendered.marked_tools, prompt=False)
        ending = self._template.ending
        if full.startswith(rendered.text):
            body = full[len(rendered.text) :]
            content = said.get("content")
            if not ending and isinstance(content, str) and body.startswith(content):
                body = content
            body = body.partition(ending)[0] if ending else body
        elif not reply.get("tool_calls") and isinstance(said.get("content"), str):
            body = said["content"]
        else:
            raise RenderError(
                "the chat template shows the last answer's tool calls in another place than where it "
                f"asks for an answer ({rendered.text[-40:]!r} is not in {full[-200:]!r}); give the "
                "answer as plain content, in the form in which the model writes tool calls"
            )
        if any(body.endswith(self._codec.token(end)) for end in self.end_ids):
            ending = ""  # a tool call may end differently
        ids = self._codec.encode(body + ending, after=rendered.ids[-1] if rendered.ids else None)
        return ints(ids if ids[-1:] and ids[-1] in self.end_ids else [*ids, self.end_ids[0]])

    def authored(
        self, messages: Sequence[Message], reply: Message, tools: Sequence[dict[str, JsonValue]] | None = None
    ) -> tuple[array[int], array[int], tuple[Place, ...]]:
        """Return (prompt ids, completion ids, places of pictures in the prompt) for an answer that no model sampled."""
        rendered = self.prompt(messages, tools)
        return rendered.ids, self.completion(rendered, reply), rendered.places

    def decode(self, ids: Sequence[int]) -> str:
        """Return a completion's text without the tokens that end the turn. Other control tokens are included."""
        n = len(ids)
        while n and ids[n - 1] in self.end_ids:
            n -= 1
        text = self._codec.decode(ids[:n])
        return text.removesuffix(self._before_end) if n < len(ids) and self._before_end else text

    def read(
        self,
        text: str,
        tools: Sequence[Mapping[str, JsonValue]] | None,
        *,
        ids: Sequence[int] | None = None,
        prompt: str = "",
        cut: bool = False,
    ) -> CallsRead:
        """Read the calls and thoughts in an answer, as `CallReader.read` does. `ids` are the completion's ids. If they
        are None, the answer has only a text, which any end token may have ended."""
        ended = self.end_ids if ids is None else [id for id in ids[-1:] if id in self.end_ids]
        ends = [self._codec.token(id) for id in ended] or [""]
        tools = tools if self.reads_calls else None
        reads = (self.reader.read(text, tools, prompt=prompt, end=end, cut=cut) for end in ends)
        first = next(reads)
        return first if not first.problem else next((one for one in reads if not one.problem), first)

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer, as the `tokenizers` library writes it."""
        return self._codec.json

    def text_ids(self, text: str, *, begin: bool = True, end: bool = False) -> array[int]:
        """Return the ids of plain text that isn't in a conversation. `begin` and `end` add the tokenizer's
        begin-of-sequence and end-of-sequence tokens, if it has them."""
        ids = self._codec.encode(self._codec.mark(text, "the text")) if text else []
        around = [self._codec.control.get(str(self._special.get(name))) for name in ("bos_token", "eos_token")]
        return ints([id for id in (around[0] if begin else None, *ids, around[1] if end else None) if id is not None])

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of any ids, including the text of control tokens."""
        return self._codec.decode(ids)

    def incremental_decoder(self) -> IncrementalDecoder:
        """Return a decoder for a completion that is being sampled. Together, its pieces of text equal the result of
        `decode`."""
        return IncrementalDecoder(
            self._codec.decode, ends=self.end_ids, byte_ids=self._codec.byte_ids, ending=self._before_end
        )

    @cached_property
    def reads_calls(self) -> bool:
        """Whether calls are read. They aren't if `reader` can't read the call that the template writes, because a
        string in it may quote a call that `reader` reads. If the user has described the format, calls are read."""
        return self._set or self._example[1]

    @cached_property
    def _example(self) -> tuple[str, bool, Sequence[int]]:
        """A call as the model writes it, which is "" if this isn't known, whether it is read, and the answer's ids."""
        prompt, text, end = self._template.written_call() or ("", "", "")
        name, arguments = EXAMPLE_CALL
        if arguments["key"] not in text:  # such a template takes calls in the text of answers only
            if not self._known or self.format.call is None:
                ids = self._codec.encode(arguments["key"])
                return "", self._known or bool(self._hidden()), [*ids, self.end_ids[0]]
            before, after = self.format.call
            text, end = before.replace("NAME", name) + json.dumps(arguments) + after, ""
        ids = self._codec.encode(text + end, after=self._codec.encode(prompt)[-1] if prompt else None)
        ids = ids if ids[-1] in self.end_ids else [*ids, self.end_ids[0]]
        end = self._codec.token(ids[-1])
        calls = self.reader.read(self.decode(ids), [EXAMPLE_TOOL], prompt=prompt, end=end).calls
        return text, [(one.name, one.arguments) for one in calls] == [EXAMPLE_CALL], ids

    def faults(self, *, tools: bool = True) -> list[str]:
        """Return sentences about faults of the model's folder or of the settings that would spoil rollouts: tools and
        results that the model doesn't see, calls that can't be read, and missing end tokens. The renderer makes a call
        in a conversation as a run does, so the answer doesn't depend on a list of known models. If `tools` is false,
        nothing is said of tools: a model without them needn't even have the letters of a call."""
        found = self._tool_faults() if tools else []
        if self._template.guessed_end:
            names = ", ".join(repr(self._codec.token(id)) for id in self.end_ids)
            found.append(
                f"only the tokenizer's end of sequence {names} ends an answer: the chat template writes no end token "
                "after an answer, and generation_config.json names none. Name the model's end tokens in "
                "engine.renderer.end_tokens"
            )
        return found

    def _tool_faults(self) -> list[str]:
        found, hidden, (text, read, _) = list[str](), self._hidden(), self._example
        if hidden:
            found.append(hidden)
        if not read:
            shown = plain(text).strip()
            shown = f"a call as {shown if len(shown) <= SHOWN else f'{shown[:SHOWN]}…'!r}" if shown else "none"
            found.append(
                f"tool calls of this model aren't read, and reach the agent as text: the chat template writes {shown}. "
                "Describe their format in engine.renderer.response_template"
            )
        elif not hidden and (lost := self._lost()):
            found.append(lost)
        return found

    def _hidden(self) -> str:
        """Return why the model doesn't see the offered tools, or ""."""
        try:
            if EXAMPLE_CALL[0] in self._template.render(_ASKED, [EXAMPLE_TOOL]):
                return ""
        except RenderError as error:
            return f"tools can't be offered to this model: {error}"
        return f"the chat template doesn't show the offered tools: {_REPLACE}, or describe them in the system prompt"

    def _lost(self) -> str:
        """Return why the model doesn't see its call or the call's result in the next prompt, or ""."""
        (name, arguments), ids = EXAMPLE_CALL, ints(self._example[2])
        reply: Message = {"role": "assistant", "content": self.decode(ids)}
        calls = self.read(reply["content"], [EXAMPLE_TOOL], ids=ids).calls
        result = {"role": "tool", "tool_call_id": calls[0].id if calls else "call_0", "name": name, "content": "Tx7"}
        try:
            track = self.track(self._prompt(_ASKED, (EXAMPLE_TOOL,)), call="", reply=reply, completion=ids)
            following = self.spell(self._prompt((*track.messages, result), track.tools, [track]).ids)
        except RenderError as error:
            return f"no prompt can follow a tool call of this model: {error}"
        lost = [what for what, text in (("calls", arguments["key"]), ("results", "Tx7")) if text not in following]
        return f"the chat template drops the {' and '.join(lost)} of tools: {_REPLACE}" if lost else ""

    def probe(self) -> list[str]:
        """Return sentences about the parts of history that this template rewrites or can't render."""
        return self._template.findings()

    def _mark(
        self,
        messages: tuple[Message, ...],
        tools: tuple[dict[str, JsonValue], ...] | None,
        base: Track | None,
        shared: int,
    ) -> tuple[tuple[Message, ...], Any]:
        known = base.marked[:shared] if base is not None else ()
        marked = (*known, *(self._mark_one(messages[i], i) for i in range(len(known), len(messages))))
        if base is not None and tools == base.tools:
            return marked, base.marked_tools
        return marked, self._codec.mark(tools, "a tool's definition") if tools else None

    def _mark_one(self, message: Message, index: int) -> Message:
        """Mark the text of control tokens in a message. In answers, the tokens for thinking and tool calls aren't
        marked. If the model has no video tokens, each video is replaced by its frames."""
        if "video" not in self._markers.values():
            (message,) = frames_of([message])
        role = message.get("role")
        only = self._framing if role == "assistant" else None
        content = message.get("content")
        if isinstance(content, list):
            for part in content_parts(message):
                image = part.get("type") == "image" and part.keys() >= {"media", "width", "height"}
                shown = image or (part.get("type") in self._markers.values() and video_in(part) is not None)
                if part.get("type") != "text" and (self.pictures is None or not shown):
                    known = "text only" if self.pictures is None else "text, and pictures with media, width and height"
                    raise RenderError(
                        f"message {index} ({role}) has a part of type {part.get('type')!r} ({part!r:.200}); this "
                        f"renderer takes {known}"
                    )
        if message.get("tool_calls") and self._template.takes_objects:
            message = {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if len(message) == 2 and isinstance(content, str):
            text = self._codec.mark(content, f"message {index} ({role})", only)
            return message if text is content else {"role": role, "content": text}
        return self._codec.mark(message, f"message {index} ({role})", only)

    def _with_calls(
        self, messages: tuple[Message, ...], marked: tuple[Message, ...], tools: Sequence[dict[str, JsonValue]] | None
    ) -> tuple[Message, ...]:
        """Return the marked messages with `tool_calls` in each answer before a tool result. The calls are read from the
        answer's text, and get the ids of their results."""
        found = list(marked)
        for i, message in enumerate(messages[:-1]):
            text = message.get("content")
            if message.get("role") != "assistant" or message.get("tool_calls") or not isinstance(text, str):
                continue
            results = itertools.takewhile(lambda one: one.get("role") == "tool", messages[i + 1 :])
            ids = [str(one.get("tool_call_id") or "") for one in results]
            if not ids or found[i].get("tool_calls"):
                continue
            read = self.read(text, tools or ())
            if read.chat:
                calls = [{**call, "id": id or call["id"]} for call, id in zip(read.chat, ids, strict=False)]
                shown = {**message, "content": read.answer, "tool_calls": calls}
                found[i] = self._mark_one(shown, i)
        return tuple(found)

    def _around_a_picture(self, pictures: PictureTokens) -> set[str]:
        """Return the control tokens that the template and the model's processors write for a picture and a video.
        Raises RenderError if the template doesn't write exactly one marker for each."""
        around: set[str] = set()
        for part, marker, times in zip(PLACES, (pictures.marker, pictures.video_marker), ((), (0.0, 1.0)), strict=True):
            if marker is None:
                continue
            text = self._template.render([{"role": "user", "content": [part]}], prompt=False)
            if marker not in self._codec.control or text.count(marker) != 1:
                what = "picture" if part["type"] == "image" else "video"
                raise RenderError(
                    f"the chat template writes the token {marker!r} {text.count(marker)} times for one {what}, not "
                    "once: load the tokenizer of the vision model, whose template takes content parts"
                )
            self._markers[self._codec.control[marker]] = str(part["type"])
            inside = {self._codec.token(id) for id in pictures.expand(64, 64, times).ids}
            around |= {*self._codec.controls(text)} | (inside & self._codec.special)
        return around

    def _pictures_of(self, messages: tuple[Message, ...], text: str) -> list[Message]:
        """Return the content parts for pictures and videos in `messages`. `text` is the rendered prompt. Raises
        RenderError if the template didn't write exactly one marker for each part. A marker in a message's own text
        doesn't count, because a mark splits it."""
        if self.pictures is None:
            return []
        kinds = {self._codec.token(id): kind for id, kind in self._markers.items()}
        found = [(i, p) for i, m in enumerate(messages) for p in content_parts(m) if p.get("type") in kinds.values()]
        written = [kinds[marker] for marker in re.findall("|".join(map(re.escape, kinds)), text)]
        if written != [part["type"] for _, part in found]:
            among = dict.fromkeys(f"message {i} ({messages[i].get('role')})" for i, _ in found)
            what = "pictures and videos" if len(kinds) > 1 else "pictures"
            raise RenderError(
                f"the chat template writes {len(written)} places for {len(found)} {what} ({', '.join(among)}): it "
                "drops or repeats some. Show pictures in messages of the user, or load another template"
            )
        return [part for _, part in found]

    def _expanded(self, ids: list[int], pictures: list[Message], at: int) -> tuple[array[int], tuple[Place, ...]]:
        """Replace each marker in `ids` by the tokens of its picture or video. Return the new ids and the places of
        these tokens. `ids` is the end of the prompt, from index `at` on, so its markers belong to the last pictures."""
        if not pictures:
            return ints(ids), ()
        # Content never encodes to a control token (`Codec.encode`), so the template wrote all markers.
        marked = sum(id in self._markers for id in ids)
        new, places, left = array("i"), list[Place](), iter(pictures[len(pictures) - marked :])
        for id in ids:
            if id not in self._markers:
                new.append(id)
                continue
            tokens, place = self._place_of(next(left))
            places.append(place.moved(at + len(new)))
            new.extend(tokens)
        return new, tuple(places)

    def _place_of(self, part: Message) -> tuple[array[int], Place]:
        """Return the tokens of a picture or video, and a `Place` for them at offset 0. Raises RenderError if the model
        can't place a video."""
        assert self.pictures is not None
        video = video_in(part)
        if video is None:
            ids, grid = self.pictures.expand(part["width"], part["height"])
            return ids, Place((part["media"],), "image", 0, len(ids), grid)
        first, times = video.frames[0], video.times
        try:
            ids, grid = self.pictures.expand(first.width, first.height, times)
        except ValueError as error:
            at = ", ".join(f"{seconds:.6g}" for seconds in times)
            raise RenderError(f"{video} with frames at {at} s can't be read by video tokens: {error}") from error
        return ids, Place(tuple(frame.name for frame in video.frames), "video", 0, len(ids), grid, times)

    def _ended(self, base: Track) -> int | None:
        """Return the id that ended the base's answer, or None if the answer was cut off."""
        last = base.completion[-1] if len(base.completion) else None
        return last if last in self.end_ids else None

    def _continue(
        self,
        base: Track,
        shared: int,
        messages: tuple[Message, ...],
        tools: tuple[dict[str, JsonValue], ...] | None,
        marked: tuple[Message, ...],
        marked_tools: Any,
        text: str,
    ) -> tuple[str | None, str | None]:
        """Return (text, None) if the prompt continues the base. The text follows the base's ids. Otherwise return
        (None, reason), with the reason why a new row starts."""
        if shared < len(base.messages):
            if shared == len(messages):
                return None, f"goes back to message {shared} of an earlier conversation"
            return None, f"message {shared} ({messages[shared].get('role')}) differs from the earlier conversation's"
        if tools != base.tools:
            return None, "the tools changed"
        ended = self._ended(base)
        said = self._codec.decode(base.completion if ended is None else base.completion[:-1])
        said = self._codec.mark(said, "the last answer", self._framing)
        stop = "" if ended is None else self._codec.token(ended)
        # When an answer is decoded on its own, SentencePiece drops the space before its first word.
        for shown in (base.text + said + stop, f"{base.text} {said}{stop}"):
            if text.startswith(shown) and (stop or text.startswith(self._template.closing, len(shown))):
                return text[len(shown) :], None
        if self.history == "sampled":
            return self._behind_rewritten(base, marked, marked_tools, text)
        return None, _difference(base.text + said + (stop or self._template.closing), text, len(base.text))

    def _behind_rewritten(
        self, base: Track, marked: tuple[Message, ...], marked_tools: Any, text: str
    ) -> tuple[str | None, str | None]:
        """Return the same as `_continue`, for a template that rewrote history. Starts a new row if the template rewrote
        more than earlier answers.

        The renderings that are compared have a blank in place of each answer, so the text of answers makes no
        difference.
        """
        blank = next((char for char in _BLANKS if char not in text), None)
        if blank is None:
            return None, "the template rewrote history, and content uses every character that could stand for an answer"
        last = len(base.messages) - 1
        # The text next to a call is left out, because a template may write it after the call's results.
        skeleton = [
            {**m, "content": "" if m.get("tool_calls") else blank} if m.get("role") == "assistant" and i <= last else m
            for i, m in enumerate(marked)
        ]
        full = self._template.render(skeleton, marked_tools)
        # `head` is the text before the last answer. Some templates open an answer with text that they leave out once
        # the answer is in history, so both renderings are tried. Others end a finished conversation with such text.
        head = self._template.render(skeleton[:last], marked_tools)
        if not full.startswith(head):
            head = self._template.render(skeleton[:last], marked_tools, prompt=False)
        if not full.startswith(head):
            return None, _difference(head.replace(blank, "…"), full.replace(blank, "…"), len(head))
        # Some templates drop the text of an answer that has a tool call. The answer then starts where the head ends.
        rest = full[max(full.find(blank, len(head)) + 1, len(head)) :]
        ended = self._ended(base)
        closing, stop = self._template.closing, self._codec.token(ended) if ended is not None else ""
        if stop and not closing.endswith(stop) and stop in rest:
            closing = stop  # as after a tool call
        found = rest.find(closing)
        if found < 0:
            return None, "the end of the last answer can't be found in the template's text"
        return rest[found if ended is None else found + len(closing) :], None


def _shared_ids(base: Track | None, ids: array[int], places: tuple[Place, ...]) -> int:
    """Return how many leading ids a prompt shares with a track. Equal ids of different pictures aren't shared."""
    if base is None:
        return 0
    return shared_length(keys(base.ids, base.places), keys(ids, places), (*base.places, *places))


def _longest(
    messages: tuple[Message, ...], tools: tuple[dict[str, JsonValue], ...] | None, tracks: Sequence[Track]
) -> tuple[Track | None, int]:
    """Return the track to continue and the number of messages that it shares with `messages`.

    If `messages` begins with the whole of one or more tracks, the longest of them is chosen. Otherwise, the track that
    shares the most messages is chosen. Among equals, a track with the same tools wins, and then the latest track."""
    best: tuple[bool, int, bool, int] | None = None
    for place, track in enumerate(tracks):
        n = len(track.messages)
        if n <= len(messages) and messages[n - 1] == track.messages[n - 1] and messages[:n] == track.messages:
            rank = (True, n, track.tools == tools, place)
        elif best is None or not best[0]:
            rank = (False, _shared(messages, track.messages), track.tools == tools, place)
        else:
            continue
        if rank[1] and (best is None or rank > best):
            best = rank
    return (tracks[best[3]], best[1]) if best is not None else (None, 0)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(value.get("content", value.get("text")))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _with_object(call: Message) -> Message:
    """Return the tool call with its arguments as an object, if they are the JSON text of one."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = read_plain(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _unshared(messages: tuple[Message, ...], tracks: int) -> str:
    """Return why a new row starts if none of the existing tracks shares the first message."""
    first = f"{plain(str(messages[0].get('content')))[:24]!r} ({messages[0].get('role')})"
    return f"a new conversation: none of {tracks} earlier ones starts with {first}"


def _shared(a: tuple[Message, ...], b: tuple[Message, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _difference(before: str, now: str, prompt_end: int) -> str:
    at = next((i for i, (x, y) in enumerate(zip(before, now, strict=False)) if x != y), min(len(before), len(now)))
    what = "the earlier prompt" if at < prompt_end else "the last answer"
    was, became = plain(before[at : at + 24]), plain(now[at : at + 24])
    return f"the template rewrote {what}: {was!r} became {became!r}"
