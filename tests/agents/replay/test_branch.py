"""Branching: what goes on unchanged comes to the same, what is changed parts at the turn, what can't be verified is
refused, and whoever insists is on record."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tapereel as tr
from tapereel.agents import EpisodeSpec, ScriptedEngine, rollout
from tapereel.agents.replay import branch, continuation
from tapereel.agents.replay.branching import PrefixUnverified
from tapereel.cli import main
from tapereel.envs import Outcome
from tapereel.tapes import Answer, Status, Tape, Task, Text
from tapereel.tapes.audit.compare import diff_tapes
from tapereel.tapes.common.stats import number
from tapereel.tapes.store import Store

from ...cli.lab import answer_of, refusal_of, settings
from .worlds import RENDERER, WORLDS, Counting, Speaker, Unequal, record, word

HERE = str(Path(__file__).with_name("worlds.py"))
VOICES = str(Path(__file__).with_name("voices.py"))
DETERMINED = [name for name in WORLDS if name != "time and chance"]
"""All but the one in which the clock is told."""


def go_on(tape: Tape, turn: int, *, world: str = "one speaker", tokens: bool = False, **changes: Any) -> list[Tape]:
    make, env, _, model, _ = WORLDS[world]
    model, env = changes.pop("model", model), changes.pop("env", env)
    engine = (Unequal if world == "a race" else ScriptedEngine)(model, renderer=RENDERER if tokens else None)
    group = {name: changes.pop(name) for name in ("n", "unverified") if name in changes}
    spec = EpisodeSpec.of(continuation(tape, turn), **changes)
    return asyncio.run(branch(make(), env, spec, engine=engine, **group))


def asked(tape: Tape, since: int) -> list[Any]:
    """Every call that the tape made from that turn on: request and answer, down to the tokens."""
    log = tape._log
    begun = log.cuts[since].records if since < len(log.cuts) and tape.parent is None else 0
    calls = [call for at, call in log.call_order if at >= begun] if since < len(log.cuts) else []
    return [
        (
            call.by,
            call.conversation,
            call.seed,
            call.messages,
            call.text,
            call.completion,
            call.finish,
            call.prompt,
        )
        for call in calls
    ]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("world", DETERMINED)
def test_unchanged_it_goes_on_as_recorded_from_every_turn(world: str, tokens: bool):
    tape = record(world, tokens=tokens)
    over = tape.status in (Status.FINISHED, Status.TRUNCATED) or world == "a world that breaks"
    turns = range(tape.turns if over else tape.turns + 1)
    for turn in turns:
        retries = WORLDS[world][4].get("retries")
        if retries is not None and world == "a model that dies" and turn == tape.turns:
            continue  # how often a dying model is asked is no part of what a tape says
        child = go_on(tape, turn, world=world, tokens=tokens)[0]
        assert (child.begin.parent.tape, child.begin.parent.turn) == (tape.id, turn)  # type: ignore[union-attr]
        found = diff_tapes(tape, child)
        assert found.parting is None, (turn, found.parting)
        assert asked(child, turn) == asked(tape, turn)
    assert len(turns) > 0


@given(st.integers(0, 50), st.integers(0, 3), st.booleans())
def test_a_tape_differs_in_nothing_from_itself_and_a_changed_fork_exactly_from_its_turn_on(
    seed: int, turn: int, tokens: bool
):
    tape = record("thoughts", seed=seed, tokens=tokens)
    turn = min(turn, tape.turns - 1)
    same = diff_tapes(tape, Tape.model_validate_json(tape.model_dump_json()))
    assert (same.parting, same.settings, same.steps, same.shared) == (None, (), (), len(tape))
    assert same.exit_code == 0
    (child,) = go_on(tape, turn, world="thoughts", tokens=tokens, model=lambda request: word(request) + "!")
    found = diff_tapes(tape, child)
    assert found.parting is not None
    assert (found.shared_turns, found.parting.turn) == (turn, turn)
    assert found.shared == child.inherited == found.parting.step
    assert (found.parting.field, found.exit_code) == ("reasoning.text", 1)
    assert found.parting.second == f"{found.parting.first}!"
    back = diff_tapes(child, tape)
    assert back.parting is not None
    assert (back.shared, back.parting.first) == (found.shared, found.parting.second)


def test_a_group_of_continuations_shares_all_but_its_seeds():
    tape = record("one speaker")
    made = go_on(tape, 1, n=4)
    assert [child.begin.attempt for child in made] == [0, 1, 2, 3]
    assert len({child.begin.group for child in made}) == 1
    assert {child.begin.env_seed for child in made} == {tape.begin.env_seed}
    assert made[0].begin.seed == tape.begin.seed
    assert len({child.begin.seed for child in made}) == 4
    assert {child.begin.parent.digest for child in made if child.begin.parent} == {tape.at_turn(1).digest}
    assert {child.begin.split for child in made} == {"branch"}
    assert len({str(child.actions) for child in made}) > 1
    again = go_on(tape, 1, n=4)
    assert [child.actions for child in again] == [child.actions for child in made]
    assert again[0].begin.group != made[0].begin.group, "two branches of one turn are two groups"
    assert [child.actions for child in go_on(tape, 1, n=4, seed=99)] != [child.actions for child in made]


def test_a_fork_is_forked_at_its_own_turns_and_at_its_parents():
    tape = record("one speaker")
    (child,) = go_on(tape, 1, seed=5)
    (below,) = go_on(child, 2)
    assert below.begin.parent is not None
    assert (below.begin.parent.tape, below.begin.parent.turn) == (child.id, 2)
    assert diff_tapes(child, below).parting is None
    (beside,) = go_on(child, 1)
    assert beside.begin.parent is not None
    assert beside.begin.parent.tape in (tape.id, child.id)
    assert diff_tapes(child, beside).parting is None


class Steps(Counting):
    """Counts what is done to it."""

    taken = 0

    async def step(self, action: Any) -> Outcome:
        type(self).taken += 1
        return await super().step(action)


def _drifting(**attributes: Any) -> type[Counting]:
    """A world whose answers are other ones each time."""
    drift = itertools.count()

    class Drifting(Counting):
        async def reset(self, task: int) -> Text:
            self.left = task
            return Text(text=f"request {next(drift)}")

    for name, value in attributes.items():
        setattr(Drifting, name, value)
    return Drifting


def test_what_does_not_come_back_is_refused_and_insisting_is_on_record():
    tape, world = record("one speaker"), _drifting()
    with pytest.raises(PrefixUnverified, match=r"observation 0\b") as refused:
        go_on(tape, 1, env=world)
    assert refused.value.diverged
    made = go_on(tape, 1, env=world, n=2, unverified=True)
    for child in made:
        assert child.begin.parent is not None
        assert child.begin.parent.unverified is not None
        assert "observation 0" in child.begin.parent.unverified
        assert child.status is Status.FINISHED
        again = Tape.model_validate_json(child.model_dump_json())
        assert again.begin.parent == child.begin.parent
    (sound,) = go_on(tape, 1, unverified=True)
    assert sound.begin.parent is not None
    assert sound.begin.parent.unverified is None, "what is verified is not said to be unverified"
    assert b"unverified" not in sound.bodies[0]


def test_what_is_declared_to_vary_is_no_divergence():
    world = _drifting(varies={"text.text": "[0-9]+"})
    tape = record("one speaker", fork=None)
    with pytest.raises(PrefixUnverified):
        go_on(tape, 1, env=world)  # "say 3 things" is more than a number
    asked_for = go_on(tape, 0, env=world, unverified=True)[0]
    again = go_on(asked_for, 1, env=_drifting(varies={"text.text": ".+"}))
    assert again[0].begin.parent is not None
    assert again[0].begin.parent.unverified is None


def test_an_irreversible_world_is_not_touched_unless_somebody_insists():
    tape = record("one speaker")

    class Irreversible(Steps):
        effect = "irreversible"

    with pytest.raises(PrefixUnverified, match="irreversible") as refused:
        go_on(tape, 2, env=Irreversible)
    assert (refused.value.diverged, Irreversible.taken) == (False, 0)
    (child,) = go_on(tape, 2, env=Irreversible, unverified=True)
    assert child.begin.parent is not None
    assert "irreversible" in str(child.begin.parent.unverified)
    assert Irreversible.taken == 3


def test_a_world_that_breaks_on_the_way_back_can_t_be_gone_on_in():
    tape = record("one speaker")

    class Broken(Counting):
        async def reset(self, task: int) -> Text:
            raise OSError("no such world")

    for unverified in (False, True):
        with pytest.raises(PrefixUnverified, match=r"OSError.*world"):
            go_on(tape, 1, env=Broken, unverified=unverified)


def test_another_seed_of_the_world_will_do_where_it_comes_to_the_same_state():
    class Late(Counting):
        """Draws in its second turn for the first time."""

        async def reset(self, task: int) -> Text:
            self.left = task
            return Text(text="go")

        async def step(self, action: Any) -> Outcome:
            self.left -= 1
            seen = Text(text="on" if self.left > 1 else f"drawn {self.rng.randrange(10**9)}")
            return Outcome(seen, terminated=self.left == 0)

    engine = ScriptedEngine(["a", "b", "c"])
    tape = asyncio.run(rollout(Speaker(), Late, EpisodeSpec.of(Task(private=3, bare=True), env_seed=3), engine=engine))
    (child,) = go_on(tape, 1, env=Late, env_seed=99)
    found = diff_tapes(tape, child)
    assert found.parting is not None
    assert found.parting.turn == 1
    with pytest.raises(PrefixUnverified):
        go_on(tape, 2, env=Late, env_seed=99)


def test_a_turn_that_is_not_there_is_refused():
    tape = record("one speaker")
    for turn in (-1, 3, 4):
        with pytest.raises(ValueError, match=rf"\bturn {turn}\b"):
            go_on(tape, turn)
    with pytest.raises(ValueError, match=r"\bn\b.* 0"):
        go_on(tape, 1, n=0)


# The verb


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run of two tasks, by the names of this module's worlds."""
    words = ["run", "--agent", f"{HERE}:Speaker", "--env", f"{HERE}:Counting", "--out", str(tmp_path / "run")]
    assert main([*words, *settings(f"engine.policy={HERE}:word", "tasks=[3, 4]")]) == 0
    return tmp_path / "run"


