"""An overview with one text wherever text can stand, for the tests of the page, and how to read a report."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from tapereel.tapes.audit.faults import Fault
from tapereel.tapes.store import Store
from tapereel.tapes.store.books import Lost
from tapereel.tapes.view import Overview
from tapereel.tapes.view.curves import Curve, Level, Plot
from tapereel.tapes.view.overview import Fact, Score, TapeToRead

EVIL = "</title></pre><script>alert(1)</script>\" onmouseover='x' {{ 7*7 }} $x_1$ & \x1b[2J\u202e"


def curve(name: str = "GRPO") -> Curve:
    return Curve(name=name, x=(1, 2, 3, 4), y=(0.25, 0.5, math.nan, 0.75), mean_of=2)


def overview_with(text: str, *tapes: str) -> Overview:
    """An overview with `text` wherever text can stand."""
    levels = (Level(name=text, value=0.5),)
    return Overview(
        title=text,
        subtitle=text,
        facts=(Fact(label=text, value=text, note=text),),
        plots=(
            Plot(title=text, curves=(curve(text),), levels=levels, xlabel=text, ylabel=text, caption=text),
            Plot(title=text, curves=(curve(text),), caption=text, small=True),
        ),
        scores=(Score(name=text, sampled=0.5, greedy=None, n=7, note=text),),
        seconds={text: 1.5},
        tokens={text: 1200},
        notes=(text,),
        ends=(Lost(status=text, cause=text, trainable=True, episodes=3),),
        faults=(Fault(cause=text, error=text, raised_at=text, episodes=2, tape=text),),
        versions={text: text},
        checks={text: text},
        tapes=tuple(TapeToRead(tape=tape, caption=text) for tape in tapes),
        config=text,
        next=(text,),
    )


def empty_run(path: Path) -> Path:
    """A run without tapes."""
    Store.create(path).close()
    return path


def data_of(page: Path) -> dict[str, Any]:
    """The data of a report: key -> value."""
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.S)
    return {key: json.loads(text) for key, text in json.loads(block).items()}


def overview_in(page: Path) -> dict[str, Any]:
    """The overview that a report holds."""
    return data_of(page)["report"]


def words_of(page: Path) -> str:
    """Every text of the overview that a report holds, in order."""

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [text for key, inside in value.items() for text in (key, *texts(inside))]
        if isinstance(value, list):
            return [text for inside in value for text in texts(inside)]
        return [str(value)]

    return " ".join(" ".join(texts(overview_in(page))).split())
