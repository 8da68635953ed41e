"""Group advantages of many rows, ours against TapeAgents' `update_rewards_and_advantages`, over the same dataset.

    python benchmarks/advantages.py
    python benchmarks/advantages.py --tapeagents PYTHON [--peer-rows 10000]

Groups of 8 rows of 64 tokens with rewards of 0 and 1. `dataset` is our function of the same name over a Hugging Face
dataset, the like of theirs; `trainer` is what an update does once its rows are a stream, `with the stream` includes
making it. CPU and wall seconds, median of several. TapeAgents takes minutes for 100,000 rows, so it gets `--peer-rows`
of them and the ratio is one of rows per second; the advantages of those rows must agree.

    tapeagents  as in rl_update.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from peers.advantage_case import GROUP, TOKENS, columns
from side_by_side import in_turn, timed

from tapereel.finetune import Episode, RLConfig, Row, Stream, update_rewards_and_advantages
from tapereel.finetune.objective import Context
from tapereel.finetune.objective.loss import prepare
from tapereel.finetune.recipes import get_recipe

HERE = Path(__file__).parent


def rows_and_episodes(rows: int) -> tuple[list[Row], list[Episode]]:
    """The same rows as the trainer gets them."""
    rewards = np.asarray(columns(rows)["reward"])
    n = TOKENS
    made = [
        Row(
            tape=f"t{i}",
            group=f"g{i // GROUP}",
            input_ids=np.zeros(n, np.int32),
            own=np.arange(n, dtype=np.int32),
            old=np.full(n, -1, np.float32),
            temperature=np.ones(n, np.float32),
            version=np.zeros(n, np.int32),
            call=np.zeros(n, np.int32),
            turn=np.zeros(n, np.int32),
            offset=np.arange(n, dtype=np.int32),
            calls=("c",),
            agents=("a",),
            versions=("r:0",),
        )
        for i in range(rows)
    ]
    return made, [Episode(tape=f"t{i}", group=f"g{i // GROUP}", reward=float(rewards[i])) for i in range(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--peer-rows", type=int, default=10_000)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--tapeagents", metavar="PYTHON")
    parser.add_argument("--tiny", action="store_true", help="shows that it runs, no more")
    args = parser.parse_args()
    if args.tiny:
        args.rows, args.peer_rows, args.reps = 800, 160, 2
    from datasets import Dataset

    torch.set_num_threads(1)
    dataset = Dataset.from_dict(columns(args.rows))
    config = RLConfig(algo="reinforce")
    cpu, wall, found = timed(lambda: update_rewards_and_advantages(dataset, config), args.reps)
    lines = [("ours, dataset", args.rows, cpu, wall)]
    made, recipe = rows_and_episodes(args.rows), get_recipe("reinforce")
    stream = Stream.of(*made)
    lines.append(("ours, trainer", args.rows, *timed(lambda: prepare(recipe, stream, Context()), args.reps)[:2]))
    whole = timed(lambda: prepare(recipe, Stream.of(*made), Context()), args.reps)
    lines.append(("ours, trainer with the stream", args.rows, *whole[:2]))
    if args.tapeagents:
        command = [args.tapeagents, str(HERE / "peers" / "tapeagents_advantages.py"), str(args.peer_rows)]
        theirs = in_turn({"TapeAgents": command}, 1)["TapeAgents"][0]
        # The second token of each row: nothing predicts the first one, so ours is NaN there.
        second = np.array([row[1] for row in found.select(range(args.peer_rows))["advantages"]])
        if not np.allclose(second, theirs["second"], atol=1e-5):
            raise SystemExit("the two disagree on the advantages")
        lines.append(("TapeAgents", args.peer_rows, theirs["cpu"], theirs["wall"]))
    print(f"load {os.getloadavg()[0]:.1f}\n\n| | rows | CPU s | wall s | rows per CPU s | ours / it |")
    print("|---|---|---|---|---|---|")
    for name, rows, c, w in lines:
        print(f"| {name} | {rows:,} | {c:.3f} | {w:.3f} | {rows / c:,.0f} | {args.rows / cpu / (rows / c):,.1f}x |")


if __name__ == "__main__":
    main()
