"""The embedded engine: a transformers model sampled inside this process, in the event loop.

Contract. Any number of requests at once share one batch. Every token carries the version of the weights that gave its
log-prob, and that log-prob is exact for those weights over the full prefix (float32; `reprefill` and `drain`). A
request ends as a completion, an `EngineError` or a cancellation that leaves its partial completion behind, never as a
hang. One decoding step for all running rows, then the loop is free for the agents; when nothing runs, nothing spins.

It knows nothing of tapes and of training: whoever trains does so on another copy of the model, may do so in a thread,
and hands over weights with `sync_weights`, from the loop's own thread.
"""

from __future__ import annotations

import asyncio
import copy as copying
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from ....tapes.arrays import ints
from ....tapes.errors import MissingExtra
from ....tapes.records import Usage
from ..engine import Completion, EngineError, Finish, Listener, PromptTooLong, Request, one_temperature

try:
    import numpy as np

    from .batch import Batch, Generation, Stats
    from .kv_cache import SlotDecoder
    from .sampler import as_seed
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "torch", "transformers"):
        raise
    raise MissingExtra(error.name, "train", "the embedded engine") from error

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PublishMode = Literal["reprefill", "drain", "stale_kv"]
"""What becomes of completions in flight. `reprefill`: their KV is computed again under the new weights (exact).
`drain`: no request joins until they are finished, then the weights change (exact, slower). `stale_kv`: they continue on
the old KV; log-probs after the swap then belong to no single version of the weights, so use it in experiments only."""

DEFAULT_CAPACITY = 4096
"""Tokens per slot when none is given and the model would allow more: KV memory is slots x capacity."""


class Decodes(Protocol):
    """What the engine needs of a renderer."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant's turn."""
        ...

    def decode(self, ids: array[int], /) -> str:
        """Completion text without the turn-ending token."""
        ...


@dataclass(slots=True, eq=False)
class _Flight:
    """One request on its way."""

    generation: Generation
    landed: asyncio.Future[Finish]
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """Closed spans; the open one runs from their end to now."""
    listener: Listener | None = None
    told: int = 0
    """How many ids the listener was told of."""

    def tell(self) -> None:
        """What was sampled since it was told last."""
        ids = self.generation.ids
        if self.listener is not None and len(ids) > self.told:
            told, self.told = self.told, len(ids)
            self.listener.tokens(ids[told:])

    def close_span(self, version: str) -> None:
        """Everything sampled since the last span was sampled by `version`."""
        start = self.spans[-1][2] if self.spans else 0
        if len(self.generation.ids) > start:
            self.spans.append((version, start, len(self.generation.ids)))


