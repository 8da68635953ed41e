"""The worker process of math-verify: it reads lines of JSON and answers each with a line, until its input ends.

{"answer": "x = \\\\frac{1}{2}", "reference": "0.5"}  ->  {"equal": true}        {}  ->  {"ready": true}
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


def equal(question: dict[str, str]) -> dict[str, Any]:
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
