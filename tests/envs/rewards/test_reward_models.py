"""Reward models: over HTTP in another process, from a file, in batches, by label; nothing is taken on trust."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tapereel.envs import RewardSource
from tapereel.envs.rewards import Scored
from tapereel.envs.rewards import reward_models as remote
from tapereel.envs.rewards.named_rewards import file_reward
from tapereel.envs.rewards.reward_models import HttpReward, Sample, http_reward, model_source, sample_of
from tapereel.envs.rewards.sources import ensemble
from tapereel.tapes import Tape, Task
from tapereel.tapes.errors import UsageError

from ..scored import failure, scores, tapes

LEDGER = json.loads((Path(__file__).parents[2] / "ledger" / "rewards.json").read_text(encoding="utf-8"))


class Model:
    """Scores by length, and notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        self.calls.append([sample.messages[-1]["content"] for sample in samples])
        await asyncio.sleep(0)
        return [float(len(sample.messages[-1]["content"])) for sample in samples]


def samples(*answers: str) -> list[Sample]:
    return [Sample(f"t{k}", "q", f"q\n{a}", ({"role": "assistant", "content": a},)) for k, a in enumerate(answers)]


# Batches


@pytest.mark.ledger("F22")
def test_tapes_that_wait_are_scored_together():
    model = Model()
    found = tapes(["a", "bb", "ccc", "dddd", "eeeee"])
    records = scores([model_source(model, name="m", size=2)], *found)
    assert [[r.value for r in own] for own in records] == [[1.0], [2.0], [3.0], [4.0], [5.0]]
    assert [len(call) for call in model.calls] == [2, 2, 1]


def test_a_model_that_breaks_leaves_those_of_its_call_unscored_and_goes_on():
    class Breaks(Model):
        async def score(self, samples: Sequence[Sample]) -> list[float]:
            if not self.calls:
                self.calls.append([])
                raise OSError("out of memory")
            return await super().score(samples)

    records = scores([model_source(Breaks(), name="m", size=2)], *tapes(["a", "bb", "ccc"]))
    assert "OSError: out of memory" in failure(records[0])
    assert "OSError: out of memory" in failure(records[1])
    assert [r.value for r in records[2]] == [3.0]


def test_one_who_stops_waiting_disturbs_nobody():
    source = model_source(Model(), name="m")

    async def use() -> Any:
        (gone, stays) = [asyncio.ensure_future(source.score(tape)) for tape in found]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        gone.cancel()
        return await stays

    found = tapes(["a", "bb"])
    assert asyncio.run(use()) == 2.0
    assert asyncio.run(use()) == 2.0, "in another event loop too"


def test_a_sample_is_the_conversation_with_its_answer():
    task = Task(public={"question": "2+2?", "label": "sums"}, private={"answer": 4})
    (tape,) = tapes(["four"], task)
    sample = sample_of(tape)
    assert (sample.id, sample.reference, sample.label) == (tape.id, 4, "sums")
    assert (sample.prompt, sample.query) == ("user: 2+2?", "user: 2+2?\nassistant: four")
    assert sample.messages[-1] == {"role": "assistant", "content": "four"}


def test_with_a_tokenizer_a_sample_is_exactly_what_was_sampled():
    pytest.importorskip("torch")
    from tapereel.agents import ScriptedEngine, rollout
    from tapereel.agents.engines.embedded.tiny_model import char_tokenizer
    from tapereel.agents.rendering.renderer import Renderer

    from ..scored import SPEAKER, Asks

    tokenizer = char_tokenizer("abc?")
    engine = ScriptedEngine(["ca"], renderer=Renderer(tokenizer))
    tape = asyncio.run(rollout(SPEAKER, Asks, Task(public="ab?"), engine=engine))
    call = tape.calls[-1]
    sample = sample_of(tape, decode=tokenizer.decode)
    assert sample.prompt == tokenizer.decode(call.prompt.tolist())
    assert sample.query == sample.prompt + tokenizer.decode(list(call.completion or ()))
    assert sample.query != sample_of(tape).query, "special tokens are in it"


# HTTP


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[1] / "reward_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port.isdigit()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate(timeout=60)


