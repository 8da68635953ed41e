"""Plays an environment and reports violations of its contract, each with a remedy.

`check_env` needs a factory, a few tasks and a policy. Faults of the environment become findings, not exceptions, and
every call has a time limit. Plain environments are accepted: a `str` observation becomes `Text`, and the policy may
return a `str`, which becomes an `Answer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from ...tapes.common.arguments import check_arguments
from ...tapes.errors import Unwritable
from ...tapes.messages import ENV
from ...tapes.records import StepRecord
from ...tapes.steps import Action
from ...tapes.tape import Tape, step_record
from ..environment import EnvironmentFactory, bare_tape
from ..taskset import BadTasks, as_task
from .env_probe import Failed, Play, Policy, Probe, Stuck
from .findings import CheckReport, checked

CHECKS = {
    "raises": "no method raises",
    "types": "every method is async and returns what its contract says",
    "hangs": "every call returns in time",
    "blocks": "no call blocks the event loop",
    "close": "close works, also when reset never ran",
    "records": "every step can be written on a tape and read back",
    "rewards": "episodes are scored, within the promised range",
    "determinism": "the same seed and actions give the same episode",
    "concurrency": "instances don't disturb each other",
    "restore": "a tape's prefix brings a fresh instance to the recorded state",
    "cancellation": "a cancelled call stops",
    "leaks": "a closed episode leaves no task, thread or open file behind",
}
"""For each check, a sentence that is true if the environment passes the check."""
SAME_TWICE = (
    "played twice with the same seed and actions, {}; draw every random number from `self.rng`, or from a generator "
    "seeded with it in `reset`"
)
SAME_TOGETHER = (
    "with other instances running at once, the episode changed: {}; keep state on the instance, not on its class, its "
    "module or a shared object"
)
_MORE = 4
"""The number of episodes played to measure leaks."""


class Report(CheckReport):
    """The result of `check_env`."""

    environment: str
    """The name of the environment's class."""
    episodes: int
    """Episodes that the policy played to their end. Episodes in the later checks are not counted."""
    turns: int
    rewards: tuple[float, float] | None
    """The smallest and the largest sum of an episode's reward components, or None if no episode was scored."""

    def __str__(self) -> str:
        head = (
            f"{self.environment}: {'ok' if self.ok else 'NOT OK'} ({self.episodes} episodes, {self.turns} turns, "
            f"rewards {'none' if self.rewards is None else '{:g} to {:g}'.format(*self.rewards)}, "
            f"{self.seconds:.1f} s)"
        )
        return self.shown(head, CHECKS)


@check_arguments
def check_env(
    factory: EnvironmentFactory,
    tasks: Iterable[object],
    actions: Policy,
    *,
    episodes: int = 3,
    max_turns: int = 20,
    timeout: float = 10.0,
    stall: float = 0.25,
    seed: int = 0,
    reward_range: tuple[float, float] | None = None,
) -> Report:
    """Play the first `episodes` tasks with the policy `actions(observation, rng)`, then replay them for other checks.

    The policy returns an Action, or a `str` for an environment that takes `Answer`. A call may take at most `timeout`
    seconds and block the event loop for at most `stall` seconds. `reward_range` holds the smallest and the largest
    reward that an episode should have. The check runs its own event loops in threads, so it works inside a running loop
    too. An `irreversible` environment is played once per task. Raises BadArgument, NotAnEnvironment or BadTasks.
    """
    started = time.perf_counter()
    chosen = [as_task(task, k) for k, task in zip(range(episodes), tasks, strict=False)]
    if not chosen:
        raise BadTasks(f"check_env needs at least one task (episodes={episodes})")
    probe = Probe(factory, actions, max_turns=max_turns, timeout=timeout, stall=stall, seed=seed)
    plays: list[Play] = []
    skipped = {"blocks": "the environment sets `blocking`, so it runs in a thread"} if probe.blocking else {}
    try:
        for k, task in enumerate(chosen):
            plays += probe.run(lambda task=task, k=k: probe.play(task, k))
        _check_records(probe, plays)
        _check_rewards(probe, plays, reward_range)
        _check_again(probe, plays, skipped)
    except Stuck:
        skipped = dict.fromkeys(list(CHECKS)[4:], "a call never returned") | skipped
    ended = [play for play in plays if play.status is not None]
    sums = [play.total for play in ended if play.total is not None]
    return Report(
        environment=probe.name,
        ok=not any(f.severity == "error" for f in probe.findings),
        checks=checked(CHECKS, probe.findings, skipped),
        findings=tuple(probe.findings),
        episodes=len(ended),
        turns=sum(len(play.turns) for play in plays),
        rewards=(min(sums), max(sums)) if sums else None,
        seconds=time.perf_counter() - started,
    )


