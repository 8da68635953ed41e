"""Lab: computes a recorded update again with several recipes, on the same tapes and weights, and compares the results.

The weights before the update are restored from the nearest checkpoint. The tapes have the content that the update read.
Only gradients are computed, so neither the weights nor the run change. The lab compares:

    pull      minus the derivative of the loss by a token's log-prob, as a share of the sum of all |pulls|. If it is
              above 0, the step makes the token likelier. The pull includes weight, advantage, clip, ratio and KL. It
              leaves out an entropy bonus, which does not depend on the sampled token.
    cosine    the cosine between the gradients for all weights. It is 1 if two gradients have the same direction.

1. Norms are taken before clipping. An update with several mini-batches or epochs is computed as a single step from the
   weights before the update.
2. The run's own recipe continues the running statistics of the run, such as a reward scale. Other recipes begin
   without.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...tapes.common.config import load_config
from ...tapes.common.progress import Progress, silent
from ...tapes.errors import UsageError
from ...tapes.records import Use
from ...tapes.store.store import Store
from ...tapes.value import Value
from ..data.provenance import known, weighed
from ..loop.history import History, apply_again, as_read, with_threads
from ..loop.loop_config import RecipeConfig
from ..loop.plan import Batch, ComputedOn, UpdateInfo, by_update
from ..loop.staleness import version_name
from ..objective.recipe import Recipe
from ..recipes import get_recipe
from ..run.loaded_run import longest_episode
from ..run.players import lineage_of
from ..trainer.checkpoint import checkpoint_folders, checkpoints
from ..trainer.reference import EarlierWeights
from ..trainer.trainer import Trainer
from ..trainer.updates import UpdateStats
from .rebuild import RebuiltRun

ROUNDING = 1e-6
"""Two pulls count as equal if they differ by at most this. A pull is a share of the sum of all |pulls|."""
OWN = "own"
"""The name by which users request the run's own recipe."""


class TokenShift(Value):
    """A token that a recipe pulls more or less than the first recipe does. For pulls, see the module."""

    tape: str
    call: str
    offset: int
    """Index in the call's completion."""
    id: int
    text: str
    first: float
    """The token's pull with the first recipe, as a share of the sum of all |pulls|."""
    pull: float
    """The token's pull with this recipe, as a share of the sum of all |pulls|."""


class RecipeLine(Value):
    """Results of the update with one recipe."""

    recipe: str
    loss: float | None
    grad_norm: float | None
    """Norm of the gradient, or None if it isn't finite."""
    cosine: float | None
    """Cosine between the gradients with this recipe and with the first. None if one of them is missing or 0."""
    mean_advantage: float | None
    """Mean |advantage| over the tokens that enter the loss, or None if the recipe has no advantages."""
    clipped: float | None
    """Share of clipped tokens among the tokens that can have a gradient, or None if the recipe doesn't clip."""
    tokens: int
    """Number of tokens with a weight in the loss."""
    dropped: int
    """Number of tokens that agents produced, but that have no weight in the loss."""
    skipped: str | None
    """Why the update would not be applied, or None if it would be applied."""
    recorded: bool | None
    """True if token weights, loss and gradient norm equal the recorded ones bit for bit. None if there is nothing to
    compare with: for a recipe that isn't the run's, and for an update with several steps."""
    gained: tuple[TokenShift, ...]
    """Tokens whose |pull| is larger than with the first recipe. The largest difference comes first."""
    lost: tuple[TokenShift, ...]
    pulls: tuple[float, ...]
    """Pull on each token that an agent produced, in the order of the batch."""


class Experiment(Value):
    """Results of one update with every recipe."""

    lineage: str
    update: int
    version: str
    """Version of the weights before the update."""
    phase: str
    episodes: int
    tokens: int
    """Number of tokens in the batch that agents produced."""
    lines: tuple[RecipeLine, ...]


class LabReport(Value):
    """Results of all requested updates with all recipes."""

    run: str
    recipes: tuple[str, ...]
    experiments: tuple[Experiment, ...]
    seconds: float


