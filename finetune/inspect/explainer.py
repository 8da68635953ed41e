"""Explains how each token of a tape was used in training: whether it was trained on, with which advantage and weight.

Rows are made by the same code as in training. The ledger, in which the run recorded its updates, names the tokens that
were trained on. Advantages are computed again from the recorded batch and recipe. The run is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...agents.rendering.renderer import Renderer
from ...agents.setup.engine_config import RendererConfig
from ...agents.setup.recorded_setup import tokenizer_folder
from ...envs.rewards.relative import training_reward
from ...tapes import NotATape, Tape
from ...tapes.common.text import counted, logger
from ...tapes.errors import UsageError
from ...tapes.records import Use
from ...tapes.status import TRAINED_SPLITS
from ...tapes.store.ledger import FATES, ranges
from ...tapes.store.store import Store
from ...tapes.transcript import TapeSummary, summarise
from ...tapes.value import Value
from ..data.provenance import ChangedTape, episode_of, known
from ..data.rows import Row, rows
from ..data.stream import Stream
from ..loop.history import as_read
from ..loop.plan import UpdateInfo
from ..objective import Context, Running
from ..objective.loss import prepare_batches
from ..objective.recipe import Recipe
from ..recipes import read_recipes

log = logger("inspect")


class TokenLine(Value):
    """One token of a row."""

    position: int
    """Index in the row."""
    id: int
    text: str | None
    """The token's text, or None if there is no tokenizer."""
    own: bool
    """True if an agent produced the token, so that it can be trained on. For other tokens, the fields below are
    None."""
    call: str | None = None
    offset: int | None = None
    """Index in the call's completion."""
    turn: int | None = None
    step: int | None = None
    """Index of the step, in the tape, that was parsed from this part of the completion."""
    version: str | None = None
    """Version of the policy that sampled the token, or None for text that no model sampled."""
    temperature: float | None = None
    """Temperature at sampling, or None for text that no model sampled."""
    logprob: float | None = None
    """Log-prob at sampling, or None if unknown."""
    reward: float | None = None
    """Reward of the token's turn. A reward for the whole episode counts in the last turn."""
    fate: str | None = None
    """How the last update that took the tape used the token: `trained`, or left out as `stale`, `filtered` or
    `context`. None if no update accounts for the token."""
    advantage: float | None = None
    """The token's advantage in that update. It is None if there was no advantage or if it can't be computed again."""
    weight: float | None = None
    """The token's weight in the loss of that update. It is None for a token outside the loss."""


class RowLine(Value):
    """One row: a token sequence for the trainer's forward pass."""

    begins: str
    """Id of the first call in the row."""
    split: str | None
    """Why the first call begins a new row instead of extending an earlier one. None for the first call of an agent."""
    repeated: int
    """Number of tokens at the beginning of the row that an earlier row has too. The trainer forwards them twice."""
    own: int
    calls: tuple[str, ...]
    tokens: tuple[TokenLine, ...]


class UseLine(Value):
    """One update that read the tape."""

    lineage: str
    update: int
    phase: str
    recipe: str | None
    """Name of the update's recipe, or None if the run's `recipes.json` lacks it or it can't be used here."""
    trained: int
    """Number of tokens in this tape with a weight in the loss."""
    skipped: str | None
    """Why the update was not applied, or None if it was applied."""


class Explanation(Value):
    """The explanation of one tape."""

    tape: TapeSummary
    verdict: str
    """How the tape was used in training, in one sentence."""
    uses: tuple[UseLine, ...]
    group_rewards: tuple[float | None, ...]
    """Rewards of all tapes in the group, including this tape, in the last update that read the tape."""
    rows: tuple[RowLine, ...]
    forwarded: int
    repeated: int
    """How many of the `forwarded` tokens are also in an earlier row, so that the trainer forwards them twice."""
    own: int
    unlabelled: int
    """Number of completion tokens that no row trains, because their call failed or a label excludes them."""
    notes: tuple[str, ...]
    """What could not be computed, and why."""


