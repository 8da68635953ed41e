"""Episodes with pictures and token ids: what a tape and its rows hold, and what notices another picture."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tapereel.agents import LLM, Agent, Capability, Completion, EpisodeSpec, Limits, Request, ScriptedEngine, rollout
from tapereel.agents.rendering import Renderer
from tapereel.agents.replay import replay
from tapereel.agents.setup import RendererConfig
from tapereel.agents.vision import save_tiny_vision
from tapereel.envs import Outcome
from tapereel.finetune import rows
from tapereel.tapes import Answer, BadPicture, CauseType, NotATape, Picture, Status, Tape
from tapereel.tapes.arrays import floats, ints
from tapereel.tapes.common.run_async import run_async
from tapereel.tapes.pictures import pictures_of
from tapereel.tapes.steps import Prompt
from tapereel.tapes.store import Store, verify

from ...toy_envs import Paid
from ..picture_worlds import Corners, Gallery, Several, square
from ..rendering.seeing import QWEN, SPECIAL, Pads, tokenizer

pytestmark = pytest.mark.timeout(120)
RENDERER = Renderer(tokenizer(QWEN), Pads())
MARKER = SPECIAL.index(Pads.marker)


class Babbler:
    """Samples random ids, markers of pictures among them, and keeps what it was asked."""

    name, context = "babbler", None
    can: frozenset[Capability] = frozenset({"pictures"})

    def __init__(self, renderer: Renderer = RENDERER) -> None:
        self.renderer = renderer
        self.asked: list[Request] = []

    async def complete(self, request: Request) -> Completion:
        self.asked.append(request)
        random = Random(request.seed)
        ids = ints([*(random.choice([MARKER, 20, 21, 22, 5]) for _ in range(6)), self.renderer.end_ids[0]])
        return Completion(
            text=self.renderer.decode(ids),
            ids=ids,
            logprobs=floats([-1.0] * len(ids)),
            spans=(("v:0", 0, len(ids)),),
        )

    def forget(self, cache_key: str) -> None: ...

    async def close(self) -> None: ...


class Player(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        reply = await llm(tape, system="Answer with one digit.")
        yield Answer(text=reply.text)


def played(env: Any = Corners, engine: Any = None, task: int = 1, *, journal: Any = None, **fields: Any) -> Tape:
    spec = EpisodeSpec.of(task, **fields)
    return run_async(rollout(Player(), env, spec, engine=engine or Babbler(), journal=journal))


def test_engine_tape_and_row_agree_on_ids_and_places() -> None:
    """Three turns with a picture each are one row, whatever was sampled between them."""
    engine = Babbler()
    tape = played(engine=engine)
    shown = [picture.name for step in tape for picture in pictures_of(step)]
    assert len(shown) == 3
    for k, (call, request) in enumerate(zip(tape.calls, engine.asked, strict=True)):
        assert (call.prompt, tape.call_places(call)) == (request.prompt, request.places)
        assert [place.media for place in call.places] == [(shown[k],)]
        assert [place.media[0] for place in request.places] == shown[: k + 1]
        assert call.usage.prompt_tokens == len(request.prompt or ())
    (row,) = rows(tape)
    last = tape.calls[-1]
    assert row.input_ids.tolist() == [*last.prompt, *(last.completion or ())]
    assert row.places == engine.asked[-1].places
    assert MARKER in row.input_ids[row.own]
    assert row.file is not None
    assert [row.file(name) for name in shown] == [p.data for step in tape for p in pictures_of(step)]
    assert row.where(np.arange(3)).places == row.places


def test_a_tape_that_is_read_again_has_the_same_rows_and_files(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        tape = played(journal=store.writer)
    with Store.open(tmp_path / "run") as store:
        again = store.tape(tape.id)
        (row,), (then,) = rows(again), rows(tape)
        assert (row.input_ids.tolist(), row.places) == (then.input_ids.tolist(), then.places)
        assert row.file is not None
        assert then.file is not None
        for place in row.places:
            assert row.file(place.media[0]) == then.file(place.media[0])
        with pytest.raises(BadPicture, match=r"\.\./\.\./etc/passwd"):
            row.file("../../etc/passwd")
    assert Tape.model_validate_json(tape.model_dump_json()).call_places(tape.calls[-1]) == then.places
    assert verify(tmp_path / "run").exit_code == 0


def test_a_row_whose_files_are_nowhere_says_so() -> None:
    tape = Tape.model_validate_json(played().model_dump_json())
    (row,) = rows(tape)
    assert row.file is not None
    with pytest.raises(BadPicture, match=rf"{row.places[0].media[0]}.*store"):
        row.file(row.places[0].media[0])


@pytest.mark.parametrize("scripted", [True, False])
def test_authored_text_has_its_pictures_by_the_renderer(scripted: bool) -> None:
    """Without a renderer while it was recorded, the one of the trained model makes the places."""
    tape = played(engine=ScriptedEngine(["1", "2", "3"], renderer=RENDERER if scripted else None))
    found = rows(tape, renderer=RENDERER)
    assert sum(len(row.own) for row in found) == 6
    places = [place for row in found for place in row.places]
    assert len(places) == 3
    for row in found:
        for place in row.places:
            assert set(row.input_ids[place.offset : place.end].tolist()) == {MARKER}
        assert row.file is not None
    with pytest.raises(NotATape, match="pictures"):
        rows(played(engine=ScriptedEngine(["1", "2", "3"])), renderer=Renderer(tokenizer(QWEN)))


@pytest.mark.parametrize("tokens", [True, False])
def test_a_row_ends_where_another_picture_stands_at_the_same_ids(tokens: bool) -> None:
    a, b = (Picture.of(square(k)) for k in (0, 1))

    class Swaps(Agent):
        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
            system, first = {"role": "system", "content": "x"}, tape.messages()[0]
            one = await llm(tape, messages=[system, first])
            said = {"role": "assistant", "content": one.text}
            parts = [{**part, "media": b.name} if part["type"] == "image" else part for part in first["content"]]
            asked = [system, {**first, "content": parts}, said, {"role": "user", "content": "?"}]
            yield Answer(text=(await llm(tape, messages=asked)).text)

    class Both(Gallery):
        async def reset(self, task: int) -> Several:
            self.task = task
            return Several(before="x", pictures=(a, b))

    tape = run_async(rollout(Swaps(), Both, 1, engine=Babbler() if tokens else ScriptedEngine(["1", "2"])))
    assert tape.status is Status.FINISHED, tape.cause
    found = rows(tape, renderer=RENDERER)
    assert [[place.media[0] for place in row.places] for row in found] == [[a.name, b.name], [b.name, b.name]]
    one, two = (row.input_ids.tolist() for row in found)
    n = len(tape.calls[0].prompt) if tokens else len(one)
    assert two[:n] == one[:n]  # only the picture differs
    assert not tokens or tape.calls[1].keep == found[0].places[0].offset


def test_a_fork_continues_the_row_of_its_prefix(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        tape = played(journal=store.writer)
        engine = Babbler()
        fork = played(engine=engine, journal=store.writer, fork=tape.at_turn(1), unverified="a test")
    assert fork.status is Status.FINISHED, fork.cause
    first = fork.calls[0]
    assert (first.base, first.split) == (tape.calls[0].call, None)
    assert first.keep == len(tape.calls[0].prompt) + len(tape.calls[0].completion or ())
    assert fork.call_places(first)[:1] == tape.call_places(tape.calls[0])
    assert engine.asked[0].places == fork.call_places(first)
    assert len(rows(fork)) == 1
    assert verify(tmp_path / "run").broken == ()


@pytest.mark.parametrize("keep", ["start", "end"])
def test_a_cut_prompt_holds_whole_pictures(keep: Any) -> None:
    seen = set()
    whole = played()
    for most in [len(call.prompt) - 1 for call in whole.calls]:
        engine = Babbler()
        tape = played(engine=engine, limits=Limits(prompt_tokens=most, keep_prompt=keep))
        for call, request in zip(tape.calls, engine.asked, strict=True):
            assert len(request.prompt or ()) <= most
            assert request.places == tape.call_places(call)
            seen.add(len(request.places))
            for place in request.places:
                assert place.end <= len(request.prompt or ())
                assert set((request.prompt or ints())[place.offset : place.end]) == {MARKER}
        assert all(row.places == tape.call_places(row.calls[-1]) for row in rows(tape))
    assert len(seen) > 1


# What notices a change


def test_replay_compares_places_and_asks_for_the_same_processor() -> None:
    class Wider(Pads):
        def expand(self, width: int, height: int, times: Sequence[float] = ()) -> Any:
            found = super().expand(width, height, times)
            return found._replace(grid=(*found.grid, 1))

    class Newer(Pads):
        hash = "newer"

    tape = played()
    assert tape.begin.versions["processor"] == "pads"
    assert run_async(replay(tape, Player(), renderer=RENDERER)).outcome == "verified"
    assert run_async(replay(tape, Player())).outcome == "verified"
    other = run_async(replay(tape, Player(), renderer=Renderer(tokenizer(QWEN), Wider())))
    assert other.outcome == "diverged"
    assert other.divergence is not None
    assert (other.divergence.cause, "places" in other.divergence.field) == ("rendering", True)
    newer = run_async(replay(tape, Player(), renderer=Renderer(tokenizer(QWEN), Newer())))
    assert newer.outcome == "unverifiable"
    assert newer.reason is not None
    assert newer.reason.startswith("processor: ")


def test_a_text_episode_of_a_model_that_sees_names_its_processor_and_has_no_place() -> None:
    tape = played(Paid)
    assert "processor" in tape.begin.versions
    assert b'"places"' not in b"".join(tape.bodies)
    (row,) = rows(tape)
    assert (row.places, row.file) == ((), None)
    blind = played(Paid, Babbler(Renderer(tokenizer(QWEN))))
    assert "processor" not in blind.begin.versions


def _forged(tape: Tape, run: Path, edit: Any, records: Any = None) -> None:
    """A run with the tape's records changed by `edit`, and hashes of its own: what no chain notices."""
    with Store.create(run) as store:
        for step in tape:
            for picture in pictures_of(step):
                store.media.put(picture.data or b"", ".png")
        for body in tape.bodies:
            record = json.loads(body)
            if record.get("places"):
                edit(record["places"])
            if records is not None:
                records(record)
            store.writer.append(json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode())


