"""Tapes: the fold, views, forks at turns, documents, and records that don't make a tape."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tapereel.tapes import Action, Call, Cause, CauseType, HiddenFromAgent, NotATape, Observation, Status, Tape, Task
from tapereel.tapes.errors import NewerRecord
from tapereel.tapes.records import Begin, End, Identity, Parent, Reward
from tapereel.tapes.schema import parse_record
from tapereel.tapes.status import trains
from tapereel.tapes.tape import TapeLog, step_record


class See(Observation, kind="tape_see"):
    text: str


class Do(Action, kind="tape_do"):
    text: str


def begin(tape: str = "t", parent: Parent | None = None) -> Begin:
    task = Task(public="q", private="secret")
    return Begin(
        tape=tape,
        task=task,
        task_hash=task.hash,
        agent=Identity(name="a"),
        env=Identity(name="e"),
        env_seed=1,
        seed=2,
        parent=parent,
        at=0.0,
    )


def build(turns: int, *, tape: str = "t", end: bool = True) -> TapeLog:
    log = TapeLog(begin(tape))
    log.append(step_record(tape, See(text="start"), by="env"))
    for k in range(turns):
        base = f"{tape}.{k - 1}" if k else None
        new = ({"role": "user", "content": "start" if k == 0 else f"saw {k - 1}"},)
        log.append(
            Call(
                tape=tape,
                call=f"{tape}.{k}",
                by="a",
                base=base,
                keep=5 * k,
                keep_messages=2 * k,
                new_messages=new,
                new_prompt=[10, 11, 12],
                completion=[20 + k, 2],
                logprobs=[-0.5, -0.25],
                text=f"do {k}",
                spans=(("v:0", 0, 2),),
                at=1.0,
            )
        )
        log.append(step_record(tape, Do(text=f"do {k}"), by="a", calls=((f"{tape}.{k}", 0, 2),)))
        log.append(Reward(tape=tape, step=len(log.entries) - 1, value=0.5))
        log.append(step_record(tape, See(text=f"saw {k}"), by="env"))
    if end:
        log.append(End(tape=tape, status=Status.FINISHED, at=2.0))
    return log


def test_a_closed_tape_round_trips_as_one_document_also_inside_another_model():
    class Holder(BaseModel):
        tape: Tape

    tape = Tape(build(3))
    again = Tape.model_validate_json(tape.model_dump_json())
    assert again == tape
    assert list(again) == list(tape)
    assert again.digest == tape.digest
    held = Holder(tape=tape)
    assert Holder.model_validate_json(held.model_dump_json()).tape == tape


def test_an_edited_document_is_refused():
    document = Tape(build(2)).model_dump()
    document["records"][3]["content"]["text"] = "did something else"
    with pytest.raises(NotATape, match=document["digest"]):
        Tape.model_validate(document)


def test_an_open_tape_is_no_document():
    with pytest.raises(NotATape, match="running"):
        Tape(build(1, end=False)).model_dump_json()


def test_deltas_concatenate_to_the_prompts():
    tape = Tape(build(3))
    assert tape.call("t.2").prompt.tolist() == [10, 11, 12, 20, 2, 10, 11, 12, 21, 2, 10, 11, 12]
    assert [m["content"] for m in tape.call("t.2").messages] == ["start", "do 0", "saw 0", "do 1", "saw 1"]
    assert list(tape.messages(path="a")) == [
        *tape.call("t.2").messages,
        {"role": "assistant", "content": "do 2"},
        {"role": "user", "content": "saw 2"},
    ]


def test_a_call_of_a_tape_has_its_whole_request_and_what_it_added():
    tape = Tape(build(3))
    second = tape.calls[1]
    assert [m["content"] for m in second.messages] == ["start", "do 0", "saw 0"]
    assert [m["content"] for m in second.new_messages] == ["saw 0"]
    assert (second.prompt.tolist(), second.new_prompt.tolist()) == ([10, 11, 12, 20, 2, 10, 11, 12], [10, 11, 12])
    cut = tape.at_turn(2)
    named = Parent(tape="t", digest=cut.digest, turn=2, records=cut._k)
    fork = TapeLog(begin("f", parent=named), parent=tape)
    fork.append(Call(tape="f", call="f.0", by="a", base="t.1", keep=3, keep_messages=2, new_prompt=[9], at=1.0))
    (own,) = Tape(fork).calls
    assert ([m["content"] for m in own.messages], own.prompt.tolist()) == (["start", "do 0"], [10, 11, 12, 9])


def test_a_call_that_is_on_no_tape_has_a_whole_request_only_if_it_keeps_nothing():
    first, second = (parse_record(call.body()) for call in Tape(build(2)).calls)
    assert (first.messages, first.prompt.tolist()) == ([{"role": "user", "content": "start"}], [10, 11, 12])
    for read in (lambda: second.messages, lambda: second.prompt):
        with pytest.raises(NotATape, match=r"t\.1\b.*\bt\.0\b"):
            read()
    assert Call(tape="t", call="a", by="a", at=0.0).prompt is None, "an engine of text"


def test_a_pickled_tape_has_the_whole_requests_of_a_long_conversation():
    tape = Tape(build(300))
    again = pickle.loads(pickle.dumps(tape))
    assert again == tape
    assert (again.calls[-1].messages, again.calls[-1].prompt) == (tape.calls[-1].messages, tape.calls[-1].prompt)


def test_the_stored_names_of_a_call_and_its_equality_do_not_depend_on_its_tape():
    call = Tape(build(2)).calls[1]
    stored = json.loads(call.body())
    assert [key for key in stored if key in ("messages", "prompt")] == ["messages", "prompt"]
    assert call.model_dump(mode="json").keys() >= stored.keys()
    assert call == parse_record(call.body()) == pickle.loads(pickle.dumps(call))
    stored["new_prompt"] = stored.pop("prompt")
    with pytest.raises(NewerRecord, match="new_prompt"):
        parse_record(json.dumps(stored).encode())


def test_a_call_that_keeps_less_drops_the_rest():
    log = build(2, end=False)
    log.append(
        Call(
            tape="t",
            call="c",
            by="a",
            base="t.1",
            keep=4,
            keep_messages=1,
            new_prompt=[9],
            completion=[1],
            new_messages=({"role": "user", "content": "x"},),
            at=1.0,
        )
    )
    tape = Tape(log)
    assert tape.call("c").prompt.tolist() == [10, 11, 12, 20, 9]
    assert [m["content"] for m in tape.call("c").messages] == ["start", "x"]


def test_none_is_not_zero():
    log = TapeLog(begin())
    assert Tape(log).reward is None
    log.append(step_record("t", See(text=""), by="env"))
    log.append(Reward(tape="t", step=0, name="metric", value=3.0, weight=0.0))
    assert Tape(log).reward is None
    log.append(Reward(tape="t", step=0, value=0.0))
    assert Tape(log).reward == 0.0


def test_the_agents_view_shows_steps_and_the_public_task_only():
    view = Tape(build(1, end=False), scope="a", agent_view=True)
    assert view.task == "q"
    assert len(view.now()) == 3
    for hidden in ("begin", "reward", "rewards", "layers", "digest", "bodies", "status", "calls"):
        with pytest.raises(HiddenFromAgent, match=hidden):
            getattr(view, hidden)


def test_a_view_stays_as_it_was_while_the_tape_grows():
    log = build(1, end=False)
    view = Tape(log)
    digest, text = view.digest, [str(s) for s in view]
    log.append(step_record("t", Do(text="more"), by="a"))
    assert (view.digest, [str(s) for s in view], len(view)) == (digest, text, 3)
    assert len(view.now()) == 4


@given(st.integers(0, 4), st.integers(0, 4))
def test_a_fork_continues_its_parent(turns, at):
    parent = Tape(build(turns))
    if at > turns:
        with pytest.raises(ValueError, match=rf"\b{turns}\b.*\b{at}$"):
            parent.at_turn(at)
        return
    cut = parent.at_turn(at)
    assert len(cut) == 1 + 2 * at
    assert cut.turns == at
    pin = Parent(tape=cut.id, digest=cut.digest, records=len(cut.bodies), turn=at)
    log = TapeLog(begin("child", pin), parent=cut)
    log.append(step_record("child", Do(text="other"), by="a"))
    log.append(End(tape="child", status=Status.FINISHED, at=3.0))
    child = Tape(log)
    assert child[: len(cut)] == list(cut)
    assert child.inherited == len(cut)
    assert child.calls == []
    assert child.turns == at + 1
    assert child.at_turn(at) == (cut if at < 0 else child.at_turn(at))
    again = Tape.of(child.bodies, parent=parent)
    assert again == child
    assert Tape.model_validate_json(child.model_dump_json()) == child
    if at:
        assert child.call("t.0").text == "do 0"


def test_a_fork_of_another_parent_is_refused():
    cut = Tape(build(2)).at_turn(1)
    pin = Parent(tape="t", digest="0" * 64, records=len(cut.bodies), turn=1)
    with pytest.raises(NotATape, match="digest"):
        TapeLog(begin("child", pin), parent=cut)
    with pytest.raises(NotATape, match=r"child\b.*parent$"):
        TapeLog(begin("child", pin))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[1:], "`begin`.*'step'"),
        (lambda r: [], "records"),
        (lambda r: [*r, r[1]], "ended.*StepRecord"),
        (lambda r: [r[0], r[1], r[2], r[2]], r"t\.0\b.*twice"),
        (lambda r: [r[0], r[3]], r"'t\.0'$"),
        (lambda r: [r[0], r[1], r[4]], r"reward.*\b1$"),
        (lambda r: [r[0], r[1].replace(b'"tape":"t"', b'"tape":"u"')], "'u'.*'t'"),
        (lambda r: [r[0], r[1][:-3]], r"^record 1\b"),
        (lambda r: [r[0], b'{"t":"nonsense"}'], r"\b1\b.*nonsense"),
        (lambda r: [r[0], b'{"t":"commit"}'], "Commit"),
    ],
)
def test_records_that_make_no_tape_are_refused(change, message):
    bodies = list(Tape(build(1)).bodies)
    with pytest.raises((NotATape, AttributeError), match=message):
        Tape.of(change(bodies))


def test_a_tape_cut_anywhere_reads_as_an_open_tape():
    bodies = Tape(build(2)).bodies
    for k in range(1, len(bodies)):
        tape = Tape.of(bodies[:k])
        assert not tape.closed
        assert tape.status is None


def test_log_probs_and_spans_must_fit_the_completion():
    with pytest.raises(ValueError, match=r"\b1\b.*\b2\b"):
        Call(tape="t", call="c", by="a", completion=[1, 2], logprobs=[-1.0], at=0.0)
    for spans in ((("v", 0, 1),), (("v", 0, 3),), (("v", 1, 2),), (("v", 0, 1), ("w", 0, 2))):
        with pytest.raises(ValueError, match="spans"):
            Call(tape="t", call="c", by="a", completion=[1, 2], spans=spans, at=0.0)


def test_every_record_parses_back_to_the_same_bytes():
    for body in Tape(build(2)).bodies:
        assert parse_record(body).body() == body


def test_a_tape_with_kinds_nobody_imported_keeps_its_bytes():
    bodies = [b.replace(b"tape_do", b"kind_of_elsewhere") for b in Tape(build(1)).bodies]
    tape = Tape.of(bodies)
    assert [parse_record(b).body() for b in bodies] == bodies
    assert Tape.model_validate_json(tape.model_dump_json()) == tape


@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("cause", [None, *CauseType])
def test_the_table_of_statuses(status, cause):
    expected = (
        status in (Status.FINISHED, Status.TRUNCATED)
        or (status is Status.LIMIT and cause in ("turns", "tokens", "context", "agent_seconds"))
        or (status is Status.ERROR and cause == "agent")
    )
    assert trains(status, cause) == expected
    log = build(1, end=False)
    log.append(End(tape="t", status=status, cause=Cause(type=cause) if cause else None, at=0.0))
    assert Tape(log).trains == expected
