"""Checks that each sampler really has the weights that the trainer published.

After every weight sync, each sampler draws one token after each of several prefixes of a recorded row. The log-probs of
these tokens must equal those that the trainer computes with the new weights. The requests take the same route as every
completion, and the prefixes stay the same during a run. So the check also fails if a prefix cache wasn't cleared and
still holds keys and values from earlier weights. The trainer keeps its distributions for the last few versions, so that
an error can name the version that a sampler has instead.

Differences up to a bound count as rounding. The first check sets the bound. Under autocast, the bound also follows the
rounding of the model itself, because a sampler may round like the trainer in one batch and otherwise in the next. A
sync is confirmed (`delivered`) if the log-probs have changed by more than twice the bound since the last confirmed
sync, and every sampler is closest to the newest weights. Otherwise the verdict is `unmoved`. Only confirmed syncs can
raise the bound. Small updates that never arrive are still found, because they add up: samplers are always compared with
the newest weights.

No engine is asked to score given tokens, because vLLM's CPU build with adapters crashes on `prompt_logprobs`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue
from torch import nn

from ...agents.engines.engine import CapableEngine, EngineError, Request, Sampler, TrainableEngine
from ...agents.engines.team_engine import lead_of
from ...agents.vision.vision import Vision
from ...tapes.arrays import ints
from ...tapes.errors import TapereelError
from ...tapes.records import Sampling
from ..data.rows import Row
from ..trainer.logprobs import casting, parts, plan, states, vocabulary_of
from ..trainer.updates import with_files
from .plan import fits
from .policy import Policy

PLACES = 8
"""Maximum number of tokens that each sampler draws in a check, one after each prefix."""
SHARE, LEAST, MOST = 100, 32, 144
"""The longest prefix has 1 / SHARE of the tokens in an update's batch, so that a check is cheap compared to the update.
It has at least LEAST and at most MOST tokens. MOST is more than 128 tokens, which is a large block of a prefix
cache."""
FLOOR, NARROW = {torch.float32: 1e-4, torch.float64: 1e-4}, 0.02
"""Differences up to this many nats always count as rounding. FLOOR is for these dtypes of the trainer's forward pass,
and NARROW for all others."""
MARGIN = 3.0
"""The bound for rounding is this many times the largest difference that was found after a confirmed sync."""
ROUNDED = 4.0
"""Under autocast, differences up to this many times the largest rounding error of a place count as rounding. A
sampler's error is as large as the trainer's, with heavy tails: for SmolLM2-135M, the largest difference was up to 1.4
times this error."""
FIRST = 0.5
"""The bound in nats for the first check of a run, which can't know yet how the samplers round."""
KEPT = 8
"""Number of versions of the weights for which the trainer keeps its log-probs."""
ONE = Sampling(max_tokens=1)
"""How each sampler samples in a check."""


class NotDelivered(TapereelError, RuntimeError):
    """Raised if a sampler doesn't have the weights that were published to it. The message names the sampler, the
    missing weights and the last weights known to have arrived."""


class _Version(NamedTuple):
    """The trainer's next-token distributions under one version of the weights."""

    name: str
    after: NDArray[np.float32]
    """Log-probs (places, vocabulary) of the next token after each place."""
    rounding: float
    """The largest error by autocast of a place, in nats: a root mean square over next tokens. 0 without autocast."""


class _Answer(NamedTuple):
    """The tokens that one sampler drew in a check: one after each place, which is the length of a prefix."""

    sampler: str
    ids: NDArray[np.int64]
    """Token ids (places,)."""
    logprobs: NDArray[np.float32]
    """Log-probs (places,) in nats."""

    def of(self, version: _Version) -> NDArray[np.float32]:
        """Return the trainer's log-probs (places,) of these ids under a version."""
        return version.after[np.arange(len(self.ids)), self.ids]

    def gaps(self, versions: Iterable[_Version]) -> list[float]:
        """For each version, return the largest difference between the sampler's log-probs and the trainer's, in
        nats."""
        return [float(np.abs(self.of(version) - self.logprobs).max()) for version in versions]


