"""Terms that a user wrote: what they return is checked, and an error names their class."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tapereel.finetune import OptimiserConfig, Stream, Trainer
from tapereel.finetune.data import BadBatch
from tapereel.finetune.loop import NothingUsable
from tapereel.finetune.objective import Baseline, Context, Regulariser, Surrogate
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import Division
from tapereel.tapes.errors import UsageError

from ..build import batch, tiny_model
from .test_schedules import Even, model, trained

__all__ = ["model"]
HERE = f"{__name__}:"


class Std(Baseline):
    """Three lines of torch for each group, and 0 / 0 for equal rewards."""

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        groups = stream.episodes.group
        return torch.stack([(x[k] - (own := x[groups == g]).mean()) / own.std() for k, g in enumerate(groups)])


class Sometimes(Std):
    """Std, but only every third batch has a NaN."""

    calls: ClassVar[int] = 0

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        Sometimes.calls += 1
        return super().__call__(x if Sometimes.calls % 3 == 0 else x + torch.arange(len(x)), scored, stream, context)


class OneNumber(Baseline):
    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        return x.mean()


class Short(Baseline):
    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        return x[:1]


class Mean(Surrogate):
    """As every loop in torch ends."""

    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        return -((lp - anchor).exp() * a).mean()


class Number(Surrogate):
    def __call__(self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context) -> Any:
        return float(-((lp.detach() - anchor).exp() * a).mean())


class Detached(Surrogate):
    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        return -lp.detach() * a


class NotANumber(Surrogate):
    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        return -lp * a / 0


class Sum(Regulariser):
    def __call__(
        self, lp: Tensor, entropy: Tensor | None, index: Tensor, stream: Stream, beta: float, context: Context
    ) -> Tensor:
        return lp.square().sum()


WRONG: list[tuple[str, type, str]] = [
    ("baseline", OneNumber, r"\(\).*\d+ episodes.*\(\d+,\)"),
    ("baseline", Short, r"\(1,\).*\d+ episodes.*\(\d+,\)"),
    ("surrogate", Mean, r"\(\).*\d+ tokens.*\(\d+,\)"),
    ("surrogate", Number, r"float.*\d+ tokens.*\(\d+,\)"),
    ("surrogate", Detached, "gradient"),
    ("regulariser", Sum, r"\(\).*\d+ tokens.*\(\d+,\)"),
]


@pytest.mark.parametrize(("field", "cls", "said"), WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_a_term_that_returns_another_shape_is_refused_by_its_name(field: str, cls: type, said: str) -> None:
    policy = tiny_model()
    rows, episodes = batch(model=policy)
    kind: Any = {"kind": HERE + cls.__name__}
    trainer = Trainer(
        policy, get_recipe("grpo", {field: [kind] if field == "regulariser" else kind}), OptimiserConfig()
    )
    with pytest.raises(BadBatch, match=rf"{HERE}{cls.__name__}\b.*{said}"):
        trainer.update(rows, episodes)


def test_a_number_that_is_not_finite_is_named_with_its_term_and_tape() -> None:
    policy = tiny_model()
    rows, episodes = batch(model=policy)
    trainer = Trainer(policy, get_recipe("grpo", {"surrogate": {"kind": HERE + "NotANumber"}}), OptimiserConfig())
    for stats in trainer.train_on(Division.of(rows, episodes).shares[0], epochs=2):
        assert stats.skipped == "loss"
        assert stats.sums.fault is not None
        assert stats.sums.fault.startswith(f"{HERE}NotANumber returned ")
        assert stats.sums.fault.split()[-1] in {episode.tape for episode in episodes}


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("updates", "made"), [(8, 5), (2, 2)])
def test_a_run_whose_updates_are_all_skipped_ends_with_the_term_and_the_tape(
    updates: int, made: int, model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    changes = {"baseline": {"kind": HERE + "Std"}}
    with pytest.raises(NothingUsable, match=rf"\b{made} updates.*{HERE}Std returned nan for tape \w+"):
        trained(run, model, "grpo", updates, env=Even, changes=changes)
    assert [line["skipped"] for line in lines_of(run)] == ["loss"] * made


def test_a_run_with_some_skipped_updates_goes_on_and_warns(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Sometimes.calls = 0
    changes = {"baseline": {"kind": HERE + "Sometimes"}}
    with caplog.at_level(logging.WARNING):
        run = trained(tmp_path / "run", model, "grpo", 3, env=Even, changes=changes)
    assert [line["skipped"] for line in lines_of(run)] == [None, None, "loss"]
    assert f"{HERE}Sometimes returned nan" in caplog.text


def test_an_adaptive_kl_that_begins_at_0_is_refused() -> None:
    adaptive = {"target": 0.1, "horizon": 100}
    for changes in (
        {"regulariser": [{"kind": "kl", "adaptive": adaptive}]},
        {"shape": [{"kind": "episode_kl", "beta": 0, "adaptive": adaptive}]},
    ):
        with pytest.raises(UsageError, match=r"\bbeta is 0\b"):
            get_recipe("grpo", changes)
