"""Files that people publish or deploy and that no segment holds: every edit is noticed, and nothing hangs."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import sqlite3
from pathlib import Path
from typing import BinaryIO

import pytest

import tapereel as tr
from tapereel.agents.engines.servers import LocalServer
from tapereel.cli import main
from tapereel.tapes import Corrupt
from tapereel.tapes.records import Files
from tapereel.tapes.store import Disk, Results, Store, append_metrics, verify
from tapereel.tapes.store import index as index_module
from tapereel.tapes.view import overview_of

from ..tapes.store.lab import Lab

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
EDITS = int(os.environ.get("ATTACK_EDITS", "10"))
"""Of each of four kinds of files."""


def settings(updates: int) -> dict[str, object]:
    return {
        "loop.updates": updates,
        "loop.groups": 2,
        "loop.group_size": 4,
        "loop.max_lag": 0,
        "loop.checkpoint_every": 1,
        "loop.keep_checkpoints": 3,
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


def covered(run: Path) -> dict[str, list[Path]]:
    checkpoints = [path for path in sorted((run / "checkpoints").rglob("*")) if path.is_file()]
    assert len(checkpoints) > 12
    return {
        "results": [run / "results.json", run / "metrics.jsonl"],
        "configuration": [run / "config.yaml", run / "recipes.json"],
        "checkpoint": checkpoints,
    }


def edit_bytes(path: Path, k: int, rng: random.Random) -> None:
    before = path.read_bytes()
    at = rng.randrange(len(before))
    changed = (
        before[:at] + bytes([before[at] ^ 1 << rng.randrange(8)]) + before[at + 1 :],
        before[:at],
        before[:at] + b" " + before[at:],
        b"",
    )
    path.write_bytes(changed[k % 4])


@pytest.mark.parametrize("kind", ["results", "configuration", "checkpoint"])
def test_every_edit_is_noticed(run: Path, kind: str) -> None:
    files = covered(run)
    report = verify(run)
    assert (report.exit_code, report.files) == (0, sum(map(len, files.values())))
    rng, missed = random.Random(5), []
    for k in range(EDITS):
        path = rng.choice(files[kind])
        before = path.read_bytes()
        edit_bytes(path, k, rng)
        broken = verify(run)
        if broken.exit_code != 1 or str(path) not in " ".join(broken.broken):
            missed.append((path, k))
        path.write_bytes(before)
    assert not missed
    assert verify(run).exit_code == 0


# The index


def numbers(run: Path) -> tuple[object, ...]:
    """What `scores`, `show` and `export --min-reward` say."""
    found = tr.open(run)
    with Store.open(run) as store:
        summaries, many = store.summaries(), len(store.summaries(min_reward=0.5))
        steps = [(tape.id, tape.reward, tape.digest) for tape in store.tapes()]
    return found.scores(k=(1, 2)), summaries, many, steps


SQL = (
    "update tapes set reward = 99",
    "update tapes set reward = reward + 1e-9",
    "update tapes set status = 'finished', cause = null",
    "delete from tapes where reward < 1",
    "delete from records where t = 'reward'",
    "update records set offset = (select min(offset) from records)",
    "update segments set head = first, n = 1",
    "delete from versions",
    "insert into met values ('000001-aaaaaa', '00')",
    "drop table tapes",
)


def test_no_edit_of_the_index_is_believed(run: Path, tmp_path: Path) -> None:
    """An edit with SQL changes the rows that numbers come from, and leaves the heads that they were made from."""
    index, rng = run / "tapes" / "index.sqlite", random.Random(6)
    truth = numbers(run)
    whole = index.read_bytes()
    for k in range(EDITS):
        if k % 2:
            edit_bytes(index, k, rng)
        else:
            with contextlib.closing(sqlite3.connect(index)) as db, db:
                db.execute(SQL[k // 2 % len(SQL)])
        edited = index.read_bytes()
        assert edited != whole
        assert numbers(run) == truth, (k, SQL[k // 2 % len(SQL)])
        assert index.read_bytes() != edited, "it was made anew"


def test_an_index_with_another_users_code_is_not_read(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, truth = run / "tapes" / "index.sqlite", numbers(run)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(index.read_bytes()[:-32])
        db.execute("update tapes set reward = 99")
        db.commit()
        data = db.serialize()
    index.write_bytes(data + index_module._code(data))
    assert numbers(run) != truth, "the attacker knows the format"
    monkeypatch.undo()
    assert numbers(run) == truth
    (key,) = (tmp_path / "another" / "tapereel").iterdir()
    assert key.stat().st_mode & 0o077 == 0
    assert key.parent.stat().st_mode & 0o077 == 0


class FaultyCache(Disk):
    """Its n-th operation on the index's file fails."""

    def __init__(self, n: int, error: int) -> None:
        self.left, self.error, self.handles = n, error, set[int]()

    def _count(self, counts: bool) -> None:
        self.left -= counts
        if counts and self.left == 0:
            raise OSError(self.error, os.strerror(self.error))

    def open(self, path: Path) -> BinaryIO:
        self._count("index.sqlite" in path.name)
        return super().open(path)

    def create(self, path: Path) -> int:
        self._count("index.sqlite" in path.name)
        handle = super().create(path)
        self.handles |= {handle} if "index.sqlite" in path.name else set()
        return handle

    def write(self, handle: int, data: bytes) -> int:
        self._count(handle in self.handles)
        return super().write(handle, data)

    def sync(self, handle: int) -> None:
        self._count(handle in self.handles)
        super().sync(handle)

    def close(self, handle: int) -> None:
        self.handles.discard(handle)
        super().close(handle)

    def rename(self, old: Path, new: Path) -> None:
        self._count("index.sqlite" in new.name)
        super().rename(old, new)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDEADLK])
