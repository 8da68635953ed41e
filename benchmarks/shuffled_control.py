"""What the demo's loop comes to without what the rewards say: true rewards against two ways of shuffling them.

    nice -n 10 python benchmarks/shuffled_control.py --out DIR [--seeds 0 1 ... 9] [--arms true within across]

For each seed the demo imitates its demonstrations once. From those weights each arm runs the loop with the same tasks,
on as many trained tokens as the arm `true` (at most four times its updates, since episodes may shrink to nothing):

    true     the rewards of the episodes
    within   rewards shuffled within each group, so that a group keeps its number of successes
    across   rewards shuffled over all groups of an update, so that they say nothing

`DIR/arms.jsonl` gets one line for each arm that is done, and a later call goes on behind the last line. The table is
printed as Markdown: held-out reward, sampled and greedy, and the arm's habits: the keys that greedy episodes press
before they answer. Below it: the mean change from the warm start with its 95 % interval over seeds, and in how many
seeds the greedy reward rose by more than 0.2. `--print` prints the table of what is there.

`--coin` runs no model. It trains a policy of two numbers, the log-odds of a first and of a second call, on the sums
that the demo had before: the same two calls were right for every task. 1,000 seeds take seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tapereel.envs.adapters.calculator import Calculate
from tapereel.finetune import WarmStartConfig
from tapereel.finetune.run import DemoConfig
from tapereel.finetune.run.demonstrations import demo, train_on
from tapereel.finetune.run.longer import end_name
from tapereel.tapes import Tape
from tapereel.tapes.common.progress import silent
from tapereel.tapes.store import METRICS, Results, Store, read_metrics
from tapereel.tapes.value import Value

ARMS = {"true": None, "within": "within", "across": "across"}
"""Name -> `loop.shuffle_rewards`."""
START = "warm start"
WATCHED = ("clip", "kl/old", "entropy", "ess")
"""Metrics whose mean over the updates goes into the lines."""
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Number of seeds -> 97.5 % quantile of Student's t."""


class Line(Value):
    """What one arm of one seed came to; also the warm start."""

    seed: int
    arm: str
    sampled: float
    greedy: float
    habits: dict[str, float]
    """Keys pressed, as `++` for two sums -> share of the greedy held-out episodes; empty for an answer without a call,
    `cut` for no answer."""
    updates: int
    tokens: int
    """Trained tokens of the loop."""
    watched: dict[str, float]
    rewards: tuple[float, ...]
    """Mean true reward of each update's episodes."""
    load: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/shuffled"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--tokens", type=int, help="trained tokens of an arm, for seeds without the arm `true`")
    parser.add_argument("--updates", type=int, help="of the loop (default: the demo's)")
    parser.add_argument("--algo", default="grpo")
    parser.add_argument("--lag", type=int, default=1, help="loop.max_lag")
    parser.add_argument("--model-size", default="small")
    parser.add_argument("--tiny", action="store_true", help="seconds instead of hours: shows that it runs, no more")
    parser.add_argument("--print", action="store_true", help="print the table of what is there, and run nothing")
    parser.add_argument("--coin", action="store_true", help="the policy of two numbers, and nothing else")
    args = parser.parse_args()
    if args.coin:
        print(coins(2) if args.tiny else coins())
        return
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "arms.jsonl"
    for seed in () if args.print else args.seeds:
        have = {line.arm: line for line in lines_of(path) if line.seed == seed}
        if not {START, *args.arms} <= have.keys():
            arms(configuration(seed, args), args, have, path)
    print(table(lines_of(path)))


def lines_of(path: Path) -> list[Line]:
    return [Line.model_validate_json(text) for text in path.read_text().splitlines()] if path.exists() else []


