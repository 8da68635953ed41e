"""`tapereel view`: show a run, or the runs in a folder, in the browser, from a server on this machine or from one file
that needs no server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from ...tapes.errors import UsageError
from ...tapes.view import RunView
from ..console import Exit, answer, say
from ..progress_bars import live_progress
from ..scene_arguments import add_server_arguments, variable_value
from ..signals import stop_event

if TYPE_CHECKING:
    from ...agents.runs.runner import RunScores
    from ...tapes.store.store import Store
    from ...tapes.view.run_view import Insight
    from ...tapes.view.runs import Runs
    from ...tapes.view.view_server import Server

EXAMPLE = """
tapereel view runs/demo
tapereel view runs
tapereel view runs/demo --port 8123 --no-browser
tapereel view runs/demo --out demo.html --tape 019a3c
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", help="a run directory, or a folder with runs; a growing run is shown live")
    add_server_arguments(parser, key="--token")
    parser.add_argument("--no-browser", action="store_true", help="print the address instead of opening a browser")
    parser.add_argument(
        "--weights",
        metavar="DIR",
        help="a checkpoint or model folder: show each token's probability under it, relative to the one at sampling",
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the run's own)")
    parser.add_argument(
        "--out", metavar="FILE", help="write the overview and some tapes to one .html file instead of starting a server"
    )
    parser.add_argument(
        "--tape",
        action="append",
        default=[],
        metavar="ID",
        help="a tape to write with --out (default: the tapes that the overview proposes, or the newest); repeatable",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a stop signal, or write the file."""
    for flag, folder in (("--weights", args.weights), ("--tokenizer", args.tokenizer)):
        if folder is not None and not Path(folder).is_dir():
            raise UsageError(f"{flag} {folder}: the folder doesn't exist")

    def insight(store: Store) -> Insight:
        # This is imported here, because without the training packages the viewer still works but shows less.
        from ...finetune.inspect.view_insight import TrainingInsight

        return TrainingInsight(store, args.weights, args.tokenizer)

    from ...tapes.view.runs import Runs, is_run

    if Path(args.run).is_dir() and not is_run(args.run):
        if args.out is not None or args.tape:
            raise UsageError(f"--out and --tape are for one run, and {args.run} is a folder: name one of its runs")
        with Runs(args.run, insight=insight, compare=_compare) as runs:
            if not runs.overview()["runs"]:
                say(f"{args.run} has no run yet, on its first two levels; one that begins there appears in the browser")
            _run_server(args, runs)
        return Exit.HOLDS
    with RunView(args.run, insight=insight) as view:
        if args.out is not None:
            from ...tapes.view.bundle import write_view

            with live_progress() as progress:
                written = write_view(view, Path(args.out), tapes=args.tape, progress=progress)
            answer(args, written, f"{written['tapes']} tapes, {written['bytes']:,} bytes: open {written['page']}")
            return Exit.HOLDS
        if args.tape:
            raise UsageError("--tape chooses what --out writes: add --out FILE.html, or filter in the browser")
        _run_server(args, view)
    return Exit.HOLDS


def _compare(run: Path, split: str | None, against: Path, against_split: str | None) -> RunScores:
    from ...agents.runs.runner import score_run

    return score_run(run, split, against=against, against_split=against_split)


def _run_server(args: argparse.Namespace, view: RunView | Runs) -> None:
    from ...tapes.view.view_server import Server

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(args, Server(view, args.host, variable_value(args.token))))


async def _serve(args: argparse.Namespace, server: Server) -> None:
    stop = stop_event()
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(server.serving(args.port))
        except OSError as error:
            raise UsageError(
                f"can't listen on {args.host}, port {args.port or 'any'} ({error.strerror or error}): "
                "give an address of this machine with --host and a free port with --port"
            ) from error
        answer(args, {"url": server.url, "run": str(args.run)}, server.url)
        say("press Ctrl-C to stop")
        if args.no_browser:
            await stop.wait()
            return
        with server.opening_file() as page:
            await asyncio.to_thread(webbrowser.open, page.as_uri())
            await stop.wait()