def _check_records(probe: Probe, plays: list[Play]) -> None:
    for step in (step for play in plays for step in play.steps):
        what = f"{type(step).__qualname__} {step!r:.120}"
        try:
            body = step_record("check", step, by="policy" if isinstance(step, Action) else ENV).body()
            back = StepRecord.model_validate_json(body)
            if back.content != step or back.body() != body:
                probe.found(
                    "records",
                    f"{what} is read back from its record as {back.content!r:.120}, which is not equal; "
                    "give its fields types that survive JSON, and no NaN",
                )
            if not str(step) and not isinstance(step, Action):
                probe.found("records", f"str() of {what} is empty: a model would see nothing", warning=True)
        except Unwritable as error:
            probe.found("records", f"{what}: {error}")
        except Exception as error:
            why = f"{type(error).__qualname__}: {str(error)[:300]}"
            probe.found(
                "records", f"{what} can't be written on a tape: {why}; give its fields types that JSON can hold"
            )


def _check_rewards(probe: Probe, plays: list[Play], promised: tuple[float, float] | None) -> None:
    for play in (play for play in plays if play.status is not None):
        total = play.total
        if total is None:
            probe.found(
                "rewards",
                f"an episode that ended as `{play.status}` after {len(play.turns)} turns has no reward, so it would "
                "not be trained on; score its last action, or define `finish`",
                warning=True,
            )
        elif promised is not None and not promised[0] <= total <= promised[1]:
            probe.found(
                "rewards",
                f"an episode earned {total:g}, outside the promised {promised[0]:g} to "
                f"{promised[1]:g} (task {play.task.id or play.task.hash[:12]}, {len(play.turns)} turns); correct "
                "the reward or the promised range",
            )


def _check_again(probe: Probe, plays: list[Play], skipped: dict[str, str]) -> None:
    """Run the checks that play more episodes. A check is skipped if an earlier check that it depends on failed."""
    again = ("determinism", "concurrency", "restore")
    after = (*again, "cancellation", "leaks")
    whole = [play for play in plays if play.status is not None]
    if probe.effect == "irreversible":
        skipped |= dict.fromkeys(after, "the environment is irreversible")
    elif not whole:
        skipped |= dict.fromkeys(("rewards", *after), "no episode reached its end")
    elif any((finding.check, finding.severity) == ("records", "error") for finding in probe.findings):
        skipped |= dict.fromkeys(after, "steps that can't be written can't be compared")
    else:
        for play in whole:
            _check_same(probe, "determinism", SAME_TWICE, [play])
        if any(finding.check == "determinism" for finding in probe.findings):
            skipped |= dict.fromkeys(again[1:], "episodes can't be compared while determinism fails")
        else:
            together = [whole[k % len(whole)] for k in range(max(3, len(whole)))]
            _check_same(probe, "concurrency", SAME_TOGETHER, together)
            _check_restore(probe, max(whole, key=lambda play: len(play.turns)))
        if probe.blocking:
            skipped["cancellation"] = "a call in a thread can't be cancelled"
        else:
            methods = ("reset", "step") if whole[0].turns else ("reset",)
            waited = [probe.run(lambda name=name: _cancelled(probe, whole[0], name))[0] for name in methods]
            if not any(waited):
                skipped["cancellation"] = "no call waits, so none can be cancelled"
        _check_leaks(probe, whole[0])
    probe.run(lambda: probe.close(probe.unused))


async def _replayed(probe: Probe, play: Play, prefix: Tape | None = None) -> Play:
    """Play an episode again with the same actions. With `prefix`, continue from the end of that tape."""
    return await probe.play(play.task, play.number, script=[action for action, _ in play.turns], prefix=prefix)


def _check_same(probe: Probe, check: str, sentence: str, plays: list[Play]) -> None:
    """Replay the episodes concurrently, and report each episode that differs. `sentence` has a placeholder for the
    difference."""
    results = probe.run(*(partial(_replayed, probe, play) for play in plays))
    for first, second in zip(plays, results, strict=True):
        if difference := _difference(first, second):
            probe.found(check, sentence.format(difference))


