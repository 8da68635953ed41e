"""Finds out how a chat template ends answers, frames turns and rewrites history.

The module renders small test conversations and examines the results. It never looks at the model's name. The module
`renderer` combines the template's text with sampled token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from pydantic import JsonValue

from ...tapes.errors import MissingExtra, UsageError
from ...tapes.records import Message
from .codec import ChatTokenizer, Codec, RenderError, digest

_THINKING = "<think>\nWhy.\n</think>\n\nSo."
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
_CALL: dict[str, Any] = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "lookup", "arguments": {"key": "pear"}},
}

EXAMPLE_TOOL, EXAMPLE_CALL = _TOOL, ("lookup", {"key": "pear"})
"""A tool, and the name and arguments of a call of it."""


def template_text(tokenizer: ChatTokenizer) -> str:
    """Return the text of the tokenizer's chat template. If the tokenizer has several named templates, return all of
    them as JSON. Raises UsageError if there is no template, or none is named `default`."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UsageError(
            f"the tokenizer {name!r} has no chat template, so messages can't become tokens; load the "
            "tokenizer of the chat (instruct) model, or set tokenizer.chat_template to a Jinja "
            "template (tapereel.agents.engines.embedded.tiny_model has a short one)"
        )
    if isinstance(template, Mapping) and "default" not in template:
        raise UsageError(
            f"the tokenizer has the chat templates {', '.join(map(repr, sorted(template)))} and none "
            "named 'default'; set tokenizer.chat_template to the one to use"
        )
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True, ensure_ascii=False)


