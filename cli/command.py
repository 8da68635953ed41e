"""The `tapereel` command runs a verb with its arguments, and turns errors into sentences and exit codes.

A verb's module is imported only when the verb runs, so `tapereel show` never imports torch. A verb is either a command
or, like `tapereel serve`, a table of commands (`TARGETS`). `cli/console.py` defines the interface of a command.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from types import ModuleType
from typing import Any, NoReturn, cast

from ..tapes.common.extras import extra_of
from ..tapes.common.run_async import GRACE
from ..tapes.common.text import DOCS, TerminalHandler, guard_terminal
from ..tapes.errors import (
    MissingExtra,
    NewerRecord,
    NoSuchTape,
    OtherVersion,
    RunStopped,
    TapereelError,
    UsageError,
)
from .console import Exit, Verb, broken_command, say
from .rank_errors import is_news
from .signals import sigterm_as_interrupt

VERBS: dict[str, tuple[str, str]] = {
    "run": ("cli.rollout.run", "run an agent on tasks and record every episode"),
    "branch": ("cli.rollout.branch", "continue a recorded episode from one of its turns, with a change"),
    "serve": ("cli.rollout.serve", "serve a model, an environment or a recording gateway"),
    "demo": ("cli.training.demo", "create a tiny model and train it, in minutes on a CPU"),
    "train": ("cli.training.train", "train a model on an agent's own episodes, asynchronously"),
    "scores": ("cli.training.scores", "report reward and pass@k of recorded episodes, or compare two runs"),
    "replay": ("cli.checks.replay", "run the agent, environment, rewards or model again and compare with the tapes"),
    "verify": ("cli.checks.verify", "check that the files of a run are unchanged"),
    "reproduce": ("cli.checks.reproduce", "recompute a checkpoint from the base weights and the tapes, and compare"),
    "audit": ("cli.checks.audit", "account for every sampled token and every episode of a run"),
    "check": ("cli.checks.check", "check an environment or an engine before you use it"),
    "show": ("cli.look.show", "print a tape, or list the tapes of a run"),
    "view": ("cli.look.view", "open a run in the browser, or write it as one HTML file"),
    "explain": ("cli.look.explain", "show how training used each token of a tape, or how other recipes would"),
    "diff": ("cli.look.diff", "compare two tapes step by step, or two runs task by task"),
    "export": ("cli.exchange.export", "write tapes as a dataset or as conversations"),
    "import": ("cli.exchange.import_", "read conversations as tapes"),
}
"""For each verb: (its module inside tapereel, its purpose)."""

GROUPS: dict[str, tuple[str, ...]] = {
    "roll out": ("run", "branch", "serve"),
    "train": ("demo", "train", "scores"),
    "check": ("replay", "verify", "reproduce", "audit", "check"),
    "look": ("show", "view", "explain", "diff"),
    "exchange": ("export", "import"),
}
"""The verbs in the order of `tapereel --help`."""

_EPILOG = f"""\
`tapereel VERB --help` shows a verb's arguments and examples
documentation: {DOCS / "index.md"}
exit codes: {DOCS / "reference" / "cli.md"}"""


class _Parser(argparse.ArgumentParser):
    """A parser that exits with `Exit.USAGE`. The argparse default of 2 means "can't be verified" here."""

    def error(self, message: str) -> NoReturn:
        said = f"{self.prog}: {message}\n"
        if is_news(said):
            self.print_usage(sys.stderr)
            self.exit(Exit.USAGE, said)
        self.exit(Exit.USAGE)


def load(name: str) -> ModuleType:
    """Import the module of a verb."""
    return _module(VERBS[name][0])


def commands() -> dict[str, tuple[str, str]]:
    """Return (module inside tapereel, purpose) for each command, by names such as `show` and `serve model`."""
    found: dict[str, tuple[str, str]] = {}
    for name, entry in VERBS.items():
        targets: Mapping[str, tuple[str, str]] | None = getattr(load(name), "TARGETS", None)
        found |= {name: entry} if targets is None else {f"{name} {target}": below for target, below in targets.items()}
    return found


def verb_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser for one verb, with the arguments that all commands share."""
    module, (_, purpose) = load(name), VERBS[name]
    prog = f"tapereel {name}"
    parser = _Parser(prog=prog, **_texts(module, purpose))
    targets: Mapping[str, tuple[str, str]] | None = getattr(module, "TARGETS", None)
    if targets is None:
        _configure(parser, module)
        return parser
    below = parser.add_subparsers(dest="target", metavar="TARGET", required=True, title="targets")
    for target, (path, what) in targets.items():
        command = _module(path)
        _configure(below.add_parser(target, prog=f"{prog} {target}", help=what, **_texts(command, what)), command)
    return parser


