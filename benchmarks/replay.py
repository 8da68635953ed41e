"""Turns replayed per second: the demo's agent on recorded tapes, with and without token ids.

    python benchmarks/replay.py                     # 10,000 tapes
    python benchmarks/replay.py --tapes 500

The tapes are demonstrations of the calculator, recorded here. Numbers are CPU seconds of one process; reading the tapes
from disk is timed apart, and so is `tapereel replay` as a whole, by the wall clock, with as many processes as given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tapereel.agents import Request, ScriptedEngine, rollout
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.rendering import Renderer
from tapereel.agents.replay import replay
from tapereel.envs import Calculator
from tapereel.envs.adapters import word_problems
from tapereel.envs.adapters.calculator import demonstrate
from tapereel.finetune.run.demo_scene import calculator_agent
from tapereel.tapes import Tape
from tapereel.tapes.store import Store

PART = 1000


def record(run: Path, n: int) -> None:
    """`n` tapes with token ids in a run directory that keeps their tokenizer."""
    tokenizer = char_tokenizer()
    tasks = list(word_problems(2000))

    def policy(request: Request) -> str:
        heard = [m["content"] for m in request.messages if m["role"] == "user"]
        return demonstrate(heard[0], heard[1:], random.Random(request.seed))

    async def play(store: Store) -> None:
        engine = ScriptedEngine(policy, renderer=Renderer(tokenizer))
        for start in range(0, n, PART):
            await asyncio.gather(
                *(
                    rollout(
                        calculator_agent(),
                        Calculator,
                        tasks[k % len(tasks)],
                        engine=engine,
                        seed=k,
                        journal=store.writer,
                    )
                    for k in range(start, min(start + PART, n))
                )
            )

    with Store.create(run, durability="os") as store:
        asyncio.run(play(store))
    tokenizer.save_pretrained(run / "checkpoints" / "update-000000" / "hf")


def turns_per_second(tapes: list[Tape], **options: Any) -> float:
    """Of CPU time."""
    agent = calculator_agent()
    started = time.process_time()
    for tape in tapes:
        verdict = asyncio.run(replay(tape, agent, **options))
        assert verdict.outcome == "verified", verdict
    return sum(tape.turns for tape in tapes) / (time.process_time() - started)


def measure(run: Path, jobs: int) -> dict[str, Any]:
    """All numbers of one run directory."""
    with Store.open(run) as store:
        started = time.process_time()
        tapes = list(store.tapes(closed=True))
        reading = len(tapes) / (time.process_time() - started)
    turns = sum(tape.turns for tape in tapes)
    renderer = Renderer(char_tokenizer())
    found: dict[str, Any] = {
        "tapes": len(tapes),
        "turns": turns,
        "tapes_read_per_cpu_second": reading,
        "turns_per_cpu_second": {
            "messages": turns_per_second(tapes),
            "messages and token ids": turns_per_second(tapes, renderer=renderer),
        },
    }
    print(json.dumps(found, indent=1), file=sys.stderr, flush=True)
    started = time.perf_counter()
    words = [sys.executable, "-m", "tapereel.cli", "replay", "agent", str(run), "--jobs", str(jobs), "--json"]
    words += ["--agent", f"{calculator_agent.__module__}:{calculator_agent.__name__}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found["verb"] = {
        "jobs": jobs,
        "counts": json.loads(done.stdout)["counts"],
        "turns_per_wall_second": turns / (time.perf_counter() - started),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tapes", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder) / "run", chosen.tapes)
        print(json.dumps(measure(Path(folder) / "run", chosen.jobs), indent=1))


if __name__ == "__main__":
    main()
