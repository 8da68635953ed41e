"""The embedded engine samples a transformers model inside this process, in the event loop.

Contract. Any number of concurrent requests share one batch. Every token carries the version of the weights that gave
its log-prob. In the weight sync modes `reprefill` and `drain`, the log-prob is exact for these weights and the full
prefix (float32). A request never hangs. It ends with a completion, an `EngineError`, or a cancellation that reports the
partial completion. After each decoding step, the engine yields to the event loop. An idle engine has no task.

Concurrency. One driver task runs all forwards in the event loop's thread. Methods change state only between two awaits,
so the state needs no lock. A trainer uses another copy of the model and may run in another thread, but must call
`sync_weights` in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import copy as copying
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

from ....tapes.arrays import ints
from ....tapes.common.arguments import check_arguments
from ....tapes.errors import MissingExtra
from ....tapes.records import Sampling, Usage
from ...vision.vision import Vision
from ..engine import (
    Capability,
    Completion,
    EngineError,
    Finish,
    GrammarRefused,
    Listener,
    PromptTooLong,
    PublishMode,
    Request,
    one_temperature,
)

try:
    import numpy as np

    from .batch import Batch, Generation, Stats
    from .kv_cache import SlotDecoder
    from .sampler import PENALTIES, as_seed, penalties_of
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "torch", "transformers"):
        raise
    raise MissingExtra(error.name, "train", "the embedded engine") from error

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

    from ....tapes.places import Place
    from ...rendering.answer_grammar import Grammar
    from ...rendering.renderer import Renderer
    from .grammar_guide import Guide, Guides

DEFAULT_CAPACITY = 4096
"""Upper limit of the default `capacity` (tokens per slot). It bounds the KV memory, which is slots x capacity."""


@dataclass(slots=True, eq=False)
class _Flight:
    """One request in flight."""

    generation: Generation
    landed: asyncio.Future[Finish]
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """Ranges of ids that were sampled with one version of the weights, as (version, start, end). Ids after the last
    range were sampled with the current version."""
    listener: Listener | None = None
    on_start: Callable[[], None] | None = None
    heard: int = 0
    """Number of ids that the request's listener has received."""

    def tell(self) -> None:
        """Send the listener the ids sampled since the last call."""
        ids = self.generation.ids
        if self.listener is not None and len(ids) > self.heard:
            start, self.heard = self.heard, len(ids)
            self.listener.tokens(ids[start:])

    def close_span(self, version: str) -> None:
        """Record that all ids after the last span were sampled with `version`."""
        start = self.spans[-1][2] if self.spans else 0
        if len(self.generation.ids) > start:
            self.spans.append((version, start, len(self.generation.ids)))


