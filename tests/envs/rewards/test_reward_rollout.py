"""Rewards that read the whole tape: in a rollout, in a run by name, relative to a group, with evidence and weights."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import RunConfig, ScriptedEngine, rollout_group
from tapereel.agents.runs import run
from tapereel.agents.setup import ScriptedConfig
from tapereel.envs import Outcome, Rewards, RewardSource
from tapereel.envs.checks.reexec import reexec
from tapereel.envs.checks.rescore import rescore
from tapereel.envs.rewards import GROUP_LAYER, Scored, layer_of, load_rewards, rewarded, training_reward
from tapereel.envs.rewards.relative import best_of, compared, ranked
from tapereel.finetune.interchange import NothingToExport, write
from tapereel.tapes import CauseType, Status, Tape, Task
from tapereel.tapes.audit import audit_run
from tapereel.tapes.errors import UsageError
from tapereel.tapes.records import Reward, total_reward
from tapereel.tapes.store import Store

from ..scored import SPEAKER, Asks, said, scores, tapes


def length(tape: Tape) -> float:
    return float(len(str(tape.actions[-1])))


def ended(tape: Tape) -> float:
    assert tape.closed
    return float(tape.status is Status.FINISHED)


def broken(tape: Tape) -> float:
    raise LookupError("no such column")


def scored_by(*sources: Any) -> Any:
    return rewarded(Asks, Rewards(sources))


def test_sources_score_the_whole_tape_at_its_end_and_on_it():
    (tape,) = tapes(["abc"], env=scored_by(length, RewardSource(score=ended, weight=0.5)))
    assert tape.reward == 3.5
    assert [(r.name, r.value, r.weight, r.step, r.layer) for r in tape.rewards] == [
        ("length", 3.0, 1.0, None, None),
        ("ended", 1.0, 0.5, None, None),
    ]
    assert tape.begin.env.config["rewards"] == ["length", "ended"]
    assert Tape.model_validate_json(tape.model_dump_json()) == tape


def test_the_environments_own_reward_and_that_of_sources_add_up():
    class Own(Asks):
        rewards = Rewards([length])

    (tape,) = tapes(["ab"], Task(public="q", private={"worth": 10.0}), env=Own)
    assert tape.reward == 12.0
    (tape,) = tapes(["ab"], Task(public="q", private={"worth": 10.0}), env=rewarded(Own, Rewards([ended])))
    assert tape.reward == 13.0


@pytest.mark.ledger("F26")
def test_a_source_that_fails_leaves_the_episode_unscored_and_untrained():
    (tape,) = tapes(["abc"], env=scored_by(length, broken))
    assert tape.reward is None
    assert not tape.trains
    assert tape.cause is not None
    assert (tape.status, tape.cause.type, tape.cause.error) == (Status.ERROR, CauseType.ENVIRONMENT, "RewardFailed")
    assert "no such column" in str(tape.cause.message)
    assert [(r.name, r.weight, math.isnan(r.value)) for r in tape.rewards] == [
        ("length", 0.0, False),
        ("broken", 0.0, True),
    ]


def test_an_episode_that_is_cancelled_while_it_is_scored_is_closed_as_cancelled():
    async def cancelled() -> list[str]:
        asked = asyncio.Event()

        async def slow(tape: Tape) -> float:
            asked.set()
            await asyncio.Event().wait()
            return 1.0

        closed: list[str] = []

        class Closes(Asks):
            async def close(self) -> None:
                closed.append("closed")

        episode = asyncio.ensure_future(said("a", env=rewarded(Closes, Rewards([slow]))))
        await asked.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        return closed

    assert asyncio.run(cancelled()) == ["closed"]


def test_an_episode_that_may_not_be_trained_on_is_not_scored():
    class Fails(Asks):
        async def step(self, action: Any) -> Any:
            raise OSError("gone")

    (tape,) = tapes(["abc"], env=rewarded(Fails, Rewards([broken])))
    assert tape.rewards == []
    assert str(tape.cause.message) == "gone"  # type: ignore[union-attr]


def test_rescore_verifies_what_was_scored_so_and_reexec_leaves_it_to_rescore():
    env = scored_by(length)
    (tape,) = tapes(["abc"], env=env)
    verdict, fresh = asyncio.run(rescore(tape, Rewards([length])))
    assert (verdict.outcome, fresh) == ("verified", [])
    verdict, _ = asyncio.run(rescore(tape, Rewards([RewardSource(score=lambda tape: 4.0, name="length")])))
    assert verdict.outcome == "diverged"
    assert asyncio.run(reexec(tape, env)).outcome == "verified"
    assert asyncio.run(reexec(tape, Asks)).outcome == "verified"


def test_evidence_and_weights_of_named_parts_are_kept():
    def told(tape: Tape) -> Scored:
        return Scored({"a": 1.0, "b": 2.0, "c": 5.0}, evidence={"why": "so"}, weights={"b": 0.5, "c": 0})

    (tape,) = tapes(["x"], env=scored_by(RewardSource(score=told, weight=2.0)))
    assert [(r.name, r.value, r.weight, r.evidence) for r in tape.rewards] == [
        ("told/a", 1.0, 2.0, {"why": "so"}),
        ("told/b", 2.0, 1.0, None),
        ("told/c", 5.0, 0.0, None),
    ]
    assert tape.reward == 4.0
    outcome = asyncio.run(Rewards([RewardSource(score=told, weight=2.0)]).outcome(tape))
    assert outcome.reward == {"told/a": 2.0, "told/b": 2.0}
    assert outcome.metrics == {"told/c": 5.0}


@pytest.mark.ledger("T27")
def test_metrics_belong_to_their_own_sample():
    found = tapes(["a", "bb", "cccc"])
    own = scores([RewardSource(score=lambda tape: {"length": length(tape)}, name="m", weight=0)], *found)
    assert [[(r.tape, r.name, r.value) for r in records] for records in own] == [
        [(tape.id, "m/length", n)] for tape, n in zip(found, (1.0, 2.0, 4.0), strict=True)
    ]


# Relative to the group


def group(values: Sequence[float | None], env: Any = Asks) -> list[Tape]:
    async def every() -> list[Tape]:
        return [
            await said("x" * k, Task(public="q", private={"worth": value}), env=env, group="g", attempt=k)
            for k, value in enumerate(values)
        ]

    return asyncio.run(every())


@pytest.mark.parametrize(
    ("source", "worth", "expected"),
    [
        (ranked(), [0.1, 0.5, 0.3], [0.0, 1.0, 0.5]),
        (ranked(), [1.0, 0.0, 1.0], [0.75, 0.0, 0.75]),
        (ranked(), [2.0, 2.0], [0.5, 0.5]),
        (ranked(), [2.0, None, 3.0], [0.0, None, 1.0]),
        (ranked(), [2.0, None], [None, None]),
        (best_of(), [1.0, 3.0, 3.0, None], [0.0, 1.0, 1.0, None]),
        (best_of(by="length"), [9.0, 3.0, 3.0], [None, None, None]),
    ],
)
def test_places_in_a_group(source: Any, worth: list[float | None], expected: list[float | None]):
    records = asyncio.run(Rewards([source]).compare(group(worth)))
    assert [next((r.value for r in own), None) for own in records.values()] == expected


def test_what_a_tape_earns_in_its_group_is_a_layer_that_training_counts():
    found = group([0.1, 0.5, 0.3])
    appended: list[Any] = []
    rewards = Rewards([length, ranked(weight=10.0)])
    beside = asyncio.run(compared(rewards, found, appended.append))
    assert [tape.reward for tape in beside] == [0.1, 0.5, 0.3], "what is on the tape stays as it was"
    assert [training_reward(tape) for tape in beside] == pytest.approx([0.1, 10.5, 5.3])
    assert [tape.digest for tape in beside] == [tape.digest for tape in found]
    assert [r.layer for r in appended] == [GROUP_LAYER] * 3
    again = asyncio.run(compared(rewards, beside, appended.append))
    assert (again, len(appended)) == (beside, 3), "compared once"


def test_a_comparison_that_fails_leaves_the_whole_group_unscored():
    def strange(tapes: Sequence[Tape]) -> list[float]:
        return [1.0]

    found = asyncio.run(compared(Rewards([ranked(), RewardSource(score=strange, per="group")]), group([1.0, 2.0])))
    assert [training_reward(tape) for tape in found] == [None, None]
    for tape in found:
        assert [(r.name, r.weight) for r in layer_of(tape)] == [("rank", 0.0), ("strange", 0.0)]
        assert re.search(r"ValueError: .*\b1\b.*\b2\b", str(layer_of(tape)[1].evidence))


def test_a_rollout_of_a_group_compares_its_attempts():
    env = rewarded(Asks, Rewards([length, best_of()]))
    answers = iter(["a", "abc", "ab"])
    found = asyncio.run(
        rollout_group(SPEAKER, env, Task(public="q"), n=3, engine=ScriptedEngine(lambda request: next(answers)))
    )
    assert sorted((tape.reward, training_reward(tape)) for tape in found) == [(1.0, 1.0), (2.0, 2.0), (3.0, 4.0)]


# By name


WORLD = """
from tapereel.agents import agent
from tapereel.envs import Environment, Outcome, Rewards, RewardSource
from tapereel.envs.rewards.relative import ranked
from tapereel.tapes import Answer, Text

