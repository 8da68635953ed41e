"""What an audit of a whole run costs: tapes and records a second, and peak memory, at a tenth of the tapes and at all.

    python benchmarks/audit.py [--tapes 10000]

Prints load averages too: on a busy machine the wall clock says little, CPU seconds say more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tapereel.tapes import Answer, Call, Status, Task, Text
from tapereel.tapes.arrays import floats, ints
from tapereel.tapes.records import Attempt, Begin, End, Identity, Reward, Usage
from tapereel.tapes.store import Store
from tapereel.tapes.tape import step_record

TURNS = 3
TOKENS = 64
"""Completion tokens of a call."""
GROUP = 8

_AUDIT = """
import sys, time
from tapereel.tapes.audit.auditor import audit_run
from tapereel.tapes.store.store import Store
wall, cpu = time.perf_counter(), time.process_time()
with Store.open(sys.argv[1]) as store:
    books, audit = audit_run(store)
assert books.closes and audit.tapes == int(sys.argv[2])
"""
_FOLD = """
import sys, time
from tapereel.tapes.audit.auditor import AuditFold
from tapereel.tapes.store.store import Store
from tapereel.tapes.store.summary import read_facts
fold = AuditFold()
wall, cpu = time.perf_counter(), time.process_time()
for stored in Store.open(sys.argv[1], cache=False).records():
    fold.take(stored.tape or "", read_facts(stored.t, stored.body))
assert fold.audit().tapes == int(sys.argv[2])
"""
_PRINT = """
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.perf_counter() - wall, time.process_time() - cpu, peak)
"""


def record(run: Path, tapes: int) -> None:
    """Episodes of three turns with token ids, in groups of eight."""
    task = Task(public="q")
    ids, known = ints(range(TOKENS)), floats([-0.5] * TOKENS)
    with Store.create(run, durability="os") as store:
        put = store.writer.append
        for k in range(tapes):
            tape, version = f"tape-{k:07d}", f"main:{k // 256}"
            put(
                Begin(
                    tape=tape,
                    task=task,
                    task_hash=task.hash,
                    agent=Identity(name="a"),
                    env=Identity(name="e"),
                    env_seed=0,
                    seed=k,
                    group=f"g{k // GROUP}",
                    attempt=k % GROUP,
                    at=0.0,
                ).body()
            )
            for turn in range(TURNS):
                put(step_record(tape, Text(text=f"{turn}"), by="env").body())
                put(
                    Call(
                        tape=tape,
                        call=f"{tape}.{turn}",
                        by="a",
                        engine="embedded",
                        new_prompt=ints(range(40)),
                        completion=ids,
                        logprobs=known,
                        spans=((version, 0, TOKENS),),
                        at=1.0,
                        text="x" * 200,
                        attempts=(Attempt(seconds=0.5),),
                        usage=Usage(cost=1e-4),
                    ).body()
                )
                put(step_record(tape, Answer(text=f"{turn}"), by="a", calls=((f"{tape}.{turn}", 0, TOKENS),)).body())
                put(Reward(tape=tape, step=2 * turn + 1, value=float(k % 3 == turn)).body())
            put(End(tape=tape, status=Status.FINISHED, seconds=2.0, at=2.0).body())
            if k % 1_000 == 0:
                store.writer.sync()


def measured(code: str, run: Path, tapes: int) -> tuple[float, float, float]:
    """Seconds by the wall, CPU seconds, and peak memory in MB, of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code + _PRINT, str(run), str(tapes)], capture_output=True, text=True, check=True
    )
    wall, cpu, peak = done.stdout.split()
    return float(wall), float(cpu), int(peak) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tapes", type=int, default=10_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for tapes in (args.tapes // 10, args.tapes):
            run = Path(folder) / f"run{tapes}"
            record(run, tapes)
            records = tapes * (2 + 4 * TURNS)
            size = sum(file.stat().st_size for file in (run / "tapes").glob("*.jsonl"))
            for what, code in (("audit, index made first", _AUDIT), ("audit", _AUDIT), ("without the books", _FOLD)):
                wall, cpu, peak = measured(code, run, tapes)
                print(
                    f"{tapes} tapes ({records} records, {size / 1e6:.0f} MB), {what}: {wall:.1f} s by the wall, "
                    f"{cpu:.1f} s of CPU, {tapes / cpu:,.0f} tapes a CPU second, peak {peak:.0f} MB"
                )
    print(f"load averages {', '.join(f'{load:.1f}' for load in os.getloadavg())} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