def configuration(seed: int, args: argparse.Namespace) -> DemoConfig:
    """The demo's, or a tiny one."""
    config = DemoConfig(seed=seed, model_size=args.model_size, algo=args.algo)
    changes: dict[str, Any] = {"max_lag": args.lag}
    if args.tiny:
        config = DemoConfig(
            seed=seed,
            model_size="micro",
            tasks=200,
            held_out=16,
            demonstrations=64,
            warm=WarmStartConfig(updates=2, batch=8),
        )
        changes |= {"groups": 2, "group_size": 2, "updates": 3}
    if args.updates is not None:
        changes["updates"] = args.updates
    return config.model_copy(update={"loop": config.loop.model_copy(update=changes)})


def arms(config: DemoConfig, args: argparse.Namespace, have: dict[str, Line], path: Path) -> None:
    """The demo's imitation, and the arms from its weights in place of the loop."""
    out = (args.out / str(config.seed)).absolute()
    still = config.model_copy(update={"loop": config.loop.model_copy(update={"updates": 0})})
    demo(still, out, resume=out.exists())
    if START not in have:
        have[START] = line_of(START, config.seed, out, "before")
        note(have[START], path)
    for arm in args.arms:
        if arm in have:
            continue
        tokens = have["true"].tokens if "true" in have else args.tokens
        bound = arm != "true" and tokens is not None
        loop = config.loop.model_copy(update={"shuffle_rewards": ARMS[arm]})
        begun = config.after_imitation(out).model_copy(update={"loop": loop})
        most = 4 * loop.updates if bound else 0
        train_on(tokens or 0, begun, out / arm, config.scene(), most=most, progress=silent)
        have[arm] = line_of(arm, config.seed, out / arm, "after")
        note(have[arm], path)


def note(line: Line, path: Path) -> None:
    with path.open("a") as file:
        file.write(line.model_dump_json() + "\n")
    print(line.model_dump_json(exclude={"rewards"}), file=sys.stderr, flush=True)


def line_of(arm: str, seed: int, run: Path, when: str) -> Line:
    """What the evaluation `when` of a run came to."""
    results = Results.read(run)
    lines = [line for line in read_metrics(run / METRICS) if line["phase"] == "rl"]
    found = results.after if when == "after" else results.before
    assert found is not None
    end = end_name(results, len(lines)) if when == "after" else when
    with Store.open(run) as store:
        habits = shares(store.tapes(split=f"eval-{end}-greedy"))
    return Line(
        seed=seed,
        arm=arm,
        sampled=found["sampled"].mean or 0.0,
        greedy=found["greedy"].mean or 0.0,
        habits=habits,
        updates=len(lines),
        tokens=sum(line["tokens"] for line in lines),
        watched={
            name: statistics.fmean(values)
            for name in WATCHED
            if (values := [line[name] for line in lines if isinstance(line.get(name), float)])
        },
        rewards=tuple(line["reward"] or 0.0 for line in lines),
        load=os.getloadavg()[0],
    )


def shares(tapes: Iterable[Tape]) -> dict[str, float]:
    """`Line.habits` of these tapes."""
    counts = Counter(
        re.sub("[^-+*]", "", "".join(step.expression for step in tape if isinstance(step, Calculate)))
        if tape.status == "finished"
        else "cut"
        for tape in tapes
    )
    return {name: n / counts.total() for name, n in sorted(counts.items())}


