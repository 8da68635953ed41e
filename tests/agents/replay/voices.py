"""Models that a command line can name: one that is loud, and one during whose answer somebody presses Ctrl-C, once."""

from __future__ import annotations

import signal

from tapereel.agents import Request

pressed: list[int] = []


def loud(request: Request) -> str:
    return f"{str(request.messages[-1]['content']).upper()}!"


def interrupted(request: Request) -> str:
    if not pressed:
        pressed.append(request.seed)
        signal.raise_signal(signal.SIGINT)
    return "too late"