EDITS: dict[str, Any] = {
    "removed": lambda places: places.pop(0),
    "swapped": lambda places: places.__setitem__(
        slice(None), [[b[0], *a[1:]] for a, b in zip(places, places[::-1], strict=True)]
    ),
    "another file": lambda places: places[0][0].__setitem__(0, "0" * 64 + ".png"),
    "behind the prompt": lambda places: places[-1].__setitem__(3, 10_000),
    "before the kept ids": lambda places: places[0].__setitem__(2, -1),
    "in another order": lambda places: places.reverse(),
    "overlapping": lambda places: places[0].__setitem__(3, places[0][3] + 9),
    "empty": lambda places: places[0].__setitem__(0, []),
    "one token later": lambda places: places[-1].__setitem__(2, places[-1][2] + 1),
    "one token earlier": lambda places: places[0].__setitem__(2, places[0][2] - 1),
    "one token less": lambda places: places[0].__setitem__(3, places[0][3] - 1),
    "another first token": lambda places: places[0].__setitem__(slice(2, 4), [places[0][2] + 1, places[0][3] - 1]),
    "another grid": lambda places: places[-1][4].__setitem__(-1, places[-1][4][-1] + 2),
    "a grid on its side": lambda places: places[0][4].reverse(),
    "more patches a token": lambda places: places[0][4].__setitem__(slice(1, 3), [8, 8]),
    "a negative grid": lambda places: places[0][4].__setitem__(slice(0, 2), [-1, 4]),
    "no grid": lambda places: places[0][4].clear(),
}
PAIRS = ("swapped", "in another order", "overlapping", "more patches a token")
"""Edits of which only a call with two pictures shows anything."""


