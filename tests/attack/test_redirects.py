"""Model servers that begin to answer 302 under `train`: nothing is sent to the other address, and nothing is lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tapereel.agents.engines.embedded import EngineServer, load_pretrained
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.finetune import TrainConfig
from tapereel.finetune.run import train
from tapereel.tapes import TapereelError
from tapereel.tapes.store import Store, verify

from ..finetune.loop.hosting import in_thread
from ..finetune.loop.lab import WORDS, EverySecond, Speaker, assert_books_close

pytestmark = pytest.mark.timeout(240)
UPDATES = 3


class Moves(EngineServer):
    """Redirects each request after `well` good ones, to the same route elsewhere. None: it never does."""

    well: int | None = None
    elsewhere = ""
    heard: int = 0

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.heard += 1
        if self.well is not None and self.heard > self.well:
            raise web.HTTPFound(f"{self.elsewhere}{request.path_qs}")
        return await super()._guard(request, handler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(WORDS, "micro").save_pretrained(path)
    WORDS.save_pretrained(path)
    return path


@pytest.fixture
def servers(folder: Path) -> Iterator[list[Moves]]:
    """Two servers of the run, and the one to which a redirect leads."""
    with ExitStack() as stack:
        yield [stack.enter_context(in_thread(Moves(load_pretrained(folder).model, "micro").serving)) for _ in range(3)]


def config(folder: Path, servers: list[Moves]) -> TrainConfig:
    loop: dict[str, Any] = {"updates": UPDATES, "groups": 4, "group_size": 4, "max_lag": 1, "checkpoint_every": 1}
    loop["keep_checkpoints"] = 3
    loop |= {"sampling": {"max_tokens": 8}}
    engine = {"kind": "vllm", "model": str(folder), "urls": [server.url for server in servers]}
    names = {"agent": f"{Speaker.__module__}:Speaker", "env": f"{EverySecond.__module__}:EverySecond"}
    return TrainConfig.model_validate(
        {"tasks": ["ab", "cd"], "evaluation": {"fraction": 0}, "engine": engine, "loop": loop, **names}
    )


def check_whole(run: Path) -> None:
    assert_books_close(run)
    assert verify(run).verdict == "holds"
    with Store.open(run) as store:
        assert len({stored.record.update for stored in store.run_records("use")}) == UPDATES


@pytest.mark.parametrize("well", [12, 60])
def test_a_server_that_redirects_is_left_out_and_named(
    folder: Path, servers: list[Moves], tmp_path: Path, well: int, caplog: pytest.LogCaptureFixture
) -> None:
    first, moved, other = servers
    moved.well, moved.elsewhere = well, other.url
    with caplog.at_level(logging.WARNING):
        summary = train(config(folder, [first, moved]), tmp_path / "run")
    assert (summary.updates, summary.books_close, other.heard) == (UPDATES, True, 0)
    assert moved.heard > well
    said = [record.getMessage() for record in caplog.records if moved.url in record.getMessage()]
    assert any("redirects to" in line and other.url in line for line in said), caplog.messages
    check_whole(tmp_path / "run")


def test_a_run_whose_only_server_redirects_ends_with_its_name_and_is_resumed(
    folder: Path, servers: list[Moves], tmp_path: Path
) -> None:
    moved, well, other = servers
    moved.well, moved.elsewhere = 60, other.url
    with pytest.raises(TapereelError, match=f"{moved.url}.* redirects to '{other.url}"):
        train(config(folder, [moved]), tmp_path / "run")
    with Store.open(tmp_path / "run") as store:
        before = {one.id for one in store.summaries()}
    assert before
    summary = train(config(folder, [well]), tmp_path / "run", resume=True)
    assert (summary.updates, summary.books_close, other.heard) == (UPDATES, True, 0)
    with Store.open(tmp_path / "run") as store:
        assert before <= {one.id for one in store.summaries()}
    check_whole(tmp_path / "run")
