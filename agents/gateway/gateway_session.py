"""A session lets an external program use one tape. The program's requests become calls of `LLM`, the agent's interface.

A program doesn't know tapes, so the session derives what `LLM` needs from an agent. The first messages of a request
determine its conversation, so concurrent requests may arrive in any order. An assistant message that repeats a sent
answer is replaced by the recorded message. The sampled tokens of every request are recorded, however the request ends.
`gateway_server` handles HTTP.

The session also decides how much of a streamed answer can be sent. The sent thoughts and the sent text must be prefixes
of the final ones, because a client can't take text back. Incomplete characters and text that may be the beginning of a
stop string, a thought or a tool call are held back.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ...tapes import BadPicture, Picture, Sampling, StoreFailed, Tape
from ...tapes.common.text import warn_once
from ...tapes.errors import remedy
from ...tapes.messages import image_of, text_of
from ...tapes.records import Call, Message
from ...tapes.steps import Exchange, content_parts
from ..engines.engine import CapableEngine, GrammarRefused
from ..engines.transport.http_channel import Server, ServerFailed
from ..episode.limits import LimitReached
from ..episode.llm import LLM, ModelFailed, RenderFailed
from ..episode.reply import Reply
from ..rendering.incremental_decoder import IncrementalDecoder, overlap
from ..rendering.tool_calls import AnswerStream, Piece
from .chat_protocol import token_logprobs
from .dialect import ANSWER, PIXELS, PLACE, THOUGHT, Answered, Asked, Refused
from .linking import Use, label_calls

if TYPE_CHECKING:
    from pydantic import JsonValue

    from ..rendering.renderer import Renderer

log = logging.getLogger(__name__)

UNUSABLE = "a program's calls can be imitated, but not used for RL"
SHOWN = 2000
"""Maximum characters of each text in an exchange's step. The call's record has the whole text."""

_EchoKey = tuple[str, str]
"""Text of an answer, and its calls as JSON."""


class _Sent(NamedTuple):
    """An answer that was sent to the program."""

    id: str
    key: _EchoKey
    conversation: str
    place: int
    """Number of messages before the answer."""
    thought: str
    calls: tuple[Message, ...]
    """The tool calls in the answer, with the ids that were sent."""
    recorded: Message
    """The answer's message as the call records it."""


class Pieces:
    """Turns the token ids of one answer into pieces that can be sent. Single use."""

    def __init__(self, decoder: IncrementalDecoder, stops: Sequence[str], reader: AnswerStream) -> None:
        self._decoder, self._stops, self._reader = decoder, stops, reader
        self._held = ""

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        """Add ids, and return the new pieces that can be sent now."""
        self._held += self._decoder.feed(ids)
        n = min((_before(self._held, stop) for stop in self._stops), default=len(self._held))
        piece, self._held = self._held[:n], self._held[n:]
        return self._reader.feed(piece)


def _before(text: str, word: str) -> int:
    """Return the index of `word` in `text`. If it is missing, return the length of `text` without an incomplete `word`
    at its end."""
    at = text.find(word)
    return at if at >= 0 else len(text) - overlap(text, word)