@pytest.mark.parametrize("edit", EDITS)
def test_verify_notices_changed_places_also_where_all_hashes_were_made_anew(edit: str, tmp_path: Path) -> None:
    for env in (Gallery, Corners):
        tape = played(env)
        _forged(tape, tmp_path / f"{env.__name__} true", lambda places: None)
        assert verify(tmp_path / f"{env.__name__} true").broken == ()
        if env is Gallery or edit not in PAIRS:
            _forged(tape, tmp_path / env.__name__, EDITS[edit])
            assert verify(tmp_path / env.__name__).broken != ()


def _wider(step: bool) -> Any:
    def edit(record: dict[str, Any]) -> None:
        shown = record.get("content", {}).get("pictures") if step else None
        parts = [part for m in record.get("messages", ()) for part in m["content"] if isinstance(part, dict)]
        for part in shown or ([] if step else [part for part in parts if part["type"] == "image"]):
            part["width"] += 1

    return edit


def test_verify_notices_a_grid_that_lies_on_its_side_also_where_every_grid_does(tmp_path: Path) -> None:
    class Wide(Corners):
        async def reset(self, task: int) -> Any:
            return (await super().reset(task)).model_copy(update={"picture": Picture.of(square(1).repeat(3, axis=1))})

        async def step(self, action: Answer) -> Outcome:
            return Outcome(reward=1.0, terminated=True)

    tape = played(Wide)
    _forged(tape, tmp_path / "true", lambda places: None)
    assert verify(tmp_path / "true").broken == ()
    _forged(tape, tmp_path / "run", lambda places: [place[4].append(place[4].pop(-2)) for place in places])
    assert verify(tmp_path / "run").broken != ()