def told(server: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server}/asked", timeout=60) as answer:
        return json.loads(answer.read())


def ask(server: str, mode: str, *answers: str, **options: Any) -> list[list[Any]]:
    source = http_reward(f"{server}/score/{mode}", name="rm", **{"wait": 0.0, "tries": 2, **options})
    return scores([source], *tapes(answers, Task(public="q", private="gold")))


@pytest.mark.ledger("F24")
def test_a_model_that_fails_twice_is_asked_again_and_then_scores_everybody(server: str):
    row = LEDGER["F24"]
    records = ask(server, "flaky", "a", "bb", "ccc", tries=row["tries"], wait=0.001)
    assert [[r.value for r in own] for own in records] == [[float(len("assistant: ") + n)] for n in (1, 2, 3)]
    found = told(server)
    assert found["asked"]["flaky"] == row["failures"] + 1, "all three in one request"
    body = found["bodies"][-1]
    assert body["queries"] == ["user: q\nassistant: " + a for a in ("a", "bb", "ccc")]
    assert body["prompts"] == ["user: q"] * 3
    assert body["references"] == ["gold"] * 3
    assert "labels" not in body
    assert len(set(body["ids"])) == 3
    model = HttpReward("http://127.0.0.1:1/")
    assert (model.tries, model.wait) == (row["tries"], row["wait"])


@pytest.mark.ledger("T52")
def test_waiting_between_tries_grows_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch):
    samples = [sample_of(tapes(["a"])[0])]
    real, pauses, others = asyncio.sleep, [], []

    async def noted(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        others.append(len(pauses))
        await real(0)

    async def meanwhile() -> None:
        for _ in range(1000):
            await real(0)
            others.append(-1)

    async def both() -> None:
        asking = asyncio.create_task(HttpReward("http://127.0.0.1:1/").score(samples))
        await meanwhile()
        await asking

    monkeypatch.setattr(remote.asyncio, "sleep", noted)
    with pytest.raises(remote.RewardServerFailed, match="5 tries"):
        asyncio.run(both())
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    first, last = others.index(1), others.index(4)
    assert -1 in others[first:last], "others went on while it waited"


@pytest.mark.ledger("F24")
@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("down", r"RewardServerFailed: .*\b2\b.*HTTP 503: 'no luck'"),
        ("hangup", r"RewardServerFailed: .*\b2\b.*ServerDisconnectedError"),
        ("forbidden", "WrongAnswer: .*HTTP 403: 'not you'"),
        ("others", r"WrongAnswer: .*\bids\b.*'x'"),
        ("twice", r"WrongAnswer: .*\bids\b.*'"),
        ("short", r"WrongAnswer: .*/short .*\b1\b.*\b2\b"),
        ("nan", r"WrongAnswer: .*/nan .*\bnan\b"),
        ("huge", "WrongAnswer: .*integer"),
        ("text", "WrongAnswer: .*'good'"),
        ("html", "WrongAnswer: .*JSON: '<h1>hello</h1>'"),
        ("bare", "WrongAnswer: .*`rewards`"),
    ],
)
def test_what_is_no_answer_leaves_the_tapes_unscored_and_says_why(server: str, mode: str, says: str):
    before = told(server)["asked"].get(mode, 0)
    for records in ask(server, mode, "a", "bb"):
        assert re.search(says, failure(records))
    tries = told(server)["asked"][mode] - before
    assert tries == (2 if mode in ("down", "hangup") else 1), "what is wrong isn't asked for again"


@pytest.mark.ledger("F24")
def test_an_answer_in_another_order_is_put_in_order_by_its_ids(server: str):
    records = ask(server, "turned", "a", "bb", "ccc")
    assert [[r.value for r in own] for own in records] == [[12.0], [13.0], [14.0]]


@pytest.mark.ledger("F23")
def test_null_is_no_score_and_names_are_components(server: str):
    first, second = ask(server, "null", "a", "bb")
    assert (first, [r.value for r in second]) == ([], [13.0])
    (one,) = ask(server, "named", "a")
    assert [(r.name, r.value) for r in one] == [("rm/length", 12.0), ("rm/constant", 1.0)]


