"""Runs the blocks of one Markdown file in order, as a reader does, and compares what they print.

Called as `python snippets.py FILE.json`, where the file holds [[line, language, code, expected output or null], ...].
Python runs in one namespace, bash in the working directory. A block that begins with a comment of a file's name is
saved as that file. A process of its own per document: step kinds are global, and two documents may both define a
`Guess`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

# The folder of conftest.py, whose import alone refuses the network.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
importlib.import_module("conftest")
sys.path.pop(0)


def main(path: str) -> int:
    """Exit code: 0 when every block ran, every command ended with 0, and the blocks printed what the document says."""
    document = types.ModuleType("document")
    sys.modules["document"] = document
    # `tapereel` is the command of this interpreter's environment.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for line, language, code, expected in json.loads(Path(path).read_text(encoding="utf-8")):
        if named := re.match(r"# (\w+\.(?:py|yaml))\n", code):
            Path(named[1]).write_text(code, encoding="utf-8")
            continue
        if language == "bash":
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], capture_output=True, text=True)
            if done.returncode:
                print(f"line {line}: the command ends with {done.returncode}\n{done.stdout}{done.stderr}")
                return 1
            continue
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
