"""CPU of the process that leads a run, for each episode: all in this process, and in Ray's workers.

    python benchmarks/ray_lead.py [--episodes 400] [--workers 1 2] [--words 500]

An episode has five turns, whose observations and scripted answers have `--words` words each. No model samples. The time
of the lead covers its own Python, its writer and Ray's threads in it: `time.process_time` around the episodes, after
all workers have loaded. `rows`, which turns a tape into training data, isn't part of it.
Needs `pip install "tapereel[ray]"`. Ray starts on loopback and ends with the script.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tapereel.agents import LLM, EpisodeSpec, agent
from tapereel.agents.runs.attempts import Attempts
from tapereel.agents.runs.group import run_all
from tapereel.agents.runs.on_ray import placed_attempts
from tapereel.agents.runs.runner import RunConfig
from tapereel.agents.runs.worker import Engines
from tapereel.agents.setup.team_config import make_team
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Observation, Tape, Task
from tapereel.tapes.store.store import Store

TURNS = 5


class Page(Observation, kind="ray_page"):
    text: str


class Pages(Environment[Answer]):
    """Shows a page a turn. The task is its text."""

    async def reset(self, task: str) -> Page:
        self.page, self.turns = task, 0
        return Page(text=task)

    async def step(self, action: Answer) -> Outcome:
        self.turns += 1
        if self.turns == TURNS:
            return Outcome(reward=1.0, terminated=True)
        return Outcome(Page(text=self.page))


@agent
async def reader(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
    yield Answer(text=(await llm(tape)).text)


async def measured(place: Attempts, config: RunConfig, episodes: int, page: str, folder: Path) -> tuple[float, ...]:
    """CPU seconds of this process and wall seconds for each episode, and the bytes of a tape."""
    engine, _ = await make_team(config.engine, {})
    with Store.create(folder) as store:

        async def one(k: int) -> Tape:
            return await place.run(EpisodeSpec(task=Task.of(page), seed=k), engine, store.writer)

        await run_all(range(20), one)  # the first calls connect
        cpu, wall = time.process_time(), time.perf_counter()
        tapes = await run_all(range(episodes), one, concurrency=256)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        await place.close()
    return cpu / episodes, wall / episodes, sum(map(len, tapes[0].bodies))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--words", type=int, default=500)
    args = parser.parse_args()
    page = "word " * args.words
    print("| workers | CPU of the lead, ms an episode | wall, ms | bytes of a tape | peak memory of the lead, MB |")
    print("|---|---|---|---|---|")
    for workers in (0, *args.workers):
        settings = {"engine": {"kind": "scripted", "answers": [page] * TURNS}, "on": "ray" if workers else None}
        config, setup = RunConfig.model_validate(settings).resolve(agent=reader, env=Pages, tasks=[page])
        placed = placed_attempts(config, setup, Engines(config.engine, {}), most=workers)
        with tempfile.TemporaryDirectory() as folder, placed as place:
            found = asyncio.run(measured(place, config, args.episodes, page, Path(folder) / "run"))
        cpu, wall, size = found
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        name = workers or "0 (this process)"
        print(f"| {name} | {cpu * 1e3:.2f} | {wall * 1e3:.2f} | {size:,.0f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