class EmbeddedEngine:
    """Samples from a transformers decoder with a slot KV cache.

    `model` is copied unless `copy=False` hands it over for good; either way the engine's weights change by
    `sync_weights` only. `slots` rows run together, the rest waits in order of arrival;
    prompt and completion of a request may have
    `capacity` tokens together. KV memory is slots x capacity, and `park_tokens` more (by default as much again) for
    conversations between their turns. `prefill_tokens` bounds what is prefilled between two decoding steps. A
    completion ends with an id of `end_ids` (by default the renderer's and the model's own) or of the request.
    """

    name = "embedded"

    def __init__(
        self,
        model: PreTrainedModel,
        renderer: Decodes,
        *,
        version: str,
        slots: int = 64,
        capacity: int | None = None,
        park_tokens: int | None = None,
        prefill_tokens: int = 2048,
        end_ids: Iterable[int] | None = None,
        copy: bool = True,
    ) -> None:
        if capacity is None:
            longest: int = getattr(model.config, "max_position_embeddings", None) or DEFAULT_CAPACITY
            capacity = min(longest, DEFAULT_CAPACITY)
        self.version = version
        self.stats = Stats()
        self.end_ids = frozenset((*renderer.end_ids, *eos_ids(model)) if end_ids is None else end_ids)
        self._renderer = renderer
        self._decoder = SlotDecoder(copying.deepcopy(model) if copy else model, slots, capacity)
        self._batch = Batch(self._decoder, slots * capacity if park_tokens is None else park_tokens, self.stats)
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[Generation] = deque()
        self._flights: dict[Generation, _Flight] = {}
        self._heard: set[_Flight] = set()
        """The flights with a listener."""
        self._driver: asyncio.Task[None] | None = None
        self._drains: list[asyncio.Future[None]] = []
        self._versions = {version}
        self._frozen = False
        self._closed = False

    @property
    def renderer(self) -> Decodes:
        """The renderer that the engine was made with."""
        return self._renderer

    @property
    def context(self) -> int:
        """Most tokens that prompt and completion may have together."""
        return self._decoder.capacity

    @property
    def changing(self) -> bool:
        """Whether a new request would wait: new weights wait for those under way to finish, or sampling is frozen."""
        return bool(self._drains) or self._frozen

    async def complete(self, request: Request) -> Completion:
        """Sample a completion. Requests are served in order of arrival as slots become free.

        Raises `PromptTooLong`, or `EngineError` for a request that can't be served or a model that fails. A cancelled
        call gives what was sampled to `request.on_partial`, as a completion that finished `cancelled`."""
        self._check_loop()
        generation = self._generation(request)
        flight = _Flight(generation, asyncio.get_running_loop().create_future(), listener=request.listener)
        self._flights[generation] = flight
        if request.listener is not None:
            self._heard.add(flight)
        self._waiting.append(generation)
        self._wake()
        try:
            return self._completion(flight, await flight.landed)
        except asyncio.CancelledError:
            self._withdraw(flight)
            if request.on_partial is not None:
                request.on_partial(self._completion(flight, "cancelled"))
            raise
        finally:
            self._heard.discard(flight)

    def forget(self, cache_key: str) -> None:
        """Drop the KV parked under `cache_key`; a request under way with it won't park its own."""
        self._batch.parked.forget(cache_key)
        for generation in self._flights:
            if generation.key == cache_key:
                generation.key = ""

    async def sync_weights(
        self, state: Mapping[str, Tensor], version: str, mode: PublishMode = "reprefill", *, again: bool = False
    ) -> None:
        """Make `state` the weights of the engine between two decoding steps; tokens from then on carry `version`, which
        is refused if it was published before; with `again`, whoever calls vouches that it names the same weights.

        `state` must not change until this returns: publish a copy of what is being trained. Raises `WrongWeights`,
        before anything has changed, when it isn't the model's state dict. Parked KV is dropped: it is recomputed when
        its conversation goes on."""
        self._check_loop()
        if mode not in ("reprefill", "drain", "stale_kv"):
            raise ValueError(f"publish mode {mode!r}: must be reprefill, drain or stale_kv")
        if version in self._versions and not again:
            raise ValueError(f"version {version!r} was published before; a version names one set of weights for good")
        self._decoder.check(state)
        self._versions.add(version)
        if mode == "drain":
            await self._drain()
        self._swap(state, version, mode)
        self._wake()

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise `WrongWeights` unless `state` can be published."""
        self._decoder.check(state)

    def freeze(self) -> None:
        """Sample nothing until `thaw`; what is asked meanwhile waits. A publish that drains waits for that, too."""
        self._frozen = True

    def thaw(self) -> None:
        """Sample again."""
        self._frozen = False
        self._wake()

    def relabel(self, version: str) -> None:
        """The weights stay as they are, and tokens carry `version` from here on."""
        for flight in self._flights.values():
            flight.close_span(self.version)
        self._versions.add(version)
        self.version = version

    async def close(self) -> None:
        """End what is in flight as `abort`, with what was sampled, and give the memory back."""
        if self._closed:
            return
        self._closed = True
        self._land_all()
        for drain in self._drains:
            if not drain.done():
                drain.set_exception(EngineError("the engine was closed before the weights could be published"))
        self._decoder.release()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _generation(self, request: Request) -> Generation:
        """The request as the batch sees it, or an `EngineError` that says why it can't be served."""
        one_temperature(request)
        sampling = request.sampling
        prompt = ints(request.prompt or ())
        if not prompt:
            raise EngineError(
                "a request without prompt ids: the embedded engine samples tokens after tokens, render "
                "the messages with its renderer first"
            )
        if set(sampling.extra) - {"stop"}:  # the door cuts at a stop
            raise EngineError(
                f"sampling options {sorted(sampling.extra)} are unknown to the embedded engine; it has "
                "temperature, max_tokens, top_p and top_k"
            )
        if len(prompt) >= self.context:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, the engine holds {self.context} for prompt and "
                "completion together; shorten the conversation or make the engine with more capacity"
            )
        ids = np.frombuffer(prompt, dtype=np.int32)
        if ids.min() < 0 or ids.max() >= self._decoder.vocabulary:
            at = int(((ids < 0) | (ids >= self._decoder.vocabulary)).argmax())
            raise EngineError(
                f"prompt id {ids[at]} at position {at} is outside the model's vocabulary of "
                f"{self._decoder.vocabulary}; the tokenizer is another model's"
            )
        return Generation(
            prompt=prompt,
            seed=as_seed(request.seed),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stops=self.end_ids.union(request.stop_ids),
            key=request.cache_key,
            limit=min(sampling.max_tokens, self.context - len(prompt)),
        )

    def _completion(self, flight: _Flight, finish: Finish) -> Completion:
        flight.close_span(self.version)
        generation = flight.generation
        usage = Usage(
            prompt_tokens=len(generation.prompt),
            completion_tokens=len(generation.ids),
            cached_tokens=generation.reused or 0,
        )
        return Completion(
            text=self._renderer.decode(generation.ids),
            ids=generation.ids,
            logprobs=generation.logprobs,
            spans=tuple(flight.spans),
            finish=finish,
            usage=usage,
        )

    def _withdraw(self, flight: _Flight) -> None:
        """Take a cancelled request out, wherever it is."""
        if self._flights.pop(flight.generation, None) is None:
            return
        flight.close_span(self.version)
        if flight.generation.slot >= 0:
            self._batch.leave(flight.generation)
        else:
            self._waiting.remove(flight.generation)
        self._drained()

    def _land(self, generation: Generation, finish: Finish) -> None:
        """Answer a request that has left the batch."""
        flight = self._flights.pop(generation)
        flight.close_span(self.version)
        if not flight.landed.done():
            flight.landed.set_result(finish)

    def _fail(self, generation: Generation, reason: str, cause: BaseException | None = None) -> None:
        """As `_land`, with an error of its own for each request."""
        flight = self._flights.pop(generation)
        flight.close_span(self.version)
        if not flight.landed.done():
            error = EngineError(reason)
            error.__cause__ = cause
            flight.landed.set_exception(error)

    def _land_all(self, reason: str = "", cause: BaseException | None = None) -> None:
        """Empty the engine: everything in flight ends as `abort`, or fails when there is a reason."""
        generations = [*self._batch.evict(), *self._waiting]
        self._waiting.clear()
        self._batch.parked.clear()
        for generation in generations:
            if reason:
                self._fail(generation, reason, cause)
            else:
                self._land(generation, "abort")

    # -- the driver ---------------------------------------------------------------------------------------------------

    def _check_loop(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        driver = self._driver
        if driver is not None and driver.get_loop() is not asyncio.get_running_loop():
            if not driver.get_loop().is_closed():
                raise EngineError("the engine is at work in another event loop; share it within one loop only")
            # The closed loop took the callers and the driver with it: drop their state, or their slots stay occupied.
            self._driver = None
            self._batch.evict()
            self._waiting.clear()
            self._flights.clear()
            self._heard.clear()

    def _wake(self) -> None:
        if self._driver is None and self._runnable():
            self._driver = asyncio.get_running_loop().create_task(self._drive(), name="tapereel embedded engine")

    def _runnable(self) -> bool:
        if self._frozen:
            return False
        return bool(self._batch.rows) or any(self._may_join(generation) for generation in self._waiting)

    def _may_join(self, generation: Generation) -> bool:
        """While weights wait for the batch to drain, only what was begun goes on."""
        return not self._drains or bool(generation.ids)

    async def _drive(self) -> None:
        try:
            while self._runnable():
                started = time.perf_counter()
                self._admit()
                if self._batch.rows:
                    self._attempt(self._batch.rows, "decoding", self._batch.step)
                self._drained()
                for flight in self._heard:
                    flight.tell()
                self.stats.busy_seconds += time.perf_counter() - started
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._land_all()
            raise
        except Exception as error:
            self._land_all(f"the embedded engine failed: {type(error).__name__}: {error}", error)
        finally:
            self._driver = None

    def _admit(self) -> None:
        """Prefill those who may join, up to the free slots and the token bound."""
        joiners: list[Generation] = []
        tokens = 0
        while self._waiting and len(joiners) < self._batch.room and self._may_join(self._waiting[0]):
            tokens += self._batch.missing(self._waiting[0])
            if joiners and tokens > self._prefill_tokens:
                break
            joiners.append(self._waiting.popleft())
        for group in self._batch.groups(joiners):
            self._attempt(group, "prefilling", partial(self._batch.join, group))

    def _attempt(self, involved: list[Generation], doing: str, work: Callable[[], list[Generation]]) -> None:
        """Run one forward. If it raises, those involved fail and the engine goes on with the rest."""
        try:
            finished = work()
        except Exception as error:
            reason = f"the model failed while {doing} {len(involved)} sequences: {type(error).__name__}: {error}"
            for generation in list(involved):
                if generation.slot >= 0:
                    self._batch.leave(generation, park=False)
                self._fail(generation, reason, error)
            return
        for generation in finished:
            if generation.finish == "broken":
                self._fail(
                    generation,
                    f"the model gave no finite probabilities for token {len(generation.ids)} of a "
                    f"completion under version {self.version!r}; publish weights that are finite",
                )
            else:
                self._land(generation, generation.finish or "stop")

    # -- weights ------------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        drain: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drains.append(drain)
        try:
            self._drained()
            await drain
        finally:
            self._drains.remove(drain)
            self._wake()

    def _drained(self) -> None:
        """Resolve the waiting drains once no completion that has begun is left."""
        if self._drains and not self._batch.rows and not any(s.ids for s in self._waiting):
            for drain in self._drains:
                if not drain.done():
                    drain.set_result(None)

    def _swap(self, state: Mapping[str, Tensor], version: str, mode: PublishMode) -> None:
        # No await in here: a decoding step between the span's end and the load would label old tokens as new ones.
        for flight in self._flights.values():
            flight.close_span(self.version)
        self._decoder.load(state)
        # Parked KV is of the old weights: a later turn that continued on it would get log-probs of no version.
        self._batch.parked.clear()
        if mode == "stale_kv":
            for generation in self._batch.rows:
                generation.clean = False
        else:
            # Back to the head of the queue, in their order: their prefixes are prefilled again by the new weights.
            self._waiting.extendleft(reversed(self._batch.evict()))
        self.version = version
        self.stats.swaps += 1


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Every id that the model's configurations name as its end."""
    found: list[int] = []
    for config in (model.config, model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        found.extend([eos] if isinstance(eos, int) else eos or ())
    return tuple(found)