def _check_leaks(probe: Probe, play: Play) -> None:
    """Report resources that leak at least once per episode, on average. The first episode isn't counted, because it may
    fill caches, which don't grow again."""

    async def several() -> dict[str, int]:
        before: dict[str, set[object]] = {}
        for episode in range(1 + _MORE):
            await _replayed(probe, play)
            for _ in range(3):  # cancelled tasks need a few passes of the loop to end
                await asyncio.sleep(0)
            before = before if episode else _held()
        # New resources are counted: a difference between two counts would miss a leak if older resources ended.
        return {what: len(held - before[what]) for what, held in _held().items()}

    for what, left in probe.run(several)[0].items():
        if left >= _MORE:
            probe.found(
                "leaks",
                f"{_MORE} episodes left {left} {what} behind after `close`; a long training run would "
                "exhaust them: release them in `close`",
            )


def _held() -> dict[str, set[object]]:
    """Return the tasks in this event loop, and the threads and open files in this process."""
    gc.collect()
    files = set[object]()
    for number in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else []:  # not every system lists them
        with contextlib.suppress(OSError):  # the list itself was an open file
            found = os.fstat(int(number))
            files.add((number, found.st_dev, found.st_ino))  # a number that was closed is soon used again
    return {"tasks": {*asyncio.all_tasks()}, "threads": {*threading.enumerate()}, "open files": files}


def _difference(a: Play, b: Play, first: int = 1) -> str | None:
    """Describe the first difference between two episodes, as part of a sentence. Returns None if they are equal.
    `first` is the number of the first turn."""
    if b.status is None:
        return "the second one did not reach its end"
    pairs: list[tuple[str, object, object]] = [("reset returned", a.first, b.first)]
    for turn, ((_, one), (_, other)) in enumerate(zip(a.turns, b.turns, strict=False), first):
        names = ("observation", "reward", "metrics", "terminated", "truncated")
        pairs += [(f"turn {turn} returned {name}", getattr(one, name), getattr(other, name)) for name in names]
    pairs.append(("finish returned", a.last, b.last))
    return next((f"{what} {x!r:.120} and then {y!r:.120}" for what, x, y in pairs if x != y), None)


def _check_restore(probe: Probe, play: Play) -> None:
    """Restore the first half of an episode in a fresh instance, then replay the second half and compare its results.

    The second half depends on the whole state. It therefore shows if `restore` lost a hidden part, such as the state of
    the random generator.
    """
    cut = len(play.turns) // 2
    begun, rest = replace(play, turns=play.turns[:cut]), Play(play.task, play.number, turns=play.turns[cut:])
    tape = bare_tape("check", play.task, probe.name, probe.seed + play.number, begun.steps)
    (restored,) = probe.run(lambda: _replayed(probe, rest, tape))
    if restored.status is not None and (difference := _difference(rest, restored, cut + 1)):
        probe.found(
            "restore",
            f"restored after {cut} of {len(play.turns)} turns, the episode continued differently than recorded: "
            f"{difference}; `restore` must bring back the whole state, including the random generator's",
        )


async def _cancelled(probe: Probe, play: Play, method: str) -> bool:
    """Start `reset` or `step`, cancel the call at its first wait, and check that it ends as cancelled.

    Returns False if the method never waits.
    """
    env = probe.make()
    env.rng = random.Random(probe.seed + play.number)
    try:
        if method == "step":
            await probe.call(env, "reset", play.task.given)
        call = asyncio.ensure_future(getattr(env, method)(play.task.given if method == "reset" else play.turns[0][0]))
        await asyncio.sleep(0)
        if call.done():
            if not call.cancelled():
                call.exception()  # retrieve the error, or asyncio logs it; the first episodes reported it
            return False
        call.cancel()
        await asyncio.wait({call}, timeout=probe.timeout)
        if call.cancelled():
            return True
        if not call.done():
            reaction = f"continued for {probe.timeout:g} s after it was cancelled"
        elif (error := call.exception()) is None:
            reaction = "was cancelled and finished normally"
        else:
            reaction = f"was cancelled and raised {type(error).__qualname__}: {str(error)[:200]}"
        probe.found(
            "cancellation",
            f"{probe.name}.{method} {reaction}; let CancelledError through (`except Exception` does; a bare `except` "
            "or `except BaseException` doesn't)",
        )
        if not call.done():
            raise Stuck
        return True
    except Failed:
        return False
    finally:
        await probe.close(env)
