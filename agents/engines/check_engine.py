"""check_engine: tests an engine against the protocols of `engine.py` and reports what its author should fix.

It sends a few short requests, alone and at once, cancels one, replaces the weights where it may, and closes the engine.
Failures of the engine are reported as findings; they never raise and never hang the caller.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from ...envs.checks.findings import CheckReport, Finding, checked
from ...tapes.records import Message, Sampling
from .engine import Completion, Engine, Request, TrainableEngine, missing_members

if TYPE_CHECKING:
    from torch import Tensor

CHECKS = {
    "members": "every member of the protocol is there",
    "completes": "complete answers a request",
    "tokens": "ids and log-probs have equal lengths, and max_tokens holds",
    "spans": "the spans cover all ids, in order",
    "determinism": "the same seed and prompt give the same tokens, alone and among other requests",
    "cancellation": "a cancelled request hands over its partial completion and ends",
    "weights": "tokens carry the new version after sync_weights",
    "close": "close works, and works twice",
}
"""Check -> what holds when it is ok."""
QUESTION: tuple[Message, ...] = ({"role": "user", "content": "Count from one to ten."},)
VERSION = "check_engine:1"
"""The version under which `weights` are synced."""
TURNS = 5
"""Turns of the event loop that a request gets before it is cancelled: enough to reach an engine in this process."""


class EngineReport(CheckReport):
    """The result of `check_engine`."""

    engine: str
    """Class name."""
    trainable: bool
    """It has all members of `TrainableEngine`."""
    tokens: int
    """Sampled by all requests of the check."""

    def __str__(self) -> str:
        kind = "can be trained" if self.trainable else "samples only"
        state = "ok" if self.ok else "NOT OK"
        return self.shown(f"{self.engine}: {state} ({kind}, {self.tokens} tokens, {self.seconds:.1f} s)", CHECKS)


def check_engine(
    engine: Engine | Callable[..., object],
    *,
    messages: Sequence[Message] = QUESTION,
    weights: Mapping[str, Tensor] | None = None,
    trainable: bool = False,
    max_tokens: int = 16,
    timeout: float = 60.0,
    seed: int = 0,
) -> EngineReport:
    """Test an engine, or the one that a class or (async) function without arguments makes. The engine is closed.

    messages: the conversation that all requests continue. weights: a state dict to sync; None skips that check.
    trainable: report members of `TrainableEngine` that are missing. timeout: seconds that each call may take. Runs in
    an event loop of its own in a thread, so it can be called from anywhere; an engine that works in another event loop
    already can't be tested.
    """
    check = _Check(messages, weights, trainable, max_tokens, timeout, seed)
    started = time.perf_counter()
    # A daemon thread: a call that blocks the event loop can't be interrupted, and must not keep the process alive.
    thread = threading.Thread(target=lambda: asyncio.run(check.run(engine)), name="check_engine", daemon=True)
    thread.start()
    thread.join(timeout * 12)
    if thread.is_alive():
        check.found(check.current, f"a call blocks the event loop for longer than {timeout:g} s: await what takes time")
        check.skip("a call never returned")
    return check.report(time.perf_counter() - started)


class _Failed(Exception):
    """A finding makes the later checks impossible."""


@dataclass
class _Check:
    messages: Sequence[Message]
    weights: Mapping[str, Tensor] | None
    trainable: bool
    max_tokens: int
    timeout: float
    seed: int
    findings: list[Finding] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    current: str = "members"
    name: str = "engine"
    can_train: bool = False
    sampled: int = 0

    def found(self, check: str, sentence: str, *, warning: bool = False) -> None:
        severity = "warning" if warning else "error"
        finding = Finding(check=check, severity=severity, sentence=sentence)
        if finding not in self.findings:
            self.findings.append(finding)

    def skip(self, reason: str, *names: str) -> None:
        """Mark checks as skipped that have no result yet; without names, all of them."""
        for name in names or CHECKS:
            if name not in self.passed:
                self.skipped.setdefault(name, reason)

    async def run(self, made: Any) -> None:
        try:
            engine = await self._made(made)
            await self._requests(engine)
        except _Failed:
            self.skip(f"the check `{self.current}` failed")

    async def _made(self, made: Any) -> Engine:
        if isinstance(made, type) or (callable(made) and not hasattr(made, "complete")):
            try:
                made = made()
                made = await made if inspect.isawaitable(made) else made
            except Exception as error:
                self.found("members", f"making the engine raised {_shown(error)}")
                raise _Failed from error
        self.name = type(made).__name__
        self.can_train = not missing_members(made, TrainableEngine)
        missing = missing_members(made, TrainableEngine if self.trainable else Engine)
        if missing:
            what = "TrainableEngine" if self.trainable else "Engine"
            self.found("members", f"the engine lacks {', '.join(missing)} of `{what}`: define them")
        if missing_members(made):
            raise _Failed
        self.passed.add("members")
        return cast(Engine, made)

    async def _requests(self, engine: Engine) -> None:
        try:
            self.current = "completes"
            request = self._request(engine)
            first = await self._complete(engine, request)
            self.passed.add("completes")
            self._check_tokens(first)
            await self._check_determinism(engine, request, first)
            await self._check_cancellation(engine, request)
            await self._check_weights(engine, request)
        finally:
            await self._check_close(engine)

    def _request(self, engine: Engine) -> Request:
        sampling = Sampling(max_tokens=self.max_tokens)
        prompt: array[int] | None = None
        if engine.renderer is not None:
            prompt = engine.renderer.prompt(tuple(self.messages)).ids
        return Request(
            messages=tuple(self.messages), prompt=prompt, sampling=sampling, seed=self.seed, path="check", cache_key="a"
        )

    async def _bounded(self, what: str, call: Awaitable[Any]) -> Any:
        """The result of a call. A call that raises or takes too long is a finding of the current check."""
        try:
            async with asyncio.timeout(self.timeout):
                return await call
        except TimeoutError as error:
            self.found(self.current, f"{what} takes longer than {self.timeout:g} s")
            raise _Failed from error
        except Exception as error:
            self.found(self.current, f"{what} raised {_shown(error)}")
            raise _Failed from error

    async def _complete(self, engine: Engine, request: Request) -> Completion:
        completion = await self._bounded("complete", engine.complete(request))
        if not isinstance(completion, Completion):
            self.found(self.current, f"complete returned {completion!r:.80}, which is not a Completion")
            raise _Failed
        self.sampled += len(completion.ids or ())
        return completion

    def _check_tokens(self, completion: Completion) -> None:
        ids, logprobs = completion.ids, completion.logprobs
        if ids is None:
            if completion.text is None and not completion.tool_calls:
                self.found("tokens", "a completion has neither text nor ids: give one of them")
            if self.can_train and self.trainable:
                self.found("tokens", "a completion has no ids, and only sampled ids can be trained on")
            self.skip("the engine gives texts without ids", "tokens", "spans")
            return
        if len(ids) > self.max_tokens:
            self.found("tokens", f"a completion has {len(ids)} ids, and max_tokens is {self.max_tokens}")
        if logprobs is None:
            self.found("tokens", "ids come without log-probs: they can be imitated, not reinforced", warning=True)
        elif len(logprobs) != len(ids):
            self.found("tokens", f"{len(ids)} ids come with {len(logprobs)} log-probs: give one for each id")
        elif not all(math.isfinite(value) and value <= 1e-4 for value in logprobs):
            self.found("tokens", "a log-prob is above 0 or not finite: give log softmax(logits / temperature)")
        end = 0
        for version, start, stop in completion.spans:
            if not version or start != end or stop <= start:
                break
            end = stop
        if end != len(ids):
            self.found(
                "spans",
                f"the spans {completion.spans!r:.200} don't cover {len(ids)} ids: give (version, start, end), "
                "half-open, each beginning where the one before ends",
            )

    async def _check_determinism(self, engine: Engine, request: Request, first: Completion) -> None:
        self.current = "determinism"
        again = await self._complete(engine, request)
        others = [replace(request, seed=self.seed + k, cache_key=f"other {k}") for k in (1, 2)]
        among = (await asyncio.gather(*(self._complete(engine, one) for one in (request, *others))))[0]
        if first.ids is None:
            self.skip("the engine gives texts without ids", "determinism")
            return
        for completion, when in ((again, "asked again"), (among, "asked among other requests")):
            if completion.ids != first.ids:
                self.found(
                    "determinism",
                    f"{when}, the same seed gave {list(completion.ids or ())[:8]} instead of {list(first.ids)[:8]}: "
                    "draw each token from the request's seed and the token's position alone",
                    # A server's kernels may depend on the batch: recorded runs still replay from their tapes.
                    warning=True,
                )

    async def _check_cancellation(self, engine: Engine, request: Request) -> None:
        self.current = "cancellation"
        partial: list[Completion] = []
        long = request.sampling.model_copy(update={"max_tokens": 256})
        asking = asyncio.ensure_future(
            engine.complete(replace(request, sampling=long, on_partial=partial.append, cache_key="cancelled"))
        )
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if asking.done():
            if not asking.cancelled():
                asking.exception()  # retrieved: an error here shows in the other checks
            self.skip("complete never waits, so that nothing can be cancelled", "cancellation")
            return
        asking.cancel()
        await asyncio.wait({asking}, timeout=self.timeout)
        if not asking.done():
            self.found(
                "cancellation", f"a cancelled complete ran for {self.timeout:g} s more: let CancelledError through"
            )
            raise _Failed
        if not asking.cancelled():
            error = asking.exception()
            what = "returned a completion" if error is None else f"raised {_shown(error)}"
            self.found("cancellation", f"a cancelled complete {what}: raise CancelledError")
        elif len(partial) > 1:
            self.found("cancellation", f"on_partial was called {len(partial)} times: call it once")
        elif not partial:
            self.found(
                "cancellation",
                "on_partial was not called: the tokens sampled until the cancellation are missing on the tape",
                warning=True,
            )
        elif partial[0].finish != "cancelled":
            self.found("cancellation", f"the partial completion has finish={partial[0].finish!r}: set `cancelled`")

    async def _check_weights(self, engine: Engine, request: Request) -> None:
        self.current = "weights"
        if missing_members(engine, TrainableEngine) or not isinstance(engine, TrainableEngine):
            return self.skip("the engine takes no weights", "weights")
        if self.weights is None:
            return self.skip("no weights were passed (`weights=state_dict`)", "weights")
        await self._bounded("sync_weights", engine.sync_weights(self.weights, VERSION))
        if engine.version != VERSION:
            self.found("weights", f"version is {engine.version!r} after sync_weights(state, {VERSION!r})")
        completion = await self._complete(engine, request)
        wrong = {version for version, _, _ in completion.spans} - {VERSION}
        if wrong:
            self.found("weights", f"tokens sampled after sync_weights carry {sorted(wrong)}, not {VERSION!r}")
        if engine.changing:
            self.found("weights", "changing is true although no sync_weights is in progress")
        return None

    async def _check_close(self, engine: Engine) -> None:
        failed, self.current = self.current, "close"
        try:
            engine.forget("a")
            await self._bounded("close", engine.close())
            await self._bounded("a second close", engine.close())
            self.passed.add("close")
        except _Failed:
            pass
        finally:
            self.current = failed

    def report(self, seconds: float) -> EngineReport:
        """The report of what was found so far."""
        return EngineReport(
            engine=self.name,
            ok=not any(finding.severity == "error" for finding in self.findings),
            trainable=self.can_train,
            checks=checked(CHECKS, self.findings, self.skipped),
            findings=tuple(self.findings),
            tokens=self.sampled,
            seconds=seconds,
        )


def _shown(error: BaseException) -> str:
    return f"{type(error).__qualname__}: {str(error)[:200]}"
