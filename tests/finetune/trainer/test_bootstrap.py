"""Episodes that were cut off: which end bootstraps, from which state, and what the critic learns of such states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tapereel.finetune import Critic, CriticTrainer, Episode, OptimiserConfig, Row, Trainer
from tapereel.finetune.data import apart
from tapereel.finetune.loop.staleness import drop_stale
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import Value
from tapereel.finetune.trainer.updates import Prepared
from tapereel.tapes import CauseType, Status

from ...oracles import objective as oracle
from ..build import episode, row, tiny_model

GAMMA, LAM = 0.9, 0.8
CREDIT = {"gamma": GAMMA, "lam": LAM}


def trainer_of(body: str = "own", lr: float = 0.0, **credit: Any) -> Trainer:
    model = tiny_model()
    critic = Critic.of(model) if body == "own" else Critic.on(model)
    torch.manual_seed(1)
    torch.nn.init.normal_(critic.head.weight)
    torch.nn.init.constant_(critic.head.bias, 0.3)
    recipe = get_recipe("ppo", {"credit": {**CREDIT, **credit}})
    return Trainer(
        model,
        recipe,
        OptimiserConfig.model_construct(lr=0.0),
        critic=CriticTrainer(critic, OptimiserConfig.model_construct(lr=lr), loss=Value(clip=None)),
    )


def value_after(trainer: Trainer, one: Row, position: int) -> float:
    """V of the state in which the tokens up to `position` were read, by a forward pass of these tokens alone."""
    assert trainer.critic is not None
    critic = trainer.critic.critic
    with torch.no_grad():
        ids = torch.as_tensor(one.input_ids[: position + 1].tolist())[None]
        hidden = critic._body[0](input_ids=ids, use_cache=False).last_hidden_state[0, -1]
        return float(critic.head(hidden))


def targets(prepared: Prepared) -> list[float]:
    assert prepared.batch.target is not None
    return prepared.batch.target.tolist()


def expected(trainer: Trainer, rows: list[Row], rewards: list[float], beyond: float) -> list[float]:
    """Targets of one episode whose rows are in order of time, by the oracle's loop and one forward pass per token."""
    values = [value_after(trainer, one, int(at) - 1) for one in rows for at in one.own]
    turns = [int(turn) for one in rows for turn in one.turn]
    last = {turn: k for k, turn in enumerate(turns)}
    earned = [0.0] * len(values)
    for turn, reward in enumerate(rewards):
        earned[max(k for t, k in last.items() if t <= turn)] += reward
    return oracle.gae(earned, values, GAMMA, LAM, beyond)[1]


ENDS = [
    (Status.TRUNCATED, None, True),
    (Status.LIMIT, CauseType.TURNS, True),
    (Status.LIMIT, CauseType.TOKENS, True),
    (Status.LIMIT, CauseType.CONTEXT, True),
    (Status.LIMIT, CauseType.AGENT_SECONDS, True),
    (Status.FINISHED, None, False),
    (Status.ERROR, CauseType.AGENT, False),
]


@pytest.mark.ledger("F44")
@pytest.mark.parametrize("body", ["own", "policy"])
@pytest.mark.parametrize(("status", "cause", "cut"), ENDS)
def test_an_episode_that_was_cut_off_goes_on_with_the_value_at_the_cut(
    status: Status, cause: CauseType | None, cut: bool, body: str
) -> None:
    trainer = trainer_of(body)
    one, other = row("a", turns=(2, 3), after=4), row("b", turns=(1,))
    rewards = [0.5, 1.0]
    prepared = trainer.prepare(
        [one, other], [episode("a", reward=1.5, turn_rewards=rewards, status=status, cause=cause), episode("b")]
    )
    beyond = value_after(trainer, one, int(one.own[-1])) if cut else 0.0
    assert abs(beyond) > 0.01 or not cut
    assert targets(prepared)[:5] == pytest.approx(expected(trainer, [one], rewards, beyond), rel=1e-6)
    assert targets(prepared)[5:] == pytest.approx(expected(trainer, [other], [1.0], 0.0), rel=1e-6)
    assert prepared.sums.mean("episode/bootstrapped") == cut / 2


