"""Settings of all tests: one thread for numerics, no network beyond this machine, and the options `--without` and
`--turn`."""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before torch or a tokenizer is imported by any test: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# pytest-xdist sets it in its workers, and tables are fitted to it.
os.environ.pop("COLUMNS", None)
# A shell's background job ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The user's secret, which indexes are kept with, and the tokens of servers are made here, not in the user's home.
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), f"tapereel-tests-{os.getuid()}")

# A machine may be slow, or busy with something else.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


importlib.import_module("tapereel.cli.remedies")  # as in `import tapereel as tr` and on the command line


PARTS = {"docs", "contract", "browser", "sandbox", "kill", "learning"}
"""Marks of parts of CI. `attack` is one too: its tests are those of tests/attack, and of files that name it."""


class NetworkRefused(RuntimeError):
    """A test reached for a machine other than this one."""


def _is_local(host: Any) -> bool:
    if host is None or isinstance(host, bytes) or host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host).split("%")[0]).is_loopback
    except ValueError:
        return False


def _refuse_network(event: str, args: tuple[Any, ...]) -> None:
    # An audit hook sees every socket of the process, those that C code opens through Python's module included.
    if event in ("socket.connect", "socket.sendto"):
        address = args[1]
        if isinstance(address, tuple) and not _is_local(address[0]):
            raise NetworkRefused(f"{event} to {address}: tests may talk to this machine only")
    elif event in ("socket.getaddrinfo", "socket.gethostbyname") and not _is_local(args[0]):
        raise NetworkRefused(f"{event} of {args[0]!r}: tests may talk to this machine only")


sys.addaudithook(_refuse_network)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-golden", action="store_true", help="write the expected texts of tests/cli/test_golden_text.py"
    )
    parser.addoption(
        "--without",
        metavar="PACKAGE",
        help="skip, and count, what fails because PACKAGE, which must not be installed, is missing",
    )
    parser.addoption(
        "--turn", metavar="K/N", default="0/1", help="run every N-th test only, beginning with the K-th, counted from 0"
    )


def pytest_configure(config: pytest.Config) -> None:
    package = config.getoption("--without")
    if package and importlib.util.find_spec(package):
        raise pytest.UsageError(f"--without {package}: {package} is installed, so no test may be left out")


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    # `.ci/run` looks for the tests of a mark in the files that name it.
    for mark in item.iter_markers():
        if mark.name in PARTS and mark.name not in _named_in(item.path):
            raise pytest.UsageError(f"{item.nodeid}: its file doesn't say pytest.mark.{mark.name}, which the test has")


@cache
def _named_in(file: Path) -> set[str]:
    return set(re.findall(r"pytest\.mark\.(\w+)", file.read_text(encoding="utf-8")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turn, _, of = config.getoption("--turn").partition("/")
    others = [item for k, item in enumerate(items) if k % int(of) != int(turn)]
    config.hook.pytest_deselected(items=others)
    items[:] = items[int(turn) :: int(of)]


def _skip(report: pytest.CollectReport | pytest.TestReport, call: pytest.CallInfo[Any] | None, package: str) -> None:
    """Turn a failure into a skip where its traceback, or the output of the command that it ran, names the package."""
    if call is None or call.excinfo is None or report.outcome != "failed":
        return
    text = "".join([*traceback.format_exception(call.excinfo.value), *(text for _, text in report.sections)])
    text = text.replace("\\'", "'")  # an assertion shows the output of a command as its repr
    if f"No module named '{package}'" in text or f"needs the package '{package}'" in text:
        report.outcome = "skipped"
        report.longrepr = (report.nodeid, 0, f"Skipped: needs {package}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if package := collector.config.getoption("--without"):
        _skip(report, getattr(report, "call", None), package)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if package := item.config.getoption("--without"):
        _skip(report, call, package)
    return report
