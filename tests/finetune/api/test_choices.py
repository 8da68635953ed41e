"""Sampling and data choices that other systems have, reached through the settings of a training run."""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

import tapereel as tr
from tapereel.finetune import rows
from tapereel.finetune.trainer.micro_batches import _Batches
from tapereel.tapes.common import ConfigError
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store


class Say(tr.Environment):
    """Rewards an answer by the share of its letters that are the task's."""

    async def reset(self, task: str) -> str:
        self.word = task
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        said = str(action)
        return tr.Outcome(reward=said.count(self.word) / max(len(said), 1), terminated=True)


class Talk(Say):
    """Four answers, with a long observation after each."""

    async def reset(self, task: str) -> str:
        self.said = 0
        return await super().reset(task) * 9

    async def step(self, action: tr.Action) -> tr.Outcome:
        self.said += 1
        found = await super().step(action)
        return tr.Outcome("ab" * self.said, reward=found.reward, terminated=self.said == 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return str(tr.save_tiny_model(tmp_path_factory.mktemp("model"), alphabet="ab", size="micro"))


@pytest.fixture(autouse=True)
def one_lineage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds follow from the lineage, so runs with the same settings have the same weights."""
    monkeypatch.setattr(secrets, "token_hex", lambda n: "00" * n)


def train(
    model: str,
    out: Path,
    *,
    env: type[tr.Environment] = Say,
    resume: bool = False,
    recipe: str = "reinforce",
    **settings: Any,
) -> tr.Run:
    """A run of two updates on two words; `__` in a name stands for a dot."""
    small = {
        "loop.groups": 2,
        "loop.group_size": 4,
        "loop.max_lag": 0,
        "loop.checkpoint_every": 1,
        "loop.keep_checkpoints": None,
        "loop.sampling.max_tokens": 6,
        "loop.optimiser.lr": 1e-2,
        "evaluation.fraction": 0,
    }
    given = {name.replace("__", "."): value for name, value in settings.items()}
    more: dict[str, Any] = {"updates": 2, "recipe": recipe, "resume": resume, "settings": small | given}
    return tr.train(tr.ChatAgent(), env, ["a", "b"], model, out=out, **more)


def published(run: tr.Run) -> list[str]:
    """The digests of the weights, in the order of their versions."""
    with Store.open(run.path) as store:
        return [stored.record.digest for stored in store.run_records("publish")]


def test_the_epsilon_of_adam_and_packing_are_settings(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, eps = train(model, tmp_path / "plain"), train(model, tmp_path / "eps", loop__optimiser__eps=1e-3)
    pack, packs = _Batches.packed, list[int]()
    monkeypatch.setattr(_Batches, "packed", lambda self, group: (packs.append(len(group)), pack(self, group))[1])
    packed = train(model, tmp_path / "packed", loop__optimiser__eps=1e-3, loop__optimiser__pack=True)
    assert packs, "rows were packed"
    assert published(plain)[0] == published(eps)[0] == published(packed)[0]
    assert published(plain)[1] != published(eps)[1], "another epsilon makes other weights"
    weights = [_weights(run) for run in (eps, packed)]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-4) for name in weights[0])
    assert eps.reproduce().outcome == packed.reproduce().outcome == "verified"


def _weights(run: tr.Run) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(run.path) / "checkpoints" / "update-000001" / "hf" / "model.safetensors")


@pytest.mark.parametrize("setting", [{"loop__critic__optimiser__ema": 0.9}, {"loop__critic__optimiser__pack": True}])
def test_a_critic_refuses_settings_that_it_would_ignore(model: str, tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"optimiser\.ema=.*optimiser\.pack="):
        train(model, tmp_path / "run", recipe="ppo", **setting)


@pytest.mark.parametrize("more", [{}, {"loop__sampling__first_temperature": 5.0}], ids=["alone", "with FIRE"])
def test_answers_of_at_least_so_many_tokens_are_trained_on_exactly(
    model: str, tmp_path: Path, more: dict[str, Any]
) -> None:
    """The run stops where sampler and trainer differ by more than the tolerance."""
    exact = {"loop__sampling__temperature": 0.7, "loop__sampler_tolerance": 1e-5, **more}
    run = train(model, tmp_path / "run", loop__sampling__min_tokens=4, loop__sampling__max_tokens=24, **exact)
    calls = [call for tape in run.tapes() for call in tape.calls]
    ends = set(calls[0].barred or ())
    assert ends
    assert {call.barred for call in calls} == {calls[0].barred}
    assert all(len(call.completion or ()) >= 4 for call in calls)
    assert not any(ends.intersection((call.completion or [])[:4]) for call in calls)
    assert any((call.completion or [0])[-1] in ends for call in calls), "later tokens may end an answer"
    assert run.reproduce().outcome == "verified"
    assert run.replay().counts["verified"] == len(run.tapes())


def test_without_a_least_length_records_are_as_before(model: str, tmp_path: Path) -> None:
    short = [call for tape in train(model, tmp_path / "free").tapes() for call in tape.calls]
    assert any(len(call.completion or ()) < 4 for call in short)
    assert not any(name in short[0].body() for name in (b"min_tokens", b"ignore_eos", b"barred"))


def test_ignored_end_tokens_are_trained_on(model: str, tmp_path: Path) -> None:
    run = train(model, tmp_path / "run", loop__sampling__ignore_eos=True, loop__sampler_tolerance=1e-5)
    calls = [call for tape in run.tapes() for call in tape.calls]
    assert {(len(call.completion or ()), call.finish) for call in calls} == {(6, "length")}
    ends = set(load_renderer(model).end_ids)
    assert any(ends.intersection((call.completion or [])[:-1]) for call in calls), "an end token within an answer"
    assert len({call.text for call in calls}) > 1
    assert run.reproduce().outcome == "verified"
    assert run.replay().counts["verified"] == len(run.tapes())


def test_a_server_doesnt_say_which_end_tokens_it_leaves_out(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loop\.sampling\.min_tokens=2.*\bengine\b.*`run`"):
        train(model, tmp_path / "run", engine__kind="vllm", loop__sampling__min_tokens=2)


def test_an_engine_that_leaves_ids_out_unsaid_gives_no_rl_data(model: str, tmp_path: Path) -> None:
    run = tr.run(tr.ChatAgent(), Say, ["a"], model, out=tmp_path / "run", settings={"sampling.min_tokens": 2})
    (tape,) = run.tapes()
    (own,) = rows(tape)
    assert np.isfinite(own.old).all()
    assert own.bars[0][0] == 2
    unsaid = [re.sub(rb'"barred":\[[0-9,]*\],', b"", body) for body in tape.bodies]
    assert unsaid != list(tape.bodies)
    assert np.isnan(rows(tr.Tape.of(unsaid))[0].old).all()


def load_renderer(model: str) -> Any:
    from transformers import AutoTokenizer

    from tapereel.agents.rendering.renderer import Renderer

    return Renderer(AutoTokenizer.from_pretrained(model))


@pytest.mark.parametrize("keep", ["start", "end"])
def test_a_long_prompt_is_cut_and_the_row_is_what_the_model_read(keep: str, model: str, tmp_path: Path) -> None:
    whole = train(model, tmp_path / "whole", env=Talk)
    most = min(len(tape.calls[3].prompt) for tape in whole.tapes()) - 1
    settings = {"loop__limits__prompt_tokens": most, "loop__sampler_tolerance": 1e-5}
    run = train(model, tmp_path / "run", env=Talk, loop__limits__keep_prompt=keep, **settings)
    renderer = load_renderer(model)
    cut = 0
    for tape in run.tapes():
        for call in tape.calls:
            assert len(call.prompt) <= most
            if call.cut_messages:
                cut += 1
                assert call.prompt == renderer.prompt(call.messages).ids  # whole messages
                assert call.cut > 0
        assert sum(len(row.own) for row in rows(tape)) == sum(len(call.completion or ()) for call in tape.calls)
    assert cut
    assert run.summary is not None
    assert any("keep_prompt" in sentence for sentence in run.summary.advice)
    assert all(call.cut == 0 and b'"cut' not in call.body() for tape in whole.tapes() for call in tape.calls)
    assert run.reproduce().outcome == "verified"
    assert run.replay().counts["verified"] == len(run.tapes())
    with pytest.raises(ConfigError, match="keep_prompt"):
        train(model, tmp_path / "no", loop__limits__keep_prompt="middle")


def test_a_prompt_is_cut_to_what_an_answer_leaves_of_the_context_or_ends_the_episode(
    model: str, tmp_path: Path
) -> None:
    context = {"loop__limits__context": 30, "loop__sampling__ignore_eos": True}
    kept = train(model, tmp_path / "kept", env=Talk, loop__limits__keep_prompt="end", **context)
    cut = [len(call.prompt) for tape in kept.tapes() for call in tape.calls if call.cut_messages]
    assert 0 < max(cut) <= 24
    assert {len(call.completion or ()) for tape in kept.tapes() for call in tape.calls} == {6}
    for name, more in {"context": context, "prompt": {"loop__limits__prompt_tokens": 24}}.items():
        run = train(model, tmp_path / name, env=Talk, **more)
        ends = {(tape.status, tape.cause.type if tape.cause else "") for tape in run.tapes()}
        assert ("limit", "context") in ends


WITH_NLL = {
    "loop__changes": {"regulariser": [{"kind": "nll", "coefficient": 0.5}]},
    "loop__demonstrations": 2,
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A corpus of six texts, one twice and one empty."""
    path = tmp_path / "texts.jsonl"
    lines = ["abab", "bb", "abab", "", "a<|user|>b", "aaaabbbb", "ba"]
    path.write_text("".join(json.dumps({"text": line, "other": 1}) + "\n" for line in lines))
    return path


def corpus(path: Path, **more: Any) -> dict[str, Any]:
    return {"loop__corpus__path": str(path), **{f"loop__corpus__{k}": v for k, v in more.items()}, **WITH_NLL}


def pieces(run: tr.Run) -> list[tuple[list[int], list[int]]]:
    """(context, targets) of the corpus's tapes, in order. One that a kill cut off is there too, but is no row."""
    whole = [tape for tape in run.tapes(split="corpus") if tape.trains]
    tapes = sorted(whole, key=lambda tape: tape.begin.attempt)
    return [(list(tape.calls[0].prompt), list(tape.calls[0].completion or ())) for tape in tapes]


def shown(run: tr.Run) -> list[list[str]]:
    with Store.open(run.path) as store:
        return [stored.record.info["shown"] for stored in store.run_records("use")]


A, B, END, UNKNOWN = 7, 8, 6, 1


def test_texts_of_a_corpus_are_imitated_beside_the_rollouts(model: str, texts: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path / "run", **corpus(texts, tokens=4))
    plain = train(model, tmp_path / "plain")
    assert published(run)[0] == published(plain)[0]
    assert published(run)[1] != published(plain)[1]
    assert pieces(run) == [
        ([A], [B, A, B, END]),
        ([B], [B, END]),
        ([A], [UNKNOWN] * 4),  # what looks like a control token is text
        ([UNKNOWN], [UNKNOWN] * 4),
        ([UNKNOWN], [B, END]),
        ([A], [A, A, A, B]),
        ([B], [B, B, B, END]),
        ([B], [A, END]),
    ]
    used = shown(run)
    assert [len(names) for names in used] == [2, 2]
    assert {*used[0]}.isdisjoint(used[1]), "every text once before one comes again"
    assert all(set(names) <= {tape.id for tape in run.tapes(split="corpus")} for names in used)
    texts.unlink()
    assert run.reproduce().outcome == "verified"
    assert run.summary is not None
    assert run.summary.books_close
    assert train(model, tmp_path / "run", resume=True, **corpus(texts, tokens=4)).reproduce().outcome == "verified"


def test_each_text_is_learned_after_its_prompt_and_by_every_trained_agent(model: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.parquet"
    Dataset.from_list([{"q": "ab" * 5, "a": "ba"}, {"q": "", "a": "ab"}, {"q": "b", "a": "a"}]).to_parquet(str(path))
    more = corpus(path, columns={"text": "a", "prompt": "q"}, tokens=4, count=2) | {"loop__agents": ["agent"]}
    agent = train(model, tmp_path / "run", **more)
    assert pieces(agent) == [([A, B, A, B], [B, A, END]), ([A], [B, END])]
    assert agent.reproduce().outcome == "verified"


KILLED = """
import importlib, os, secrets, sys
import tapereel.finetune.interchange.corpus as corpus
from tapereel.finetune.loop.history import History
secrets.token_hex = lambda n: "00" * n
here = importlib.import_module(sys.argv[4])
from pathlib import Path
left = [int(sys.argv[3])]
def dying(plain):
    def work(*args):
        left[0] -= 1
        return plain(*args) if left[0] else os.kill(os.getpid(), 9)
    return work
if sys.argv[5] == "copying":
    corpus.write_tape = dying(corpus.write_tape)
else:
    History.update = dying(History.update)
here.train(sys.argv[1], Path(sys.argv[2]), **here.corpus(Path(sys.argv[6])))
"""


@pytest.mark.kill
@pytest.mark.parametrize(("where", "at"), [("copying", 3), ("updating", 2)])
def test_a_killed_run_with_a_corpus_goes_on_to_the_same_weights(
    where: str, at: int, model: str, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    # A configuration names the environment by its module. Pytest calls this one by the folder of the checkout.
    here = importlib.import_module(f"tapereel.{__name__.partition('.')[2]}")
    script = [sys.executable, "-c", KILLED, model, str(out), str(at), here.__name__, where, str(texts)]
    found = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(script, capture_output=True, text=True, env={**os.environ, **found})
    assert done.returncode == -9, done.stderr[-2000:]
    whole = Path(shutil.copy(texts, tmp_path / "whole.jsonl"))
    if where == "copying":
        texts.write_text(whole.read_text().replace("bb", "aa", 1))
        with pytest.raises(UsageError, match=r"loop\.corpus\b"):
            here.train(model, out, resume=True, **corpus(texts))
        shutil.copy(whole, texts)
    else:
        texts.unlink()
    again = here.train(model, out, resume=True, **corpus(texts))
    assert len(pieces(again)) == 5
    assert again.reproduce().outcome == "verified"
    assert published(again) == published(here.train(model, tmp_path / "whole", **corpus(whole)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loop__corpus__path": "nowhere.jsonl"}, r"loop\.corpus\.path: .*nowhere\.jsonl"),
        ({"loop__corpus__path": "no/such"}, r"loop\.corpus: no/such: .*'no/such'"),
        ({"loop__corpus__columns": {"text": "words"}}, "'words'.*'text', 'other'"),
        ({"loop__corpus__columns": {"text": "other"}}, r"row 0\b.*loop\.corpus\.columns.*\{text: COLU"),
        ({"loop__corpus__columns": {"prompt": "text"}}, r"row 0\b.*loop\.corpus\.columns"),
        ({"loop__corpus__columns": {"text": "text", "prompt": "other"}}, r"row 0\b.*loop\.corpus\.columns"),
        ({"loop__demonstrations": 0}, r"\bcorpus\b.*\bdemonstrations\b"),
        ({"loop__demonstrations": 9}, r"loop\.demonstrations.*\b9\b.*\b5\b"),
        ({"loop__changes": {}}, r"\bnll\b.*loop\.demonstrations.*\b2\b"),
        ({"loop__corpus__count": 99}, r"\b(count|size)\b.*\b99\b"),
    ],
)
def test_a_corpus_that_cant_be_imitated_is_refused_before_anything_is_written(
    change: dict[str, Any], reason: str, model: str, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises((UsageError, ConfigError), match=reason):
        train(model, tmp_path / "run", **corpus(texts) | change)
    assert not (tmp_path / "run").exists()
