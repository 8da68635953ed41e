"""`tapereel verify`: check that a run's files are unchanged and every token is accounted for. It only reads."""

from __future__ import annotations

import argparse

from ...tapes.common.text import counted
from ...tapes.store.verifier import Report, verify
from ..console import Exit, answer

EXAMPLE = """
tapereel verify runs/demo
tapereel verify runs/demo --pin elsewhere/pins.json
tapereel verify runs/demo --jobs 4
tapereel verify runs/demo --exact elsewhere/pins.json --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="PIN",
        help="a head of the hash chain that you kept elsewhere: SEGMENT:HASH, a hash, or a file like pins.json",
    )
    parser.add_argument(
        "--exact",
        action="append",
        default=[],
        metavar="PIN",
        help="as --pin, but every later line, file or checkpoint counts as broken",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes (default: one for every 64 MB, up to the CPUs and at most 4)"
    )


def run(args: argparse.Namespace) -> int:
    """Verify, and print the report."""
    report = verify(args.run, pins=args.pin, exact=args.exact, jobs=args.jobs)
    answer(args, report, *_report_lines(report))
    return report.exit_code


def _report_lines(report: Report) -> list[str]:
    lines = [
        f"{report.run}: {report.verdict}",
        f"{counted(len(report.segments), 'segment')}, {counted(report.records, 'record')}, "
        f"{counted(report.episodes, 'episode')} ({report.open:,} open), "
        f"{counted(report.books.sampled, 'token')} sampled, {counted(report.media, 'media file')}, "
        f"{counted(report.files, 'other file')}, "
        f"{counted(report.pins, 'pin')} compared",
    ]
    if report.head is not None and report.exit_code == Exit.HOLDS:
        lines.append(f"head {report.head}   (keep a copy elsewhere, and check it with --pin)")
    lines += [f"broken: {text}" for text in report.broken]
    lines += [f"torn: {text}" for text in report.torn]
    lines += [f"missing: segment {name}, which no pin covers" for name in report.holes]
    lines += [f"undecided: {text}" for text in report.unknown]
    lines += [f"undecided: {text}; the cause is a crash or a deletion" for text in report.unsettled]
    lines += [f"set aside by a recovery: {name}" for name in report.set_aside]
    lines += [f"doesn't count: {text}" for text in report.books.refused]
    return [*lines, *(f"not checked: {text}" for text in report.not_checked)]
