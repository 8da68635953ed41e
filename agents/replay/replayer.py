"""Replay runs the agent's code again on a recorded tape, without a model, a network or an environment.

The episode is an ordinary rollout. Its engine returns the recorded answers, and its environment returns the recorded
observations. Every request and every step is compared with the recorded one, in order within each agent's path. The
first difference ends the replay. Agents never see rewards, so rewards are not compared. `rescore` and `reexec` check
rewards. `replay` takes a tape and an agent, and `replay_run` takes them from a run.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...envs.environment import Environment, Outcome, as_outcome
from ...envs.load_named import load_named
from ...tapes import Action, Observation, Status, Tape
from ...tapes.audit.checking import check_run
from ...tapes.audit.verdict import (
    Difference,
    Likely,
    Verdict,
    Verdicts,
    differences,
    diverged,
    plain,
    unverifiable,
    verified,
)
from ...tapes.common.progress import Progress, silent
from ...tapes.common.run_async import run_async
from ...tapes.errors import UsageError, remedy
from ...tapes.messages import ENV
from ...tapes.records import Begin, Call, Cause, End, Record, StepRecord, request
from ...tapes.steps import Unknown
from ...tapes.store.store import Store
from ..engines.engine import Completion, Request
from ..episode.agent import Agent
from ..episode.limits import Limits
from ..episode.recorder import Recorder
from ..episode.rollout import Episode, parent_of
from ..rendering.renderer import Renderer
from ..setup.recorded_setup import import_steps, recorded_agent, recorded_renderer
from .replay_engine import Diverged, ReplayEngine, recorded_answer
from .script import Script

TRIES = 24
"""Maximum number of replays of a tape of an external program with equal requests. If they were in flight together,
nothing tells which of them got which answer, so the tape is verified if one way of giving them their answers repeats
it. The number covers four requests, or three whose threads start in random order."""
SECONDS = 60.0
"""Time limit for the replay of one tape, in wall-clock seconds."""
NONDETERMINISM = (
    "Likely causes: the agent's code changed, or it reads a clock, random numbers or the network by itself "
    "(use llm.now, llm.random, llm.uuid, or an action of the environment)"
)
"""Text appended to a divergence that nondeterministic code may have caused."""


async def replay(
    tape: Tape,
    agent: Agent,
    *,
    renderer: Renderer | None = None,
    turn: int | None = None,
    seconds: float = SECONDS,
) -> Verdict:
    """Run `agent` again on the whole `tape`, or only on turn `turn`, and compare its requests and steps.

    If `renderer` is the recorded model's renderer, token ids are compared too. The replay diverges if a request or a
    step depends on a clock, random numbers or the network that the agent reads by itself.
    """
    unable = _unable(tape, turn)
    if unable is not None:
        return unverifiable("replay", tape.id, unable)
    processor = tape.begin.versions.get("processor")
    if renderer is not None and renderer.pictures is not None and processor not in (None, renderer.pictures.hash):
        reason = f"processor: the tape was recorded with the image processor {processor[:12]}, here it is"
        return unverifiable("replay", tape.id, f"{reason} {renderer.pictures.hash[:12]}")
    first, pairings = None, 1
    for pairing in range(TRIES):
        script = Script(tape, turn)
        try:
            pairings = await _play(script, agent, renderer, seconds, pairing % pairings)
        except TimeoutError:
            if first is not None:
                break
            return unverifiable(
                "replay",
                tape.id,
                f"the agent did not finish within {seconds:g} s: it waits for something that is not on the tape, "
                "or for an answer that was cancelled while recording",
                checked=script.checked,
            )
        if script.found is None:
            return verified("replay", tape.id, checked=script.checked, not_checked=tuple(script.notes))
        first = first or script
        if pairings == 1:
            break
    assert first is not None
    found = first.found
    assert found is not None
    if first.other_prompts:
        return unverifiable(
            "replay",
            tape.id,
            "made by an older rule: after several calls in a turn, its prompts show the newest one as the answer, "
            f"and now they show the one that the step was made of ({found.sentence})",
            checked=first.checked,
        )
    if found.cause in (Likely.CODE, Likely.PROMPT, Likely.PARSER, Likely.ORDER):
        found = found.model_copy(update={"sentence": f"{found.sentence}. {NONDETERMINISM}"})
    return diverged("replay", found, checked=first.checked, not_checked=tuple(first.notes))


def replay_run(
    run: str | Path,
    agent: Agent | str | None = None,
    *,
    imports: Sequence[str] = (),
    tokenizer: str | None = None,
    turn: int | None = None,
    seconds: float = SECONDS,
    tapes: Sequence[str] = (),
    split: str | None = None,
    jobs: int | None = None,
    progress: Progress = silent,
) -> Verdicts:
    """Run the agent again on the named tapes of a run, or on all closed tapes of a split.

    `agent` is an object or `module:name`. By default it is the agent in the run's configuration. An agent object runs
    only in this process, because worker processes find agents by name. `imports` lists objects as `module:name` whose
    modules define further step types. `tokenizer` is a folder, by default the run's own. If `turn` is given, only this
    turn is checked. `jobs` is the number of processes, by default as many as are worth their start-up time.
    """
    if seconds <= 0:
        raise UsageError(f"seconds is {seconds}; it must be above 0")
    if agent is not None and not isinstance(agent, str):
        jobs = 1
    plan = partial(_plan, str(run), agent, tuple(imports), tokenizer, turn, seconds)
    found = check_run(run, "replay", plan, tapes=tapes, split=split, jobs=jobs, progress=progress)
    return found.model_copy(update={"turn": turn})


def _plan(
    run: str,
    agent: Agent | str | None,
    imports: tuple[str, ...],
    tokenizer: str | None,
    turn: int | None,
    seconds: float,
    store: Store,
) -> Callable[[Tape], Verdict]:
    """Return the function that checks one tape. Each worker process calls `_plan` once."""
    first = next(iter(store.summaries()), None)
    for name in imports:
        load_named(name)
    # If the caller names the agent, the caller chooses all code that runs. So this imports no code that the run's
    # configuration names.
    if agent is None:
        import_steps(run)
    begin = store.tape(first.id).begin if first is not None else None
    acting = recorded_agent(run, agent, begin.agent if begin is not None else None)
    renderer = recorded_renderer(run, tokenizer)

    def check(tape: Tape) -> Verdict:
        recorded = tape.begin.agent.name
        if recorded != acting.path:
            reason = f"it was recorded of the agent {recorded!r}, not of {acting.path!r}: name that agent"
            return unverifiable("replay", tape.id, reason)
        return run_async(replay(tape, acting, renderer=renderer, turn=turn, seconds=seconds))

    return check


def _unable(tape: Tape, turn: int | None) -> str | None:
    """Return the reason why the tape or its turn `turn` can't be replayed, or None if it can."""
    unknown = next((step for step in tape if isinstance(step, Unknown)), None)
    if unknown is not None:
        own = "import its environment's module"
        return (
            f"no imported module defines the step kind {unknown.original!r}, so the agent can't be shown the "
            f"recorded step: {remedy('import', own)}"
        )
    if any(call.cut and not call.cut_messages for call in tape.calls):
        return "an older version cut its prompts in the middle of a message, and this one leaves out whole messages"
    begun = tape.begin.parent.turn if tape.begin.parent is not None else 0
    turns = len(tape.log.cuts)
    if turn is not None and not begun <= turn < turns:
        owner = f"; the first {begun} belong to its parent" if begun else ""
        return f"there is no turn {turn}: the tape has {turns} turns, counted from 0{owner}"
    return None


