"""rows(tape) in closed form: the ledger's numbers at the level of tapes, agents, labels, authored text and forks."""

from __future__ import annotations

import asyncio
import hashlib
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tapereel.agents import EpisodeSpec, ScriptedEngine, rollout
from tapereel.finetune import Row, Stream, Trainer, episode_of, rows
from tapereel.finetune.data.provenance import weighed
from tapereel.finetune.loop.staleness import drop_stale
from tapereel.finetune.recipes import get_recipe
from tapereel.tapes import Answer, Call, Cause, CauseType, NotATape, Sampling, Status, Tape, Task, Text
from tapereel.tapes.messages import ENV
from tapereel.tapes.records import Begin, End, Identity, Label, Reward, Tokens
from tapereel.tapes.tape import step_record

from ..build import ledger
from ..loop.lab import RENDERER, WORDS, Letters, Speaker, model

ROWS = ledger("rows")


def call(
    name: str,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    base: str | None = None,
    keep: int = 0,
    old: Sequence[float] | None = None,
    by: str = "main",
    **fields: Any,
) -> Call:
    """A sampled call, spelled out id by id."""
    n = len(completion)
    return Call(
        **{
            "tape": "t",
            "call": name,
            "by": by,
            "base": base,
            "keep": keep,
            "prompt": prompt,
            "completion": completion,
            "logprobs": [-0.5] * n if old is None else old,
            "spans": (("run:0", 0, n),) if n else (),
            "at": 0.0,
            **fields,
        }
    )


def tape_of(
    *calls: Call,
    tape: str = "t",
    group: str = "g",
    rewards: Sequence[float] = (),
    layers: Sequence[Any] = (),
    status: Status = Status.FINISHED,
    cause: CauseType | None = None,
) -> Tape:
    """A closed tape of these calls, an answer behind each."""
    main, world = Identity(name="main"), Identity(name="e")
    records: list[Any] = [
        Begin(tape=tape, task=Task(), task_hash="", agent=main, env=world, env_seed=0, seed=0, group=group, at=0.0)
    ]
    for k, one in enumerate(calls):
        records.append(one.model_copy(update={"tape": tape}))
        records.append(step_record(tape, Answer(text=str(k)), by=one.by, calls=((one.call, 0, 0),)))
    records += [Reward(tape=tape, value=value) for value in rewards]
    records.append(End(tape=tape, status=status, cause=Cause(type=cause) if cause else None, at=0.0))
    return Tape.of([record.body() for record in records], layers=layers)


@pytest.mark.ledger("F08")
def test_one_row_where_b_extends_a_and_two_where_it_does_not():
    a = call("a", [10, 11], [20, 21])
    extends = tape_of(a, call("b", [30], [40], base="a", keep=4))
    (row,) = rows(extends)
    assert row.input_ids.tolist() == [10, 11, 20, 21, 30, 40]
    assert row.labels().tolist() == [-100, -100, 20, 21, -100, 40]
    assert row.calls == ("a", "b")
    splits = tape_of(a, call("b", [31], [40], base="a", keep=3, split="the template rewrote the last answer"))
    first, second = rows(splits)
    assert first.labels().tolist() == [-100, -100, 20, 21]
    assert second.input_ids.tolist() == [10, 11, 20, 31, 40]
    assert second.labels().tolist() == [-100, -100, -100, -100, 40], "what it kept is context: it is a's"
    assert [row.turn.tolist() for row in (first, second)] == [[0, 0], [1]]


@pytest.mark.ledger("F08")
def test_two_calls_on_one_base_are_two_rows_and_the_base_is_labelled_in_the_first():
    a = call("a", [10], [20])
    branches = tape_of(a, call("b", [30], [40], base="a", keep=2), call("c", [31], [41], base="a", keep=2))
    first, second = rows(branches)
    assert first.labels().tolist() == [-100, 20, -100, 40]
    assert second.labels().tolist() == [-100, -100, -100, 41]