def _configure(parser: argparse.ArgumentParser, command: ModuleType) -> None:
    cast(Verb, command).configure(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--traceback", action="store_true", help="print the traceback of an error")
    parser.set_defaults(command=command, parser=parser)


def _texts(module: ModuleType, purpose: str) -> dict[str, Any]:
    lines = cast(Verb, module).EXAMPLE.strip().splitlines()
    return {
        "description": f"{purpose[0].upper()}{purpose[1:]}.",
        "epilog": "example:\n" + "\n".join(broken_command(f"  {line}", _help_width()) for line in lines),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def _help_width() -> int:
    """Return the width of the terminal, or the value of COLUMNS, as argparse finds it."""
    return shutil.get_terminal_size().columns


def _module(path: str) -> ModuleType:
    return importlib.import_module(f"tapereel.{path}")


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, VERBS))
    parts = []
    for group, names in GROUPS.items():
        parts += ["", f"{group}:"]
        for name in names:
            line = f"  {name:<{width}}  {VERBS[name][1]}"
            parts.append(fill(line, _help_width(), subsequent_indent=" " * (width + 4)))
    parser = _Parser(
        prog="tapereel",
        description="Record agents on tapes, then replay, audit and train on them.\n" + "\n".join(parts),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("verb", nargs="?", choices=list(VERBS), metavar="VERB", help="one of the verbs above")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. `sys.argv` is used if `argv` is None."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        guard_terminal()
        _keep_stdout()
        _outlive_alarms()
        sigterm_as_interrupt()
        # With thousands of tapes in memory, full collections would take most of the time. Modules never become garbage.
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
    try:
        code = _dispatch(words)
    except SystemExit as stop:  # argparse has already printed its message, but user code may pass its message here
        if isinstance(stop.code, str):
            say(stop.code)
        code = Exit.BROKEN if isinstance(stop.code, str) else int(stop.code or 0)
    if argv is None:
        _leave_threads(code)
    return code


def _keep_stdout() -> None:
    """Reserve descriptor 1 for the answer. Output from user code and its child processes goes to stderr."""
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # stdout or stderr is closed
        return
    out = sys.stdout
    sys.stdout = os.fdopen(kept, "w", encoding=out.encoding, errors=out.errors)


def _outlive_alarms() -> None:
    """Report alarms (`signal.alarm`) that user code sets without a handler. By default, they would end the process."""
    if hasattr(signal, "SIGALRM") and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.signal(
            signal.SIGALRM, lambda *_: say("ignored SIGALRM: the code that set the alarm has no handler for it")
        )


def _leave_threads(code: int) -> None:
    """End the process with `code` even if threads of user code don't end, and name these threads."""
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]

    def end() -> None:
        time.sleep(GRACE)
        names = ", ".join(thread.name for thread in left if thread.is_alive())
        say(f"these threads don't end: {names}; the process exits without them")
        sys.stdout.flush()
        os._exit(code)

    if left:  # idle executor threads end when the interpreter exits, before the new thread acts
        threading.Thread(target=end, daemon=True).start()


def _dispatch(words: list[str]) -> int:
    top = _top_parser()
    chosen = top.parse_args(words[:1])
    if chosen.version:
        from importlib.metadata import version

        print(version("tapereel"))
        return Exit.HOLDS
    if chosen.verb is None:
        top.print_help()
        return Exit.USAGE
    return _run(chosen.verb, words[1:])


def _run(name: str, words: list[str]) -> int:
    traceback, prog, parser, args = "--traceback" in words, f"tapereel {name}", _Parser(), argparse.Namespace()
    try:
        args = verb_parser(name).parse_args(words)
        prog, parser = args.parser.prog, args.parser
        args.answer_to, args.words = sys.stdout, words
        with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(sys.stderr), _warnings_on_stderr():
            return int(cast(Verb, args.command).run(args))
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if traceback or extra is None:
            raise
        if is_news(said := f"{prog}: {MissingExtra(error.name or '', extra, 'this command')}"):
            say(said)
        return Exit.BROKEN
    except BrokenPipeError:
        # The reader of our stdout has gone (`| head`). Stdout is pointed at the null device, because otherwise the
        # interpreter's flush at exit would fail on the closed pipe and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.BROKEN
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":  # a launcher ends the other processes if one fails
            say(f"{prog}: interrupted" + (f"; continue with\n  {stop}" if str(stop) else ""))
        return 130
    except (TapereelError, OSError) as error:
        if traceback:
            raise
        run = getattr(args, "out", None) or getattr(args, "run", None)
        said = f"{prog}: {_with_options(_sentence(error, run), parser)}"
        mistake = isinstance(error, UsageError | NoSuchTape)
        if is_news(said, wait=mistake):
            say(said)
        if isinstance(error, RunStopped):
            return Exit[error.reason.upper()]
        if isinstance(error, NewerRecord | OtherVersion):
            return Exit.UNVERIFIABLE
        return Exit.USAGE if mistake else Exit.BROKEN


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    root, handler = logging.getLogger(), TerminalHandler()
    if any(isinstance(one, TerminalHandler) for one in root.handlers):
        yield
        return
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def _with_options(text: str, parser: argparse.ArgumentParser) -> str:
    """Return the library's message in terms of the command line. Python arguments (`` `resume=True` ``) and settings
    (`` `loop.groups=8` ``) are replaced by the command's options."""
    flags = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        dest, value = ("sets", f"{name}={value}") if "." in name else (name, value)
        words = [flags.get(dest), value if value not in ("True", "...") else None]
        return f"`{' '.join(filter(None, words))}`" if dest in flags else found[0]

    return re.sub(r"`([\w.]+)=([^`]+)`", option, text)


def _sentence(error: Exception, run: str | None) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, TapereelError):
        return text
    text = f"{type(error).__name__}: {text}"
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        # If a write fails, the system names no file.
        text += f" (in {run})" if error.filename is None and run else ""
        text += f"; {_REMEDIES[error.errno]}, and repeat the command"
    return text


_REMEDIES = {
    errno.ENOSPC: "free some space on the disk",
    errno.EDQUOT: "free some of your quota on the disk",
    errno.EROFS: "make the file system writable, or copy the run",
    errno.EACCES: "give your user the right to do this",
    errno.ENOTDIR: "remove the file that is in the place of a folder",
}
"""What to do about errors of the file system."""


if __name__ == "__main__":
    sys.exit(main())
