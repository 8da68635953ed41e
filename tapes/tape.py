"""A tape is the record of one episode. A `Tape` object is an immutable view of it, which is created in O(1) time.

All views of an episode share one growing log, and each view shows the first n steps in the log. An agent's view shows
the steps and the public part of the task. It hides rewards, labels and the private part.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import GetCoreSchemaHandler, JsonValue
from pydantic_core import CoreSchema, core_schema, from_json, to_json

from .errors import BadArgument, BadPicture, HiddenFromAgent, NotATape
from .messages import ENV, Conversation, Messages
from .pictures import Picture, pictures_of
from .places import Place
from .records import (
    DIGEST_START,
    SCHEMA,
    Begin,
    Call,
    Cause,
    End,
    Message,
    Record,
    Reward,
    StepRecord,
    fold,
    total_reward,
)
from .schema import parse_record, read_record
from .status import Status, trains
from .steps import Action, Observation, Step, Thought, role_of


class Entry(NamedTuple):
    """A step with information about its origin."""

    step: Step
    by: str
    calls: tuple[tuple[str, int, int], ...]
    at: float
    turn: int
    """Number of the turn, counted from 0. The environment's reaction to an action belongs to the action's turn."""
    turns: int
    """Number of actions up to and including this step."""


class Cut(NamedTuple):
    """A point between two turns, given by the number of steps and records before it. A fork can begin there."""

    steps: int
    records: int


def new_tape_id() -> str:
    """Return 22 hex digits: 12 for the milliseconds since 1970, then 10 random digits. So ids sort by time."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(5).hex()}"


def step_record(tape: str, step: Step, *, by: str, calls: tuple[tuple[str, int, int], ...] = ()) -> StepRecord:
    """Return the record for a step, with the current time."""
    return StepRecord(tape=tape, by=by, role=role_of(step), kind=step.kind, calls=calls, content=step, at=time.time())