def test_an_answer_without_end_is_cut_off(server: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "LARGEST", 1 << 21)
    (records,) = ask(server, "endless", "a")
    assert "2,097,152 bytes" in failure(records)


def test_one_that_never_answers_has_its_time(server: str):
    (records,) = ask(server, "slow", "a", timeout=0.05)
    assert re.search(r"RewardServerFailed: .*\b2\b.*TimeoutError", failure(records))
    (records,) = scores([http_reward("http://127.0.0.1:9/x", name="rm", tries=1)], *tapes(["a"]))
    assert "ClientConnectorError" in failure(records)


def test_its_token_comes_from_the_environment_and_stays_off_the_record(server: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RM_KEY", "sk-hidden")
    (records,) = ask(server, "fine", "a", key_variable="RM_KEY")
    assert told(server)["tokens"][-1] == "Bearer sk-hidden"
    assert "sk-hidden" not in "".join(r.body().decode() for r in records)
    monkeypatch.delenv("RM_KEY")
    (records,) = ask(server, "fine", "a", key_variable="RM_KEY")
    assert "RM_KEY" in failure(records)


def test_no_address_is_refused_at_once():
    with pytest.raises(ValueError, match="'localhost:5'"):
        HttpReward("localhost:5")
    assert HttpReward("http://user:pw@127.0.0.1:5/s?key=k").name == "127.0.0.1:5/s"


# A file


def file(folder: Path, name: str, code: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(code, encoding="utf-8")
    return path


@pytest.mark.ledger("F25")
@pytest.mark.parametrize(
    ("name", "code", "values"),
    [
        (
            "plain_file",
            "def reward_func(queries, prompts): return [len(q) - len(p) for q, p in zip(queries, prompts)]",
            [("plain_file", 13.0)],
        ),
        (
            "right_file",
            "def reward_func(queries, prompts, references):\n"
            "    return [float(q.endswith(r)) for q, r in zip(queries, references)]",
            [("right_file", 1.0)],
        ),
        (
            "label_file",
            "def reward_func(queries, labels): return [len(label) for label in labels]",
            [("label_file", 4.0)],
        ),
        (
            "async_file",
            "async def reward_func(queries, **rest): return [len(rest)] * len(queries)",
            [("async_file", 4.0)],
        ),
        (
            "array_file",
            "import numpy as np\ndef reward_func(queries): return np.ones(len(queries)) / 2",
            [("array_file", 0.5)],
        ),
        (
            "named_file",
            "def reward_func(queries): return {'a': [1.0] * len(queries), 'b': [None] * len(queries)}",
            [("named_file/a", 1.0)],
        ),
    ],
)
def test_a_function_in_a_file_gets_what_it_asks_for(tmp_path: Path, name: str, code: str, values: list[Any]):
    source = file_reward(file(tmp_path, name, code))
    found = tapes(["x"], Task(public={"question": "q", "label": "sums"}, private={"answer": "x"}))
    (records,) = scores([source], *found)
    assert [(r.name, r.value) for r in records] == values
    assert source.pure


@pytest.mark.ledger("F25")
@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("short_file", "def reward_func(queries): return []", r"WrongAnswer: .*\b0\b.*\b1\b"),
        ("text_file", "def reward_func(queries): return 'good'", r"WrongAnswer: .*\bstr 'good'"),
        ("uneven_file", "def reward_func(queries): return {'a': []}", r"WrongAnswer: .*'a'.*\b0\b.*\b1\b"),
        ("raises_file", "def reward_func(queries): raise KeyError('gold')", "KeyError: 'gold'"),
    ],
)
def test_a_function_that_answers_wrongly_leaves_the_tape_unscored(tmp_path: Path, name: str, code: str, says: str):
    (records,) = scores([file_reward(file(tmp_path, name, code))], *tapes(["x"]))
    assert re.search(says, failure(records))


