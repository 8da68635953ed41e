"""Delivery: whether each sampler has the weights that were published to it.

After every weight sync, each sampler samples one token after a recorded prefix and scores the prefix. Both must match
the trainer's log-probs under the new weights. The prefix is the same in the whole run, so a prefix cache holds its keys
and values of the weights before; a cache that wasn't cleared shows in the sampled token.

Differences up to a bound count as rounding. Only a sync that surely arrived, because the update moved the log-probs by
more than twice the bound, may widen it. Smaller updates are `unmoved`. They are compared with the newest weights too:
updates that never arrive add up until they exceed the bound.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from ...agents.engines.embedded.sampler import log_probs
from ...agents.engines.engine import EngineError, FleetEngine, Request, Sampler, TrainableEngine
from ...agents.engines.team_engine import lead_of
from ...tapes.arrays import ints
from ...tapes.errors import TapereelError
from ...tapes.records import Sampling
from ..data.rows import Row

SHARE, LEAST, MOST = 100, 32, 144
"""Length of the prefix: the tokens of the batch / SHARE, within these bounds, so that the check costs little beside the
update. A prefix of MOST tokens fills a block of 128 tokens, which is a large one for a prefix cache."""
FLOOR, NARROW = {torch.float32: 1e-4, torch.float64: 1e-4}, 0.02
"""Difference in nats that always counts as rounding, by the dtype of the trainer's weights; NARROW for the others."""
MARGIN = 3.0
"""The bound is this many times the largest difference of a sync that surely arrived."""
FIRST = 0.5
"""The bound in nats of a run's first comparison, when the rounding of its samplers is unknown."""
KEPT = 8
"""Number of versions whose log-probs are kept, to name the version that a sampler has."""


class NotDelivered(TapereelError, RuntimeError):
    """A sampler doesn't have the weights that were published to it; names sampler, version, and since when."""


class _Version(NamedTuple):
    """The trainer's log-probs under one version."""

    name: str
    own: Tensor
    """(n - 1,) of the prefix's ids from the second on."""
    after: Tensor
    """(vocabulary,) of the token after the prefix."""


class _Answer(NamedTuple):
    """What a sampler said: `own` as above, and the token that it sampled after the prefix."""

    sampler: str
    own: Tensor
    id: int
    logprob: float

    def gap(self, version: _Version, *, cached: bool = True) -> float:
        """Largest difference in nats; without `cached`, that of the prefix's ids alone."""
        own = float((version.own - self.own).abs().max())
        return max(own, abs(float(version.after[self.id]) - self.logprob)) if cached else own