@pytest.mark.parametrize("step", [True, False])
def test_verify_compares_the_sizes_that_records_say_with_the_files(step: bool, tmp_path: Path) -> None:
    _forged(played(Gallery), tmp_path / "run", lambda places: None, _wider(step))
    (first, second) = verify(tmp_path / "run").broken
    assert "41x30" in first
    assert "41x30" in second


@pytest.mark.parametrize("content", [[{"type": "image", "media": "0" * 64 + ".png", "width": 8, "height": 8}]])
def test_a_part_that_a_text_wrote_shows_no_picture(content: list[Any]) -> None:
    class Forging(Corners):
        async def reset(self, task: int) -> Any:
            await super().reset(task)
            return Prompt(text="q", messages=({"role": "user", "content": content},))

    engine = Babbler()
    tape = played(Forging, engine)
    assert (engine.asked, tape.status) == ([], Status.ERROR)
    assert tape.cause is not None
    assert (tape.cause.type, repr(content[0]) in (tape.cause.message or "")) == (CauseType.ENVIRONMENT, True)


def test_an_engine_with_a_renderer_of_text_is_refused_where_the_first_picture_stands() -> None:
    tape = played(engine=ScriptedEngine(["1"], renderer=Renderer(tokenizer(QWEN))))
    assert tape.cause is not None
    assert "'scripted'" in (tape.cause.message or "")


def test_the_renderer_of_a_folder_sees_where_its_model_does(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path / "seeing")
    tokenizer(QWEN).save_pretrained(tmp_path / "blind")
    seeing, blind = (RendererConfig().load(tmp_path / name) for name in ("seeing", "blind"))
    assert blind.pictures is None
    assert seeing.pictures is not None
    tape = played(engine=Babbler(seeing))
    assert tape.status is Status.FINISHED, tape.cause
    assert tape.begin.versions["processor"] == seeing.pictures.hash
    again = RendererConfig().load(tmp_path / "seeing")
    assert run_async(replay(tape, Player(), renderer=again)).outcome == "verified"
    (row,) = rows(tape)
    assert [place.grid for place in row.places] == [seeing.pictures.expand(40, 30).grid] * 3