class Asks(Environment[Answer]):
    async def reset(self, task):
        return Text(text=str(task))
    async def step(self, action):
        return Outcome(terminated=True)

@agent
async def speaker(tape, llm):
    yield Answer(text=(await llm(tape)).text)

def length(tape):
    return float(len(str(tape.actions[-1])))

both = Rewards([RewardSource(score=length, name="twice", weight=2.0), ranked(by="length")])
"""


def world(folder: Path, name: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(WORLD, encoding="utf-8")
    return str(path)


@pytest.mark.ledger("F25")
def test_a_run_is_scored_by_what_its_configuration_names(tmp_path: Path):
    path = world(tmp_path, "world_of_rewards")
    file = tmp_path / "halves.py"
    file.write_text("def reward_func(queries, prompts):\n    return [0.5] * len(queries)\n", encoding="utf-8")
    config = RunConfig(
        agent=f"{path}:speaker",
        env=f"{path}:Asks",
        tasks=("t1", "t2"),
        attempts=2,
        engine=ScriptedConfig(answers=("abc",)),
        rewards=(f"{path}:length", f"{path}:both", str(file)),
    )
    summary = run(config, tmp_path / "run")
    assert (summary.reward, summary.scored) == (3.0 + 6.0 + 0.5, 4)
    with Store.open(tmp_path / "run") as store:
        for found in store.summaries():
            tape = store.tape(found.id)
            assert [(r.name, r.value, r.weight) for r in tape.rewards] == [
                ("length", 3.0, 1.0),
                ("twice", 3.0, 2.0),
                ("halves", 0.5, 1.0),
            ]
            assert [(r.name, r.value) for r in layer_of(tape)] == [("rank", 0.5)]
    run(config, tmp_path / "run", resume=True)
    with Store.open(tmp_path / "run") as store:
        assert all(len(layer_of(store.tape(found.id))) == 1 for found in store.summaries()), "compared once"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module_anywhere:x", "'no_such_module_anywhere'"),
        ("math:pi", "math:pi.*float.*Rewards"),
        ("ftp://x", "'ftp(://x)?'"),
        ("nowhere.py", r"/nowhere\.py$"),
    ],
)
def test_a_name_that_is_no_reward_is_refused(name: str, says: str):
    with pytest.raises(UsageError, match=says):
        load_rewards([name])


def test_two_rewards_of_one_name_are_refused(tmp_path: Path):
    path = world(tmp_path, "world_of_two_rewards")
    with pytest.raises(UsageError, match=r"'length'.*`name`"):
        load_rewards([f"{path}:length", f"{path}:length"])
    assert load_rewards([]) is None


def test_a_tape_document_with_a_group_layer_reads_back():
    (one, _) = asyncio.run(compared(Rewards([ranked()]), group([1.0, 2.0])))
    document = json.loads(one.model_dump_json())
    assert training_reward(Tape.model_validate(document)) == training_reward(one) == 1.0


FAILING = """
from tapereel.agents import ChatAgent
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Task, Text

