"""TRL's and TorchRL's own losses, gradients, advantages and metrics, on the tokens and weights that ours were given."""

from __future__ import annotations

import json

import pytest

from .test_trl import started

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Name -> (largest difference, largest number of theirs)."""
    out = tmp_path_factory.mktemp("oracles")
    started("oracles_run.py", out)
    return json.loads((out / "oracles.json").read_text())


@pytest.mark.ledger("F44")
def test_torchrl_gives_the_same_advantages_after_an_end_and_after_a_cut(found: dict[str, list[float]]) -> None:
    mine = {name: pair for name, pair in found.items() if name.startswith("torchrl/GAE")}
    assert len(mine) == 4, "both clocks, terminated and truncated"
    assert all(difference <= 1e-7 for difference, _ in mine.values()), mine
    assert all(size > 0.1 for _, size in mine.values())


def test_each_loss_gradient_and_metric_of_theirs_is_ours(found: dict[str, list[float]]) -> None:
    far = {name: pair for name, pair in found.items() if not pair[0] <= 1e-7}
    assert not far
    flat = {name for name, pair in found.items() if pair[1] == 0}
    assert flat == {"torchrl/MCAdvantage of 4"}, "only the group of equal rewards has nothing to compare"
    kinds = {name.partition("/")[0] for name in found}
    assert (kinds, len(found)) == ({"trl", "torchrl"}, 36)
