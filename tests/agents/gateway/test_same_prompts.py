"""One conversation has the same prompt ids in each API, and each API's answers and events are complete."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tapereel.tapes import Sampling, Tape

from .conversations import APIS, Answer, Plays, Talk, ask, drawn, history_of, play, prompts, request
from .lab import Served, books_close, served

LONG = Sampling(max_tokens=9999)


async def recorded(there: Served, talk: Talk, api: str, stream: bool, sent: list[Any]) -> Tape:
    """The talk played through one API, as a tape."""
    tape, client = await there.begin(task="t")
    history = await play(client, api, talk, stream, sent)
    await there.end(tape)
    assert len([one for one in history if isinstance(one, Answer)]) == len(talk.said)
    return there.tape(tape)


async def fresh(there: Served, api: str, system: str | None, history: Any) -> Tape:
    """A new tape whose first request has a whole conversation, so no answer is known."""
    tape, client = await there.begin(task="t")
    await ask(client, api, request(api, system, history), False, [])
    await there.end(tape)
    return there.tape(tape)


async def check(there: Served, talk: Talk, tape: Tape, sent: list[Any]) -> None:
    """Replay a recorded tape's conversation through each API, in its steps and as a whole."""
    wanted = prompts(tape)
    assert len(wanted) == len(talk.said)
    for k, api in enumerate(APIS):
        again = await recorded(there, talk, api, (talk.number + k) % 2 == 0, sent)
        assert prompts(again) == wanted, (talk, api)
    system, history = history_of(tape)
    whole = {api: prompts(await fresh(there, api, system, history[:-1])) for api in APIS}
    assert whole["responses"] == whole["messages"] == whole["chat"], talk


def test_a_conversation_has_the_same_prompt_in_each_api(tmp_path: Path):
    talks = drawn(40)

    async def scene() -> None:
        async with served(tmp_path, Plays(talks), sampling=LONG) as there:
            for talk in talks:
                sent = list[Any]()
                await check(there, talk, await recorded(there, talk, talk.api, talk.stream, sent), sent)

    asyncio.run(scene())
    books_close(tmp_path)