def lab(
    run: str | Path,
    recipes: Sequence[str | Recipe],
    updates: Sequence[int] | None = None,
    *,
    policy: str | None = None,
    tokens: int = 5,
    progress: Progress = silent,
) -> LabReport:
    """Compute recorded updates of the run with each recipe, and compare the other recipes with the first one.

    A recipe is a `Recipe`, a recipe's name, `own` (the run's recipe), or a file with a `RecipeConfig`. `updates` are
    the numbers of updates, counted from 0, or None for the loop's last update. `policy` is the name of a trained
    player, or None for the loop's own policy. At most `tokens` tokens are listed in `gained`, and as many in `lost`.
    Raises UsageError if an update, a policy or a recipe doesn't exist, and Unknown if the base weights can't be
    rebuilt.
    """
    run, started = Path(run), time.perf_counter()
    for recipe in recipes:
        _named(recipe)  # refuses an unknown one before anything is rebuilt
    with Store.open(run) as store, tempfile.TemporaryDirectory() as scratch, torch.random.fork_rng(devices=()):
        lineage, folder = _lineage(run, store, policy)
        rebuilt = RebuiltRun.of(run, store, Path(scratch), lineage)
        wanted = _wanted(store.ledger(lineage).uses, updates)
        longest = longest_episode(rebuilt.training.config)
        named = [_named(recipe, longest) for recipe in recipes]
        bench = _Bench(rebuilt, named, tokens)
        rebuilt.history.directory = folder
        done = []
        for k, epochs in enumerate(wanted):
            _go_to(rebuilt.history, epochs[0].update)
            done.append(bench.experiment(epochs))
            progress("computing updates under other recipes", k + 1, len(wanted), "")
    return LabReport(
        run=str(run),
        recipes=tuple(name for name, _ in named),
        experiments=tuple(done),
        seconds=time.perf_counter() - started,
    )


def _named(recipe: str | Recipe, longest: int | None = None) -> tuple[str, Recipe | None]:
    """Return the name of a recipe, and the `Recipe`, which is None for the run's own recipe. `longest` is the largest
    number of tokens of an episode (`get_recipe`)."""
    if isinstance(recipe, Recipe):
        return recipe.name, recipe
    if recipe == OWN:
        return OWN, None
    if Path(recipe).suffix in (".yaml", ".yml", ".toml"):
        found = load_config(RecipeConfig, recipe)
        return Path(recipe).stem, get_recipe(found.recipe, found.changes, longest=longest)
    return recipe, get_recipe(recipe, longest=longest)


def _lineage(run: Path, store: Store, policy: str | None) -> tuple[str, Path]:
    """Return the lineage of the policy, and the directory with the policy's checkpoints."""
    living = store.lineages().living
    own, *others = checkpoint_folders(run)
    last = [one.state["lineage"] for one in checkpoints(own)]
    if not living:
        raise UsageError(f"{run} has no updates: nothing was trained there")
    lead = str(last[-1]) if last and last[-1] in living else living[-1]
    if policy is None:
        return lead, own
    players = {folder.name: folder for folder in others}
    if policy not in players:
        there = f"the players that learned there are {', '.join(players)}" if players else "no player learned there"
        raise UsageError(f"{run} has no policy {policy!r}: {there}; without a name it is the loop's own")
    return lineage_of(lead, policy), players[policy]


def _wanted(uses: Sequence[Use], updates: Sequence[int] | None) -> list[list[Use]]:
    known = {epochs[0].update: epochs for epochs in by_update(uses)}
    if updates is None:
        loop = [n for n, epochs in known.items() if not UpdateInfo.of(epochs[0]).phase.startswith("sft")]
        updates = [(loop or list(known))[-1]]
    missing = [n for n in updates if n not in known]
    if missing:
        raise UsageError(f"there is no update {missing[0]}: the run has the updates {min(known)} to {max(known)}")
    return [known[n] for n in sorted(set(updates))]


def _go_to(history: History, update: int) -> None:
    """Restore the weights before `update`.

    The current weights must not be newer. Updates are applied to them, or to the weights of a checkpoint if it is
    nearer.
    """
    saved = [
        one.update
        for one in checkpoints(history.directory)
        if one.state["lineage"] == history.lineage and one.update <= update
    ]
    if history.trainer is None or max(saved, default=0) > history.updates:
        history.restore(until=update)
        return
    uses = [use for use in history.store.ledger(history.lineage).uses if history.updates <= use.update < update]
    for epochs in by_update(uses):
        apply_again(history, epochs)


