"""Checks whether an answer is mathematically equal to the reference, with the library math-verify (the extra `math`).

math-verify parses LaTeX and expressions with sympy, which never returns for some answers. Therefore math-verify runs in
a separate process, which is killed and replaced if an answer exceeds its time limit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ...tapes import Tape, TapereelError
from ...tapes.errors import MissingExtra
from ..remote.pool import LineProcess
from .sources import RewardSource, reference_of

START_SECONDS = 120.0
"""Time limit for the start of the process, which imports sympy, in seconds."""


class NotVerified(TapereelError, RuntimeError):
    """The reference can't be parsed, or the answer was not checked in time. The message names the answer."""


class MathVerifier:
    """Runs math-verify in a separate process, one answer at a time. Several threads and event loops may share it."""

    def __init__(self, *, timeout: float = 10.0) -> None:
        """`timeout` is the time limit for one answer, in seconds, not counting the start of the process."""
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0, not {timeout}")
        self.timeout = timeout
        self._lock = threading.Lock()
        self._process: LineProcess | None = None
        self._finalizer: weakref.finalize[[], MathVerifier] | None = None

    def equal(self, answer: str, reference: str) -> bool:
        """Return whether `answer` contains an expression that is mathematically equal to `reference`. Raises
        NotVerified if the reference can't be parsed or the time limit is reached."""
        with self._lock:
            if self._process is None or self._process.ended() is not None:
                self._start()
            reply = self._ask({"answer": answer, "reference": reference}, self.timeout)
        if "failed" in reply:
            raise NotVerified(f"the answer {answer[-200:]!r} can't be compared with {reference!r}: {reply['failed']}")
        return bool(reply["equal"])

    def close(self) -> None:
        """End the process. The next answer starts a new process."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._end()
        self._process = LineProcess([sys.executable, "-m", __name__])
        self._finalizer = weakref.finalize(self, self._process.stop)
        if "missing" in (reply := self._ask({}, START_SECONDS)):
            self._end()
            raise MissingExtra(reply["missing"], "math", "verifying mathematics")

    def _ask(self, question: dict[str, str], seconds: float) -> dict[str, Any]:
        assert self._process is not None
        timer, began = threading.Timer(seconds, self._process.kill), time.monotonic()
        timer.start()
        reply = b""
        try:
            reply = self._process.ask(json.dumps(question).encode() + b"\n")
        finally:
            timer.cancel()
            late = time.monotonic() - began >= seconds
            # After Ctrl-C, the process must end too, because its late reply would be read as the reply to the next
            # question.
            if late or not reply:
                self._end()
        if not reply:
            problem = f"took longer than {seconds:g} s" if late else "ended the process that verifies mathematics"
            raise NotVerified(f"{question.get('answer', 'the start')[-200:]!r} {problem}")
        return json.loads(reply)

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def last_text(tape: Tape) -> str:
    """Return the text of the tape's last action, as a model reads it."""
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
    """Return a source that scores 1.0 if the answer is equal to the reference, and 0.0 otherwise.

    An answer that isn't mathematics also scores 0.0. If the time limit is reached or the reference isn't mathematics,
    the source fails and the tape stays unscored. For a task without a reference, the source returns no score.
    """
    verify = verifier or MathVerifier(timeout=timeout)

    async def score(tape: Tape) -> float | None:
        right = reference(tape)
        if right is None:
            return None
        return float(await asyncio.to_thread(verify.equal, answer(tape), str(right)))

    return RewardSource(score=score, name=name, weight=weight, timeout=None)


# The worker process


def equal(question: dict[str, str]) -> dict[str, bool | str]:
    """Compare the answer with the reference. The returned dict has the result as `equal`. If the reference can't be
    used, it has the reason as `failed`."""
    from math_verify import parse, verify

    # math-verify's own time limits need signals and hide a timeout. Instead, the parent process kills this process.
    unlimited: Any = None
    text = question["reference"]
    # math-verify needs LaTeX delimiters to read the whole text as mathematics.
    marked = text if "$" in text or "\\boxed" in text or "\\(" in text else f"${text}$"
    reference: Any = parse(marked, parsing_timeout=unlimited)
    if not reference:
        return {"failed": "the reference is not mathematics"}
    answer: Any = parse(question["answer"], parsing_timeout=unlimited)
    return {"equal": bool(answer) and verify(reference, answer, timeout_seconds=None)}


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
