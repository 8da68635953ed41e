"""Rescore answers for every recorded component, and a reward that fails is told, counted and never recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import ScriptedEngine, rollout
from tapereel.cli import main
from tapereel.envs import Rewards, RewardSource
from tapereel.envs.checks.rescore import disagreement, opinion, rescore
from tapereel.envs.rewards import Scorer, rewarded
from tapereel.tapes import Tape
from tapereel.tapes.audit import Verdict
from tapereel.tapes.store import Store

from ...cli.lab import answer_of
from .worlds import Counting, Speaker, word

TAPES = 6


def both(tape: Tape) -> dict[str, float]:
    return {"a": 2.0, "b": 1.0}


def steps(tape: Tape) -> list[float]:
    return [float(len(str(action))) for action in tape.actions]


def boom(tape: Tape) -> float:
    raise ValueError("no key")


def scored_by(*sources: Any, seed: int = 1) -> Tape:
    """A tape that was scored so as it was recorded."""
    make = rewarded(Counting, Rewards(sources))
    return asyncio.run(rollout(Speaker(), make, 3, engine=ScriptedEngine(word), seed=seed))


def again(tape: Tape, *sources: Any) -> Verdict:
    return asyncio.run(rescore(tape, Rewards(sources)))[0]


def now(name: str, score: Scorer[Any], **more: Any) -> RewardSource[Any]:
    return RewardSource(score=score, name=name, **more)


# What is recorded and isn't given now


@pytest.mark.parametrize(
    ("score", "field"),
    [
        (lambda tape: {"a": 2.0}, "reward.both/b"),
        (lambda tape: {"b": 1.0}, "reward.both/a"),
        (lambda tape: {}, "reward.both/a"),
        (lambda tape: None, "reward.both/a"),
        (lambda tape: 2.0, "reward.both/a"),
    ],
)
def test_a_component_that_its_source_gave_and_gives_no_more_diverges(score: Scorer[Any], field: str):
    tape = scored_by(both)
    assert again(tape, both).outcome == "verified"
    verdict = again(tape, now("both", score))
    assert verdict.outcome == "diverged"
    assert verdict.divergence is not None
    assert (verdict.divergence.field, verdict.divergence.observed) == (field, None)
    assert f" {verdict.divergence.recorded:g} " in verdict.divergence.sentence


def test_a_source_of_single_steps_that_says_nothing_more_diverges():
    tape = scored_by(now("steps", steps, per="step"))
    assert again(tape, now("steps", steps, per="step")).outcome == "verified"
    quiet = now("steps", lambda tape: [None for _ in tape.actions], per="step")
    divergence = again(tape, quiet).divergence
    assert divergence is not None
    assert divergence.recorded is not None
    assert divergence.observed is None
    assert divergence.where is None


def test_a_component_of_another_source_is_not_spoken_of():
    tape = scored_by(both, now("length", lambda tape: float(len(tape))))
    verdict = again(tape, both)
    assert (verdict.outcome, verdict.checked) == ("verified", {"rewards": 2})
    assert ["run" in note for note in verdict.not_checked if "'length'" in note] == [True]
    nobody = again(tape, now("bot", lambda tape: {"a": 2.0}))
    assert nobody.outcome == "unverifiable", "a name's beginning makes no source of it"


def test_a_source_whose_name_has_a_slash_answers_for_its_own_parts():
    tape = scored_by(now("a/b", lambda tape: {"c": 1.0}, pure=False))
    assert "pure=False" in str(again(tape, now("a/b", lambda tape: {"c": 1.0}, pure=False)))
    assert again(tape, now("a/b", lambda tape: {}), now("a", lambda tape: None)).outcome == "diverged"
    assert "'a/b/c'" in str(again(tape, now("a/b/c/d", lambda tape: 1.0)).not_checked)


# What fails


def test_a_failure_diverges_from_a_score_and_beside_none_nothing_can_be_told():
    tape = scored_by(both)
    verdict = again(tape, now("both", boom))
    assert verdict.divergence is not None
    assert verdict.divergence.recorded == 2.0
    assert "ValueError: no key" in verdict.divergence.sentence
    line = boom.__code__.co_firstlineno + 1
    assert verdict.divergence.where == f"{__file__}:{line} in boom"
    alone = again(tape, boom)
    assert alone.outcome == "unverifiable"
    assert "ValueError: no key" in (alone.reason or "")
    assert [(f.source, f.where) for f in alone.failures] == [("boom", f"{__file__}:{line} in boom")]
    assert alone.checked == {"rewards": 0}


def test_a_failure_that_is_recorded_is_no_score_that_another_failure_could_equal():
    tape = scored_by(both, boom)
    assert tape.reward is None
    verdict = again(tape, both, boom)
    assert (verdict.outcome, verdict.checked) == ("unverifiable", {"rewards": 0})
    mended = again(tape, both, now("boom", lambda tape: 1.0))
    assert mended.divergence is not None
    assert (mended.divergence.field, mended.divergence.recorded) == ("reward.boom", None)
    assert mended.divergence.observed == 1.0


def test_the_weight_that_a_failure_takes_from_the_others_is_no_divergence_of_theirs():
    tape = scored_by(now("both", both, weight=0.5), now("fine", lambda tape: 1.0))
    verdict = again(tape, now("both", both, weight=0.5), now("fine", boom))
    assert verdict.divergence is not None
    assert verdict.divergence.field == "reward.fine"
    assert any("both/a" in note and "failed" in note for note in verdict.not_checked)


@pytest.mark.parametrize(("value", "told"), [(float("nan"), "nan"), ("1", "not '1'")])
def test_what_is_no_score_is_a_failure_of_the_function_that_gave_it(value: Any, told: str):
    def odd(tape: Tape) -> Any:
        return value

    verdict = again(scored_by(both), odd)
    assert verdict.outcome == "unverifiable"
    assert told in verdict.failures[0].error
    assert verdict.failures[0].where == f"{__file__}:{odd.__code__.co_firstlineno} in odd"


def test_a_failing_reward_leaves_nothing_to_record():
    tape = scored_by(both)
    _, fresh = asyncio.run(rescore(tape, Rewards([boom, both]), layer="later"))
    assert fresh == []


def test_two_rewards_of_which_one_fails():
    tape = scored_by(both)
    said = asyncio.run(opinion(tape, Rewards([both]), Rewards([boom])))
    assert (said.ours, said.theirs, [f.source for f in said.failures]) == (3.0, None, ["boom"])
    found = disagreement([said])
    assert (found.unscored, found.failed) == (1, 1)


# The verb

REWARDS = """
def both(tape):
    return {"a": 2.0, "b": float(len(tape))}


