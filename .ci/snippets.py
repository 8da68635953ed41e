"""Runs the snippets of README.md in order, each after the `pip install` lines above it, and compares what they print.

    python3 -m venv ENVIRONMENT && ENVIRONMENT/bin/python .ci/snippets.py FOLDER

The environment must be new: a snippet that needs more than the lines above it install fails. Stderr is compared too, so
a progress bar that README doesn't show is a failure. The installs take the versions of constraints.txt.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Block = tuple[int, str, str]
"""(line, language, code) of a fenced block."""


def main() -> int:
    os.chdir(sys.argv[1])
    blocks = fenced((ROOT / "README.md").read_text(encoding="utf-8"))
    names: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    for (line, language, code), (_, after, expected) in zip(blocks, [*blocks[1:], (0, "", "")], strict=True):
        if language == "bash":
            for command in code.splitlines():
                install(shlex.split(command, comments=True))
        elif language == "python":
            began, printed = time.monotonic(), played(line, code, names)
            wanted = expected.strip() if after == "text" else ""
            print(f"line {line}: {time.monotonic() - began:.0f} s", flush=True)
            if printed.strip() != wanted:
                print(f"README.md says\n{wanted}\nbut its code prints\n{printed}")
                return 1
            ran += 1
    print(f"{ran} passed, 0 failed")
    return 0 if ran else 1


def fenced(text: str) -> list[Block]:
    return [
        (text[: found.start()].count("\n") + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    ]


def install(words: list[str]) -> None:
    """Carry out `pip install ...`; other commands aren't snippets. The index that README names for the CPU build of
    torch is left out: the next line installs torch from the index of this machine."""
    if words[:2] != ["pip", "install"] or "--index-url" in words:
        return
    command = [sys.executable, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *words[2:]]
    began = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True)
    importlib.invalidate_caches()
    print(f"{shlex.join(words)}: {time.monotonic() - began:.0f} s", flush=True)


def played(line: int, code: str, names: dict[str, object]) -> str:
    """What the code prints on stdout and stderr, also from C and from child processes."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1), os.dup(2)
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            # As if the block stood in a file at its own line, so that a traceback points there.
            exec(compile("\n" * line + code, "README.md", "exec"), names)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
        file.seek(0)
        return file.read().decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
