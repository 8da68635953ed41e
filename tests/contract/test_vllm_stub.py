"""vLLM's own server application over an engine that fails as it is told: what the client makes of its error shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import EngineError, Request
from tapereel.agents.engines import EngineStopped
from tapereel.agents.engines.servers import Chat, Completions, LocalServer, RemoteEngine
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.engines.servers.server_engine import ForeignWeights
from tapereel.agents.engines.transport import Server, ServerFailed
from tapereel.agents.engines.weights import PublishFailed
from tapereel.tapes import Sampling

from ..agents.served import Heard, servers
from ..finetune.loop.lab import RENDERER
from .lab import policy, vllm_is_there
from .vllm_cpu import ENVIRONMENT, OPTIONS, PYTHON

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

SCENES = (
    "healthy",
    "breaks",
    "says_error",
    "paused_once",
    "full",
    "aborted",
    "nan",
    "minus_infinity",
    "no_logprobs",
    "mixed",
    "hole",
    "foreign",
    "silent",
    "old",
    "dies",
)
"""As in stub_app.py, which can't be imported here."""
ROUTES: dict[str, Any] = {"generate": None, "heard": None, "completions": Completions(), "chat": Chat()}
"""`heard`: as `generate`, streamed to somebody who listens."""


class StubServer(LocalServer):
    """The same flags, another program."""

    @property
    def command(self) -> list[str]:
        python, _, _, *flags = super().command
        return [python, str(Path(__file__).with_name("stub_app.py")), *flags]


@pytest.fixture(scope="module")
def stub(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    vllm_is_there()
    server = StubServer(
        folder,
        python=str(PYTHON),
        environment=ENVIRONMENT,
        options=OPTIONS,
        log=tmp_path_factory.mktemp("log") / "stub.log",
        patience=540.0,
    )
    yield asyncio.run(server.start())
    server.stop()


def using(
    url: str,
    folder: Path,
    test: Callable[[RemoteEngine], Awaitable[Any]],
    *,
    route: str = "generate",
    weights: Path | None = None,
    patience: float = 1e-6,
) -> Any:
    """What `test` gives with an engine of that server that speaks by that route."""

    async def whole() -> Any:
        config = servers(url, model=folder, patience=patience, seconds=20.0, weights_folder=weights)
        engine = await connect(config, RENDERER, weights=weights is not None)
        engine._dialect = ROUTES[route] or engine._dialect
        try:
            return await test(engine)
        finally:
            await engine.close()

    return asyncio.run(whole())


def ask(scene: str, route: str = "generate") -> Request:
    messages = [{"role": "user", "content": "abcd"}]
    return Request(
        messages=messages,
        prompt=RENDERER.prompt(messages).ids,
        seed=100 + SCENES.index(scene),
        sampling=Sampling(max_tokens=6),
        listener=Heard() if route == "heard" else None,
    )


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_sampled_is_a_completion(stub: str, folder: Path, route: str) -> None:
    found = using(stub, folder, lambda engine: engine.complete(ask("healthy", route)), route=route)
    assert list(found.ids) == [8, 9, 10, 11, 8, 9]
    assert list(found.logprobs) == [-0.5] * 6
    assert found.finish == "length"
    assert [(start, end) for _, start, end in found.spans] == [(0, 6)]
    aborted = using(stub, folder, lambda engine: engine.complete(ask("aborted", route)), route=route)
    assert (aborted.finish, len(aborted.ids)) == ("abort", 6)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("scene", "retry", "match"),
    [
        ("breaks", True, "500|broke"),
        ("says_error", True, "500|broke"),
        ("full", False, r"(503|broke).*engine\.patience"),
        ("minus_infinity", True, "-9999|unknown"),
        ("nan", True, "nan|None|-9999|500|400|JSON|broke"),
        ("no_logprobs", True, "500|broke|log-probs"),
    ],
)
def test_what_would_train_wrongly_is_an_error(
    stub: str, folder: Path, scene: str, retry: bool, match: str, route: str
) -> None:
    with pytest.raises(EngineError, match=match) as caught:
        using(stub, folder, lambda engine: engine.complete(ask(scene, route)), route=route)
    if scene != "nan":
        assert caught.value.retry is retry