class EmbeddedEngine:
    """Samples from a transformers decoder with a slot KV cache.

    The engine copies `model`, or takes ownership of it with `copy=False`. Without a renderer, completions have ids but
    no text. Only `sync_weights` changes the weights. At most `slots` requests run at the same time; the others wait in
    order of arrival. A request has at most `capacity` tokens in prompt and completion together. KV memory is slots x
    capacity tokens, plus `park_tokens` tokens (default: slots x capacity) for conversations between two turns. At most
    `prefill_tokens` tokens are prefilled between two decoding steps. A completion ends at an id in `end_ids` (default:
    the end ids of renderer and model) or in the request's `stop_ids`. `autocast` is the dtype in which the model's body
    computes. It should equal the trainer's autocast, so that the sampled model is the trained one.
    """

    name = "embedded"

    @check_arguments
    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        renderer: Renderer | None,
        *,
        version: str,
        slots: int = 64,
        capacity: int | None = None,
        park_tokens: int | None = None,
        prefill_tokens: int = 2048,
        end_ids: Iterable[int] | None = None,
        copy: bool = True,
        autocast: torch.dtype | None = None,
    ) -> None:
        model = cast("PreTrainedModel", model)  # peft's model passes attributes on
        if capacity is None:
            text = model.config.get_text_config()
            longest: int = getattr(text, "max_position_embeddings", None) or DEFAULT_CAPACITY
            capacity = min(longest, DEFAULT_CAPACITY)
        self.version = version
        self.stats = Stats()
        own = renderer.end_ids if renderer is not None else ()
        self.end_ids = frozenset((*own, *eos_ids(model)) if end_ids is None else end_ids)
        self._renderer = renderer
        pictures = getattr(renderer, "pictures", None)
        vision = pictures if isinstance(pictures, Vision) else None
        model = copying.deepcopy(model) if copy else model
        self._decoder = SlotDecoder(model, slots, capacity, vision=vision, autocast=autocast)
        can: set[Capability] = {"stats", "weights", "score"}
        can |= {"pictures"} if vision is not None else set()
        can |= {"grammar"} if renderer is not None else set()
        self.can = frozenset(can)
        self._batch = Batch(self._decoder, slots * capacity if park_tokens is None else park_tokens, self.stats)
        self._prefill_tokens = prefill_tokens
        self._guides: Guides | None = None
        self._compiler = ThreadPoolExecutor(1, "tapereel grammars")
        self._waiting: deque[Generation] = deque()
        self._flights: dict[Generation, _Flight] = {}
        self._heard: set[_Flight] = set()
        """Requests in flight whose tokens a listener receives."""
        self._driver: asyncio.Task[None] | None = None
        self._drains: list[asyncio.Future[None]] = []
        self._versions = {version}
        self._frozen = False
        self._closed = False

    @property
    def renderer(self) -> Renderer | None:
        """The renderer given to the constructor."""
        return self._renderer

    @property
    def context(self) -> int:
        """Maximum number of tokens in prompt and completion together."""
        return self._decoder.capacity

    @property
    def changing(self) -> bool:
        """Whether a new request would wait, because a weight sync drains the batch or sampling is frozen."""
        return bool(self._drains) or self._frozen

    async def complete(self, request: Request) -> Completion:
        """Sample a completion. Requests start in order of arrival as slots become free.

        Raises `PromptTooLong`, or `EngineError` if the request is invalid or the model fails. A failed forward isn't
        retried here. The caller decides whether to retry. If the call is cancelled, `request.on_partial` gets the
        tokens sampled so far as a completion with finish `cancelled`."""
        self._check_loop()
        generation = self._generation(request)
        flight = _Flight(
            generation, asyncio.get_running_loop().create_future(), listener=request.listener, on_start=request.on_start
        )
        try:
            if generation.places:
                await self._process(generation, request)
            if request.grammar:
                # One at a time, so that large schemas don't occupy the threads that others need.
                work = partial(self._guide, request.grammar, generation.limit)
                generation.guide = await asyncio.get_running_loop().run_in_executor(self._compiler, work)
            self._check_loop()  # the engine may have been closed meanwhile
            self._flights[generation] = flight
            if request.listener is not None:
                self._heard.add(flight)
            self._waiting.append(generation)
            self._wake()
            return self._completion(flight, await flight.landed)
        except asyncio.CancelledError:
            self._withdraw(flight)
            if request.on_partial is not None:
                request.on_partial(self._completion(flight, "cancelled"))
            raise
        finally:
            self._heard.discard(flight)

    def _guide(self, grammar: Grammar, limit: int) -> Guide:
        """Return what keeps a completion within `grammar`. This blocks. Raises GrammarRefused."""
        from .grammar_guide import Guides

        if self._guides is None:
            assert self._renderer is not None
            self._guides = Guides(self._renderer, self._decoder.vocabulary, self.end_ids)
        return self._guides.guide(grammar, limit)

    async def score(
        self, ids: Sequence[int], places: Sequence[Place] = (), picture: Callable[[str], bytes] | None = None
    ) -> array[float]:
        """Return the log-prob of each of `ids[1:]` (see `CapableEngine.score`), from one plain forward with the current
        weights."""
        self._check_loop()
        prompt, shown = array("i", ids), tuple(places)
        request = Request(messages=(), prompt=prompt, places=shown, picture=picture, sampling=Sampling(), seed=0)
        generation = self._generation(request)  # checks the length
        if places:
            await self._process(generation, request)
        seen = self._batch.seen([generation], np.zeros(1, int), np.array([len(ids)]))
        return array("f", self._decoder.score(ids, seen).tolist())

    def forget(self, cache_key: str) -> None:
        """Drop the KV that is kept for the conversation `cache_key`. If one of its requests is in flight, the request's
        KV won't be kept either."""
        self._batch.parked.forget(cache_key)
        for generation in self._flights:
            if generation.key == cache_key:
                generation.key = ""

    async def sync_weights(
        self, state: Mapping[str, Tensor], version: str, mode: PublishMode = "reprefill", *, again: bool = False
    ) -> None:
        """Replace the weights with `state` between two decoding steps. Later tokens carry `version`.

        Raises ValueError if the version was published before. With `again`, it may be published a second time, and the
        caller guarantees that its weights are the same. Raises `UsageError`, and changes nothing, if `state` isn't a
        state dict for this model. `state` must not change until this method returns, so pass a copy if the weights are
        being trained. Parked KV is dropped, and each conversation computes it again at its next turn."""
        self._check_loop()
        if mode not in ("reprefill", "drain", "stale_kv"):
            raise ValueError(f"publish mode {mode!r}: must be reprefill, drain or stale_kv")
        if version in self._versions and not again:
            raise ValueError(f"version {version!r} was published before; a version names one set of weights for good")
        self._decoder.check(state)
        # The version is reserved before the wait, so that a second sync with this version fails even during the drain.
        # If this sync is cancelled during the drain, the version stays reserved and the weights are unchanged.
        self._versions.add(version)
        if mode == "drain":
            await self._drain()
        self._swap(state, version, mode)
        self._wake()

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise `UsageError` if `sync_weights` would refuse `state`."""
        self._decoder.check(state)

    def freeze(self) -> None:
        """Stop sampling until `thaw` is called. In the meantime, requests and `drain` weight syncs wait."""
        self._frozen = True

    def thaw(self) -> None:
        """Resume sampling."""
        self._frozen = False
        self._wake()

    def relabel(self, version: str) -> None:
        """Give the current weights the name `version`, which later tokens carry."""
        for flight in self._flights.values():
            flight.close_span(self.version)
        self._versions.add(version)
        self.version = version

    async def close(self) -> None:
        """Free the KV memory. Requests in flight end with finish `abort` and the tokens sampled so far."""
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
        """Return the `Generation` for a request. Raises `EngineError` with the reason if the engine can't serve the
        request."""
        one_temperature(request)
        sampling = request.sampling
        prompt = ints(request.prompt or ())
        if not prompt:
            raise EngineError(
                "a request without prompt ids: the embedded engine samples tokens after tokens, render "
                "the messages with its renderer first"
            )
        try:
            penalties = penalties_of(sampling.extra)
        except ValueError as error:
            raise EngineError(str(error)) from None
        if unknown := set(sampling.extra) - {"stop", *PENALTIES}:  # `LLM` cuts the text at a stop string
            raise EngineError(
                f"sampling options {sorted(unknown)} are unknown to the embedded engine; it has temperature, "
                f"max_tokens, top_p, top_k, min_tokens, ignore_eos and in `extra` {', '.join(PENALTIES)}"
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
        places, positions, vision = tuple(request.places), None, self._decoder.vision
        limit = min(sampling.max_tokens, self.context - len(prompt))
        if vision is not None:
            positions = vision.positions(places, len(prompt) + limit)
        if request.grammar and "grammar" not in self.can:
            raise EngineError("an engine without a renderer can't enforce a grammar: make it with one")
        stops = frozenset() if sampling.ignore_eos and not request.grammar else self.end_ids.union(request.stop_ids)
        return Generation(
            prompt=prompt,
            seed=as_seed(request.seed),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            penalties=penalties,
            stops=stops,
            barred=tuple(sorted(id for id in stops if 0 <= id < self._decoder.vocabulary)),
            key=request.cache_key,
            limit=limit,
            min_tokens=0 if request.grammar else sampling.barring,
            places=places,
            positions=positions,
        )

    async def _process(self, generation: Generation, request: Request) -> None:
        """In threads, process the pictures that the prefill will need. Raises EngineError if a picture can't be
        processed."""
        pictures, reused = self._batch.pictures, self._batch.shared(generation)[1]
        if pictures is None or request.picture is None:
            why = "the engine's model can't see" if pictures is None else "the request has no `picture` for its bytes"
            raise EngineError(f"the prompt shows the picture {generation.places[0].media[0]}, and {why}")
        for place in generation.places:
            again = partial(pictures.pixels, place, request.picture)
            generation.pixels[place.key] = again
            if place.offset >= reused and pictures.features.get(place.key) is None:
                try:
                    held = [await asyncio.to_thread(again)]
                except Exception as error:  # the file is bad or missing
                    raise EngineError(f"the picture {place.media[0]} can't be shown: {error}") from error
                # The pixels are held until the first prefill, even if the cache evicts them. If the prefill had to
                # process them again, it would block the event loop.
                generation.pixels[place.key] = lambda held=held, again=again: held.pop() if held else again()

    def _completion(self, flight: _Flight, finish: Finish) -> Completion:
        # If the request has left the batch, its spans are closed already, and this call changes nothing. Its tokens
        # keep their version even if a weight sync has happened since.
        flight.close_span(self.version)
        generation = flight.generation
        usage = Usage(
            prompt_tokens=len(generation.prompt),
            completion_tokens=len(generation.ids),
            cached_tokens=generation.reused or 0,
        )
        return Completion(
            text=self._renderer.decode(generation.ids) if self._renderer is not None else "",
            ids=generation.ids,
            logprobs=generation.logprobs,
            barred=generation.barred if generation.min_tokens else None,
            enforced=generation.guide is not None,
            spans=tuple(flight.spans),
            finish=finish,
            usage=usage,
        )

    def _withdraw(self, flight: _Flight) -> None:
        if self._flights.pop(flight.generation, None) is None:
            return  # the request has ended already, and left the batch
        flight.close_span(self.version)
        if flight.generation.slot >= 0:
            self._batch.leave(flight.generation)
        else:
            self._waiting.remove(flight.generation)
        # A drain may be waiting only for this request, and the driver, which usually ends drains, may not run again.
        self._drained()

    def _land(self, generation: Generation, finish: Finish) -> None:
        """End a request that has left the batch, so that `complete` returns its result."""
        flight = self._flights.pop(generation)
        flight.close_span(self.version)
        # The future is already done if its caller was cancelled in the same turn of the event loop.
        if not flight.landed.done():
            flight.landed.set_result(finish)

    def _fail(
        self,
        generation: Generation,
        reason: str,
        cause: BaseException | None = None,
        kind: type[EngineError] = EngineError,
    ) -> None:
        """End a request like `_land`, but with an error. Each request gets a new error object, because callers must not
        share one traceback."""
        flight = self._flights.pop(generation)
        flight.close_span(self.version)
        if not flight.landed.done():
            error = kind(reason)
            error.__cause__ = cause
            flight.landed.set_exception(error)

    def _land_all(self, reason: str = "", cause: BaseException | None = None) -> None:
        """End all requests in flight. They fail with `reason`, or end as `abort` if there is no reason."""
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
                raise EngineError("the engine runs in another event loop; share it within one loop only")
            # The callers and the driver ended with their event loop. Their state is dropped, because their requests
            # would otherwise occupy slots forever.
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
        """Return whether a generation may join. During a drain, only generations with sampled tokens may. An eviction
        may have put them into the queue, and the drain waits for them."""
        return not self._drains or bool(generation.ids)

    async def _drive(self) -> None:
        try:
            while self._runnable():
                started = time.perf_counter()
                self._admit()
                if self._batch.rows:
                    self._attempt(self._batch.rows, "decoding", self._batch.step)
                self._drained()
                # There is no await between the step and this loop. The listener therefore has all ids when complete()
                # returns.
                for flight in self._heard:
                    flight.tell()
                self.stats.busy_seconds += time.perf_counter() - started
                # This is the driver's only await. Only here, between two steps, can callers submit requests, cancel
                # them and sync weights.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._land_all()
            raise
        except Exception as error:
            self._land_all(f"the embedded engine failed: {type(error).__name__}: {error}", error)
        finally:
            self._driver = None

    def _admit(self) -> None:
        """Prefill waiting generations that may join, as many as free slots and `prefill_tokens` allow. A prefix that
        several of them share counts once.

        The first one joins even if its prompt exceeds `prefill_tokens`, since it would otherwise wait forever."""
        # Only the head of the queue is tested, because _swap puts generations with sampled tokens before all others.
        joiners: list[Generation] = []
        tokens = 0
        while self._waiting and len(joiners) < self._batch.room and self._may_join(self._waiting[0]):
            tokens += self._batch.missing(self._waiting[0], joiners)
            if joiners and tokens > self._prefill_tokens:
                break
            joiners.append(self._waiting.popleft())
            flight = self._flights[joiners[-1]]
            if flight.on_start is not None:
                flight.on_start()
        while joiners:
            groups, joiners = self._batch.plan(joiners)
            for group in groups:
                involved = [generation for family in group for generation in family]
                self._attempt(involved, "prefilling", partial(self._batch.join, group))

    def _attempt(self, involved: list[Generation], doing: str, work: Callable[[], list[Generation]]) -> None:
        """Run the forward `work`. If it raises, the generations in `involved` fail, and all others continue."""
        try:
            finished = work()
        except Exception as error:
            reason = f"the model failed while {doing} {len(involved)} sequences: {type(error).__name__}: {error}"
            # `involved` is copied, since it may be the batch's own list of rows, which leave() changes. No KV is
            # parked, because the failed forward may have written only part of it.
            for generation in list(involved):
                if generation.slot >= 0:
                    self._batch.leave(generation, park=False)
                self._fail(generation, reason, error)
            return
        for generation in finished:
            if generation.guide is not None and generation.guide.error:
                reason = f"the JSON schema is too complex to be followed ({generation.guide.error}); simplify it"
                self._fail(generation, reason, kind=GrammarRefused)
            elif generation.finish == "broken":
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
        """Let weight syncs in mode `drain` continue, if all generations with sampled tokens have ended."""
        if self._drains and not self._batch.rows and not any(s.ids for s in self._waiting):
            for drain in self._drains:
                if not drain.done():
                    drain.set_result(None)

    def _swap(self, state: Mapping[str, Tensor], version: str, mode: PublishMode) -> None:
        # This method must not await, because a decoding step between closing the spans and loading would label tokens
        # from the old weights with the new version. load() checks names and shapes before its first copy. If a device
        # error interrupts the copies, the weights are mixed and still have the old version, so the caller must stop
        # sampling.
        for flight in self._flights.values():
            flight.close_span(self.version)
        self._decoder.load(state)
        # Parked KV belongs to the old weights. If a turn reused this KV, its log-probs would belong to no version.
        self._batch.parked.clear()
        if self._batch.pictures is not None:
            self._batch.pictures.features.clear()
        if mode == "stale_kv":
            for generation in self._batch.rows:
                generation.clean = False
        else:
            # The generations go back to the head of the queue in slot order, before new requests, as _admit expects.
            # The new weights then prefill their prompts and completions.
            self._waiting.extendleft(reversed(self._batch.evict()))
        self.version = version
        self.stats.swaps += 1


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return all end-of-sequence ids in the model's configuration and in its generation configuration."""
    found: list[int] = []
    for config in (model.config.get_text_config(), model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        found.extend([eos] if isinstance(eos, int) else eos or ())
    return tuple(found)
