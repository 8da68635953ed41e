"""Pictures of environments in other processes and on servers: the bytes come along, checked and bounded."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapereel.agents import EpisodeSpec, ScriptedEngine, rollout
from tapereel.envs.checks.reexec import reexec
from tapereel.envs.load_named import load_named
from tapereel.envs.remote import BadAnswer, Declared, Item, Pool, RemoteEnvironment, Service
from tapereel.tapes import CauseType, Picture, Status, Tape, Video
from tapereel.tapes.pictures import pictures_of
from tapereel.tapes.store import Store, verify

from ...agents.episode.test_seeing import Player
from ...agents.picture_worlds import Cinema, Corners, Filmed, Seen, square

IN_PROCESSES = f"{Path(__file__).with_name('camera.py')}:Camera"


async def play(env: Any, *, journal: Any = None, **fields: Any) -> Tape:
    spec = EpisodeSpec.of(1, seed=3, **fields)
    return await rollout(Player(), env, spec, engine=ScriptedEngine(["1", "2", "3"]), journal=journal)


@pytest.mark.parametrize("where", ["server", "process"])
def test_the_pictures_are_those_of_a_local_environment(where: str, tmp_path: Path):
    async def both(store: Store) -> tuple[Tape, Tape]:
        if where == "process":
            here = await play(load_named(IN_PROCESSES))
            with Pool(IN_PROCESSES, processes=1) as pool:
                return here, await play(pool, journal=store.writer)
        here = await play(Corners)
        async with Service(Corners).serving() as service:
            there = await play(lambda: RemoteEnvironment(service.url, Corners), journal=store.writer)
            assert (await reexec(there, lambda: RemoteEnvironment(service.url, Corners))).outcome == "verified"
            fork = await play(
                lambda: RemoteEnvironment(service.url, Corners), fork=there.at_turn(2), journal=store.writer
            )
            assert fork.status is Status.FINISHED
            return here, there

    with Store.create(tmp_path / "run") as store:
        here, there = asyncio.run(both(store))
        shown = [list(pictures_of(step)) for step in there.observations]
        assert [one[0].data for one in shown] == [store.media.get(one[0].media) for one in shown]
    assert there.status is Status.FINISHED
    assert [str(step) for step in here] == [str(step) for step in there]
    assert [list(pictures_of(step)) for step in here.observations] == shown
    assert verify(tmp_path / "run").broken == ()


def test_a_picture_over_the_size_limit_ends_its_episode_alone():
    class Noise(Corners):
        async def reset(self, task: int) -> Seen:
            noise = np.random.default_rng(task).integers(0, 255, (300, 300, 3), "uint8")
            return Seen(text="", picture=Picture.of(noise if task == 1 else square(0)))

    async def check() -> None:
        async with Service(Noise).serving() as service:

            def make() -> RemoteEnvironment:
                return RemoteEnvironment(service.url, Noise, largest=100_000, patience=2.0)

            tape = await play(make)
            assert (tape.status, tape.cause and tape.cause.type) == (Status.ERROR, CauseType.ENVIRONMENT)
            small = await rollout(Player(), make, 0, engine=ScriptedEngine(["0"] * 3))
            assert small.observations

    asyncio.run(check())


GOOD = Seen(text="t", picture=Picture.of(square(1)))
SENT = Item.of(GOOD)
NAME, DATA = next(iter(SENT.files.items()))


def other(data: bytes) -> str:
    import hashlib

    return f"{hashlib.sha256(data).hexdigest()}.png"


def with_file(data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """A message whose reference and hash are right, with these bytes as the picture."""
    media = f"media:{other(data)}"
    return {"text": "", "picture": {"media": media, "width": 40, "height": 30}}, {
        other(data): base64.b64encode(data).decode()
    }


CONTENT: dict[str, Any] = SENT.content
PNG = base64.b64decode(DATA)
BAD: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "no file": (CONTENT, {}),
    "bytes of another picture": (CONTENT, {NAME: base64.b64encode(Picture.of(square(2)).data or b"").decode()}),
    "no base64": (CONTENT, {NAME: "###"}),
    "another size": ({**CONTENT, "picture": {**CONTENT["picture"], "width": 41}}, {NAME: DATA}),
    "an unknown file": ({**CONTENT, "picture": {**CONTENT["picture"], "media": f"media:{'0' * 64}.png"}}, {NAME: DATA}),
    "a path": ({**CONTENT, "picture": {**CONTENT["picture"], "media": "media:../../a.png"}}, {NAME: DATA}),
    "no picture": with_file(b"<svg/>"),
    "a cut picture": with_file(PNG[: len(PNG) // 2]),
    "a damaged picture": with_file(PNG[:45] + b"\xff" + PNG[46:]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_message_with_a_wrong_picture_is_refused(name: str):
    content, files = BAD[name]
    declared = Declared.of(Corners)
    assert declared.observation("p_seen", CONTENT, SENT.received()) == GOOD
    item = Item(kind="p_seen", content=content, files=files)
    with pytest.raises(BadAnswer, match="picture"):
        declared.observation("p_seen", item.content, item.received())


def test_the_frames_of_a_video_are_sent():
    films = Item.of(Filmed(text="", film=Video.of([square(1), square(2), square(1)], fps=5)))
    seen: Any = Declared.of(Cinema).observation("p_filmed", films.content, films.received())
    assert (len(films.files or ()), seen.film.times) == (2, (0.0, 0.2, 0.4))
    assert [frame.data for frame in seen.film.frames] == [Picture.of(square(k)).data for k in (1, 2, 1)]
    bad = {**films.content, "film": {**films.content["film"], "indices": [2, 1, 3]}}
    with pytest.raises(BadAnswer, match="2, 1, 3"):
        Declared.of(Cinema).observation("p_filmed", bad, films.received())


def test_a_text_step_is_sent_as_before():
    from tapereel.tapes.steps import Text

    assert Item.of(Text(text="hi")).encoded() == '{"kind":"text","content":{"text":"hi"}}'
