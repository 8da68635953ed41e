"""Episodes that show pictures: what a model gets, what is recorded, and what is refused before a token is sampled."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import LLM, Agent, EngineError, EpisodeSpec, Request, ScriptedEngine, rollout
from tapereel.agents.engines.servers import LiteLLMEngine
from tapereel.agents.replay import replay
from tapereel.envs import Environment, Outcome
from tapereel.envs.checks.reexec import reexec
from tapereel.finetune import rows
from tapereel.tapes import Answer, CauseType, NotATape, Picture, Status, Tape, ToolCalls
from tapereel.tapes.common.run_async import run_async
from tapereel.tapes.pictures import pictures_of
from tapereel.tapes.steps import Prompt
from tapereel.tapes.store import Store, verify

from ...finetune.loop.lab import RENDERER
from ..hosted import Provider
from ..picture_worlds import TURNS, Camera, Corners, Gallery, Several, by_pixels, images, square

pytestmark = pytest.mark.timeout(120)


class Player(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        reply = await llm(tape, system="Answer with one digit.")
        yield Answer(text=reply.text)


class Photographer(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        reply = await llm(tape, tools=tape[0].tools)
        yield ToolCalls(calls=reply.tool_calls) if reply.tool_calls else Answer(text=reply.text)


def hosted(
    env: Any,
    *tasks: int,
    agent: Agent | None = None,
    provider: Provider | None = None,
    journal: Any = None,
    **fields: Any,
) -> list[Tape]:
    """Episodes with a model behind a real server, which answers by the pixels that it got."""
    provider = provider or Provider(says=by_pixels)

    async def play(url: str) -> list[Tape]:
        engine = LiteLLMEngine("openai/local", base_url=url, backoff=0.001)
        try:
            specs = [EpisodeSpec.of(task, seed=task, **fields) for task in tasks]
            return [await rollout(agent or Player(), env, spec, engine=engine, journal=journal) for spec in specs]
        finally:
            await engine.close()

    os.environ.setdefault("OPENAI_API_KEY", "none")
    with provider.up():
        return asyncio.run(play(provider.url))


def played(env: Any, engine: Any, agent: Agent | None = None, **options: Any) -> Tape:
    return run_async(rollout(agent or Player(), env, 1, engine=engine, **options))


@pytest.mark.parametrize("env", [Corners, Gallery])
@pytest.mark.parametrize("recorded", [True, False])
def test_reward_is_earned_where_the_pixels_arrive(env: type[Environment[Any]], recorded: bool, tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        tapes = hosted(env, 0, 1, 2, 3, journal=store.writer if recorded else None)
    assert [tape.reward for tape in tapes] == [TURNS if env is Corners else 1] * 4
    blind = hosted(env, 0, 1, 2, 3, provider=Provider(says=lambda body: {"content": "1"}))
    assert sum(tape.reward or 0 for tape in blind) == sum(tape.reward or 0 for tape in tapes) / 4


@pytest.mark.ledger("T26")
def test_every_picture_of_a_conversation_is_sent_as_itself():
    """Several in one message, over several turns: the k-th picture of a prompt is the k-th that was shown."""
    provider = Provider(says=by_pixels)
    (tape,) = hosted(Corners, 2, provider=provider)
    shown = [picture for step in tape.observations for picture in pictures_of(step)]
    assert [len(images(body)) for body in provider.asked] == [1, 2, 3]
    last = provider.asked[-1]
    assert all((image == square(k)).all() for image, k in zip(images(last), (2, 3, 0), strict=True))
    parts = [part for m in last["messages"] if isinstance(m["content"], list) for part in m["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert [base64.b64decode(url.partition(",")[2]) for url in urls] == [picture.data for picture in shown]
    both = Provider(says=by_pixels)
    hosted(Gallery, 3, provider=both)
    assert [int(image[0, 0, 1]) for image in images(both.asked[0])] == [10, 20]
    content = both.asked[0]["messages"][-1]["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "image_url", "text"]


def test_pictures_of_a_tool_follow_its_result():
    provider = Provider(says=by_pixels)
    tapes = hosted(Camera, 0, 3, agent=Photographer(), provider=provider)
    assert [tape.reward for tape in tapes] == [1, 1]
    *_, result, pictures = provider.asked[1]["messages"]
    assert (result["role"], result["content"], pictures["role"]) == ("tool", "done", "user")
    recorded = tapes[0].calls[-1].messages[-1]
    assert recorded["role"] == "tool"
    assert [part["type"] for part in recorded["content"]] == ["text", "image"]


def test_a_call_records_the_hash_and_never_the_bytes(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        (tape,) = hosted(Corners, 0, journal=store.writer)
    (picture,) = pictures_of(tape[0])
    sent = tape.calls[0].messages[-1]["content"]
    assert sent == [
        {"type": "text", "text": "Which quarter is red, 0 to 3?"},
        {"type": "image", "media": picture.name, "width": 40, "height": 30},
    ]
    assert picture.data is not None
    assert not any(base64.b64encode(picture.data)[:30] in body for body in tape.bodies)
    with Store.open(tmp_path / "run") as store:
        again = store.tape(tape.id)
        assert list(again) == list(tape)
        assert store.media.get(picture.media) == picture.data
        assert again.messages()[0]["content"] == sent


# Files


def test_a_thousand_episodes_that_show_ten_frames_leave_ten_files(tmp_path: Path):
    class Still(Environment[Answer]):
        frames = [Picture.of(square(k % 4, k)) for k in range(10)]  # noqa: RUF012

        async def reset(self, task: int) -> Several:
            return Several(before="", pictures=tuple(self.frames[(task + k) % 10] for k in range(10)))

        async def step(self, action: Answer) -> Outcome:
            return Outcome(reward=1.0, terminated=True)

    async def play(store: Store) -> None:
        engine = ScriptedEngine(lambda request: "1")
        for k in range(0, 1000, 50):
            await asyncio.gather(
                *(rollout(Player(), Still, k + i, engine=engine, journal=store.writer) for i in range(50))
            )

    with Store.create(tmp_path / "run", durability="os") as store:
        asyncio.run(play(store))
        assert len(store.summaries()) == 1000
        assert len(store.media.names()) == 10
        assert sum(file.stat().st_size for file in store.media.folder.iterdir()) < 5_000
    report = verify(tmp_path / "run")
    assert (report.media, report.unnamed_media) == (10, 0)


def test_a_picture_file_that_was_changed_removed_or_swapped_is_noticed(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        hosted(Corners, 0, 1, journal=store.writer)
        folder, names = store.media.folder, store.media.names()
    assert len(names) == 4
    files = {name: (folder / name).read_bytes() for name in names}
    noticed, tries = 0, 0
    every = int(os.environ.get("ATTACK_TRIES", "3"))
    for k in range(every):
        for n, name in enumerate(names):
            whole = files[name]
            at = (k * 7919 + n) % len(whole)
            changes = [
                whole[:at] + bytes([whole[at] ^ (1 << k % 8)]) + whole[at + 1 :],
                whole[:at],
                whole + b"\\0",
                None,
                files[names[(n + 1 + k) % len(names)]] if (1 + k) % len(names) else b"",
            ]
            data = changes[(k + n) % len(changes)]
            if data is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(data)
            tries += 1
            noticed += any(name in problem for problem in verify(tmp_path / "run").broken)
            (folder / name).write_bytes(whole)
    assert noticed == tries
    assert verify(tmp_path / "run").broken == ()


def test_the_file_is_durable_before_the_record_that_names_it(tmp_path: Path):
    """A record is never appended whose file isn't there, and the event loop never waits for the disk."""
    import threading

    with Store.create(tmp_path / "run") as store:
        writer, threads, missing = store.writer, set(), []
        append, put = writer.append, writer.media.put

        def checked(body: bytes) -> None:
            named = json.loads(body).get("media", ())
            missing.extend(name for name in named if name not in store.media.names())
            append(body)

        def noted(data: bytes, suffix: str = "") -> Any:
            threads.add(threading.current_thread() is threading.main_thread())
            return put(data, suffix)

        writer.append, writer.media.put = checked, noted  # type: ignore[method-assign]
        tape = played(Corners, ScriptedEngine(["1", "2", "3"]), journal=writer)
    assert tape.status is Status.FINISHED
    assert (missing, threads) == ([], {False})


