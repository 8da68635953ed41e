"""What recording, rolling out and converting cost, from 10 to 3,000 steps; beside TapeAgents where it is given.

    python benchmarks/rollout_cost.py
    python benchmarks/rollout_cost.py --tapeagents /path/to/venv/bin/python

The peer lives in an environment of its own (`pip install tapeagents==0.1.16`); its script is in `peers/`. Numbers are
CPU seconds, the best of several repetitions, the peer's measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import time
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tapereel.agents import LLM, Agent, Completion, Limits, Request, ScriptedEngine, rollout
from tapereel.envs import Environment, Outcome
from tapereel.finetune import rows
from tapereel.tapes import Action, Call, Observation, Sampling, Status, Tape, Task
from tapereel.tapes.records import Begin, End, Identity, Reward
from tapereel.tapes.tape import TapeLog, step_record

HERE = Path(__file__).parent
TEXT = "x" * 135
"""A step's text, as long as in the peers' scripts."""


class Seen(Observation, kind="bench_seen"):
    text: str


class Done(Action, kind="bench_done"):
    text: str


def best(run: Callable[[], int], repetitions: int) -> float:
    """CPU seconds per unit, the best of the repetitions; `run` gives the number of units that it did."""
    times = []
    for _ in range(repetitions):
        gc.collect()
        n, started = 0, time.process_time()
        while (seconds := time.process_time() - started) < 0.05:
            n += run()
        times.append(seconds / n)
    return min(times)


def record(steps: int, prompt: array[int], completion: array[int], logprobs: array[float]) -> Tape:
    """A tape written through the recorder's own path: an observation, a call, an action and a reward a turn."""
    task = Task(public="q")
    begin = Begin(
        tape="t", task=task, task_hash="0", agent=Identity(name="a"), env=Identity(name="e"), env_seed=0, seed=0, at=0.0
    )
    log = TapeLog(begin)
    log.append(step_record("t", Seen(text=TEXT), by="env"))
    keep, base = 0, None
    for k in range(steps // 2):
        call = f"t.{k}"
        log.append(
            Call(
                tape="t",
                call=call,
                by="a",
                base=base,
                keep=keep,
                keep_messages=2 * k,
                new_prompt=prompt,
                text=TEXT,
                new_messages=({"role": "user", "content": TEXT},),
                completion=completion,
                logprobs=logprobs,
                spans=(("v:0", 0, len(completion)),),
                sampling=Sampling(),
                at=0.0,
            )
        )
        base, keep = call, keep + len(prompt) + len(completion)
        log.append(step_record("t", Done(text=TEXT), by="a", calls=((call, 0, len(completion)),)))
        log.append(Reward(tape="t", step=len(log.entries) - 1, value=0.0))
        log.append(step_record("t", Seen(text=TEXT), by="env"))
    log.append(End(tape="t", status=Status.FINISHED, at=0.0))
    return Tape(log)


class Endless(Environment[Done]):
    """Answers every action with the same text, `turns` times."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.taken = 0

    async def reset(self, task: Any) -> Seen:
        return Seen(text=TEXT)

    async def step(self, action: Done) -> Outcome:
        self.taken += 1
        return Outcome(Seen(text=TEXT), reward=0.0, terminated=self.taken == self.turns)


class Plain(Agent):
    """One call, one action."""

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Done(text=(await llm(tape, system="s")).text)


class Instant(ScriptedEngine):
    """Answers at once."""

    def __init__(self) -> None:
        super().__init__(lambda request: TEXT)

    async def complete(self, request: Request) -> Completion:
        return Completion(text=TEXT)


def roll(turns: int, episodes: int, concurrent: int) -> int:
    """Run the episodes; gives the number of turns."""
    engine, gate = Instant(), asyncio.Semaphore(concurrent)

    async def one() -> None:
        async with gate:
            tape = await rollout(Plain(), Endless(turns), 0, engine=engine, limits=Limits(turns=None))
        assert tape.status is Status.FINISHED

    async def main() -> None:
        await asyncio.gather(*(one() for _ in range(episodes)))

    asyncio.run(main())
    return turns * episodes


def peer(python: str | None, script: str) -> dict[str, Any]:
    """What a peer's script prints as JSON; empty without its environment."""
    if python is None:
        return {}
    done = subprocess.run([python, str(HERE / "peers" / script)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tapeagents", metavar="PYTHON")
    parser.add_argument("--tiny", action="store_true", help="shows that it runs, no more")
    options = parser.parse_args()
    most, least = (10, 64) if options.tiny else (3_000, 1)  # steps of an episode; divisor of the numbers of episodes
    tapeagents = peer(options.tapeagents, "tapeagents_loop.py")

    prompt, completion = array("i", range(200)), array("i", range(91))
    logprobs = array("f", [-0.5] * 91)
    print("| steps | recorder us/step | rollout us/turn | TapeAgents us/step | ratio per step |\n|---|---|---|---|---|")
    for steps in [n for n in (10, 100, 1_000, 3_000) if n <= most]:
        written = best(lambda steps=steps: len(record(steps, prompt, completion, logprobs)), 10) * 1e6
        rolled = best(lambda steps=steps: roll(steps // 2, max(1, 1_500 // steps // least), 1), 5) * 1e6
        theirs = tapeagents.get(str(steps))
        ratio = f"{theirs / (rolled / 2):.1f}x" if theirs else "-"
        print(f"| {steps:,} | {written:.1f} | {rolled:.0f} | {f'{theirs:.0f}' if theirs else '-'} | {ratio} |")

    print("\n| concurrent x turns | ms/turn |\n|---|---|")
    for concurrent, episodes, turns in ((64, 1024, 5), (256, 1024, 5), (64, 256, 20), (64, 128, 50)):
        ours = best(lambda c=concurrent, e=episodes // least, t=turns: roll(t, e, c), 3) * 1e3
        print(f"| {concurrent} x {turns} | {ours:.3f} |")

    print("\n| turns | tokens | converter M tokens/s |\n|---|---|---|")
    for turns in (1, 5, 20, 50, 500):
        tape = record(2 * turns, prompt, completion, logprobs)
        tokens = sum(len(row) for row in rows(tape))
        rate = 1 / best(lambda tape=tape, tokens=tokens: sum(len(row) for row in rows(tape)), 10) / 1e6
        print(f"| {turns} | {tokens:,} | {rate:.1f} |")


if __name__ == "__main__":
    main()
