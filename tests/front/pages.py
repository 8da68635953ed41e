"""A report with one text wherever text can stand, for the tests of the page."""

from __future__ import annotations

import math

from tapereel.finetune.report.plots import Curve, Level
from tapereel.finetune.report.report import End, Fact, Plot, ReportData, Score, tape_page
from tapereel.tapes.audit.faults import Fault

from .making import sampled_tape

EVIL = "</title></pre><script>alert(1)</script>\" onmouseover='x' {{ 7*7 }} $x_1$ & \x1b[2J\u202e"


def decode(token: int) -> str:
    return "<|end|>" if token == 3 else chr(token)


def curve(name: str = "GRPO") -> Curve:
    return Curve(name=name, x=(1, 2, 3, 4), y=(0.25, 0.5, math.nan, 0.75), mean_of=2)


def report_of(text: str) -> ReportData:
    """A report with `text` wherever text can stand."""
    tape = sampled_tape(text, logprobs=[-0.01] * len(text) + [-5.0], spans=((text, 0, len(text) + 1),), question=text)
    page = tape_page(tape, text, decode, commands=(text,))
    return ReportData(
        title=text,
        subtitle=text,
        facts=(Fact(label=text, value=text, note=text),),
        plots=(
            Plot(
                title=text,
                curves=(curve(text),),
                levels=(Level(name=text, value=0.5),),
                xlabel=text,
                ylabel=text,
                caption=text,
            ),
            Plot(title=text, curves=(curve(text),), caption=text, small=True),
        ),
        scores=(Score(name=text, sampled=0.5, greedy=None, n=7, note=text),),
        seconds={text: 1.5},
        tokens={text: 1200},
        episodes={text: 1},
        notes=(text,),
        ends=(End(status=text, cause=text, episodes=3),),
        faults=(Fault(cause=text, error=text, raised_at=text, episodes=2, tape=text),),
        versions={text: text},
        checks={text: text},
        tapes=(page, tape_page(tape, text)),
        config=text,
        next=(text,),
    )
