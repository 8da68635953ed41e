"""CPU seconds of fixed workloads in two checkouts, in turn: did a change make anything slower?

    python benchmarks/paired.py OLD_CHECKOUT [--pairs 11] [--only NAME ...]

Each workload but the gateway's is taken from the checkout's own benchmark script, so that moved modules and renamed
calls don't matter. Every run is a process of its own with one torch thread. Printed: the median CPU seconds of both,
and the median of the pairs' ratios new / old, with the least and the greatest. The checkouts' folders must be named
`tapereel`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def rollout_cost() -> Callable[[], object]:
    """1,024 episodes of 5 turns and 64 of 50, a tape of 1,000 steps recorded, and a tape of 50 turns converted."""
    bench: Any = importlib.import_module("rollout_cost")
    prompt, completion, logprobs = array("i", range(200)), array("i", range(91)), array("f", [-0.5] * 91)

    def work() -> None:
        bench.roll(5, 1024, 64)
        bench.roll(50, 64, 64)
        for _ in range(5):
            bench.record(1_000, prompt, completion, logprobs)
        tape = bench.record(100, prompt, completion, logprobs)
        for _ in range(100):
            bench.rows(tape)

    return work


async def rolled(turns: int, n: int, journal: Any = None) -> None:
    """`n` episodes of `turns` turns, 64 at a time, whose model answers at once."""
    bench: Any = importlib.import_module("rollout_cost")
    left, engine, limits = iter(range(n)), bench.Instant(), bench.Limits(turns=None)

    async def worker() -> None:
        for _ in left:
            await bench.rollout(bench.Plain(), bench.Endless(turns), 0, engine=engine, limits=limits, journal=journal)

    await asyncio.gather(*(worker() for _ in range(min(n, 64))))


def episodes(turns: int, n: int, *, store: bool = False) -> Callable[[], object]:
    """The episodes of `rolled`, in memory or into a store."""
    stores: Any = importlib.import_module("tapereel.tapes.store.store")

    def work() -> None:
        if not store:
            asyncio.run(rolled(turns, n))
            return
        with tempfile.TemporaryDirectory() as folder, stores.Store.create(Path(folder) / "run") as written:
            asyncio.run(rolled(turns, n, written.writer))

    return work


def memory_1() -> Callable[[], object]:
    """2,560 episodes of one turn in memory."""
    return episodes(1, 2_560)


def memory_5() -> Callable[[], object]:
    """1,024 episodes of 5 turns in memory."""
    return episodes(5, 1_024)


def memory_50() -> Callable[[], object]:
    """128 episodes of 50 turns in memory."""
    return episodes(50, 128)


def store_1() -> Callable[[], object]:
    """1,280 episodes of one turn into a store."""
    return episodes(1, 1_280, store=True)


def store_5() -> Callable[[], object]:
    """512 episodes of 5 turns into a store."""
    return episodes(5, 512, store=True)


def converter() -> Callable[[], object]:
    """Rows of recorded tapes of 1, 5, 50 and 500 turns, about 8,000 turns of each length."""
    bench: Any = importlib.import_module("rollout_cost")
    prompt, completion, logprobs = array("i", range(200)), array("i", range(91)), array("f", [-0.5] * 91)
    tapes = [(bench.record(2 * turns, prompt, completion, logprobs), 8_000 // turns) for turns in (1, 5, 50, 500)]

    def work() -> None:
        for tape, times in tapes:
            for _ in range(times):
                bench.rows(tape)

    return work


def stream() -> Callable[[], object]:
    """Advantages of REINFORCE of 20,000 rows of 64 tokens, the stream of these rows made too."""
    bench: Any = importlib.import_module("advantages")
    made, recipe = bench.rows_and_episodes(20_000), bench.get_recipe("reinforce")
    return lambda: bench.prepare(recipe, bench.Stream.of(*made), bench.Context())


def rl_update() -> Callable[[], object]:
    """Four updates of GRPO on 8 rows of 512 tokens, vocabulary 8,000."""
    bench: Any = importlib.import_module("rl_update")
    case: Any = importlib.import_module("peers.update_case")
    update = bench.ours(case.Case(8_000, 8, 512, reps=1))

    def work() -> None:
        for _ in range(4):
            update()

    return work


def store_commit() -> Callable[[], object]:
    """64 episodes that append 500 records each and wait until each is durable."""
    bench: Any = importlib.import_module("store_commit")
    disk: Any = getattr(bench, "Disk", None) or bench.RealDisk  # its name before

    def work() -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            bench.Store.create(Path(folder) / "run", disk=disk(), cache=False) as store,
        ):
            writer = store.writer

            async def episode() -> None:
                for _ in range(500):
                    writer.append(bench.BODY)
                    await writer.durable()

            async def main() -> None:
                await asyncio.gather(*(episode() for _ in range(64)))

            asyncio.run(main())

    return work


def embedded_engine() -> Callable[[], object]:
    """64 completions of 64 tokens in 64 slots from a model of 0.34M parameters."""
    bench: Any = importlib.import_module("embedded_engine")
    model = next(iter(bench.models().values()))
    engine = bench.EmbeddedEngine(model, bench.NoText(), version="v0", slots=64, capacity=256)
    return bench.by_engine(engine, [64] * 64)


def gateway() -> Callable[[], object]:
    """2,400 questions by chat completions in conversations of ten, after 400 that aren't counted. Only the CPU seconds
    of the gateway's process count. Both servers get the requests of this checkout's benchmark, because the server at
    9dc43d5 refuses those of its own."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    bench: Any = importlib.import_module("gateway")

    def work() -> float:
        with tempfile.TemporaryDirectory() as folder:
            told = asyncio.run(bench.measure("gateway", 2_400, 16, f"{folder}/run"))
        return told["cpu_ms"] * told["requests"] / 1e3

    return work