def ids(run: Path, **where: Any) -> list[str]:
    with Store.open(run) as store:
        return [summary.id for summary in store.summaries(**where)]


def test_what_scored_the_run_scores_its_branches(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    score = tmp_path / "score.py"
    score.write_text("def reward_func(queries, prompts, labels):\n    return [float(len(q)) for q in queries]\n")
    run = tmp_path / "run"
    words = ["run", "--agent", f"{HERE}:Speaker", "--env", f"{HERE}:Counting", "--out", str(run)]
    assert main([*words, *settings(f"engine.policy={HERE}:word", "tasks=[3]", f'rewards=["{score}"]')]) == 0
    capsys.readouterr()
    (first,) = ids(run)
    child = answer_of(capsys, "branch", str(run), first, "--at", "1")["tapes"][0]["id"]
    with Store.open(run) as store:
        alone = {reward.name: reward.value for reward in store.tape(first).rewards}
        assert len(alone) > 1
        assert {reward.name: reward.value for reward in store.tape(child).rewards} == alone


def test_the_verb_goes_on_records_it_in_the_run_and_draws_the_tree(recorded: Path, capsys: pytest.CaptureFixture[str]):
    first = ids(recorded)[0]
    capsys.readouterr()
    run = str(recorded)
    found = answer_of(capsys, "branch", run, first, "--at", "1")
    assert (found["parent"], found["turn"], found["unverified"]) == (first, 1, None)
    assert found["tapes"][0]["parting"] is None
    some = settings(f"engine.policy={VOICES}:loud", "sampling.temperature=0.25")
    found = answer_of(capsys, "branch", run, first, "--at", "2", "--n", "3", *some)
    assert {tape["parting"]["turn"] for tape in found["tapes"]} == {2}
    child = found["tapes"][0]["id"]
    found = answer_of(capsys, "branch", run, child, "--at", "2")
    with Store.open(recorded) as store:
        made = store.tape(child)
        parents = [tape.begin.parent for tape in store.tapes() if tape.begin.parent is not None]
    assert made.begin.sampling is not None
    assert made.begin.sampling.temperature == 0.25
    forks = sorted((first, child).index(parent.tape) * 10 + parent.turn for parent in parents)
    assert forks == [1, 2, 2, 2, 12]
    shown = answer_of(capsys, "show", run)["tapes"]
    assert sorted(tape["parent"] for tape in shown if tape["parent"]) == sorted(parent.tape for parent in parents)
    assert answer_of(capsys, "replay", "agent", run, first)["counts"]["verified"] == 1
    assert answer_of(capsys, "verify", run)


def test_the_verb_refuses_before_anything_is_written(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    name = "branch_worlds_" + format(random.getrandbits(32), "x")
    (tmp_path / f"{name}.py").write_text(
        "from tapereel.envs import Environment, Outcome\n"
        "from tapereel.tapes import Text\n\n\n"
        "class Other(Environment):\n"
        "    async def reset(self, task):\n"
        "        return Text(text='another world')\n\n"
        "    async def step(self, action):\n"
        "        return Outcome(reward=1.0, terminated=True)\n\n\n"
        "class Grave(Other):\n"
        "    effect = 'irreversible'\n"
    )
    first, run = ids(recorded)[0], str(recorded)
    segments = sorted(path.name for path in (recorded / "tapes").glob("*.jsonl"))
    capsys.readouterr()
    told = refusal_of(capsys, "branch", run, first, "--at", "1", "--env", f"{name}.py:Other", code=1)
    assert "another world" in told
    assert "--unverified" in told
    told = refusal_of(capsys, "branch", run, first, "--at", "1", "--env", f"{name}.py:Grave", code=2)
    assert "irreversible" in told
    for words in (["--at", "3"], ["--at", "9"], ["--at", "-1"], [], ["--at", "1", "--set", "engine.no=1"]):
        refusal_of(capsys, "branch", run, first, *words)
    refusal_of(capsys, "branch", run, "--at", "1")
    refusal_of(capsys, "branch", run, "zzz", "--at", "1")
    assert sorted(path.name for path in (recorded / "tapes").glob("*.jsonl")) == segments
    found = answer_of(capsys, "branch", run, first, "--at", "1", "--env", f"{name}.py:Grave", "--unverified")
    assert "irreversible" in found["unverified"]
    with Store.open(recorded) as store:
        parent = store.tape(found["tapes"][0]["id"]).begin.parent
    assert parent is not None
    assert "irreversible" in (parent.unverified or "")


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C is, also where the tests run in the background of a shell, which has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_ends_it_with_whole_tapes(recorded: Path, capsys: pytest.CaptureFixture[str]):
    first, run = ids(recorded)[0], str(recorded)
    some = settings(f"engine.policy={VOICES}:interrupted")
    assert main(["branch", run, first, "--at", "1", "--n", "3", *some]) == 130
    assert capsys.readouterr().err.endswith(": interrupted\n")
    assert {status for (status,) in _statuses(recorded)} <= {"cancelled", "finished"}
    assert main(["verify", run]) == 0


def _statuses(run: Path) -> list[tuple[str | None]]:
    with Store.open(run) as store:
        return [(summary.status,) for summary in store.summaries(split="branch")]


def test_the_weights_that_sampled_a_tape_give_its_tokens_again_and_others_must_be_named(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    with Store.open(trained) as store:
        tape = next(tape for tape in store.tapes(split="train", closed=True) if _version(tape) == 1)
    run = str(trained)
    told = refusal_of(capsys, "branch", run, tape.id, "--at", "0")
    assert "`--model RUN/checkpoints/" in told
    model = str(trained / "checkpoints" / "update-000001" / "hf")
    found = answer_of(capsys, "branch", run, tape.id, "--at", "0", "--model", model)
    assert found["tapes"][0]["parting"] is None
    with Store.open(trained) as store:
        child = store.tape(found["tapes"][0]["id"])
    assert [call.completion for call in child.calls] == [call.completion for call in tape.calls]


def _version(tape: Tape) -> int:
    (span,) = tape.calls[0].spans
    return int(span[0].rpartition(":")[2])


def test_a_continuation_is_compared_with_what_the_recorded_one_earned_from_there(
    recorded: Path, capsys: pytest.CaptureFixture[str]
):
    """An unchanged continuation earns what the recorded one did from that turn on, and counts its own turns alone."""
    run, first = str(recorded), ids(recorded)[0]
    found = answer_of(capsys, "branch", run, first, "--at", "1")
    with Store.open(recorded) as store:
        parent, child = store.tape(first), store.tape(found["tapes"][0]["id"])
    assert parent.reward != found["recorded_reward"] == found["mean_reward"] == child.reward
    assert found["tapes"][0]["own_turns"] == child.turns - 1
    below = answer_of(capsys, "branch", run, child.id, "--at", "1")
    assert below["recorded_reward"] == child.reward, "all of a fork's own turns"
    assert main(["branch", run, first, "--at", "1"]) == 0
    out = capsys.readouterr().out
    assert f" {number(child.reward)} over 1 " in out
    assert f" earned {number(child.reward)}" in out


def test_continuations_are_no_episodes_of_the_run(tmp_path: Path) -> None:
    made = tr.run(tr.ChatAgent(), Rated, [1, 2], ["a"], out=tmp_path / "run")
    made.branch(next(iter(made)).id, 0, n=2, model=["b"])
    assert [tape.begin.split for tape in made] == ["eval", "eval"]
    assert (made.reward, made.scores().attempts) == (1.0, 2)
    assert len(made.tapes("branch")) == 2


def test_a_reward_counts_if_the_episode_measures_the_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tr.run(tr.ChatAgent(), Rated, [1, 0], ["a", "b"], out=tmp_path / "run")
    assert {tape.reward for tape in made} == {1.0, None}  # the failed episode was sampled again
    main(["show", str(made.path)])
    assert "mean reward 1.000 over 1 scored" in capsys.readouterr().out
    assert made.reward == 1.0


class Rated(tr.Environment):
    """Rewards the first answer, and fails in the second turn of task 0."""

    async def reset(self, task: int) -> str:
        self.works, self.turn = bool(task), 0
        return "go"

    async def step(self, action: Answer) -> tr.Outcome:
        self.turn += 1
        if not self.works and self.turn == 2:
            raise ConnectionError("gone")
        return tr.Outcome("on", reward=float(self.works or 5), terminated=self.works)