# Refused before the first token


class Blind(ScriptedEngine):
    name = "blind"

    def __init__(self) -> None:
        super().__init__(lambda request: "1")
        self.can -= {"pictures"}
        self.asked = 0

    async def complete(self, request: Request) -> Any:
        self.asked += 1
        return await super().complete(request)


@pytest.mark.ledger("F98")
def test_a_picture_for_an_engine_that_cannot_see_ends_the_episode_and_names_both():
    engine = Blind()
    tape = played(Corners, engine)
    assert (tape.status, tape.trains, engine.asked, tape.calls) == (Status.ERROR, False, 0, [])
    assert tape.cause is not None
    assert tape.cause.type is CauseType.ENVIRONMENT
    (picture,) = pictures_of(tape[0])
    assert "'blind'" in (tape.cause.message or "")
    assert str(picture) in (tape.cause.message or "")
    assert asyncio.run(replay(tape, Player())).outcome == "verified"
    with_tokens = played(Corners, ScriptedEngine(["1"], renderer=RENDERER))
    assert "'scripted'" in (with_tokens.cause.message or "" if with_tokens.cause else "")


def test_an_agent_that_reads_no_picture_may_ask_an_engine_that_cannot_see():
    class Told(Agent):
        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
            reply = await llm(tape, messages=[{"role": "user", "content": "Guess a corner."}])
            yield Answer(text=reply.text)

    tape = played(Corners, Blind(), Told())
    assert tape.status is Status.FINISHED


