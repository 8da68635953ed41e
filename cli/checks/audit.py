"""`tapereel audit`: account for every sampled token, and report attrition, cost, rewards and anomalies of a run.

The exit code is 1 if a token is not accounted for, and with `--strict` also if an anomaly is found. The token account
always covers the whole run, even with `--split`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...tapes.audit.checking import check_split, torn_tails
from ...tapes.errors import UsageError
from ..console import Exit, answer, at_least, check_target, escaped, markdown, say
from ..progress_bars import live_progress

EXAMPLE = """
tapereel audit runs/demo
tapereel audit runs/demo --split train --limit 1000 --strict
tapereel audit runs/demo --markdown audit.md
tapereel audit runs/demo --json
"""
STDOUT = "-"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--split", help="only tapes of this split (`train`, `eval`, ...); the token account covers all")
    parser.add_argument(
        "--limit",
        type=at_least(1),
        metavar="N",
        help="only the newest N matching tapes, and the rest of their groups",
    )
    parser.add_argument(
        "--repeats", type=at_least(2), default=3, metavar="N", help="report actions done N times in a row (default 3)"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 on anomalies too")
    parser.add_argument(
        "--markdown",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the audit as Markdown to FILE, or to stdout without FILE",
    )


def run(args: argparse.Namespace) -> int:
    """Audit, and print or write the result."""
    from ...tapes.audit.auditor import audit_run
    from ...tapes.store.run_directory import code_changes
    from ...tapes.store.store import Store
    from .audit_sections import sections

    if args.markdown == STDOUT and args.json:
        raise UsageError("--json and --markdown both write to stdout; name a file, as in --markdown FILE")
    if args.markdown != STDOUT:
        check_target("--markdown", args.markdown)
    with Store.open(args.run) as store, live_progress() as progress:
        torn = torn_tails(store)
        check_split(store, args.split)
        books, audit = audit_run(store, split=args.split, limit=args.limit, repeats=args.repeats, progress=progress)
    found, changes = sections(books, audit), code_changes(args.run)
    verdict = "every token is accounted for" if books.closes else "some tokens are NOT accounted for"
    broken = [f"broken: {text}" for text in books.findings]
    data = {
        "run": str(args.run),
        "split": args.split,
        "limit": args.limit,
        "closes": books.closes,
        "torn": torn,
        "code_changes": changes,
        "sum": sum(books.tokens.values()),
        **books.model_dump(),
        "audit": audit.model_dump(),
    }
    shown = [*torn, *found, *changes, *broken, verdict]
    if args.markdown is not None:
        summary = "; ".join([*torn, verdict, *broken, *changes])
        document = f"# {escaped(f'Audit of {args.run}')}\n\n{markdown([summary, *found])}"
        if args.markdown == STDOUT:
            shown = [document]
        else:
            Path(args.markdown).write_text(document, encoding="utf-8")
            say(f"wrote {args.markdown}")
    answer(args, data, *shown)
    return Exit.HOLDS if books.closes and not (args.strict and audit.anomalies) else Exit.BROKEN
