"""Several processes take the steps of one: with a copy of the model each, and with a part of each weight."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from tapereel.finetune.objective import Sums
from tapereel.finetune.trainer import DataParallelRanks, Ranks, forward
from tapereel.finetune.trainer.micro_batches import Micro
from tapereel.finetune.trainer.updates import share

from ...agents.engines.embedded.odd_weights import odd_weights
from ...oracles import weights_digest as slow
from ..build import episode, mixture, row, tiny_model
from .seen import png, pretrained
from .sequence_ranks import CASES as TOGETHER
from .sequence_ranks import Case as Together
from .sequence_ranks import name, outcome
from .two_ranks import CASES, SEEN, SHARED, Case, SharedCase, led, seen, trained

KINDS = ("group", "sharded")
GOOD = [case for case in CASES if case.poison is None]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """kind -> what the two processes came to, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tapereel.tests.finetune.trainer.two_ranks"]
    running = [
        subprocess.Popen([*command, str(rank), str(folder)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    for one in running:
        _, errors = one.communicate(timeout=240)
        assert one.returncode == 0, errors
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    return {kind: [one[kind] for one in ranks] for kind in ranks[0]}


def same(a: Any, b: Any, where: str = "", atol: float = 1e-12) -> None:
    """Equal, numbers to `atol`."""
    if isinstance(a, dict):
        assert set(a) == set(b), where
        for key in a:
            same(a[key], b[key], f"{where}/{key}", atol)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}/{k}", atol)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=atol, equal_nan=True, msg=lambda m: f"{where}: {m}")
    elif isinstance(a, float):
        assert (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b, rel=1e-9, abs=1e-12), where
    else:
        assert a == b, where


@pytest.mark.ledger("P5", "T19", "F75", "F91")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_two_processes_take_the_steps_of_one(found, kind: str, case: Case):
    """Weights, optimiser, moments, critic, controllers and running average; norms and sums; uneven and empty ranks."""
    alone = trained(case, Ranks())
    for rank in (0, 1):
        one = found[kind][rank][case.name]
        same(one["weights"], alone["weights"], "weights")
        same(one["state"], alone["state"], "state")
        same(one["betas"], alone["betas"], "betas")
        for step, whole in zip(one["steps"], alone["steps"], strict=True):
            assert step["skipped"] is None
            assert step["norm"] == pytest.approx(whole["norm"], rel=1e-10)
            same(_counted(step["sums"]), _counted(whole["sums"]), "sums")
        same(one["again"], one["state"], "loaded")
    losses = [[found[kind][rank][case.name]["steps"][k]["loss"] for rank in (0, 1)] for k in range(case.steps)]
    assert [sum(pair) for pair in losses] == pytest.approx([step["loss"] for step in alone["steps"]], rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SEEN)
def test_a_rank_without_a_picture_steps_with_one_that_has_some(found, kind: str, case: str):
    """With the tower trained, both must sum the same gradients in each pass, or the one waits for the other's."""
    alone = seen(case, Ranks())
    before = pretrained("qwen2_vl").model.state_dict()
    moved = {name for name, tensor in alone["weights"].items() if not torch.equal(tensor, before[name])}
    tower = {name for name in moved if ".visual." in name and ".merger." not in name}
    assert any(".merger." in name for name in moved)
    assert bool(tower) == (case != "tower")
    ranks = [found[f"{kind} seen"][rank][case] for rank in (0, 1)]
    for one in ranks:
        same(dict(one["weights"]), dict(alone["weights"]), case, atol=1e-5)
    assert ranks[0]["skipped"] == [None, None]
    assert ranks[0]["norms"] == pytest.approx(alone["norms"], rel=1e-4)


@pytest.mark.ledger("F90")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [case for case in TOGETHER if case.quick], ids=lambda case: case.name)
def test_two_ranks_with_half_of_each_row_have_the_gradient_of_one_process(found, kind: str, case: Together):
    check_together(found["together"], kind, 2, case)


def check_together(ranks: list[dict[str, Any]], kind: str, degree: int, case: Together) -> None:
    """Compare what came of a case on each rank with one process."""
    mine = [one[name(kind, degree, case)] for one in ranks]
    if case.poison:
        own, other = ["loss"] * degree, ["another rank"] * (len(ranks) - degree)
        assert [one["skipped"] for one in mine] == own + other
        return
    alone, bound = outcome(case, Ranks()), 1e-12 if case.dtype == torch.float64 else 1e-5
    assert max(float(gradient.abs().max()) for gradient in alone["gradient"].values()) > 1e-3
    for rank, one in enumerate(mine):
        assert one["gradient"].keys() == alone["gradient"].keys()
        for key, gradient in alone["gradient"].items():
            assert (one["gradient"][key] - gradient).abs().max() < bound, f"rank {rank}, {key}"
        assert one["norm"] == pytest.approx(alone["norm"], rel=100 * bound)
        assert one["loss"] == pytest.approx(alone["loss"], rel=100 * bound)
        if case.dtype == torch.float64:
            same(one["weights"], alone["weights"], "weights")
            same(one["state"], alone["state"], "state")
    for step, whole in zip(mine[0]["steps"], alone["steps"], strict=True):
        assert step["norm"] == pytest.approx(whole["norm"], rel=100 * bound)
        if case.dtype == torch.float64:
            same(_counted(step["sums"]), _counted(whole["sums"]), "sums")
            if len(ranks) == degree:  # otherwise each share counts the numbers of the whole step once
                same(_counted(step["counts"]), _counted(whole["counts"]), "counts")


def _counted(sums: dict[str, float]) -> dict[str, float]:
    """Without what every rank reports of the step as a whole."""
    return {
        n: value for n, value in sums.items() if n not in ("value/grad_norm", "value/lr") and not n.endswith("/beta")
    }


@pytest.mark.ledger("F82", "T45", "F81", "P12")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [case for case in CASES if case.poison is not None], ids=lambda case: case.name)
def test_what_one_process_cannot_do_none_does(found, kind: str, case: Case):
    before = (mixture(torch.float64) if case.experts else tiny_model()).state_dict()
    ranks = [found[kind][rank][case.name] for rank in (0, 1)]
    assert [one["steps"][0]["skipped"] for one in ranks] == ["another rank", "loss"]
    for one in ranks:
        assert all(torch.equal(before[n], p) for n, p in one["weights"].items())


