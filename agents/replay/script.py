"""`Script` reads a tape as the script of a replay and tracks the replay's progress.

It compares each request, step and end with the recorded one. At the first difference it names the place and the likely
cause.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from ...tapes import Action, CauseType, Observation, ParseError, Status, Step, Tape, Thought
from ...tapes.audit.verdict import Difference, Divergence, Likely, clipped, differences, plain
from ...tapes.messages import CONVERSATION, ENV
from ...tapes.records import Call, End, StepRecord
from ...tapes.steps import Exchange
from ...tapes.tape import Entry
from ..episode.seeds import derive_seed, seed_stream

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_PRINTED = re.compile(r"( ended with exit code -?\d+): .*", re.DOTALL)
"""Matches a failed program's error output, which isn't compared because times and ids in it differ in each run."""
_RENAMED_ERRORS = {"MisreadTooOften": "TooManyParseErrors"}
"""The current name of each renamed exception class, by its name on older tapes. A rename isn't a divergence."""
_FROM_OUTSIDE = {
    (Status.ERROR, CauseType.ENVIRONMENT),
    (Status.ERROR, CauseType.OURS),
    (Status.LIMIT, CauseType.SECONDS),
    (Status.LIMIT, CauseType.AGENT_SECONDS),
    (Status.CANCELLED, None),
    (Status.CRASHED, None),
    (None, None),
}
"""(status, cause) of ends that came from outside the agent and could happen at any point in its turn."""


class Over(BaseException):
    """The replay has ended because it diverged or reached the end of the tape.

    It is not an Exception, so that agents don't catch it.
    """