class Live:
    """The streamed answer to one request. The engine's listener writes it, and the HTTP handler reads it. Single use.

    The listener and the handler run in the same event loop. If the engine retries after text was sent, the new attempt
    must repeat the sent text. Otherwise the stream stops and `end` returns False.
    """

    def __init__(self, request: Asked) -> None:
        self.id = ""
        """Id of the answer. It is empty until `open` is called."""
        self.created = int(time.time())
        self.sent = {True: "", False: ""}
        """All thoughts (True) and all text (False) that have been sent."""
        self.prompt = ""
        """The prompt's text, which may have opened a thought."""
        self.moved = asyncio.Event()
        """Set when there may be new text for `take`, or the request is done."""
        self._request = request
        self._renderer: Renderer | None = None
        self._pieces: Pieces | None = None
        self._new = array("i")
        """Ids (int32) that `take` hasn't decoded yet."""
        self._again = {True: "", False: ""}
        """The sent thoughts and text that a new attempt must still repeat after a failed one."""
        self._parted = False
        """True if nothing more may be sent: the new attempt differs from the sent text, or the answer is complete."""

    def open(self, id: str, renderer: Renderer | None) -> None:
        """Called before the first token. `renderer` is the engine's renderer. If it is None, no tokens are streamed."""
        self.id, self._renderer = id, renderer

    def shown(self, prompt: str) -> None:
        """Receive the prompt's text before the first token."""
        self.prompt = prompt

    def tokens(self, ids: array[int]) -> None:
        """Implements `Listener.tokens`."""
        self._new += ids
        self.moved.set()

    def again(self) -> None:
        """Implements `Listener.again`. `LLM` calls it before a retry. The new answer must begin with the sent text."""
        # The decoder is replaced too, because its state belongs to the ids of the failed attempt.
        self._new, self._pieces = array("i"), None
        self._again, self._parted = dict(self.sent), False

    async def quiet(self, seconds: float | None) -> bool:
        """Wait for `moved`, for at most `seconds` (None: no limit). Return True if the time has run out. Otherwise,
        clear `moved` and return False."""
        try:
            async with asyncio.timeout(seconds):
                await self.moved.wait()
        except TimeoutError:
            return True
        self.moved.clear()
        return False

    def take(self) -> list[Piece]:
        """Return the pieces to send now."""
        if not self._new or self._parted or self._renderer is None:
            return []
        if self._pieces is None:
            reader = self._renderer.reader.stream(tools=bool(self._request.tools), prompt=self.prompt)
            self._pieces = Pieces(self._renderer.incremental_decoder(), self._request.stop, reader)
        new, self._new = self._new, array("i")
        found = list[Piece]()
        for thought, text in self._pieces.feed(new):
            # After a retry, the text in `_again` was already sent. It is compared and not sent again.
            again = self._again[thought]
            n = min(len(text), len(again))
            self._parted = self._parted or text[:n] != again[:n]
            self._again[thought] = again[n:]
            if text[n:] and not self._parted:
                self.sent[thought] += text[n:]
                found.append(Piece(thought, text[n:]))
        return found

    def end(self, reasoning: str, text: str) -> bool:
        """Stop streaming. Return whether the complete thoughts and text begin with what was sent."""
        self._new, self._parted = array("i"), True
        return reasoning.startswith(self.sent[True]) and text.startswith(self.sent[False])


