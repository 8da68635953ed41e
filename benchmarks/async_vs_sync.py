"""Async against synchronous training on the demo's task after its warm start, in pairs: same seed, start and tasks.

    python benchmarks/async_vs_sync.py [--seeds 10 11 12] [--updates N] [--tool-seconds MEDIAN] [--out DIR] [--json]

For each seed the demo records its demonstrations and imitates them once; from those weights the loop runs twice, with
`max_lag` 1 (rollouts go on beside the updates) and 0 (they wait for each other), which goes first changing from seed to
seed. With `--tool-seconds`, each call of the calculator takes log-normal time with this median and a sigma of 1, so a
few calls take much longer than the rest.

Reported: mean reward of the last five updates' episodes, sampled reward on held-out tasks after, seconds of the loop,
share of them in which neither engine nor trainer was at work, CPU seconds with the evaluations before and after, and
the paired differences. Prints Markdown. Seconds depend on what else the machine does; the load is printed along.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tapereel.envs import Calculator, Outcome
from tapereel.envs.adapters.calculator import Calculate, FinalAnswer
from tapereel.finetune import WarmStartConfig
from tapereel.finetune.run import DemoConfig, train
from tapereel.finetune.run.demonstrations import demo
from tapereel.tapes.store import METRICS, Results, read_metrics


class SlowCalculator(Calculator):
    """The demo's environment, whose tool takes time."""

    def __init__(self, median: float) -> None:
        super().__init__(scorer="basic_arithmetic", max_turns=4)
        self._median, self._time = median, random.Random(0)

    async def reset(self, task: Any) -> Any:
        self._time.seed(task.hash)
        return await super().reset(task)

    async def step(self, action: Calculate | FinalAnswer) -> Outcome:
        if isinstance(action, Calculate):
            await asyncio.sleep(self._median * math.exp(self._time.gauss()))
        return await super().step(action)


MODES = {"async": 1, "sync": 0}
"""name -> max_lag."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--updates", type=int, default=None, help="of the loop (default: the demo's)")
    parser.add_argument("--tool-seconds", type=float, metavar="MEDIAN", help="of a call of the tool (default: none)")
    parser.add_argument("--model-size", default="small", help="of the demo's model (default: small)")
    parser.add_argument("--out", type=Path, default=None, help="keep the runs there (default: nowhere)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes: shows that it runs, no more")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        scene = {} if args.tool_seconds is None else {"env": functools.partial(SlowCalculator, args.tool_seconds)}
        pairs = [
            pair(configuration(seed, args), out / str(seed), scene, first=k % 2) for k, seed in enumerate(args.seeds)
        ]
    print(json.dumps(pairs, indent=1) if args.json else table(args.seeds, pairs))


def configuration(seed: int, args: argparse.Namespace) -> DemoConfig:
    """The demo's, or a tiny one."""
    config = DemoConfig(seed=seed, model_size=args.model_size)
    if args.tiny:
        loop = config.loop.model_copy(update={"groups": 2, "group_size": 2})
        config = DemoConfig(
            seed=seed,
            model_size="micro",
            tasks=200,
            held_out=16,
            demonstrations=64,
            warm=WarmStartConfig(updates=2, batch=8),
            loop=loop,
        )
    if args.updates is not None:
        config = config.model_copy(update={"loop": config.loop.model_copy(update={"updates": args.updates})})
    return config


def pair(config: DemoConfig, path: Path, scene: dict[str, Any], *, first: int) -> dict[str, dict[str, Any]]:
    """Both modes from one warm start."""
    path = path.absolute()
    still = config.model_copy(update={"loop": config.loop.model_copy(update={"updates": 0})})
    demo(still, path)
    return {mode: measured(config, mode, path, scene) for mode in sorted(MODES, reverse=bool(first))}


def measured(config: DemoConfig, mode: str, path: Path, scene: dict[str, Any]) -> dict[str, Any]:
    """One loop from the weights after the imitation in `path`."""
    loop = config.loop.model_copy(update={"max_lag": MODES[mode]})
    cpu = time.process_time()
    summary = train(
        config.after_imitation(path).model_copy(update={"loop": loop}), path / mode, **config.scene() | scene
    )
    cpu = time.process_time() - cpu
    lines = [line for line in read_metrics(path / mode / METRICS) if line["phase"] == "rl"]
    last = [line["reward"] for line in lines[-5:] if line["reward"] is not None]
    found = {
        "reward": statistics.fmean(last),
        "held_out": summary.held_out["after"],
        "seconds": summary.seconds["rl"],
        "cpu": cpu,
        "idle": Results.read(path / mode).idle_share,
        "lag": statistics.fmean(line["lag"] for line in lines),
        "engine": summary.seconds["rollout"],
        "trainer": summary.seconds["train"],
        "tokens": summary.tokens["sampled"],
        "books_close": summary.books_close,
        "load": os.getloadavg()[0],
    }
    print(config.seed, mode, json.dumps(found), file=sys.stderr, flush=True)
    return found


def table(seeds: list[int], pairs: list[dict[str, dict[str, Any]]]) -> str:
    """The pairs and their differences, as Markdown."""
    lines = [
        "| seed | mode | reward, last 5 updates | held out, sampled | loop, s | CPU, s | neither busy | lag | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for seed, modes in zip(seeds, pairs, strict=True):
        for mode in MODES:
            r = modes[mode]
            lines.append(
                f"| {seed} | {mode} | {r['reward']:.3f} | {r['held_out']:.3f} | {r['seconds']:.0f} | "
                f"{r['cpu']:.0f} | {r['idle']:.0%} | {r['lag']:.2f} | {r['load']:.1f} |"
            )
    lines.append("")
    for name, what in (("reward", "reward of the last 5 updates"), ("held_out", "held-out reward")):
        differences = [modes["async"][name] - modes["sync"][name] for modes in pairs]
        spread = statistics.stdev(differences) if len(differences) > 1 else float("nan")
        mean = statistics.fmean(differences)
        lines.append(f"- {what}, async - sync: mean {mean:+.3f}, standard deviation {spread:.3f}")
    ratios = [modes["sync"]["seconds"] / modes["async"]["seconds"] for modes in pairs]
    lines.append(f"- speed-up of async: {statistics.fmean(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
    for mode in MODES:
        idle = [modes[mode]["idle"] for modes in pairs]
        lines.append(f"- neither engine nor trainer busy, {mode}: {statistics.fmean(idle):.0%}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