class Script:
    """One replay of one tape. Single use."""

    def __init__(self, tape: Tape, only: int | None = None) -> None:
        """Replay all turns of the tape, or just one turn if `only` is given. A fork's inherited turns are left out."""
        self.tape, self.only = tape, only
        log = tape.log
        begun = tape.begin.parent.turn if tape.begin.parent is not None else 0
        self.last = log.turn - 1
        """The last complete turn."""
        self.partial = log._in_turn
        """Whether the tape ends within a turn of the agent."""
        self.turn = begun if only is None else only
        """The current turn."""
        cut = log.cuts[only] if only is not None and only > begun else None
        self.prefix = tape.at_turn(only) if cut is not None and only is not None else tape.parent
        """The turns before the replayed ones, or None if there are none."""
        steps, records = (cut.steps, cut.records) if cut is not None else (tape.inherited, 0)
        self.answered = [call for at, call in log.call_order if at < records]
        """The tape's own calls in the turns of `prefix`."""
        self.turns = turns_of_calls(tape)
        self.calls = [call for at, call in log.call_order if at >= records]
        self.due: dict[int, dict[str, Call]] = defaultdict(dict)
        """The calls that the agent must still make in each turn."""
        for call in self.calls:
            if call.finish != "cancelled":  # the agent may cancel the call before the request
                self.due[self.turns[call.call]][call.call] = call
        self.steps: dict[str, deque[tuple[int, Entry]]] = defaultdict(deque)
        """(Index, entry) of the recorded steps that weren't repeated yet, by path."""
        self.reactions: dict[int, Observation] = {}
        for index, entry in enumerate(tape.entries[steps:], start=steps):
            self.steps[entry.by].append((index, entry))
            if entry.by == ENV and index > 0 and isinstance(entry.step, Observation):
                self.reactions[entry.turn] = entry.step
        self.older = tape.begin.versions.get("conversation") != CONVERSATION
        """Whether the conversations on the tape follow an older rule."""
        self.other_prompts = False
        """Whether this replay has a step whose answer the older rule shows differently."""
        self.over = False
        self.found: Divergence | None = None
        self.checked = {"calls": 0, "prompts": 0, "steps": 0}
        self.notes: dict[str, None] = {}
        """Sentences about what this replay can't check. They are the keys, used as an ordered set."""

    @property
    def cut_off(self) -> bool:
        """Whether something outside the agent ended the episode, which can happen at any point in the agent's turn."""
        cause = self.tape.cause.type if self.tape.cause is not None else None
        unknown_limit = self.tape.begin.limits is None and self.tape.status is Status.LIMIT
        return (self.tape.status, cause) in _FROM_OUTSIDE or unknown_limit or cause is CauseType.CONTEXT

    @property
    def past_the_cut(self) -> bool:
        """Whether the agent is in the turn where the episode was cut off. Later records of this turn are missing."""
        return self.cut_off and self.turn > self.last

    def numbers(self) -> Iterator[tuple[str, int]]:
        """Yield (seed stream, number of its calls before the replay). The number is found by trying which one gives the
        recorded seed of the stream's first call in the replay."""
        most = len(self.tape.log.call_order) + 1024
        first: dict[str, int] = {}
        for call in self.calls:
            if call.seed is not None:
                first.setdefault(seed_stream(call.by, call.conversation), call.seed)
        for stream, seed in first.items():
            found = (n for n in range(most) if derive_seed(self.tape.begin.seed, stream, n) == seed)
            n = next(found, None)
            if n is not None:
                yield stream, n

    # How it ends

    def end(self, found: Divergence | None = None) -> Over:
        """End the replay, either with a divergence or at the end of the recording. The caller raises the result."""
        if not self.over:
            self.found = found
        self.over = True
        return Over()

    def beyond(self, by: str, does: str, observed: object) -> Over:
        """Report that the agent did something after its last recorded step or call. The caller raises the result."""
        if self.past_the_cut:
            self.notes[f"turn {self.turn}, within which the episode was cut off"] = None
            return self.end()
        tape = self.tape
        how = tape.cause.message if tape.cause is not None else tape.status or "no end record: it is open"
        return self.differs(
            Difference("call" if "calls" in does else "step", None, observed),
            Likely.EXHAUSTED,
            f"{by!r} {does}, after the last record of this agent (the tape ends with: {how})",
            by=by,
        )

    def differs(
        self,
        found: Difference,
        cause: Likely,
        sentence: str,
        *,
        by: str | None = None,
        step: int | None = None,
        call: Call | None = None,
        where: str | None = None,
    ) -> Over:
        """End the replay with a difference at the current turn, or at a step or call. The caller raises the result."""
        if call is not None:
            return self.end(call_divergence(self.tape, call, found, cause, sentence))
        then, now = clipped(found.recorded, found.observed)
        divergence = Divergence(
            tape=self.tape.id,
            turn=self.turn,
            record=record_of_step(self.tape, step),
            step=step,
            by=by,
            field=found.field,
            recorded=then,
            observed=now,
            cause=cause,
            sentence=sentence,
            where=where,
        )
        return self.end(divergence)

    # What happens

    def asked(self, call: Call, *, tokens: bool) -> None:
        """Count a request that was equal to the recorded one. `tokens` is true if the token ids were compared too."""
        self.checked["calls"] += 1
        self.checked["prompts"] += tokens
        self.due[self.turns[call.call]].pop(call.call, None)

    def stepped(self, record: StepRecord, calls: list[str]) -> Entry:
        """Compare a step, and the `calls` that the agent read it from, with the record. Return the recorded step.

        Raises Over, which ends the replay, if the two steps differ, or if an earlier call or step of the turn is
        missing. A replay of a single turn also ends after this turn.
        """
        by = record.by
        if not self.steps[by]:
            raise self._unexpected(record)
        index, entry = self.steps[by][0]
        found = next(_step_differences(entry, record), None)
        then = [call for call, _, _ in entry.calls]
        if found is not None:
            cause, reason = self._blame(record, entry, same_calls=calls == then)
            raise self.differs(found, cause, f"step {index} by {by!r}: {reason}", by=by, step=index)
        if self.older and calls != then[-1:]:
            # The recorded prompts show the newest call as the answer, and the replayed ones don't.
            self.other_prompts = True
        if calls != then and not (self.older and set(calls) <= set(then)):
            sentence = f"step {index} by {by!r} is read from another call than the recorded one"
            raise self.differs(Difference("calls", then, calls), Likely.ORDER, sentence, by=by, step=index)
        self.steps[by].popleft()
        self.checked["steps"] += 1
        if isinstance(record.content, Action):
            # The turn is over, so every recorded call and step in it must have been repeated.
            left = self._left(self.turn)
            if left is not None:
                raise left
            self.turn += 1
            if self.only is not None:
                raise self.end()
        return entry

    def ended(self, end: End) -> Over:
        """Compare the end of the episode with the recorded end. The caller raises the result."""
        if self.cut_off:
            return self.end()
        then, now = _what_ended(self.tape.end), _what_ended(end)
        if then == now:
            return self._left(self.turn) or self.end()
        cause = end.cause
        ending = end.status.value if cause is None else f"{end.status.value}: {cause.error}: {cause.message}"
        found = next(differences(then, now, "end"))
        heard = any(self.turns[call.call] == self.turn for call in self.calls) and not self.due[self.turn]
        blame = Likely.PARSER if heard and cause is not None and cause.type is CauseType.AGENT else Likely.CODE
        if cause is not None and cause.error == "RenderFailed":
            blame = Likely.RENDERING
        was = then["cause"]
        recorded = then["status"] if was is None else f"{then['status']}: {was['error']}: {was['message']}"
        sentence = f"the episode ends here ({ending}); recorded: {recorded}"
        return self.differs(found, blame, sentence, where=cause.frame if cause is not None else None)

    def _left(self, turn: int) -> Over | None:
        """End the replay if a recorded call or step up to the end of `turn` wasn't repeated. Otherwise return None."""
        call = next(iter(self.due[turn].values()), None)
        if call is not None:
            asked = plain(call.messages[-1:])
            sentence = f"call {call.call} by {call.by!r} was recorded and is not made now"
            return self.differs(Difference("call", asked, None), Likely.CODE, sentence, call=call)
        for by, steps in self.steps.items():
            if by != ENV and steps and steps[0][1].turn <= turn:
                index, entry = steps[0]
                sentence = f"step {index} by {by!r} ({entry.step.kind}) was recorded and is not yielded now"
                return self.differs(Difference("step", str(entry.step), None), Likely.CODE, sentence, by=by, step=index)
        return None

    def _unexpected(self, record: StepRecord) -> Over:
        known = sorted({entry.by for entry in self.tape.entries} - {ENV})
        if record.by in known or not known or self.past_the_cut:
            return self.beyond(record.by, f"yields a {record.kind}", str(record.content))
        sentence = f"{record.by!r} yields a step, but has no step on this tape (agents with steps: {', '.join(known)})"
        return self.differs(Difference("by", known, record.by), Likely.CODE, sentence, by=record.by)

    def _blame(self, record: StepRecord, entry: Entry, *, same_calls: bool) -> tuple[Likely, str]:
        others = list(self.steps[record.by])[1:]
        what = f"recorded as {str(entry.step)[:200]!r}, now {str(record.content)[:200]!r}"
        if any(next(_step_differences(other, record), None) is None for _, other in others):
            return Likely.ORDER, f"the steps are in another order, {what}"
        heard = same_calls and entry.calls and self.tape.call(entry.calls[-1][0]).engine != "authored"
        thought = isinstance(record.content, Thought) and not isinstance(record.content, ParseError)
        if heard and thought and not self._is_read(record.content, entry):
            return Likely.CODE, f"the agent yields a thought that is not in the model's answer, {what}"
        if heard:
            return Likely.PARSER, f"the model's answer is the recorded one and is parsed differently, {what}"
        return Likely.CODE, f"the agent yields another step, {what}"

    def _is_read(self, step: Step, entry: Entry) -> bool:
        """Return whether the step may have been parsed from the answers to the recorded step's calls.

        This is true if an answer contains one of the step's strings, or one of these strings contains an answer.
        """
        answers = [self.tape.call(call) for call, _, _ in entry.calls]
        heard = [f"{call.text or ''} {json.dumps(call.tool_calls or ())}".casefold() for call in answers]
        answered = [call.text.casefold() for call in answers if call.text]
        said = [str(leaf).casefold() for leaf in _leaves(step.model_dump(mode="json"))]
        return any(
            leaf and (any(leaf in one for one in heard) or any(one in leaf for one in answered)) for leaf in said
        )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    elif value is not None and not isinstance(value, bool):
        yield value