class Template:
    """One chat template with fixed keyword arguments."""

    def __init__(
        self, tokenizer: ChatTokenizer, codec: Codec, kwargs: Mapping[str, JsonValue], end_tokens: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._codec = codec
        self._kwargs = dict(kwargs)
        self._source = template_text(tokenizer)
        self.dated = "strftime_now" in self._source
        """Whether the template writes the date."""
        # This is a copy, because the text must match the hash even if the tokenizer's template is changed later.
        template = tokenizer.chat_template
        self._by_name = dict(template) if isinstance(template, Mapping) else {"default": template}
        try:
            from jinja2.exceptions import TemplateError
        except ImportError:
            raise MissingExtra("jinja2", "train", "a chat template") from None
        self._refusals = (TemplateError, TypeError, KeyError, ValueError)
        self._wraps = False
        """True if text must be passed to the template as a content part. SmolVLM's template drops plain strings."""
        self._short_ids = False
        """True if the ids of tool calls must have nine letters and digits, as in Mistral's templates."""
        as_text, as_part = (self._try([_say("user", content)]) or "" for content in ("Qx", _parts("Qx")))
        self._wraps = "Qx" not in as_text and "Qx" in as_part
        self._short_ids = self._after_call("call_0") is None and self._after_call(_CALL["id"]) is not None
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        self.hash: str = digest(self._source, self._kwargs, special)
        """SHA-256 (hex) of the template, its keyword arguments, and the special tokens that it can write."""
        self.end_text, self.closing, self.ending = self._find_closing()
        """`end_text` is the control token that ends the last answer, or "" if the template writes none. `ending` is all
        text after the last answer's last character, up to and including that token. `closing` is the same for earlier
        answers. Most templates use the same token for both, but Harmony (gpt-oss) ends the last answer with
        `<|return|>` and earlier answers with `<|end|>`."""
        self._named_ends = tuple(end_tokens)
        self.end_ids: tuple[int, ...] = self._find_end_ids(end_tokens)
        """Ids that end an answer. They are the template's own, the tokenizer's end of sequence, and `end_tokens`."""
        # Some templates write more text at the end of a finished conversation, such as Phi-3's end of sequence. A
        # longer conversation doesn't have this text, so it is removed before prefixes are compared.
        whole, ended = (self._try([_say("user", "Qx")], prompt=prompt) or "" for prompt in (True, False))
        self._at_end = ended[len(codec.shared(whole, ended)) :]
        self.framing: frozenset[str] = self._find_framing()
        """Control tokens that frame turns. If their text appears in an answer, it is always plain text."""

    def render(self, messages: Sequence[Message], tools: Sequence[object] | None = None, *, prompt: bool = True) -> str:
        """Render a conversation as text. If `prompt` is true, add the generation prompt, which opens the next answer.

        Raises RenderError if `messages` is empty or the template refuses it.
        """
        if not messages:
            raise RenderError("a prompt needs at least one message; got none")
        if self._wraps:
            messages = [
                {**m, "content": _parts(m["content"])} if isinstance(m.get("content"), str) else m for m in messages
            ]
        if self._short_ids:
            messages = [_with_short_ids(message) for message in messages]
        template = self._by_name.get("tool_use") if tools else None
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=prompt,
                chat_template=template or self._by_name["default"],
                **self._kwargs,
            )
            return cast(str, text)
        except self._refusals as error:
            roles = "/".join(str(message.get("role")) for message in messages[-6:])
            raise RenderError(
                f"the chat template refused {len(messages)} messages (roles end in {roles}): {error}; "
                "Renderer.probe() lists what this template can't take"
            ) from error

    @cached_property
    def takes_objects(self) -> bool:
        """Whether the template writes the arguments of a tool call correctly if they are a JSON object. Most templates
        do, and some refuse JSON text or encode it twice. A few, such as DeepSeek's, take only JSON text."""
        text = self._after_call(_CALL["id"]) or ""
        return "pear" in text and "'key'" not in text  # quotes of this kind are Python's, and not JSON's

    @cached_property
    def writes_raw(self) -> bool:
        """Whether the template writes the strings in a tool call as they are, without escapes."""
        arguments: Any = {"key": "pe\\ar"}
        function = {"name": "lookup", "arguments": arguments if self.takes_objects else json.dumps(arguments)}
        calling = {**_say("assistant", ""), "tool_calls": [{**_CALL, "function": function}]}
        return "pe\\ar" in (self._try([_say("user", "Qx"), calling], [_TOOL], prompt=False) or "")

    @cached_property
    def needs_calls(self) -> bool:
        """Whether the template takes a tool result only after a message with `tool_calls`. After an answer whose text
        contains the call, it drops the result or refuses it or later messages. The templates of gpt-oss, Gemma 4 and
        Mistral do so."""
        q, result = _say("user", "Qx"), {"role": "tool", "name": "lookup", "tool_call_id": _CALL["id"], "content": "Tx"}
        calling = {**_say("assistant", ""), "tool_calls": [_CALL]}
        after_text, after_call = (
            self._try([q, asked, result, _say("assistant", "Bx"), q], [_TOOL]) or ""
            for asked in (_say("assistant", "Ax"), calling)
        )
        return "Tx" in after_call and "Tx" not in after_text

    @property
    def guessed_end(self) -> bool:
        """Whether only the tokenizer's end of sequence ends an answer, because the template writes no end token."""
        return not self.end_text and not self._named_ends

    def written_call(self) -> tuple[str, str, str] | None:
        """Return a prompt, a call of `EXAMPLE_CALL` as the template writes it in the answer, and the end token after
        it, which is "" if there is none. Return None if the template refuses the call."""
        q, function = _say("user", "Qx"), _CALL["function"]
        arguments = function["arguments"] if self.takes_objects else json.dumps(function["arguments"])
        calling = {**_say("assistant", ""), "tool_calls": [{**_CALL, "function": {**function, "arguments": arguments}}]}
        asking, asked = self._try([q], [_TOOL]), self._try([q], [_TOOL], prompt=False)
        full = self._try([q, calling], [_TOOL], prompt=False)
        if asking is None or asked is None or full is None:
            return None
        begin = 0
        # The rendering without a generation prompt may end with text that a longer conversation doesn't have.
        if full.startswith(asked.removesuffix(self._at_end)):
            # If the prompt opens a thought that history doesn't have, the call begins where another answer would.
            said = self._try([q, _say("assistant", "Ax")], [_TOOL], prompt=False) or ""
            heads = [head for head in (asking, said.rpartition("Ax")[0]) if head and full.startswith(head)]
            begin = len(heads[0] if heads else self._codec.shared(asking, full))
        at, end = max((full.rfind(token, begin), token) for token in map(self._codec.token, self.end_ids))
        return (full[:begin], full[begin:at], end) if at >= 0 else (full[:begin], full[begin:], "")

    def findings(self) -> list[str]:
        """Return sentences that say how this template rewrites history and which messages it can't render."""
        found = [*self._answer_findings(), *self._role_findings(), *self._tool_findings()]
        if self.dated:
            found.append("writes today's date into the prompt: the same conversation reads differently tomorrow")
        if not self.closing:
            found.append("writes nothing at the end of an answer: only the end-of-sequence token ends one")
        return found

    def _after_call(self, id: str) -> str | None:
        """Return the prompt after a call with this id and its result, or None if the template refuses it."""
        calling = {**_say("assistant", ""), "tool_calls": [{**_CALL, "id": id}]}
        result = {"role": "tool", "name": "lookup", "tool_call_id": id, "content": "Tx"}
        return self._try([_say("user", "Qx"), calling, result], [_TOOL])

    def _try(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, prompt: bool = True
    ) -> str | None:
        """Return the result of `render`, or None if the template refuses the messages."""
        try:
            return self.render(messages, tools, prompt=prompt)
        except RenderError:
            return None

    def _find_closing(self) -> tuple[str, str, str]:
        """Return (`end_text`, `closing`, `ending`), found in the text after answers in test conversations.

        The first control token after an answer may end the answer or open the next user message. It ends the answer if
        it also follows the last answer of a conversation, or if it is missing before the first user message.
        """
        user, answer, next_user = _say("user", "Qx"), _say("assistant", "Ax"), _say("user", "Rx")
        opening = self.render([user], prompt=False).partition("Qx")[0]
        last = self.render([user, answer], prompt=False).partition("Ax")[2]
        between = self.render([user, answer, next_user], prompt=False).partition("Ax")[2].partition("Rx")[0]
        for token in self._codec.controls(between)[:1]:
            closing = between[: between.index(token) + len(token)]
            if token in last or token not in opening:
                return token, closing, closing
            final = self._codec.controls(last)
            # If the token ends user messages too, it ends every message, so it doesn't open the next one.
            if final and self.render([user], prompt=False).partition("Qx")[2].startswith(token):
                return final[0], closing, last[: last.index(final[0]) + len(final[0])]
        return "", "", ""

    def _find_end_ids(self, more: Sequence[str]) -> tuple[int, ...]:
        """Return the distinct ids that end an answer. Raises RenderError if nothing ends an answer, or if a name in
        `more` isn't a control token."""
        eos = self._tokenizer.special_tokens_map.get("eos_token")
        for name in more:
            if name not in self._codec.control:
                raise RenderError(
                    f"end_tokens names {name!r}, which isn't a control token of this tokenizer; it has "
                    f"{', '.join(sorted(self._codec.control)[:40])}"
                )
        names = [self.end_text, str(eos) if eos is not None else "", self._end_of_call(), *more]
        ids = tuple(dict.fromkeys(self._codec.control[name] for name in names if name in self._codec.control))
        if not ids:
            raise RenderError(
                "nothing ends an answer: the chat template writes no control token after one and the "
                "tokenizer has no eos_token; set tokenizer.eos_token"
            )
        return ids

    def _end_of_call(self) -> str:
        """Return the control token that ends an answer with a tool call, or "" if the template writes none. A token
        that also comes between two calls, such as GLM's `</tool_call>`, ends only the call."""
        called = [
            self._try([_say("user", "Qx"), {**_say("assistant", ""), "tool_calls": [_CALL] * n}], [_TOOL], prompt=False)
            for n in (1, 2)
        ]
        behind = (called[0] or "").rpartition("pear")
        found = self._codec.controls(behind[2]) if behind[0] else []
        if not found or not behind[2].rstrip().endswith(found[-1]):
            return ""
        if (self._try([_say("user", "Qx")]) or "").rstrip().endswith(found[-1]):
            return ""  # such a template asks for the next answer even if `prompt` is false
        between = (called[1] or "").partition("pear")[2].rpartition("pear")[0]
        return "" if found[-1] in self._codec.controls(between) else found[-1]

    def _find_framing(self) -> frozenset[str]:
        """Return the tokens that frame turns. They appear in test conversations around plain text, or end answers.

        If the text of these tokens appears in an earlier answer, the renderer splits it with marks. So tokens that
        belong in answers must be left out. Otherwise, a sampled token of an answer would later get other ids.
        """
        q, a, r = _say("user", "Qx"), _say("assistant", "Ax"), _say("user", "Rx")
        tool = {"role": "tool", "name": "lookup", "tool_call_id": _CALL["id"], "content": "Tx"}
        calling = {**a, "tool_calls": [_CALL]}
        found_in = [self._try(turns, prompt=False) for turns in ([q, a, r], [_say("system", "Sx"), q, a, r])]
        for asked, last_word in ((a, "Ax"), (calling, "pear")):
            behind = (self._try([q, asked, tool], prompt=False) or "").rpartition(last_word)[2]
            # Tokens between the tool call and the answer's end token belong to the answer and don't frame the turn.
            found_in.append(behind.partition(self.end_text)[2] if self.end_text else "")
        special = [str(value) for value in self._tokenizer.special_tokens_map.values() if isinstance(value, str)]
        found = {token for text in found_in if text for token in self._codec.controls(text)}
        found |= {self._codec.token(end) for end in self.end_ids}
        return frozenset(found | {name for name in special if name in self._codec.control}) - self._opens_answers()

    def _opens_answers(self) -> set[str]:
        """Return the control tokens that the template writes at the beginning of an answer, such as `<think>`. They
        don't frame turns."""
        asking = self.render([_say("user", "Qx")])
        history = self.render([_say("user", "Qx"), _say("assistant", "Ax"), _say("user", "Rx")]).partition("Ax")[0]
        opening: set[str] = set()
        for text in (asking, history):
            tokens = self._codec.controls(text)
            # The last special token marks the assistant's role, and tokens after it begin the answer itself.
            last = max((i for i, token in enumerate(tokens) if token in self._codec.special), default=-1)
            opening.update(tokens[last + 1 :])
        return opening

    def _answer_findings(self) -> list[str]:
        q, r = _say("user", "Qx"), _say("user", "Rx")
        found: list[str] = []
        for answer, what in (
            (_THINKING, "drops or rewrites the thinking of earlier answers"),
            (" Ax \n", "drops white space around earlier answers"),
        ):
            text = self._try([q, _say("assistant", answer), r])
            if text is not None and answer not in text:
                found.append(what)
        asking, history = self.render([q]), self.render([q, _say("assistant", "Ax"), r])
        if not history.startswith(asking):
            shared = len(self._codec.shared(asking, history))
            found.append(f"asks for an answer with {asking[shared:]!r}, which history doesn't have")
        return found

    def _role_findings(self) -> list[str]:
        q, a = _say("user", "Qx"), _say("assistant", "Ax")
        found: list[str] = []
        system = self._try([_say("system", "Sx"), q])
        if system is None:
            found.append("refuses system messages")
        elif "Sx" not in system:
            found.append("drops system messages")
        else:
            asked = [_say("system", "Sx"), q]
            now, later = self._try(asked, prompt=False), self._try([*asked, a, _say("user", "Rx")])
            if now is None or later is None or not later.startswith(now.removesuffix(self._at_end)):
                found.append("moves the system message as the conversation grows, which starts a new row each time")
        for messages, what in (
            ([q, a, a, q], "two answers in a row"),
            ([q, q], "two user messages in a row"),
            ([q, a, _say("tool", "Tx")], "tool results after an answer without tool calls"),
        ):
            if self._try(messages) is None:
                found.append(f"refuses {what}")
        return found

    def _tool_findings(self) -> list[str]:
        q = _say("user", "Qx")
        offered = self._try([q], [_TOOL])
        if offered is None or "lookup" not in offered:
            return ["doesn't show the tools to the model"]
        calling = {**_say("assistant", "Ax"), "tool_calls": [_CALL]}
        result = {"role": "tool", "name": "lookup", "tool_call_id": _CALL["id"], "content": "Tx"}
        later = self._try([q, calling, result, _say("assistant", "Bx"), _say("user", "Rx")], [_TOOL])
        if later is None:
            return ["refuses a tool call and its result"]
        found = [
            what
            for text, what in (
                ("pear", "drops earlier tool calls"),
                ("Tx", "drops earlier tool results"),
                ("Ax", "drops the text next to a tool call"),
            )
            if text not in later
        ]
        first = (self._try([q], [_TOOL], prompt=False) or "").removesuffix(self._at_end)
        if not later.startswith(first):
            found.append("moves the tools as the conversation grows, which starts a new row each time")
        return found


def _say(role: str, content: str | list[Message]) -> Message:
    return {"role": role, "content": content}


def _with_short_ids(message: Message) -> Message:
    def short(id: object) -> str:
        return str(id) if re.fullmatch("[A-Za-z0-9]{9}", str(id)) else digest(id)[:9]

    if message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": short(call.get("id"))} for call in message["tool_calls"]]}
    return {**message, "tool_call_id": short(message["tool_call_id"])} if "tool_call_id" in message else message


def _parts(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]