class Delivery:
    """Checks that all samplers of one policy have its weights."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.found: dict[str, JsonValue] = {}
        """The result of the last check, for metrics and the next `use` record."""
        self._tape = ""
        self._row: Row | None = None
        """The beginning of a recorded row. The prefixes are taken from it. It is None before `choose`."""
        self._places: list[int] = []
        """Lengths of the prefixes of `_row` after which a token is sampled. No prefix ends inside a picture."""
        self._clean: float | None = None
        """Largest difference, in nats, that was found after a confirmed sync. None before the first check."""
        self._versions: deque[_Version] = deque(maxlen=KEPT)
        self._sure: _Version | None = None
        """The newest version that is known to have arrived at every sampler."""

    def choose(self, tapes: Sequence[str], source: Callable[[str], Sequence[Row]]) -> None:
        """Choose the row for all checks: the longest one in these tapes, or the longest one with a picture. If a row
        was chosen before, it is kept."""
        rows = [(row, tape) for tape in tapes for row in self._readable(source(tape))] if self._row is None else []
        if rows:
            row, self._tape = max(rows, key=lambda found: (bool(found[0].places), len(found[0])))
            length = min(max(sum(len(row) for row, _ in rows) // SHARE, LEAST), MOST)
            # The prefix includes the first picture. Only tokens after it can show that a sampler reads other pixels.
            self._row = _beginning(row, max([length, *(place.end + 1 for place in row.places[:1])]))

    def recall(self, found: dict[str, JsonValue], source: Callable[[str], Sequence[Row]]) -> None:
        """Continue after an earlier process, with the bound, row and places of the check `found` in its records. If the
        tape no longer has the row, `choose` chooses another one."""
        self._clean, tape, places = float(str(found["clean"])), str(found["tape"]), cast("list[int]", found["places"])
        row = max(self._readable(source(tape)), key=lambda row: (bool(row.places), len(row)), default=None)
        if row is not None and len(row) >= max(places):
            self._tape, self._places, self._row = tape, places, _beginning(row, max(places))

    def _readable(self, rows: Sequence[Row]) -> list[Row]:
        vocabulary = vocabulary_of(self.policy.model)
        return [row for row in rows if fits(row, vocabulary)]

    async def check(self, engine: TrainableEngine, version: str, tolerance: float | None) -> None:
        """Check that every sampler has the current weights of the model, whose version is `version`. If not, raise
        NotDelivered.

        Differences up to `tolerance` nats always count as rounding. Before `choose`, this does nothing.
        """
        lead = lead_of(engine)
        copies = "copies" in lead.can
        samplers = cast(CapableEngine, lead).samplers if copies else {lead.name: lead.complete}
        if self._row is None or not samplers:
            return
        if not self._versions or self._versions[-1].name != version:
            self._versions.append(await asyncio.to_thread(self._scored, self._row, version, lead.context))
        new = self._versions[-1]
        floor = max(
            FLOOR.get(self.policy.autocast or next(self.policy.model.parameters()).dtype, NARROW),
            ROUNDED * new.rounding,
            tolerance or 0.0,
        )
        bound = max(floor, FIRST if self._clean is None else MARGIN * self._clean)
        asked = [_beginning(self._row, place) for place in self._places]
        found = await asyncio.gather(
            *(_ask(name, sampler, asked) for name, sampler in samplers.items()), return_exceptions=True
        )
        answers = []
        for name, answer in zip(samplers, found, strict=True):
            if isinstance(answer, _Answer):
                answers.append(answer)
            elif not copies or name in cast(CapableEngine, lead).samplers or not isinstance(answer, EngineError):
                raise answer  # otherwise, the engine has left this sampler out since it was asked
        gaps = [answer.gaps(self._versions) for answer in answers]
        newest = [to_versions[-1] for to_versions in gaps]
        for answer, to_versions in zip(answers, gaps, strict=True):
            if not to_versions[-1] <= bound:  # also true for NaN
                raise NotDelivered(self._sentence(answer, to_versions, bound))
        difference, sure = max(newest), self._sure
        moved = min(float(np.abs(one.of(new) - one.of(sure)).max()) for one in answers) if sure is not None else None
        # A sampler that is closer to an older version lacks a few small updates. Its difference isn't only rounding.
        lags = any(to_versions[-1] > min(to_versions) for to_versions in gaps)
        if moved is None or (moved > 2 * bound and not lags):
            self._sure = new
            if moved is not None or self._clean is None:
                self._clean = max(self._clean or 0.0, difference)
        verdict = "delivered" if self._sure is new else "unmoved"
        self.found = {"version": version, "verdict": verdict, "difference": difference, "moved": moved, "bound": bound}
        self.found |= {"clean": self._clean, "tape": self._tape, "places": list[JsonValue](self._places)}

    def _scored(self, row: Row, version: str, context: int | None) -> _Version:
        self._places, after, rounding = self.policy.weights.call(
            next_tokens,
            row=with_files([row])[0],
            places=self._places,
            context=context,
            autocast=self.policy.autocast,
            vision=self.policy.vision,
        )
        return _Version(version, after, rounding)

    def _sentence(self, answer: _Answer, gaps: list[float], bound: float) -> str:
        new = self._versions[-1]
        gap, has = min(zip(reversed(gaps), reversed(self._versions), strict=True), key=lambda pair: pair[0])
        if gap <= bound:
            what = f"it has {has.name}, and no weights arrived since"
        else:
            what = "it has weights of no known version, as after a part of a sync, or caches of older weights"
            what += ", or reads other pixels of pictures" if self.policy.vision is not None else ""
        sure = self._sure.name if self._sure is not None else "none"
        return (
            f"the weights {new.name} did not arrive at {answer.sampler}: its log-probs of {len(answer.ids)} tokens "
            f"in a row of tape {self._tape} differ from the trainer's by up to {gaps[-1]:.3g} nats (allowed: "
            f"{bound:.3g}); {what}. The last weights known to have arrived: {sure}. Fix the weight sync and continue "
            "with `resume=True`, or raise loop.sampler_tolerance for a sampler that computes in another precision"
        )


@torch.no_grad()
def next_tokens(
    model: nn.Module,
    *,
    row: Row,
    places: list[int],
    context: int | None,
    autocast: torch.dtype | None,
    vision: Vision | None,
) -> tuple[list[int], NDArray[np.float32], float]:
    """Return the places, the model's log-probs (places, vocabulary) of the next token after each, and their rounding
    error by autocast (`_Version.rounding`). Without `places`, choose some in the row."""
    body, output = parts(model)
    # `states` returns the hidden state before each own token, so one more token is added to get the last state.
    own, ones = np.arange(1, len(row) + 1, dtype=np.int32), np.ones(len(row), dtype=np.float32)
    longer = replace(row, input_ids=np.append(row.input_ids, 0), own=own, temperature=ones, bars=())
    micro = plan([longer], vision=vision)[0]
    with casting(model, autocast):
        hidden = states(body, micro, model).to(output.weight.dtype)
    if not places:
        logits = output(hidden).float()
        # The model is least sure after these prefixes, so a change of the weights is most visible. The longest prefix
        # tests the largest part of a cache.
        longest = len(_beginning(row, min(len(row), (context or len(row) + 1) - 1)))
        unsure = torch.distributions.Categorical(logits=logits[: longest - 1]).entropy()
        for place in row.places:
            unsure[place.offset : place.end - 1] = -1.0  # the prefix would end inside the picture
        least = unsure.topk(min(PLACES - 1, int((unsure >= 0).sum()))).indices + 1
        places = sorted({longest, *least.tolist()})
    ends, rounding = [place - 1 for place in places], 0.0
    after = output(hidden[ends]).float().log_softmax(-1)
    if autocast is not None:
        exact = output(states(body, micro, model)[ends]).float().log_softmax(-1)
        rounding = float((exact.exp() * (after - exact) ** 2).sum(-1).max().sqrt())
    return places, after.cpu().numpy(), rounding


def _beginning(row: Row, length: int) -> Row:
    """Return the first `length` tokens of the row, or fewer if the last of these would be inside a picture."""
    end = next((place.offset for place in row.places if place.offset < length < place.end), length)
    return replace(row, input_ids=row.input_ids[:end], places=tuple(p for p in row.places if p.end <= end))


async def _ask(name: str, sampler: Sampler, asked: Sequence[Row]) -> _Answer:
    said = await asyncio.gather(*(_sample(name, sampler, prompt) for prompt in asked))
    return _Answer(name, np.array([id for id, _ in said]), np.array([logprob for _, logprob in said], dtype=np.float32))


async def _sample(name: str, sampler: Sampler, prompt: Row, tries: int = 5) -> tuple[int, float]:
    """Sample one token after `prompt`. Return its id and log-prob. Raises EngineError if the sampler fails `tries`
    times."""
    key = f"delivery/{len(prompt)}"
    ids, shown = ints(prompt.input_ids), prompt.places
    request = Request(
        messages=(), prompt=ids, places=shown, picture=prompt.file, sampling=ONE, seed=len(ids), cache_key=key
    )
    try:
        said = await sampler(request)
    except EngineError as error:
        if tries == 1 or not error.retry:
            raise
        await asyncio.sleep(1.0)
        return await _sample(name, sampler, prompt, tries - 1)
    if not said.ids or not said.logprobs:
        raise EngineError(f"{name} gave no ids with log-probs: `tapereel.check_engine` tests an engine")
    return said.ids[0], said.logprobs[0]
