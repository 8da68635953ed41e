"""Reproduce: the weights follow from base weights and tapes, and whatever is edited, the update is named."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.agents.engines.embedded import load_pretrained, weights_digest
from tapereel.envs import Outcome
from tapereel.finetune.inspect.reproducer import Reproduction, retrace
from tapereel.finetune.loop.history import SUMS, TURNS
from tapereel.finetune.trainer import checkpoints, save_checkpoint
from tapereel.finetune.trainer.checkpoint import Checkpoint, prune
from tapereel.tapes import Answer
from tapereel.tapes.arrays import decode, encode
from tapereel.tapes.records import Use
from tapereel.tapes.store import Store

from ..loop.lab import WORDS, Letters, history_in, model, run, settings_of, tasks
from ..loop.rewrite import repin, rewrite

CONFIG = settings_of(updates=5, checkpoint_every=2, keep_checkpoints=None)
EDITED = 2
"""The update whose record or tape is edited."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    run(path, CONFIG, tasks=tasks(2))
    return path


@pytest.fixture
def trained(original: Path, tmp_path: Path) -> Path:
    """A run of five updates, this test's own."""
    return shutil.copytree(original, tmp_path / "run")


def reproduced(path: Path, *, policy: Any = None, files: bool = True, config: Any = CONFIG) -> Reproduction:
    scratch = path.with_name("scratch")
    with Store.open(path, cache=False) as store:
        history = history_in(store, scratch, config, policy=policy)
        return retrace(history, files=checkpoints(path / "checkpoints") if files else ())


def uses_of(path: Path) -> list[Use]:
    with Store.open(path, cache=False) as store:
        return [stored.record for stored in store.run_records("use")]


def of_update(body: dict[str, Any], update: int = EDITED) -> bool:
    return body["t"] == "use" and body["update"] == update


def test_a_run_is_verified(trained: Path) -> None:
    found = reproduced(trained)
    assert str(found) == "verified"
    assert (found.exit_code, found.updates, found.of, found.published, found.checkpoints) == (0, 5, 5, 5, 3)
    assert found.trainers == 3
    last = checkpoints(trained / "checkpoints")[-1]
    assert found.digest == last.state["digest"]
    assert found.tapes == last.state["taught"]["tapes"] == len(last.taught()) > 0


def test_a_rewritten_run_with_the_same_content_is_verified(trained: Path) -> None:
    rewrite(trained, lambda body: body)
    assert reproduced(trained).outcome == "verified"


def reward(body: dict[str, Any]) -> None:
    if body["t"] == "reward":
        body["value"] = 1 - body["value"]


def token(body: dict[str, Any]) -> None:
    if body["t"] == "call" and body.get("completion"):
        ids = decode("i", body["completion"])
        ids[0] = 3 if ids[0] != 3 else 4
        body["completion"] = encode(ids)


def logprob(body: dict[str, Any]) -> None:
    if body["t"] == "call" and body.get("logprobs"):
        values = decode("f", body["logprobs"])
        values[0] -= 1.5
        body["logprobs"] = encode(values)


def of_an_uneven_group(path: Path) -> str:
    """A tape of update EDITED whose group has different rewards: where all are equal, no token changes the update.
    Another tape has the same reward: if only one differs, normalised advantages don't depend on by how much."""
    taken = {str(item[0]) for item in uses_of(path)[EDITED].items}
    groups: dict[str | None, dict[str, float | None]] = {}
    with Store.open(path, cache=False) as store:
        for tape in filter(lambda tape: tape.id in taken, store.tapes(closed=True)):
            groups.setdefault(tape.begin.group, {})[tape.id] = tape.reward
    return next(
        tape
        for rewards in groups.values()
        if len(set(rewards.values())) > 1
        for tape, reward in rewards.items()
        if list(rewards.values()).count(reward) > 1
    )


@pytest.mark.parametrize("edit", [reward, token, logprob])
@pytest.mark.parametrize("pinned", [False, True], ids=["as it was pinned", "pinned anew"])
def test_one_value_of_one_tape_names_the_update(
    trained: Path, edit: Callable[[dict[str, Any]], None], pinned: bool
) -> None:
    tape = of_an_uneven_group(trained)
    found: list[dict[str, Any]] = []

    def change(body: dict[str, Any]) -> dict[str, Any]:
        if body.get("tape") == tape:
            before = repr(body)
            edit(body)
            if repr(body) != before:
                found.append(body)
        return body

    rewrite(trained, change)
    assert found
    if pinned:
        repin(trained)
    verdict = reproduced(trained)
    assert (verdict.outcome, verdict.verdict, verdict.exit_code) == ("diverged", "broken", 1)
    assert verdict.difference is not None
    assert (verdict.difference.update, verdict.updates) == (EDITED, EDITED)
    assert f"update {EDITED}: " in str(verdict)
    if pinned:
        assert verdict.difference.field in ("items", "loss", "grad_norm", "weights")
    else:
        assert verdict.difference.field == "tape"
        assert tape in verdict.difference.sentence


