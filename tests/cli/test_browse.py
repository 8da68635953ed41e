"""`tapereel show --browse` in a real terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.cli.console import Exit

from .library import write_library


class Screen:
    """A terminal with a running command."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self.master, self.text = process, master, ""

    def wait_for(self, words: str) -> str:
        """The text up to `words`, without what an earlier call returned."""
        while words not in self.text:
            try:
                part = os.read(self.master, 4096)
            except OSError:  # the process ended
                part = b""
            assert part, f"{words!r} is not in {self.text!r}"
            self.text += re.sub(r"\x1b\[[\d;]*m", "", part.decode(errors="replace"))
        before, self.text = self.text.split(words, 1)
        return before

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())


@contextmanager
def screen(*words: str, program: tuple[str, ...] = ("-m", "tapereel.cli")) -> Iterator[Screen]:
    """Run `tapereel show` with these arguments in a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(slave)
    process = subprocess.Popen(
        [sys.executable, *program, "show", *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )
    try:
        yield Screen(process, master)
        assert termios.tcgetattr(slave) == before, "the terminal is left as it was"
    finally:
        os.close(slave)
        process.kill()
        process.wait()
        os.close(master)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    path = tmp_path_factory.mktemp("library") / "run"
    return str(path), write_library(path)


def test_keys_step_through_the_list(library):
    path, ids = library
    with screen(path, "--worst", "3", "--browse") as shown:
        assert f"tape {ids[5]}" in shown.wait_for("tape 1 of 3")
        shown.press("pxn")  # nothing is before the first tape, and x is no key
        lines = shown.wait_for("tape 2 of 3").splitlines()
        assert any(f"tape {ids[1]}" in line for line in lines)
        assert max(map(len, lines)) <= 80
        shown.press("n")
        assert f"tape {ids[2]}" in shown.wait_for("tape 3 of 3")
        shown.press("np")
        assert f"tape {ids[1]}" in shown.wait_for("tape 2 of 3")
        shown.press("q")
        assert shown.process.wait() == Exit.HOLDS


def test_it_begins_at_the_named_tape_of_the_whole_list(library):
    path, ids = library
    with screen(path, ids[3], "--browse", "--last", "1") as shown:
        assert f"tape {ids[3]}" in shown.wait_for("tape 4 of 7")
        shown.press("n")
        assert f"tape {ids[5]}" in shown.wait_for("tape 5 of 7"), "the cancelled one is left out"
        shown.press("\x04")
        assert shown.process.wait() == Exit.HOLDS


def test_ctrl_c_ends_it(library):
    path, _ = library
    with screen(path, "--browse") as shown:
        shown.wait_for("tape 1 of 7")
        os.kill(shown.process.pid, signal.SIGINT)
        assert shown.process.wait() == Exit.HOLDS


INTERRUPTED_BEFORE_THE_WAIT = """
import ctypes, itertools, operator, os, select, sys
from tapereel.cli import main

libc, waits = ctypes.CDLL(None), [(os, "read"), (select, "select")]
real = {name: getattr(module, name) for module, name in waits}

def first_wait(name):
    def wait(*args):
        for module, other in waits:
            setattr(module, other, real[other])
        # starmap and call are written in C: no handler runs between the signal and the wait.
        return list(itertools.starmap(operator.call, [(libc["raise"], 2), (real[name], *args)]))[1]
    return wait

def tell(*args, **named):
    print("now")
    for module, name in waits:
        setattr(module, name, first_wait(name))

from tapereel.cli.look import browse
shown = browse.browse
browse.browse = lambda ids, at, show, _: shown(ids, at, show, tell)
sys.exit(main(sys.argv[1:]))
"""


def test_a_ctrl_c_just_before_it_waits_for_a_key_ends_it(library):
    path, _ = library
    with screen(path, "--browse", program=("-c", INTERRUPTED_BEFORE_THE_WAIT)) as shown:
        shown.wait_for("now")
        assert shown.process.wait(60) == Exit.HOLDS


def test_without_a_terminal_it_is_wrong_usage(library, capsys: pytest.CaptureFixture[str]):
    path, _ = library
    assert main(["show", path, "--browse"]) == Exit.USAGE
    out, err = capsys.readouterr()
    assert (out, err.count("--browse")) == ("", 1)


@pytest.mark.parametrize("words", [["--json"], ["TAPE", "--split", "eval"]])
def test_it_is_wrong_usage_if_the_list_cannot_have_the_tape_or_keys(library, words: list[str]):
    path, ids = library
    with screen(path, *(ids[3] if word == "TAPE" else word for word in words), "--browse") as shown:
        assert shown.process.wait() == Exit.USAGE


def test_a_tape_that_cannot_be_read_is_passed_over(tmp_path: Path):
    ids = write_library(tmp_path / "run")
    segment = next((tmp_path / "run" / "tapes").glob("*.jsonl"))
    assert main(["show", str(tmp_path / "run"), "--json"]) == Exit.HOLDS  # makes the index
    segment.write_bytes(segment.read_bytes().replace(b"KeyError: '166'", b"KeyError: '167'", 1))
    with screen(str(tmp_path / "run"), "--browse") as shown:
        shown.wait_for("tape 1 of 7")
        shown.press("n")
        assert f"the tape {ids[1]} can't be shown" in " ".join(shown.wait_for("tape 2 of 7").split())
        shown.press("q")
        assert shown.process.wait() == Exit.HOLDS