@dataclass
class Explainer:
    """Explains the tapes of one run. `decode` maps a token id to its text. `renderer` tokenizes text that no model
    sampled."""

    store: Store
    decode: Callable[[int], str] | None = None
    renderer: Renderer | None = None
    _batches: dict[tuple[str, int, int], _Taken] = field(default_factory=dict, repr=False)

    @cached_property
    def updates(self) -> list[_Update]:
        """All updates of all policies in the run, in order. A lineage that a `void` record ended is left out."""
        lineages = self.store.lineages()
        uses = (use for lineage in lineages.living for use in lineages.ledger(lineage).uses)
        return [_Update(use, UpdateInfo.of(use)) for use in uses]

    @cached_property
    def recipes(self) -> dict[str, Recipe | UsageError]:
        """The recorded recipe of each phase, or the error that explains why it can't be used here."""
        return read_recipes(self.store.path)

    def newest(self, n: int) -> list[str]:
        """Return the ids of the last n tapes in the last update. Without updates, return the last n closed tapes."""
        taken = [tape for update in self.updates[-1:] for tape in update.info.tapes]
        return (taken or [summary.id for summary in self.store.summaries(closed=True)])[-n:]

    def explain(self, name: str) -> Explanation:
        """Explain the tape whose id is `name`, or the only tape whose id begins with `name`."""
        tape = self.store.tape(name)
        notes: list[str] = []
        took = [update for update in self.updates if update.read(tape.id)]
        try:
            found = rows(tape, renderer=self.renderer)
        except NotATape as error:
            found = []
            notes.append(str(error))
        facts = self._facts(tape, _lasts(took), notes)
        lines = tuple(self._row(tape, row, facts) for row in found)
        own = sum(line.own for line in lines)
        completions = sum(len(call.completion or ()) for call in tape.calls)
        return Explanation(
            tape=summarise(tape),
            verdict=_verdict(tape, took, facts),
            uses=tuple(self._use(update, tape) for update in took),
            group_rewards=tuple(facts.group),
            rows=lines,
            forwarded=sum(len(line.tokens) for line in lines),
            repeated=sum(line.repeated for line in lines),
            own=own,
            unlabelled=max(0, completions - own),
            notes=tuple(notes),
        )

    def _use(self, update: _Update, tape: Tape) -> UseLine:
        use, info = update
        recipe = self.recipes.get(info.phase)
        return UseLine(
            lineage=use.lineage,
            update=use.update,
            phase=info.phase,
            recipe=recipe.name if isinstance(recipe, Recipe) else None,
            trained=sum(end - start for name, _, start, end, _ in use.items if name == tape.id),
            skipped=info.skipped or None,
        )

    def _facts(self, tape: Tape, updates: Sequence[_Update], notes: list[str]) -> _Facts:
        scored = tape.closed and training_reward(tape) is not None
        facts = _Facts(turn_rewards=np.asarray(episode_of(tape).turn_rewards) if scored else None)
        for index, entry in enumerate(tape.entries):
            for call, start, end in entry.calls:
                facts.steps.update(dict.fromkeys(((call, k) for k in range(start, end)), index))
        # A later fate replaces an earlier one. FATES begins with the fate that should win, so it is read in reverse.
        for fate in reversed(FATES):
            for name, call, start, end in (entry for use, _ in updates for entry in ranges(use, fate)):
                if name == tape.id:
                    facts.fates.update(dict.fromkeys(((call, k) for k in range(start, end)), fate))
        group = tape.begin.group or tape.id
        for use, info in updates:
            for name, call, start, end, weight in use.items:
                if name == tape.id:
                    facts.weights.update(dict.fromkeys(((call, k) for k in range(start, end)), weight))
            taken = self._taken(use, info)
            facts.advantages |= {(call, k): a for (name, call, k), a in taken.advantages.items() if name == tape.id}
            for name, rewards in taken.groups.items():
                if name.partition("#")[0] == group:
                    facts.group += rewards
            if taken.problem:
                notes.append(f"advantages of update {use.update}: {taken.problem}")
        return facts

    def _taken(self, use: Use, info: UpdateInfo) -> _Taken:
        key = (use.lineage, use.update, use.epoch)
        if key not in self._batches:
            self._batches[key] = self._computed(use, info)
        return self._batches[key]

    def _computed(self, use: Use, info: UpdateInfo) -> _Taken:
        try:
            batch = info.batch(use.lineage, as_read(info, self.store, self.renderer))
        except ChangedTape as error:
            return _Taken({}, {}, str(error))
        groups: dict[str, list[float | None]] = {}
        for episode in batch.episodes:
            groups.setdefault(episode.group, []).append(episode.reward)
        recipe = self.recipes.get(info.phase)
        problem = _unknowable(recipe, info.phase)
        if problem or not isinstance(recipe, Recipe) or not recipe.surrogate.advantages:
            return _Taken({}, groups, problem)
        whole = Stream.of(batch.rows, batch.episodes)
        computed = prepare_batches(recipe, batch.rows, batch.episodes, whole, Context(), info.batches)
        stream = computed.stream
        offsets = np.concatenate([row.offset for row in batch.rows])
        every = zip(
            stream.call.tolist(), offsets.tolist(), computed.advantage.tolist(), computed.entered.tolist(), strict=True
        )
        return _Taken({(*stream.calls[call], offset): a for call, offset, a, entered in every if entered}, groups)

    def _row(self, tape: Tape, row: Row, facts: _Facts) -> RowLine:
        own = {int(position): i for i, position in enumerate(row.own)}
        tokens = []
        for position, token in enumerate(row.input_ids.tolist()):
            text = self.decode(token) if self.decode is not None else None
            more = self._own(tape, row, own[position], facts) if position in own else {}
            tokens.append(TokenLine(position=position, id=token, text=text, own=position in own, **more))
        begins = tape.call(row.calls[0])
        return RowLine(
            begins=begins.call,
            split=begins.split,
            repeated=begins.keep if begins.base is not None else 0,
            own=len(row.own),
            calls=row.calls,
            tokens=tuple(tokens),
        )

    def _own(self, tape: Tape, row: Row, i: int, facts: _Facts) -> dict[str, Any]:
        call, offset, turn = row.calls[row.call[i]], int(row.offset[i]), int(row.turn[i])
        earned = facts.turn_rewards
        sampled = row.version[i] >= 0
        return {
            "call": call,
            "offset": offset,
            "turn": turn,
            "step": facts.steps.get((call, offset)),
            "version": row.versions[row.version[i]] if sampled else None,
            "temperature": tape.call(call).sampling.temperature_at(offset) if sampled else None,
            "logprob": None if np.isnan(row.old[i]) else float(row.old[i]),
            "reward": known(float(earned[turn])) if earned is not None and turn < len(earned) else None,
            "fate": facts.fates.get((call, offset)),
            "advantage": facts.advantages.get((call, offset)),
            "weight": facts.weights.get((call, offset)),
        }


