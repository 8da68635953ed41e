"""Runs command lines one after the other, each in a fork of its own, and says which of them executed a run's code.

`python foreign_verbs.py MARK`: MARK is the file that the run's code writes. Input: a line of JSON a command, `[words]`;
output: a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import transformers  # noqa: F401  (imported once, before the forks)

import tapereel.agents.setup.recorded_setup
import tapereel.finetune.inspect.explainer
import tapereel.finetune.inspect.lab
import tapereel.finetune.run.train_run  # noqa: F401
from tapereel.cli import main

PYTHON = "python:"
"""A command that begins so is code, which gets the run's objects as a notebook would."""


def execute(words: list[str]) -> int:
    if words[0].startswith(PYTHON):
        exec(words[0].removeprefix(PYTHON), {})
        return 0
    return main(words)


def one(words: list[str], mark: Path) -> dict[str, object]:
    mark.unlink(missing_ok=True)
    with tempfile.TemporaryFile("w+") as out:
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            code = 70
            try:
                code = execute(words)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        return {"code": code, "executed": mark.exists(), "said": out.read()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(one(json.loads(line), Path(sys.argv[1]))), flush=True)