class Asks(Environment[Answer]):
    async def reset(self, task):
        return Text(text="q")

    async def step(self, action):
        return Outcome(reward=0.5, terminated=True)

def picky(tape):
    if tape.begin.task.public == "q1":
        raise LookupError("no such column")
    return 1.0

agent = ChatAgent(parse=lambda text: Answer(text=text))
tasks = [Task(public=f"q{k}", private="a") for k in range(3)]
"""


def test_what_an_environment_scored_beside_a_source_that_failed_is_no_reward(tmp_path: Path):
    """Its own 0.5 is a sum with a part missing: the tape, the index, a run's means, exports and the audit all say
    unscored, and the number stays on record."""
    path = tmp_path / "world_that_fails.py"
    path.write_text(FAILING, encoding="utf-8")
    config = RunConfig(
        seed=0,
        agent=f"{path}:agent",
        env=f"{path}:Asks",
        tasks=f"{path}:tasks",
        attempts=2,
        rewards=(f"{path}:picky",),
        engine=ScriptedConfig(answers=["x"]),
    )
    summary = run(config, tmp_path / "run")
    assert (summary.episodes, summary.scored, summary.reward) == (8, 4, 1.5), "a failed episode is tried again, once"
    with Store.open(tmp_path / "run") as store:
        failed = [tape for tape in store.tapes() if tape.begin.task.public == "q1"]
        assert [(tape.reward, training_reward(tape), tape.trains) for tape in failed] == [(None, None, False)] * 4
        assert [s.reward for s in store.summaries() if s.id in {tape.id for tape in failed}] == [None] * 4
        assert {tape.reward for tape in store.tapes(min_reward=0.4)} == {1.5}
        own = failed[0].rewards[0]
        assert (own.name, own.value, own.weight) == ("reward", 0.5, 1.0)
        assert total_reward(failed[0].rewards[:1]) == 0.5
        _, told = audit_run(store)
    assert told.unscored == 4
    assert {(c.name, c.metric): (c.scores, c.total) for c in told.components}["reward", False] == (4, 2.0)
    write(failed, tmp_path / "out.jsonl", "sft")
    assert [json.loads(line)["reward"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [None] * 4
    with pytest.raises(NothingToExport, match="4 unscored"):
        write(failed, tmp_path / "pairs.jsonl", "preference")
    assert not (tmp_path / "pairs.jsonl").exists()


def test_a_metric_that_is_nan_leaves_the_reward_as_it_is_and_a_reward_that_is_nan_does_not():
    (tape,) = tapes(["ab"], Task(public="q", private={"worth": 2.0}))
    of = {"tape": tape.id, "value": math.nan}
    assert total_reward([*tape.rewards, Reward(**of, weight=0.0)]) == 2.0
    assert total_reward([*tape.rewards, Reward(**of)]) is None
    assert total_reward([*tape.rewards, Reward(**of, weight=0.0, evidence={"failed": "it raised"})]) is None
    assert total_reward([Reward(tape=tape.id, value=1.0, weight=0.0)]) is None


def test_a_failed_layer_says_nothing_of_the_reward_on_the_tape_but_a_failed_comparison_does():
    (tape,) = tapes(["ab"], Task(public="q", private={"worth": 2.0}))
    again = asyncio.run(Rewards([broken]).score(tape, layer="again"))
    later = Tape.of(tape.bodies, layers=again)
    assert (later.reward, training_reward(later)) == (2.0, 2.0)
    beside = [record.model_copy(update={"layer": GROUP_LAYER}) for record in again]
    later = Tape.of(tape.bodies, layers=beside)
    assert (later.reward, training_reward(later)) == (2.0, None)


def reward(tape: Tape) -> float:
    return 4.0


def worth(tape: Tape) -> dict[str, float]:
    return {"style": 1.0, "length": 2.0}


@pytest.mark.parametrize(
    ("parts", "source", "names"),
    [
        (None, reward, ["reward", "reward_2"]),
        ({"reward": 10.0}, reward, ["reward", "reward_2"]),
        ({"worth/style": 10.0}, worth, ["worth/style", "worth_2/style", "worth_2/length"]),
        ({"worth": 10.0}, worth, ["worth", "worth_2/style", "worth_2/length"]),
    ],
)
def test_a_source_named_as_a_component_of_the_environment_is_told_apart(parts: Any, source: Any, names: list[str]):
    class Parts(Asks):
        async def step(self, action: Any) -> Any:
            return Outcome(reward=parts or 10.0, terminated=True)

    (tape,) = tapes(["ab"], env=rewarded(Parts, Rewards([source])))
    assert [r.name for r in tape.rewards] == names
    assert tape.reward == 10.0 + (4.0 if source is reward else 3.0)
    verdict, fresh = asyncio.run(rescore(tape, Rewards([source])))
    assert (verdict.outcome, fresh) == ("verified", [])

    def less(tape: Tape) -> float:
        return 3.0

    verdict, _ = asyncio.run(rescore(tape, Rewards([RewardSource(score=less, name=source.__name__)])))
    assert verdict.outcome == "diverged"
    again = asyncio.run(reexec(tape, rewarded(Parts, Rewards([source]))))
    assert again.outcome == "verified", again
