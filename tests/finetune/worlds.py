"""Random batches and random recipes, drawn by hypothesis; a batch is made for the package and for the oracle alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tapereel.finetune import Episode, Row, Stream
from tapereel.finetune.objective import (
    Anchor,
    EpisodeKL,
    GroupBaseline,
    Reward,
    Select,
    Term,
    TimeCredit,
    Weigh,
    Whiten,
)
from tapereel.tapes import Status

from ..oracles.world import Attempt, Said, World
from .build import choices, exact, row

PRICES = [0.0, 0.1, 0.3, 1.0, -2.5, 7.0]
LOGPROBS = st.floats(-4, -0.01).map(lambda x: round(x, 3))


@st.composite
def attempts(draw: st.DrawFn, *, scored_only: bool = False) -> Attempt:
    """One episode of one to three turns."""
    reward = draw(st.sampled_from(PRICES if scored_only else [*PRICES, None]))
    turns = draw(st.integers(1, 3))
    parts: list[Any] = [0.0] * turns
    if reward is not None:
        parts = [draw(st.sampled_from([0.0, 0.5, -1.0])) for _ in range(turns)]
        parts[-1] += reward - sum(parts)
        # A turn that earns nothing is scored as 0, or not at all.
        parts[:-1] = [draw(st.sampled_from([0.0, None])) if part == 0 else part for part in parts[:-1]]
    status = "finished" if scored_only else draw(st.sampled_from(["finished"] * 3 + ["cut", "cancelled"]))
    components = {k: v for k in ("model", "rule") for v in [draw(st.sampled_from([None, *PRICES]))] if v is not None}
    return Attempt(
        group=draw(st.sampled_from("gh")),
        reward=reward,
        turn_rewards=parts,
        trains=status != "cancelled",
        fork=draw(st.sampled_from([None, "x", "y"])),
        length=draw(st.integers(0, 40)),
        components=components,
        bootstrap=draw(st.sampled_from([0.0, 0.7])) if status == "cut" else 0.0,
    )


@st.composite
def worlds(draw: st.DrawFn, *, scored_only: bool = False, most: int = 5) -> tuple[World, list[Row], list[Episode]]:
    """A batch whose episodes may lie in several rows, in any order."""
    episodes = draw(st.lists(attempts(scored_only=scored_only), min_size=1, max_size=most))
    pieces: list[tuple[int, int, list[int]]] = []
    for e, attempt in enumerate(episodes):
        sizes = [draw(st.integers(1, 3)) for _ in attempt.turn_rewards]
        cut = draw(st.sampled_from([len(sizes), 1]))
        pieces += [(e, first, part) for first, part in ((0, sizes[:cut]), (cut, sizes[cut:])) if part]
    if len(pieces) > 1 and draw(st.booleans()):
        pieces.pop(draw(st.integers(0, len(pieces) - 1)))  # turns without own tokens, as the other player's are
    pieces = draw(st.permutations(pieces))
    known = [-1.0] if scored_only else [-1.0, -1.0, -1.0, None]
    tokens = []
    for e, first, sizes in pieces:
        for k, n in enumerate(sizes):
            for _ in range(n):
                old = draw(st.sampled_from(known)) and draw(LOGPROBS)
                near = draw(st.sampled_from([-0.5, -0.05, 0.0, 0.05, 0.5]))
                lp = min((old or -1.0) + near + draw(st.sampled_from([0.0, 0.013, -0.017])), -0.005)
                tokens.append(
                    Said(
                        e,
                        first + k,
                        lp=lp,
                        old=old,
                        ref=draw(LOGPROBS),
                        prox=draw(LOGPROBS),
                        value=draw(st.sampled_from([0.0, 0.25, -1.5])),
                        entropy=draw(st.floats(0, 3)),
                    )
                )
    world = World(episodes, tokens)
    return world, *ours(world, pieces)


def ours(world: World, pieces: list[tuple[int, int, list[int]]]) -> tuple[list[Row], list[Episode]]:
    """The world's rows, one for each (episode, first turn, tokens of each turn), and its episodes."""
    rows, at = [], 0
    for e, first, sizes in pieces:
        mine = world.tokens[at : at + sum(sizes)]
        at += len(mine)
        old = [np.nan if token.old is None else token.old for token in mine]
        rows.append(
            row(
                f"t{e}",
                world.episodes[e].group,
                turns=sizes,
                first_turn=first,
                old=old,
                rng=np.random.default_rng(e),
                calls=[f"t{e}/{first}/{k}" for k in range(len(sizes))],
            )
        )
    made = []
    for e, a in enumerate(world.episodes):
        status = Status.CANCELLED if not a.trains else Status.TRUNCATED if a.bootstrap else Status.FINISHED
        made.append(
            Episode(
                tape=f"t{e}",
                group=a.group,
                reward=a.reward,
                status=status,
                components=a.components,
                turn_rewards=None if a.reward is None else a.turn_rewards,
                fork=a.fork,
                length=a.length,
                bootstrap=a.bootstrap or None,
            )
        )
    return rows, made


def streamed(world: World, rows: list[Row], episodes: list[Episode], *, recomputed: bool) -> Stream:
    """The stream in float64, with every column that a recipe may ask for."""
    columns: dict[str, Any] = {
        name: [getattr(token, name) for token in world.tokens] for name in ("ref", "value", "entropy")
    }
    columns["old"] = [np.nan if token.old is None else token.old for token in world.tokens]
    if recomputed:
        columns["anchor"] = [token.prox for token in world.tokens]
    return exact(rows, episodes, **columns)


