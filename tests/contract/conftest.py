"""One server with the real vLLM for all contract tests, which takes weights in every way there is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.engines.servers import LocalServer
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.engines.servers.server_config import Adapters
from tapereel.agents.engines.transport import Server, ServerFailed

from ..agents.served import Test, servers
from ..finetune.loop.lab import RENDERER
from .lab import ADAPTERS, policy, save, vllm_is_there
from .vllm_cpu import ENVIRONMENT, OPTIONS, PYTHON


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(path)
    return path


@pytest.fixture(scope="session")
def vllm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    vllm_is_there()
    local = LocalServer(
        folder,
        python=str(PYTHON),
        environment=ENVIRONMENT,
        options=OPTIONS,
        transfer=True,
        lora_rank=ADAPTERS.rank,
        log=tmp_path_factory.mktemp("log") / "vllm.log",
        patience=540.0,
    )
    asyncio.run(local.start())
    yield local
    local.stop()


@pytest.fixture
def server(vllm: LocalServer) -> Iterator[str]:
    """Its address. A test that kills it fails with its errors, and the next has another at the same port."""
    yield vllm.url
    if asyncio.run(healthy(vllm.url)):
        return
    # The cause is the engine's or its worker's; each request repeats what follows from it.
    errors = [
        line[:300] for line in vllm.printed(4_000_000).splitlines() if "ERROR" in line and "(APIServer" not in line
    ]
    vllm.stop()
    asyncio.run(vllm.start())
    pytest.fail("the server died:\n" + "\n".join(errors[-200:]))


async def healthy(url: str) -> bool:
    one = Server(url)
    try:
        await one.get("/health", seconds=30.0)
    except ServerFailed:
        return False
    finally:
        await one.close()
    return True


@pytest.fixture
def with_engine(server: str, folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs an async test with an engine whose servers have the weights of `policy(0)`, as version `base`. With `way`
    lora, those are the base under the adapters."""
    marks = itertools.count()

    def runs(test: Test, way: Any = "reload") -> Any:
        async def engine_of(way: Any) -> Any:
            sent = Adapters(**dict(ADAPTERS)) if way == "lora" else way
            config = servers(server, model=folder, weights_folder=tmp_path, way=sent)
            return await connect(config, RENDERER, weights=True)

        async def whole() -> Any:
            version = f"base/{tmp_path.name}-{next(marks)}"
            base = engine = await engine_of("reload" if way == "lora" else way)
            try:
                await base.sync_weights(policy(0).state_dict(), version)
                if way == "lora":
                    engine = await engine_of("lora")
                return await test(engine)
            finally:
                for one in {base, engine}:
                    await one.close()

        return asyncio.run(whole())

    return runs
