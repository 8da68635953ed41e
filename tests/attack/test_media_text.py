"""The text `media:` and 64 hex digits is only text: nothing that a model, a page or a task says names a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, ValidationError

from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.cli import main
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Action, MediaReference, Observation, Task, ToolCall, ToolCalls
from tapereel.tapes.records import StepRecord
from tapereel.tapes.schema import parse_record
from tapereel.tapes.store import Store, verify
from tapereel.tapes.view import RunView, write_view

from ..front.pages import data_of

TEXT = "media:" + "0" * 64 + ".png"


class Looked(Observation):
    text: str
    pictures: dict[str, list[MediaReference | None]] = Field(default={})
    """Nested, as an author may write it."""
    anything: Any = None


class Wanted(Action):
    picture: MediaReference


class Page(Environment[Any]):
    """Shows a page that names a file of another tape, as text in every field that holds text."""

    def __init__(self, named: str) -> None:
        self.named = named

    async def reset(self, task: Task) -> Looked:
        return Looked(text=f"see {self.named}", anything={"media": [self.named], "content": {"media": [self.named]}})

    async def step(self, action: Any) -> Outcome:
        return Outcome(f'"media":["{self.named[6:]}"]', reward=1.0, terminated=True)


def record(store: Store, named: str) -> str:
    engine = ScriptedEngine([f'{named} "media":["{named[6:]}"]'])
    task = Task(public={"media": [named]}, private=named)
    play = rollout(ChatAgent(named), lambda: Page(named), task, engine=engine, journal=store.writer)
    return asyncio.run(play).id


def test_a_text_breaks_no_run_and_names_no_file(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        record(store, TEXT)
    report = verify(tmp_path / "run")
    assert (report.exit_code, report.media, report.broken) == (0, 0, ())
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_a_text_pulls_no_file_of_another_tape_into_the_view(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        secret = store.media.put(b"a picture of another tape", ".png")
        tape = record(store, str(secret))
    with RunView(tmp_path / "run") as view:
        write_view(view, tmp_path / "page.html", tapes=[tape])
        assert view.media(tape) == set()
        assert all("media" not in item for item in view.items(tape, 0)["items"])  # type: ignore[attr-defined]
    assert not any("media" in hole for hole in data_of(tmp_path / "page.html")["run"]["integrity"]["holes"])
    assert (verify(tmp_path / "run").media, verify(tmp_path / "run").unnamed_media) == (0, 1)


def test_a_text_becomes_no_reference_by_being_parsed(tmp_path: Path) -> None:
    for parse in (
        lambda: Wanted.model_validate_json(json.dumps({"picture": TEXT})),
        lambda: Wanted.model_validate({"picture": TEXT}),
        lambda: Wanted(picture=TEXT),  # type: ignore[arg-type]
        lambda: Looked(text="", pictures={"a": [TEXT]}),  # type: ignore[list-item]
    ):
        with pytest.raises(ValidationError, match=r"Media\.put"):
            parse()
    calls = ToolCalls(calls=(ToolCall(id="1", name="look", arguments={"media": [TEXT], "picture": TEXT}),))
    assert recorded(calls).media == ()


def recorded(step: Any) -> StepRecord:
    role = "action" if isinstance(step, Action) else "observation"
    made = StepRecord(tape="t", by="x", role=role, kind=step.kind, content=step, at=1.0)
    read = parse_record(made.body())
    assert isinstance(read, StepRecord)
    assert read.body() == made.body()
    return read


def test_a_reference_of_put_is_kept_wherever_the_type_says_so(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        one, two = store.media.put(b"1", ".png"), store.media.put(b"2")
    names = (one.name, two.name)
    looked = recorded(Looked(text=one, pictures={"a": [one, None], "b": [two]}))
    assert looked.media == names
    assert isinstance(looked.content, Looked)
    assert isinstance(looked.content.pictures["b"][0], MediaReference)
    assert recorded(Wanted(picture=two)).media == names[1:]
    # Text alone, of put or not, refers to nothing.
    assert recorded(Looked(text=one)).media == ()


@pytest.mark.parametrize(
    "name", ["../../../../etc/passwd", "0" * 63, "0" * 64 + ".PNG", "0" * 64 + "/x", "0" * 64 + "\n"]
)
def test_a_forged_reference_is_no_path(name: str) -> None:
    body = json.loads(recorded(Looked(text="x")).body())
    with pytest.raises(ValueError, match="media"):
        parse_record(json.dumps({**body, "media": [name]}).encode())
