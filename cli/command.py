"""The `tapereel` command: finds a verb, gives it its arguments, and turns errors into sentences and exit codes.

A verb's module is imported only when that verb runs, so that `tapereel show` never waits for torch. What verbs do is
not known here; the contract they keep is in `cli/console.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, cast

from ..tapes.common.extras import extra_of
from ..tapes.errors import MissingExtra, NoRun, NoSuchTape, RunExists, TapereelError, UsageError
from .console import Exit, Verb, say

if TYPE_CHECKING:
    from ..tapes.store.store import Store
    from ..tapes.view.run_view import Insight

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("cli.training.demo", "make a model, record it, train it, and see it learn: minutes on a CPU"),
    "run": ("cli.rollout.run", "roll an agent out over tasks, and keep every episode"),
    "train": ("cli.training.train", "train a model on an agent's own rollouts, in the async loop"),
    "gateway": ("cli.rollout.gateway", "serve any engine under OpenAI's protocol, with what it answers on tapes"),
    "serve": ("cli.rollout.serve", "start a local vLLM server that rollouts and training can use"),
    "serve-env": ("cli.rollout.serve_env", "serve an environment to agents and trainers in other processes"),
    "show": ("cli.look.show", "read a tape, or list the tapes of a run"),
    "view": ("cli.look.view", "look at a run in the browser, or write that view as files"),
    "explain": ("cli.look.explain", "show what each token of a tape was to training, and why"),
    "replay": ("cli.checks.replay", "run agents again on their tapes, and compare every request and step"),
    "reexec": ("cli.checks.reexec_verb", "carry recorded actions out again in a fresh environment, and compare"),
    "rescore": ("cli.checks.rescore_verb", "run reward code again over tapes, and compare or add what it gives"),
    "requery": ("cli.checks.requery_verb", "check that recorded log-probs are those of the named weights"),
    "branch": ("cli.rollout.branch", "take a recorded episode up at a turn and go on otherwise; or draw the forks"),
    "diff": ("cli.look.diff", "show where two tapes part, or what two runs made of the same tasks"),
    "verify": ("cli.checks.verify", "check that a run's bytes are as they were written"),
    "reproduce": ("cli.checks.reproduce", "derive a checkpoint again from base weights and tapes, and compare"),
    "eval": ("cli.training.eval", "say how good recorded episodes are: pass@k with intervals, two runs compared"),
    "lab": ("cli.look.lab_verb", "compute past updates again under other recipes, and compare"),
    "audit": ("cli.checks.audit", "account for every sampled token and every episode of a run"),
    "check-tasks": ("cli.checks.check_tasks", "say what held-out tasks have in common with those to train on"),
    "check-env": ("cli.checks.check_env_verb", "check that an environment keeps its promises"),
    "export": ("cli.exchange.export", "write the rows of a run's tapes as a dataset, or its tapes in others' formats"),
    "import": ("cli.exchange.import_", "read traces, rollouts and rows of others as tapes"),
}
"""verb -> (module inside tapereel, what it does)."""

_EPILOG = """\
exit codes: 0 holds, 1 diverged or broken, 2 can't be verified, 64 usage
`tapereel VERB --help` shows a verb's arguments and an example"""


class _Parser(argparse.ArgumentParser):
    """As argparse, but a wrong command line is `Exit.USAGE` (argparse's own 2 means "can't be verified" here)."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(Exit.USAGE, f"{self.prog}: {message}\n")


def load(name: str) -> Verb:
    """The module of a verb."""
    return cast(Verb, importlib.import_module(f"tapereel.{VERBS[name][0]}"))


def verb_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one verb, with the arguments that all verbs share."""
    verb = load(name)
    parser = _Parser(
        prog=f"tapereel {name}",
        description=VERBS[name][1].capitalize() + ".",
        epilog="example:\n" + "\n".join(f"  {line}" for line in verb.EXAMPLE.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.configure(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    return parser


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in VERBS.items())
    parser = _Parser(
        prog="tapereel",
        description=f"Record agents on tapes; replay, audit and train on the same tapes.\n\nverbs:\n{verbs}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    parser.add_argument("verb", nargs="?", choices=list(VERBS), metavar="VERB", help="one of the above")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` when None) and give its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        # Thousands of live tapes make full collections dominate; what is imported so far is never garbage.
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
    try:
        return _dispatch(words)
    except SystemExit as stop:  # argparse has already said why
        return int(stop.code or 0)


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
    traceback = "--traceback" in words
    try:
        args = verb_parser(name).parse_args(words)
        args.answer_to = sys.stdout
        args.insight = _insight
        with contextlib.redirect_stdout(sys.stderr), _warnings_on_stderr():
            return int(load(name).run(args))
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if traceback or extra is None:
            raise
        say(f"tapereel {name}: {MissingExtra(error.name or '', extra, f'`tapereel {name}`')}")
        return Exit.BROKEN
    except BrokenPipeError:
        # The reader of our stdout has gone (`| head`); the interpreter's last flush must not fail over it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return Exit.BROKEN
    except KeyboardInterrupt:
        say(f"tapereel {name}: interrupted")
        return 130
    except (TapereelError, OSError) as error:
        if traceback:
            raise
        say(f"tapereel {name}: {_sentence(error)}")
        return Exit.USAGE if isinstance(error, UsageError | NoRun | NoSuchTape | RunExists) else Exit.BROKEN


class _Said(logging.Handler):
    """Prints log records as the verbs print progress: control characters of a terminal are escaped."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Show the library's warnings for as long as a verb runs."""
    logger, handler = logging.getLogger("tapereel"), _Said(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _insight(store: Store, weights: str | None = None, tokenizer: str | None = None) -> Insight:
    """What training can tell the viewer, which stands below it. MissingExtra without the packages of training."""
    from ..finetune.inspect.view_insight import TrainingInsight

    return TrainingInsight(store, weights, tokenizer)


def _sentence(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, TapereelError) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    sys.exit(main())