def _weight(body: dict[str, Any]) -> None:
    if of_update(body):
        body["items"][3][4] *= 1 + 1e-15


def _pin(body: dict[str, Any]) -> None:
    if of_update(body):
        body["info"]["pins"][body["items"][0][0]] = ["0" * 64]


def _layer(body: dict[str, Any]) -> None:
    if of_update(body):
        body["info"]["pins"][body["items"][0][0]].append("0" * 64)


def _rate(body: dict[str, Any]) -> None:
    if of_update(body):
        body["info"]["lr"] *= 2


def _published(body: dict[str, Any]) -> None:
    if body["t"] == "publish" and body["version"] == f"run:{EDITED + 1}":
        body["digest"] = "0" * 64


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (_weight, "items"),
        (_pin, "tape"),
        (_layer, "tape"),
        (_rate, "lr"),
        (_published, "weights"),
    ],
)
def test_an_edited_record_names_its_update(trained: Path, edit: Callable[[dict[str, Any]], None], field: str) -> None:
    def change(body: dict[str, Any]) -> dict[str, Any]:
        edit(body)
        return body

    rewrite(trained, change)
    verdict = reproduced(trained, files=False)
    assert verdict.difference is not None
    assert (verdict.difference.update, verdict.difference.field) == (EDITED, field)


def test_another_recipe_is_named_where_it_makes_a_difference(trained: Path) -> None:
    def older(body: dict[str, Any]) -> dict[str, Any]:
        if body["t"] == "use":
            body["info"]["on"]["recipe"] = "0" * 64
        return body

    other = settings_of(changes={"weigh": {"kind": "constant"}})
    verdict = reproduced(trained, config=other)
    assert verdict.difference is not None
    assert (verdict.difference.update, verdict.difference.field) == (0, "recipe")
    rewrite(trained, older)
    assert reproduced(trained).outcome == "verified", "a constant that came later, and changes nothing"


def test_an_edited_checkpoint_is_named(trained: Path) -> None:
    middle = checkpoints(trained / "checkpoints")[1]
    assert middle.update == 4
    weights = middle.weights()
    next(tensor for name, tensor in weights.items() if "norm" in name)[0] += 1e-3
    torch.save(weights, middle.path / "policy.pt")
    verdict = reproduced(trained)
    assert verdict.difference is not None
    assert (verdict.difference.update, verdict.difference.field) == (3, "checkpoint")
    assert "state.json" in verdict.difference.sentence
    _rewrite_state(middle, weights)
    verdict = reproduced(trained)
    assert verdict.difference is not None
    assert (verdict.difference.update, verdict.difference.field, verdict.checkpoints) == (3, "checkpoint", 1)
    assert str(middle.path) in verdict.difference.sentence


def _rewrite_state(checkpoint: Checkpoint, weights: dict[str, torch.Tensor]) -> None:
    """With a digest that fits."""
    policy = model()
    policy.load_state_dict(weights)
    save_checkpoint(
        checkpoint.path.parent,
        policy,
        checkpoint.trainer_state(),
        checkpoint.state,
        update=checkpoint.update,
        taught=checkpoint.taught(),
    )


def moment(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][0]["exp_avg"].view(-1)[0] += 1e-9


def steps(state: dict[str, Any]) -> None:
    state["steps"] += 1


def rate(state: dict[str, Any]) -> None:
    state["optimizer"]["param_groups"][0]["lr"] *= 1.01


@pytest.mark.parametrize(
    ("edit", "place"), [(moment, "optimizer.state.0.exp_avg"), (steps, "steps"), (rate, "optimizer.param_groups[0].lr")]
)
def test_what_the_trainer_goes_on_from_is_compared(trained: Path, edit: Callable[[Any], None], place: str) -> None:
    middle = checkpoints(trained / "checkpoints")[1]
    state = middle.trainer_state()
    edit(state)
    torch.save(state, middle.path / "trainer.pt")
    verdict = reproduced(trained)
    assert verdict.difference is not None
    assert (verdict.exit_code, verdict.difference.update, verdict.difference.field) == (1, 3, "trainer")
    assert verdict.difference.sentence.startswith(f"{place} ")
    assert str(middle.path) in verdict.difference.sentence
    assert verdict.difference.recorded != verdict.difference.found
    assert (verdict.checkpoints, verdict.trainers) == (1, 1), "those before it are as they should be"