class _Update(NamedTuple):
    use: Use
    info: UpdateInfo

    def read(self, tape: str) -> bool:
        """Return whether the update read this tape. It may have trained on it, set it aside or imitated it."""
        return tape in self.info.read


def _lasts(took: list[_Update]) -> list[_Update]:
    """Return the last update in `took` that was applied, or the last one if all were skipped.

    The updates of other policies on the same batch are returned too, because each policy trains the tokens of its own
    agents.
    """
    last = next((update for update in reversed(took) if not update.info.skipped), took[-1] if took else None)
    if last is None:
        return []
    batch = (last.use.update, last.info.tapes)
    return [
        one
        for one in took
        if one is last or (one.use.lineage != last.use.lineage and (one.use.update, one.info.tapes) == batch)
    ]


@dataclass(frozen=True)
class _Taken:
    """The batch of one update."""

    advantages: dict[tuple[str, str, int], float]
    """Advantages by (tape, call, offset)."""
    groups: dict[str, list[float | None]]
    """The rewards of each group's tapes."""
    problem: str = ""
    """Why advantages can't be computed. It is empty if they can be, or if the recipe has no advantages."""


@dataclass
class _Facts:
    """Facts about the completion tokens of a tape. The keys (call, offset) name a token by its call and its index in
    the completion."""

    turn_rewards: NDArray[Any] | None
    steps: dict[tuple[str, int], int] = field(default_factory=dict)
    fates: dict[tuple[str, int], str] = field(default_factory=dict)
    weights: dict[tuple[str, int], float] = field(default_factory=dict)
    advantages: dict[tuple[str, int], float] = field(default_factory=dict)
    group: list[float | None] = field(default_factory=list)