@pytest.mark.parametrize("route", ["generate", "heard"])
@pytest.mark.parametrize(("scene", "match"), [("hole", "spans.*follow"), ("foreign", "published")])
def test_versions_that_cannot_be_are_refused(stub: str, folder: Path, scene: str, match: str, route: str) -> None:
    """By the route of tokens: the others of vLLM 0.32 name no versions."""
    with pytest.raises(EngineError, match=match):
        using(stub, folder, lambda engine: engine.complete(ask(scene, route)))


@pytest.mark.parametrize("route", ["generate", "heard", "chat"])
def test_a_pause_is_waited_for(stub: str, folder: Path, route: str) -> None:
    async def test(engine: RemoteEngine) -> int:
        found = await engine.complete(ask("paused_once", route))
        assert len(found.ids or ()) == 6
        return engine.stats.refused

    assert using(stub, folder, test, route=route, patience=30.0) == 1


def test_answers_of_two_versions_are_told_apart_and_one_that_names_none_is_not_guessed(
    stub: str, folder: Path, tmp_path: Path
) -> None:
    async def test(engine: RemoteEngine) -> None:
        await engine.sync_weights(policy(0).state_dict(), "run:1")
        asked = asyncio.create_task(engine.complete(ask("mixed")))
        while not engine.fleet.members[0].server.in_flight:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0)
        await engine.sync_weights(policy(0).state_dict(), "run:2")
        found = await asked
        assert found.spans == (("run:1", 0, 2), ("run:2", 2, 6))
        found = await engine.complete(ask("silent"))
        assert found.spans == (("run:2", 0, 6),), "nothing was published meanwhile"
        with pytest.raises(ForeignWeights, match="'run:2'"):
            await engine.complete(ask("old"))

    using(stub, folder, test, weights=tmp_path)


def test_weights_that_the_server_cannot_read_end_the_engine_and_leave_the_server_awake(
    stub: str, folder: Path, tmp_path: Path
) -> None:
    async def test(engine: RemoteEngine) -> None:
        with pytest.raises(PublishFailed, match="update"):
            await engine.sync_weights(policy(0).state_dict(), "broken")
        with pytest.raises(EngineError, match="publish"):
            await engine.complete(ask("healthy"))
        label = await engine.fleet.members[0].server.get("/weight_info")
        assert "unknown" in label["weight_version"]

    using(stub, folder, test, weights=tmp_path)


def test_a_server_without_the_routes_of_tokens_is_asked_by_messages(stub: str, folder: Path) -> None:
    class Gate(Server):
        """In front of it, a proxy that lets nothing but chat through."""

        async def post(self, route: str, body: Any = None, **more: Any) -> Any:
            if route in ("/inference/v1/generate", "/v1/completions"):
                raise ServerFailed(f"{route}: 403", retry=False, status=403)
            return await super().post(route, body, **more)

    async def test() -> None:
        engine = await connect(servers(model=folder), RENDERER, servers=[Gate(stub)])
        assert engine.capabilities.route == "/v1/chat/completions"
        assert engine.name.startswith("vllm-chat:")
        assert len((await engine.complete(ask("healthy"))).ids or ()) == 6
        await engine.close()

    asyncio.run(test())


def test_a_server_that_dies_under_way_is_a_lost_connection(stub: str, folder: Path) -> None:
    """The last test here: nobody is left to ask."""

    async def test(engine: RemoteEngine) -> None:
        with pytest.raises(EngineStopped, match="patience") as caught:
            await engine.complete(ask("dies"))
        assert isinstance(caught.value.__cause__, ServerFailed)
        assert caught.value.__cause__.status is None

    using(stub, folder, test)
