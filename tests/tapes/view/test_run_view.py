"""What the viewer is given of a run: pages of plain values, with nothing left out silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json

from tapereel.tapes import Observation, Picture, Video
from tapereel.tapes.errors import NoSuchTape, remedy
from tapereel.tapes.steps import _registry
from tapereel.tapes.store import Store
from tapereel.tapes.view import RunView
from tapereel.tapes.view.overview import DIED
from tapereel.tapes.view.run_view import PAGE, PIECE

from ...agents.picture_worlds import square
from .lab import HOSTILE, Recording, episode, growing, hostile_run, long_run, training_run


@pytest.fixture(scope="module")
def view(run: Path):
    with RunView(run) as found:
        found.overview()
        yield found


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory):
    with RunView(hostile_run(tmp_path_factory.mktemp("view") / "hostile")) as found:
        found.overview()
        yield found


def _column(table: dict, name: str) -> list:
    column = table[name]
    return [column["words"][k] for k in column["at"]] if isinstance(column, dict) else column


def test_the_table_says_of_each_tape_what_the_store_says(view: RunView, run: Path):
    table = view.table(0)
    with Store.open(run) as store:
        summaries = store.summaries()
    assert table["id"] == [s.id for s in summaries]
    assert table["n"] == len(summaries) == view.overview()["tapes"] == 13
    assert _column(table, "status") == [s.status or "running" for s in summaries]
    assert table["reward"] == [s.reward for s in summaries]
    by_id = dict(zip(table["id"], _column(table, "version"), strict=True))
    assert (by_id["g1a0"], by_id["g0a0"]) == ("main:1", "main:0")
    assert view.table(1)["n"] == 0


def test_an_unscored_tape_has_no_reward(view: RunView):
    table = view.table(0)
    rewards = dict(zip(table["id"], table["reward"], strict=True))
    assert rewards["held"] is None
    assert rewards["g0a0"] == 0.0
    assert view.head("held")["components"] == []


def test_a_transcript_lists_every_record_but_the_rewards_that_stand_with_their_step(view: RunView):
    items = view.items("g0a1", 0)["items"]
    assert [item["t"] for item in items] == [
        "begin",
        "step",
        "call",
        "step",
        "step",
        "call",
        "step",
        "step",
        "call",
        "step",
        "end",
    ]
    assert [item["step"] for item in items if item["t"] == "step"] == [0, 1, 2, 3, 4, 5]
    assert items[9]["rewards"] == [["right", 1.0, 1.0], ["brevity", 0.5, 0.0]]
    assert [item["turn"] for item in items] == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    head = view.head("g0a1")
    assert (head["turns"], head["outline"], head["steps"], head["items"], head["records"]) == (3, 3, 6, 11, 13)
    assert head["components"] == [["right", 1.0, True], ["brevity", 0.5, False]]


def test_the_outline_names_each_turns_action_and_what_it_earned(view: RunView):
    turns = view.turns("g0a1", 0)["turns"]
    assert [(turn["text"], turn["reward"], turn["step"]) for turn in turns] == [
        ("40", None, 1),
        ("41", None, 3),
        ("42", 1.0, 5),
    ]
    assert [view.items("g0a1", 0)["items"][turn["item"]]["t"] for turn in turns] == ["call"] * 3


def test_tool_calls_and_their_results_read_as_code(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        made = Recording(store, "t1")
        made.call_tools(shelf=92)
        made.answer_tools("KeyError: 92", error=True)
        made.act("none")
    with RunView(tmp_path / "run") as view:
        view.overview()
        called, answered, _ = view.items("t1", 0)["items"][1:]
        assert (called["text"], called["failed"]) == ("count(shelf=92)", False)
        assert answered["parts"] == [{"tool": "count", "error": True, "text": "KeyError: 92"}]
        turns = view.turns("t1", 0)["turns"]
        assert [(turn["text"], turn["result"], turn["failed"]) for turn in turns] == [
            ("count(shelf=92)", "KeyError: 92", True),
            ("none", None, False),
        ]


def test_a_link_names_steps_and_calls_by_what_they_are(view: RunView):
    items = view.items("g0a1", 0)["items"]
    assert items[view.find("g0a1", step=3)["item"]]["text"] == "41"
    assert items[view.find("g0a1", call="g0a1.2")["item"]]["call"] == "g0a1.2"
    for wrong in ({"step": 99}, {"step": -1}, {"call": "g0a1.9"}):
        with pytest.raises(NoSuchTape):
            view.find("g0a1", **wrong)


def test_seeds_go_as_text_for_a_reader_whose_numbers_are_smaller(view: RunView):
    begin = view.head("g0a1")["begin"]
    assert (begin["env_seed"], begin["seed"]) == (str(2**62 + 1), str(2**62 + 3))
    assert view.call("g0a1", "g0a1.1")["seed"] == str(2**62 + 5)


def test_a_call_shows_its_exact_request_and_how_it_differs(view: RunView, run: Path):
    with Store.open(run) as store:
        tape = store.tape("g0a1")
    call = view.call("g0a1", "g0a1.3")
    assert [(m["role"], m["text"]) for m in call["messages"]] == [
        (m["role"], m["content"]) for m in tape.call("g0a1.3").messages
    ]
    assert call["diff"] == {"before": "g0a1.2", "same": 3, "removed": []}
    assert json.loads(call["tools"]["schemas"]) == [{"name": "add"}], "spelled out on the first call only"
    assert (call["kept"], call["new_total"]) == (len(tape.call("g0a1.3").prompt) - len("turn 2: what is 6 * 7?"), 22)
    assert view.call("g0a1", "g0a1.1")["diff"] is None


def test_a_rewritten_history_shows_what_is_gone(view: RunView):
    diff = view.call("broken", "broken.2")["diff"]
    assert (diff["before"], diff["same"]) == ("broken.1", 0)
    assert [m["text"] for m in diff["removed"]] == ["Be exact.", "1 / 0?"]
    assert view.call("broken", "broken.2")["split"] == "history was rewritten"


@pytest.mark.parametrize("start", [None, 0, 1, 60, 119, 120, 500])
def test_a_window_of_a_long_request_is_the_request_from_there_on(tmp_path: Path, start: int | None):
    with Store.create(tmp_path / "run") as store:
        made = Recording(store, "talk")
        for k in range(60):
            made.act(f"a{k}", made.ask(f"q{k}", f"a{k}"))
        made.end()
    with RunView(tmp_path / "run") as view:
        view.overview()
        call = view.call("talk", "talk.60", start)
        whole = [m["content"] for m in view.store.tape("talk").call("talk.60").messages]
    assert call["total"] == len(whole) == 119
    assert call["from"] == (119 - 40 if start is None else min(start, 119))
    assert [m["text"] for m in call["messages"]] == whole[call["from"] :]


def test_tokens_carry_what_the_ledger_says_and_unknown_is_not_a_number(view: RunView):
    call = view.call("g0a0", "g0a0.1")
    assert call["fates"] == ["trained", "trained", None]
    assert call["weights"] == [0.125, 0.125, None]
    assert view.call("g0a3", "g0a3.1")["fates"] == ["stale"] * 3
    broken = view.call("broken", "broken.1")
    assert broken["logprobs"][1] is None
    assert broken["unknown"] == 1
    assert broken["pieces"] is None
    assert broken["errors"] == ["TimeoutError: no answer in 1 s"]
    assert view.head("g0a0")["taken"] == [{"lineage": "main", "update": 0, "phase": "rl", "skipped": None}]


def test_a_point_of_the_curve_leads_to_its_tapes(view: RunView):
    points = view.curve()["points"]
    assert [(p["update"], p["reward"], p["tapes"]) for p in points] == [(0, 0.75, 4), (1, 0.75, 4)]
    assert view.behind(1)["tapes"] == [f"g1a{k}" for k in range(4)]
    with pytest.raises(NoSuchTape, match="point 2"):
        view.behind(2)


def test_a_fork_begins_with_what_it_inherited(view: RunView):
    items = view.items("forked", 0)["items"]
    assert [item["t"] for item in items] == [
        "begin",
        "step",
        "call",
        "step",
        "step",
        "begin",
        "call",
        "step",
        "end",
        "reward",
    ]
    assert [bool(item.get("inherited")) for item in items] == [True] * 5 + [False] * 5
    assert items[7]["step"] == 3, "counted from the parent's first step"
    assert items[9]["layer"] == "rescored"
    head = view.head("forked")
    assert (head["reward"], head["parent"], head["inherited"]) == (1.0, "g0a1", 5)
    assert view.head("g0a1")["children"] == ["forked"]
    assert view.call("forked", "g0a1.1")["text"] == "40", "a call of the prefix"


def test_a_fork_whose_parent_is_elsewhere_says_that_its_beginning_is_missing(view: RunView, tmp_path: Path):
    bodies = view.store.tape("forked").bodies
    with Store.create(tmp_path / "run") as store:
        for body in bodies:
            store.writer.append(body)
    with RunView(tmp_path / "run") as alone:
        alone.overview()
        (hole,) = alone.head("forked")["holes"]
        assert "g0a1" in hole
        assert [item["t"] for item in alone.items("forked", 0)["items"]] == ["begin", "call", "step", "end"]


def test_records_that_cant_be_read_are_holes_and_hide_nothing(hostile: RunView):
    items = hostile.items("hostile", 0)["items"]
    holes = [item for item in items if item["t"] == "hole"]
    assert len(holes) == 3
    assert "broken UTF-8" in holes[0]["raw"]
    assert "\\ud800" in holes[1]["raw"]
    assert all("read" in hole["why"] for hole in holes)
    assert items[-1]["t"] == "end"
    to_json(items)
    assert items[1]["text"] == HOSTILE, "text goes as it is; what shows it makes no markup of it"


def test_a_long_text_is_cut_and_comes_in_pieces(hostile: RunView):
    items = hostile.items("hostile", 0)["items"]
    assert (len(items[2]["text"]), items[2]["cut"]) == (4_000, 10_000_000)
    piece = hostile.text("hostile", items[2]["record"], 99)
    assert (piece["length"], piece["text"]) == (10_000_000, "x" * PIECE)
    assert hostile.text("hostile", items[2]["record"], 100)["text"] == ""
    assert len(to_json(hostile.items("hostile", 0))) < 60_000


def test_a_search_looks_at_what_is_shown_and_says_what_it_left_out(hostile: RunView, view: RunView):
    found = hostile.texts("hostile", 0)
    assert found["short"] == 1
    assert max(len(text) for _, text in found["texts"]) == 1_000_000
    texts = dict(view.texts("broken", 0)["texts"])
    assert texts[0] == "divide"
    assert "TooManyParseErrors: write a number" in texts.values()
    assert len(view.texts_of(["g0a0", "g0a1"])) == 2
    assert len(hostile.texts_of(["hostile"] * 9)) < 9, "one answer holds so much and no more"


def test_the_banner_says_what_was_not_checked_and_verify_says_what_was(view: RunView, run: Path):
    quick = view.overview()["integrity"]
    assert (quick["verdict"], quick["broken"]) == ("not verified", [])
    assert len(quick["not_checked"]) == 3
    whole = view.verify()
    assert whole["verdict"] == "holds"
    assert whole["not_checked"]


def test_a_changed_byte_and_a_missing_segment_show(tmp_path: Path):
    run = training_run(tmp_path / "run")
    with Store.open(run, write=True) as store:
        episode(store, "later", ["42"], 1.0)
    first, second = sorted((run / "tapes").glob("*.jsonl"))
    (run / "tapes" / "index.sqlite").unlink()
    data = bytearray(second.read_bytes())
    data[data.find(b"6 * 7")] ^= 1
    second.write_bytes(data)
    with RunView(run) as view:
        integrity = view.overview()["integrity"]
        assert integrity["verdict"] == "broken"
        assert second.stem in integrity["broken"][0]
        assert view.overview()["tapes"] == 13, "what is intact is shown"
        assert view.overview()["state"] == "closed"
        assert view.head("g0a1")["turns"] == 3
        assert len(view.curve()["points"]) == 2
        notes: Any = view.report()["notes"]
        assert second.stem in notes[0], "the overview says so, and shows the rest"
    first.unlink()
    (run / "tapes" / "index.sqlite").unlink()
    with RunView(run) as view:
        assert "000001" in view.overview()["integrity"]["holes"][0]


def test_a_torn_tail_is_a_hole(tmp_path: Path):
    store = Store.create(tmp_path / "run")
    episode(store, "t", ["42"], 1.0)
    store.writer.sync()
    store.abandon()
    (segment,) = (tmp_path / "run" / "tapes").glob("*.jsonl")
    segment.write_bytes(segment.read_bytes() + b'{"n":99,"c":0,"p":"')
    with RunView(tmp_path / "run") as view:
        integrity = view.overview()["integrity"]
        assert view.head("t")["items"] == 5
        assert view.overview()["state"] == "died"
        assert view.report()["notes"] == (DIED + remedy("resume", ""),)
    assert integrity["broken"] == []
    assert integrity["live"] == [segment.stem]
    assert segment.stem in integrity["holes"][0]
    assert "torn" in integrity["holes"][0]


def test_a_call_is_compared_with_the_one_before_in_its_own_conversation(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        made = Recording(store, "t")
        first = made.ask("one", "1")
        aside = made.ask("aside", "?", split="another conversation")
        store.writer.append(first.model_copy(update={"call": "t.3", "conversation": aside.call}).body())
        store.writer.append(first.model_copy(update={"call": "t.4"}).body())
    with RunView(tmp_path / "run") as view:
        view.overview()
        assert view.call("t", "t.3")["diff"] is None
        assert view.call("t", "t.4")["diff"]["before"] == "t.2"


def test_the_live_tail_tells_what_is_new_and_what_changed(tmp_path: Path):
    with growing(tmp_path / "run") as store, RunView(tmp_path / "run") as view:
        rev = view.overview()["rev"]
        assert view.changes(rev)["n"] == 0
        second = Recording(store, "second")
        second.see("go")
        store.writer.sync()
        found = view.changes(rev)
        assert (found["id"], _column(found, "status")) == (["second"], ["running"])
        assert view.head("second")["items"] == 2
        second.act("on it", second.ask("go", "on it"))
        second.end()
        store.writer.sync()
        again = view.changes(found["rev"])
        assert (again["id"], _column(again, "status"), again["turns"]) == (["second"], ["finished"], [1])
        assert view.head("second")["items"] == 5, "the map of a tape grows with it"
        assert view.changes(rev)["id"] == ["second"], "an older reader gets all since"
        assert view.changes(again["rev"])["n"] == 0
        for stranger in ("", "x.0", "deadbeef.1", again["rev"] + "9"):
            assert view.changes(stranger)["reset"] is True


def test_training_that_goes_on_is_read_again(tmp_path: Path):
    from tapereel.tapes.records import Use

    with growing(tmp_path / "run") as store, RunView(tmp_path / "run") as view:
        rev = view.overview()["rev"]
        assert view.curve()["points"] == []
        store.append_layer(Use(lineage="main", update=0, items=(("first", "first.1", 0, 1, 1.0),)))
        store.writer.sync()
        assert view.changes(rev)["training"] is True
        assert [point["update"] for point in view.curve()["points"]] == [0]


def test_pages_are_cut_where_they_say_and_cost_what_they_show(tmp_path: Path):
    with RunView(long_run(tmp_path / "run", 1_000)) as view:
        view.overview()
        assert view.head("long")["items"] == 3_002
        page = view.items("long", 17)
        assert page["from"] == 17 * PAGE
        assert [item["step"] for item in page["items"]] == list(range(17 * PAGE - 1, 18 * PAGE - 1))
        assert len(view.items("long", 30)["items"]) == 2
        assert view.items("long", 31)["items"] == []
        turns = view.turns("long", 9)["turns"]
        assert (turns[0]["turn"], turns[-1]["text"]) == (900, "1000")


def test_without_what_tells_of_training_the_page_says_so(view: RunView):
    assert list(view.explain("g0a0")) == ["missing"]
    for ask in (view.head, lambda t: view.items(t, 0), lambda t: view.call(t, "x")):
        with pytest.raises(NoSuchTape):
            ask("nobody")
    with pytest.raises(NoSuchTape):
        view.call("g0a0", "nobody.1")


class Mixed(Observation, kind="lab_mixed"):
    """A picture, a video with one frame twice, and a value of the same form that is no video."""

    before: Picture
    film: Video
    told: dict[str, Any]


@pytest.mark.parametrize("known", [True, False])
def test_frames_have_their_times_in_the_order_of_the_step(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also in a viewer that hasn't imported the step's class."""
    film = Video.of([square(1), square(2), square(1)], fps=10, indices=(0, 5, 12))
    told = {"frames": [{"media": "media:" + "0" * 64, "width": 1, "height": 1}], "fps": 1.0, "indices": [7]}
    step = Mixed(before=Picture.of(square(2)), film=film, told={"a": told, "frames": [], "fps": 0, "indices": []})
    with Store.create(tmp_path / "run") as store:
        for picture in (step.before, *film.frames):
            store.media.put(picture.data or b"", ".png")
        made = Recording(store, "t")
        made._step("env", "observation", step, ())
        made.look(step.before.media)
        made.end()
    if not known:
        monkeypatch.delitem(_registry, "lab_mixed")
    with RunView(tmp_path / "run") as view:
        view.overview()
        _, shown, plain, *_ = view.items("t", 0)["items"]
    assert shown["media"] == [step.before.name, *(frame.name for frame in film.frames)]
    assert shown["times"] == [None, 0.0, 0.5, 1.2]
    assert (plain["media"], "times" in plain) == ([step.before.name], False)