async def _play(script: Script, agent: Agent, renderer: Renderer | None, seconds: float, pairing: int) -> int:
    """Replay once, with this `ReplayEngine.pairing`. Return the number of pairings."""
    engine = _Engine(script, renderer, pairing)
    try:
        async with asyncio.timeout(seconds):
            await _episode(script, agent, engine).run()
    except BaseException as error:
        # The error is `Over`, or an exception group that contains it if the agent uses a TaskGroup.
        if not script.over or isinstance(error, KeyboardInterrupt | SystemExit | asyncio.CancelledError):
            raise
    return 1 if engine.overdue else engine.pairings  # no pairing makes up for a request that is missing


def _episode(script: Script, agent: Agent, engine: _Engine) -> Episode:
    begin = script.tape.begin
    # Time limits are off, because the replay runs at a different speed than the recording.
    limits = Limits.recorded(begin.limits, agent_seconds=None, system_seconds=None, environment_seconds=None)
    if begin.limits is None:
        script.notes["limits and sampling: this tape doesn't record them"] = None
    if engine.renderer is None and any(call.new_prompt is not None for call in script.calls):
        script.notes["token ids: the recording's tokenizer is missing, so only messages are compared"] = None
    engine.patience = agent.patience
    parent = None if script.prefix is None else parent_of(script.prefix)
    checker = _Checker(begin.model_copy(update={"parent": parent}), script)
    episode = _Episode(agent, _World(script), checker, engine=engine, limits=limits, retries=0)
    answers = [recorded_answer(call) for call in script.answered if call.engine != "authored"]
    episode.llm.sampled = sum(
        len(one.ids) if one.ids is not None else one.usage.completion_tokens or 0 for one in answers
    )
    episode.llm.asked = len(answers)
    if script.prefix is not None:
        for who, n in script.numbers():
            episode.llm.number(who, n - 1)
    return episode


class _Episode(Episode):
    reaction = staticmethod(as_outcome)

    def _warn(self, cause: Cause, *, kept: bool = False) -> None:
        """Log nothing, because the fault was logged during the recording, or the verdict reports it."""