class Delivery:
    """The check of one policy's samplers. `model`: the trainer's, which updates change in place."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.ids: array[int] | None = None
        """The prefix; None before `choose`."""
        self.found: dict[str, JsonValue] = {}
        """The last check, for metrics and the next `use` record."""
        self._tape = ""
        self._clean: float | None = None
        """Largest difference in nats of a sync that surely arrived; None before the first comparison."""
        self._versions: deque[_Version] = deque(maxlen=KEPT)
        self._sure: _Version | None = None
        """The last version that every sampler surely had."""

    def choose(self, tapes: Sequence[str], source: Callable[[str], Sequence[Row]], tokens: int | None = None) -> None:
        """Take the prefix, of `tokens`, from the longest row of these tapes, unless there is one already."""
        if self.ids is None:
            rows = [(row.input_ids, tape) for tape in tapes for row in source(tape)]
            ids, self._tape = max(rows, key=lambda row: len(row[0]), default=((), ""))
            tokens = tokens or min(max(sum(len(ids) for ids, _ in rows) // SHARE, LEAST), MOST)
            self.ids = ints(ids[:tokens]) if len(ids) > 1 else None

    def recall(self, found: dict[str, JsonValue], source: Callable[[str], Sequence[Row]]) -> None:
        """Go on from a recorded check: with its prefix, and with its bound."""
        self._clean = float(str(found["clean"]))
        self.choose([str(found["tape"])], source, int(str(found["tokens"])))

    async def check(self, engine: TrainableEngine, version: str, tolerance: float | None) -> None:
        """NotDelivered unless every sampler has the model's present weights, named `version`. Does nothing before
        `choose`. tolerance: difference in nats that counts as rounding in any case."""
        lead = lead_of(engine)
        if self.ids is None or not isinstance(lead, TrainableEngine):
            return
        one = Sampler(lead.name, lead.complete, lead.score)
        samplers = lead.samplers if isinstance(lead, FleetEngine) else (one,)
        if not samplers:  # recorded answers
            return
        ids = self.ids[: (lead.context or MOST + 1) - 1]
        if not self._versions or self._versions[-1].name != version:
            self._versions.append(await asyncio.to_thread(self._score, ids, version))
        new = self._versions[-1]
        floor = max(FLOOR.get(next(self.model.parameters()).dtype, NARROW), tolerance or 0.0)
        bound = max(floor, FIRST if self._clean is None else MARGIN * self._clean)
        answers = await asyncio.gather(*(_ask(sampler, ids) for sampler in samplers))
        for answer in answers:
            if not answer.gap(new) <= bound:  # written so that NaN is a difference
                raise NotDelivered(self._sentence(answer, bound))
        difference = max(answer.gap(new) for answer in answers)
        moved = float((new.own - self._sure.own).abs().max()) if self._sure is not None else None
        # A sampler that lags behind by small updates is nearer to an older version: its difference is no rounding.
        lags = any(answer.gap(new) > answer.gap(older) for answer in answers for older in self._versions)
        if moved is None or (moved > 2 * bound and not lags):
            self._sure = new
            if moved is not None or self._clean is None:
                self._clean = max(self._clean or 0.0, difference)
        verdict = "delivered" if self._sure is new else "unmoved"
        self.found = {"version": version, "verdict": verdict, "difference": difference, "moved": moved, "bound": bound}
        self.found |= {"clean": self._clean, "tape": self._tape, "tokens": len(self.ids)}

    @torch.no_grad()
    def _score(self, ids: array[int], version: str) -> _Version:
        at = torch.tensor(ids.tolist(), device=next(self.model.parameters()).device)
        logits = self.model(input_ids=at[None], use_cache=False).logits[0]
        return _Version(version, log_probs(logits, at).cpu(), logits[-1].float().log_softmax(-1).cpu())

    def _sentence(self, answer: _Answer, bound: float) -> str:
        new, has = self._versions[-1], min(reversed(self._versions), key=answer.gap)
        if answer.gap(new, cached=False) <= bound:
            what = "it has these weights, but its cache still holds keys and values of older ones"
        elif answer.gap(has, cached=False) <= bound:
            what = f"it has {has.name}, and no weights arrived since"
        else:
            sure = self._sure.name if self._sure is not None else "none"
            what = (
                f"it has weights of no known version, as after a part of a sync; the last that surely arrived: {sure}"
            )
        return (
            f"the weights {new.name} did not arrive at {answer.sampler}: its log-probs of {len(answer.own)} tokens of "
            f"tape {self._tape} differ from the trainer's by up to {answer.gap(new):.3g} nats (allowed: {bound:.3g}); "
            f"{what}. Mend the weight sync and continue with --resume, or raise loop.sampler_tolerance for a sampler "
            "that computes in another precision"
        )


async def _ask(sampler: Sampler, ids: array[int]) -> _Answer:
    """EngineError for a sampler that fails five times, a second apart, or that says too little."""
    request = Request(messages=(), prompt=ids, sampling=Sampling(max_tokens=1), seed=0, cache_key="delivery")
    for wait in (1.0, 1.0, 1.0, 1.0, None):
        try:
            # The completion comes first: the scores may put fresh keys and values into the cache and hide stale ones.
            said, own = await sampler.complete(request), await sampler.score(ids)
            if not said.ids or not said.logprobs or len(own) != len(ids) - 1:
                raise EngineError(
                    f"{sampler.name} gave {len(said.ids or ())} sampled ids and {len(own)} scores for a prompt of "
                    f"{len(ids)}, which needs one or more and {len(ids) - 1} (tapereel.check_engine tests an engine)"
                )
            return _Answer(sampler.name, torch.tensor(own), said.ids[0], said.logprobs[0])
        except EngineError as error:
            if wait is None or not error.retry:
                raise
            await asyncio.sleep(wait)
    raise AssertionError("the last round returns or raises")
