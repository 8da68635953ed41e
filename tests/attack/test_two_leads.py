"""Two `tapereel train` on one run directory: no update twice, no version with two weights, every token accounted for.

`ATTACK_TRIES=20 python -m pytest -m kill tests/attack/test_two_leads.py` makes the tries of docs/security.md.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tapereel.finetune.api.public import save_tiny_model
from tapereel.tapes.store.lease import read_leads
from tapereel.tapes.store.store import Store
from tapereel.tapes.store.verifier import verify

pytestmark = pytest.mark.kill

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
SLOW = Path(__file__).with_name("slow_digits.py")
TRIES = range(int(os.environ.get("ATTACK_TRIES", "1")))
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


def train(model: str, out: Path, *more: str, locks: bool = True) -> subprocess.Popen[str]:
    words = ["train", "--agent", f"{EXAMPLE}:player", "--env", f"{SLOW}:Slow", "--tasks", f"{EXAMPLE}:tasks"]
    words += ["--model", model, "--out", str(out)]
    for setting in (
        f"loop.updates={UPDATES}",
        "loop.groups=2",
        "loop.group_size=4",
        "loop.checkpoint_every=5",
        "loop.sampling.max_tokens=1",
        "evaluation.fraction=0",
        # A bonus on entropy trains on tokens also where all attempts earned the same.
        'loop.changes.regulariser=[{"kind": "entropy", "coefficient": 0.05}]',
    ):
        words += ["--set", setting]
    code = MAIN if locks else NO_LOCKS + MAIN
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


def check(run: Path) -> None:
    """All that two leads may not break."""
    report = verify(run)
    assert report.exit_code == 0, report
    assert report.books.findings == ()
    with Store.open(run) as store:
        lineages = store.lineages()
        assert lineages.doubles == {}
        (lineage,) = lineages.living
        assert [use.update for use in store.ledger(lineage).uses] == list(range(UPDATES))
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
        assert f"is led by process {first.pid} on {os.uname().nodename} (started 20" in said
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
        assert "was taken over by process" in said
        said = second.communicate(timeout=240)[1]
        assert second.returncode == 0, said
    check(run)
