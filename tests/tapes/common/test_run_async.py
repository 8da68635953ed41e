"""The end of `run_async` waits for no code of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tapereel.tapes.common import run_async as module
from tapereel.tapes.common.run_async import run_async


@pytest.mark.timeout(30)
def test_the_end_waits_for_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.1)
    kept: list[AsyncIterator[int]] = []

    async def stubborn() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.Event().wait()

    async def main() -> int:
        kept.append(stubborn())
        return await anext(kept[0])

    assert run_async(main()) == 1
