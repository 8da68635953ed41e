"""200 conversations of the official clients: each is the same prompt in each API, and the official models parse all
answers and events."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ..agents.gateway.conversations import APIS, TOOLS, Plays, drawn
from ..agents.gateway.lab import books_close, served
from ..agents.gateway.test_same_prompts import LONG, check
from .clients_env import PYTHON, is_there

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


async def client(script: str, *words: str) -> None:
    """Run a script of this folder with the clients' Python."""
    command = [str(PYTHON), str(Path(__file__).with_name(script)), *words]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]


def test_two_hundred_conversations_of_official_clients(tmp_path: Path):
    if not is_there():
        pytest.fail("the environment is not there: run python -m tests.contract.clients_env")
    talks, sent = drawn(200), list[Any]()
    assert {talk.api for talk in talks} == {*APIS}

    async def scene() -> None:
        async with served(tmp_path / "run", Plays(talks), sampling=LONG, idle=3000.0) as there:
            begun = [await there.begin(task="t") for _ in talks]
            lines = [
                json.dumps({**asdict(talk), "root": one.root, "key": one.key, "tools": TOOLS[talk.api]})
                for talk, (_, one) in zip(talks, begun, strict=True)
            ]
            (tmp_path / "talks.jsonl").write_text("\n".join(lines), encoding="utf-8")
            await client("clients_play.py", str(tmp_path / "talks.jsonl"))
            for talk, (tape, _) in zip(talks, begun, strict=True):
                await there.end(tape)
                await check(there, talk, there.tape(tape), sent)
        (tmp_path / "sent.jsonl").write_text("\n".join(map(json.dumps, sent)), encoding="utf-8")
        await client("clients_run.py", "parse", str(tmp_path / "sent.jsonl"))

    asyncio.run(scene())
    assert {kind for kind, _ in sent} == {kind for api in APIS for kind in (api, f"{api}-event")}
    books_close(tmp_path / "run")
