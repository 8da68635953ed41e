"""The process in which math-verify runs: a line of JSON in, a line of JSON out, until its input ends.

{"answer": "x = \\\\frac{1}{2}", "reference": "0.5"}  ->  {"equal": true}        {}  ->  {"ready": true}
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


def equal(question: dict[str, str]) -> dict[str, Any]:
    """Whether both say the same; `failed` and why, where the reference can't be read."""
    from math_verify import parse, verify

    # Their own time limits need signals, and swallow what they stop: whoever started this process stops it.
    unlimited: Any = None
    reference: Any = parse(_marked(question["reference"]), parsing_timeout=unlimited)
    if not reference:
        return {"failed": "the reference is no mathematics"}
    answer: Any = parse(question["answer"], parsing_timeout=unlimited)
    return {"equal": bool(answer) and verify(reference, answer, timeout_seconds=None)}


def _marked(reference: str) -> str:
    """A reference is mathematics as a whole: as LaTeX it needs its marks to be read so."""
    return reference if "$" in reference or "\\boxed" in reference or "\\(" in reference else f"${reference}$"


def main() -> None:
    """Serve."""
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        question = json.loads(line)
        if not question:
            try:
                import math_verify  # noqa: F401
            except ModuleNotFoundError as error:
                said: dict[str, Any] = {"missing": error.name or "math_verify"}
            else:
                said = {"ready": True}
        else:
            try:
                said = equal(question)
            except Exception as error:  # what it can't compare is told to whoever asked
                said = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
