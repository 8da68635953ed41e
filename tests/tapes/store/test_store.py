"""A run directory: writing, reading, asking, forking, layers, media, the live tail."""

from __future__ import annotations

import asyncio
import cProfile
import gc
import os
import pstats
import re
import sqlite3
from pathlib import Path

import pytest

from tapereel.tapes import Corrupt, NotATape, Status, StoreFailed
from tapereel.tapes.errors import NoSuchTape, UsageError
from tapereel.tapes.records import Parent, Reward, Void
from tapereel.tapes.store import Store, verify
from tapereel.tapes.store.disk import REAL, put_file

from .lab import Lab
from .synced import Synced

lab = Lab()


def write(store: Store, *bodies: bytes) -> None:
    for body in bodies:
        store.writer.append(body)


def segments(run: Path) -> list[Path]:
    return sorted((run / "tapes").glob("*.jsonl"))


def test_what_was_written_is_read_back_byte_for_byte(tmp_path: Path) -> None:
    bodies = list(lab.episode("a"))
    with Store.create(tmp_path / "run") as store:
        write(store, *bodies)
        asyncio.run(store.writer.durable())
        tape = store.tape("a")
        assert tape.bodies == bodies
        assert tape.status is Status.FINISHED
        assert tape.reward == 1.0
    with Store.open(tmp_path / "run") as store:
        assert store.tape("a") == tape
        assert [stored.body for stored in store.records() if stored.tape == "a"] == bodies


def test_a_closed_run_is_sealed_pinned_and_verified(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        write(store, *lab.episode("a"))
    report = verify(tmp_path / "run")
    assert report.exit_code == 0, (report.broken, report.torn)
    assert (report.episodes, report.open, len(report.segments)) == (1, 0, 1)
    assert report.segments[0].sealed
    assert report.head is not None
    assert report.head.split(":")[1] in (tmp_path / "run" / "pins.json").read_text()
    assert verify(tmp_path / "run", pins=[report.head, report.head.split(":")[1]]).exit_code == 0
    assert verify(tmp_path / "run", pins=["f" * 64]).exit_code == 1
    with pytest.raises(ValueError, match="'nonsense'"):
        verify(tmp_path / "run", pins=["nonsense"])


def test_verifying_takes_few_calls_for_each_record(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        for k in range(100):
            write(store, *lab.episode(f"t{k}"))
    profile = cProfile.Profile()
    report = profile.runcall(verify, tmp_path / "run")
    # The count doesn't depend on the machine's load, as its time would. It was 121 when each record was parsed twice.
    assert pstats.Stats(profile).total_calls / report.records < 75


def test_a_run_is_made_once_and_opened_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "run"))):
        Store.open(tmp_path / "run")
    with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
        verify(tmp_path / "run")
    Store.create(tmp_path / "run").close()
    with pytest.raises(UsageError, match="write=True"):
        Store.create(tmp_path / "run")
    with Store.open(tmp_path / "run") as reading, pytest.raises(StoreFailed, match="write=True"):
        _ = reading.writer
    with pytest.raises(TypeError, match="write=True"):
        Store.open(tmp_path / "run", rotate_bytes=1)