def test_a_file_without_such_a_function_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"'reward_func'.*\bother\b"):
        file_reward(file(tmp_path, "lacking_file", "def other(): pass"))
    with pytest.raises(UsageError, match=r"reward_func.*\btape\b.*\bqueries\b"):
        file_reward(file(tmp_path, "tape_file", "def reward_func(tape): pass"))
    judge = "def reward_func(queries): return [0.0] * len(queries)\nreward_func.pure = False"
    assert not file_reward(file(tmp_path, "impure_file", judge)).pure


# By label


def labelled(*pairs: tuple[str, str | None]) -> list[Tape]:
    return [tapes([answer], Task(public="q", private={"label": label}))[0] for answer, label in pairs]


@pytest.mark.ledger("F26")
def test_a_recipe_for_each_label_weighs_the_parts():
    row = LEDGER["F26"]
    found = labelled(("0", "a"), ("1", "a"))

    def part(name: str) -> Any:
        return lambda tape: float(row[name][int(str(tape.actions[-1]))])

    records = scores([ensemble({"m0": part("m0"), "rule": part("rule")}, row["recipe"])], *found)
    assert [sum(r.weight * r.value for r in own) for own in records] == pytest.approx(row["expected"])
    assert [(r.name, r.weight) for r in records[0]] == [("ensemble/m0", 0.7), ("ensemble/rule", 0.3)]
    example = row["example"]
    parts = {name: (lambda tape, name=name: example[name]) for name in ("accuracy", "format")}
    (own,) = scores([ensemble(parts, {"a": example["recipe"]}, weight=2.0)], found[0])
    assert sum(r.weight * r.value for r in own) == pytest.approx(2 * example["expected"])


@pytest.mark.ledger("F23", "T27")
def test_a_model_sees_only_the_samples_whose_recipe_needs_it_and_is_absent_elsewhere():
    model = Model()
    recipe = LEDGER["F26"]["recipe"]
    source = ensemble({"m0": model_source(model, name="m0"), "rule": lambda tape: 1.0}, recipe)
    found = labelled(("x", "a"), ("xx", "b"), ("xxx", "a"), ("xxxx", "b"))
    records = scores([source], *found)
    assert model.calls == [["x", "xxx"]]
    assert [[(r.tape, r.name, r.value) for r in own] for own in records] == [
        [(found[0].id, "ensemble/m0", 1.0), (found[0].id, "ensemble/rule", 1.0)],
        [(found[1].id, "ensemble/rule", 1.0)],
        [(found[2].id, "ensemble/m0", 3.0), (found[2].id, "ensemble/rule", 1.0)],
        [(found[3].id, "ensemble/rule", 1.0)],
    ]


@pytest.mark.ledger("F26")
def test_an_unknown_label_or_a_silent_part_leaves_the_tape_unscored_with_its_name():
    parts: dict[str, Any] = {"m0": lambda tape: None, "rule": lambda tape: Scored(1.0, {"why": "so"})}
    source = ensemble(parts, {"a": {"m0": 1.0}, "b": {"rule": 1.0}, "named": {"rule": 1.0}})
    unknown, silent, told = scores([source], *labelled(("x", "zebra"), ("x", "a"), ("x", "b")))
    assert re.search("'zebra'.*'a', 'b', 'named'", failure(unknown))
    assert re.search("'m0'.*'a'", failure(silent))
    assert told[0].evidence == {"label": "b", "rule": {"why": "so"}}
    (none,) = scores([source], *labelled(("x", None)))
    assert re.search(r"NoRecipe: .*\bNone\b", failure(none))


def test_an_ensemble_needs_runtime_where_a_part_does_and_knows_its_parts():
    impure = RewardSource(score=lambda tape: {"x": 1.0}, name="world", pure=False)
    assert not ensemble({"w": impure}, {"a": {"w": 1.0}}).pure
    assert ensemble({"w": lambda tape: 1.0}, {"a": {"w": 1.0}}).pure
    with pytest.raises(ValueError, match=r"'a'.*'m1'.*\bm0\b"):
        ensemble({"m0": lambda tape: 1.0}, {"a": {"m1": 1.0}})
    (records,) = scores([ensemble({"w": impure}, {"a": {"w": 1.0}})], *labelled(("x", "a")))
    assert re.search(r"'world'.*\{'x': 1\.0\}", failure(records))
