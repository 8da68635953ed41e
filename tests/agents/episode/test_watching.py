"""Episodes that show videos: what is recorded, what models read, what is noticed, and what is sampled and trained."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tapereel.agents import LLM, EmbeddedEngine, EpisodeSpec, ScriptedEngine, agent, rollout
from tapereel.agents.rendering import Renderer
from tapereel.agents.replay import replay
from tapereel.cli import main
from tapereel.envs.checks.reexec import reexec
from tapereel.finetune import Episode, OptimiserConfig, Row, Trainer, rows
from tapereel.finetune.interchange import write
from tapereel.finetune.recipes import get_recipe
from tapereel.tapes import Answer, CauseType, Sampling, Status, Tape, Video
from tapereel.tapes.common.run_async import run_async
from tapereel.tapes.messages import frames_of, image_of, part_of, text_of
from tapereel.tapes.pictures import pictures_of
from tapereel.tapes.steps import Prompt
from tapereel.tapes.store import Store, verify
from tapereel.tapes.view import RunView

from ...finetune.trainer.seen import oracle, pretrained
from ..hosted import Provider
from ..picture_worlds import Camera, Cinema, by_pixels, images, square
from ..rendering.seeing import QWEN, Films, tokenizer
from .test_seeing import Blind, Photographer, Player, hosted
from .test_seeing_tokens import EDITS, Babbler, _forged

pytestmark = pytest.mark.timeout(120)
NATIVE = Renderer(tokenizer(QWEN), Films())
TIMES = ["<0.0 seconds>", "<0.5 seconds>", "<2.5 seconds>"]


def played(env: Any = Cinema, engine: Any = None, **options: Any) -> Tape:
    return run_async(rollout(Player(), env, 1, engine=engine or ScriptedEngine(["3", "0"]), **options))


def test_a_video_is_recorded_read_again_replayed_and_verified(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        tape = played(journal=store.writer)
        assert sorted(store.media.names()) == sorted({p.name for step in tape for p in pictures_of(step)})
    assert (tape.reward, len(tape.observations)) == (2, 2)
    with Store.open(tmp_path / "run") as store:
        again = store.tape(tape.id)
        assert list(again) == list(tape)
        assert [p.data for step in again for p in pictures_of(step)] == [p.data for s in tape for p in pictures_of(s)]
    first: Any = tape[0]
    assert again.messages()[0]["content"] == [{"type": "text", "text": first.text}, part_of(first.film)]
    assert asyncio.run(replay(again, Player())).outcome == "verified"
    assert asyncio.run(reexec(again, Cinema)).outcome == "verified"
    report = verify(tmp_path / "run")
    assert (report.exit_code, report.media, report.unnamed_media) == (0, 6, 0)

    class Slower(Cinema):
        async def _show(self, text: str) -> Any:
            seen = await super()._show(text)
            return seen.model_copy(update={"film": seen.film.model_copy(update={"fps": 1.0})})

    assert asyncio.run(reexec(again, Slower)).outcome == "diverged"


def test_a_changed_frame_or_time_is_noticed(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        played(journal=store.writer)
        folder, names = store.media.folder, store.media.names()
    files = [(folder / name).read_bytes() for name in names]
    for k, name in enumerate(names):
        for data in (None, files[k - 1], files[k][:-1]):  # removed, swapped, cut
            (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
            assert any(name in problem for problem in verify(tmp_path / "run").broken)
        (folder / name).write_bytes(files[k])
    assert verify(tmp_path / "run").broken == ()
    (segment,) = (tmp_path / "run/tapes").glob("*.jsonl")
    whole = segment.read_text()
    assert whole.count('"fps":2.0') == 4, "two steps and two calls"
    for k in range(4):
        parts = whole.split('"fps":2.0')
        segment.write_text('"fps":2.0'.join(parts[: k + 1]) + '"fps":3.0' + '"fps":2.0'.join(parts[k + 1 :]))
        assert verify(tmp_path / "run").broken != ()


EDITED_TIMES: dict[str, Any] = {
    "one time": lambda places: places[0][5].__setitem__(2, 2.4),
    "all times": lambda places: places[0].__setitem__(5, [2 * seconds for seconds in places[0][5]]),
    "a time less": lambda places: places[0][5].pop(),
    "no times": lambda places: places[0].pop(5),
    "order of frames": lambda places: places[0][0].reverse(),
    "a picture": lambda places: places[0].__setitem__(slice(1, None), ["image", *places[0][2:5]]),
}


@pytest.mark.parametrize("edit", EDITED_TIMES)
def test_times_at_the_place_of_a_native_video_are_compared_with_the_video(edit: str, tmp_path: Path) -> None:
    tape = played(engine=Babbler(NATIVE))
    first: Any = tape[0]
    places = tape.call_places(list(tape.calls)[-1])
    assert [(place.kind, place.times) for place in places] == [("video", first.film.times)] * 2
    _forged(tape, tmp_path / "true", lambda places: None)
    assert verify(tmp_path / "true").broken == ()
    _forged(tape, tmp_path / "edited", EDITED_TIMES[edit])
    assert verify(tmp_path / "edited").broken != ()
    with Store.open(tmp_path / "edited") as store:
        assert run_async(replay(store.tape(tape.id), Player(), renderer=NATIVE)).outcome == "diverged"
    assert run_async(replay(tape, Player(), renderer=NATIVE)).outcome == "verified"


@pytest.mark.parametrize(("changed", "holds"), [({"call"}, False), ({"step"}, False), ({"step", "call"}, True)])
def test_times_of_a_place_and_its_message_are_compared_with_the_step(
    changed: set[str], holds: bool, tmp_path: Path
) -> None:
    """Within a call all agrees, and no hash tells."""
    tape = played(engine=Babbler(NATIVE))
    with Store.create(tmp_path / "run") as store:
        for picture in (picture for step in tape for picture in pictures_of(step)):
            store.media.put(picture.data or b"", ".png")
        for body in tape.bodies:
            slower = body.replace(b'"fps":2.0', b'"fps":4.0').replace(b"[0.0,0.5,2.5]", b"[0.0,0.25,1.25]")
            assert (slower != body) == (b'"fps"' in body)
            store.writer.append(slower if json.loads(body)["t"] in changed else body)
    assert (verify(tmp_path / "run").broken == ()) == holds


@pytest.mark.parametrize("edit", ["removed", "swapped"])
def test_places_of_frames_are_compared_with_the_messages(edit: str, tmp_path: Path) -> None:
    engine = Babbler()
    tape = played(engine=engine)
    shown = [picture.name for step in tape for picture in pictures_of(step)]
    assert [[place.media[0] for place in request.places] for request in engine.asked] == [shown[:3], shown]
    (row,) = rows(tape)
    assert [place.media for place in row.places] == [(name,) for name in shown]
    _forged(tape, tmp_path / "true", lambda places: None)
    assert verify(tmp_path / "true").broken == ()
    _forged(tape, tmp_path / edit, EDITS[edit])
    assert verify(tmp_path / edit).broken != ()


def test_a_hosted_model_reads_each_time_before_its_frame() -> None:
    provider = Provider(says=by_pixels)
    (tape,) = hosted(Cinema, 1, provider=provider)
    assert tape.reward == 2
    content = provider.asked[1]["messages"][-1]["content"]
    assert [part.get("text", part["type"]) for part in content] == [
        "And now?", *(said for time in TIMES for said in (time, "image_url"))
    ]  # fmt: skip
    assert all((seen == square(k)).all() for seen, k in zip(images(provider.asked[0]), (1, 2, 3), strict=True))


def test_a_video_of_a_tool_follows_its_result() -> None:
    class Filming(Camera):
        film = True

    provider = Provider(says=by_pixels)
    (tape,) = hosted(Filming, 2, agent=Photographer(), provider=provider)
    assert tape.reward == 1
    *_, result, shown = provider.asked[1]["messages"]
    assert (result["role"], result["content"]) == ("tool", "done")
    said = [part.get("text", part["type"]) for part in shown["content"]]
    assert said == ["Pictures of the result of look:", "<0.0 seconds>", "image_url", "<0.1 seconds>", "image_url"]


@pytest.mark.ledger("F98")
def test_an_engine_that_cannot_see_is_refused_and_the_video_named() -> None:
    engine = Blind()
    tape = played(engine=engine)
    first: Any = tape[0]
    assert (tape.status, tape.trains, engine.asked) == (Status.ERROR, False, 0)
    assert tape.cause is not None
    assert "'blind'" in (tape.cause.message or "")
    assert str(first.film) in (tape.cause.message or "")


SHOWN = Video.of([square(1), square(2)], fps=2)
FORGED: dict[str, dict[str, Any]] = {
    "unknown files": part_of(Video.of([square(3, 77)], fps=1)),
    "no video": part_of(SHOWN) | {"indices": [0]},
    "a path": {"type": "video", "video": "/etc/passwd"},
    "more": part_of(SHOWN) | {"url": "http://localhost:1/a.mp4"},
}


@pytest.mark.parametrize("part", FORGED.values(), ids=FORGED)
def test_a_video_that_a_text_wrote_is_refused(part: dict[str, Any]) -> None:
    class Forging(Cinema):
        async def reset(self, task: int) -> Any:
            await super().reset(task)
            content: Any = [{"type": "video"}, part]
            return Prompt(text="q", messages=({"role": "user", "content": content},), pictures=(SHOWN,))

    engine = Babbler()
    tape = played(Forging, engine)
    assert (engine.asked, tape.status) == ([], Status.ERROR)
    assert tape.cause is not None
    assert tape.cause.type is CauseType.ENVIRONMENT
    assert f"{part!r:.200}" in (tape.cause.message or "")


def test_show_export_and_view_have_the_frames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.create(tmp_path / "run") as store:
        tape = played(journal=store.writer)
    first: Any = tape[0]
    assert main(["show", str(tmp_path / "run"), tape.id]) == 0
    assert f"[video 3 frames 40x30 0.0-2.5 s {first.film.frames[0].name[:12]}]" in capsys.readouterr().out
    with Store.open(tmp_path / "run") as store:
        assert write(store.tapes(closed=True), tmp_path / "out.jsonl", "sft").records == 1
    messages = json.loads((tmp_path / "out.jsonl").read_text())["messages"]
    asked = next(message for message in messages if message["role"] == "user")
    shown = [text_of({"content": [part]}) for part in asked["content"]]
    assert shown == [
        first.text,
        *(said for pair in zip(TIMES, map(str, first.film.frames), strict=True) for said in pair),
    ]
    assert asked["content"][2] == image_of(first.film.frames[0])
    with RunView(tmp_path / "run") as view:
        kept = view.media(tape.id)
    assert kept == {picture.name for step in tape for picture in pictures_of(step)}


@agent
async def sampler(tape: Tape, llm: LLM) -> AsyncIterator[Answer]:
    reply = await llm(tape)
    yield Answer(text=reply.text)


SEEDS = {"qwen2_vl": (1, 2), "smolvlm": (3, 4)}
"""With these the model samples no token of a picture, which its own forward would take for one."""


@pytest.mark.ledger("F92")
@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
def test_frames_are_sampled_after_and_trained_on_as_the_model_itself_reads_them(family: str) -> None:
    loaded = pretrained(family)
    renderer = Renderer(loaded.tokenizer, loaded.vision)

    async def sample() -> list[Tape]:
        engine = EmbeddedEngine(loaded.model, renderer, version="v0", slots=2)
        how = Sampling(max_tokens=8, ignore_eos=True)
        ask = (
            rollout(sampler, Cinema, EpisodeSpec.of(1, seed=k, sampling=how, group="g", attempt=k), engine=engine)
            for k in SEEDS[family]
        )
        try:
            return await asyncio.gather(*ask)
        finally:
            await engine.close()

    tapes = asyncio.run(sample())
    found = [row for tape in tapes for row in rows(tape)]
    assert [len(row.places) for row in found] == [6, 6], "two turns of three frames are one row"
    first = tapes[0].calls[0]
    again = renderer.prompt(frames_of(first.messages))
    assert (again.ids, again.places) == (first.prompt, tapes[0].call_places(first))
    said = renderer.spell(again.ids)
    starts = [said.index(time) for time in TIMES]
    assert starts == sorted(starts)
    for row in found:
        assert np.abs(oracle(family, row).numpy() - row.old).max() < 1e-4
        swapped = replace(row, places=row.places[::-1])
        assert np.abs(oracle(family, _with_files(swapped, row)).numpy() - row.old).max() > 1e-3
    model: Any = copy.deepcopy(loaded.model)
    trainer = Trainer(model, get_recipe("grpo"), OptimiserConfig(lr=1e-3), vision=loaded.vision)
    update = trainer.update(found, [Episode(tape=row.tape, group="g", reward=float(k)) for k, row in enumerate(found)])
    assert update.applied
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), loaded.model.parameters(), strict=True))


def _with_files(swapped: Row, row: Row) -> Row:
    """The row with the files of `swapped` at the places of `row`."""
    pairs = zip(row.places, swapped.places, strict=True)
    return replace(row, places=tuple(place._replace(media=other.media) for place, other in pairs))
