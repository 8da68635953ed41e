"""What the check of delivered weights records, and how a resumed run goes on from it."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.engines.embedded.embedded_engine import EmbeddedEngine
from tapereel.finetune.history.delivery import FIRST, NotDelivered
from tapereel.finetune.history.plan import UpdateInfo
from tapereel.tapes.store.store import Store

from ..loop.lab import RENDERER, engine_of, history_in, loop_in, model, run, settings_of

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
        loop = loop_in(store, history, config, engine=engine(history))
        asyncio.run(loop.run())
    return loop


def test_each_record_says_how_the_weights_before_it_arrived(tmp_path: Path) -> None:
    _, reports = run(tmp_path / "run", CONFIG)
    found = checks(tmp_path / "run")
    assert [check["version"] for check in found] == ["run:0", "run:1", "run:2"]
    assert [check["verdict"] for check in found] == ["delivered"] * 3
    assert all(check["difference"] <= check["clean"] < 1e-5 for check in found)
    assert [check["bound"] for check in found] == [FIRST, 1e-4, 1e-4]
    assert found[0]["moved"] is None
    assert min(check["moved"] for check in found[1:]) > 0.01
    assert [report.metrics["delivery/difference"] for report in reports[:2]] == [c["difference"] for c in found[1:]]


def test_a_resumed_run_keeps_the_places_and_the_bound(tmp_path: Path) -> None:
    run(tmp_path / "run", CONFIG)
    loop = resumed(tmp_path / "run")
    found = checks(tmp_path / "run")
    assert {(check["tape"], *check["places"]) for check in found} == {(found[0]["tape"], *found[0]["places"])}
    assert found[3]["version"] == "run:3"
    assert found[3]["clean"] == found[2]["clean"], "a first comparison must not widen a recorded bound"
    assert loop.history.delivery.found["version"] == "run:4"


def test_wrong_weights_of_a_resumed_run_are_found_before_its_first_update(tmp_path: Path) -> None:
    """Within FIRST, the bound of a run that has no record of its samplers' rounding."""
    run(tmp_path / "run", CONFIG.model_copy(update={"optimiser": CONFIG.optimiser.model_copy(update={"lr": 1e-4})}))

    def stale(history: Any) -> EmbeddedEngine:
        return EmbeddedEngine(model(), RENDERER, version=history.version, slots=64)

    with pytest.raises(NotDelivered, match=r"the weights run:3 did not arrive at embedded: .* of no known version"):
        resumed(tmp_path / "run", stale)
    assert len(checks(tmp_path / "run")) == 3


def test_a_sampler_that_lags_by_small_updates_does_not_widen_the_bound(tmp_path: Path) -> None:
    """Each difference is within the bound, and still none is rounding."""
    config = settings_of(updates=16, max_lag=1, optimiser={"lr": 3e-4}, sampler_tolerance=0.3, checkpoint_every=100)
    lines: list[dict[str, Any]] = []
    with Store.create(tmp_path / "run", durability="os") as store:
        history = history_in(store, tmp_path, config)
        loop = loop_in(store, history, config, on_update=lambda report: lines.append(report.metrics))
        decoder: Any = loop.engine._decoder  # type: ignore[attr-defined]
        load, late = decoder.load, [dict(history.model.state_dict())]
        late = [{name: tensor.clone() for name, tensor in late[0].items()}]

        def behind(state: Any) -> None:
            late.append({name: tensor.clone() for name, tensor in state.items()})
            load(late.pop(0))

        decoder.load = behind
        asyncio.run(loop.run())
    assert max(line["delivery/moved"] or 0 for line in lines) > 0.6, "the updates together can be seen"
    assert max(line["delivery/difference"] for line in lines) > 0.01
    assert {line["delivery/bound"] for line in lines} == {0.3}
    assert float(str(history.delivery.found["clean"])) < 1e-5


def test_log_probs_that_are_no_numbers_are_no_delivery(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", durability="os") as store:
        loop = loop_in(store, history_in(store, tmp_path, CONFIG), CONFIG)
        complete = loop.engine.complete

        async def asked(request: Any) -> Any:
            found = await complete(request)
            return replace(found, logprobs=nans(1)) if request.cache_key.startswith("delivery/") else found

        loop.engine.complete = asked  # type: ignore[method-assign]
        with pytest.raises(NotDelivered, match="did not arrive at embedded"):
            asyncio.run(loop.run())


def nans(n: int) -> array[float]:
    return array("f", [float("nan")] * n)
