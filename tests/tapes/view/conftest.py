"""A real browser for the tests that carry the mark `browser`: the system's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .lab import training_run
from .library import library_run
from .serving import served

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WATCH = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (event) => window.violations.push(event.violatedDirective));
"""


def find_chromium() -> str:
    """The browser that is there: `TAPEREEL_CHROMIUM`, or the first of the usual names."""
    named = os.environ.get("TAPEREEL_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(
            "no browser: install Chromium (Debian: apt-get install chromium) or name one in the environment "
            "variable TAPEREEL_CHROMIUM; nothing is downloaded",
            pytrace=False,
        )
    return found


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser, started once."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        pytest.fail('no Playwright: pip install "tapereel[browser]"', pytrace=False)
    # Without a sandbox, since CI runs as root in a container; the page is ours and loopback is all that it reaches.
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A fresh page. The test fails if a script of it failed, or if its policy had to refuse anything."""
    context = chromium.new_context(viewport={"width": 1440, "height": 860})
    context.add_init_script(WATCH)
    opened = context.new_page()
    opened.set_default_timeout(30_000)
    trouble: list[str] = []
    opened.on("pageerror", lambda error: trouble.append(f"error: {error}"))
    opened.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    opened.trouble = trouble
    yield opened
    violations = opened.evaluate("window.violations")
    context.close()
    # The server of a test may end before its page, which then asks in vain.
    assert ([text for text in trouble if "ERR_CONNECTION" not in text], violations) == ([], [])


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small training run."""
    return training_run(tmp_path_factory.mktemp("browsed") / "run")


@pytest.fixture(scope="session")
def server(run: Path) -> Iterator[Any]:
    """Its server."""
    with served(run) as found:
        yield found


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The server of a run whose agent calls tools."""
    with served(library_run(tmp_path_factory.mktemp("library") / "run")) as found:
        yield found
