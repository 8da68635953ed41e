"""What an update may be made of: several epochs and mini-batches, several rollout batches, some of the agents,
demonstrations beside it, a running average, a reference, an adaptive coefficient. All of it is in the record."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tapereel.agents import LLM, Agent, EpisodeSpec, ScriptedEngine, delegate, rollout
from tapereel.agents.engines.embedded import weights_digest
from tapereel.finetune import History, LoopConfig, OptimiserConfig, Trainer
from tapereel.finetune.loop import SamplerMismatch
from tapereel.finetune.loop.history import Plan
from tapereel.finetune.loop.loop import UnknownAgent
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import Ranks, copied_weights
from tapereel.tapes import Answer, Tape
from tapereel.tapes.errors import UsageError
from tapereel.tapes.records import Use
from tapereel.tapes.store import Store

from .lab import (
    RENDERER,
    Letters,
    Speaker,
    assert_books_close,
    history_in,
    loop_in,
    model,
    policy_of,
    run,
    settings_of,
    tasks,
)
from .test_history import abandoned
from .test_loop import Shifted


def uses_of(path: Path) -> list[Use]:
    store = Store.open(path)
    found = [stored.record for stored in store.run_records("use")]
    store.close()
    return found


def digest(history: History) -> str:
    return weights_digest(copied_weights(history.model))


def again(path: Path, fresh: Path, config: LoopConfig, made: Any = history_in) -> str:
    """Digest of the weights that the record makes of the base weights, which is that of the last version published."""
    with Store.open(path) as store:
        history = made(store, fresh, config)
        assert history.restore() == config.updates
        published = {stored.record.version: stored.record.digest for stored in store.run_records("publish")}
        assert digest(history) == published[history.version]
        return digest(history)


# Epochs and mini-batches


@pytest.mark.ledger("F78", "F79")
@pytest.mark.parametrize("lag", [0, 1])
def test_epochs_and_minibatches_are_in_the_record_and_made_again_bit_for_bit(tmp_path: Path, lag: int) -> None:
    path, config = tmp_path / "run", settings_of(updates=3, epochs=2, minibatches=2, max_lag=lag)
    loop, _ = run(path, config, env=Shifted, tasks=tasks(2))
    assert loop.history.trainer is not None
    assert loop.history.trainer.steps == 3 * 2 * 2
    uses = uses_of(path)
    assert [(use.update, use.epoch) for use in uses] == [(k, epoch) for k in range(3) for epoch in range(2)]
    for use in uses:
        every = [(call, k) for _, call, a, b, _ in use.items for k in range(a, b)]
        assert len(every) == len(set(every)), "a token is in one mini-batch of an epoch"
        total = sum(weight * (b - a) for _, _, a, b, weight in use.items)
        assert total == pytest.approx(2.0), "each mini-batch has weights of its own, which add up to 1"
    for one, other in zip(uses[::2], uses[1::2], strict=True):
        assert {item[:4] for item in one.items} == {item[:4] for item in other.items}
    assert any(one.items != other.items for one, other in zip(uses[::2], uses[1::2], strict=True)), "cut anew"
    assert again(path, tmp_path / "fresh", config) == digest(loop.history)


@pytest.mark.ledger("F79")
def test_64_prompts_of_8_in_batches_of_128_samples_are_4_steps_an_epoch() -> None:
    config = LoopConfig(groups=64, group_size=8, minibatches=4)
    assert config.groups * config.group_size // config.minibatches == 128
    with pytest.raises(ValueError, match=r"rollouts=2.*minibatches=2"):
        LoopConfig(rollouts=2, minibatches=2)


def test_what_sampler_and_trainer_agree_on_is_asked_of_the_first_step_only(tmp_path: Path) -> None:
    config = settings_of(updates=2, epochs=3, minibatches=2, max_lag=0)
    _, reports = run(tmp_path / "run", config, env=Shifted)
    for report in reports:
        assert report.metrics["mismatch"] <= 1e-4
        assert report.metrics["ratio/max"] > 1.01, "later steps are off the policy that sampled, and that is no mistake"

    class Wrong(Shifted):
        pass

    tight = config.model_copy(update={"sampler_tolerance": 1e-12})
    with pytest.raises(SamplerMismatch):
        run(tmp_path / "tight", tight, env=Wrong)


@pytest.mark.parametrize("records", [1, 2, 3, 5])
def test_an_update_cut_off_between_its_epochs_is_finished_by_the_next_process(tmp_path: Path, records: int) -> None:
    path, config = tmp_path / "run", settings_of(updates=3, epochs=3, minibatches=2, max_lag=0, checkpoint_every=2)

    class Cut(BaseException):
        pass

    store = Store.create(path)
    history = history_in(store, path, config)
    append, left = store.append_layer, records

    def limited(record: Any) -> None:
        nonlocal left
        left -= isinstance(record, Use)
        append(record)
        if left == 0 and isinstance(record, Use):
            store.writer.sync()
            raise Cut

    store.append_layer = limited  # type: ignore[method-assign]
    with pytest.raises(Cut):
        asyncio.run(loop_in(history, config, env=Shifted).run())
    store.abandon()
    assert len(uses_of(path)) == records
    with Store.open(path, write=True) as store:
        history = history_in(store, path, config)
        history.restore()
        loop = loop_in(history, config, env=Shifted)
        asyncio.run(loop.run())
        final = digest(history)
    assert [(use.update, use.epoch) for use in uses_of(path)] == [(k, e) for k in range(3) for e in range(3)]
    assert_books_close(path)
    assert again(path, tmp_path / "fresh", config) == final


def test_a_run_of_several_epochs_that_dies_again_and_again_ends_as_one_left_alone(tmp_path: Path) -> None:
    path, config = tmp_path / "run", settings_of(updates=4, groups=2, epochs=2, minibatches=2)
    rng = random.Random(4)
    done, attempt, history = False, 0, None
    for attempt in range(60):
        store = Store.open(path, write=True) if attempt else Store.create(path)
        history = history_in(store, path, config)
        history.restore()
        done = abandoned(loop_in(history, config, env=Shifted, tasks=tasks(1)), rng.randint(2, 250))
        store.close() if done else store.abandon()
        if done:
            break
    assert done
    assert history is not None
    assert attempt > 2
    uses = uses_of(path)
    assert [(use.update, use.epoch) for use in uses] == [(k, epoch) for k in range(4) for epoch in range(2)]
    taken = [name for use in uses[::2] for name in use.info["tapes"]]
    assert len(taken) == len(set(taken))
    assert_books_close(path)
    assert again(path, tmp_path / "fresh", config) == digest(history)


# Several rollout batches


@pytest.mark.ledger("F79", "F80", "P4")
def test_rollout_batches_add_up_to_one_gradient_and_compare_within_themselves(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(path, settings_of(updates=1, groups=4, max_lag=0), env=Shifted)
    with Store.open(path) as store:
        whole = Plan.of(uses_of(path)[0])
        halves = whole.model_copy(update={"batches": (8, 8)})
        assert Plan.model_validate(halves.info()) == halves
        weights: dict[tuple[str, str], dict[str, Any]] = {}
        advantages: dict[tuple[str, str], Any] = {}
        for name, changes in (("group", {}), ("batch", {"baseline": {"by": "batch"}})):
            for how, plan in (("whole", whole), ("halves", halves)):
                history = history_in(store, tmp_path / name / how, settings_of(), changes=changes)
                stats, _ = history.update(plan, history.from_store)
                weights[name, how] = copied_weights(history.model)
                first = [
                    k
                    for k, tape in enumerate(stats.stream.episode.tolist())
                    if tape not in stats.stream.episode.tolist()[:k]
                ]
                advantages[name, how] = stats.advantage[first].numpy()
        rewards = np.array([store.tape(tape).reward for tape in whole.tapes])
    for parameter, value in weights["group", "whole"].items():
        torch.testing.assert_close(weights["group", "halves"][parameter], value, rtol=1e-6, atol=1e-8)

    def standard(x: Any) -> Any:
        return (x - x.mean()) / (x.std(ddof=1) + 1e-9)

    np.testing.assert_allclose(advantages["batch", "whole"], standard(rewards), rtol=1e-6)
    halved = np.concatenate([standard(rewards[:8]), standard(rewards[8:])])
    np.testing.assert_allclose(advantages["batch", "halves"], halved, rtol=1e-6)
    assert not np.allclose(standard(rewards), halved)


@pytest.mark.ledger("F79")
def test_the_loop_takes_so_many_rollout_batches_for_an_update(tmp_path: Path) -> None:
    path, config = tmp_path / "run", settings_of(updates=3, groups=2, rollouts=2, changes={"baseline": {"by": "batch"}})
    loop, reports = run(path, config, env=Shifted)
    assert {report.metrics["groups"] for report in reports} == {4}
    assert [use.info["batches"] for use in uses_of(path)] == [[8, 8]] * 3
    assert again(path, tmp_path / "fresh", config) == digest(loop.history)


# Agents


class Planner(Agent):
    """Has the searcher say something, then answers."""

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        async for _ in delegate("searcher", Speaker(), tape, llm):
            break
        yield Answer(text=(await llm(tape)).text)


@pytest.mark.parametrize("who", ["planner", "planner/searcher"])
def test_only_the_agents_that_are_named_are_trained_and_the_others_are_context(tmp_path: Path, who: str) -> None:
    path, config = tmp_path / "run", settings_of(updates=2, agents=(who,), epochs=2)
    loop, _ = run(path, config, agent=Planner(), env=Shifted)
    store = Store.open(path)
    spoke = {call.by for tape in store.tapes() for call in tape.calls}
    assert spoke == {"planner", "planner/searcher"}
    for use in uses_of(path):
        assert {store.tape(tape).call(call).by for tape, call, *_ in use.items} == {who}
        assert {store.tape(tape).call(call).by for tape, call, *_ in use.info["context"]} == spoke - {who}
    books = store.books()
    assert books.tokens["context"] > 0
    assert books.tokens["trained"] > 0
    store.close()
    assert_books_close(path)
    assert again(path, tmp_path / "fresh", config) == digest(loop.history)


def test_an_agent_that_never_speaks_can_t_be_trained(tmp_path: Path) -> None:
    with pytest.raises(UnknownAgent, match=r"'plannr'.*'planner', 'planner/searcher'"):
        run(tmp_path / "run", settings_of(agents=("plannr",)), agent=Planner(), env=Shifted)
    with pytest.raises(ValueError, match=r"\bagents\b.*\bpath\b"):
        LoopConfig(agents=())


# Beside the batch


def demonstrations(store: Store, n: int = 6) -> list[str]:
    async def record() -> list[str]:
        engine = ScriptedEngine(lambda request: request.messages[-1]["content"], renderer=RENDERER)
        made = [
            await rollout(Speaker(), Letters(), EpisodeSpec.of(task, split="demo"), engine=engine, journal=store.writer)
            for task in (tasks(2)(k) for k in range(n))
        ]
        return [tape.id for tape in made]

    return asyncio.run(record())


NLL = {"regulariser": [{"kind": "nll", "coefficient": 0.5}]}


@pytest.mark.ledger("F65")
def test_demonstrations_are_trained_on_beside_the_batch_and_booked(tmp_path: Path) -> None:
    path = tmp_path / "run"
    config = settings_of(updates=3, changes=NLL, demonstrations=4, minibatches=2, epochs=2)
    with Store.create(path) as store:
        shown = demonstrations(store)
        history = history_in(store, path, config)
        asyncio.run(loop_in(history, config, env=Shifted, shown=shown).run())
        final = digest(history)
    books = assert_books_close(path)
    assert books.authored_trained > 0
    seen: set[str] = set()
    for use in uses_of(path):
        assert len(use.info["shown"]) == 4
        theirs = {item[0]: item[4] for item in use.items if item[0] in shown}
        assert set(theirs) == set(use.info["shown"])
        tokens = sum((b - a) * w for tape, _, a, b, w in use.items if tape in shown)
        assert tokens == pytest.approx(2 * 0.5), "the coefficient, once for each step"
        seen |= set(theirs)
    assert len(seen) > 4, "not always the same ones"
    assert again(path, tmp_path / "fresh", config) == final


@pytest.mark.parametrize(("changes", "n", "there"), [({}, 2, 6), (NLL, 0, 6), (NLL, 8, 6)])
def test_demonstrations_that_nothing_uses_or_that_are_missing_are_refused_ahead(
    tmp_path: Path,
    changes: Any,
    n: int,
    there: int,
) -> None:
    config = settings_of(changes=changes, demonstrations=n)
    with Store.create(tmp_path / "run") as store, pytest.raises(UsageError, match=rf"loop\.demonstrations.*\b{n}\b"):
        loop_in(history_in(store, tmp_path, config), config, shown=[f"t{k}" for k in range(there)])


def rich_history(store: Store, directory: Path, config: LoopConfig) -> History:
    """With a reference, and a running average, as `Training` makes one."""
    base = model()

    def make(phase: str, work: Any, ranks: Ranks) -> Trainer:
        return Trainer(
            work,
            get_recipe(config.recipe, config.changes),
            OptimiserConfig(lr=1e-2, ema=config.optimiser.ema),
            reference=base,
        )

    return History(policy_of(model(), make), store, "run", directory / "checkpoints")


@pytest.mark.ledger("F61", "F68", "F69")
def test_a_reference_an_adaptive_coefficient_and_a_running_average_go_through_the_loop(tmp_path: Path) -> None:
    kl = {"kind": "kl", "beta": 0.1, "adaptive": {"target": 1e-2, "horizon": 64}}
    path, config = tmp_path / "run", settings_of(updates=4, changes={"regulariser": [kl]}, max_lag=0)
    config = config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"ema": 0.75})})
    with Store.create(path) as store:
        history = rich_history(store, path, config)
        reports: list[Any] = []
        loop = loop_in(history, config, env=Shifted, on_update=reports.append)
        asyncio.run(loop.run())
        trainer = history.trainer
        assert trainer is not None
        beta = 0.1
        for report in reports:  # 16 episodes of a horizon of 64, each at most 20 % off
            beta *= 1 + min(max(report.metrics["kl/reference/k1"] / 1e-2 - 1, -0.2), 0.2) * 16 / 64
        assert beta != 0.1
        assert trainer.betas[0] == pytest.approx(beta, rel=1e-9)
        assert trainer.steps == 4
        name = next(iter(trainer.averaged))
        for weights in (copied_weights(model()), copied_weights(history.model)):
            assert not torch.equal(trainer.averaged[name], weights[name])
        kept = {key: value.clone() for key, value in trainer.averaged.items()}
        last = trainer.betas[0]
    with Store.open(path) as store:
        fresh = rich_history(store, tmp_path / "fresh", config)
        fresh.restore()
        assert fresh.trainer is not None
        assert fresh.trainer.betas[0] == last
        assert all(torch.equal(fresh.trainer.averaged[key], value) for key, value in kept.items())