def test_tapes_are_found_by_what_they_are(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        write(store, *lab.episode("good1", group="g"), *lab.episode("good2", split="eval", at=2000.0))
        write(
            store,
            lab.begin("bad"),
            lab.call("bad", "bad.1", 3, version="main:7"),
            lab.reward("bad", -1.0),
            lab.end("bad", "error", "agent"),
        )
        write(store, lab.begin("open"))
        store.writer.sync()

        def ids(**where: object) -> list[str]:
            return [summary.id for summary in store.summaries(**where)]  # type: ignore[arg-type]

        assert ids() == ["good1", "good2", "bad", "open"]
        assert ids(status="finished") == ["good1", "good2"]
        assert ids(status=Status.ERROR) == ["bad"]
        assert ids(split="eval") == ["good2"]
        assert ids(group="g") == ["good1"]
        assert ids(version="main:7") == ["bad"]
        assert ids(agent="agent", closed=False) == ["open"]
        assert ids(min_reward=0.5) == ["good1", "good2"]
        assert ids(max_reward=0.5) == ["bad"]
        assert ids(task_hash=store.tape("good2").begin.task_hash) == ["good2"]
        assert [tape.id for tape in store.tapes(status="finished")] == ["good1", "good2"]
        summary = store.summaries(status="error")[0]
        assert (summary.cause, summary.reward, summary.calls) == ("agent", -1.0, 1)
        assert (summary.actions, summary.sampled) == (0, 3)
        assert store.tape("goo" + "d1").id == "good1"
        assert store.tape("ba").id == "bad"
        with pytest.raises(NoSuchTape, match=r"good1, good2.*'good'"):
            store.tape("good")
        with pytest.raises(NoSuchTape, match="'x'"):
            store.tape("x")


def test_layers_are_loaded_with_their_tape_and_change_no_digest(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        write(store, *lab.episode("a"))
        store.writer.sync()
        digest = store.tape("a").digest
        store.append_layer(Reward(tape="a", value=0.5, layer="second look"))
        store.writer.sync()
        tape = store.tape("a")
        assert tape.digest == digest
        assert tape.reward == 1.0
        assert [layer.layer for layer in store.tape("a").layers if isinstance(layer, Reward)] == ["second look"]
        assert store.summaries()[0].reward == 1.0


def test_a_fork_finds_its_parent_and_says_when_it_is_gone(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        write(store, *lab.episode("parent"))
        store.writer.sync()
        parent = store.tape("parent")
        cut = parent.at_turn(1)
        fork = Parent(tape="parent", digest=cut.digest, records=len(cut.bodies), turn=1)
        write(store, lab.begin("child", parent=fork), lab.end("child"))
        write(store, lab.begin("grandchild", parent=Parent(tape="missing", digest="0" * 64, records=1, turn=0)))
        store.writer.sync()
        child = store.tape("child")
        assert child.parent is not None
        assert child.parent.digest == cut.digest
        assert store.summaries()[1].parent == "parent"
        with pytest.raises(NotATape, match=r"grandchild\b.*\bmissing\b"):
            store.tape("grandchild")
    assert verify(tmp_path / "run").exit_code == 0
    with Store.open(tmp_path / "run", write=True) as store:
        above = Parent(tape="parent", digest="1" * 64, records=3, turn=1)
        write(store, lab.begin("liar", parent=above), lab.end("liar"))
    report = verify(tmp_path / "run")
    assert report.exit_code == 1
    assert any("liar" in text and above.digest in text for text in report.broken)


def test_forks_of_forks_are_read(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        write(store, *lab.episode("t0"))
        store.writer.sync()
        for k in range(1, 5):
            above = store.tape(f"t{k - 1}").at_turn(k)
            fork = Parent(tape=above.id, digest=above.digest, records=len(above.bodies), turn=k)
            write(store, lab.begin(f"t{k}", parent=fork), *list(lab.episode(f"t{k}"))[1:])
            store.writer.sync()
        tape = store.tape("t4")
        assert tape.turns == 5
        assert [step.text for step in tape.actions] == [f"do t{k}" for k in range(5)]  # type: ignore[attr-defined]
    assert verify(tmp_path / "run").exit_code == 0


def test_a_fork_keeps_its_prefix_when_the_parent_goes_on(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        write(store, lab.begin("parent"))
        store.writer.sync()
        cut = store.tape("parent")
        write(store, lab.begin("child", parent=Parent(tape="parent", digest=cut.digest, records=1, turn=0)))
        write(store, lab.step("parent", "later", action=False))
        store.writer.sync()
        parent = store.tape("child").parent
        assert parent is not None
        assert parent.bodies == cut.bodies


def test_a_tape_that_claims_to_be_its_own_ancestor_is_refused(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        write(store, lab.begin("a", parent=Parent(tape="b", digest="0" * 64, records=1, turn=0)))
        write(store, lab.begin("b", parent=Parent(tape="a", digest="0" * 64, records=1, turn=0)))
        store.writer.sync()
        with pytest.raises(NotATape, match="itself"):
            store.tape("a")


def test_the_books_follow_a_writer_and_read_each_record_once(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", rotate_bytes=1500) as store, Store.open(tmp_path / "run") as reader:
        for k in range(6):
            write(store, *lab.episode(f"t{k}"))
            store.writer.sync()
            for _ in range(2):
                books = reader.books()
                assert (books.begun, books.ended, books.closes) == (k + 1, k + 1, True)
        assert len(segments(tmp_path / "run")) > 2
        assert [stored.body for stored in reader.records() if stored.tape] == [
            body for k in range(6) for body in lab.episode(f"t{k}")
        ]
    assert verify(tmp_path / "run").exit_code == 0


def test_the_ledger_is_read_from_the_run(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        write(store, *lab.episode("a"), lab.use(0, [("a", "a.1", 0, 4, 0.25)]))
        store.writer.sync()
        ledger = store.ledger("main")
        assert (ledger.next_update, "a" in ledger) == (1, True)
        store.append_layer(Void(lineage="main", update=-1, into="again", reason="from the start"))
        store.writer.sync()
        assert store.ledger("again").next_update == 0
        assert store.books().tokens["unused"] == 4
        assert [stored.t for stored in store.run_records("use", "void")] == ["use", "void"]


def test_books_are_kept_up_to_date_without_reading_again(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", rotate_bytes=1500) as store:
        for k in range(5):
            write(store, *lab.episode(f"t{k}"))
            store.writer.sync()
            books = store.books()
            assert books.closes
            assert books.tokens["unused"] == books.sampled == 4 * (k + 1)


def test_media_are_kept_by_content(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Store.create(run) as store:
        kept = store.media.put(b"kept", ".png")
        store.media.put(b"unnamed")
        assert store.media.put(b"kept", ".png") == kept
        write(store, lab.begin("a"), lab.look("a", kept), lab.end("a"))
        with pytest.raises(ValueError, match=r"'\.\./\.\./evil'"):
            store.media.put(b"x", "../../evil")
    assert (verify(run).media, verify(run).unnamed_media) == (1, 1)
    with Store.open(run) as store:
        assert store.media.get(kept) == b"kept"
        assert len(store.media.names()) == 2
        path = run / "tapes" / "media" / kept.removeprefix("media:")
        path.write_bytes(b"else")
        with pytest.raises(Corrupt, match=path.name):
            store.media.get(kept)
        assert verify(run).exit_code == 1
        path.unlink()
        with pytest.raises(NotATape, match=f"{path.name}.*missing"):
            store.media.get(kept)
        with pytest.raises(ValueError, match=r"'media:\.\./\.\./etc/passwd'"):
            store.media.get("media:../../etc/passwd")
    assert verify(run).exit_code == 1


def test_media_named_by_content_are_mended_when_they_are_put_again(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        reference = store.media.put(b"picture")
    path = tmp_path / "run" / "tapes" / "media" / reference.removeprefix("media:")
    path.write_bytes(b"rotten")
    with Store.open(tmp_path / "run") as store:
        assert store.media.put(b"picture") == reference
        assert store.media.get(reference) == b"picture"


# The index is a cache


def test_the_index_can_be_deleted_damaged_or_stale(tmp_path: Path) -> None:
    run = tmp_path / "run"
    index = run / "tapes" / "index.sqlite"
    with Store.create(run) as store:
        write(store, *lab.episode("a"), *lab.episode("b"))
    with Store.open(run) as store:
        before = store.summaries()
    index.unlink()
    with Store.open(run) as store:
        assert store.summaries() == before
    index.write_bytes(b"this is no database" * 100)
    with Store.open(run) as store:
        assert store.summaries() == before
    with sqlite3.connect(index) as db:
        db.execute("pragma user_version = 99")
    db.close()
    with Store.open(run) as store:
        assert store.summaries() == before
    # A segment that is shorter than the index remembers, as after a power cut: the index is made again.
    path = segments(run)[0]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:7]))
    with Store.open(run) as store:
        assert [summary.id for summary in store.summaries()] == ["a"]


def test_without_a_writable_folder_the_index_lives_in_memory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Store.create(run) as store:
        write(store, *lab.episode("a"))
    (run / "tapes" / "index.sqlite").unlink(missing_ok=True)
    with sqlite3.connect(run / "tapes" / "index.sqlite") as blocker:
        blocker.execute("begin exclusive")
        with Store.open(run, cache=False) as store:
            assert len(store.summaries()) == 1
    blocker.close()


def test_reading_never_follows_the_index_into_changed_bytes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Store.create(run) as store:
        write(store, *lab.episode("a"), *lab.episode("b"))
    path = segments(run)[0]
    data = path.read_bytes()
    at = data.index(b"see a")
    path.write_bytes(data[:at] + b"saw a" + data[at + 5 :])
    with Store.open(run) as store, pytest.raises(NotATape, match="hash"):
        store.tape("a")
    with Store.open(run) as store, pytest.raises(Corrupt, match=f"{path.stem}.*corrupt"):
        list(store.records())
    (run / "tapes" / "index.sqlite").unlink()
    with Store.open(run) as store, pytest.raises(Corrupt):
        store.tape("b")
    with pytest.raises(Corrupt, match="verify"):
        Store.open(run, write=True)


def test_many_segments_need_no_more_open_files_than_a_few(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for k in range(30):
        with Store.open(run, write=True) if k else Store.create(run) as store:
            write(store, *lab.episode(f"t{k}"))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with Store.open(run, write=True) as store:
        assert len(store.summaries()) == 30
        if before is not None:
            assert len(os.listdir("/proc/self/fd")) < before + 8
        # Each segment pins those before it that nobody pinned, so the newest stands for all.
        opened = next(stored.record for stored in store.run_records("open") if stored.segment == store.writer.segment)
        assert list(opened.pins) == [segments(run)[-2].stem]
    assert verify(run).exit_code == 0


BROKEN = b"\xff\xfe"
UNREADABLE = {
    "begin, broken UTF-8": b'{"t":"begin","tape":"bad","split":"' + BROKEN + b'"}',
    "begin, an object for a name": b'{"t":"begin","tape":"bad","split":{"a":1},"at":1.0}',
    "begin, a number that no column holds": b'{"t":"begin","tape":"bad","attempt":' + b"9" * 30 + b"}",
    "begin, a list for an agent": b'{"t":"begin","tape":"bad","agent":[1]}',
    "call, broken UTF-8": b'{"t":"call","tape":"good","call":"' + BROKEN + b'"}',
    "call, spans of nothing": b'{"t":"call","tape":"good","spans":[[]]}',
    "reward, broken UTF-8": b'{"t":"reward","tape":"good","name":"' + BROKEN + b'"}',
    "end, broken UTF-8": b'{"t":"end","tape":"good","status":"' + BROKEN + b'"}',
    "end, a list for a cause": b'{"t":"end","tape":"good","cause":["x"]}',
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
def test_a_record_that_cant_be_read_hides_nothing_but_itself(tmp_path: Path, body: bytes) -> None:
    """Its hash is true: whoever wrote it had the format, but not the records."""
    good = list(lab.episode("good"))
    with Store.create(tmp_path / "run") as store:
        write(store, *good[:-1], body, good[-1], *lab.episode("other"))
    with Store.open(tmp_path / "run") as store:
        (unread,) = store.index.unread()
        assert unread.t in str(unread)
        names = [summary.id for summary in store.summaries()]
        assert names == (["good", "bad", "other"] if body.startswith(b'{"t":"begin"') else ["good", "other"])
        assert store.tape("other").reward == 1.0
        assert [s.status for s in store.summaries() if s.id == "other"] == ["finished"]
    report = verify(tmp_path / "run")
    assert report.exit_code == 1
    assert any(f"record {unread.n} " in line and unread.segment in line for line in report.broken)


def test_the_index_of_a_store_that_was_not_closed_closes_its_database(tmp_path: Path):
    Store.create(tmp_path / "run", durability="os").close()
    store = Store.open(tmp_path / "run")
    database = store.index._db
    del store
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        database.execute("select 1")


@pytest.mark.parametrize("rotate_bytes", [1 << 28, 1000])
@pytest.mark.parametrize("way", ["durable", "sync"])
def test_acknowledged_records_would_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, rotate_bytes: int
) -> None:
    synced = Synced(monkeypatch, tmp_path)
    run = tmp_path / "deep" / "run"
    with Store.create(run, rotate_bytes=rotate_bytes) as store:
        for k in range(5):
            bodies = list(lab.episode(f"t{k}"))
            write(store, *bodies)
            asyncio.run(store.writer.durable()) if way == "durable" else store.writer.sync()
            # The writer's thread may just be making the next segment, whose name is durable before its first line.
            written = [(path, path.read_bytes()) for path in segments(run)]
            left = [synced.left(path) for path, data in written if data]
            assert None not in left, "a segment's name would be lost"
            held = b"".join(data or b"" for data in left)
            assert [body for body in bodies if body not in held] == []
        store.writer.media.put(b"a picture")
        (name,) = store.writer.media.names()
        assert synced.left(store.writer.media.folder / name) == b"a picture"
    assert synced.files > 5
    assert synced.folders > 0
    for path in [*segments(run), run / "pins.json"]:
        assert synced.left(path) == path.read_bytes(), "the end of a run is durable when it is closed"


def test_a_file_is_replaced_by_one_whose_bytes_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = Synced(monkeypatch, tmp_path)
    path = tmp_path / "a" / "b" / "results.json"
    REAL.make_folder(path.parent)
    assert synced.named(path.parent)
    replace, replaced = os.replace, list[tuple[bytes, bool]]()

    def watched(old: Path, new: Path) -> None:
        replaced.append((synced.content(old), new.exists()))
        replace(old, new)

    monkeypatch.setattr(os, "replace", watched)
    for data in (b"first", b"the second"):
        put_file(REAL, path, data)
        assert synced.left(path) == data
    assert replaced == [(b"first", False), (b"the second", True)], "the bytes are synced before the name is given"