def boom(tape):
    raise ValueError("no key")


def sometimes(tape):
    if tape.begin.seed % 3 == 0:
        raise KeyError(f"seed {tape.begin.seed}")
    return 1.0


def text(tape):
    return "1"


def nothing(tape):
    return None
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of six tapes, and beside it a file of rewards, as `run` and `f"{run}.py"`."""
    name = f"rescored_{tmp_path.name.replace('-', '_')}"

    async def play(store: Store) -> None:
        for seed in range(TAPES):
            await rollout(Speaker(), Counting, 3, engine=ScriptedEngine(word), seed=seed, journal=store.writer)

    with Store.create(tmp_path / name, durability="os") as store:
        asyncio.run(play(store))
    (tmp_path / f"{name}.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return name


def layers(run: str) -> int:
    with Store.open(run) as store:
        return sum(len(tape.layers) for tape in store.tapes())


def test_what_is_added_is_not_called_verified(run: str, capsys: pytest.CaptureFixture[str]):
    words = ("replay", "rewards", run, "--reward", f"{run}.py:both", "--layer", "one")
    assert main([*words]) == 0
    out = capsys.readouterr().out
    assert f"layer 'one': {2 * TAPES} " in out
    assert f" {TAPES} tapes" in out
    assert "0 verified" in out
    again = answer_of(capsys, *words)
    assert (again["added"], again["counts"]["verified"], layers(run)) == (0, TAPES, 2 * TAPES)
    assert (
        answer_of(capsys, "replay", "rewards", run, "--reward", f"{run}.py:nothing", "--layer", "two", code=2)["added"]
        == 0
    )
    without = answer_of(capsys, *words[:-2], code=2)["verdicts"][0]["not_checked"]
    assert sum("layer 'one'" in note for note in without) == 2, without


def test_scores_and_show_read_the_rewards_of_a_layer(run: str, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", "rewards", run, "--reward", f"{run}.py:both", "--layer", "one"]) == 0
    with Store.open(run) as store:
        rewards = {tape.id: 2.0 + len(tape) for tape in store.tapes()}
        assert rewards != {summary.id: summary.reward for summary in store.summaries()}
    capsys.readouterr()
    listed = answer_of(capsys, "show", run, "--layer", "one")
    assert {tape["id"]: tape["reward"] for tape in listed["tapes"]} == rewards
    scores = answer_of(capsys, "scores", run, "--layer", "one")["scores"]
    assert scores["reward"]["value"] == listed["mean_reward"] == sum(rewards.values()) / TAPES
    first, reward = next(iter(rewards.items()))
    assert main(["show", run, first]) == 0
    assert f"reward in layer one: {reward:g}" in capsys.readouterr().out
    for verb in ("show", "scores"):
        assert main([verb, run, "--layer", "on"]) == 64
        assert "the layers are one" in capsys.readouterr().err


def test_failures_are_not_recorded_and_their_layers_name_stays_free(run: str, capsys: pytest.CaptureFixture[str]):
    words = (run, "--layer", "one", "--reward")
    assert main(["replay", "rewards", *words, f"{run}.py:boom"]) == 2
    out = capsys.readouterr().out
    assert f" {TAPES} of {TAPES} " in out
    assert "ValueError: no key" in out
    assert f"{run}.py:7 " in out
    assert layers(run) == 0
    assert main(["replay", "rewards", *words, f"{run}.py:sometimes"]) == 2
    assert f" 2 of {TAPES} " in capsys.readouterr().out
    assert layers(run) == TAPES - 2
    found = answer_of(capsys, "replay", "rewards", *words, f"{run}.py:sometimes", code=2)
    assert (found["added"], found["counts"]["verified"], found["counts"]["unverifiable"]) == (0, TAPES - 2, 2)
    (kind,) = found["failures"]
    assert (kind["tapes"], kind["source"]) == (2, "sometimes")
    assert "KeyError: 'seed 0'" in kind["first"]


@pytest.mark.parametrize(("name", "told"), [("boom", "ValueError: no key"), ("text", "not '1'")])
def test_a_failing_reward_is_named_without_a_layer_too(
    run: str, name: str, told: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["replay", "rewards", run, "--reward", f"{run}.py:{name}"]) == 2
    out = capsys.readouterr().out
    assert told in out
    assert f"{run}.py:" in out
    found = answer_of(capsys, "replay", "rewards", run, "--reward", f"{run}.py:{name}", code=2)
    assert [kind["tapes"] for kind in found["failures"]] == [TAPES]
    assert all(told in verdict["reason"] for verdict in found["verdicts"])


def test_two_rewards_of_which_one_fails_are_not_compared_in_silence(run: str, capsys: pytest.CaptureFixture[str]):
    words = ("replay", "rewards", run, "--reward", f"{run}.py:both", "--against")
    found = answer_of(capsys, *words, f"{run}.py:boom", code=2)
    assert (found["unscored"], found["failed"], found["failures"][0]["tapes"]) == (TAPES, TAPES, TAPES)
    assert main([*words, f"{run}.py:sometimes"]) == 2
    out = capsys.readouterr().out
    assert f" 2 of {TAPES} " in out
    assert "KeyError: 'seed 0'" in out
    assert main([*words, f"{run}.py:nothing"]) == 2, "a table of nothing compares nothing"
    assert "difference" not in capsys.readouterr().out
    assert main([*words, f"{run}.py:both"]) == 0
