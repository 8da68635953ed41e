"""The environment's server is killed with SIGKILL in the middle of a training run, which goes on without losing one."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tapereel.envs.remote import RemoteEnvironment
from tapereel.tapes import CauseType, Status
from tapereel.tapes.store import Store

from ...finetune.loop import lab
from . import spelling
from .process import Served

UPDATES, GROUPS, SIZE = 5, 8, 8
KILLS = (70, 160, 240)
"""Numbers of the episodes with whose beginning the server is killed."""


@pytest.mark.kill
@pytest.mark.timeout(300)
def test_a_killed_server_costs_the_episodes_that_were_there_and_no_others(tmp_path: Path) -> None:
    begun, restarts = 0, []
    with Served(f"{spelling.__file__}:Spelling", tmp_path / "log") as server:

        def again() -> None:
            server.end()
            server.start()

        def remote() -> RemoteEnvironment:
            nonlocal begun
            begun += 1
            if begun in KILLS:
                restarts.append(asyncio.get_running_loop().run_in_executor(None, again))
            return RemoteEnvironment(server.url, spelling.Spelling, patience=100.0)

        config = lab.settings_of(
            updates=UPDATES,
            groups=GROUPS,
            group_size=SIZE,
            group_deadline=250.0,
            limits=lab.LIMITS.model_copy(update={"agent_seconds": 200.0, "system_seconds": 200.0}),
        )
        _, reports = lab.run(tmp_path / "run", config, env=remote, tasks=lab.tasks(4))
    assert all(restart.exception() is None for restart in restarts)
    assert len(restarts) == len(KILLS)
    assert len(reports) == UPDATES
    with Store.open(tmp_path / "run") as store:
        tapes = list(store.tapes())
    ends = Counter(
        (tape.status, tape.cause.type if tape.cause else None, tape.cause.error if tape.cause else None)
        for tape in tapes
    )
    print(dict(ends))
    lost = ends.pop((Status.ERROR, CauseType.ENVIRONMENT, "SessionLost"), 0)
    assert len(tapes) >= UPDATES * GROUPS * SIZE
    assert lost >= len(KILLS)
    assert set(ends) <= {(Status.FINISHED, None, None), (Status.CANCELLED, None, None)}, "every end is typed"
    # The end of the run cuts groups off that were begun for a later update.
    usable = Counter(tape.begin.group for tape in tapes if tape.status is Status.FINISHED)
    whole = {group for group, n in usable.items() if n == SIZE}
    tries: dict[tuple[str | None, int], list[bool]] = {}
    for tape in tapes:
        tries.setdefault((tape.begin.group, tape.begin.attempt), []).append(tape.status is Status.ERROR)
    # A group also closes without an attempt whose second try was lost in the next kill, or would be too stale by now.
    ended = Counter(group for (group, _), found in tries.items() if found[-1])
    closed = {group for group, n in ended.items() if usable[group] + n == SIZE}
    assert len(whole | closed) >= UPDATES * GROUPS
    second = {len(found) for (group, _), found in tries.items() if group in whole and found[0]}
    assert second == {2}, "what was lost was sampled again"