class _Bench:
    """Computes an update with every recipe, with one model in memory."""

    def __init__(self, rebuilt: RebuiltRun, recipes: Sequence[tuple[str, Recipe | None]], tokens: int) -> None:
        self.history, self.recipes, self.tokens = rebuilt.history, recipes, tokens
        self.decode: Callable[[int], str] = lambda token: str(rebuilt.training.policy.tokenizer.decode([token]))
        every = [rebuilt.training.recipe, *(recipe for _, recipe in recipes if recipe is not None)]
        wants = any(recipe.needs_reference for recipe in every)
        self.reference = EarlierWeights(rebuilt.history.model, "base") if wants else None

    def experiment(self, epochs: Sequence[Use]) -> Experiment:
        use, history = epochs[0], self.history
        plan = UpdateInfo.of(use)
        with with_threads((plan.on or ComputedOn()).threads):
            own = history.enter(plan.phase)
            batch = plan.batch(history.lineage, as_read(plan, history.store, history.policy.renderer))
            batch = replace(batch, rows=list(history.taught_rows(plan, batch)))
            trials = [self._trial(name, recipe, own, batch, plan) for name, recipe in self.recipes]
        single = len(epochs) == 1 and plan.minibatches == 1
        first = trials[0]
        return Experiment(
            lineage=use.lineage,
            update=use.update,
            version=version_name(use.lineage, use.update),
            phase=plan.phase,
            episodes=len(batch.episodes),
            tokens=len(first.stats.stream),
            lines=tuple(self._line(trial, first, batch, use if single else None) for trial in trials),
        )

    def _trial(self, name: str, recipe: Recipe | None, own: Trainer, batch: Batch, plan: UpdateInfo) -> _Trial:
        mine = recipe is None or recipe == own.recipe
        recipe = own.recipe if recipe is None else recipe
        for lacks, what in (
            (recipe.needs_value and own.critic is None, "critic"),
            (recipe.needs_teacher and "teacher" not in own.others, "teacher"),
        ):
            if lacks:
                raise UsageError(
                    f"recipe {recipe.name!r} needs a {what}, and update {self.history.updates} of the run was "
                    f"made without one (by {own.recipe.name!r}): compare recipes that need none"
                )
        trainer = Trainer(
            own.model,
            recipe,
            own.options,
            reference=own.others.get("reference", self.reference) if recipe.needs_reference else None,
            teacher=own.others.get("teacher") if recipe.needs_teacher else None,
            critic=own.critic,
            ranks=own.ranks,
            vision=own.vision,
            offload=own.offload,
        )
        if mine:
            trainer.moments, trainer.betas = copy.deepcopy(own.moments), list(own.betas)
        prepared = trainer.prepare(
            batch.rows,
            batch.episodes,
            batches=plan.batches,
            several=plan.epochs * plan.minibatches > 1,
            demonstrations=batch.shown if recipe.imitates else (),
        )
        stats, grads = trainer.gradient(prepared)
        pull = -trainer.pull(prepared).double()
        whole = float(pull.abs().sum())
        entered = stats.advantage[prepared.batch.entered].abs()
        return _Trial(
            name=name,
            mine=mine,
            stats=stats,
            gradient=grads,
            pull=pull / whole if whole > 0 else pull,
            advantage=float(entered.mean()) if recipe.surrogate.advantages and len(entered) else None,
        )

    def _line(self, trial: _Trial, first: _Trial, batch: Batch, use: Use | None) -> RecipeLine:
        stats = trial.stats
        used = int((stats.weight != 0).sum())
        growth = trial.pull.abs() - first.pull.abs()
        order = torch.argsort(growth, stable=True)
        return RecipeLine(
            recipe=trial.name,
            loss=known(stats.loss),
            grad_norm=known(stats.grad_norm),
            cosine=_cosine(trial.gradient, first.gradient),
            mean_advantage=trial.advantage,
            clipped=stats.sums.mean("clip"),
            tokens=used,
            dropped=len(stats.stream) - used,
            skipped=stats.skipped,
            recorded=_as_recorded(trial, batch, use) if trial.mine and use is not None else None,
            gained=self._shifts([int(k) for k in order.flip(0) if growth[k] > ROUNDING], trial, first, batch),
            lost=self._shifts([int(k) for k in order if growth[k] < -ROUNDING], trial, first, batch),
            pulls=tuple(trial.pull.tolist()),
        )

    def _shifts(self, places: Sequence[int], trial: _Trial, first: _Trial, batch: Batch) -> tuple[TokenShift, ...]:
        stream = trial.stats.stream
        offsets = [int(k) for row in batch.rows for k in row.offset]
        made = []
        for k in places[: self.tokens]:
            tape, call = stream.calls[int(stream.call[k])]
            token = int(stream.token[k])
            made.append(
                TokenShift(
                    tape=tape,
                    call=call,
                    offset=offsets[k],
                    id=token,
                    text=self.decode(token),
                    first=float(first.pull[k]),
                    pull=float(trial.pull[k]),
                )
            )
        return tuple(made)


@dataclass(frozen=True)
class _Trial:
    """The gradient of one update with one recipe."""

    name: str
    mine: bool
    """Whether this is the run's own recipe."""
    stats: UpdateStats
    gradient: Mapping[str, Tensor]
    pull: Tensor
    advantage: float | None


def _cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float | None:
    def dot(x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> float:
        return sum(float((x[name].double() * y[name].double()).sum()) for name in x if name in y)

    norms = dot(a, a) * dot(b, b)
    return dot(a, b) / math.sqrt(norms) if norms > 0 else None


def _as_recorded(trial: _Trial, batch: Batch, use: Use) -> bool:
    stats = trial.stats
    weights = [list(item) for item in weighed(batch.rows, stats.stream, stats.weight)] if stats.applied else []
    recorded = [list(item) for item in use.items]
    if stats.applied and stats.shown is not None:
        recorded = recorded[: len(weights)]  # the weights of demonstrations come after those of the batch
    info = UpdateInfo.of(use)
    return (weights, known(stats.loss), known(stats.grad_norm)) == (recorded, info.loss, info.grad_norm)
