"""Mathematics: is an answer equal to the reference? It uses the library math-verify (the extra `math`).

math-verify parses LaTeX and expressions with sympy, which never ends for some answers. It therefore runs in a separate
process, which is killed at the time limit of an answer and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ...tapes import Tape, TapereelError
from ...tapes.errors import MissingExtra
from .sources import RewardSource, reference_of

START_SECONDS = 120.0
"""Time limit for the process to import sympy, in seconds."""


class NotVerified(TapereelError, RuntimeError):
    """The reference can't be parsed, or an answer was not checked in time; the message says which."""


class MathVerifier:
    """math-verify in a separate process, one answer at a time. Threads and event loops may share it."""

    def __init__(self, *, timeout: float = 10.0) -> None:
        """timeout: seconds for one answer, without the start of the process."""
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0, not {timeout}")
        self.timeout = timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def equal(self, answer: str, reference: str) -> bool:
        """Whether the answer's text contains an expression equal to the reference. NotVerified if the reference can't
        be parsed or the time limit is reached."""
        with self._lock:
            process = self._process if self._process is not None and self._process.poll() is None else self._start()
            try:
                reply = self._ask(process, {"answer": answer, "reference": reference}, self.timeout)
            except BaseException:
                # Kill it also after a cancellation: its late reply would be read as the reply to the next answer.
                _kill(process)
                self._process = None
                raise
        if "failed" in reply:
            raise NotVerified(f"the answer {answer[-200:]!r} can't be compared with {reference!r}: {reply['failed']}")
        return bool(reply["equal"])

    def close(self) -> None:
        """End the process; the next answer starts another."""
        with self._lock:
            if self._process is not None:
                _kill(self._process)
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        weakref.finalize(self, _kill, process)
        if "missing" in (reply := self._ask(process, {}, START_SECONDS)):
            self._process = None
            _kill(process)
            raise MissingExtra(reply["missing"], "math", "verifying mathematics")
        return process

    def _ask(self, process: subprocess.Popen[bytes], question: dict[str, str], seconds: float) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise NotVerified(f"the process that verifies mathematics died: {error}") from error
        line, until = bytearray(), time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise NotVerified(f"{question.get('answer', 'the start')[-200:]!r} took longer than {seconds:g} s")
                chunk = process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
                if not chunk:
                    raise NotVerified(f"the process that verifies mathematics died of {question}")
                line += chunk
        return json.loads(line)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unsent data in the buffer of a closed pipe
                pipe.close()


def last_text(tape: Tape) -> str:
    """The text of the tape's last action, as a model reads it."""
    return str(tape.actions[-1]) if tape.actions else ""


def math_reward(
    *,
    name: str = "math",
    weight: float = 1.0,
    timeout: float = 10.0,
    answer: Callable[[Tape], str] = last_text,
    reference: Callable[[Tape], object] = reference_of,
    verifier: MathVerifier | None = None,
) -> RewardSource[Tape]:
    """A source that scores 1.0 if the answer is equal to the reference, else 0.0, also for an answer that is not
    mathematics. A timeout, or a reference that is not mathematics, leaves the tape unscored. A task without a reference
    has no score."""
    verify = verifier or MathVerifier(timeout=timeout)

    async def score(tape: Tape) -> float | None:
        right = reference(tape)
        if right is None:
            return None
        return float(await asyncio.to_thread(verify.equal, answer(tape), str(right)))

    return RewardSource(score=score, name=name, weight=weight, timeout=None)


# The worker process


def equal(question: dict[str, str]) -> dict[str, bool | str]:
    """`equal` and whether answer and reference are equal; or `failed` and why the reference can't be parsed."""
    from math_verify import parse, verify

    # math-verify's own time limits need signals and hide the timeout: the parent process kills this one instead.
    unlimited: Any = None
    reference: Any = parse(_marked(question["reference"]), parsing_timeout=unlimited)
    if not reference:
        return {"failed": "the reference is not mathematics"}
    answer: Any = parse(question["answer"], parsing_timeout=unlimited)
    return {"equal": bool(answer) and verify(reference, answer, timeout_seconds=None)}


def _marked(reference: str) -> str:
    """The reference between LaTeX marks, which math-verify needs to read the whole text as mathematics."""
    return reference if "$" in reference or "\\boxed" in reference or "\\(" in reference else f"${reference}$"


def main() -> None:
    """Answer questions until stdin ends."""
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        question = json.loads(line)
        if not question:
            try:
                import math_verify  # noqa: F401
            except ModuleNotFoundError as error:
                reply: dict[str, Any] = {"missing": error.name or "math_verify"}
            else:
                reply = {"ready": True}
        else:
            try:
                reply = equal(question)
            except Exception as error:  # the parent process records it as the cause
                reply = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