FORGED: dict[str, Any] = {
    "unknown": [{"type": "image", "media": "0" * 64 + ".png"}],
    "path": [{"type": "image", "media": "../../../etc/passwd"}],
    "no name": [{"type": "image"}],
    "url": [{"type": "image_url", "image_url": {"url": "http://localhost:1/a.png"}}],
    "data": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
}


@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED)
def test_a_task_of_text_makes_no_picture_be_sent(content: list[Any]):
    class Forging(Corners):
        async def reset(self, task: int) -> Any:
            await super().reset(task)
            return Prompt(text="q", messages=({"role": "user", "content": content},))

    provider = Provider(says=by_pixels)
    (tape,) = hosted(Forging, 1, provider=provider)
    assert (tape.status, provider.asked) == (Status.ERROR, [])
    assert tape.cause is not None
    assert tape.cause.type is CauseType.MODEL


def test_a_tape_with_pictures_is_not_trained_on_as_text():
    (tape,) = hosted(Corners, 1)
    with pytest.raises(NotATape, match="pictures"):
        rows(tape, renderer=RENDERER)
    with pytest.raises(NotATape, match="`Renderer`"):
        rows(tape)


def test_a_picture_without_its_bytes_is_refused(tmp_path: Path):
    """A value from one run, shown in another, has its file copied. Where the file is gone, the environment is at fault,
    and no record names a missing file."""
    with Store.create(tmp_path / "a") as store:
        (tape,) = hosted(Corners, 1, journal=store.writer)
    with Store.open(tmp_path / "a") as store:
        shown = store.tape(tape.id)[0]

    class Echo(Corners):
        async def reset(self, task: int) -> Any:
            return shown

    with Store.create(tmp_path / "c") as store:
        third = played(Echo, ScriptedEngine(["1"] * TURNS), journal=store.writer)
        assert third[0] == shown
        assert store.media.get(shown.picture.media) == shown.picture.data
    assert verify(tmp_path / "c").exit_code == 0
    (tmp_path / "a/tapes/media" / shown.picture.name).unlink()
    with Store.create(tmp_path / "b") as store:
        second = played(Echo, ScriptedEngine(["1"]), journal=store.writer)
    assert second.cause is not None
    assert second.cause.type is CauseType.ENVIRONMENT
    assert "Picture.of" in (second.cause.message or "")
    assert verify(tmp_path / "b").broken == ()