@pytest.mark.ledger("F44")
def test_what_does_not_bootstrap() -> None:
    one = row("a", turns=(2, 3))
    cut = episode("a", reward=1.0, cut=True)
    whole = expected(trainer_of(), [one], [0.0, 1.0], 0.0)
    assert targets(trainer_of(bootstrap=False).prepare([one], [cut])) == pytest.approx(whole, rel=1e-6)
    at_the_end = trainer_of()
    at_the_end.recipe = at_the_end.recipe.but(reward={"per": "episode"})
    assert targets(at_the_end.prepare([one], [cut])) == pytest.approx(whole, rel=1e-6)
    given = targets(trainer_of().prepare([one], [episode("a", reward=1.0, cut=True, bootstrap=7.0)]))
    assert given == pytest.approx(expected(trainer_of(), [one], [0.0, 1.0], 7.0), rel=1e-6), "given goes first"


@pytest.mark.ledger("F44")
def test_the_cut_is_after_the_last_own_token_in_time_whichever_row_has_it() -> None:
    trainer = trainer_of()
    early, late = row("a", turns=(2,), after=1), row("a", turns=(3,), first_turn=1, prompt=5)
    other = row("b", turns=(1, 1))
    episodes = [episode("b", cut=True), episode("a", reward=2.0, turn_rewards=[0.5, 1.5], cut=True)]
    want = expected(trainer, [early, late], [0.5, 1.5], value_after(trainer, late, int(late.own[-1])))
    assert targets(trainer.prepare([late, other, early], episodes)) == pytest.approx(
        [
            *want[2:],
            *expected(trainer, [other], [0.0, 1.0], value_after(trainer, other, int(other.own[-1]))),
            *want[:2],
        ],
        rel=1e-6,
    )


@pytest.mark.ledger("F44")
def test_stale_tokens_and_other_agents_leave_the_cut_of_what_remains() -> None:
    """A stale beginning is context. An agent's part is cut where it spoke last; a later reward counts once."""
    trainer = trainer_of()
    one = row("a", turns=(2, 2, 1))
    old = Row(**{**{f: getattr(one, f) for f in one.__slots__}, "versions": ("run:0", "run:4")})
    old.version[2:] = 1
    (fresh,), _ = drop_stale([old], "run", 3)
    assert len(fresh.own) == 3
    rewards = [1.0, 0.5, 0.25]
    cut = Episode(tape="a", group="g", reward=1.75, turn_rewards=rewards, status=Status.TRUNCATED)
    beyond = value_after(trainer, one, int(one.own[-1]))
    got = targets(trainer.prepare([fresh], [cut]))
    values = [value_after(trainer, one, int(at) - 1) for at in fresh.own]
    assert got == pytest.approx(oracle.gae([0.0, 0.5, 0.25], values, GAMMA, LAM, beyond)[1], rel=1e-6)
    two = Row(**{**{f: getattr(one, f) for f in one.__slots__}, "agents": ("x", "y", "x")})
    parts, episodes = apart([two], Episode(**{**{f: getattr(cut, f) for f in cut.__slots__}, "shared": rewards}))
    prepared = trainer.prepare(parts, episodes)
    (x, y), all_of = parts, targets(prepared)
    assert len(x.own) == 3
    want = [
        oracle.gae(
            earned,
            [value_after(trainer, one, int(at) - 1) for at in part.own],
            GAMMA,
            LAM,
            value_after(trainer, one, int(part.own[-1])),
        )[1]
        for part, earned in ((x, [0.0, 1.5, 0.25]), (y, [0.0, 0.75]))
    ]
    assert all_of == pytest.approx([*want[0], *want[1]], rel=1e-6)


@pytest.mark.ledger("F44")
def test_the_state_after_an_answer_learns_the_target_of_the_next_answer() -> None:
    trainer = trainer_of(lr=1e-2)
    rows = [row(f"t{k}", turns=(2, 2), rng=np.random.default_rng(k)) for k in range(2)]
    episodes = [episode(f"t{k}", reward=1.0 + k, turn_rewards=[0.5, 0.5 + k], cut=bool(k)) for k in range(2)]
    assert trainer.critic is not None
    prepared = trainer.prepare(rows, episodes)
    stream, target = prepared.batch.stream, prepared.batch.target
    assert stream.after is not None
    assert target is not None
    assert stream.after.isfinite().tolist() == [False, True, False, False, False, True, False, True]
    for _ in range(400):
        trainer.critic.update(rows, stream, target, prepared.batch.entered)
    now = trainer.critic.valued(rows, stream, ends=True)
    assert now.value is not None
    assert now.after is not None
    assert now.value.tolist() == pytest.approx(target.tolist(), abs=0.05)
    assert now.after[[1, 5]].tolist() == pytest.approx(target[[2, 6]].tolist(), abs=0.05)
