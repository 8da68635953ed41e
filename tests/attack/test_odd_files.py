"""Pipes, devices, sockets, folders and links in the place of any file of a run: named, and nothing hangs.

In CI each file meets one kind of thing; with `ATTACK_TRIES` above 1 it meets more of them (13 are all).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.tapes import TapereelError
from tapereel.tapes.store import Store, lease, verify_tape
from tapereel.tapes.store.media import Media

from .test_published import CHECKPOINT, model, train, trained

TRIES = int(os.environ.get("ATTACK_TRIES", "1"))
LIMIT = 60
"""Seconds, against a hang."""
__all__ = ["model", "trained"]


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to("/nonexistent/file")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


def gone(path: Path) -> None:
    pass


def holds(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "loop": loop,
    "endless": endless,
    "folder": folder,
    "socket": unix_socket,
    "dangling": dangling,
    "gone": gone,
    "empty": holds(b""),
    "zeros": holds(bytes(5_000)),
    "noise": holds(bytes(range(256)) * 8),
    "object": holds(b"{}"),
    "list": holds(b"[1]"),
    "text": holds(b"text: [\n"),
}
FILES = [
    "tapes/000001",
    "pins.json",
    "tapes/index.sqlite",
    "tapes/lock",
    "config.yaml",
    "results.json",
    "metrics.jsonl",
    "recipes.json",
    "leads/000001",
    "leads",
    "tapes",
    "checkpoints",
    *(
        f"{CHECKPOINT}/{name}"
        for name in ("state.json", "taught.jsonl", "trainer.pt", "hf/config.json", "hf/model.safetensors")
    ),
    f"{CHECKPOINT}/hf/tokenizer.json",
    f"{CHECKPOINT}/hf",
    str(CHECKPOINT),
]
CONTENT = ("empty", "zeros", "noise", "object", "list", "text")
HARMLESS = {("gone", "checkpoints"), ("gone", str(CHECKPOINT)), *((kind, "leads/000001") for kind in CONTENT)}
"""(kind, file): old checkpoints are deleted; a crash may leave the file of a lead without content."""
UNCOVERED = ("index.sqlite", "lock")
"""Files that say nothing: another one in their place changes no number and no record."""


class Hang(BaseException):
    """A command took longer than the limit. No error that a reader may catch."""


@pytest.fixture(autouse=True)
def no_hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise Hang

    monkeypatch.setattr(lease, "GRACE", 0.1)  # beats, for which a lead of an unknown machine is waited
    before = signal.signal(signal.SIGALRM, hangs)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("k", "name"), [*enumerate(FILES)], ids=FILES)
def test_what_is_no_file_is_named_and_nothing_hangs(
    trained: Path, model: str, tmp_path: Path, k: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(trained) as store:
        tape = store.summaries()[0].id
    for kind in [*KINDS, *KINDS][k % len(KINDS) :][:TRIES]:
        run = tmp_path / kind
        shutil.copytree(trained, run)
        path = next(run.glob(f"{name}-*.json*"), run / name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        KINDS[kind](path)
        for verb, *words in (
            ("verify",),
            ("show",),
            ("show", tape),
            ("show", "--taught", str(run / CHECKPOINT)),
            ("scores",),
            ("audit",),
            ("view", "--out", str(tmp_path / f"{kind}-view.html")),
            ("export", str(tmp_path / f"{kind}.jsonl")),
            ("explain",),
            ("diff", str(run)),
            ("replay agent",),
            ("replay model",),
            ("reproduce",),
        ):
            signal.alarm(LIMIT)
            code = main([*verb.split(), str(run), *words])  # any error but one with a sentence comes out here
            said = capsys.readouterr()
            assert code in (0, 1, 2, 64)
            if verb == "verify" and (kind, name) not in HARMLESS and path.name not in UNCOVERED:
                assert code != 0, said.out
                assert code == 64 or name.split("/")[-1].split(".")[0] in said.out + said.err, said
        signal.alarm(LIMIT)
        said = ""
        try:
            train(run, model, 4, resume=True)
        except (TapereelError, OSError) as error:
            said = str(error)
        assert not said or path.name in said


@pytest.mark.parametrize("kind", ["pipe", "loop", "endless", "folder", "socket"])
def test_media_that_are_no_files_are_named(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    from ..tapes.store.lab import Lab

    lab = Lab()
    with Store.create(tmp_path / "run") as store:
        reference = store.media.put(b"picture", ".png")
        for body in (lab.begin("a"), lab.look("a", reference), lab.end("a")):
            store.writer.append(body)
    path = tmp_path / "run" / "tapes" / "media" / reference.removeprefix("media:")
    path.unlink()
    KINDS[kind](path)
    signal.alarm(LIMIT)
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert path.name in capsys.readouterr().out
    with pytest.raises(OSError, match=f"{path.name}.*regular"):
        Media(path.parent).get(reference)
    assert main(["view", str(tmp_path / "run"), "--out", str(tmp_path / "view.html")]) in (0, 1)


@pytest.mark.parametrize("kind", ["pipe", "loop", "endless", "folder", "socket", "dangling"])
@pytest.mark.parametrize("name", ["pins.json", "tapes/000001"])
def test_the_script_that_verifies_alone_names_what_is_no_file(tmp_path: Path, kind: str, name: str) -> None:
    from ..tapes.store.lab import Lab

    lab = Lab()
    with Store.create(tmp_path / "run") as store:
        for body in (lab.begin("a"), lab.end("a")):
            store.writer.append(body)
    run = tmp_path / "run"
    assert verify_tape.check(run, [])[0] == 0
    path = next(run.glob(f"{name}*"))
    path.unlink()
    KINDS[kind](path)
    signal.alarm(LIMIT)
    code, report = verify_tape.check(run, [])
    assert code == 1
    assert path.name in str(report["corrupt"])
