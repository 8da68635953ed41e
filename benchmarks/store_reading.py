"""What writing, finding and reading cost: append, CPU of a durable turn, one tape among many, memory of a long one, and
verification next to the bare SHA-256 of the same lines.

python benchmarks/store_reading.py [--tapes 100000] [--records 300000] [--verified 30000]
python benchmarks/store_reading.py --only-verify
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import hashlib
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from audit import record

from tapereel.tapes import Answer, Status, Task
from tapereel.tapes.records import Begin, End, Identity, Reward
from tapereel.tapes.store import Store, verify
from tapereel.tapes.tape import step_record

CALL_SECONDS = 0.2
"""A model call, for the share that the store takes of it."""


def begin(tape: str) -> bytes:
    task = Task(public="q")
    who, where = Identity(name="a"), Identity(name="e")
    return Begin(tape=tape, task=task, task_hash=task.hash, agent=who, env=where, env_seed=0, seed=0, at=0.0).body()


def append_cost(folder: Path) -> None:
    body = Reward(tape="0" * 22, step=1, value=1.0, evidence="x" * 400).body()
    with Store.create(folder / "append", cache=False) as store:
        times = []
        for _ in range(20):
            started = time.process_time()
            for _ in range(5_000):
                store.writer.append(body)
            times.append((time.process_time() - started) / 5_000)
            store.writer.sync()
        print(f"append of {len(body)} bytes: {min(times) * 1e6:.1f} us, its share of the writer's thread included")

        async def turns(n: int) -> None:
            for _ in range(n):
                for _ in range(4):  # observation, call, action, reward
                    store.writer.append(body)
                await store.writer.durable()

        async def episodes() -> None:
            await asyncio.gather(*(turns(40) for _ in range(256)))

        started = time.process_time()
        asyncio.run(episodes())
        spent = (time.process_time() - started) / (256 * 40)
        print(
            f"a durable turn of 4 records at 256 episodes: {spent * 1e6:.0f} us of CPU, {spent / CALL_SECONDS:.3%} "
            f"of a model call of {CALL_SECONDS * 1e3:.0f} ms"
        )


def one_among_many(folder: Path, tapes: int) -> None:
    run = folder / "many"
    with Store.create(run) as store:
        started = time.perf_counter()
        for k in range(tapes):
            tape = f"{k:022d}"
            store.writer.append(begin(tape))
            for j in range(2):
                store.writer.append(step_record(tape, Answer(text=f"{j}"), by="a").body())
            store.writer.append(Reward(tape=tape, step=0, value=k % 7).body())
            store.writer.append(End(tape=tape, status=Status.FINISHED, at=0.0).body())
        store.writer.sync()
        print(f"recorded {tapes} tapes of 5 records in {time.perf_counter() - started:.1f} s")
        started = time.perf_counter()
        store.refresh()
        print(f"indexed once in {time.perf_counter() - started:.1f} s")
    times = []
    for k in range(0, tapes, max(tapes // 20, 1)):
        started = time.perf_counter()
        with Store.open(run) as store:
            store.tape(f"{k:022d}")
        times.append(time.perf_counter() - started)
    started = time.perf_counter()
    verify(run)
    whole = time.perf_counter() - started
    opened = statistics.median(times)
    print(
        f"opening the run and one tape: {opened * 1e3:.1f} ms, 1/{whole / opened:.0f} of reading it all ({whole:.1f} s)"
    )


def memory(folder: Path, records: int) -> None:
    """Peak memory of reading a tape's records one by one, for a short and a long tape, each in a process of its own."""
    peaks = []
    for n in (records // 100, records):
        run = folder / f"long{n}"
        with Store.create(run, cache=False) as store:
            store.writer.append(begin("t"))
            for k in range(n):
                store.writer.append(step_record("t", Answer(text=f"{k}"), by="a").body())
                if k % 20_000 == 0:
                    store.writer.sync()
        code = (
            "import sys\nfrom tapereel.tapes.store.verifier import verify\n"
            "from tapereel.tapes.store.store import Store\n"
            "store = Store.open(sys.argv[1], cache=False)\nn = sum(1 for _ in store.records())\n"
            "verify(sys.argv[1])\n"
            "print(n, next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
        )
        out = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True).stdout
        peaks.append(int(out.split()[1]) / 1024)
    print(
        f"peak memory of reading and verifying one tape: {peaks[0]:.0f} MB with {records // 100} records, "
        f"{peaks[1]:.0f} MB with {records} (ratio {peaks[1] / peaks[0]:.2f})"
    )


def verification(folder: Path, tapes: int) -> None:
    """CPU of verifying episodes with token ids, as `train` writes them, against hashing each line of the same files."""
    run = folder / "verified"
    record(run, tapes)

    def bare() -> None:
        for path in sorted((run / "tapes").glob("*.jsonl")):
            with path.open("rb") as file:
                for line in file:
                    hashlib.sha256(line).digest()

    def cpu(work: Callable[[], object]) -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    rounds = [(cpu(bare), cpu(lambda: verify(run))) for _ in range(5)]
    profile = cProfile.Profile()
    report = profile.runcall(verify, run)
    hashing, whole = (statistics.median(times) for times in zip(*rounds, strict=True))
    each = whole / report.records
    print(
        f"verifying {tapes} tapes ({report.records} records): {whole:.1f} s of CPU, {each * 1e6:.1f} us "
        f"and {pstats.Stats(profile).total_calls / report.records:.0f} calls a record; "
        f"{statistics.median(b / a for a, b in rounds):.1f} times the SHA-256 of its lines ({hashing:.2f} s); "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    for jobs in (1, 2):
        before, own, started = os.times(), time.process_time(), time.perf_counter()
        assert verify(run, jobs=jobs) == report
        wall, own, after = time.perf_counter() - started, time.process_time() - own, os.times()
        others = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"--jobs {jobs}: {wall:.1f} s, CPU {own:.1f} s in the first process and {others:.1f} s in the others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tapes", type=int, default=100_000)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--verified", type=int, default=30_000, help="tapes to verify")
    parser.add_argument("--only-verify", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        verification(Path(folder), args.verified)
        if args.only_verify:
            return
        append_cost(Path(folder))
        one_among_many(Path(folder), args.tapes)
        memory(Path(folder), args.records)


if __name__ == "__main__":
    main()