def table(lines: list[Line]) -> str:
    """The arms of each seed, and their changes from the warm start."""
    arms = [arm for arm in (START, *ARMS) if any(line.arm == arm for line in lines)]
    by = {(line.seed, line.arm): line for line in lines}
    seeds = sorted({line.seed for line in lines})
    rows = [
        "| seed | " + " | ".join(arms) + " |",
        "|---" * (len(arms) + 1) + "|",
    ]
    for seed in seeds:
        cells = []
        for arm in arms:
            line = by.get((seed, arm))
            cells.append("" if line is None else f"{line.sampled:.3f}, {line.greedy:.3f} ({common(line.habits)})")
        rows.append(f"| {seed} | " + " | ".join(cells) + " |")
    rows.append("")
    for arm in arms[1:]:
        pairs = [(by[seed, START], by[seed, arm]) for seed in seeds if (seed, arm) in by]
        for what in ("sampled", "greedy"):
            changes = [getattr(end, what) - getattr(start, what) for start, end in pairs]
            half = STUDENT[len(changes)] * statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else 0
            rows.append(
                f"- {arm}, {what}: changes by {statistics.fmean(changes):+.3f} ± {half:.3f} in the mean of "
                f"{len(changes)} seeds ({min(changes):+.3f} to {max(changes):+.3f}), rises by more than 0.2 in "
                f"{sum(change > 0.2 for change in changes)}"
            )
        tokens = statistics.fmean(end.tokens for _, end in pairs)
        watched = {
            name: statistics.fmean(end.watched[name] for _, end in pairs if name in end.watched)
            for name in WATCHED
            if any(name in end.watched for _, end in pairs)
        }
        rows.append(
            f"- {arm}: {statistics.fmean(end.updates for _, end in pairs):.0f} updates, {tokens:,.0f} trained tokens; "
            + ", ".join(f"{name} {value:.4g}" for name, value in watched.items())
        )
    return "\n".join(rows)


def common(habits: dict[str, float]) -> str:
    """The habits of a fifth or more of the greedy episodes, the commonest first."""
    found = sorted(((share, name) for name, share in habits.items() if share >= 0.2), reverse=True)
    return ", ".join(f"`{name or 'a guess'}` {share:.0%}" for share, name in found)


def coin(lr: float, shuffled: str | None, seed: int, deviation: bool = True) -> tuple[float, bool]:
    """A policy of two numbers after 40 updates of GRPO with Adam, on the demo's task of before: its share of right
    episodes, and whether the greedy ones are right. At first 0.65 of the episodes make a first call, and 0.46 of these
    a second one; all with two calls are right but for 3 in 100. deviation: advantages are divided by the group's."""
    draw = np.random.default_rng(seed)
    odds, m, v = np.log([0.65 / 0.35, 0.4615 / 0.5385]), np.zeros(2), np.zeros(2)
    for t in range(1, 41):
        p = 1 / (1 + np.exp(-odds))
        first = draw.random((16, 16)) < p[0]
        second = first & (draw.random((16, 16)) < p[1])
        rewards = (second & (draw.random((16, 16)) < 0.97)).astype(float)
        if shuffled == "within":
            rewards = draw.permuted(rewards, axis=1)
        elif shuffled == "across":
            rewards = draw.permutation(rewards.ravel()).reshape(16, 16)
        advantages = rewards - rewards.mean(1, keepdims=True)
        if deviation:
            advantages /= rewards.std(1, ddof=1, keepdims=True) + 1e-9
        gradient = np.array([(advantages * (first - p[0])).sum(), (advantages * first * (second - p[1])).sum()])
        gradient /= np.where(second, 21, np.where(first, 13, 5)).sum()  # the tokens of the episodes
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        odds = odds + lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    return float(np.prod(1 / (1 + np.exp(-odds)))), bool((odds > 0).all())


def coins(seeds: int = 1000) -> str:
    """The table of `--coin`."""
    rows = [
        "| step of Adam | rewards | sampled, mean | its deviation over seeds | above 0.6 | greedy is 1 |",
        "|---" * 6 + "|",
    ]
    for lr in (0.1, 0.2, 0.3):
        for name, shuffled, deviation in (
            *((a, s, True) for a, s in ARMS.items()),
            ("within, no std", "within", False),
        ):
            found = [coin(lr, shuffled, seed, deviation) for seed in range(seeds)]
            sampled = [share for share, _ in found]
            above = sum(share > 0.6 for share in sampled) / seeds
            rows.append(
                f"| {lr} | {name} | {statistics.fmean(sampled):.3f} | {statistics.stdev(sampled):.3f} | "
                f"{above:.1%} | {sum(greedy for _, greedy in found) / seeds:.1%} |"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
