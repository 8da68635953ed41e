"""The page "One update" shows the functions that an update really calls, in this order."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from .lab import run, settings_of

ROOT = Path(__file__).resolve().parents[3]


def shown() -> list[str]:
    """The functions on the page: module:name."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "reference" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.UPDATE)


def test_an_update_calls_the_functions_of_the_page_in_its_order(tmp_path: Path) -> None:
    page, called = shown(), list[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        module = str(frame.f_globals.get("__name__")).removeprefix("tapereel.")
        place = f"{module}:{frame.f_code.co_qualname}"
        if event == "call" and place in page and place not in called:
            called.append(place)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run(tmp_path / "run", settings_of(updates=1, max_lag=0))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert called == page