class Session:
    """Answers a program's requests with `ask`, also concurrently, until `close`. A session serves one tape."""

    def __init__(self, tape: Tape, llm: LLM, *, follow: bool = True, embeddings: str | None = None) -> None:
        """If `follow` is true, the program's requests set temperature, top_p, top_k, min_p and penalties. Otherwise the
        run sets them. `embeddings` is the address of the server that makes embeddings, or None without one."""
        self._tape, self._llm, self._follow = tape, llm, follow
        self._engine = llm.engine
        self._renderer = llm.engine.renderer if llm.engine is not None else None
        key = "OPENAI_API_KEY" if os.environ.get("OPENAI_API_KEY") else None
        self._embeddings = Server(embeddings, key_variable=key) if embeddings is not None else None
        self._asking: set[asyncio.Task[Answered]] = set()
        self._numbers: Counter[str] = Counter()
        self._answered: dict[str, tuple[str, int, Message]] = {}
        """The call of each answer, the number of its instructions, and its message as it was sent, by its id."""
        self._sent: dict[tuple[_EchoKey, str], list[_Sent]] = {}
        """The answers sent so far, by `_echo_key` and conversation."""
        self._first: dict[tuple[_EchoKey, str, int], _Sent] = {}
        """The first answer that was delivered for each key, conversation and place. It is the one that an echo repeats,
        because in a replay, later ones may be sent sooner than they were."""
        self._replies: list[Message] = []
        """The recorded messages of all answers."""
        self.undelivered: set[str] = set()
        """Ids of the answers that no client received. `gateway_server` updates it."""
        self._called: dict[str, list[_Sent]] = {}
        """The sent answers that call tools, by the id of their first call."""
        self._places: dict[str | None, int] = {}
        """The place of each sent tool call among the calls of its answer, by the call's id."""
        self._pictures: dict[bytes, Picture] = {}
        """The picture of each data URL, by the URL's digest."""
        self._exchanges: asyncio.Queue[Exchange | None] = asyncio.Queue()
        self._declared: dict[str, Use] = {}
        self.closed = False
        self.broken: BaseException | None = None
        """The exception that must end the episode, even if the program continues after its request was refused. It
        comes from a failing store, the end of a replay, or an error in Tapereel."""
        self.failed: ModelFailed | None = None
        """The engine's last failure, or None if a later request was answered."""
        self.limited: LimitReached | None = None
        """The limit that a request reached. The episode ends with this limit, even if the program ends normally."""
        self.heard_at = time.monotonic()
        """When the last request arrived or was answered (monotonic seconds)."""
        self.held = 0
        """Number of requests that wait for a weight sync before they reach `ask`."""

    @property
    def id(self) -> str:
        """Id of the tape."""
        return self._tape.id

    @property
    def busy(self) -> int:
        """Number of requests in flight or held."""
        return len(self._asking) + self.held

    @property
    def changing(self) -> bool:
        """Whether the engine's weights are being replaced, so that requests would wait."""
        if self._engine is None:
            return False
        return "weights" in self._engine.can and cast(CapableEngine, self._engine).changing

    async def ask(self, request: Asked, *, use: Use | None = None, live: Live | None = None) -> Answered:
        """Sample the model's answer and record the call.

        `use` is the call's training label if the program sets one. If it is None, `linking` finds the label. `live`
        receives the tokens while they are sampled. If `ask` is cancelled, the tokens sampled so far are recorded before
        it returns. Raises Refused, and StoreFailed if the call can't be written.
        """
        if self.closed:
            raise ended()
        # The request gets its own task, so that `close` can cancel it and then wait until its tokens are recorded.
        asking = asyncio.ensure_future(self._ask(request, use, live))
        self._asking.add(asking)
        self.heard_at = time.monotonic()
        try:
            return await asking
        except asyncio.CancelledError:
            # A cancellation has one of two causes. If the client's handler was cancelled, the error is passed on. If
            # `close` cancelled `asking`, the request is refused.
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                raise
            raise ended() from None
        except (Refused, StoreFailed):
            raise
        except LimitReached as error:
            raise _limit(error) from None
        except RenderFailed as error:
            raise Refused(400, str(error), param="messages") from None
        except ModelFailed as error:
            if isinstance(error.__cause__, GrammarRefused):
                field = request.demanded_by
                raise Refused(400, f"{field}: {error.__cause__}", param=field) from None
            raise Refused(502, str(error), code="model_failed") from None
        except BaseException as error:
            raise Refused(500, f"the episode is over: {type(error).__name__}", final=True) from error
        finally:
            self._asking.discard(asking)
            self.heard_at = time.monotonic()

    async def count(self, request: Asked) -> int:
        """Return the number of tokens in the request's prompt. Nothing is sampled or recorded. Raises Refused."""
        if self.closed:
            raise ended()
        self.heard_at = time.monotonic()
        messages, conversation = await self._messages(request)
        try:
            tokens = self._llm.count(self._tape, messages, tuple(request.tools) or None, conversation)
        except RenderFailed as error:
            raise Refused(400, str(error), param="messages") from None
        if tokens is None:
            raise Refused(501, "the tokens of this engine's prompts aren't known here", final=True)
        return tokens

    async def embed(self, body: JsonValue) -> object:
        """Return the answer of the embeddings' server. Nothing is recorded. Raises Refused."""
        if self.closed:
            raise ended()
        if self._embeddings is None:
            own = "`Program(..., embeddings=URL)`"
            raise Refused(
                404,
                f"this gateway makes no embeddings: name a server that does, with {remedy('embeddings', own)}",
                param="embeddings",
            )
        self.heard_at = time.monotonic()
        try:
            return await self._embeddings.post("/v1/embeddings", body)
        except ServerFailed as error:
            raise Refused(error.status or 502, f"embeddings: {error}", final=not error.retry) from None
        finally:
            self.heard_at = time.monotonic()

    async def _ask(self, request: Asked, use: Use | None, live: Live | None) -> Answered:
        try:
            # Use the recorded messages, not the ones that the client sent back. The renderer then keeps the sampled ids
            # as the prefix of this prompt. A tool call that the client serialised again could encode to other tokens
            # and start a new row.
            messages, conversation = await self._messages(request)
            # Ids come from the conversation and a count, not from a clock or a random source. So a replay makes the
            # same ids, and the program's next prompts contain the same tool call ids.
            self._numbers[conversation] += 1
            name = hashlib.sha256(f"{conversation}/{self._numbers[conversation]}".encode()).hexdigest()[:24]
            sampling = self._sampling(request)
            for tool in request.left_out:
                warn_once(
                    log,
                    f"a program offers the hosted tool {tool}, which doesn't exist here, so the model isn't offered it",
                )
            if live is not None:
                live.open(name, self._renderer)
            # `LLM` makes the retries. After ModelFailed, no retry is left or would help, so the gateway doesn't retry.
            reply = await self._llm(
                self._tape,
                messages=messages,
                tools=tuple(request.tools) or None,
                conversation=conversation,
                sampling=sampling,
                max_tokens=min(request.max_tokens or sampling.max_tokens, sampling.max_tokens),
                seed=request.seed,
                constraint=request.constraint,
                listener=live,
                on_prompt=live.shown if live is not None else None,
            )
        except ModelFailed as error:
            if not isinstance(error.__cause__, GrammarRefused):  # the program's own fault
                self.failed = error
            raise
        except LimitReached as error:
            self.limited = error
            raise
        except (Refused, RenderFailed, asyncio.CancelledError):
            raise
        except BaseException as error:
            self.broken = self.broken or error
            self.over()
            raise
        self.failed = None
        if use is not None:
            self._declared[reply.call] = use
        answer = self._answer(request, reply, name, (conversation, len(messages)), live)
        # If the texts differ, the engine failed after a part was streamed, and the retry sampled another text. The
        # client can't take the sent text back, so it gets an error, and the answer stays undelivered.
        if live is not None and not live.end(answer.reasoning, answer.text):
            raise Refused(
                502,
                "the model failed in the midst of this answer and answered otherwise when it was asked "
                "again; ask again",
                code="answer_changed",
            )
        return answer

    def _answer(self, request: Asked, reply: Reply, name: str, place: tuple[str, int], live: Live | None) -> Answered:
        """Return the answer, and remember it. `place` is its conversation and the number of messages before it."""
        call, thought, renderer = self._llm.recorder.log.call(reply.call), reply.reasoning, self._renderer
        called = enumerate(reply.chat_calls[: None if request.parallel_tool_calls else 1] if request.tools else ())
        tools = tuple({**call, "id": call["id"] or f"call_{name}{k}"} for k, call in called)
        answer = Answered(
            id=name,
            text=reply.answer,
            reasoning=thought,
            reasoning_tokens=len(renderer.text_ids(thought, begin=False)) if renderer and thought else 0,
            finish="tool_calls" if tools else "length" if reply.finish == "length" else "stop",
            stopped=self._stopped(request, call),
            tool_calls=tools,
            prompt_tokens=call.usage.prompt_tokens or 0,
            completion_tokens=call.usage.completion_tokens or 0,
            logprobs=self._logprobs(call) if request.logprobs else None,
            prompt_ids=list(ids) if request.token_ids and (ids := call.prompt) is not None else None,
            ids=list(call.completion) if request.token_ids and call.completion is not None else None,
            created=live.created if live is not None else int(time.time()),
        )
        if call.constraint is not None and call.constraint.enforced:
            warn_once(
                log, f"{UNUSABLE}: the engine enforces the form of their answers; ask without tool_choice and schemas"
            )
        sent: Message = {"role": "assistant", "content": answer.text, "tool_calls": tools, THOUGHT: answer.reasoning}
        self._answered[name] = reply.call, request.instructions, sent
        self._places |= {call["id"]: k for k, call in enumerate(tools)}
        echo = _Sent(name, _echo_key(sent), *place, thought, tools, call.reply)
        self._sent.setdefault(echo[1:3], []).append(echo)
        if self._first.setdefault(echo[1:4], echo).id in self.undelivered:
            self._first[echo[1:4]] = echo
        self.undelivered.add(name)
        if tools:
            self._called.setdefault(tools[0]["id"], []).append(echo)
        # The exchange is recorded even if the answer is refused below, because its tokens were sampled. It shows what
        # the request added to the last answer. `call.new_messages` has less if an equal request was answered before.
        messages = call.messages
        added = next((k for k in range(len(messages), 0, -1) if messages[k - 1] in self._replies), 0)
        asked = "\n".join(f"{message['role']}: {_short(text_of(message))}" for message in messages[added:])
        self._replies.append(call.reply)
        answered = call.text or json.dumps(call.tool_calls or "")
        exchange = Exchange(asked=_short(asked), answered=_short(answered))
        self._llm.read_from(exchange, reply.call)
        self._exchanges.put_nowait(exchange)
        if reply.finish == "abort":
            raise Refused(503, "the engine was stopped in the midst of the answer")
        return answer

    async def exchanges(self) -> AsyncIterator[Exchange]:
        """Yield each request with its answer, in the order of the answers, until the session ends."""
        while (exchange := await self._exchanges.get()) is not None:
            yield exchange

    def over(self) -> None:
        """Refuse further requests. `exchanges` ends after the exchanges that are already queued."""
        self.closed = True
        self._exchanges.put_nowait(None)

    async def close(self) -> None:
        """Cancel and record the requests in flight, then record the calls' labels. The session can't be reopened."""
        # `closed` is set before the requests are cancelled, so that no new request starts in between. The labels are
        # written last, because they depend on all calls, including those that this cancellation records.
        self.closed = True
        for asking in self._asking:
            asking.cancel()
        if self._asking:
            await asyncio.wait(self._asking)
        if self._embeddings is not None:
            await self._embeddings.close()
        if self.broken is None:
            undelivered = {self._answered[id][0] for id in self.undelivered}
            for label in label_calls(self._record, self._declared, undelivered=undelivered):
                self._llm.recorder.add_layer(label)

    @property
    def _record(self) -> Tape:
        return Tape(self._llm.recorder.log)

    async def _messages(self, request: Asked) -> tuple[list[Message], str]:
        """Return the messages of the prompt, and the name of their conversation."""
        asked = await self._with_pictures(self._continued(request))
        if asked[-1]["role"] == "assistant":
            why = "the last message is the assistant's, and an answer that the client has begun can't be continued here"
            raise Refused(400, f"messages: {why}; end with a message of the user or of a tool", param="messages")
        asked = [{**one, "role": "system"} if one["role"] == "developer" else one for one in asked]
        conversation = _conversation(asked)
        return self._recorded(asked, conversation), conversation

    def _continued(self, request: Asked) -> list[Message]:
        """Return the request's messages, with the conversation and the answers that it names by an id.

        Raises Refused if an id isn't known.
        """
        messages = [self._referred(one) if ANSWER in one else one for one in request.messages]
        if request.previous is None:
            return messages
        call, instructions, _ = self._named(request.previous, "previous_response_id")
        before = [*call.messages[instructions:], call.reply]
        return [*messages[: request.instructions], *before, *messages[request.instructions :]]

    def _referred(self, message: Message) -> Message:
        """Return the recorded message of the answer that `message` refers to. If the client left out a call, or sent
        something else than was sent, return a message of its own. Raises Refused."""
        call, _, sent = self._named(message[ANSWER], "messages")
        calls = list[Message]()
        for one in message.get("tool_calls", ()):
            if isinstance(one, int) and one >= len(sent["tool_calls"]):
                raise _unknown(f"{message[ANSWER]}{one}", "messages")
            calls.append(sent["tool_calls"][one] if isinstance(one, int) else one)
        said = {name: value for name, value in (sent | message).items() if name not in (ANSWER, "tool_calls")}
        said |= {"tool_calls": calls} if calls else {}
        same = _echo_key(said) == _echo_key(sent) and said[THOUGHT].strip() == sent[THOUGHT]
        return call.reply if same else said

    def _named(self, id: str, param: str) -> tuple[Call, int, Message]:
        """Return (call, number of instructions in its request, sent message) of the answer with this id."""
        if id not in self._answered:
            raise _unknown(id, param)
        call, instructions, sent = self._answered[id]
        return self._llm.recorder.log.call(call), instructions, sent

    def _recorded(self, messages: Sequence[Message], conversation: str) -> list[Message]:
        """Replace each message that repeats a sent answer by the recorded message. Others stay unchanged.

        Clients write an answer back in their own way: without its thoughts, with arguments as compact JSON, without
        white space around the text, with the agent's name, or with other ids for the tool calls. Tool results then get
        the ids that were sent. If the text next to a call is missing, only the call's id shows that it is this answer.
        If the same answer was sent several times in this conversation, the ids of its calls or the number of messages
        before it tell which is which. Otherwise, its echoes are matched in order. A thought that wasn't sent with this
        answer makes it another answer. Thoughts of such answers are left out.

        Results of parallel calls come in the order of the calls. Some clients send them in the order in which the tools
        ended, which differs in a replay. Many templates show no ids, so the model would take one result for another.
        """
        found = list[tuple[int, int, Message]]()
        turn, places = 0, dict[str | None, int]()  # as `_places`, for calls that were not sent
        seen = Counter[_EchoKey]()
        ids: dict[str | None, str] = {}
        for message in messages:
            if message["role"] == "tool":
                id = message.get("tool_call_id")
                if id in ids:
                    id = ids[id]
                    message = {**message, "tool_call_id": id}
                found.append((turn, places.get(id, self._places.get(id, -1)), message))
                continue
            turn += 1
            if message["role"] == "assistant":
                key, calls, thought = _echo_key(message), message.get("tool_calls"), message.get(THOUGHT, "").strip()
                own = [call["id"] for call in calls] if calls else []
                if sent := self._echoed(key, own, thought, conversation, len(found), seen[key]):
                    seen[key] += 1
                    if own:
                        ids |= zip(own, (call["id"] for call in sent.calls), strict=True)
                    message = sent.recorded
                else:
                    places |= {id: k for k, id in enumerate(own)}
                    message = {name: value for name, value in message.items() if name != THOUGHT}
            found.append((turn, -1, message))
        return [one[2] for one in sorted(found, key=itemgetter(0, 1))]

    def _echoed(
        self, key: _EchoKey, ids: Sequence[str], thought: str, conversation: str, place: int, before: int
    ) -> _Sent | None:
        """Return the sent answer that a message repeats, or None. `ids` are those of its calls, and `before` is the
        number of messages before it that repeat an equal answer."""
        first = self._first.get((key, conversation, place))
        if first and thought in ("", first.thought) and (not ids or ids[0] == first.calls[0]["id"]):
            return first
        by_id = [one for one in self._called.get(ids[0], ()) if key in (one.key, ("", one.key[1]))] if ids else []
        for some in (by_id, self._sent.get((key, conversation), ())):
            if answers := [one for one in some if thought in ("", one.thought)]:
                here = [one for one in answers if one.place == place]
                return here[-1] if here else answers[min(before, len(answers) - 1)]
        return None

    async def _with_pictures(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with stored pictures in place of data URLs.

        A program repeats its conversation in every request, so each URL is decoded only once. Raises Refused for a bad
        picture or too many pixels.
        """
        found, pixels = list[Message](), 0
        for k, message in enumerate(messages):
            parts: list[Message] = [*content_parts(message)]
            for n, part in enumerate(parts):
                if part["type"] != "image_url":
                    continue
                url = part["image_url"]["url"]
                digest = hashlib.sha256(url.encode()).digest()
                if digest not in self._pictures:
                    try:
                        picture = await Picture.read(url)
                        pixels += picture.width * picture.height
                        if pixels > PIXELS:
                            raise BadPicture(
                                f"the request's new pictures have over {PIXELS:,} pixels: send smaller ones"
                            )
                    except BadPicture as error:
                        place = part.get(PLACE, f"messages.{k}.content.{n}.image_url")
                        raise Refused(400, f"{place}: {error}", param="messages") from None
                    await self._llm.recorder.keep_asked(picture)
                    self._pictures[digest] = picture
                detail = part["image_url"]["detail"]
                parts[n] = image_of(self._pictures[digest]) | ({} if detail is None else {"detail": detail})
            found.append({**message, "content": parts} if parts else message)
        return found

    def _sampling(self, request: Asked) -> Sampling:
        own = self._llm.sampling
        asked: dict[str, Any] = {}
        if self._follow:
            names = ("temperature", "top_p", "top_k")
            asked = {name: value for name in names if (value := getattr(request, name)) is not None}
        extra = {
            **(request.penalties if self._follow else {}),
            **({"stop": list(request.stop)} if request.stop else {}),
        }
        if extra:
            asked["extra"] = {**own.extra, **extra}
        sampling = own.model_copy(update=asked) if asked else own
        if own.exact and not sampling.exact:
            warn_once(log, f"{UNUSABLE}: {sampling.inexact}, or let the gateway's follow be false")
        return sampling

    def _stopped(self, request: Asked, call: Call) -> str | None:
        """Return the stop string that ended the answer, if the request has stop strings and the engine reports ids."""
        if not request.stop or call.completion is None or self._renderer is None:
            return None
        rest = self._renderer.decode(call.completion)[len(call.text or "") :]
        return next((stop for stop in request.stop if rest.startswith(stop)), None)

    def _logprobs(self, call: Call) -> list[dict[str, object]] | None:
        renderer = self._renderer
        if call.completion is None or call.logprobs is None or renderer is None:
            return None
        return token_logprobs([renderer.decode([id]) for id in call.completion], call.logprobs)


def ended() -> Refused:
    """Return the error for a request with the key of an ended tape."""
    return Refused(403, "the tape of this key has ended", code="tape_ended", final=True)


def _unknown(id: str, param: str) -> Refused:
    why = f"no answer in this episode has the id {id[:100]!r}: send its messages"
    return Refused(400, why, code="previous_response_not_found", param=param)


def _limit(error: LimitReached) -> Refused:
    if error.limit == "context":
        return Refused(400, str(error), code="context_length_exceeded", param="messages")
    return Refused(429, f"this tape's budget is spent: {error}", code="insufficient_quota", final=True)


def _conversation(messages: list[Message]) -> str:
    """Return a name derived from the leading system messages and the first message after them.

    Every continuation of a conversation has the same name, whatever the order of concurrent requests.
    """
    n = next((k for k, message in enumerate(messages) if message["role"] != "system"), len(messages) - 1)
    first = [{name: value for name, value in message.items() if name != THOUGHT} for message in messages[: n + 1]]
    return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:8]


def _echo_key(message: Message) -> _EchoKey:
    """Return a value that is equal for an answer and for its echo by a client. It leaves out white space around the
    text, a name, the ids of calls, and how the arguments are written as JSON."""
    calls, called = message.get("tool_calls"), ""
    if calls:
        functions = [one["function"] for one in calls]
        called = json.dumps([(one["name"], _parsed(one["arguments"])) for one in functions], sort_keys=True)
    return text_of(message).strip(), called


def _parsed(arguments: str) -> object:
    try:
        return json.loads(arguments, parse_float=_number)
    except (ValueError, RecursionError):
        return arguments


def _number(digits: str) -> float:
    """Return the number as JavaScript writes it back, which has no 2.0."""
    value = float(digits)
    return int(value) if value.is_integer() else value


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
