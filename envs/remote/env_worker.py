"""The worker process of a pool: one environment at a time; calls and answers are lines of JSON on stdin and stdout.

    python -m tapereel.envs.remote.env_worker package.module:name LARGEST

The environment's own output goes to stderr. The process ends when its stdin is closed, also in the middle of a call.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from ..environment import Environment
from ..load_named import load_named
from .declared import Declared
from .env_protocol import CloseCall, Fault, Message, Welcome, read_call
from .host import Host
from .remote_errors import BadAnswer

_ENDING = 3.0
"""Seconds that the environment has to close after stdin has ended."""


def main(name: str, largest: int) -> None:
    """Serve the environment called `name` until stdin ends."""
    # The messages get copies of stdin and stdout. The environment's own reads get an empty file and its prints go to
    # stderr: otherwise a `print` in the environment would corrupt the protocol.
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    make = load_named(name)
    declared = Declared.of(make)
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked, lines, largest), daemon=True).start()
    _write(answers, Welcome.to(declared, message_bytes=largest))
    _serve(make, declared, lines, answers)


def _serve(
    make: Callable[[], Environment[Any]], declared: Declared, lines: queue.SimpleQueue[bytes | None], answers: IO[bytes]
) -> None:
    with asyncio.Runner() as runner:
        host = Host(make, declared, None, alone=True)
        while (line := lines.get()) is not None:
            try:
                call = read_call(line)
            except BadAnswer as error:
                _write(answers, Fault(id=0, code="refused", error="BadAnswer", message=str(error)))
                continue
            answer = runner.run(host.answer(call))
            if isinstance(call, CloseCall):
                host = Host(make, declared, None, alone=True)
            _write(answers, answer)
        runner.run(host.close())


def _read(asked: IO[bytes], lines: queue.SimpleQueue[bytes | None], largest: int) -> None:
    """Read calls in a separate thread, so that the end of stdin ends the process although a call still hangs."""
    while (line := asked.readline(largest + 1)).endswith(b"\n"):
        lines.put(line)
    lines.put(None)
    time.sleep(_ENDING)
    os._exit(1)


def _write(answers: IO[bytes], message: Message) -> None:
    answers.write(message.encoded().encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