def _terms(*kinds: str, **constants: st.SearchStrategy) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"kind": st.sampled_from(kinds), **constants})


def _any(term: type[Term], field: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(choices(term, field))


ESTIMATORS = _any(EpisodeKL, "estimator")
PER = _any(Anchor, "per")
REWARD = st.one_of(
    st.fixed_dictionaries({"per": _any(Reward, "per")}),
    st.fixed_dictionaries({"reduce": _any(Reward, "reduce")}),
    st.fixed_dictionaries({"components": st.just({"model": 0.7, "rule": 0.3})}),
)
SHAPE = st.lists(
    st.one_of(
        _terms("clip", low=st.just(-1.0), high=st.sampled_from([0.5, 2.0])),
        _terms("running", centre=st.booleans()),
        _terms("overlong", limit=st.just(30), buffer=st.sampled_from([5, 20]), factor=st.sampled_from([1.0, 0.5])),
        _terms("episode_kl", beta=st.sampled_from([0.0, 0.2]), estimator=ESTIMATORS),
    ),
    max_size=2,
    unique_by=lambda term: term["kind"],
)
PRICE = st.one_of(st.just([]), _terms("token_kl", beta=st.just(0.1), estimator=ESTIMATORS).map(lambda w: [w]))
BASELINE = _terms(
    *choices(GroupBaseline, "kind"),
    by=_any(GroupBaseline, "by"),
    eps=st.sampled_from([1e-9, 1e-4, 0.1]),
    ddof=_any(GroupBaseline, "ddof"),
)
CREDIT = st.one_of(
    st.just({"kind": "broadcast"}),
    _terms(
        *(kind for kind in choices(TimeCredit, "kind") if kind != "broadcast"),
        clock=_any(TimeCredit, "clock"),
        gamma=st.sampled_from([1.0, 0.9, 0.0]),
        lam=st.sampled_from([1.0, 0.95, 0.0]),
    ),
)
ADJUST = st.lists(
    st.one_of(
        _terms(
            "whiten",
            ddof=_any(Whiten, "ddof"),
            eps=st.sampled_from([1e-8, 0.5]),
            how=_any(Whiten, "how"),
            centre_only=st.booleans(),
        ),
        _terms("clip", limit=st.sampled_from([0.3, 2.0])),
        _terms("relu"),
        _terms("groups", flat=st.sampled_from([0.5, 1.0]), cap=st.sampled_from([1.1, 3.0])),
    ),
    max_size=2,
)
ANCHOR = st.one_of(
    st.just({"to": "sampler"}),
    st.fixed_dictionaries(
        {
            "to": st.just("recomputed"),
            "weight": _any(Anchor, "weight"),
            "per": PER,
            "combine": _any(Anchor, "combine"),
            "low": st.sampled_from([0.0, 0.6]),
            "high": st.sampled_from([1.3, 3.0]),
        }
    ),
)
SURROGATE = st.one_of(
    _terms(
        "ppo",
        low=st.sampled_from([0.2, 0.01]),
        high=st.sampled_from([0.2, 0.28]),
        per=PER,
        dual=st.sampled_from([None, 1.4]),
    ),
    _terms("reinforce"),
    _terms("cispo", low=st.sampled_from([None, 0.1]), cap=st.sampled_from([1.2, 5.0])),
    _terms("cpg", low=st.sampled_from([0.2, 0.03]), high=st.just(0.1)),
    _terms("sapo", tau=st.sampled_from([1.0, 0.4])),
    _terms("nll"),
    _terms("minor_nll", beta=st.sampled_from([0.1, 2.0]), per=PER),
    _terms("none"),
)
REGULARISER = st.lists(
    st.one_of(
        _terms(
            "kl",
            to=st.sampled_from(["reference", "sampler"]),
            estimator=st.sampled_from(["k2", "k3"]),
            beta=st.sampled_from([0.0, 0.3]),
        ),
        _terms("entropy", coefficient=st.sampled_from([0.0, 0.2])),
    ),
    max_size=2,
)
SELECT = st.fixed_dictionaries(
    {},
    optional={
        "flat": st.just("drop"),
        "bounds": st.sampled_from([(0.05, None), (None, 1.0), (-3.0, 0.5)]),
        "keep": st.integers(1, 3),
        "keep_how": _any(Select, "keep_how"),
        "keep_when": _any(Select, "keep_when"),
        "mean_bounds": st.sampled_from([(0.05, None), (None, 0.5), (0.1, 0.9)]),
        "entropy_top": st.sampled_from([0.3, 0.5, 1.0]),
        "kl_mask": st.sampled_from([0.001, 0.1]),
        "shift_mask": st.sampled_from([0.02, 0.2]),
    },
)
WEIGH = _terms(*choices(Weigh, "kind"), limit=st.sampled_from([1.0, 8.0]))
TERMS: dict[str, st.SearchStrategy] = {
    "reward": REWARD,
    "shape": SHAPE,
    "baseline": BASELINE,
    "credit": CREDIT,
    "adjust": ADJUST,
    "anchor": ANCHOR,
    "surrogate": SURROGATE,
    "regulariser": REGULARISER,
    "select": SELECT,
    "weigh": WEIGH,
}
"""A strategy for the constants of each term (score apart, which is the model's matter)."""


@st.composite
def recipes(draw: st.DrawFn, *terms: str) -> dict[str, Any]:
    """Changes to a recipe: of the terms named, or of all."""
    changes = {name: draw(TERMS[name]) for name in terms or TERMS}
    if changes.get("credit", {}).get("kind", "broadcast") != "broadcast":
        changes["shape"] = [*changes.get("shape", []), *draw(PRICE)]
    return changes