def test_no_error_of_the_index_ends_a_run(tmp_path: Path, error: int, caplog: pytest.LogCaptureFixture) -> None:
    lab, failed = Lab(), 0
    for n in range(1, 20):
        disk, run = FaultyCache(n, error), tmp_path / f"{n}"
        caplog.clear()
        with Store.create(run, disk=disk) as store:
            for body in lab.episode("a"):
                store.writer.append(body)
            store.writer.sync()
            assert [one.id for one in store.summaries()] == ["a"]
        with Store.open(run, write=True, disk=disk) as store:
            for body in lab.episode("b"):
                store.writer.append(body)
        with Store.open(run, disk=disk) as store:
            assert [one.id for one in store.summaries()] == ["a", "b"]
            assert [one.id for one in store.tapes()] == ["a", "b"]
        assert verify(run).exit_code == 0
        hit = disk.left <= 0
        failed += hit
        assert len([text for text in caplog.messages if "index.sqlite" in text]) == hit
        if not hit:
            break
    assert failed >= 8


def test_a_run_trains_without_a_place_for_the_index_or_its_secret(
    run: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/nowhere")
    (run / "tapes" / "index.sqlite").unlink()
    (run / "tapes" / "index.sqlite").mkdir()
    assert train(run, model, 4, resume=True).summary.updates == 4
    assert verify(run).exit_code == 0
    assert "index.sqlite" in caplog.text


# Files that are published


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
    assert ("gone" if kind == "gone" else "regular") in sentence


def test_a_deleted_checkpoint_is_no_damage(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "update-000001")
    assert verify(run).exit_code == 0


CHECKPOINT = Path("checkpoints") / "update-000003"
DAMAGES = {
    "trainer.pt": "empty",
    "state.json": "empty",
    "state.json ": "lineage",
    "taught.jsonl": "cut",
    "hf/model.safetensors": "zeros",
    "hf/config.json": "gone",
    "hf/tokenizer.json": "pipe",
    "hf/added.bin": "more",
    "unrecorded.txt": "more",
}
"""File of a checkpoint -> what is done to it."""


def spoil(path: Path, damage: str) -> None:
    data = bytearray(path.read_bytes()) if path.is_file() else bytearray(b"more")
    path.unlink(missing_ok=True)
    if damage == "pipe":
        os.mkfifo(path)
    elif damage != "gone":
        flipped = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        lineage = data.replace(b'"lineage": "', b'"lineage": "x')
        changed = {"bit": flipped, "empty": b"", "cut": data[:-20], "zeros": bytes(len(data)), "lineage": lineage}
        path.write_bytes(changed.get(damage, data))


@pytest.mark.parametrize("name", DAMAGES)
def test_a_resume_uses_the_checkpoint_before_a_damaged_one(
    run: Path, model: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = run / CHECKPOINT / name.strip()
    spoil(path, DAMAGES[name])
    assert verify(run).exit_code == 1
    assert str(path) in " ".join(verify(run).broken)
    assert main(["reproduce", str(run)]) in (1, 2)
    resumed = train(run, model, 4, resume=True)
    assert resumed.summary.updates == 4
    assert str(path) in caplog.text
    # The resume applied the update again, and wrote its checkpoint anew.
    assert verify(run).exit_code == 0
    assert main(["reproduce", str(run)]) == 0


def test_a_checkpoint_that_no_record_knows_is_passed_over(
    run: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    forged = run / "checkpoints" / "update-000003"
    shutil.rmtree(run / CHECKPOINT)
    with Store.open(run, write=True) as store:  # the digests of the third are gone, as after a crash in between
        store.record_files(*(run / name for name in store.files if "000003" not in name))
    shutil.copytree(run / "checkpoints" / "update-000002", forged.with_name("update-000009"))
    assert any("update-000009" in text for text in verify(run).not_checked)
    train(run, model, 4, resume=True)
    assert "digests" in caplog.text
    assert "update-000009" in caplog.text


@pytest.mark.parametrize("name", [name for name in DAMAGES if name.startswith("hf/")])
def test_no_damaged_model_is_served_sampled_or_compared(
    run: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / CHECKPOINT / "hf"
    for update in ("update-000002", CHECKPOINT.name):  # the last one sampled no training episode
        spoil(run / "checkpoints" / update / name, DAMAGES[name])
    kinds = {"--agent": "player", "--env": "Digits", "--tasks": "tasks"}
    names = [word for kind, name in kinds.items() for word in (kind, f"{EXAMPLE}:{name}")]
    for words in (
        ["serve", "model", str(folder)],
        ["replay", "model", str(run), "--model", str(folder)],
        ["replay", "model", str(run)],
        ["run", *names, "--out", str(tmp_path / "new"), "--model", str(folder)],
    ):
        assert main(words) in (1, 64), words
        assert name in capsys.readouterr().err
    with pytest.raises(Corrupt, match=re.escape(str(folder))):
        LocalServer(folder)


def test_what_was_edited_after_the_close_is_not_shown_and_not_gone_on_from(run: Path, model: str) -> None:
    before = (run / "results.json").read_bytes()
    with Store.open(run) as store:
        assert overview_of(store).facts
    (run / "results.json").write_bytes(before.replace(b"{", b'{"idle_share": 0.99, ', 1))
    with Store.open(run) as store:
        page = overview_of(store)
    assert "results.json" in page.notes[0]
    assert not page.scores
    assert not page.plots
    with pytest.raises(Corrupt, match=r"results\.json"):
        train(run, model, 4, resume=True)
    (run / "results.json").write_bytes(before)
    assert train(run, model, 4, resume=True).summary.updates == 4


def test_results_and_metrics_are_synced_with_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, sync_dir, rename = Disk.sync, Disk.sync_dir, Disk.rename
    monkeypatch.setattr(Disk, "sync", lambda self, handle: (done.append("sync"), sync(self, handle)))
    monkeypatch.setattr(Disk, "sync_dir", lambda self, path: (done.append(path.name), sync_dir(self, path)))
    monkeypatch.setattr(Disk, "rename", lambda self, old, new: (done.append("rename"), rename(self, old, new)))
    Results().write(tmp_path)
    assert done == ["sync", "rename", tmp_path.name]
    append_metrics(tmp_path / "metrics.jsonl", {"reward": 1.0})
    assert done[3:] == ["sync"]


@pytest.mark.parametrize("name", ["/etc/hostname", "../outside"])
def test_verify_reads_no_file_outside_the_run(run: Path, name: str) -> None:
    (run.parent / "outside").write_text("secret")
    with Store.open(run, write=True) as store:
        store.writer.append(Files(files={name: "0" * 64}, at=0.0).body())
    (sentence,) = verify(run).broken
    assert re.search(rf"{re.escape(name)}\b.*outside", sentence)


def test_a_crashed_run_says_what_was_not_checked(run: Path, model: str, tmp_path: Path) -> None:
    assert not any("results.json" in text for text in verify(run).not_checked)
    with Store.open(run, write=True) as store:
        store.record_files(run / "results.json", open=True)
    (run / "results.json").write_text("{}")
    report = verify(run)
    assert report.exit_code == 0
    assert any("results.json" in text for text in report.not_checked)