class _Engine(ReplayEngine):
    """Returns the recorded answers. A request that differs from the recorded one ends the replay."""

    def __init__(self, script: Script, renderer: Renderer | None, pairing: int) -> None:
        tokens = any(call.new_prompt is not None for call in script.calls)
        super().__init__(script.tape, renderer=renderer if tokens else None, pairing=pairing)
        self._script = script
        self.skip(script.answered)

    async def complete(self, request: Request) -> Completion:
        script = self._script
        if script.over:
            raise script.end()
        call = None
        try:
            tape, call = self.take(request)
            if call.finish == "cancelled" and script.cut_off and script.turns[call.call] > script.last:
                raise script.beyond(request.path, "calls the model", None)
            self.check(tape, call, request)
        except Diverged as error:
            known = any(call.by == request.path for call in script.tape.calls)
            if error.divergence.cause is Likely.EXHAUSTED and (known or script.past_the_cut):
                raise script.beyond(request.path, "calls the model", plain(list(request.messages)[-1:])) from error
            if call is not None and script.turns[call.call] > script.turn:
                # The request got the answer of a later turn's call, and that call says nothing about this turn.
                sentence = f"one call more than recorded: {request.path!r} asks again in this turn"
                observed = plain(list(request.messages)[-1:])
                found = Difference("call", None, observed)
                raise script.differs(found, Likely.CODE, sentence, by=request.path) from error
            found = error.divergence
            if found.turn is None:
                found = found.model_copy(update={"turn": script.turn})
            raise script.end(found) from error
        script.asked(call, tokens=request.prompt is not None and call.new_prompt is not None)
        return await self.answer(call, request)


class _World(Environment[Action]):
    """Returns the recorded observations."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def reset(self, task: Any) -> Observation:
        first = next(iter(self._script.steps[ENV]), None)
        if first is None or not isinstance(first[1].step, Observation):
            self._script.notes["the agent: the environment failed before its first turn"] = None
            raise self._script.end()
        return first[1].step

    async def restore(self, task: Any, tape: Tape) -> None:
        """Do nothing, because the observations come from the tape."""

    async def step(self, action: Action) -> Outcome:
        script = self._script
        turn = script.turn - 1
        seen = script.reactions.get(turn)
        ends = turn >= script.last and not script.partial
        if ends and script.cut_off:
            raise script.end()
        status = script.tape.status if ends else None
        return Outcome(seen, terminated=status is Status.FINISHED, truncated=status is Status.TRUNCATED)


class _Checker(Recorder):
    """Compares each record with the recorded one and copies its time, so that `llm.now` returns the recorded time."""

    def __init__(self, begin: Begin, script: Script) -> None:
        super().__init__(begin, None, script.prefix)
        self._script = script
        self._meant: dict[str, str] = {}
        """The id of the recorded call for each call of the replay."""
        self._sampled = {(call.by, call.seed): call for call in script.calls if call.engine != "authored"}
        self._authored: dict[str, deque[Call]] = defaultdict(deque)
        for call in script.calls:
            if call.engine == "authored":
                self._authored[call.by].append(call)

    def new_call_id(self) -> str:
        # This must not be an id from the tape, because the replay of a single turn also refers to recorded calls of
        # earlier turns.
        self._calls += 1
        return f"{self.tape}/replay.{self._calls}"

    def write(self, record: Record) -> None:
        script = self._script
        if script.over:
            raise script.end()
        if isinstance(record, End):
            raise script.ended(record)
        if isinstance(record, Call):
            then = self._call(record)
            self._meant[record.call] = then.call
            at = then.at
        elif isinstance(record, StepRecord) and record.by != ENV:
            at = script.stepped(record, [self._meant.get(call, call) for call, _, _ in record.calls]).at
        else:
            at = script.steps[ENV].popleft()[1].at
        super().write(record.model_copy(update={"at": at}))

    def _call(self, record: Call) -> Call:
        """Return the recorded call that this record repeats."""
        script, by = self._script, record.by
        if record.engine != "authored":
            then = self._sampled[by, record.seed]
            was, now = then.conversation, record.conversation
            if was != now:
                sentence = f"call {then.call} by {by!r} belongs to another conversation"
                raise script.differs(Difference("conversation", was, now), Likely.CODE, sentence, call=then)
            if record.completion is not None and record.completion != then.completion:
                was, now = list(then.completion or ()), list(record.completion)
                sentence = f"call {then.call} by {by!r}: the same answer becomes other token ids"
                raise script.differs(Difference("completion", was, now), Likely.RENDERING, sentence, call=then)
            return then
        if not self._authored[by]:
            script.other_prompts = script.older
            raise script.beyond(by, "writes text without a model", record.text)
        then = self._authored[by].popleft()
        was = {"messages": then.messages, "text": then.text, "tool_calls": then.tool_calls}
        messages = request(record, lambda one: self.log.call(str(one.base)))  # the record isn't on the tape yet
        now = {"messages": messages, "text": record.text, "tool_calls": record.tool_calls}
        for found in differences(was, now):
            raise script.differs(found, Likely.CODE, f"{by!r} writes another text without a model", call=then)
        script.asked(then, tokens=False)
        return then