# Again


def test_replay_compares_the_hashes_and_asks_for_no_pixels(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        (tape,) = hosted(Corners, 1, journal=store.writer)
    with Store.open(tmp_path / "run") as store:
        again = store.tape(tape.id)
    assert asyncio.run(replay(again, Player())).outcome == "verified"
    assert asyncio.run(reexec(again, Corners)).outcome == "verified"

    class Darker(Corners):
        async def _show(self, text: str) -> Any:
            seen = await super()._show(text)
            return seen.model_copy(update={"picture": await Picture.read(square(self.corner, shade=1))})

    found = asyncio.run(reexec(again, Darker))
    assert found.outcome == "diverged"
    assert "picture" in json.dumps(found.model_dump(mode="json"))


def test_a_fork_sees_what_its_parent_saw(tmp_path: Path):
    """From the store, where the pictures of the prefix are files."""
    with Store.create(tmp_path / "run") as store:
        (tape,) = hosted(Corners, 1, journal=store.writer)
    provider = Provider(says=by_pixels)
    with Store.open(tmp_path / "run", write=True) as store:
        prefix = store.tape(tape.id).at_turn(2)
        (fork,) = hosted(Corners, 1, provider=provider, fork=prefix, journal=store.writer)
    assert fork.reward == 1
    assert [len(images(body)) for body in provider.asked] == [3]
    assert verify(tmp_path / "run").broken == ()


def test_a_request_that_names_pictures_without_bytes_is_an_error():
    engine = LiteLLMEngine("openai/local", base_url="http://127.0.0.1:1/v1")
    from tapereel.tapes import Sampling

    message = {"role": "user", "content": [{"type": "image", "media": "0" * 64 + ".png"}]}
    with pytest.raises(EngineError, match=r"Request\.picture"):
        asyncio.run(engine.complete(Request(messages=[message], prompt=None, sampling=Sampling(), seed=1)))
    asyncio.run(engine.close())


def test_a_conversation_with_pictures_is_exported_with_the_names_of_the_files(tmp_path: Path):
    from tapereel.finetune.interchange.formats import write
    from tapereel.tapes.errors import UsageError

    with Store.create(tmp_path / "run") as store:
        (tape,) = hosted(Corners, 1, journal=store.writer)
    with Store.open(tmp_path / "run") as store:
        assert write(store.tapes(closed=True), tmp_path / "out.jsonl", "sft").records == 1
        with pytest.raises(UsageError, match=r"out\.parquet.*images=True"):
            write(store.tapes(closed=True), tmp_path / "out.parquet", "sft")
    messages = json.loads((tmp_path / "out.jsonl").read_text())["messages"]
    shown = [part for message in messages for part in message["content"] if isinstance(part, dict) and "media" in part]
    assert [part["media"] for part in shown] == [
        picture.name for step in tape.observations for picture in pictures_of(step)
    ]
    assert not (tmp_path / "out.parquet").exists()


def test_show_prints_a_picture_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from tapereel.cli import main

    with Store.create(tmp_path / "run") as store:
        tape = played(Corners, ScriptedEngine(["1", "2", "3"]), journal=store.writer)
    (picture,) = pictures_of(tape[0])
    assert main(["show", str(tmp_path / "run"), tape.id]) == 0
    assert str(picture) in capsys.readouterr().out


def test_the_viewer_shows_the_pictures_of_a_tape_alone(tmp_path: Path):
    from tapereel.tapes.view import RunView

    with Store.create(tmp_path / "run") as store:
        tapes = [
            run_async(rollout(Player(), Gallery, k, engine=ScriptedEngine(["1"]), journal=store.writer)) for k in (0, 1)
        ]
    with RunView(tmp_path / "run") as view:
        assert view.media(tapes[0].id) == {picture.name for picture in pictures_of(tapes[0][0])}
