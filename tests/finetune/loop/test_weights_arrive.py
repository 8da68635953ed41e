"""What the check of delivered weights records, and how a resumed run goes on from it."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.agents.engines.embedded.embedded_engine import EmbeddedEngine
from tapereel.finetune.loop.delivery import FIRST, NARROW, Delivery, NotDelivered
from tapereel.finetune.loop.plan import UpdateInfo
from tapereel.tapes.store.store import Store

from ..build import row
from .lab import RENDERER, WORDS, engine_of, history_in, loop_in, model, policy_of, run, settings_of
from .test_loop import Shifted

CONFIG = settings_of(updates=3, max_lag=1, checkpoint_every=1)


def checks(path: Path) -> list[dict[str, Any]]:
    with Store.open(path) as store:
        return [UpdateInfo.of(use).delivery or {} for use in store.ledger("run").uses]


def resumed(path: Path, engine: Any = engine_of) -> Any:
    """The loop of one more update, from the run's record."""
    with Store.open(path, write=True) as store:
        history = history_in(store, path, CONFIG)
        history.restore()
        config = CONFIG.model_copy(update={"updates": CONFIG.updates + 1})
        loop = loop_in(history, config, engine=engine(history))
        asyncio.run(loop.run())
    return loop


def test_each_record_says_how_the_weights_before_it_arrived(tmp_path: Path) -> None:
    _, reports = run(tmp_path / "run", CONFIG, env=Shifted)
    found = checks(tmp_path / "run")
    assert [check["version"] for check in found] == ["run:0", "run:1", "run:2"]
    assert [check["verdict"] for check in found] == ["delivered"] * 3
    assert all(check["difference"] <= check["clean"] < 1e-5 for check in found)
    assert [check["bound"] for check in found] == [FIRST, 1e-4, 1e-4]
    assert found[0]["moved"] is None
    assert min(check["moved"] for check in found[1:]) > 0.01
    assert [report.metrics["delivery/difference"] for report in reports[:2]] == [c["difference"] for c in found[1:]]


def test_a_resumed_run_keeps_the_places_and_the_bound(tmp_path: Path) -> None:
    run(tmp_path / "run", CONFIG, env=Shifted)
    loop = resumed(tmp_path / "run")
    found = checks(tmp_path / "run")
    assert {(check["tape"], *check["places"]) for check in found} == {(found[0]["tape"], *found[0]["places"])}
    assert found[3]["version"] == "run:3"
    assert found[3]["clean"] == found[2]["clean"], "a first comparison must not widen a recorded bound"
    assert loop.history.delivery.found["version"] == "run:4"


def test_wrong_weights_of_a_resumed_run_are_found_before_its_first_update(tmp_path: Path) -> None:
    """Within FIRST, the bound of a run that has no record of its samplers' rounding."""
    slow = CONFIG.model_copy(update={"optimiser": CONFIG.optimiser.model_copy(update={"lr": 1e-4})})
    run(tmp_path / "run", slow, env=Shifted)

    def stale(history: Any) -> EmbeddedEngine:
        return EmbeddedEngine(model(), RENDERER, version=history.version, slots=64)

    with pytest.raises(NotDelivered, match=r"run:3 .*embedded.*\bcaches\b"):
        resumed(tmp_path / "run", stale)
    assert len(checks(tmp_path / "run")) == 3


def test_a_sampler_that_lags_by_small_updates_does_not_widen_the_bound() -> None:
    """Each difference is within the bound, and still none is rounding. The updates are fixed: no run is trained."""
    policy, found = model(), list[dict[str, Any]]()
    delivery, engine = Delivery(policy_of(policy)), EmbeddedEngine(policy, RENDERER, version="run:0", slots=64)
    one = row(turns=(12,))
    delivery.choose(["a"], lambda tape: [replace(one, input_ids=one.input_ids % len(WORDS))])

    async def lagging() -> None:
        await delivery.check(engine, "run:0", 0.1)
        for k in range(1, 33):
            before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
            with torch.no_grad():
                policy.model.norm.weight.mul_(0.97)  # flatter: no log-prob moves by more than 0.07
            await engine.sync_weights(before, f"run:{k}")
            await delivery.check(engine, f"run:{k}", 0.1)
            found.append(dict(delivery.found))

    asyncio.run(lagging())
    assert max(check["moved"] for check in found) > 0.3, "the updates together can be seen"
    assert all(1e-3 < check["difference"] < check["bound"] == 0.1 for check in found)
    assert float(str(delivery.found["clean"])) < 1e-5


def test_a_sampler_may_round_like_the_trainer_and_then_otherwise() -> None:
    """Under autocast. Both engines have the weights, and one computes in float32."""
    policy = model()
    with torch.no_grad():
        policy.model.norm.weight.mul_(12.0)  # so that rounding is seen
    narrow = replace(policy_of(policy), autocast=torch.bfloat16)
    delivery, one = Delivery(narrow), row(turns=(12,))
    delivery.choose(["a"], lambda tape: [replace(one, input_ids=one.input_ids % len(WORDS))])
    for dtype in (torch.bfloat16, None):
        engine = EmbeddedEngine(policy, RENDERER, version="run:0", slots=64, autocast=dtype)
        asyncio.run(delivery.check(engine, "run:0", None))
    assert NARROW < float(str(delivery.found["difference"])) < float(str(delivery.found["bound"])) < FIRST
    with torch.no_grad():
        policy.model.norm.weight.mul_(0.5)
    other = EmbeddedEngine(policy, RENDERER, version="run:0", slots=64, autocast=torch.bfloat16)
    with torch.no_grad():
        policy.model.norm.weight.mul_(2.0)
    with pytest.raises(NotDelivered, match="embedded"):
        asyncio.run(delivery.check(other, "run:0", None))


def test_log_probs_that_are_no_numbers_are_no_delivery(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", durability="os") as store:
        loop = loop_in(history_in(store, tmp_path, CONFIG), CONFIG)
        complete = loop.engine.complete

        async def asked(request: Any) -> Any:
            found = await complete(request)
            return replace(found, logprobs=nans(1)) if request.cache_key.startswith("delivery/") else found

        loop.engine.complete = asked  # type: ignore[method-assign]
        with pytest.raises(NotDelivered, match="embedded"):
            asyncio.run(loop.run())


def nans(n: int) -> array[float]:
    return array("f", [float("nan")] * n)
