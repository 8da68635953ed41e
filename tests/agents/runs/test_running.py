"""Engines at work: answers keep the order of questions, a prompt too long costs its own episode only, and what a run
took is on record."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import EmbeddedEngine, Engine, Request
from tapereel.agents.engines.embedded import EngineServer
from tapereel.agents.engines.servers.connect import connect
from tapereel.cli import main
from tapereel.envs.load_named import load_named
from tapereel.finetune.loop.metrics import performance_line
from tapereel.tapes import Sampling
from tapereel.tapes.store import read_metrics

from ...cli.lab import MICRO, SCENE, learned_nothing, settings
from ...cli.world import EXAMPLE
from ...finetune.loop.lab import RENDERER, WORDS, model
from ..served import servers

pytestmark = pytest.mark.timeout(120)


def questions() -> list[Request]:
    """Of answers with very different lengths, the longest first."""
    made = []
    for k in range(12):
        messages = [{"role": "user", "content": "abcd"[k % 4] * (1 + k % 3)}]
        made.append(
            Request(
                messages=messages,
                prompt=RENDERER.prompt(messages).ids,
                seed=k,
                sampling=Sampling(max_tokens=40 - 3 * k),
                cache_key=str(k),
            )
        )
    return made


async def at_once_and_alone(engine: Engine) -> tuple[list[Any], list[Any], list[int]]:
    """The answers to all at once, to each by itself, and the order in which the first were ready."""
    ready: list[int] = []

    async def ask(k: int, request: Request) -> Any:
        found = await engine.complete(request)
        ready.append(k)
        return found.ids

    together = await asyncio.gather(*(ask(k, request) for k, request in enumerate(questions())))
    alone = [(await engine.complete(request)).ids for request in questions()]
    await engine.close()
    return together, alone, ready


@pytest.mark.ledger("F13")
def test_answers_keep_the_order_of_the_questions_whatever_is_ready_first() -> None:
    engine = EmbeddedEngine(model(), RENDERER, version="v0", slots=5)
    together, alone, ready = asyncio.run(at_once_and_alone(engine))
    assert together == alone
    assert ready != sorted(ready), "they should have been ready in another order"


@pytest.mark.ledger("F13", "X9")
def test_answers_of_several_servers_keep_it_too(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    WORDS.save_pretrained(tmp_path)

    async def test() -> tuple[list[Any], list[Any], list[int]]:
        async with EngineServer(model(), "m", slots=2).serving() as one, EngineServer(model(), "m").serving() as two:
            engine = await connect(servers(one.url, two.url, model=tmp_path), RENDERER)
            probed = [server.engine.stats.sampled for server in (one, two)]
            found = await at_once_and_alone(engine)
            sampled = [server.engine.stats.sampled for server in (one, two)]
            assert all(now > before for now, before in zip(sampled, probed, strict=True)), "both should be asked"
            return found

    together, alone, ready = asyncio.run(test())
    assert together == alone
    assert ready != sorted(ready)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    load_named(f"{EXAMPLE}:save_model")(path)
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    code = main([*words, "--json"])
    out, err = capsys.readouterr()
    assert code == 0 or ((words[0], code) == ("train", 1) and learned_nothing(out)), err
    return json.loads(out)


@pytest.mark.ledger("F17")
def test_a_prompt_too_long_ends_its_episode_is_counted_and_the_run_goes_on(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Task n shows n digits, whose prompt has n + 3 tokens; the engine holds 8, so from 5 digits on there is none."""
    small = settings("engine.capacity=8")
    scene = (*SCENE, "--model", folder)
    found = answer(capsys, "run", *scene, *small, "--set", "count=10", "--out", str(tmp_path / "run"))
    assert sorted((end["status"], end["cause"], end["episodes"]) for end in found["ends"]) == [
        ("finished", None, 4),
        ("limit", "context", 6),
    ]
    assert found["scored"] == 4, "what was never answered is not worth 0"
    trained = answer(capsys, "train", *scene, *settings(*MICRO), *small, "--out", str(tmp_path / "train"))
    assert (trained["updates"], trained["books_close"]) == (3, True)


PERF = ("perf/wall_seconds", "perf/engine_seconds", "perf/train_seconds", "perf/publish_seconds", "perf/memory_mib")


@pytest.mark.ledger("F20")
def test_timers_and_health_are_on_every_line_and_never_fall(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, "train", *SCENE, "--model", folder, *settings(*MICRO), "--out", str(tmp_path / "run"))
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["phase"] == "rl"]
    assert len(lines) == 3
    for name in PERF:
        values = [line[name] for line in lines]
        assert values == sorted(values)
        assert values[0] > 0
    assert all(line["perf/wall_seconds"] >= line["perf/train_seconds"] for line in lines)


@pytest.mark.ledger("F20")
def test_the_timers_are_told_by_name() -> None:
    line = performance_line(wall=4.0, engine=3.0, train=2.0, publish=1.0)
    assert [line[name] for name in PERF[:-1]] == [4.0, 3.0, 2.0, 1.0]
