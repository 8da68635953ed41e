"""Two `tapereel train` on one run directory: no update twice, no version with two weights, every token accounted for.

Also with `leads/` gone, and with a lead that is stopped at the very moment of a write.
`ATTACK_TRIES=20 python -m pytest -m kill tests/attack/test_two_leads.py` makes the tries of docs/project/attacks.md.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tapereel.finetune.api import save_tiny_model
from tapereel.tapes.store import Store, verify
from tapereel.tapes.store.lease import read_leads

from ..tapes.store.test_lease import ACTS

pytestmark = pytest.mark.kill

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
SLOW = Path(__file__).with_name("slow_digits.py")
TRIES = range(int(os.environ.get("ATTACK_TRIES", "1")))
MORE = range(max(len(TRIES), 2))
"""Tries that take their cases in turn."""
UPDATES = 40
NO_LOCKS = "import fcntl; fcntl.flock = lambda *_: None\n"
"""A file system without locks, for the command that follows."""
MAIN = """
import sys
from tapereel.tapes.store import lease
for function in (lease.Lease.__init__, lease.check_free):
    function.__kwdefaults__["beat"] = 1.0
from tapereel.cli import main
from tapereel.finetune.run import train_run
print("ready", flush=True)
sys.stdin.readline()
sys.exit(main(sys.argv[1:]))
"""


STOPPED = """
import os, signal, sys
from tapereel.tapes.store.store import Store
check, left = Store.check_lead, {n}
def stopping(store):
    global left
    check(store)
    frame = sys._getframe(1)
    left -= frame.f_code.co_name == {writer!r} or frame.f_back.f_code.co_name == {writer!r}
    if left == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
Store.check_lead = stopping
"""
"""Stops the process after the n-th check that `writer` makes, before it writes."""


def train(
    model: str, out: Path, *more: str, locks: bool = True, updates: int = UPDATES, before: str = ""
) -> subprocess.Popen[str]:
    words = ["train", "--agent", f"{EXAMPLE}:player", "--env", f"{SLOW}:Slow", "--tasks", f"{EXAMPLE}:tasks"]
    words += ["--model", model, "--out", str(out)]
    for setting in (
        f"loop.updates={updates}",
        "loop.groups=2",
        "loop.group_size=4",
        "loop.checkpoint_every=5",
        "loop.sampling.max_tokens=1",
        "evaluation.fraction=0",
        # A bonus on entropy trains on tokens also where all attempts earned the same.
        'loop.changes.regulariser=[{"kind": "entropy", "coefficient": 0.05}]',
    ):
        words += ["--set", setting]
    code = before + (MAIN if locks else NO_LOCKS + MAIN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *words, *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def go(process: subprocess.Popen[str]) -> None:
    """Let it begin: what a start costs before plays no part then."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), size="micro")


def updates_of(run: Path) -> int:
    try:
        with Store.open(run) as store:
            return sum(1 for _ in store.run_records("use"))
    except (OSError, ValueError):
        return 0


def wait_for_update(run: Path, update: int) -> None:
    stop = time.monotonic() + 120
    while updates_of(run) < update:
        assert time.monotonic() < stop, "training makes no progress"
        time.sleep(0.05)


def check(run: Path, updates: int = UPDATES) -> None:
    """All that two leads may not break."""
    report = verify(run)
    assert report.exit_code == 0, report
    assert report.books.findings == ()
    with Store.open(run) as store:
        lineages = store.lineages()
        assert lineages.doubles == {}
        (lineage,) = lineages.living
        uses = store.ledger(lineage).uses
        assert [use.update for use in uses] == list(range(updates))
        tapes = [tape for use in uses for tape in {item[0] for item in use.items}]
        assert len(tapes) == len(set(tapes)), "a tape was trained on twice"
        assert store.books().closes
        for version, counted in store.published.items():
            records = [stored.record for stored in store.run_records("publish") if stored.record.version == version]
            assert {one.digest for one in records if one.lead == counted.lead} == {counted.digest}


