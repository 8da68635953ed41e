"""What `run`, `train` and the page of a run say where an agent or its training doesn't work."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import Any

import pytest

import tapereel as tr
from tapereel.cli import main
from tapereel.envs import Outcome
from tapereel.envs.adapters import ToolEnvironment
from tapereel.tapes import Answer, TapereelError, Task
from tapereel.tapes.audit.advice import advice
from tapereel.tapes.records import Record, Reward
from tapereel.tapes.store import HeldOut, Results, Store
from tapereel.tapes.tape import step_record
from tapereel.tapes.view import overview_of

from ..tapes.audit.test_audit import call, episode
from .world import EXAMPLE as DIGITS
from .world import Digits

WORLD = __name__


def note(text: str) -> str:
    """Take a note."""
    return text


class Noting(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__([note])

    async def answered(self, text: str) -> Outcome:
        return Outcome(reward=float(text == self.task.private), terminated=True)


class Flat(Digits):
    async def step(self, action: Any) -> Outcome:
        return Outcome(reward=0.5, terminated=True)


chat = tr.ChatAgent()
TASKS = [tr.Task(public=f"{k}?", private=str(k)) for k in range(6)]


def rolled(tmp_path: Path, capsys: Any, *answers: str, **more: Any) -> tuple[str, ...]:
    made = tr.run(chat, Noting, TASKS, list(answers), out=tmp_path / "r", **more)
    assert made.summary is not None
    with Store.open(tmp_path / "r") as store:
        assert set(made.summary.advice) <= set(overview_of(store).notes)
    return made.summary.advice


def test_a_run_in_which_no_tool_was_called_says_so(tmp_path: Path, capsys: Any) -> None:
    (tools, equal) = rolled(tmp_path, capsys, "call note please")
    assert re.search(r"\b6\b.*\b0\b.*tapereel show", equal)
    assert re.search(r"\b6\b.*\b6\b.*docs/how-to/tools\.md", tools)


@pytest.mark.parametrize("call", ['{"name": "note", "parameters": {"text": "a"}}', "<tool_call>{"])
def test_a_run_that_calls_tools_or_tries_to_is_told_apart(tmp_path: Path, capsys: Any, call: str) -> None:
    said = rolled(tmp_path, capsys, call, "3", "3", "3")
    assert any("docs/how-to/tools.md" in text for text in said) == (call == "<tool_call>{")
    assert not any("rewards" in text for text in said)


def test_a_parser_that_can_read_no_answer_is_named(tmp_path: Path) -> None:
    def parse(text: str) -> tr.Action:
        raise ValueError(f"{text} is no move")

    made = tr.run(tr.ChatAgent(parse=parse), Digits, TASKS, ["e4"] * 3, out=tmp_path / "r")
    assert made.summary is not None
    (said,) = (text for text in made.summary.advice if "`parse`" in text)
    assert "'e4 is no move'" in said
    assert "`parse`" in said


def test_a_run_with_different_rewards_and_calls_has_no_advice(tmp_path: Path, capsys: Any) -> None:
    assert rolled(tmp_path, capsys, '{"name": "note", "arguments": {"text": "a"}}', "3") == ()


class Survival(tr.Environment[Answer]):
    """A step is worth 1 until the answer is "stop". It may fail with a KeyError."""

    fails: frozenset[str] = frozenset()

    async def reset(self, task: Task) -> str:
        self.k = str(task.private)
        return "go on?"

    async def step(self, action: Answer) -> Outcome:
        if self.k in self.fails:
            raise KeyError("moves")
        if action.text == "stop":
            return Outcome(reward=1.0, terminated=True)
        return Outcome("go on?", reward=1.0)


class Broken(Survival):
    fails = frozenset("0123")


class Fallible(Survival):
    fails = frozenset("0")


class Endless(Survival):
    async def step(self, action: Answer) -> Outcome:
        return Outcome("go on?", reward=float(self.k == "0" and action.text == "stop"))


def ask(tape: tr.Tape) -> str:
    raise KeyError("hand")


class Asking(tr.Agent):
    async def act(self, tape: tr.Tape, llm: tr.LLM) -> Any:
        yield Answer(text=ask(tape))


@pytest.mark.parametrize(
    ("agent", "env", "answers", "first"),
    [
        (chat, Broken, ["stop"], r"^4 of 6 .* error of the environment: KeyError: .*moves.*test_advice\.py:\d+"),
        (Asking(), Survival, ["stop"], r"^6 of 6 .* error of the agent: KeyError: .*hand.*test_advice\.py:\d+ in ask"),
        (
            chat,
            Endless,
            ["go"] * 3,
            r"^6 of 6 episodes ended at the limit `turns`: 3 turns taken .tapereel show RUN",
        ),
        (chat, Fallible, ["go", "go", "stop"], None),  # one of six is listed with the faults of the run
        (chat, Survival, ["go", "go", "go"], "^All 6 rewards are 3"),  # no episode earned more than those at the limit
    ],
)
def test_what_ended_most_episodes_is_the_first_advice(
    tmp_path: Path, agent: Any, env: Any, answers: list[str], first: str | None
) -> None:
    made = tr.run(agent, env, TASKS, answers, out=tmp_path / "r", settings={"limits.turns": 3, "retries": 0})
    said = made.summary.advice
    assert re.search(first, said[0]) if first else not any("ended" in text for text in said), said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tr.save_tiny_model(tmp_path_factory.mktemp("model"), "0123456789", size="micro")


def trained(tmp_path: Path, model: str, env: str, *sets: str) -> list[str]:
    """The words for `tapereel train`, on a tiny model."""
    words = ["train", "--agent", f"{DIGITS}:player", "--env", env, "--tasks", f"{DIGITS}:tasks", "--model", model]
    common = ("evaluation.fraction=0", "loop.groups=4", "loop.group_size=4", *sets)
    return [*words, "--out", str(tmp_path / "r"), *[word for pair in common for word in ("--set", pair)]]


class Even(tr.Environment[Answer]):
    """An even digit earns 1."""

    async def reset(self, task: Task) -> str:
        return "3"

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=self.of(action.text), terminated=True)

    def of(self, text: str) -> float | None:
        return float(text[:1] in tuple("02468"))


class Faulty(Even):
    def of(self, text: str) -> float | None:
        return {"4": 1.0, "6": 0.0}[text[:1]]


class Unloaded(Even):
    async def reset(self, task: Task) -> str:
        raise FileNotFoundError("boards.json")


class Zero(Even):
    def of(self, text: str) -> float | None:
        return 0.0


class One(Even):
    def of(self, text: str) -> float | None:
        return 1.0


class Unscored(Even):
    def of(self, text: str) -> float | None:
        return None


def brevity(tape: tr.Tape) -> float:
    return 1 / len(tape.actions[-1].text.strip("02468"))


class Unending(Even):
    async def step(self, action: Answer) -> Outcome:
        return Outcome("3", reward=0.0)


class Patient(Even):
    """Each turn but the last earns 1."""

    async def step(self, action: Answer) -> Outcome:
        return Outcome("3", reward=1.0) if self.of(action.text) else Outcome(reward=0.0, terminated=True)


class Owing(Even):
    def of(self, text: str) -> float | None:
        return float(text[:1] in tuple("02468")) - 5


class Partly(Even):
    def of(self, text: str) -> float | None:
        return 0.3 * (text[:1] < "8") + 0.7 * (text[:1] in tuple("02468"))


class Parity(Even):
    """An even digit is right for an even task, and an odd one for an odd task."""

    async def reset(self, task: Task) -> str:
        self.rest = int(str(task)) % 2
        return str(int(str(task)) % 10)

    def of(self, text: str) -> float | None:
        return float(text.isdigit() and int(text) % 2 == self.rest)


def look_up(text: str) -> Answer:
    return {"north": Answer(text="north")}[text]


def refuse(text: str) -> Answer:
    raise ValueError("no move")


@tr.agent
async def nucleus(tape: tr.Tape, llm: tr.LLM) -> Any:
    reply = await llm(tape, sampling=tr.Sampling(top_p=0.9, max_tokens=1))
    yield Answer(text=reply.text)


@tr.agent
async def loquacious(tape: tr.Tape, llm: tr.LLM) -> Any:
    for _ in range(9):
        await llm(tape)
    yield Answer(text="2")


SMALL = {
    "loop.updates": 3,
    "loop.groups": 2,
    "loop.group_size": 8,
    "loop.max_lag": 0,
    "loop.sampling.max_tokens": 1,
    "loop.limits.turns": 3,
    "loop.optimiser.lr": 1e-2,
    "evaluation.fraction": 0,
}
ENDS = {"kind": "linear", "total": 1, "warmup": 0}
CAUSES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "the environment breaks often": (
        chat,
        Faulty,
        {},
        r"^\d+ of .*environment: KeyError.*test_advice\.py:\d+",
    ),
    "the environment breaks always": (chat, Unloaded, {}, r"environment: FileNotFoundError: boards\.json.*\.py:\d+"),
    "the agent breaks": (tr.ChatAgent(parse=look_up), Even, {}, r"agent: KeyError.*test_advice\.py:\d+"),
    "no answer can be read": (tr.ChatAgent(parse=refuse), Even, {}, "no move"),
    "a limit ends the episodes": (chat, Unending, {}, r"at the limit `turns`: 3 turns taken"),
    "the budget is too small": (loquacious, Even, {"loop.limits.tokens": 3}, r"limit\W+tokens\b"),
    "answers are cut off": (chat, Zero, {"loop.sampling.max_tokens": 16}, r"^\d+% .*cut off.*max_tokens \(16\)"),
    "prompts are too long": (chat, Even, {"loop.limits.prompt_tokens": 2}, r"limit\W+context\W+the prompt has"),
    "the window is too small": (chat, Even, {"engine.capacity": 4}, r"limit\W+context\W+the prompt has"),
    "all rewards are 0": (chat, Zero, {}, r"^All \d+ rewards are 0:"),
    "all rewards are 1": (chat, One, {}, r"^All \d+ rewards are 1:"),
    "nothing is scored": (chat, Unscored, {}, r"nothing scored it|^None of \d+ episodes has a reward"),
    "a reward function breaks": (
        chat,
        Even,
        {"rewards": [f"{WORLD}:brevity"]},
        r"^\d+ of .*'brevity' failed.* division by zero \(.*\.py:\d+ in brevity",
    ),
    "the rate is too high": (
        chat,
        Parity,
        {"loop.optimiser.lr": 10.0, "loop.updates": 12},
        r"moved log-probs.*loop\.optimiser\.lr=1 instead of 10",
    ),
    "the rate is too high for old samples": (
        chat,
        Parity,
        {"loop.optimiser.lr": 10.0, "loop.max_lag": 1, "loop.groups": 4},
        r"nats a token.*loop\.optimiser\.lr=1 instead of 10",
    ),
    "the rate is too low": (
        chat,
        Even,
        {"loop.optimiser.lr": 1e-9},
        "hardly.*lr=1e-08 instead of 1e-09",
    ),
    "the rate ends at 0": (chat, Even, {"loop.optimiser.schedule": ENDS}, r"loop\.optimiser\.schedule.*ends at 0"),
    "groups of one": (chat, Even, {"loop.group_size": 1}, r"loop\.group_size.*'grpo'.*reinforce_plain"),
    "calls that RL can't use": (nucleus, Even, {}, r"'nucleus'.*top_p=0\.9"),
}
"""(agent, environment, settings, what the first sentence says) by the cause."""
BY_TURN = {"reward": {"per": "turn"}, "credit": {"kind": "returns", "clock": "turn", "gamma": 1.0}}
HEALTHY: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo": (Even, {"loop.updates": 12, "loop.optimiser.lr": 3e-2}),
    "rewards below 0": (Owing, {"loop.updates": 12, "loop.optimiser.lr": 3e-2}),
    "async": (Even, {"loop.max_lag": 1}),
    "critic": (Even, {"loop.recipe": "ppo"}),
    "LoRA": (Partly, {"trainer.lora": {"rank": 4}}),
    "dapo, one large group": (Even, {"loop.recipe": "dapo", "loop.groups": 1, "loop.group_size": 16}),
    "small groups": (Partly, {"loop.recipe": "rloo", "loop.groups": 8, "loop.group_size": 2}),
    "single attempts": (Even, {"loop.recipe": "reinforce_plain", "loop.groups": 16, "loop.group_size": 1}),
    "the longest episodes are the best": (Patient, {"loop.changes": BY_TURN}),
    "several steps of an update": (Even, {"loop.recipe": "dr_grpo", "loop.epochs": 2, "loop.minibatches": 2}),
}


def said_of(folder: Path, model: str, agent: Any, env: Any, sets: dict[str, Any]) -> tuple[str, ...]:
    """The advice of a short training run, or the sentence with which it was refused or stopped."""
    try:
        made = tr.train(agent, env, range(12), model, out=folder / "r", settings={**SMALL, **sets})
    except TapereelError as error:
        return (str(error),)
    with Store.open(folder / "r") as store:
        assert set(made.summary.advice) <= set(overview_of(store).notes)
    return made.summary.advice


@pytest.mark.attack
@pytest.mark.parametrize("cause", CAUSES)
def test_the_first_sentence_about_a_run_is_its_cause(tmp_path: Path, model: str, cause: str) -> None:
    agent, env, sets, first = CAUSES[cause]
    if cause == "answers are cut off":  # a model with more characters seldom ends an answer
        model = tr.save_tiny_model(tmp_path / "m", string.ascii_letters + string.digits, size="micro")
    said = said_of(tmp_path, model, agent, env, sets)
    assert re.search(first, said[0]), said
    assert sum("lr=" in text for text in said) <= 1


@pytest.mark.attack
@pytest.mark.parametrize("name", HEALTHY)
def test_a_run_that_learns_gets_no_advice(tmp_path: Path, model: str, name: str) -> None:
    env, sets = HEALTHY[name]
    assert said_of(tmp_path, model, chat, env, sets) == ()


def test_training_on_equal_rewards_says_so(tmp_path: Path, model: str, capsys: Any) -> None:
    main(trained(tmp_path, model, f"{WORLD}:Flat", "loop.updates=2"))
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"\b0\.5\b.*tapereel show", said)
    assert "group_size" not in said
    assert re.search(r"All \d+ rewards are 0\.5", (tmp_path / "r" / "report.html").read_text())


def test_training_that_does_not_rise_says_so_and_why(tmp_path: Path, model: str, capsys: Any) -> None:
    sets = ("loop.updates=12", "loop.optimiser.lr=1e-9", "loop.group_size=24")
    assert main([*trained(tmp_path, model, f"{DIGITS}:Digits", *sets), "--json"]) == 0
    first, *_ = json.loads(capsys.readouterr().out)["advice"]
    (page,) = re.findall(r"/\S+/reward_does_not_climb\.md", first)
    assert Path(page).is_file()
    assert re.search(r"^The updates hardly.*loop\.optimiser\.lr=1e-08 instead of 1e-09.* did not rise", first)
    assert json.dumps(first)[1:-1] in (tmp_path / "r" / "report.html").read_text()


def lines(n: int, reward: Any, **more: Any) -> list[dict[str, Any]]:
    """`n` updates of a loop. Reward: a function of the update."""
    common = {"trained_tokens": 9, "grad_norm": 1.0, "lr": 0.1, "group/flat": 0.2, "logprob": -1.0}
    return [{**common, "reward": reward(k), **more} for k in range(n)]


def level(k: int) -> float:
    return 0.5 + k % 3 / 10


TRY, LAST = "Try loop.optimiser.lr", "loop.updates=160.*--resume"
"""What is left to try if there is no sign of a cause. A second learning rate is never named."""


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lines(40, lambda k: k / 40 + k % 2 / 10), []),
        (lines(40, lambda k: k / 40, **{"group/flat": 1.0, "logprob": 0.0}), []),  # solved: that is what success is
        (lines(40, level), [TRY, LAST]),
        (lines(40, lambda k: -k / 40), ["fell.*loop.optimiser.lr", LAST]),
        (lines(40, level, **{"kl/old": 0.4}), ["0.4 nats", LAST]),
        (lines(40, level, **{"delivery/moved": 1e-6}), ["at most 1e-06 nats", LAST]),
        (lines(40, level, **{"delivery/moved": 3.0}), ["by 3 nats.*loop.optimiser.lr", LAST]),
        (lines(40, lambda k: k / 40, **{"delivery/moved": 3.0}), []),
        (lines(3, level, **{"kl/old": 0.4}), []),
        (lines(3, level, **{"kl/old": 0.7}), ["0.7 nats"]),
        (lines(40, level, logprob=-0.01), ["0.010", LAST]),
        (lines(40, level, logprob=-0.01, entropy=1.0), [TRY, LAST]),
        (lines(40, level, **{"logprob": -0.01, "group/flat": 1.0}), ["0.010", "100%", LAST]),
        (lines(40, lambda k: 0.1, **{"group/flat": 0.9}), ["90%.*loop.group_size", TRY, LAST]),
        (lines(40, level, **{"grad_norm": 0.0, "group/flat": 1.0}), [" 10 updates", "100%", LAST]),
        (lines(40, lambda k: level(k) + k / 600), [TRY, LAST]),  # a trend within the noise is not a sign
        (lines(40, lambda k: 1.0, **{"reward/agent/duo/left": 0.2}), []),  # each agent has its own reward
        (lines(3, lambda k: 0.1), []),
        (lines(3, lambda k: None, **{"group/flat": 1.0}), ["100%"]),
        (lines(3, lambda k: 0.1, logprob=None, grad_norm=None), []),
        ([], []),
    ],
)
def test_each_sign_is_a_suggestion_and_the_cause_comes_first(tmp_path: Path, made: list[Any], says: list[str]) -> None:
    with Store.create(tmp_path / "r") as store:
        found = advice(store, "train", made)
    assert len(found) == len(says), found
    assert [text.startswith("Then: ") for text in found] == [k > 0 and len(made) >= 10 for k in range(len(says))]
    for text, part in zip(found, says, strict=True):
        assert re.search(part, text)
    assert sum("lr=" in text or "lr to" in text for text in found) <= 1


def attempts(tmp_path: Path, *made: tuple[str, str, float]) -> Store:
    """A run with (task, answer, reward) of each attempt."""
    store = Store.create(tmp_path / "r")
    for k, (task, answer, reward) in enumerate(made):
        said = step_record(f"t{k}", Answer(text=answer), by="a")
        begin, *others = episode(f"t{k}", said, Reward(tape=f"t{k}", value=reward))
        asked = Task(public=task)
        for record in (begin.model_copy(update={"task": asked, "task_hash": asked.hash}), *others):
            store.writer.append(record.body())
    store.writer.commit()
    return store


@pytest.mark.parametrize("own", [{}, {"reward/agent/duo/left": 0.2}])
def test_equal_sums_say_nothing_if_each_agent_has_its_own_reward(tmp_path: Path, own: dict[str, float]) -> None:
    with attempts(tmp_path, *[(f"{t}", "a", 0.0) for t in range(8)]) as store:
        found = advice(store, "train", lines(2, lambda k: 0.0, **own))
    assert any("All 8 rewards are 0" in text for text in found) == (not own)


def test_answers_that_do_not_depend_on_the_task_are_called_guesses(tmp_path: Path) -> None:
    guess = [(f"{t}", "abc"[k % 3], float(k % 3 == t % 3)) for t in range(30) for k in range(9)]
    with attempts(tmp_path, *guess) as store:
        first, *_ = advice(store, "train", lines(40, level, **{"group/flat": 0.6}))
    assert re.search(r"^The model guess.* 0\.333.* 0\.3\d\d.*warm\.tapes", first)


@pytest.mark.parametrize(
    "made",
    [
        [(f"{t}", "abc"[(t + (k == 0)) % 3], float(k > 0)) for t in range(30) for k in range(9)],  # it knows
        [(f"{t}", "a", float(k % 3 == 0)) for t in range(30) for k in range(9)],  # a game: the reward is of its moves
        [(f"{t}", f"{t}-{k}", float(k == 0)) for t in range(30) for k in range(9)],  # each answer is given once
    ],
)
def test_other_answers_are_not_called_guesses(tmp_path: Path, made: list[tuple[str, str, float]]) -> None:
    with attempts(tmp_path, *made) as store:
        assert not any("guess" in text for text in advice(store, "train", lines(40, level)))


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (None, [r"\(warm\.tapes\)", "easier tasks", "larger model"]),
        (lambda k: 2 - k / 400, ["still falling .12%.*8,000 .*warm.updates=1200", "easier tasks", "larger model"]),
        (lambda k: 2 - k / 4000 + k % 2 / 9, ["easier tasks.*right.*warm.updates=1200.*20%", "8,000 ", "larger model"]),
    ],
)
def test_the_loss_of_the_warm_start_decides_how_to_begin(tmp_path: Path, loss: Any, says: list[str]) -> None:
    seldom = [(f"{t}", f"{t}-{k}", float(k == t % 9 == 0)) for t in range(30) for k in range(9)]  # 4 of 270 are right
    with attempts(tmp_path, *seldom) as store:
        if loss is not None:
            (store.path / "config.yaml").write_text("warm:\n  tapes: runs/demo\n  updates: 300\n")
            Results(format=1, imitated=["a"] * 2000).write(store.path)
            imitation = ({"lead": 1, "phase": "sft", "loss": loss(k)} for k in range(300))
            (store.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in imitation))
        said = advice(store, "train", lines(40, lambda k: k % 2 / 100, **{"group/flat": 0.9}))
    assert re.search(r"^The model is right in 1\.5% .* 0\.005\b.*90%.*" + says[0], said[0])
    assert all(re.search("^Then: .*" + part, text) for part, text in zip(says[1:], said[1:3], strict=True))
    assert loss is None or "warm.tapes" not in " ".join(said)


def test_a_rise_in_the_updates_comes_after_the_start(tmp_path: Path) -> None:
    with attempts(tmp_path, *[(f"{t}", f"{t}-{k}", 0.05 * (k > 0)) for t in range(30) for k in range(9)]) as store:
        change = {"value": 0.001, "low": -0.01, "high": 0.012, "tasks": 21}
        after = HeldOut(mean=0.05, error=0.1, n=21, metrics={}, reward=None, pass_at={}, change=change)
        said = advice(store, "train", lines(40, lambda k: 0.04 + k % 3 / 1e3 + k / 4e3), {"sampled": after})
    assert re.search(r"right in 0\.0% .* 0\.05\b.*warm\.tapes", said[0])
    assert re.search(r"rose in the updates.*loop\.updates=160", said[-1])


@pytest.mark.parametrize(("n", "begins"), [(1, True), (3, False)])
def test_a_model_that_is_right_in_a_fifth_of_its_answers_can_learn(tmp_path: Path, n: int, begins: bool) -> None:
    made = [(f"{t}", f"{t}-{k}", float(k < n)) for t in range(30) for k in range(9)]
    with attempts(tmp_path, *made) as store:
        said = advice(store, "train", lines(40, lambda k: n / 9 + k % 2 / 100))
    assert any("easier tasks" in text for text in said) == begins


def test_a_reward_at_its_ceiling_needs_harder_tasks(tmp_path: Path) -> None:
    with attempts(tmp_path, *[("a", "b", float(k > 0)) for k in range(9)]) as store:
        said = advice(store, "train", lines(40, lambda k: 0.97, **{"group/flat": 0.9}))
    assert "harder" in said[0]
    assert not any("90%" in text for text in said)


@pytest.mark.parametrize(
    ("value", "low", "updates", "says"),
    [
        (0.2, -0.7, 40, "evaluation.attempts=12 instead of 3"),
        (-0.1, -1.0, 40, "evaluation.attempts=12 instead of 3"),
        (0.05, -0.25, 40, "different tasks"),  # the updates rose by 0.77, more than the interval's half
        (-0.1, -0.4, 40, "different tasks"),
        (0.2, 0.1, 40, None),
        (0.2, None, 40, None),
        (0.2, -0.1, 3, None),
    ],
)
def test_a_held_out_reward_that_may_not_have_risen_says_so(
    tmp_path: Path, value: float, low: float | None, updates: int, says: str | None
) -> None:
    change = {"value": value, "low": low, "high": None if low is None else 2 * value - low, "tasks": 21}
    after = HeldOut(mean=0.7, error=0.1, n=21, metrics={}, reward=None, pass_at={}, change=change)
    with Store.create(tmp_path / "r") as store:
        (store.path / "config.yaml").write_text("evaluation: {attempts: 3}")
        found = advice(store, "train", lines(updates, lambda k: k / 40), {"sampled": after})
    assert bool(found) == bool(says)
    if says:
        assert re.search(rf"{says}.*\b21\b.*\{value:+.3f} \[", found[0])


def test_answers_that_are_cut_off_are_counted_unless_the_agent_wants_it(
    tmp_path: Path, model: str, capsys: Any
) -> None:
    small = {"sampling.max_tokens": 16, "count": 6}
    ours = tr.run(tr.ChatAgent(), Digits, f"{DIGITS}:tasks", model, out=tmp_path / "a", settings=small)
    own = tr.run(tr.ChatAgent(max_tokens=1), Digits, f"{DIGITS}:tasks", model, out=tmp_path / "b", settings=small)
    assert any("sampling.max_tokens (16)" in text for text in ours.summary.advice)
    cut = sum(call.finish == "length" for tape in ours for call in tape.calls)
    assert ours.summary.scores.cut == cut > 0 == own.summary.scores.cut
    for verb in ("show", "scores"):
        assert main([verb, str(ours.path)]) == 0
        assert f"{cut} of 6 answers cut off" in capsys.readouterr().out
    assert not any("sampling.max_tokens" in text for text in own.summary.advice)


@pytest.mark.parametrize(
    ("cut", "others", "says"),
    [
        ([1.0, 1.0, 0.99], [], False),
        ([0.0, 0.0, 0.0], [], True),
        ([0.5, 0.5, 0.5], [], True),
        ([-1.0, -1.0, -1.0], [], True),
        ([None, None, None], [], True),
        ([0.5, 0.5, 0.5], [0.5, 0.2], False),
        ([0.2, 0.2, 0.1], [0.5, 0.5], True),
        ([90.0, 99.0, 100.0], [100.0, 1.0], False),
    ],
)
def test_answers_that_are_cut_off_and_earn_no_less_are_left_alone(
    tmp_path: Path, cut: list[float | None], others: list[float], says: bool
) -> None:
    """Each episode has two answers, so that three are enough for a sentence."""
    limit, records = tr.Sampling(max_tokens=16), list[Record]()
    for k, reward in enumerate([*cut, *others]):
        finish = "length" if k < len(cut) else "stop"
        calls = [call(f"t{k}", n, 16, sampling=limit, finish=finish) for n in range(2)]
        earned = [] if reward is None else [Reward(tape=f"t{k}", value=reward)]
        records += episode(f"t{k}", *calls, *earned, sampling=limit)
    with Store.create(tmp_path / "r") as store:
        for record in records:
            store.writer.append(record.body())
        store.writer.commit()
        found = advice(store)
    assert any("sampling.max_tokens" in text for text in found) == says, found
