"""Arguments for agent, environment, tasks, model and run directory, shared by `run`, `train` and `serve gateway`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..envs.load_named import listed_tasks
from ..tapes.common.access_token import check_token
from ..tapes.common.config import Setting, setting_key
from ..tapes.errors import UsageError
from ..tapes.store import lease
from ..tapes.store.run_directory import CONFIG
from .console import command

SCRIPTED = ("engine.answers", "engine.policy")
"""Settings that select the scripted engine."""


def add_scene_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare short options for the settings that every run has. The options override the configuration file."""
    parser.add_argument("--agent", metavar="NAME", help="the agent, as module:name or file.py:name")
    parser.add_argument("--env", metavar="NAME", help="an environment class or factory, as module:name or file.py:name")
    parser.add_argument(
        "--tasks",
        metavar="NAME",
        help="module:name, a JSON list, a JSONL, JSON, Parquet or CSV file, or a Hugging Face dataset as "
        "org/name[@revision]",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a model folder or GGUF file, a model on the Hugging Face Hub as org/name[@revision], or litellm:NAME "
        "if it is hosted",
    )
    parser.add_argument("--seed", metavar="N", help="seed for sampling and environments (default 0)")
    add_out_arguments(parser)


def add_on_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--on`."""
    parser.add_argument(
        "--on",
        metavar="PLACE",
        help="run episodes in workers: ray starts Ray on this machine, ray:ADDRESS takes a running cluster",
    )


def add_out_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--out`, `--resume` and `--take-over`."""
    parser.add_argument("--out", metavar="DIR", help="run directory")
    add_resume_arguments(parser)


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--resume` and `--take-over`."""
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="with --resume: take the run over from another process, which stops before its next record",
    )


def add_config_arguments(parser: argparse.ArgumentParser, needs: str = "") -> None:
    """Declare `--config`, `--set` and `--dry-run`. `needs` is text for the help about what else a dry run prints."""
    parser.add_argument("--config", metavar="FILE", help="settings in a YAML or TOML file")
    add_set_argument(parser, "seed=3")
    parser.add_argument("--dry-run", action="store_true", help=f"print the resolved configuration{needs}, and stop")


def add_set_argument(parser: argparse.ArgumentParser, example: str) -> None:
    """Declare `--set`."""
    what = f"override one setting, as in --set {example}; repeatable"
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="sets", help=what)


def scene_settings(args: argparse.Namespace, *more: str, **keys: str) -> list[Setting]:
    """Return the short options as settings, followed by the settings from `--set`, which override them. `more` and
    `keys` are further options, as in `option_settings`."""
    tasks = option_settings(args, "tasks")
    if args.tasks is not None and args.tasks.lstrip().startswith("["):
        tasks = [("tasks", [*listed_tasks(args.tasks)], f"--tasks {args.tasks:.60}")]
    return [*option_settings(args, "agent", "env", "seed", *more, **keys), *tasks, *engine_settings(args), *args.sets]


def option_settings(args: argparse.Namespace, *names: str, **keys: str) -> list[Setting]:
    """Return the given options as settings. An option in `names` has the same name as its setting. For other options,
    `keys` holds the name of the setting."""
    options = {**dict.fromkeys(names), **keys}
    found = [(name, key or name, getattr(args, name)) for name, key in options.items()]
    return [(key, value, f"--{name.replace('_', '-')} {value}") for name, key, value in found if value is not None]


def engine_settings(args: argparse.Namespace) -> list[Setting]:
    """Return the settings that select the engine, if `--model` or a scripted answer in `--set` chooses one."""
    if args.model is not None:
        from ..agents.setup.engine_config import model_settings

        return [(key, value, f"--model {args.model}") for key, value in model_settings(args.model)]
    scripted = any(setting_key(one) in SCRIPTED for one in args.sets)
    return [("engine.kind", "scripted")] if scripted else []


def run_directory(args: argparse.Namespace) -> str:
    """Return the value of `--out`. With `--take-over`, first end the lease of that run. Raises UsageError if `--out` is
    missing."""
    if args.out is None:
        raise UsageError("`--out DIR` is required: the run directory")
    take_over(args, args.out)
    return args.out


def take_over(args: argparse.Namespace, out: str | Path) -> None:
    """End the lease of the run in `out` if `--take-over` is given."""
    if args.take_over:
        lease.take_over(out, args.resume)


def as_given(path: str, run: str, out: str | Path) -> str:
    """Return a path in the run directory `run`, written with `out`, the path of this directory as the user gave it."""
    return str(Path(out) / Path(path).relative_to(run)) if Path(path).is_relative_to(run) else path


@contextmanager
def resumable(args: argparse.Namespace, out: str | Path, config: str = CONFIG, *more: str) -> Iterator[None]:
    """If Ctrl-C ends the block, add the command that continues the run in `out` to the KeyboardInterrupt. `config` is
    the file with the run's settings, and the run has begun if it exists. `more` are further arguments for the
    command."""
    file = Path(out) / config
    another = file.exists() and not args.resume
    try:
        yield
    except KeyboardInterrupt:
        if another or not file.exists():
            raise
        # A command that resumed the run works again. Its settings may differ from the recorded ones, such as addresses.
        again = [word for word in args.words if word != "--take-over"] if args.resume else ()
        words = "--config", os.path.join(out, config), "--out", str(out), "--resume", *more
        verb = args.parser.prog.removeprefix("tapereel ")
        raise KeyboardInterrupt(command(verb, *(again or words))) from None


def add_server_arguments(
    parser: argparse.ArgumentParser, *, port: int = 0, key: str = "--key", made: str = "a new token"
) -> None:
    """Declare arguments for a server's port, its address and the environment variable with its token. In the help,
    `made` describes the default token."""
    parser.add_argument(
        "--port", type=_port, default=port, help="port to listen on; 0 picks a free one (default %(default)s)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: this machine only)"
    )
    parser.add_argument(key, metavar="VARIABLE", help=f"environment variable with the clients' token (default: {made})")


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65536:
        raise argparse.ArgumentTypeError(f"{port} is not a port: give a number from 0 (any free port) to 65535")
    return port


def variable_value(variable: str | None) -> str | None:
    """Return the token in an environment variable, or None if no variable is given. Raises UsageError if the variable
    is not set or the token is too short.

    The token itself can't be an argument, since every user of the machine can read command lines.
    """
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise UsageError(
            f"the environment variable {variable[:40]!r} is not set; set it to the token. The option takes the name of "
            "a variable, since other users can read command lines"
        )
    return check_token(token)


def token_line(file: str | None) -> str:
    """Return a sentence about how clients get the server's token."""
    if file is None:
        return "clients send your token"
    return f"local clients read the token automatically; others find it in {file}"
