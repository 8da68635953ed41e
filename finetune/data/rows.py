"""Turns a tape into rows. A row is a token sequence for a forward pass. Its own tokens, which the agent produced, are
marked. All other tokens are context.

If a model call extends an earlier one, it continues the row of the earlier call. So an episode of n turns costs
O(tokens), not O(n tokens). Any other call starts a new row, with the call's prompt as context. Each completion is
trained in exactly one row, because a second row would double its weight in the loss.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...tapes import Call, NotATape, Tape
from ...tapes.common.arguments import check_arguments
from ...tapes.messages import image_parts
from ...tapes.places import Place, keys, shared_length
from ...tapes.records import Label, Sampling, Tokens
from ...tapes.steps import Step, role_of

if TYPE_CHECKING:
    from ...agents.rendering.renderer import Renderer

IGNORED = -100
"""The label of a token without a loss (PyTorch's ignore_index)."""


class Observations:
    """Digests of the observations to which the agent responded in each turn of a tape. All rows of the tape share them.

    The digests are computed when they are first read or sent to another process, because most recipes don't read them.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    @cached_property
    def digests(self) -> tuple[str | None, ...]:
        """For each turn, the digest of the newest observation when the turn began, or None before the first
        observation. Equal digests mean equal observations."""
        found: list[str | None] = []
        newest, at, entries = None, 0, self._tape.entries
        for cut in self._tape.log.cuts:
            shown = [entry.step for entry in entries[at : cut.steps] if role_of(entry.step) == "observation"]
            newest, at = _content_digest(shown[-1]) if shown else newest, cut.steps
            found.append(newest)
        return tuple(found)

    def __getstate__(self) -> dict[str, object]:
        return {"digests": self.digests}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One token sequence of L tokens. The columns below describe only its n *own* tokens, in order of position."""

    tape: str
    group: str
    input_ids: NDArray[np.int32]
    """(L,) all tokens: prompt, observations and completions."""
    own: NDArray[np.int32]
    """(n,) positions of the own tokens in `input_ids`. An agent produced these tokens in this episode. No position is
    0, because nothing predicts the first token of a row."""
    old: NDArray[np.float32]
    """(n,) log-prob at sampling, log softmax(logits / temperature).

    It is NaN if it is unknown (for example in text that a person wrote), or if the token was drawn from another
    distribution (temperature 0, top-p, top-k, an enforced form). Tokens with NaN can be used for imitation, but not for
    RL.
    """
    temperature: NDArray[np.float32]
    """(n,) temperature at which each token was sampled, 1 where `old` is NaN."""
    version: NDArray[np.int32]
    """(n,) index into `versions`: the version of the policy that sampled the token. -1 if no model sampled it."""
    call: NDArray[np.int32]
    """(n,) index of the model call that produced the token, in `calls`."""
    turn: NDArray[np.int32]
    """(n,) number of the token's turn in the tape, counted from 0."""
    offset: NDArray[np.int32]
    """(n,) index of the token in the completion of its call."""
    calls: tuple[str, ...]
    """Ids of the model calls whose completions have own tokens."""
    agents: tuple[str, ...]
    """For each entry of `calls`, the path of the agent that made the call."""
    observations: Observations | None = field(default=None, compare=False, repr=False)
    """Digests of the observations in the tape's turns. None if the row doesn't come from a tape."""
    replies: tuple[str | None, ...] = ()
    """For each entry of `calls`, the text of the answer, or None if it has none. Empty if the row doesn't come from a
    tape."""
    versions: tuple[str, ...]
    bars: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Token ids that the sampler could not draw, as (tokens, ids) for each call. It excluded `ids` from the first
    `tokens` tokens of the completion. Empty if no call excluded any ids."""
    teacher: NDArray[np.float32] | None = None
    """(n,) log-prob under a teacher that an engine serves, or None without such teachers."""
    episode: str = ""
    """Name of the `Episode` whose reward trains the tokens. If empty, the name is the tape's id."""
    places: tuple[Place, ...] = ()
    """The ranges of `input_ids` that represent pictures, in order."""
    file: Callable[[str], bytes] | None = field(default=None, compare=False, repr=False)
    """Function that returns a picture's PNG for its file name in `places`. It blocks. None if the row has no
    pictures."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def taught_by(self) -> str:
        """Name of the `Episode` whose reward trains the tokens of the row."""
        return self.episode or self.tape

    def where(self, keep: NDArray[np.bool_] | NDArray[np.intp]) -> Row:
        """Return the row with fewer own tokens. `keep`, a mask (n,) or indices, selects them. The other own tokens
        become context."""
        own = {
            name: getattr(self, name)[keep]
            for name in ("own", "old", "temperature", "version", "call", "turn", "offset")
        }
        return replace(self, **own)

    def barred(self, wanted: NDArray[np.integer], first: int = 0) -> NDArray[np.int64]:
        """Return the ids that the sampler excluded when it drew the own tokens with indices `wanted`.

        They are returned as pairs (m, 2) of (first + k, id), one pair for each id excluded at the token `wanted[k]`.
        """
        bars = [(k, self.offset[i], *self.bars[self.call[i]]) for k, i in enumerate(wanted if self.bars else (), first)]
        pairs = [(k, id) for k, offset, tokens, ids in bars if offset < tokens for id in ids]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def plain(self) -> NDArray[np.float32]:
        """Return `old` (n,) with NaN for each token that was drawn while ids were excluded.

        This is for trainers that compute log-probs only over the whole vocabulary.
        """
        old = self.old.copy()
        old[self.barred(np.arange(len(old)))[:, 0]] = np.nan
        return old

    def labels(self) -> NDArray[np.int64]:
        """Return the labels (L,) for a loss: the token id for own tokens, -100 elsewhere."""
        labels = np.full(len(self.input_ids), IGNORED, dtype=np.int64)
        labels[self.own] = self.input_ids[self.own]
        return labels

    def aligned(self, column: NDArray[np.floating], fill: float = float("nan")) -> NDArray[np.floating]:
        """Return a column of the own tokens (n,) as a column of all tokens (L,), with `fill` at all other tokens."""
        values = np.full(len(self.input_ids), fill, dtype=np.result_type(column.dtype, np.float32))
        values[self.own] = column
        return values


@check_arguments
def rows(tape: Tape, *, agents: Collection[str] | None = None, renderer: Renderer | None = None) -> list[Row]:
    """Return the rows of a closed tape.

    `agents` are the paths of the agents whose tokens are own tokens, or None for all. Completions of other agents are
    context. Tokens that a fork inherited from its parent are context too, because the parent's rows have them.

    `renderer` tokenizes calls for which only text was recorded (a scripted agent, an API). Without a renderer, such
    calls raise NotATape.
    """
    tokens = {layer.call: layer for layer in tape.layers if isinstance(layer, Tokens)}
    labels = {layer.call: layer for layer in tape.layers if isinstance(layer, Label)}
    turn_of = _unread(tape)
    for entry in tape.entries:
        for call, _, _ in entry.calls:
            turn_of[call] = min(turn_of.get(call, entry.turn), entry.turn)
    building: list[_Building] = []
    leaves: dict[str, _Building] = {}
    for call, base in _parents_first(tape.calls, labels):
        if call.finish in ("error", "cancelled") and not call.completion:
            continue
        prompt, completion, places = _tokens_of(tape, call, tokens, renderer)
        if base != call.base and prompt is None:
            prompt, places = _whole(tape, call)
        row = leaves.get(base) if base is not None else None
        new = _continuation(call, prompt, places, row)
        if row is None or new is None:
            row = _Building()
            building.append(row)
            if prompt is None:
                prompt, places = _whole(tape, call)
            new = prompt
        elif base is not None:
            del leaves[base]  # another continuation of the same call begins a row of its own
        if places:
            row.places += [place for place in places if place.offset >= row.length]
        row.context(new)
        own = agents is None or call.by in agents
        row.complete(call, completion, turn_of[call.call], labels.get(call.call), own)
        leaves[call.call] = row
    group, observations = tape.begin.group or tape.id, Observations(tape)
    return [row.done(tape, group, observations) for row in building if row.own]


def _unread(tape: Tape) -> dict[str, int]:
    """Return the turn of each call of the tape, which follows from the call's position in the log. For a call without a
    parsed step, nothing else shows the turn.
    """
    begun = tape.begin.parent.turn if tape.begin.parent is not None else 0
    starts = [cut.records for cut in tape.log.cuts[begun:]]
    return {call.call: begun + max(0, bisect_right(starts, at) - 1) for at, call in tape.log.call_order}


def _content_digest(step: Step) -> str:
    return hashlib.sha256(f"{step.kind} {step.model_dump_json()}".encode()).hexdigest()


def _parents_first(calls: list[Call], labels: dict[str, Label]) -> list[tuple[Call, str | None]]:
    """Return each call with the id of the call that it continues, its parent, or None.

    The calls are in recorded order, with one exception: a parent that is named by a label comes before the call.

    If a label excludes a call and no other call continues it, it is left out. Otherwise it would take over its parent's
    row."""
    after = {name: label.after for name, label in labels.items() if label.after is not None}
    bases = {call.call: after.get(call.call, call.base) for call in calls}
    idle = {name for name, label in labels.items() if label.use != "agent"}
    for call in calls if idle else ():
        above = bases[call.call] if call.call not in idle else None
        while above is not None and above in idle:
            idle.discard(above)
            above = bases.get(above)
    ordered: dict[str, tuple[Call, str | None]] = {}
    by_name = {call.call: call for call in calls}
    for call in calls:
        line = [call.call]
        while (name := after.get(line[-1])) in by_name and name not in ordered and name not in line:
            line.append(name)
        for name in reversed(line):
            if name not in idle and name not in ordered:
                ordered[name] = (by_name[name], bases[name])
    return list(ordered.values())


def _whole(tape: Tape, call: Call) -> tuple[array[int], tuple[Place, ...]]:
    """Return all prompt ids of a call, and the pictures in them.

    A call may record only the difference between its prompt and an earlier call. Its prompt is then put together here.
    """
    if call.new_prompt is not None and not call.keep:
        return call.new_prompt, call.places
    prompt = call.prompt
    assert prompt is not None
    return prompt, tape.call_places(call)


def _continuation(
    call: Call, prompt: array[int] | None, places: Sequence[Place], row: _Building | None
) -> array[int] | None:
    """Return the prompt ids that `call` adds to `row`, or None if the call doesn't continue this row.

    A call continues a row if its prompt begins with all tokens of the row, and has the same pictures at the same
    places.
    """
    if row is None:
        return None
    if prompt is None:
        return call.new_prompt if row.length == call.keep else None
    goes_on = shared_length(keys(row.ids(), row.places), keys(prompt, places), (*row.places, *places)) == row.length
    return prompt[row.length :] if goes_on else None


def _tokens_of(
    tape: Tape, call: Call, layers: dict[str, Tokens], renderer: Renderer | None
) -> tuple[array[int] | None, array[int], tuple[Place, ...]]:
    """Return a call's prompt ids, completion ids and pictures. The prompt is None if the call itself recorded its token
    ids."""
    if call.completion is not None and call.new_prompt is not None:
        return None, call.completion, call.places
    layer = layers.get(call.call)
    if layer is not None:
        return layer.prompt, layer.completion, layer.places
    messages = call.messages
    if renderer is None:
        raise NotATape(
            f"call {call.call} of tape {tape.id} has text but no token ids (engine {call.engine!r}); "
            "name the folder of the tokenizer of the model that will be trained (for `rows`: pass a `Renderer` with it)"
        )
    if renderer.pictures is None and image_parts(messages):
        raise NotATape(
            f"call {call.call} of tape {tape.id} shows pictures to the model, and the model that will be trained can't "
            "see: train a vision model, leave the tape out, or record the task with text"
        )
    return renderer.authored(messages, call.reply, tape.call_tools(call))


def _temperatures(sampling: Sampling, offsets: NDArray[np.int32]) -> tuple[tuple[int, float], ...]:
    """Return the temperatures of a completion's own tokens as pairs (number of tokens, temperature), in order."""
    n = len(offsets)
    if sampling.first_temperature is None:
        return ((n, sampling.temperature),)
    return (1, sampling.temperature_at(int(offsets[0]))), (n - 1, sampling.temperature)


@dataclass(slots=True)
class _Building:
    length: int = 0
    chunks: list[NDArray[np.int32]] = field(default_factory=list)
    own: list[NDArray[np.int32]] = field(default_factory=list)
    offset: list[NDArray[np.int32]] = field(default_factory=list)
    old: list[NDArray[np.float32]] = field(default_factory=list)
    columns: list[tuple[int, float, int, int]] = field(default_factory=list)
    """(number of tokens, temperature, index of call, turn). A completion has one entry, or two if its first token has
    another temperature."""
    version: list[tuple[int, int]] = field(default_factory=list)
    """(number of tokens, index of version) for each span of tokens that one version sampled."""
    calls: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    bars: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    replies: list[str | None] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)

    def ids(self) -> NDArray[np.int32]:
        return np.concatenate(self.chunks) if self.chunks else np.empty(0, np.int32)

    def context(self, ids: array[int]) -> None:
        self.chunks.append(np.frombuffer(ids, dtype=np.int32) if len(ids) else np.empty(0, np.int32))
        self.length += len(ids)

    def complete(self, call: Call, ids: array[int], turn: int, label: Label | None, own: bool) -> None:
        start, n = self.length, len(ids)
        self.context(ids)
        if not n or not own or (label is not None and (label.use != "agent" or label.ranges == ())):
            return
        if start == 0:
            raise NotATape(f"call {call.call} has an empty prompt; the first token of a row can't be scored")
        barring = call.sampling.barring
        # Without the ids that were barred, the trainer can't compute the distribution that was sampled from.
        sayable = call.barred is not None or not barring
        known = call.logprobs if call.exact and sayable else None
        old = np.frombuffer(known, dtype=np.float32) if known is not None else np.full(n, np.nan, np.float32)
        spans = [(b - a, self.versions.setdefault(v, len(self.versions))) for v, a, b in call.spans] or [(n, -1)]
        offsets = np.arange(n, dtype=np.int32)
        if label is not None and label.ranges is not None:
            offsets = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in label.ranges])
            stamps = np.repeat([v for _, v in spans], [k for k, _ in spans])[offsets]
            old, n = old[offsets], len(offsets)
            spans = [(1, int(v)) for v in stamps]
        self.own.append(offsets + np.int32(start))
        self.offset.append(offsets)
        self.old.append(old)
        self.version.extend(spans)
        drawn_at = _temperatures(call.sampling, offsets) if known is not None else ((n, 1.0),)
        self.columns.extend((k, temperature, len(self.calls), turn) for k, temperature in drawn_at)
        self.calls.append(call.call)
        self.bars.append((barring, call.barred or ()) if known is not None else (0, ()))
        self.agents.append(call.by)
        self.replies.append(call.text)

    def done(self, tape: Tape, group: str, observations: Observations) -> Row:
        counts = np.array([c[0] for c in self.columns])
        return Row(
            tape=tape.id,
            group=group,
            places=tuple(self.places),
            file=tape.picture if self.places else None,
            input_ids=np.concatenate(self.chunks),
            own=np.concatenate(self.own),
            old=np.concatenate(self.old),
            temperature=np.array([c[1] for c in self.columns], np.float32).repeat(counts),
            version=np.array([v for _, v in self.version], np.int32).repeat([k for k, _ in self.version]),
            call=np.array([c[2] for c in self.columns], np.int32).repeat(counts),
            turn=np.array([c[3] for c in self.columns], np.int32).repeat(counts),
            offset=np.concatenate(self.offset),
            calls=tuple(self.calls),
            agents=tuple(self.agents),
            observations=observations,
            replies=tuple(self.replies),
            versions=tuple(self.versions),
            bars=tuple(self.bars) if any(ids for _, ids in self.bars) else (),
        )
