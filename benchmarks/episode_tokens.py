"""Training on episodes of many turns: one row an episode, or one sample per model call.

    python benchmarks/episode_tokens.py [--turns 16] [--episodes 8]
    python benchmarks/episode_tokens.py --tapeagents PYTHON

Where the chat template only ever appends, our converter makes one row of an episode, in which every token lies once.
Trainers that take one sample per model call forward each prompt anew, which grows with the square of the turns. Real
tapes are recorded and converted; the samples per call are cut out of the same rows. Both are trained on by the same
trainer with the same recipe, so that only the tokens differ, and TapeAgents' `rl_step` gets the samples per call too.
Tokens forwarded (padding included for neither), CPU and wall seconds of an update, peak memory above what the process
held before the first. One thread; each in a process of its own, in turn, `--rounds` times.

    tapeagents  as in rl_update.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from peers.update_case import LR, Case, measure
from side_by_side import in_turn, ratio, same_loss

from tapereel.agents import ChatAgent, EpisodeSpec, Limits, ScriptedEngine, rollout
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.rendering import Renderer
from tapereel.envs import Environment, Outcome
from tapereel.finetune import Episode, Row, rows
from tapereel.tapes import Action, Observation

HERE = Path(__file__).parent
TEXT = 62
"""Characters of an observation and of an answer; with the role and end tokens both take 64."""


class Heard(Observation, kind="bench_heard"):
    text: str


class Spoken(Action, kind="bench_spoken"):
    text: str


class Talk(Environment[Spoken]):
    def __init__(self, turns: int) -> None:
        self.left = turns

    async def reset(self, task: Any) -> Heard:
        return Heard(text="a" * TEXT)

    async def step(self, action: Spoken) -> Outcome:
        self.left -= 1
        return Outcome(Heard(text="b" * TEXT), terminated=self.left == 0, reward=0.0)


def recorded(episodes: int, turns: int, vocabulary: int) -> list[Row]:
    """Rows of recorded episodes: their structure is what the converter gives, their ids are random."""
    renderer = Renderer(char_tokenizer())
    agent = ChatAgent(parse=lambda text: Spoken(text=text))

    async def record() -> list[Any]:
        engine = ScriptedEngine(lambda request: "c" * TEXT, renderer=renderer)
        return await asyncio.gather(
            *(
                rollout(
                    agent,
                    lambda: Talk(turns),
                    EpisodeSpec.of(k, group="g", attempt=k, limits=Limits(turns=None)),
                    engine=engine,
                )
                for k in range(episodes)
            )
        )

    rng = np.random.default_rng(0)
    found = [row for tape in asyncio.run(record()) for row in rows(tape)]
    if len(found) != episodes:
        raise SystemExit(f"{episodes} episodes became {len(found)} rows: the template doesn't extend")
    old = np.float32(-np.log(vocabulary))
    return [
        replace(
            row,
            input_ids=rng.integers(0, vocabulary, len(row.input_ids)).astype(np.int32),
            old=np.full(len(row.own), old),
        )
        for row in found
    ]


def per_call(row: Row) -> list[Row]:
    """A sample for each model call: all before it is prompt, its completion are the labels."""
    found = []
    for call in range(len(row.calls)):
        which = row.call == call
        last = int(row.own[which][-1])
        cut = {
            name: getattr(row, name)[which]
            for name in ("own", "old", "temperature", "version", "call", "turn", "offset")
        }
        found.append(replace(row, input_ids=row.input_ids[: last + 1], **cut))
    return found


def update(kind: str, made: list[Row], case: Case) -> Callable[[], float]:
    from tapereel.finetune.recipes import get_recipe
    from tapereel.finetune.trainer.options import OptimiserConfig
    from tapereel.finetune.trainer.trainer import Trainer

    episodes = [Episode(tape=row.tape, group=row.group, reward=float(k % 2)) for k, row in enumerate(made)]
    trainer = Trainer(case.model(), get_recipe("grpo"), OptimiserConfig(lr=LR))
    if kind == "calls":
        made = [sample for row in made for sample in per_call(row)]
    return lambda: trainer.update(made, episodes).loss


def samples(made: list[Row]) -> list[dict[str, Any]]:
    """What TapeAgents trains on: per call ids, where the completion starts, and the advantage."""
    rewards = np.arange(len(made)) % 2.0
    scores = (rewards - rewards.mean()) / rewards.std(ddof=1)
    return [
        {"ids": sample.input_ids.tolist(), "start": int(sample.own[0]), "advantage": float(score)}
        for row, score in zip(made, scores, strict=True)
        for sample in per_call(row)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("turns", 16), ("episodes", 8), ("vocabulary", 32_000), ("reps", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tapeagents", metavar="PYTHON")
    parser.add_argument("--tiny", action="store_true", help="shows that it runs, no more")
    parser.add_argument("--only", choices=["row", "calls"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.turns, args.episodes, args.vocabulary, args.reps, args.rounds = 4, 2, 500, 1, 1
    made = recorded(args.episodes, args.turns, args.vocabulary)
    case = Case(args.vocabulary, args.episodes, 1 + max(map(len, made)), args.reps)
    if args.only:
        import torch

        torch.set_num_threads(1)
        print(json.dumps(measure(update(args.only, made, case), args.reps)))
        return
    lengths = {"row": sum(map(len, made)), "calls": sum(len(sample) for row in made for sample in per_call(row))}
    flags = [f"--{name}={getattr(args, name)}" for name in ("turns", "episodes", "vocabulary", "reps")]
    commands = {kind: [sys.executable, __file__, "--only", kind, *flags] for kind in ("row", "calls")}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        if args.tapeagents:
            json.dump(
                {
                    "vocabulary": args.vocabulary,
                    "length": case.length,
                    "reps": args.reps,
                    "rows": args.episodes,
                    "samples": samples(made),
                },
                file,
            )
            file.flush()
            commands["tapeagents"] = [args.tapeagents, str(HERE / "peers" / "tapeagents_episode.py"), file.name]
        found = in_turn(commands, args.rounds)
    same_loss(found, 1e-4)
    own = sum(len(row.own) for row in made)
    print(
        f"{args.episodes} episodes of {args.turns} turns, {own:,} own tokens, {args.rounds} rounds, load "
        f"{os.getloadavg()[0]:.1f}\n\n| | tokens forwarded | CPU s | wall s | MiB | tokens / row | CPU / row |"
        "\n|---|---|---|---|---|---|---|"
    )
    for name, several in found.items():
        cpu, wall, mib = (statistics.median(one[key] for one in several) for key in ("cpu", "wall", "mib"))
        tokens = lengths["row" if name == "row" else "calls"]
        print(
            f"| {name} | {tokens:,} | {cpu:.2f} | {wall:.2f} | {mib:,.0f} | {tokens / lengths['row']:.2f} | "
            f"{ratio(several, found['row'], 'cpu'):.2f} |"
        )


if __name__ == "__main__":
    main()