def call_divergence(tape: Tape, call: Call, found: Difference, cause: Likely, sentence: str) -> Divergence:
    """Return the divergence for a difference at a call, with the call's place on the tape."""
    then, now = clipped(found.recorded, found.observed)
    at = next((at for at, one in tape.log.call_order if one.call == call.call), None)
    return Divergence(
        tape=tape.id,
        turn=turns_of_calls(tape).get(call.call),
        record=at,
        call=call.call,
        by=call.by,
        field=found.field,
        recorded=then,
        observed=now,
        cause=cause,
        sentence=sentence,
    )


def record_of_step(tape: Tape, step: int | None) -> int | None:
    """Return the index of the step's record in the tape, or None for a step of its parent."""
    if step is None or step < tape.inherited:
        return None
    own = (at for at, body in enumerate(tape.bodies) if body.startswith(b'{"t":"step"'))
    return next((at for k, at in enumerate(own) if k == step - tape.inherited), None)


def turns_of_calls(tape: Tape) -> dict[str, int]:
    """Return the turn of the agent in which each of the tape's own calls was made."""
    begun = tape.begin.parent.turn if tape.begin.parent is not None else 0
    starts = [cut.records for cut in tape.log.cuts[begun:]]
    return {call.call: begun + max(0, bisect_right(starts, at) - 1) for at, call in tape.log.call_order}


def _step_differences(entry: Entry, record: StepRecord) -> Iterator[Difference]:
    step = record.content
    if isinstance(step, Exchange) and isinstance(entry.step, Exchange):
        # What was asked is compared as the call's messages. Earlier versions showed less of it in the step if an equal
        # request had just been answered.
        step = step.model_copy(update={"asked": entry.step.asked})
    if entry.step.kind != step.kind:
        yield Difference("kind", entry.step.kind, step.kind)
    elif entry.step != step:
        yield from differences(entry.step.model_dump(mode="json"), step.model_dump(mode="json"), step.kind)


def _what_ended(end: End | None) -> dict[str, Any]:
    """Return the parts of an end that a replay must repeat. The seconds and the traceback's line may differ."""
    if end is None:
        return {"status": None, "cause": None}
    cause = end.cause
    if cause is None:
        return {"status": end.status.value, "cause": None}
    message = _PRINTED.sub(r"\1", _ADDRESS.sub("0x", cause.message or ""))
    error = _RENAMED_ERRORS.get(cause.error or "", cause.error)
    return {"status": end.status.value, "cause": {"type": cause.type.value, "error": error, "message": message}}
