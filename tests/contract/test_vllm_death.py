"""The real vLLM dies in mid-update, under `train`: its engine's process is killed as it is told to load weights."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tapereel.agents.engines import EngineStopped
from tapereel.agents.engines.servers import LocalServer, RemoteEngine
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.engines.weights import PublishFailed
from tapereel.finetune import TrainConfig
from tapereel.finetune.loop import NothingUsable
from tapereel.finetune.run import train
from tapereel.tapes.store import Store, verify

from ..agents.served import CLOSE, ask, servers
from ..finetune.loop.deadly_proxy import DeadlyProxy, Moment
from ..finetune.loop.lab import RENDERER, Letters, Speaker, assert_books_close, settings_of
from ..finetune.loop.versions import assert_versions_true
from .lab import off, policy, vllm_is_there
from .vllm_cpu import ENVIRONMENT, OPTIONS, PYTHON

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


KEY = "MORTAL_SERVER_KEY"
"""The variable with the server's key: by the proxy's address, no client finds the file of the key."""


@pytest.fixture
def mortal(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    vllm_is_there()
    monkeypatch.setenv(KEY, "the-key-of-a-mortal-server")
    server = LocalServer(
        folder,
        python=str(PYTHON),
        environment=ENVIRONMENT,
        options=OPTIONS,
        log=tmp_path / "log",
        patience=300.0,
        key_variable=KEY,
    )
    asyncio.run(server.start())
    yield server
    server.stop()


def kill_engine(server: LocalServer) -> None:
    """The process in which the model is, which the server's own started."""
    assert server._process is not None
    family = psutil.Process(server._process.pid).children(recursive=True)
    (core,) = [
        child
        for child in family
        if "EngineCore" in child.name() or any("EngineCore" in word for word in child.cmdline())
    ]
    os.kill(core.pid, signal.SIGKILL)


def test_an_engine_killed_in_mid_update(mortal: LocalServer, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with DeadlyProxy(lambda: mortal.url) as proxy:
        config = TrainConfig(
            agent=f"{Speaker.__module__}:Speaker",
            env=f"{Letters.__module__}:Letters",
            tasks=("ab", "cd", "ac", "db"),
            evaluation={"fraction": 0},
            loop=settings_of(updates=4, checkpoint_every=1, keep_checkpoints=None),
            engine={
                "kind": "vllm",
                "model": str(folder),
                "urls": [proxy.url],
                "control_seconds": 60.0,
                "patience": 20.0,
                "key_variable": KEY,
                "weights_folder": str(tmp_path / "weights"),
            },
        )
        death = Moment("/collective_rpc", "asked", 3, lambda: kill_engine(mortal))
        proxy.moments = [death]
        # What notices first: the publish, or the episodes, which have no other server.
        told = rf"`update`.*{proxy.url}.*resume=True|{proxy.url}.*(resume|engine\.patience.*20)"
        with pytest.raises((PublishFailed, NothingUsable, EngineStopped), match=told):
            train(config, run)
        assert death.happened
        assert verify(run).exit_code == 0
        proxy.moments = []
        mortal.stop()
        asyncio.run(mortal.start())
        summary = train(config, run, resume=True)
    assert (summary.updates, summary.books_close) == (4, True)
    assert_books_close(run)
    with Store.open(run) as store:
        assert [use.update for use in store.ledger(summary.lineage).uses] == list(range(4))
        assert all(tape.status is not None for tape in store.tapes())
    assert_versions_true(run, tmp_path / "fresh", folder, summary.lineage, 4)


@pytest.mark.parametrize("way", ["reload", "transfer"])
def test_a_server_whose_update_was_cut_off_takes_the_next_one(
    with_engine: Callable[..., Any], server: str, folder: Path, tmp_path: Path, way: Any
) -> None:
    """A trainer died when weights were to come, or another server did; this one lives, paused, in mid-update."""

    async def test(engine: RemoteEngine) -> None:
        sync = engine.fleet.members[0].sync
        await sync.pause("reprefill")
        await sync.start()
        config = servers(server, model=folder, way=way, weights_folder=tmp_path / "later")
        later = await connect(config, RENDERER, weights=True)
        try:
            assert later.version.startswith("unknown: ")
            assert "paused" in later.version
            for k, cut_off in enumerate((True, True, False)):
                version = f"{way}/{tmp_path.name}/{k}"
                if cut_off:
                    cut_sync = later.fleet.members[0].sync
                    whole = cut_sync.update
                    cut_sync.update = partial(cut, whole if (way, k) == ("transfer", 1) else None)
                    with pytest.raises(PublishFailed, match="`update`"):
                        await later.sync_weights(policy(1).state_dict(), version)
                    await later.close()
                    config = servers(server, model=folder, way=way, weights_folder=tmp_path / f"later-{k}")
                    later = await connect(config, RENDERER, weights=True)
                    assert later.version.startswith("unknown: publishing")
                    continue
                await later.sync_weights(policy(1).state_dict(), version)
                request = ask(max_tokens=24)
                completion = await later.complete(request)
                assert [name for name, _, _ in completion.spans] == [version]
                assert off(1, request, completion) < CLOSE
        finally:
            await later.close()

    with_engine(test, way)


async def cut(update: Any, folder: Path) -> None:
    """Another server dies meanwhile; or this one can't read the files."""
    if update is None:
        raise OSError("the other server died")
    await update(folder / "nowhere")