@pytest.mark.ledger("P5", "F75", "F79", "F89", "T50", "F91")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_several_processes_give_the_account_that_one_process_gives(found, kind: str, case: SharedCase):
    """Whole batches go in at rank 0 and whole accounts come out, over epochs, mini-batches and a reloaded state."""
    alone = led(case, Ranks())
    lead, follower = (found[f"{kind} shared"][rank][case.name] for rank in (0, 1))
    for one in (lead, alone):  # a rank counts by the reason it knows
        one["state"]["skips"] = sum(one["state"]["skips"].values())
    assert lead["hashes"] == [True, True, True, []], "no weight with rows is gathered"
    assert alone.pop("held") == 1
    parts = lead.pop("held"), follower["held"]
    assert parts == ((1, 1) if kind == "group" else pytest.approx((0.5, 0.5), abs=0.05))
    # Over eight steps of Adam, rounding grows. One process with other micro-batches differs from itself by 1.5e-11.
    same(lead, alone, case.name, atol=1e-10)
    assert follower["steps"] == len(lead["steps"])
    same(follower["weights"], alone["weights"], "the other's weights", atol=1e-10)


def check_digests(found: dict[str, Any]) -> None:
    """The digests of `odd_digests`, by some number of ranks."""
    state = odd_weights(float8=False)
    assert found["rows"] == found["columns"] == found["copies"] == slow.today(state)
    assert found["gathered"] == []
    assert found["earlier"] == slow.earlier(state)
    state["bfloat16"].view(torch.uint8)[-1, -1] ^= 1
    assert found["flipped"] == found["flipped and earlier"] == slow.today(state) != found["rows"]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_hashes_its_rows(found, rank: int):
    check_digests(found["digests"][rank])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_a_rank_receives_the_rows_and_demonstrations_of_its_share_alone(found, kind: str, case: SharedCase):
    follower = found[f"{kind} shared"][1][case.name]
    tapes = [tape for tape in follower["arrived"] if tape[0] != "d"]
    assert tapes == follower["mine"]
    assert len(tapes) < 3 * case.groups
    assert bool(tapes) == (case.groups > 1)
    # Two mini-batches imitate d0 and d1, and d2. Rank 1 has every second tape of each.
    assert follower["arrived"] == [*(["d1"] if case.demonstrations else []), *tapes]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_receives_the_pictures_of_its_share_alone(found, kind: str):
    assert found[f"{kind} seen"][1]["shared out"]["arrived"] == [png(16, 16, k) for k in range(2)] * 2


def test_rank_0_collects_one_value_for_each_share_and_sends_each_share_its_own(found):
    assert found["moved"] == [[[0, 1], "a", [0], "both"], [[], "b", [1], "both"]]


def test_ranks_that_compute_rows_together_find_the_damage_in_every_file(found):
    assert found["damaged"] == [(2, 2), (2, 2)]


@pytest.mark.ledger("T50")
def test_shares_are_whole_families_of_like_size_and_lose_nobody():
    episodes = [episode(f"t{k}", group) for k, group in enumerate("aabbbcd")]
    episodes[2] = replace(episodes[2], fork="t0/1")
    episodes[6] = replace(episodes[6], fork="t0/1")
    rows = [row(e.tape, e.group, turns=(n,)) for e, n in zip(episodes, (3, 3, 3, 3, 3, 30, 3), strict=True)]
    assert share(rows, episodes, 2) == [[5], [0, 1, 2, 3, 4, 6]] or share(rows, episodes, 2) == [
        [0, 1, 5],
        [2, 3, 4, 6],
    ]
    assert sorted(k for part in share(rows, episodes, 3) for k in part) == list(range(7))
    assert share(rows, episodes, 9).count([]) == 6
    assert share([], [], 2) == [[], []]


def test_an_idle_micro_batch_adds_exactly_nothing():
    model = tiny_model()
    scores = forward(model, Micro.idle(), entropy=True)
    assert scores.logprob.shape == (0,)
    assert scores.entropy is not None
    (scores.logprob.sum() + scores.entropy.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_one_process_has_nothing_to_add_up():
    sums = Sums()
    assert Ranks().gather(sums) == [sums]
    assert Ranks().any(True)
    with pytest.raises(RuntimeError, match="torchrun"):
        DataParallelRanks()
    assert copy.copy(Ranks()).size == 1
