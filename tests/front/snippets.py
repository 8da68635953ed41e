"""Runs the blocks of one Markdown file in order, as a reader does, and compares what they print.

A block is [line, language, code, expected output or null]. Python runs in one namespace; a bash block has commands of
`tapereel`, one a line. A block that begins with a comment of a file's name is saved as that file. A process of its own
per document: step kinds are global, and two documents may both define a `Guess`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import sys
import types
import warnings
from pathlib import Path

from tapereel.cli import main

Block = tuple[int, str, str, str | None]


def play(blocks: list[Block], folder: Path, output: Path) -> None:
    """In a process of its own: it ends with 0 when every block ran, every command ended with 0, and the blocks printed
    what the document says. `output` gets what it prints."""
    printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.chdir(folder)
    # The folder of conftest.py, whose import alone refuses the network.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    importlib.import_module("conftest")
    sys.path.pop(0)
    warnings.simplefilter("error")
    # As in pyproject.toml: peft 0.21 with transformers 5.22 and later.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    sys.exit(run(blocks))


def run(blocks: list[Block]) -> int:
    document = types.ModuleType("document")
    sys.modules["document"] = document
    for line, language, code, expected in blocks:
        if named := re.match(r"# (\w+\.(?:py|yaml))\n", code):
            Path(named[1]).write_text(code, encoding="utf-8")
            continue
        if language == "bash":
            for command in filter(None, code.replace("\\\n", " ").splitlines()):
                program, *words = shlex.split(command)
                if program != "tapereel":
                    raise ValueError(f"line {line}: `{command}` is no command of tapereel")
                if ended := main(words):
                    print(f"line {line}: `{command}` ends with {ended}")
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