@pytest.mark.parametrize("locks", [True, False], ids=["flock", "no flock"])
@pytest.mark.parametrize("attempt", TRIES)
def test_a_second_train_exits_and_harms_nothing(tmp_path: Path, model: str, attempt: int, locks: bool) -> None:
    rng = random.Random(attempt)
    run = tmp_path / "run"
    with train(model, run, locks=locks) as first, train(model, run, "--resume", locks=locks) as second:
        go(first)
        wait_for_update(run, rng.randrange(1, UPDATES // 3))
        time.sleep(rng.random() / 2)
        go(second)
        said = second.communicate(timeout=120)[1]
        assert second.returncode == 64, said
        assert f"process {first.pid} " in said
        assert os.uname().nodename in said
        said = first.communicate(timeout=240)[1]
        assert first.returncode == 0, said
    assert list(read_leads(run)) == [1]
    check(run)


@pytest.mark.parametrize("locks", [True, False], ids=["flock", "no flock"])
@pytest.mark.parametrize("attempt", TRIES)
def test_a_lead_that_slept_through_its_lease_stops(tmp_path: Path, model: str, attempt: int, locks: bool) -> None:
    rng = random.Random(attempt)
    run = tmp_path / "run"
    # A lock outlives the sleep, so there the user must say that the first lead is to end.
    more = ["--resume", *(["--take-over"] if locks else [])]
    with train(model, run, locks=locks) as first, train(model, run, *more, locks=locks) as second:
        go(first)
        wait_for_update(run, rng.randrange(1, UPDATES // 3))
        time.sleep(rng.random() / 2)
        first.send_signal(signal.SIGSTOP)
        go(second)
        while max(read_leads(run)) == 1:
            assert second.poll() is None, second.communicate()[1]
            time.sleep(0.02)
        time.sleep(rng.random() * 3)
        first.send_signal(signal.SIGCONT)
        said = first.communicate(timeout=120)[1]
        assert first.returncode == 1, said
        assert f"process {second.pid} " in said
        said = second.communicate(timeout=240)[1]
        assert second.returncode == 0, said
    check(run)


FEW = 12
"""Updates, where it doesn't matter how many."""
WRITERS = {"append_metrics": FEW, "put_file": 3, "save_checkpoint": 3, "record_files": 4, "append_layer": 2 * FEW}
"""Function that writes for the lead -> how often it does so at least."""


def settled(process: subprocess.Popen[str]) -> int:
    """The exit code. It said why in a sentence, if it isn't 0."""
    said = process.communicate(timeout=240)[1]
    assert "Traceback" not in said, said
    return process.returncode


def finish(model: str, run: Path) -> None:
    """A plain resume, which ends the run well."""
    with train(model, run, "--resume", updates=FEW) as last:
        go(last)
        assert settled(last) == 0
    check(run, FEW)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("attempt", MORE)
def test_a_lead_that_is_stopped_at_a_write_spoils_nothing(tmp_path: Path, model: str, attempt: int) -> None:
    """Its successor ends the run and closes it; then the first one continues, and says that it lost its lease."""
    writer, run = [*WRITERS][attempt % len(WRITERS)], tmp_path / "run"
    n = random.Random(attempt).randrange(1, WRITERS[writer])
    with train(model, run, updates=FEW, before=STOPPED.format(n=n, writer=writer)) as first:
        go(first)
        os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert first.poll() is None, first.communicate()[1]
        with train(model, run, "--resume", "--take-over", updates=FEW) as second:
            go(second)
            assert settled(second) == 0
        check(run, FEW)
        kept = {path: path.read_bytes() for path in files(run)}
        first.send_signal(signal.SIGCONT)
        assert settled(first) == 1
    assert {path: path.read_bytes() for path in files(run)} == kept
    check(run, FEW)
    finish(model, run)


def files(run: Path) -> list[Path]:
    """Every file of the run that a reader reads, without those of the store and of the leads."""
    return [
        path
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.relative_to(run).parts[0] not in ("tapes", "leads") and ".update" not in str(path)
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("attempt", MORE)
def test_a_run_without_its_leads_is_refused_or_sound(tmp_path: Path, model: str, attempt: int) -> None:
    act, alive = ACTS[attempt // 2 % len(ACTS)], attempt % 2 == 0
    rng = random.Random(attempt)
    run = tmp_path / "run"
    with train(model, run, updates=FEW) as first, train(model, run, "--resume", updates=FEW) as second:
        go(first)
        wait_for_update(run, rng.randrange(1, FEW // 2))
        time.sleep(rng.random() / 2)
        if not alive:
            first.kill()
            first.wait()
        act(max((run / "leads").glob("*.json")))
        go(second)
        codes = settled(first), settled(second)
    assert codes in ([(-9, 0)] if not alive else [(1, 64), (1, 0), (0, 64)])
    finish(model, run)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("attempt", TRIES)
def test_of_two_resumes_at_once_one_leads(tmp_path: Path, model: str, attempt: int) -> None:
    rng = random.Random(attempt)
    run = tmp_path / "run"
    with train(model, run, updates=FEW) as first:
        go(first)
        wait_for_update(run, rng.randrange(1, FEW // 2))
        first.kill()
    shutil.rmtree(run / "leads")
    with train(model, run, "--resume", updates=FEW) as one, train(model, run, "--resume", updates=FEW) as other:
        go(one)
        go(other)
        assert sorted((settled(one), settled(other))) == [0, 64]
    assert max(read_leads(run)) == 2
    finish(model, run)