@pytest.mark.ledger("F05", "T08")
@pytest.mark.parametrize("name", ["F05", "T08"])
def test_old_log_probs_stand_exactly_where_the_labels_are(name: str):
    case = ROWS[name]
    calls: list[Call] = []
    prompt: list[int] = []
    old = list(case["old"])
    completion: list[int] = []
    length = 0
    for k, label in enumerate([*case["labels"], -100]):
        if label != -100:
            completion.append(label)
        elif completion:
            calls.append(
                call(
                    f"c{k}",
                    prompt,
                    completion,
                    old=old[: len(completion)],
                    base=calls[-1].call if calls else None,
                    keep=length,
                )
            )
            length += len(prompt) + len(completion)
            prompt, old, completion = [1], old[len(completion) :], []
        else:
            prompt.append(1)
    (row,) = rows(tape_of(*calls))
    assert row.labels().tolist() == case["labels"]
    expected = [math.nan if value is None else value for value in case["expected"]]
    np.testing.assert_allclose(row.aligned(row.old), np.array(expected), rtol=1e-6)


def trained(tapes: Sequence[Tape], recipe: str = "grpo", **changes: Any) -> tuple[list[Row], Any]:
    """(rows, what one update on them did); the tapes' ids must be ones of the micro model."""
    made = [row for tape in tapes for row in rows(tape)]
    stats = Trainer(model(), get_recipe(recipe, changes)).update(made, [episode_of(tape) for tape in tapes])
    return made, stats


@pytest.mark.ledger("F06", "F38")
def test_the_rewards_of_a_group_of_tapes_become_the_ledgers_advantages():
    case = ROWS["F06"]
    tapes = [tape_of(call(f"c{k}", [3, 7], [8, 9]), tape=f"t{k}", rewards=[r]) for k, r in enumerate(case["rewards"])]
    _, stats = trained(tapes, case["algo"])
    expected = np.repeat(case["expected"], 2)
    np.testing.assert_allclose(stats.advantage.numpy(), expected, rtol=1e-9)
    turned = [
        tape_of(call(f"c{k}", [3, 7], [8, 9]), tape=f"t{k}", rewards=[r / 2, r / 2])
        for k, r in enumerate(case["rewards"])
    ]
    _, again = trained(turned, case["algo"])
    np.testing.assert_allclose(again.advantage.numpy(), expected, rtol=1e-9)


@pytest.mark.ledger("F07")
def test_a_label_layer_names_the_tokens_that_are_targets():
    case = ROWS["F07"]
    inside = [k for k, (a, b) in enumerate(case["offsets"]) if any(a < d and c < b for c, d in case["spans"])]
    assert inside == list(range(len(inside)))
    layer = Label(tape="t", call="a", ranges=((0, len(inside)),))
    (row,) = rows(tape_of(call("a", [1], case["ids"], old=[-1, -2, -3]), layers=[layer]))
    assert row.labels().tolist() == [-100, *case["expected"]]
    assert row.old.tolist() == [-1.0, -2.0]


def test_label_layers_take_out_whole_calls_middles_and_everything():
    a, b = call("a", [10], [20, 21, 22, 23]), call("b", [30], [40], base="a", keep=5)
    middle = rows(tape_of(a, b, layers=[Label(tape="t", call="a", ranges=((0, 1), (2, 4)))]))
    assert [row.labels().tolist() for row in middle] == [[-100, 20, -100, 22, 23, -100, 40]]
    assert middle[0].offset.tolist() == [0, 2, 3, 0]
    for use in ("auxiliary", "discarded"):
        without = rows(tape_of(a, b, layers=[Label(tape="t", call="a", use=use)]))
        assert [row.labels().tolist() for row in without] == [[-100] * 6 + [40]]
        assert [row.calls for row in without] == [("b",)]
    assert rows(tape_of(a, layers=[Label(tape="t", call="a", use="discarded")])) == []
    assert rows(tape_of(a, layers=[Label(tape="t", call="a", ranges=())])) == []


