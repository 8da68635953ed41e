"""Durable records per second and added latency: group commit against a sync per record and against SQLite.

    python benchmarks/store_commit.py [--seconds 1.0] [--out FILE.json]

Each episode appends one record of a turn, waits until it would survive a power cut, and goes on; so many episodes run
at once. That saturates the writer; in a second table each waits about 200 ms between its records, as for a model call.
Measured on the disk as it is, and with a sync that costs 5 ms, as on drives that really flush. SQLite runs in
WAL mode with synchronous=FULL: one transaction per record, and one for all records that wait (`grouped`), in a thread
as our writer. The 5 ms are added after each commit, which syncs once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tapereel.tapes.records import Reward
from tapereel.tapes.store import Disk, Store

BODY = Reward(tape="0" * 22, step=1, value=1.0, evidence="x" * 400).body()
EPISODES = (1, 64, 256, 1024)
THINK = 0.2


class SlowDisk(Disk):
    """A real disk whose syncs take longer."""

    def __init__(self, extra: float) -> None:
        self.extra = extra
        self.syncs = 0
        self.spent = 0.0

    def sync(self, handle: int) -> None:
        started = time.perf_counter()
        super().sync(handle)
        if self.extra:
            time.sleep(self.extra)
        self.syncs += 1
        self.spent += time.perf_counter() - started


async def drive(
    episodes: int, seconds: float, write: Callable[[], Awaitable[None]], think: float = 0.0
) -> tuple[float, list[float]]:
    """Records per second, and the latency of each; about `think` seconds lie between an episode's records."""
    rng = random.Random(0)
    latencies: list[float] = []
    stop = time.perf_counter() + seconds

    async def episode() -> None:
        while True:
            if think:
                await asyncio.sleep(think * rng.uniform(0.5, 1.5))
            started = time.perf_counter()
            await write()
            latencies.append(time.perf_counter() - started)
            if time.perf_counter() >= stop:  # at the end, so that each episode has a record, however slow the disk
                return

    started = time.perf_counter()
    await asyncio.gather(*(episode() for _ in range(episodes)))
    return len(latencies) / (time.perf_counter() - started), latencies


def group_commit(episodes: int, seconds: float, extra: float, folder: Path, think: float = 0.0) -> dict[str, Any]:
    disk = SlowDisk(extra)
    with Store.create(folder / "run", disk=disk, cache=False) as store:
        writer = store.writer

        async def write() -> None:
            writer.append(BODY)
            await writer.durable()

        disk.syncs, disk.spent = 0, 0.0
        rate, latencies = asyncio.run(drive(episodes, seconds, write, think))
        sync = disk.spent / max(disk.syncs, 1)
    return summary(rate, latencies) | {"sync_ms": sync * 1e3, "syncs_of_latency": statistics.median(latencies) / sync}


def sync_per_record(episodes: int, seconds: float, extra: float, folder: Path) -> dict[str, Any]:
    handle = os.open(folder / "plain.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    disk = SlowDisk(extra)

    async def write() -> None:
        os.write(handle, BODY + b"\n")
        disk.sync(handle)
        await asyncio.sleep(0)

    try:
        return summary(*asyncio.run(drive(episodes, seconds, write)))
    finally:
        os.close(handle)


def sqlite(episodes: int, seconds: float, extra: float, folder: Path) -> dict[str, Any]:
    db = sqlite3.connect(folder / "log.sqlite", isolation_level=None)
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = full")
    db.execute("create table log (n integer primary key, body blob)")

    async def write() -> None:
        db.execute("insert into log (body) values (?)", (BODY,))
        if extra:
            time.sleep(extra)  # noqa: ASYNC251  # the commit above blocks the loop just so
        await asyncio.sleep(0)

    try:
        return summary(*asyncio.run(drive(episodes, seconds, write)))
    finally:
        db.close()


def sqlite_grouped(episodes: int, seconds: float, extra: float, folder: Path) -> dict[str, Any]:
    """One transaction for all records that wait, in a thread, as our writer does."""
    db = sqlite3.connect(folder / "log.sqlite", isolation_level=None, check_same_thread=False)
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = full")
    db.execute("create table log (n integer primary key, body blob)")
    waiting: list[asyncio.Future[None]] = []
    task: asyncio.Task[None] | None = None

    def insert(n: int) -> None:
        db.execute("begin")
        db.executemany("insert into log (body) values (?)", [(BODY,)] * n)
        db.execute("commit")
        time.sleep(extra)

    async def commit() -> None:
        while waiting:
            batch, waiting[:] = waiting[:], []
            await asyncio.to_thread(insert, len(batch))
            for one in batch:
                one.set_result(None)

    async def write() -> None:
        nonlocal task
        waiting.append(one := asyncio.get_running_loop().create_future())
        if task is None or task.done():
            task = asyncio.create_task(commit())
        await one

    try:
        return summary(*asyncio.run(drive(episodes, seconds, write)))
    finally:
        db.close()


def summary(rate: float, latencies: list[float]) -> dict[str, Any]:
    latencies.sort()
    return {
        "per_second": rate,
        "p50_ms": statistics.median(latencies) * 1e3,
        "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        f"{'sync':>6} {'episodes':>8} {'ours/s':>9} {'p50 ms':>8} {'syncs':>6} {'plain/s':>9} {'sqlite/s':>9} "
        f"{'grouped/s':>9} {'x plain':>8} {'x sqlite':>8} {'x grouped':>9}"
    )
    for extra in (0.0, 0.005):
        for episodes in EPISODES:
            found = {}
            for way in (group_commit, sync_per_record, sqlite, sqlite_grouped):
                with tempfile.TemporaryDirectory() as folder:
                    found[way.__name__] = way(episodes, args.seconds, extra, Path(folder))
            ours, plain, lite = found["group_commit"], found["sync_per_record"], found["sqlite"]
            grouped = found["sqlite_grouped"]
            rows.append({"extra_ms": extra * 1e3, "episodes": episodes, **found})
            print(
                f"{'+5 ms' if extra else 'as is':>6} {episodes:>8} {ours['per_second']:>9.0f} {ours['p50_ms']:>8.2f} "
                f"{ours['syncs_of_latency']:>6.2f} {plain['per_second']:>9.0f} {lite['per_second']:>9.0f} "
                f"{grouped['per_second']:>9.0f} {ours['per_second'] / plain['per_second']:>8.1f} "
                f"{ours['per_second'] / lite['per_second']:>8.1f} {ours['per_second'] / grouped['per_second']:>9.2f}",
                flush=True,
            )
    print("\n200 ms between records")
    print(f"{'sync':>6} {'episodes':>8} {'wait, p50 ms':>12} {'p99 ms':>8} {'p50 in syncs':>12}")
    for extra in (0.0, 0.005):
        for episodes in EPISODES:
            with tempfile.TemporaryDirectory() as folder:
                found = group_commit(episodes, max(args.seconds, 3 * THINK), extra, Path(folder), THINK)
            rows.append({"extra_ms": extra * 1e3, "episodes": episodes, "think_ms": THINK * 1e3, "group_commit": found})
            print(
                f"{'+5 ms' if extra else 'as is':>6} {episodes:>8} {found['p50_ms']:>12.2f} {found['p99_ms']:>8.2f} "
                f"{found['syncs_of_latency']:>12.2f}",
                flush=True,
            )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
