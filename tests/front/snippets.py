"""Runs the Python blocks of one Markdown file in order, in one namespace, and compares what they print.

Called as `python snippets.py FILE.json`, where the file holds [[line, code, expected output or null], ...]. A process
of its own per document: step kinds are global, and two documents may both define a `Guess`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import types
from pathlib import Path

# The folder of conftest.py, whose import alone refuses the network.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
importlib.import_module("conftest")
sys.path.pop(0)


def main(path: str) -> int:
    """Exit code: 0 when every block ran and printed what the document says."""
    document = types.ModuleType("document")
    sys.modules["document"] = document
    for line, code, expected in json.loads(Path(path).read_text(encoding="utf-8")):
        printed = io.StringIO()
        # As if the block stood in the document at its own line, so that a traceback points there.
        compiled = compile("\n" * line + code, "document.md", "exec")
        with contextlib.redirect_stdout(printed):
            exec(compiled, document.__dict__)
        if expected is not None and printed.getvalue().strip() != expected.strip():
            print(f"line {line}: the document says\n{expected}\nbut the code prints\n{printed.getvalue()}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
