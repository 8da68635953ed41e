"""Arguments that `run`, `train` and `serve gateway` share: agent, environment, tasks, model and run directory."""

from __future__ import annotations

import argparse

from ..tapes.errors import UsageError


def add_scene_arguments(parser: argparse.ArgumentParser) -> None:
    """Short options for the settings that every run has. They take precedence over the configuration file."""
    parser.add_argument("--agent", metavar="NAME", help="the agent, as module:name or file.py:name")
    parser.add_argument("--env", metavar="NAME", help="an environment class or factory, as module:name or file.py:name")
    parser.add_argument("--tasks", metavar="NAME", help="tasks as module:name, or a JSONL, JSON, Parquet or CSV file")
    parser.add_argument("--model", metavar="DIR", help="folder of a model and tokenizer in Hugging Face format")
    parser.add_argument("--seed", metavar="N", help="seed of sampling and environments (default 0)")
    add_out_arguments(parser)


def add_out_arguments(parser: argparse.ArgumentParser) -> None:
    """`--out` and `--resume`."""
    parser.add_argument("--out", metavar="DIR", help="run directory")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out where it stopped")


def scene_settings(args: argparse.Namespace, *more: str) -> list[str]:
    """The short options as settings, followed by the settings of `--set`, which take precedence."""
    sets = [f"{name}={value}" for name in ("agent", "env", "tasks", "seed", *more) if (value := getattr(args, name))]
    return [*sets, *engine_settings(args), *args.sets]


def engine_settings(args: argparse.Namespace) -> list[str]:
    """The kind of engine that `--model` or a scripted answer in `--set` asks for."""
    if args.model is not None:
        return ["engine.kind=embedded", f"engine.model={args.model}"]
    scripted = any(text.startswith(("engine.answers", "engine.policy")) for text in args.sets)
    return ["engine.kind=scripted"] if scripted else []


def run_directory(args: argparse.Namespace) -> str:
    """The value of `--out`. UsageError where it is missing."""
    if args.out is None:
        raise UsageError("`--out DIR` is required: the run directory")
    return args.out
