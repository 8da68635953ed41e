"""`tapereel train` at max_lag=0, killed while episodes are in flight, and resumed: the unkilled run's model.

`ATTACK_TRIES=30 python -m pytest -m kill -s tests/attack/test_killed_in_flight.py` makes the tries of
docs/project/attacks.md.
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
from typing import Any

import pytest
import torch

from tapereel.finetune.api import save_tiny_model
from tapereel.finetune.inspect import reproduce
from tapereel.finetune.trainer import checkpoints
from tapereel.tapes import Status, Tape
from tapereel.tapes.store import Store, verify

pytestmark = pytest.mark.kill

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
SLOW = Path(__file__).with_name("slow_digits.py")
TRIES = range(int(os.environ.get("ATTACK_TRIES", "3")))
UPDATES = 4


def train(model: str, out: Path, *more: str, lag: int = 0) -> subprocess.Popen[bytes]:
    words = ["train", "--agent", f"{SLOW}:wordy", "--env", f"{SLOW}:Slow", "--tasks", f"{EXAMPLE}:tasks"]
    words += ["--model", model, "--out", str(out), *more]
    for setting in (
        f"loop.updates={UPDATES}",
        "loop.groups=3",
        "loop.group_size=4",
        f"loop.max_lag={lag}",
        "loop.checkpoint_every=2",
        "loop.keep_checkpoints=3",
        "evaluation.fraction=0",
        # A bonus on entropy trains on tokens also where all attempts earned the same.
        'loop.changes.regulariser=[{"kind": "entropy", "coefficient": 0.05}]',
    ):
        words += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "tapereel.cli", *words], stdout=log, stderr=log, env=environment)


def finished(model: str, out: Path, *more: str, lag: int = 0) -> None:
    with train(model, out, *more, lag=lag) as process:
        assert process.wait(timeout=240) == 0, out.with_suffix(".log").read_text()[-3000:]


def records(run: Path, kind: str) -> int:
    needle = f'"t":"{kind}"'.encode()
    return sum(path.read_bytes().count(needle) for path in run.glob("tapes/*.jsonl"))


def kill_in_flight(model: str, run: Path, rng: random.Random, lag: int = 0) -> None:
    """Kill a new run at a random moment at which it has open episodes."""
    update, share = rng.randrange(UPDATES), rng.random()
    while not killed(model, run, update, share, lag):
        shutil.rmtree(run)
        update -= 1
        assert update >= 0, "a run that has just begun has open episodes"


def killed(model: str, run: Path, update: int, share: float, lag: int) -> bool:
    """Kill a new run that has open episodes after `update` updates. False if it ended first: on a busy machine, the
    last episodes may all end between two looks."""
    stop = time.monotonic() + 120
    with train(model, run, lag=lag) as process:
        while records(run, "use") < update or records(run, "begin") <= records(run, "end"):
            process.send_signal(signal.SIGCONT)
            time.sleep(0.01 + 0.25 * share)
            assert time.monotonic() < stop, "training makes no progress"
            # Stopped, it ends no episode between the look at its records and the kill.
            process.send_signal(signal.SIGSTOP)
            if process.poll() is None:
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if process.poll() is not None:
                assert process.returncode == 0, run.with_suffix(".log").read_text()[-3000:]
                return False
        process.kill()
    return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), size="micro")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: str) -> tuple[str, Path]:
    """The model, and a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    finished(model, folder / "run")
    return model, folder / "run"


def attempts(run: Path) -> dict[tuple[str, int], list[Tape]]:
    """(number of the group, attempt) -> its tapes, in the order of their begin."""
    found: dict[tuple[str, int], list[Tape]] = {}
    with Store.open(run) as store:
        for summary in store.summaries(split="train"):
            tape = store.tape(summary.id)
            number = str(tape.begin.group).rpartition("/")[2]
            found.setdefault((number, tape.begin.attempt), []).append(tape)
    return {key: sorted(tapes, key=lambda tape: tape.begin.at) for key, tapes in found.items()}


def tokens(tape: Tape) -> list[Any]:
    return [list(call.completion or ()) for call in tape.calls]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(max(checkpoints(run / "checkpoints"), key=lambda one: one.update).weights())


def assert_sound(run: Path) -> None:
    """Each update is there once, no token was trained on twice, and all are accounted for."""
    assert verify(run).exit_code == 0
    with Store.open(run) as store:
        (lineage,) = store.lineages().living
        uses = store.ledger(lineage).uses
        assert [use.update for use in uses] == list(range(UPDATES))
        trained = [(tape, call, start) for use in uses for tape, call, start, _, _ in use.items]
        assert len(trained) == len(set(trained)), "tokens were trained on twice"
        assert store.books().closes


@pytest.mark.timeout(600)
@pytest.mark.parametrize("attempt", TRIES[: max(len(TRIES) // 3, 1)])
def test_a_kill_while_older_weights_may_sample_loses_nothing(tmp_path: Path, model: str, attempt: int) -> None:
    """With `max_lag` 1, what is sampled depends on the moment, so tokens and weights differ from the unkilled run's."""
    run, rng = tmp_path / "run", random.Random(attempt)
    kill_in_flight(model, run, rng, lag=1)
    finished(model, run, *(["--resume"] if (run / "config.yaml").exists() else []), lag=1)
    assert_sound(run)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("attempt", TRIES)
def test_a_kill_in_mid_episode_changes_nothing(tmp_path: Path, whole: tuple[str, Path], attempt: int) -> None:
    model, unkilled = whole
    run, rng = tmp_path / "run", random.Random(attempt)
    kill_in_flight(model, run, rng)
    finished(model, run, *(["--resume"] if (run / "config.yaml").exists() else []))
    assert_sound(run)
    assert reproduce(run).outcome == "verified"
    cut = repeated = same = 0
    then = attempts(unkilled)
    for key, tapes in attempts(run).items():
        *before, last = tapes
        cut += sum(tape.status is Status.CRASHED for tape in before)
        repeated += bool(before)
        assert {tape.begin.seed for tape in before} <= {last.begin.seed}, "an attempt was repeated with another seed"
        same += bool(before) and tokens(last) == tokens(then[key][-1])
    far = max(
        float((a - b).abs().max()) for a, b in zip(weights(run).values(), weights(unkilled).values(), strict=True)
    )
    print(
        f"try {attempt}: {cut} episodes cut, {same} of {repeated} repeated with the same tokens, weights {far:.1e} away"
    )
    assert cut > 0, "no episode was in flight"
    assert same == repeated
    assert far <= 1e-5
