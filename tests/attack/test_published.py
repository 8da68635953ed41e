"""Files that people publish or deploy and that no segment holds: every edit is noticed, and nothing hangs."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

import tapereel as tr
from tapereel.cli import main
from tapereel.tapes.records import Files
from tapereel.tapes.store.store import Store
from tapereel.tapes.store.verifier import verify

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
EDITS = int(os.environ.get("ATTACK_EDITS", "40"))


def settings(updates: int) -> dict[str, object]:
    return {
        "loop.updates": updates,
        "loop.groups": 2,
        "loop.group_size": 4,
        "loop.max_lag": 0,
        "loop.checkpoint_every": 1,
        "loop.optimiser.lr": 1e-2,
        "loop.sampling.max_tokens": 1,
        "evaluation.fraction": 0,
        "loop.changes": {"regulariser": [{"kind": "entropy", "coefficient": 0.05}]},
    }


def train(run: Path, model: str, updates: int, *, resume: bool = False) -> tr.Run:
    names = (f"{EXAMPLE}:player", f"{EXAMPLE}:Digits", f"{EXAMPLE}:tasks")
    return tr.train(*names, model, out=run, resume=resume, settings=settings(updates))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tr.save_tiny_model(tmp_path_factory.mktemp("model"), size="micro")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    train(run, model, 3)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def covered(run: Path) -> list[Path]:
    names = ("config.yaml", "results.json", "metrics.jsonl", "recipes.json")
    checkpoints = [path for path in sorted((run / "checkpoints").rglob("*")) if path.is_file()]
    assert len(checkpoints) > 12
    return [*(run / name for name in names), *checkpoints]


def test_every_edit_is_noticed(run: Path) -> None:
    report = verify(run)
    assert (report.exit_code, report.files) == (0, len(covered(run)))
    rng = random.Random(5)
    for k in range(EDITS):
        path = rng.choice(covered(run))
        before = path.read_bytes()
        at = rng.randrange(len(before))
        changed = (
            before[:at] + bytes([before[at] ^ 1 << rng.randrange(8)]) + before[at + 1 :],
            before[:at],
            before[:at] + b" " + before[at:],
            b"",
        )[k % 4]
        path.write_bytes(changed)
        broken = verify(run)
        assert broken.exit_code == 1, (path, at, k % 4)
        assert str(path) in " ".join(broken.broken)
        path.write_bytes(before)
    assert verify(run).exit_code == 0


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints/update-000003/hf/model.safetensors"])
@pytest.mark.parametrize("kind", ["gone", "pipe", "folder"])
def test_what_is_no_file_is_named_and_nothing_hangs(run: Path, name: str, kind: str) -> None:
    (run / name).unlink()
    if kind == "pipe":
        os.mkfifo(run / name)
    elif kind == "folder":
        (run / name).mkdir()
    (sentence,) = verify(run).broken
    assert name in sentence
    assert ("is gone" if kind == "gone" else "is not a regular file") in sentence


def test_a_deleted_checkpoint_is_no_damage(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "update-000001")
    assert verify(run).exit_code == 0


@pytest.mark.parametrize("name", ["policy.pt", "trainer.pt", "state.json", "taught.jsonl", "hf/model.safetensors"])
@pytest.mark.parametrize("damage", ["bit", "empty"])
def test_a_resume_uses_the_checkpoint_before_a_damaged_one(
    run: Path, model: str, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = run / "checkpoints" / "update-000003" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data) if damage == "bit" else b"")
    resumed = train(run, model, 4, resume=True)
    assert resumed.summary.updates == 4
    assert str(path) in caplog.text
    shutil.rmtree(path.parents[path.parent.name == "hf"])  # a damaged checkpoint is not reproduced
    assert main(["reproduce", str(run)]) == 0


@pytest.mark.parametrize("name", ["/etc/hostname", "../outside"])
def test_verify_reads_no_file_outside_the_run(run: Path, name: str) -> None:
    (run.parent / "outside").write_text("secret")
    with Store.open(run, write=True) as store:
        store.writer.append(Files(files={name: "0" * 64}, at=0.0).body())
    (sentence,) = verify(run).broken
    assert sentence == f"a record has the digest of {name}, which is outside the run"


def test_a_crashed_run_says_what_was_not_checked(run: Path, model: str, tmp_path: Path) -> None:
    assert not any("results.json" in text for text in verify(run).not_checked)
    with Store.open(run, write=True) as store:
        store.record_files(run / "results.json", open=True)
    (run / "results.json").write_text("{}")
    report = verify(run)
    assert report.exit_code == 0
    assert any("results.json" in text for text in report.not_checked)
