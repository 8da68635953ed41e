"""Text from outside: redaction reads a part of a long error, and takes no time that grows faster than the text."""

from __future__ import annotations

import asyncio

import pytest

from tapereel.agents import ScriptedEngine, rollout
from tapereel.envs import Environment
from tapereel.tapes import Task
from tapereel.tapes.common import HIDDEN
from tapereel.tapes.common.redact import without_secrets
from tapereel.tapes.errors import error_message

from ...attack.faulty import Player

KEY = "sk-" + "a1" * 10


class Long(Environment):
    """Raises an error with a secret and 50 MB of what redaction would read."""

    async def reset(self, task: Task) -> str:
        raise ValueError(f"{KEY} " + "://a:" * 10_000_000)


@pytest.mark.timeout(60)
def test_an_error_is_cut_before_it_is_redacted() -> None:
    assert len(error_message(ValueError("x" * 1_000_000))) < 100_000
    tape = asyncio.run(rollout(Player(), Long, 3, engine=ScriptedEngine(["7"])))
    assert tape.cause is not None
    assert tape.cause.message.startswith(HIDDEN)
    assert len(tape.cause.message) <= 2000


@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", ["://" + ":" * 300_000, "://a:" * 60_000, "Bearer " * 40_000, "?key_" * 60_000])
def test_redaction_takes_no_time_that_grows_faster_than_the_text(text: str) -> None:
    assert without_secrets(text) == text
    assert without_secrets("https://me:pa:ss@host") == f"https://{HIDDEN}@host"
