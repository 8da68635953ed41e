"""The audit against numbers known by hand, against a slow recomputation from the tapes, and as a command."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.tapes import Action, Answer, Call, Cause, CauseType, NotATape, Status, Tape, Task, Text
from tapereel.tapes.arrays import floats, ints
from tapereel.tapes.audit import audit_run
from tapereel.tapes.audit.auditor import INHERITED, Anomaly, Audit, AuditFold
from tapereel.tapes.records import Attempt, Begin, End, Identity, Parent, Record, Reward, Usage, Use
from tapereel.tapes.store import Store, peek
from tapereel.tapes.store.books import bucket
from tapereel.tapes.store.summary import read_facts
from tapereel.tapes.tape import step_record


class Look(Action, kind="audit_look"):
    at: str


ENDS: list[tuple[Status, CauseType | None]] = [
    (Status.FINISHED, None),
    (Status.TRUNCATED, None),
    (Status.LIMIT, CauseType.TURNS),
    (Status.LIMIT, CauseType.SECONDS),
    (Status.ERROR, CauseType.AGENT),
    (Status.ERROR, CauseType.MODEL),
    (Status.CANCELLED, None),
]


def begin(name: str, **more: Any) -> Begin:
    task = Task(public="q")
    return Begin(
        tape=name,
        task=task,
        task_hash=task.hash,
        agent=Identity(name="a"),
        env=Identity(name="e"),
        env_seed=0,
        seed=0,
        at=0.0,
        **more,
    )


def call(name: str, k: int, n: int, **more: Any) -> Call:
    """A call of `n` sampled tokens after a prompt of three."""
    given = {
        "by": "a",
        "engine": "e",
        "prompt": ints([1, 2, 3]),
        "completion": ints(range(n)),
        "at": 1.0,
        "logprobs": floats([-0.5] * n),
        "spans": (("v:0", 0, n),),
        "attempts": (Attempt(seconds=0.5),),
    }
    return Call(tape=name, call=f"{name}.{k}", **(given | more))


def act(name: str, text: str = "x", *, by: str = "a", look: bool = False) -> Record:
    return step_record(name, Look(at=text) if look else Answer(text=text), by=by)


def end(name: str, status: Status = Status.FINISHED, cause: CauseType | None = None) -> End:
    return End(tape=name, status=status, cause=Cause(type=cause) if cause else None, seconds=2.0, at=9.0)


def episode(name: str, *middle: Record, **more: Any) -> list[Record]:
    return [begin(name, **more), *middle, end(name)]


def scored(name: str, value: float, **more: Any) -> list[Record]:
    """A tape of one action that earned `value`."""
    return episode(name, act(name), Reward(tape=name, step=0, value=value), **more)


def audited(*records: Iterable[Record], **how: Any) -> Audit:
    fold = AuditFold(**how)
    for record in (record for some in records for record in some):
        body = record.body()
        t, tape = peek(body)
        fold.take(tape or "", read_facts(t, body))
    return fold.audit()


def odd(audit: Audit) -> dict[str, Anomaly]:
    found = {one.kind: one for one in audit.anomalies}
    assert len(found) == len(audit.anomalies)
    return found


# By hand


def test_ends_are_told_by_cause_and_by_length():
    long = [begin("b"), *(act("b", str(k)) for k in range(5)), call("b", 1, 9), end("b", Status.ERROR, CauseType.MODEL)]
    audit = audited(scored("a", 0.0), long, [begin("c")])
    assert (audit.tapes, audit.open, audit.unscored) == (3, 1, 1)
    lost, fine = audit.ends
    assert (lost.status, lost.cause, lost.trainable, lost.episodes, lost.unscored, lost.sampled, lost.seconds) == (
        "error",
        "model",
        False,
        1,
        1,
        9,
        2.0,
    )
    assert (lost.turns, lost.tokens, lost.tapes) == ({"4-7": 1}, {"8-15": 1}, ("b",))
    assert (fine.status, fine.cause, fine.trainable, fine.unscored, fine.turns) == ("finished", None, True, 0, {"1": 1})
    assert audit.lost_by("turns") == {"1": (1, 0), "4-7": (1, 1)}
    assert audit.lost_by("tokens") == {"0": (1, 0), "8-15": (1, 1)}


def test_cost_is_by_path_engine_and_version_and_the_unknown_is_not_zero():
    changed = call(
        "a", 2, 8, spans=(("v:0", 0, 6), ("v:1", 6, 8)), attempts=(Attempt(seconds=4.0),), usage=Usage(cost=0.08)
    )
    text = Call(tape="a", call="a.3", by="a/helper", engine="api", text="hi", at=1.0, usage=Usage(completion_tokens=7))
    v0, v1, api = audited(episode("a", call("a", 1, 4), changed, text)).spent
    assert (v0.by, v0.engine, v0.version, v0.calls, v0.prompt, v0.completion) == ("a", "e", "v:0", 2, 6, 10)
    assert (v0.seconds, v0.cost, v0.unpriced, v0.untimed, v0.uncounted) == (3.5, pytest.approx(0.06), 1, 0, 0)
    assert (v1.version, v1.calls, v1.prompt, v1.completion, v1.seconds) == ("v:1", 0, 0, 2, 1.0)
    assert v1.cost == pytest.approx(0.02)
    assert (api.by, api.engine, api.version, api.calls, api.prompt, api.completion) == (
        "a/helper",
        "api",
        None,
        1,
        None,
        7,
    )
    assert (api.seconds, api.cost, api.untimed, api.unpriced, api.uncounted) == (None, None, 1, 1, 1)


def test_a_prompt_is_told_whole_where_it_was_written_as_what_is_new():
    (one,) = audited(episode("a", call("a", 1, 4), call("a", 2, 4, base="a.1", keep=7))).spent
    assert one.prompt == 3 + (7 + 3)


def test_sums_go_over_episodes_and_the_best_are_named():
    audit = audited(*(scored(f"t{k}", float(k)) for k in range(8)))
    assert audit.ends[0].seconds == 16.0
    assert audit.ends[0].tapes == ("t0", "t1", "t2", "t3", "t4")
    assert audit.earned[0].tapes == ("t7", "t6", "t5", "t4", "t3")


def test_a_layer_is_no_part_of_the_reward_though_the_tape_is_open():
    audit = audited(episode("a", act("a"), Reward(tape="a", step=0, value=1.0, layer="later")))
    assert (audit.unscored, audit.earned, [one.layer for one in audit.components]) == (1, (), ["later"])


def test_rewards_are_told_by_component_and_by_the_action_that_earned_them():
    audit = audited(
        episode(
            "a",
            act("a", look=True),
            Reward(tape="a", step=0, name="late", value=-1.0, weight=0.5),
            act("a"),
            Reward(tape="a", step=1, name="right", value=2.0),
            Reward(tape="a", name="luck", value=7.0, weight=0),
        ),
        episode(
            "b",
            act("b"),
            Reward(tape="b", step=0, name="right", value=1.0, evidence="42"),
            Reward(tape="b", name="right", value=-0.5),
        ),
        [Reward(tape="b", step=0, name="right", value=0.25, layer="close")],
    )
    late, luck, right, again = sorted(audit.components, key=lambda one: (one.layer or "", one.name))
    assert (late.scores, late.mean, late.total, late.share) == (1, -1.0, -0.5, 0.5 / 3)
    assert (luck.metric, luck.mean, luck.total, luck.share) == (True, 7.0, 0.0, None)
    assert (right.scores, right.low, right.mean, right.high) == (3, -0.5, 2.5 / 3, 2.0)
    assert (right.total, right.evidence) == (2.5, 1)
    assert right.share == 2.5 / 3
    assert (again.layer, again.total, again.share) == ("close", 0.25, None)
    found = {(one.name, one.kind): one for one in audit.earned}
    assert set(found) == {("late", "audit_look"), ("right", "answer"), ("right", None)}
    answer = found["right", "answer"]
    assert (answer.scores, answer.mean, answer.total, answer.share) == (2, 1.5, 3.0, 3.0 / 3.5)
    assert answer.tapes == ("a", "b"), "those that earned most come first"


def test_a_reward_that_is_no_number_is_counted_apart():
    audit = audited(scored("a", math.nan), scored("b", 1.0), scored("c", 0.0))
    (one,) = audit.components
    assert (one.scores, one.unknown, one.mean, one.total) == (3, 1, 0.5, 1.0)
    assert odd(audit)["reward that isn't a number"].tapes == ("a",)


def test_a_fork_earns_by_the_actions_of_its_own():
    parent = Parent(tape="p", digest="0" * 64, records=3, turn=1)
    fork = episode(
        "f",
        act("f", look=True),
        Reward(tape="f", step=2, value=1.0),
        Reward(tape="f", step=1, value=1.0),
        parent=parent,
    )
    earned = audited(fork, inherited={"f": 2}.__getitem__).earned
    assert {one.kind for one in earned} == {"audit_look", INHERITED}
    with pytest.raises(NotATape, match="`inherited`"):
        audited(fork)


def test_a_sound_run_shows_nothing_odd():
    values = enumerate([0.0, 1.0, 0.0])
    assert audited(*(scored(f"t{k}", value, group="g", attempt=k) for k, value in values)).anomalies == ()


def test_flat_groups_and_constant_components():
    groups = [scored(f"{g}{k}", float(g == "h"), group=g, attempt=k) for g in "gh" for k in range(2)]
    found = odd(audited(*groups))
    assert set(found) == {"flat groups", "flat in groups"}
    assert (found["flat groups"].count, found["flat groups"].of, found["flat groups"].tapes) == (2, 2, ("g0", "h0"))
    assert found["flat in groups"].what == "reward"
    found = odd(audited(scored("a", 0.5), scored("b", 0.5)))
    assert (found["constant reward"].count, found["constant reward"].detail) == (2, "always 0.5")
    assert odd(audited(scored("a", 0.5))) == {}, "one score can't be constant"
    assert odd(audited(scored("a", 0.5, group="g"), scored("b", 1.0, group="h"))) == {}, "nothing to compare with"
    lost = [begin("b", group="g", attempt=1), Reward(tape="b", value=1.0), act("b"), end("b", Status.CANCELLED)]
    assert set(odd(audited(scored("a", 0.5, group="g"), lost))) == {"group closed short"}


def test_a_tape_is_named_once_and_a_call_that_was_answered_did_not_fail():
    tries = Attempt(seconds=1, error="IOError: x"), Attempt(seconds=1)
    found = odd(audited(episode("a", act("a"), *(call("a", k, 2, attempts=tries) for k in range(3)))))
    assert set(found) == {"retries", "failed tries"}
    assert (found["retries"].count, found["retries"].tapes) == (3, ("a",))
    assert found["failed tries"].what == "IOError"


@pytest.mark.parametrize(
    ("kind", "count", "of", "middle"),
    [
        ("repeated actions", 1, 2, [act("a"), act("a"), act("a")]),
        ("repeated actions", 1, 2, [act("a"), act("a", by="b"), act("a"), act("a")]),
        ("impossible log-probs", 1, 2, [act("a"), call("a", 1, 2, logprobs=floats([0.25, 0.0]))]),
        ("unknown log-probs", 1, 2, [act("a"), call("a", 1, 2, logprobs=floats([math.nan, -1.0]))]),
        ("unknown log-probs", 2, 2, [act("a"), call("a", 1, 2, logprobs=None)]),
        ("cut completions", 1, 1, [act("a"), call("a", 1, 2, finish="length")]),
        ("reward without action", 1, None, [Reward(tape="a", value=3.0)]),
        ("retries", 1, 1, [act("a"), call("a", 1, 2, attempts=(Attempt(seconds=1), Attempt(seconds=1)))]),
        ("failed calls", 1, 1, [act("a"), call("a", 1, 2, attempts=(Attempt(seconds=1, error="IOError: x"),))]),
        ("failed tries", 1, None, [act("a"), call("a", 1, 2, attempts=(Attempt(seconds=1, error="IOError: x"),))]),
    ],
)
def test_what_is_odd_names_its_tape(kind: str, count: int, of: int | None, middle: list[Record]):
    found = odd(audited(episode("a", *middle), scored("b", 0.0)))[kind]
    assert (found.count, found.of, found.tapes) == (count, of, ("a",))


@pytest.mark.parametrize(
    "middle",
    [
        [act("a"), act("a")],
        [act("a"), act("a"), act("a", "y"), act("a")],
        [act("a"), act("a"), act("a", look=True), act("a")],
        [act("a"), act("a", by="b"), act("a")],
        [act("a"), call("a", 1, 2, logprobs=floats([0.0, 1e-7]))],
        [act("a"), call("a", 1, 2, completion=None, logprobs=None, spans=(), prompt=None, text="hi")],
        [Reward(tape="a", value=0.0)],
    ],
)
def test_what_is_not_odd_is_not_told(middle: list[Record]):
    assert audited(episode("a", *middle)).anomalies == ()


def test_episodes_cut_and_rewards_without_evidence():
    cut = [begin("a"), end("a", Status.TRUNCATED)]
    assert odd(audited(cut, *(episode(f"b{k}") for k in range(8))))["cut episodes"].tapes == ("a",)
    assert odd(audited(cut, *(episode(f"b{k}") for k in range(9)))) == {}, "one of ten is not more than a tenth"
    proven = episode("p", act("p"), Reward(tape="p", step=0, value=1.0, evidence={"answer": 42}))
    found = odd(audited(proven, scored("a", 0.0)))["reward without evidence"]
    assert (found.count, found.of, found.tapes) == (1, 2, ("a",))


def test_groups_that_stay_open_or_close_short():
    whole = [scored(f"w{k}", float(k), group="w", attempt=k) for k in range(2)]
    running = [scored("r0", 0.0, group="r"), [begin("r1", group="r", attempt=1)]]
    gap = [scored("g1", 0.0, group="g", attempt=1)]
    short = [scored("s0", 0.0, group="s"), [begin("s1", group="s", attempt=1), end("s1", Status.CANCELLED)]]
    again = [[begin("t0", group="t"), end("t0", Status.CANCELLED)], scored("t1", 0.0, group="t")]
    again += [[begin("u0", group="u"), end("u0")], [begin("u1", group="u"), end("u1", Status.CANCELLED)]]
    found = odd(audited(*whole, *running, *gap, *short, *again))
    assert (found["group never closed"].count, found["group never closed"].tapes) == (2, ("r0", "g1"))
    assert (found["group closed short"].count, found["group closed short"].tapes) == (1, ("s0",))
    assert found["group closed short"].of == 6


def test_the_trainers_numbers_tell_where_it_differs_from_the_sampler():
    uses = [
        Use(lineage="m", update=k, items=(("a", "a.1", 0, 1, 1.0),), info=info)
        for k, info in enumerate([{"mismatch": 0.01}, {"mismatch": 0.75}, {"mismatch": None}, {}])
    ]
    found = odd(audited(scored("a", 0.0), uses))["log-prob mismatch"]
    assert (found.what, found.count, found.of, found.tapes) == ("m", 1, 2, ("a",))
    assert "0.75 nats" in found.detail
    assert audited(scored("b", 0.0), uses, only={"b"}).anomalies == (), "the update took none of the tapes asked for"


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        (("m:5",), True),  # sampled by the weights that are trained: nothing explains a difference
        (("m:4",), False),
        (("m:5", "m:4"), False),
        (("other:4",), True),
        (("m:1",), False),
    ],
)
def test_what_updates_since_the_sampling_may_explain_is_no_mismatch(versions: tuple[str, ...], told: bool):
    spans = tuple((version, k, k + 1) for k, version in enumerate(versions))
    tape = episode("a", call("a", 1, len(spans), spans=spans))

    def use(apart: float) -> list[Record]:
        return [Use(lineage="m", update=5, items=(("a", "a.1", 0, 1, 1.0),), info={"mismatch": apart})]

    assert ("log-prob mismatch" in odd(audited(tape, use(0.99)))) is told
    assert ("log-prob mismatch" in odd(audited(use(0.99), tape))) is told, "whichever comes first"
    assert ("log-prob mismatch" in odd(audited(tape, use(99.0)))) is told, "a learning rate can be as high as it likes"
    assert "log-prob mismatch" in odd(audited(tape, use(0.99), replayed={"a": "diverged"})), "the weights were asked"


@pytest.mark.parametrize(
    ("error", "replayed", "told"),
    [
        (0.02, {}, False),
        (0.04, {}, True),
        (0.02, {"a": "diverged"}, True),
        (None, {}, True),
        (None, {"a": "rounded"}, False),
    ],
)
def test_a_difference_that_rounding_explains_is_no_mismatch(
    error: float | None, replayed: dict[str, str], told: bool
) -> None:
    """As the update measured it, or `replay model` for a run of an earlier version."""
    tape = episode("a", call("a", 1, 1, spans=(("m:5", 0, 1),)))
    info: dict[str, Any] = {"mismatch": 0.75, "moved": 0.75}
    info |= {} if error is None else {"rounding": {"error": error, "limit": 0.03}}
    use = [Use(lineage="m", update=5, items=(("a", "a.1", 0, 1, 1.0),), info=info)]
    assert ("log-prob mismatch" in odd(audited(tape, use, replayed=replayed))) is told


@pytest.mark.parametrize("mismatch", [None, 0.01, 0.75])
def test_an_update_with_older_tokens_is_accused_by_its_other_tokens(mismatch: float | None):
    tape = episode("a", call("a", 1, 2, spans=(("m:5", 0, 1), ("m:4", 1, 2))))
    info = {"mismatch": mismatch, "moved": 2.5}
    found = odd(audited(tape, [Use(lineage="m", update=5, items=(("a", "a.1", 0, 2, 1.0),), info=info)]))
    assert [one.detail.count("0.75 nats") for name, one in found.items() if name == "log-prob mismatch"] == (
        [1] if mismatch == 0.75 else []
    )


# Against a slow recomputation from the tapes


@st.composite
def runs(draw: st.DrawFn) -> list[list[Record]]:
    """Tapes of any length, end and reward, in groups or alone."""
    made = []
    for t in range(draw(st.integers(1, 6))):
        name = f"t{t}"
        records: list[Record] = [
            begin(
                name,
                split=draw(st.sampled_from(["train", "eval"])),
                group=draw(st.sampled_from([None, "g", "h"])),
                attempt=t,
            )
        ]
        for k in range(draw(st.integers(0, 4))):
            n = draw(st.integers(0, 5))
            cut = draw(st.integers(0, n))
            records.append(
                call(
                    name,
                    k,
                    n,
                    by=draw(st.sampled_from(["a", "a/b"])),
                    spans=(("v:0", 0, cut), ("v:1", cut, n)),
                    attempts=(Attempt(seconds=0.25),) * draw(st.integers(0, 2)),
                    finish=draw(st.sampled_from(["stop", "length"])),
                    usage=Usage(cost=draw(st.sampled_from([None, 0.5]))),
                )
            )
            records.append(step_record(name, Text(text="see"), by="env"))
            records.append(act(name, draw(st.sampled_from("xy")), look=draw(st.booleans())))
            records += draw(
                st.lists(
                    st.builds(
                        Reward,
                        tape=st.just(name),
                        step=st.sampled_from([None, 2 * k + 1]),
                        name=st.sampled_from(["right", "late"]),
                        value=st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
                        weight=st.sampled_from([0.0, 1.0, 0.5]),
                    ),
                    max_size=2,
                )
            )
        if draw(st.booleans()) or t == 0:
            records.append(end(name, *draw(st.sampled_from(ENDS))))
        made.append(records)
    return made


def woven(tapes: Sequence[Sequence[Record]]) -> list[Record]:
    """Records of episodes that run at once."""
    longest = max(map(len, tapes))
    return [tape[k] for k in range(longest) for tape in tapes if k < len(tape)]


@settings(max_examples=80)
@given(runs())
def test_the_audit_is_what_a_slow_reading_of_the_tapes_gives(made: list[list[Record]]):
    audit = audited(woven(made))
    tapes = [Tape.of([record.body() for record in records]) for records in made]
    closed = [tape for tape in tapes if tape.closed]
    assert (audit.tapes, audit.open) == (len(tapes), len(tapes) - len(closed))
    assert audit.unscored == sum(tape.reward is None for tape in closed)
    ends = Counter((tape.status, tape.cause and tape.cause.type) for tape in closed)
    assert {(one.status, one.cause): one.episodes for one in audit.ends} == ends
    for one in audit.ends:
        mine = [tape for tape in closed if (tape.status, tape.cause and tape.cause.type) == (one.status, one.cause)]
        assert one.trainable == all(tape.trains for tape in mine)
        assert one.turns == Counter(bucket(tape.turns) for tape in mine)
        assert one.tokens == Counter(bucket(sum(len(c.completion or ()) for c in tape.calls)) for tape in mine)
    _same_costs(audit, tapes)
    _same_rewards(audit, closed)
    _same_groups(audit, tapes)


def _same_costs(audit: Audit, tapes: Sequence[Tape]) -> None:
    tokens: Counter[tuple[str, str]] = Counter()
    for one in (one for tape in tapes for one in tape.calls):
        for version, start, stop in one.spans:
            tokens[one.by, version] += stop - start
    assert {(one.by, one.version): one.completion for one in audit.spent} == tokens
    calls = [one for tape in tapes for one in tape.calls]
    assert sum(one.calls for one in audit.spent) == len(calls)
    assert sum(one.prompt or 0 for one in audit.spent) == 3 * len(calls)
    assert sum(one.seconds or 0.0 for one in audit.spent) == pytest.approx(
        sum(tried.seconds for one in calls for tried in one.attempts)
    )
    assert sum(one.cost or 0.0 for one in audit.spent) == pytest.approx(sum(one.usage.cost or 0.0 for one in calls))
    assert sum(one.unpriced for one in audit.spent) == sum(one.usage.cost is None for one in calls)


def _same_rewards(audit: Audit, closed: Sequence[Tape]) -> None:
    earned: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    for tape in closed:
        for reward in tape.rewards:
            if reward.weight and tape.trains:
                kind = None if reward.step is None else tape.entries[reward.step].step.kind
                earned[reward.name, kind].append(reward.weight * reward.value)
    found = {(one.name, one.kind): one for one in audit.earned}
    assert set(found) == set(earned)
    for key, values in earned.items():
        assert (found[key].scores, found[key].total) == (len(values), pytest.approx(sum(values)))
        shares = [one.share for one in audit.earned if one.name == key[0]]
        assert all(share is None for share in shares) or sum(share or 0.0 for share in shares) == pytest.approx(1)
    assert sum(one.total for one in audit.components) == pytest.approx(sum(tape.reward or 0.0 for tape in closed))


def _same_groups(audit: Audit, tapes: Sequence[Tape]) -> None:
    flat = 0
    for group in ("g", "h"):
        rewards = [t.reward for t in tapes if t.begin.group == group and t.trains and t.reward is not None]
        flat += len(rewards) > 1 and len(set(rewards)) == 1
    told = {one.kind: one.count for one in audit.anomalies}
    assert told.get("flat groups", 0) == flat
    repeating = 0
    for tape in (tape for tape in tapes if tape.closed):
        done = [entry.step for entry in tape.entries if isinstance(entry.step, Action)]
        repeating += any(done[k] == done[k + 1] == done[k + 2] for k in range(len(done) - 2))
    assert sum(one.count for one in audit.anomalies if one.kind == "repeated actions") == repeating
    lost = [t for t in tapes if t.closed and t.status in (Status.TRUNCATED, Status.LIMIT)]
    assert told.get("cut episodes", 0) == (len(lost) if 10 * len(lost) > sum(t.closed for t in tapes) else 0)


# The command


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    groups = [
        scored(f"{g}{k}", 1.0, group=g, attempt=k, split=split)
        for g, split in (("g", "train"), ("h", "train"), ("e", "eval"))
        for k in range(2)
    ]
    with Store.create(path) as store:
        for record in (record for records in groups for record in records):
            store.writer.append(record.body())
    return path


def test_filters_take_tapes_with_the_others_of_their_groups(run: Path):
    with Store.open(run, write=True) as store:
        for record in (record for name in ("l", "m") for record in scored(name, 0.0, split="lone")):
            store.writer.append(record.body())
    with Store.open(run) as store:
        lone = audit_run(store, split="lone", limit=1)
        seen: list[tuple[str, int, int, str]] = []
        whole = audit_run(store, progress=lambda *told: seen.append(told))
        some = audit_run(store, split="train")
        newest = audit_run(store, split="train", limit=1)
    assert [one[1].tapes for one in (whole, some, newest, lone)] == [8, 4, 2, 1]
    assert {tape for end in newest[1].ends for tape in end.tapes} == {"h0", "h1"}
    assert whole[0] == some[0] == newest[0], "the books are of the whole run"


def test_a_fork_in_a_run_is_counted_from_where_it_begins(run: Path):
    with Store.open(run, write=True) as store:
        digest = Tape.of(store.tape("g0").bodies[:2]).digest
        for record in episode(
            "f",
            act("f", look=True),
            Reward(tape="f", step=1, value=1.0),
            parent=Parent(tape="g0", digest=digest, records=2, turn=1),
        ):
            store.writer.append(record.body())
    with Store.open(run) as store:
        earned = audit_run(store)[1].earned
    assert {one.kind: one.scores for one in earned} == {"answer": 6, "audit_look": 1}


def test_anomalies_fail_it_only_when_asked(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["audit", str(run)]) == Exit.HOLDS
    shown = capsys.readouterr().out
    assert "flat groups" in shown
    assert "constant reward: reward" in shown
    assert "cost by policy version: no call names a version" in shown
    assert "every token is accounted for" in shown
    assert main(["audit", str(run), "--strict"]) == Exit.BROKEN
    assert main(["audit", str(run), "--json"]) == Exit.HOLDS
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["closes"], told["begun"], told["audit"]["tapes"]) == (True, 6, 6)
    assert {one["kind"] for one in told["audit"]["anomalies"]} == {"flat groups", "constant reward"}


@pytest.mark.parametrize("words", [["--limit", "0"], ["--repeats", "1"], ["--json", "--markdown"]])
def test_what_can_not_be_meant_is_refused(words: list[str], run: Path):
    assert main(["audit", str(run), *words]) == Exit.USAGE


def test_it_is_a_document_too(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["audit", str(run), "--markdown"]) == Exit.HOLDS
    printed = capsys.readouterr().out
    assert printed.startswith("# Audit of ")
    assert "| finished | 6 | 0 | if scored |" in printed
    assert main(["audit", str(run), "--markdown", str(tmp_path / "audit.md")]) == Exit.HOLDS
    assert (tmp_path / "audit.md").read_text(encoding="utf-8").strip() == printed.strip()


def test_what_a_tape_says_is_neither_obeyed_nor_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, evil = tmp_path / "run", "<script>|x|\n# [a](b)\x1b[2J"
    with Store.create(path) as store:
        for record in episode(
            "a",
            call("a", 1, 1, by=evil, engine=evil, spans=((evil, 0, 1),)),
            act("a"),
            Reward(tape="a", name=evil, step=0, value=1.0),
        ):
            store.writer.append(record.body())
    assert main(["audit", str(path), "--markdown"]) == Exit.HOLDS
    document = capsys.readouterr().out
    assert main(["audit", str(path)]) == Exit.HOLDS
    assert "\x1b" not in document + capsys.readouterr().out
    assert "\\<script\\>\\|x\\| \\# \\[a\\](b)" in document
    assert "<script>" not in document.replace("\\<script\\>", "")