def test_one_agent_of_several_is_trained_and_the_others_are_context():
    a = call("a", [10], [20])
    b = call("b", [11], [21], by="main/helper")
    c = call("c", [30], [40], base="a", keep=2)
    d = call("d", [31], [41], base="b", keep=2, by="main/helper")
    tape = tape_of(a, b, c, d)
    assert [row.labels().tolist() for row in rows(tape)] == [[-100, 20, -100, 40], [-100, 21, -100, 41]]
    (main,) = rows(tape, agents={"main"})
    assert (main.calls, set(main.agents)) == (("a", "c"), {"main"})
    (helper,) = rows(tape, agents={"main/helper"})
    assert (helper.calls, set(helper.agents)) == (("b", "d"), {"main/helper"})
    assert rows(tape, agents=set()) == []
    mixed = tape_of(a, call("b", [30], [40], base="a", keep=2, by="other"))
    (shared,) = rows(mixed, agents={"other"})
    assert shared.labels().tolist() == [-100, -100, -100, 40], "the other agent's words are this one's context"


def test_text_that_nobody_tokenised_needs_a_renderer_or_a_tokens_layer():
    text = Call(tape="t", call="a", by="main", new_messages=({"role": "user", "content": "ab"},), text="cd", at=0.0)
    tape = tape_of(text)
    with pytest.raises(NotATape, match="`Renderer`"):
        rows(tape)
    (row,) = rows(tape, renderer=RENDERER)
    prompt, completion, _ = RENDERER.authored(
        [{"role": "user", "content": "ab"}], {"role": "assistant", "content": "cd"}
    )
    assert row.input_ids.tolist() == [*prompt, *completion]
    assert row.labels().tolist() == [-100] * len(prompt) + list(completion)
    assert completion[-1] == RENDERER.end_ids[0]
    assert np.isnan(row.old).all()
    assert row.version.tolist() == [-1] * len(completion)
    layer = Tokens(tape="t", call="a", prompt=prompt, completion=completion, tokenizer=RENDERER.hash)
    (layered,) = rows(tape_of(text, layers=[layer]))
    assert layered.input_ids.tolist() == row.input_ids.tolist()
    assert layered.labels().tolist() == row.labels().tolist()


def test_scripted_turns_are_one_row_with_a_renderer_and_the_same_without_one_given_later():
    def episode(engine: ScriptedEngine) -> Tape:
        return asyncio.run(rollout(Speaker(), Letters, "abc", engine=engine))

    recorded = episode(ScriptedEngine(["a", "b", "c"], renderer=RENDERER))
    later = episode(ScriptedEngine(["a", "b", "c"]))
    (row,) = rows(recorded)
    (again,) = rows(later, renderer=RENDERER)
    assert row.input_ids.tolist() == again.input_ids.tolist()
    assert row.labels().tolist() == again.labels().tolist()
    assert WORDS.decode(row.labels()[row.own].tolist()) == "a<|end|>b<|end|>c<|end|>"
    assert np.isnan(row.old).all()


def test_a_fork_s_prefix_is_context_and_its_own_tokens_are_labels():
    parent = asyncio.run(rollout(Speaker(), Letters, "abc", engine=ScriptedEngine([*"abc"], renderer=RENDERER)))
    child = asyncio.run(
        rollout(
            Speaker(),
            Letters,
            EpisodeSpec.of("abc", fork=parent.at_turn(1)),
            engine=ScriptedEngine([*"?dd"], renderer=RENDERER),
        )
    )
    (whole,), (row,) = rows(parent), rows(child)
    assert WORDS.decode(row.labels()[row.own].tolist()) == "d<|end|>d<|end|>"
    kept = len(parent.calls[0].prompt) + len(parent.calls[0].completion)
    assert row.input_ids[:kept].tolist() == whole.input_ids[:kept].tolist()
    assert row.own.min() > kept
    assert row.turn.tolist() == [1, 1, 2, 2]
    assert episode_of(child).fork == f"{parent.id}/1"
    assert child.reward == 0.0