TURNS = (memory_1, memory_5, memory_50, store_1, store_5)
WORKLOADS = (rollout_cost, *TURNS, converter, stream, rl_update, store_commit, embedded_engine, gateway)


def measure(name: str, checkout: Path) -> None:
    """Print the CPU seconds of one workload: the median of three runs, after one that isn't counted.

    Garbage is collected before each run. Otherwise a full collection, which may take a sixth of a run, falls into the
    measured run of one checkout and not of the other. A workload that measures another process returns its CPU seconds.
    """
    sys.path[:0] = [str(checkout.parent), str(checkout / "benchmarks")]
    os.environ["PYTHONPATH"] = str(checkout.parent)  # for the processes that a workload starts
    import torch

    torch.set_num_threads(1)
    work = next(one for one in WORKLOADS if one.__name__ == name)()
    work()
    cpu = []
    for _ in range(3):
        gc.collect()
        started = time.process_time()
        found = work()
        cpu.append(found if isinstance(found, float) else time.process_time() - started)
    print(f'{{"cpu": {statistics.median(cpu)}}}')


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--only", nargs="+", default=[one.__name__ for one in WORKLOADS], metavar="NAME")
    args = parser.parse_args()
    from side_by_side import in_turn

    print("| workload | old, CPU s | new, CPU s | new / old | least | greatest |\n|---|---|---|---|---|---|")
    for name in args.only:
        commands = {
            key: [sys.executable, "-P", __file__, "--measure", name, str(root.resolve())]
            for key, root in (("old", args.old), ("new", ROOT))
        }
        found = in_turn(commands, args.pairs)
        old, new = ([one["cpu"] for one in found[key]] for key in ("old", "new"))
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        print(
            f"| {name} | {statistics.median(old):.2f} | {statistics.median(new):.2f} "
            f"| {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |",
            flush=True,
        )
    print(f"\n{args.pairs} pairs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