class TapeLog:
    """The growing record of one episode. Records are added only by `append`, which checks their order."""

    def __init__(self, begin: Begin, *, parent: Tape | None = None, body: bytes | None = None) -> None:
        self.begin = begin
        self.parent = parent = _checked_parent(begin, parent)
        self.entries: list[Entry] = list(parent._log.entries[: parent._n]) if parent is not None else []
        self.inherited = len(self.entries)
        """In a fork, the number of steps at the beginning of `entries` that belong to the parent."""
        self.bodies: list[bytes] = []
        self.digests: list[bytes] = []
        self.rewards: list[tuple[int, Reward]] = []
        """Each reward as (number of records before it, reward)."""
        self.layers: list[Record] = []
        self.shown: dict[str, Picture] = {}
        """The pictures that the recorder has stored, by name. It is empty on a tape that was read from a store."""
        self.file: Callable[[str], bytes] | None = parent._log.file if parent is not None else None
        """A blocking function that returns the bytes of a media file, given its name. None if the tape is in no run."""
        self.end: End | None = None
        self.call_order: list[tuple[int, Call]] = []
        self._calls: dict[str, Call] = {}
        self._read: dict[str, int] = {}
        """For each call, the number of steps before it."""
        self._reads: defaultdict[str, list[int]] = defaultdict(list)
        """These numbers for the calls of each agent, in order."""
        self._conversations: dict[str, Conversation] = {}
        self.turn = begin.parent.turn if begin.parent is not None else 0
        self.cuts: list[Cut] = list(parent._log.cuts[: self.turn]) if parent is not None else []
        """The start of each turn. For an inherited turn, `Cut.records` counts the parent's records."""
        self._in_turn = False
        self._fold(body if body is not None else begin.body())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for _, call in self.call_order:  # they are pickled without their bases
            if call.base is not None:
                call.join(self.call(call.base))

    def append(self, record: Record, body: bytes | None = None) -> bytes:
        """Append one record and return its body. Raises NotATape if the record can't come next on this tape.

        For a record that was read from a store, pass its original bytes as `body`, and the digest is computed from
        them. Serialising the record again could give other bytes if the code has changed since.
        """
        if self.end is not None:
            raise NotATape(f"tape {self.begin.tape} has ended; a {type(record).__name__} can't follow its end")
        part: Any = record  # `cast` is a function, and this method runs for every record
        if part.tape != self.begin.tape:
            raise NotATape(f"a {type(record).__name__} of tape {part.tape!r} was given to tape {self.begin.tape!r}")
        written: bytes = record.body() if body is None else body
        # Classes are compared, because with pydantic's metaclass isinstance costs more than the rest of this method.
        if type(part) is StepRecord:
            self._add_step(part)
        elif type(part) is Call:
            self._add_call(part)
        elif type(part) is Reward:
            if part.step is not None and not 0 <= part.step < len(self.entries):
                raise NotATape(f"a reward on step {part.step} of tape {self.begin.tape}, which has {len(self.entries)}")
            self.rewards.append((len(self.bodies), part))
        elif type(part) is End:
            self.end = part
        else:
            raise NotATape(f"a {type(record).__name__} can't be part of a tape (here {self.begin.tape})")
        self._fold(written)
        return written

    def _fold(self, body: bytes) -> None:
        self.bodies.append(body)
        self.digests.append(fold(self.digests[-1] if self.digests else DIGEST_START, body))

    def _speak(self) -> None:
        if not self._in_turn:
            self._in_turn = True
            self.cuts.append(Cut(len(self.entries), len(self.bodies)))

    def _add_step(self, record: StepRecord) -> None:
        for call, start, end in record.calls:
            n = len(self.call(call).completion or ())
            if not 0 <= start <= end <= max(n, 0):
                raise NotATape(f"a step of tape {self.begin.tape} names tokens [{start}, {end}) of {n} in call {call}")
        if record.by != ENV:
            self._speak()
        acted = record.by != ENV and record.role == "action"
        turn = max(self.turn - 1, 0) if record.by == ENV else self.turn
        if acted:
            self._in_turn = False
            self.turn += 1
        self.entries.append(Entry(record.content, record.by, record.calls, record.at, turn, self.turn))

    def _add_call(self, call: Call) -> None:
        if call.call in self._calls:
            raise NotATape(f"call {call.call} is twice on tape {self.begin.tape}")
        if call.base is not None:
            base = self.call(call.base)
            have = len(base.completion or ()) + self.prompt_length(base)
            if call.keep > have:
                raise NotATape(f"call {call.call} keeps {call.keep} tokens of {call.base}, which has {have}")
            call.join(base)
        elif call.keep or call.keep_messages:
            raise NotATape(f"call {call.call} keeps {call.keep} tokens and {call.keep_messages} messages of no call")
        self._speak()
        self._calls[call.call] = call
        self._read[call.call] = len(self.entries)
        self._reads[call.by].append(len(self.entries))
        self.call_order.append((len(self.bodies), call))

    def call(self, call: str) -> Call:
        """Return the call with the id `call`. In a fork, the call may belong to one of the tape's ancestors."""
        log: TapeLog | None = self
        while log is not None:
            found = log._calls.get(call)
            if found is not None:
                return found
            log = log.parent._log if log.parent is not None else None
        raise NotATape(f"tape {self.begin.tape} has no call {call!r}")

    def prompt_length(self, call: Call) -> int:
        """Return the number of prompt tokens in `call`, including the tokens that are kept from its base."""
        return call.keep + len(call.new_prompt or ())

    def conversation(self, path: str, n: int) -> tuple[list[Message], int]:
        """Return the growing list of messages for the agent at `path`, and how many of them come from the first `n`
        steps.

        Each step is converted only once per path. However often this method is called, n steps cost O(n) in total.
        """
        conversation = self._conversations.get(path)
        if conversation is None:
            conversation = self._conversations[path] = Conversation(path)
        if n < len(conversation.counts) and conversation.counts[n] < 0:
            conversation = Conversation(path)
        for k in range(len(conversation.counts) - 1, n):
            entry = self.entries[k]
            made_of = self._made_of(k, entry) if entry.by == path and entry.calls else None
            conversation.add(entry.step, entry.by, made_of)
        return conversation.items, conversation.counts[n]

    def _made_of(self, k: int, entry: Entry) -> tuple[Call, int]:
        """Return the call that step `k` was made of, and the number of steps that the call could read. If the agent's
        next call read the conversation without this answer, that number is `k`."""
        name, log = entry.calls[-1][0], self
        while name not in log._calls and log.parent is not None:
            log = log.parent._log
        call, read, reads = log.call(name), log._read[name], log._reads[entry.by]
        return call, k if bisect_right(reads, read) < bisect_right(reads, k) else read