def test_each_turn_has_the_digest_of_the_observation_that_it_answered():
    engine = ScriptedEngine([*"abab"], renderer=RENDERER)
    tape = asyncio.run(rollout(Speaker(), Letters, "abab", engine=engine))
    (row,) = rows(tape)
    shown = [hashlib.sha256(f'text {{"text":"{letter}"}}'.encode()).hexdigest() for letter in "abab"]
    assert row.observations.digests == tuple(shown)
    assert vars(pickle.loads(pickle.dumps(row.observations))) == {"digests": tuple(shown)}, "other ranks get no tape"
    stream = Stream.of([row], [episode_of(tape)])
    assert stream.turns.answered.tolist() == [0, 1, 0, 1]
    fork = rollout(Speaker(), Letters, EpisodeSpec.of("abab", fork=tape.at_turn(2)), engine=engine)
    (half,) = rows(asyncio.run(fork))
    assert half.observations.digests == tuple(shown), "the first own turn answers what the parent was shown"
    unseen = tape_of(call("a", [10], [20]))
    (row,) = rows(unseen)
    assert row.observations.digests == (None,)
    assert Stream.of([row], [episode_of(unseen)]).turns.answered.tolist() == [-1]


def test_calls_without_own_tokens_have_no_observation_in_the_row():
    two = (call("a", [10], [20]), call("b", [30], [40], base="a", keep=2, by="other"))
    world = Identity(name="e")
    begin = Begin(tape="t", task=Task(), task_hash="", agent=Identity(name="m"), env=world, env_seed=0, seed=0, at=0.0)
    records: list[Any] = [begin]
    for one, text in zip(two, "xy", strict=True):
        records.append(step_record("t", Text(text=text), by=ENV))
        records += [one, step_record("t", Answer(text=text), by=one.by, calls=((one.call, 0, 0),))]
    tape = Tape.of([record.body() for record in [*records, End(tape="t", status=Status.FINISHED, cause=None, at=0.0)]])
    (row,) = rows(tape, agents=["other"])
    assert row.calls == ("b",)
    stream = Stream.of([row], [episode_of(tape)])
    assert stream.turns.answered.tolist() == [-1, 0], "a turn without own tokens has none"


def test_what_was_not_drawn_from_the_recorded_distribution_is_no_rl_data():
    fit = call("a", [3, 7], [8, 9])
    greedy = call("b", [7], [8], base="a", keep=4, sampling=Sampling(temperature=0.0))
    narrow = call("c", [7], [8], base="b", keep=6, sampling=Sampling(top_p=0.9))
    tapes = [tape_of(fit, greedy, narrow, tape=f"t{k}", rewards=[k]) for k in range(2)]
    (row,) = rows(tapes[0])
    assert row.labels().tolist() == [-100, -100, 8, 9, -100, 8, -100, 8], "labels all the same: SFT may have them"
    assert np.isnan(row.old).tolist() == [False, False, True, True]
    made, stats = trained(tapes)
    assert stats.applied
    assert {name for _, name, *_ in weighed(made, stats.stream, stats.weight)} == {"a"}


def test_tokens_older_than_the_bound_become_context_and_are_named():
    spans = (("run:0", 0, 2), ("run:3", 2, 3), ("run:5", 3, 5))
    tape = tape_of(call("a", [10], [20, 21, 22, 23, 24], spans=spans), call("b", [30], [40], base="a", keep=6))
    made = rows(tape)
    assert drop_stale(made, "run", 0) == (made, [])
    fresh, stale = drop_stale(made, "run", 3)
    assert [row.labels().tolist() for row in fresh] == [[-100, -100, -100, 22, 23, 24, -100, -100]]
    assert stale == [("t", "a", 0, 2), ("t", "b", 0, 1)]
    assert fresh[0].input_ids.tolist() == made[0].input_ids.tolist()
    assert drop_stale(made, "run", 6) == ([], [("t", "a", 0, 5), ("t", "b", 0, 1)])
    assert drop_stale(made, "other", 0) == ([], [("t", "a", 0, 5), ("t", "b", 0, 1)]), "another lineage's policy"
    authored = tape_of(call("a", [10], [20], old=[math.nan], spans=()))
    assert drop_stale(rows(authored), "run", 9)[1] == [], "what nobody sampled has no age"