def _verdict(tape: Tape, took: list[_Update], facts: _Facts) -> str:
    if took:
        updates = list(dict.fromkeys(use.update for use, _ in took))
        names = ", ".join(map(str, updates[-5:]))
        more = f" and {len(updates) - 5} earlier" if len(updates) > 5 else ""
        if not facts.weights:
            return f"taken by update {names}{more}, and no token of it had a gradient"
        flat = "" if any(facts.advantages.values()) or not facts.advantages else "; every advantage was 0"
        return (
            f"trained on by update {names}{more}; {counted(len(facts.weights), 'token')} of it had a weight in the "
            f"gradient of update {updates[-1]}{flat}"
        )
    if not tape.closed:
        return "still running"
    if tape.begin.split not in TRAINED_SPLITS:
        return f"held out: of split {tape.begin.split!r}"
    if not tape.trains:
        status, cause = tape.status, tape.cause
        return f"never trained on: ended as {status}{f' ({cause.type.value})' if cause is not None else ''}"
    return "unused: no update has taken it" if tape.reward is not None else "unused: nothing scored it"


def _unknowable(recipe: Recipe | UsageError | None, phase: str) -> str:
    """Return the reason why advantages can't be computed from the tapes and the recipe alone, or '' if they can."""
    if recipe is None:
        return f"the run has no recipes.json with the recipe of phase {phase!r}"
    if isinstance(recipe, UsageError):
        return f"the recipe of phase {phase!r} can't be used here: {recipe}"
    if any(isinstance(term, Running) for term in recipe.shape):
        return f"recipe {recipe.name} scales rewards by statistics of all earlier updates"
    if any(term.needs_reference for term in recipe.shape):
        return f"recipe {recipe.name} subtracts a KL term to a reference model from the reward"
    return f"recipe {recipe.name} needs a critic" if recipe.needs_value else ""


def explain_run(
    run: str | Path, tapes: Sequence[str] = (), *, n: int = 3, tokenizer: str | Path | None = None
) -> list[Explanation]:
    """Explain the tapes of a run whose ids are `tapes`, by default the last `n` of its last update. `tokenizer` is a
    folder with a tokenizer, by default the run's own."""
    with Store.open(run) as store:
        explainer = Explainer(store)
        chosen = tapes or explainer.newest(n)
        found = [store.tape(name) for name in chosen]
        explainer.decode, explainer.renderer = token_reader(store.path, tokenizer, found)
        return [explainer.explain(name) for name in chosen]


def token_reader(
    run: Path, named: str | Path | None, tapes: Sequence[Tape]
) -> tuple[Callable[[int], str] | None, Renderer | None]:
    """Return a function that converts a token id to its text, and a renderer, which tokenizes text.

    Both use the tokenizer in the folder `named`, by default the run's tokenizer. Return (None, None) if this tokenizer
    is missing, or if `tapes` were made with another one.
    """
    folder = named or tokenizer_folder(run)
    if folder is None:
        log.warning("the run has no tokenizer, so tokens are shown as numbers: name the folder of one")
        return None, None
    renderer = RendererConfig().load(folder)
    recorded = {tape.begin.versions.get("tokenizer") for tape in tapes} - {None}
    if recorded - {renderer.tokenizer_hash}:
        log.warning("tokens are shown as numbers: the tokenizer in %s is not the tokenizer of these tapes", folder)
        return None, None
    return lambda token: renderer.spell([token]), renderer