def test_a_checkpoint_without_a_readable_trainer_is_named(trained: Path) -> None:
    last = checkpoints(trained / "checkpoints")[-1]
    (last.path / "trainer.pt").write_bytes(b"no")
    verdict = reproduced(trained)
    assert verdict.difference is not None
    assert (verdict.difference.update, verdict.difference.field) == (4, "trainer")


def test_a_checkpoint_that_names_other_teachers(trained: Path) -> None:
    last = checkpoints(trained / "checkpoints")[-1]
    taught = last.taught()
    first = next(iter(taught))
    policy = model()
    policy.load_state_dict(last.weights())
    save_checkpoint(
        last.path.parent,
        policy,
        last.trainer_state(),
        last.state,
        update=last.update,
        taught={**taught, first: ("0" * 64,)},
    )
    verdict = reproduced(trained)
    assert verdict.difference is not None
    assert (verdict.difference.field, first in verdict.difference.sentence) == ("taught", True)


def test_what_is_missing_is_unverifiable(trained: Path, tmp_path: Path) -> None:
    tape = uses_of(trained)[EDITED].items[0][0]
    gone = shutil.copytree(trained, tmp_path / "gone" / "run")
    rewrite(gone, lambda body: None if body.get("tape") == tape else body)
    verdict = reproduced(gone)
    assert (verdict.outcome, verdict.verdict, verdict.exit_code) == ("unverifiable", "undecided", 2)
    assert verdict.updates == EDITED
    player = {"players": {"other": verdict}}
    whole = verdict.model_copy(update={"outcome": "verified", **player})
    assert (whole.outcome, whole.verdict) == ("verified", "undecided"), "the verdict is of all policies"
    assert verdict.reason is not None
    assert str(tape) in verdict.reason
    short = shutil.copytree(trained, tmp_path / "short" / "run")
    rewrite(short, lambda body: None if of_update(body) else body)
    assert re.search(r"update 2\b.*update 3\b", str(reproduced(short)))
    rewrite(trained, lambda body: None if body["t"] == "use" and body["update"] == 4 else body)
    with Store.open(trained, cache=False) as store:
        verdict = retrace(history_in(store, tmp_path / "scratch", CONFIG), until=5)
    assert (verdict.outcome, verdict.updates) == ("unverifiable", 4)


def test_other_base_weights_are_no_divergence(trained: Path) -> None:
    def change(body: dict[str, Any]) -> dict[str, Any]:
        if body["t"] == "publish" and body["version"] == "run:1":
            begun.append({**body, "version": "run:0", "digest": "0" * 64})
        return body

    begun: list[dict[str, Any]] = []
    rewrite(trained, change)
    rewrite(trained, lambda body: begun[0] if body["t"] == "publish" and body["version"] == "run:1" else body)
    verdict = reproduced(trained)
    assert (verdict.outcome, verdict.updates) == ("unverifiable", 0)
    assert "0" * 64 in str(verdict)


def test_another_torch_is_an_excuse_only_where_bits_differ(trained: Path) -> None:
    def older(body: dict[str, Any]) -> dict[str, Any]:
        if body["t"] == "use":
            body["info"]["on"]["torch"] = "1.0"
        return body

    rewrite(trained, older)
    assert reproduced(trained).outcome == "verified"
    verdict = reproduced(trained, policy=model(seed=1))
    assert verdict.outcome == "unverifiable"
    assert "not 1.0" in str(verdict)
    rewrite(trained, lambda body: (_pin(body), body)[1])
    assert reproduced(trained).outcome == "diverged", "a tape is what it is on every machine"