def _checked_parent(begin: Begin, parent: Tape | None) -> Tape | None:
    if begin.parent is None:
        if parent is not None:
            raise NotATape(f"tape {begin.tape} is not a fork, so it can't have a parent")
        return None
    if parent is None:
        raise NotATape(f"tape {begin.tape} is a fork of {begin.parent.tape}; give that tape as its parent")
    cut = parent if parent._k == begin.parent.records else parent.at_turn(begin.parent.turn)
    if (cut.id, cut.digest, cut._k) != (begin.parent.tape, begin.parent.digest, begin.parent.records):
        raise NotATape(
            f"tape {begin.tape} was forked from tape {begin.parent.tape} with digest {begin.parent.digest} "
            f"after {begin.parent.records} records; the given parent is tape {cut.id} with {cut.digest} "
            f"after {cut._k}"
        )
    return cut


class Tape(Sequence[Step]):
    """An immutable view of an episode that shows the steps up to the moment when the view was created.

    Indexes such as `tape[-1]`, `len(tape)` and iteration refer to steps. In an agent's view, access to rewards, labels
    or the private part of the task raises HiddenFromAgent. `model_dump_json` writes a closed tape as one document.
    `model_validate_json` reads it back as an equal tape.
    """

    __slots__ = ("_k", "_log", "_n", "_open", "scope")

    def __init__(
        self,
        log: TapeLog,
        n: int | None = None,
        *,
        records: int | None = None,
        scope: str = "",
        agent_view: bool = False,
    ) -> None:
        if not isinstance(log, TapeLog):
            raise NotATape(f"log is a {type(log).__qualname__}; a Tape is made by `rollout`, `Tape.of` and a run")
        self._log = log
        self._n = len(log.entries) if n is None else n
        self._k = len(log.bodies) if records is None else records
        self.scope = scope
        """Path of the agent that this view is for, or an empty string for a view outside an agent."""
        self._open = not agent_view

    @classmethod
    def of(
        cls,
        bodies: Iterable[bytes],
        *,
        layers: Iterable[Record] = (),
        parent: Tape | None = None,
        file: Callable[[str], bytes] | None = None,
    ) -> Tape:
        """Return the tape with these record bodies, in order. Raises NotATape (a ValueError) if they don't form a tape.

        `file` is a function that returns the bytes of a media file, given its name. The tape uses it to read its
        pictures.
        """
        if not isinstance(bodies, Iterable) or not isinstance(layers, Iterable):
            raise NotATape(f"bodies and layers are lists, not {type(bodies).__name__} and {type(layers).__name__}")
        log: TapeLog | None = None
        for k, body in enumerate(bodies):
            record = read_record(body, f"record {k}")
            if log is None:
                if not isinstance(record, Begin):
                    raise NotATape(f"a tape starts with `begin`, not with {record.t!r}")
                log = TapeLog(record, parent=parent, body=body)
            else:
                log.append(record, body)
        if log is None:
            raise NotATape("a tape of 0 records: `bodies` must hold at least its `begin`")
        for layer in layers:
            if not isinstance(layer, Record):
                raise NotATape(f"layers hold records, not a {type(layer).__name__}")
            log.layers.append(layer)
        log.file = file or log.file
        shown = (one for entry in log.entries for one in pictures_of(entry.step))
        for picture in (*pictures_of(log.begin.task.pictures), *shown):
            picture.in_run(file)
        return cls(log)

    # For agents

    @property
    def id(self) -> str:
        return self._log.begin.tape

    @property
    def task(self) -> JsonValue:
        """The public part of the task."""
        return self._log.begin.task.public

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [entry.step for entry in self._log.entries[: self._n][index]]
        if index < 0:
            index += self._n
        if not 0 <= index < self._n:
            raise IndexError(f"step {index} of a tape with {self._n} steps")
        return self._log.entries[index].step

    def __iter__(self) -> Iterator[Step]:
        for i in range(self._n):
            yield self._log.entries[i].step

    @property
    def entries(self) -> list[Entry]:
        """The steps, each with its producer's path, its time, its turn and its calls."""
        return self._log.entries[: self._n]

    @property
    def last(self) -> Step:
        """The newest step. Raises IndexError on an empty tape."""
        return self[-1]

    @property
    def observations(self) -> list[Observation]:
        return [step for step in self if isinstance(step, Observation)]

    @property
    def thoughts(self) -> list[Thought]:
        return [step for step in self if isinstance(step, Thought)]

    @property
    def actions(self) -> list[Action]:
        return [step for step in self if isinstance(step, Action)]

    @property
    def turns(self) -> int:
        """Number of actions so far."""
        return self._log.entries[self._n - 1].turns if self._n else 0

    def now(self) -> Tape:
        """Return a new view of all steps so far, for the same agent. Inside an agent's `act`, it includes the steps
        that `act` has already yielded."""
        return Tape(self._log, scope=self.scope, agent_view=not self._open)

    def within(self, path: str) -> Tape:
        """Return the same view, but for the agent at `path`."""
        return Tape(self._log, self._n, records=self._k, scope=path, agent_view=not self._open)

    def messages(self, system: str | None = None, *, path: str | None = None) -> Messages:
        """Return the conversation of the agent at `path` as chat messages, after the system prompt if one is given. The
        default for `path` is `scope`, and outside an agent the outermost agent. Raises BadArgument if the episode has
        ended and `path` had no agent."""
        log = self._log
        path = path if path is not None else self.scope or log.begin.agent.name
        if log.end is not None:
            known = {log.begin.agent.name, *(e.by for e in log.entries), *(call.by for _, call in log.call_order)}
            if path not in known - {ENV}:
                paths = ", ".join(map(repr, sorted(known - {ENV})))
                raise BadArgument(f"tape {self.id} has no agent {path!r}: its agents are {paths}")
        items, n = log.conversation(path, self._n)
        head = ({"role": "system", "content": system},) if system is not None else ()
        return Messages(head, items, n)

    # For the trainer, the auditor and the user only

    @property
    def log(self) -> TapeLog:
        """The log that this view shows, with its records, calls and turns."""
        return self._visible("log")

    def _visible(self, what: str) -> TapeLog:
        if not self._open:
            raise HiddenFromAgent(f"`{what}` is hidden from agents: they see the steps and the public part of the task")
        return self._log

    def _end(self, what: str) -> End | None:
        log = self._visible(what)
        return log.end if self._k == len(log.bodies) else None

    @property
    def begin(self) -> Begin:
        return self._visible("begin").begin

    @property
    def end(self) -> End | None:
        return self._end("end")

    @property
    def closed(self) -> bool:
        return self._end("closed") is not None

    @property
    def status(self) -> Status | None:
        """How the episode ended, or None while it is running."""
        end = self._end("status")
        return end.status if end is not None else None

    @property
    def cause(self) -> Cause | None:
        end = self._end("cause")
        return end.cause if end is not None else None

    @property
    def trains(self) -> bool:
        """True if the episode ended in a way that allows training. Training also needs a reward."""
        return trains(self.status, self.cause.type if self.cause is not None else None)

    @property
    def reward(self) -> float | None:
        """The sum of weight * value over the recorded components.

        It is None if nothing was scored, if a component failed, or if the environment, the model or the machine ended
        the episode (`trains` is False): the sum so far then says nothing about the agent. None is not the same as a
        reward of 0.
        """
        log = self._visible("reward")
        if self.closed and not self.trains:
            return None
        return total_reward(r for k, r in log.rewards if k < self._k)

    @property
    def rewards(self) -> list[Reward]:
        """All components in the view's records, in order, including metrics (weight 0)."""
        return [reward for k, reward in self._visible("rewards").rewards if k < self._k]

    @property
    def layers(self) -> list[Record]:
        """The records that were added after the tape's `end`, if they were loaded."""
        return list(self._visible("layers").layers)

    @property
    def layer_rewards(self) -> dict[str, float | None]:
        """The reward of each later scoring, by the name of its layer. It is None as in `reward`."""
        found: dict[str, list[Reward]] = {}
        for one in self.layers:
            if isinstance(one, Reward) and one.layer is not None:
                found.setdefault(one.layer, []).append(one)
        return {name: total_reward(rewards) for name, rewards in found.items()}

    @property
    def calls(self) -> list[Call]:
        """The tape's own model calls that the view shows, in order. Calls that a fork inherited are not included."""
        return [call for k, call in self._visible("calls").call_order if k < self._k]

    @property
    def not_taken(self) -> frozenset[str]:
        """Ids of the answers that the agent sampled and didn't take: no step was made of them, and one was made of
        another answer to the same prompt, such as the best of three. RL uses them, and imitation doesn't."""
        made = {call for entry in self.entries for call, _, _ in entry.calls}
        left, taken = [call for call in self.calls if call.call not in made], set[tuple[str, bytes]]()
        if left:
            taken = {self._question(call) for call in self.calls if call.call in made}
        return frozenset(call.call for call in left if self._question(call) in taken)

    def _question(self, call: Call) -> tuple[str, bytes]:
        return call.by, to_json([call.messages, call.tools and call.tools.hash])

    @property
    def parent(self) -> Tape | None:
        """The part of the parent tape that this fork begins with, or None if this tape is not a fork."""
        return self._visible("parent").parent

    @property
    def inherited(self) -> int:
        """The number of steps that belong to the parent."""
        return self._visible("inherited").inherited

    @property
    def digest(self) -> str:
        """The SHA-256 digest (hex) of this view's records, computed with `fold`. It never includes layers."""
        return self._visible("digest").digests[self._k - 1].hex()

    @property
    def bodies(self) -> list[bytes]:
        """The bytes of the records, as written."""
        return self._visible("bodies").bodies[: self._k]

    def call(self, call: str) -> Call:
        """Return the call with the id `call`. A fork also has the calls that it inherited."""
        return self._visible("call").call(call)

    def call_tools(self, call: Call | str) -> tuple[dict[str, JsonValue], ...] | None:
        """Return the function schemas that a call offered, or None if it offered no tools."""
        log: TapeLog | None = self._visible("call_tools")
        offered = (log.call(call) if isinstance(call, str) else call).tools
        if offered is None or offered.schemas is not None:
            return offered.schemas if offered is not None else None
        while log is not None:
            for _, one in log.call_order:
                if one.tools is not None and one.tools.hash == offered.hash and one.tools.schemas is not None:
                    return one.tools.schemas
            log = log.parent._log if log.parent is not None else None
        raise NotATape(f"tape {self.id} names tools {offered.hash} that no call of it spells out")

    def call_places(self, call: Call | str) -> tuple[Place, ...]:
        """Return the places of pictures in a call's prompt, in order. Offsets are indexes in the call's `prompt`."""
        log = self._visible("call_places")
        places: list[Place] = []
        for one in (log.call(call) if isinstance(call, str) else call).sources():
            places = [place for place in places if place.end <= one.keep] + list(one.places)
        return tuple(places)

    def picture(self, name: str) -> bytes:
        """Return the bytes of the PNG file `name`. This call blocks. Raises BadPicture if no step or request on this
        tape shows the picture."""
        log = self._log
        picture = log.shown.get(name) or next((p for step in self for p in pictures_of(step) if p.name == name), None)
        if picture is not None and picture.data is not None:
            return picture.data
        # If the class of a step isn't imported, its pictures aren't Picture objects. The calls still name them in their
        # places.
        named = ((call.media, *(place.media for place in call.places)) for _, call in log.call_order)
        if picture is None and not any(name in media for names in named for media in names):
            if log.parent is not None:
                return log.parent.picture(name)
            raise BadPicture(f"tape {self.id} shows no picture {name[:80]!r}: show it in a step first")
        if log.file is None:
            raise BadPicture(f"tape {self.id} is in no run that has the file {name}: read it from the run's store")
        return log.file(name)

    def at_turn(self, turn: int) -> Tape:
        """Return the tape as it was after `turn` complete turns. A fork can begin there. For `turn` 0, the tape ends
        after the first observation. Raises ValueError if `turn` is negative or too large."""
        log = self._visible("at_turn")
        cuts = log.cuts
        if 0 <= turn < len(cuts):
            cut = cuts[turn]
            if log.parent is not None and turn < (log.begin.parent.turn if log.begin.parent else 0):
                return log.parent.at_turn(turn)
            return Tape(log, cut.steps, records=cut.records)
        if turn == len(cuts) and not log._in_turn:
            return Tape(log, records=len(log.bodies) - (log.end is not None))
        raise ValueError(f"tape {self.id} has {log.turn} whole turns; it can't be cut after turn {turn}")

    # One document

    def model_dump(self) -> dict[str, JsonValue]:
        """Return the whole tape as plain values, in the form that `model_dump_json` writes."""
        log = self._visible("model_dump")
        return {
            "schema": SCHEMA,
            "digest": self.digest,
            "parent": log.parent.model_dump() if log.parent is not None else None,
            "records": [from_json(body) for body in self.bodies],
            "layers": [from_json(layer.body()) for layer in log.layers],
        }

    def model_dump_json(self, *, indent: int | None = None) -> str:
        """Return the whole tape as one JSON document. Raises NotATape while the tape runs."""
        if not self.closed:
            raise NotATape(f"tape {self.id} is still running; only a closed tape is a document")
        return to_json(self.model_dump(), indent=indent).decode()

    @classmethod
    def model_validate(cls, document: object) -> Tape:
        """Check a document's digest and return its tape. Raises NotATape (a ValueError) if the document is invalid."""
        if isinstance(document, Tape):
            return document
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            found = document.get("schema") if isinstance(document, dict) else type(document).__name__
            raise NotATape(f"a tape document has the schema {SCHEMA!r}, not {found!r}")
        unknown = set(document) - {"schema", "digest", "parent", "records", "layers"}
        if unknown or not isinstance(document.get("records"), list):
            raise NotATape(f"a tape document has a list of records and no field {sorted(unknown)}")
        parent = cls.model_validate(document["parent"]) if document.get("parent") is not None else None
        layers = [parse_record(to_json(layer)) for layer in document.get("layers") or ()]
        tape = cls.of((to_json(record) for record in document["records"]), layers=layers, parent=parent)
        if tape.digest != document.get("digest"):
            raise NotATape(
                f"tape {tape.id}: the document says digest {document.get('digest')!r}, its records fold to "
                f"{tape.digest!r}: it was edited"
            )
        return tape

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Tape:
        """Return the tape in a JSON document, as `model_validate` does."""
        try:
            document = from_json(text)
        except ValueError as error:
            raise NotATape(f"not JSON: {error}") from None
        return cls.model_validate(document)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.model_validate, serialization=core_schema.plain_serializer_function_ser_schema(cls.model_dump)
        )

    def __eq__(self, other: object) -> bool:
        """Views are equal if they show the same records of the same episode."""
        if not isinstance(other, Tape):
            return NotImplemented
        mine, theirs = self._log.digests[self._k - 1], other._log.digests[other._k - 1]
        return mine == theirs and self._n == other._n

    def __hash__(self) -> int:
        return hash((self._log.digests[self._k - 1], self._n))

    def __repr__(self) -> str:
        state = "" if not self._open else f", {self.status.value if self.status else 'running'}, reward {self.reward}"
        return f"<Tape {self.id}: {self._n} steps{state}>"


class Ending(Tape):
    """A view of a running tape for the code that scores it. The tape's `end` is recorded after the scores, but this
    view has it already."""

    __slots__ = ("_its_end",)

    def __init__(self, log: TapeLog, end: End) -> None:
        super().__init__(log)
        self._its_end = end

    def _end(self, what: str) -> End | None:
        return self._its_end
