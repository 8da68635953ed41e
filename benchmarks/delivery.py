"""CPU time of the check that weights arrived, as a share of an update's.

    python benchmarks/delivery.py [--updates 12] [--answer 64]

The run is the synchronous one of `whole_loop.py`: 1.14 million parameters, 4 groups of 8 episodes of 64 sampled tokens
by default, one torch thread. With `max_lag` 0 nothing is sampled during the check: all CPU time is its own.
Printed: the medians over the updates but the first.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peers.loop_case import CHATML, GROUP, GROUPS, LR, MAX_TOKENS, make_folder, questions

from tapereel.agents import Limits
from tapereel.agents.setup import EmbeddedConfig
from tapereel.finetune import LoopConfig, OptimiserConfig, TrainConfig
from tapereel.finetune.loop.delivery import Delivery
from tapereel.finetune.run import EvaluationConfig, train
from tapereel.tapes import Sampling

SCENE = Path(__file__).parent / "loop_scene.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--answer", type=int, default=MAX_TOKENS["single"], help="sampled tokens of an episode")
    args = parser.parse_args()
    torch.set_num_threads(1)
    checks: list[float] = []
    ends: list[float] = []
    check = Delivery.check

    async def timed(*given: object) -> None:
        began = time.process_time()
        await check(*given)  # type: ignore[arg-type]
        checks.append(time.process_time() - began)
        ends.append(time.process_time())

    Delivery.check = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_folder(folder, CHATML, steps=20, tools=False)
        config = TrainConfig(
            agent=f"{SCENE}:single_agent",
            env=f"{SCENE}:Digits",
            tasks=tuple(questions("single")),
            engine=EmbeddedConfig(model=str(folder), slots=GROUPS * GROUP, capacity=512),
            evaluation=EvaluationConfig(fraction=0),
            loop=LoopConfig(
                updates=args.updates,
                groups=GROUPS,
                group_size=GROUP,
                max_lag=0,
                checkpoint_every=10**6,
                optimiser=OptimiserConfig(lr=LR),
                sampling=Sampling(max_tokens=args.answer),
                limits=Limits(turns=4),
            ),
        )
        train(config, Path(scratch) / "run")
    # The first two checks are the one at the start, which has no prefix yet, and the one before the first update.
    own = statistics.median(checks[3:])
    whole = statistics.median(b - a for a, b in itertools.pairwise(ends[2:]))
    print(f"check {own * 1000:.1f} ms, update {whole:.2f} s, share {own / whole:.2%}, checks {len(checks)}")


if __name__ == "__main__":
    main()