def test_rewards_per_turn_by_the_formula_of_an_earlier_version_are_no_divergence(tmp_path: Path) -> None:
    def of_version(version: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def edit(body: dict[str, Any]) -> dict[str, Any]:
            if body["t"] == "use":
                body["info"]["on"].pop(TURNS)
                if version > 1:
                    body["info"]["on"][TURNS] = version
                body["items"], body["info"]["loss"] = body["items"][1:], 0.5
            return body

        return edit

    config = settings_of(updates=1, changes={"reward": {"per": "turn"}, "credit": {"kind": "returns"}})
    run(tmp_path / "run", config, tasks=tasks(2))
    assert reproduced(tmp_path / "run", config=config, files=False).outcome == "verified"
    for version, outcome in ((2, "diverged"), (1, "unverifiable")):
        copy = shutil.copytree(tmp_path / "run", tmp_path / str(version) / "run")
        rewrite(copy, of_version(version))
        assert reproduced(copy, config=config, files=False).outcome == outcome


class Parts(Letters):
    """The reward of `Letters` in three components, whose plain sum is 0.9999999999999999 of it."""

    async def step(self, action: Answer) -> Outcome:
        found = await super().step(action)
        assert isinstance(found.reward, float)
        return replace(found, reward={name: part * found.reward for name, part in (("a", 0.6), ("b", 0.3), ("c", 0.1))})


@pytest.mark.parametrize(
    ("env", "earlier", "outcome"),
    [(Parts, True, "unverifiable"), (Parts, False, "diverged"), (Letters, True, "diverged")],
)
def test_rewards_that_an_earlier_version_summed_otherwise_are_no_divergence(
    tmp_path: Path, env: type[Letters], earlier: bool, outcome: str
) -> None:
    def change(body: dict[str, Any]) -> dict[str, Any]:
        if body["t"] == "use":
            if earlier:
                body["info"]["on"].pop(SUMS)
            body["info"]["loss"] = 0.5
        return body

    config = settings_of(updates=1)
    run(tmp_path / "run", config, env=env, tasks=tasks(1))
    assert reproduced(tmp_path / "run", config=config, files=False).outcome == "verified"
    rewrite(tmp_path / "run", change)
    assert reproduced(tmp_path / "run", config=config, files=False).outcome == outcome


def test_threads_are_those_of_the_update_and_go_back(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def two(body: dict[str, Any]) -> dict[str, Any]:
        if of_update(body, 0):
            body["info"]["on"]["threads"] = 2
        return body

    rewrite(trained, two)
    seen: list[int] = []
    set_threads = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda n: (seen.append(n), set_threads(n))[1])
    reproduced(trained)
    assert seen[:4] == [2, 1, 1, 1]
    assert torch.get_num_threads() == 1


@pytest.mark.ledger("F84", "F85")
def test_a_checkpoint_is_a_model_in_hugging_face_format(trained: Path) -> None:
    last = checkpoints(trained / "checkpoints")[-1]
    loaded = load_pretrained(last.path / "hf")
    assert weights_digest(loaded.model.state_dict()) == last.state["digest"]
    assert loaded.tokenizer.decode(WORDS.encode("abc")) == WORDS.decode(WORDS.encode("abc"))
    assert loaded.tokenizer.chat_template == WORDS.chat_template


@pytest.mark.ledger("F84")
def test_the_oldest_checkpoints_go_first_and_some_never(tmp_path: Path) -> None:
    def made(*updates: int, pinned: int = -1) -> list[int]:
        for update in updates:
            save_checkpoint(tmp_path, model(), {}, {"lineage": "l", "pinned": update == pinned}, update=update)
        return left()

    def left() -> list[int]:
        return [c.update for c in checkpoints(tmp_path)]

    assert made(0, 1, 2, 3, 4, 5, pinned=2) == [0, 1, 2, 3, 4, 5]
    prune(tmp_path)
    assert left() == [0, 1, 2, 3, 4, 5]
    prune(tmp_path, keep=6)
    assert left() == [0, 1, 2, 3, 4, 5]
    prune(tmp_path, keep=2, best=1)
    assert left() == [0, 1, 2, 4, 5], "the base, the best and the pinned one stay"
    prune(tmp_path, keep=1)
    assert left() == [0, 2, 5]
    prune(tmp_path, keep=1)
    assert left() == [0, 2, 5]


@pytest.mark.ledger("F84", "T48")
def test_a_checkpoint_says_what_its_run_must_go_on_with(trained: Path) -> None:
    last = checkpoints(trained / "checkpoints")[-1]
    assert {"lineage", "phase", "version", "digest", "taught", "cursor", "schedule"} <= set(last.state)
    assert {"optimizer", "moments", "betas", "averaged", "rng", "steps"} <= set(last.trainer_state())
    with Store.open(trained, cache=False) as store:
        taught = store.ledger("run").taught(before=last.update)
    assert set(taught) == set(last.taught())
    assert min(map(min, taught.values())) == 0
    assert max(map(max, taught.values())) == 4
    with Store.open(trained, cache=False) as store:
        assert len(store.ledger("run").taught(before=2)) < len(taught)
