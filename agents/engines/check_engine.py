"""`check_engine` tests an engine against the interface in `engine.py` and reports what its author should fix.

The check sends a few short requests, one at a time and concurrently, and cancels one of them. It syncs weights if the
caller passes some, and then closes the engine. If the engine fails or hangs, the check reports this as a finding. The
check itself never hangs, and raises only UsageError for arguments that can't be used.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from ...envs.checks.findings import CheckReport, Finding, checked
from ...tapes.common.arguments import check_arguments
from ...tapes.errors import UsageError
from ...tapes.records import Message, Sampling
from .engine import TRAINING, Completion, Engine, Request, incomplete, undeclared

if TYPE_CHECKING:
    from torch import Tensor

CHECKS = {
    "members": "every member of `Engine`, and of each capability in `can`, is there",
    "completes": "complete answers a request",
    "tokens": "ids and log-probs have equal lengths, and max_tokens holds",
    "spans": "the spans cover all ids, in order",
    "determinism": "the same seed and prompt give the same tokens, alone and among other requests",
    "cancellation": "a cancelled request hands over its partial completion and ends",
    "weights": "tokens carry the new version after sync_weights",
    "close": "close works, and works twice",
}
"""The name of each check, and the fact that holds if the check passes. The checks run in this order."""
QUESTION: tuple[Message, ...] = ({"role": "user", "content": "Count from one to ten."},)
VERSION = "check_engine:1"
"""Version name with which the check syncs `weights`."""
TEXTS = "the engine gives texts without ids"
TURNS = 5
"""The check `cancellation` waits this number of event loop turns before it cancels its request. An engine in this
process has begun to work on the request by then."""


class EngineReport(CheckReport):
    """The result of `check_engine`."""

    engine: str
    """Name of the engine's class."""
    trainable: bool
    """Whether the engine can be used in training. If so, it declares the needed capabilities and has their members."""
    tokens: int
    """Number of tokens sampled by all requests of the check."""

    def __str__(self) -> str:
        kind = "can be trained" if self.trainable else "samples only"
        state = "ok" if self.ok else "NOT OK"
        return self.shown(f"{self.engine}: {state} ({kind}, {self.tokens} tokens, {self.seconds:.1f} s)", CHECKS)


@check_arguments
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
    """Test an engine and close it. `engine` may also be a class or (async) function without arguments that creates one.

    All requests continue the conversation in `messages`. `weights` is a state dict that is synced to the engine.
    Without it, no weight sync is tested. If `trainable` is true, the report names each capability of a
    `TrainableEngine` that this engine lacks. Each call may take `timeout` seconds. The check runs in its own thread and
    event loop, so it can be called from anywhere, but can't test an engine that already runs in another event loop.
    """
    if not 0 < timeout <= threading.TIMEOUT_MAX / 12 or max_tokens < 1:
        raise UsageError(f"timeout is {timeout} and max_tokens {max_tokens}; both must be above 0")
    check = _Check(engine, tuple(messages), weights, trainable, max_tokens, timeout, seed)
    started = time.perf_counter()
    # A daemon thread, because an engine call that blocks the event loop can't be interrupted and would otherwise keep
    # the process alive.
    thread = threading.Thread(target=lambda: asyncio.run(check.run()), name="check_engine", daemon=True)
    thread.start()
    thread.join(timeout * 12)
    if thread.is_alive():
        check.found(f"a call blocks the event loop for longer than {timeout:g} s: await what takes time")
        for name in list(CHECKS)[list(CHECKS).index(check.current) :]:
            check.skipped.setdefault(name, "a call never returned")
    return EngineReport(
        engine=check.name,
        ok=not any(finding.severity == "error" for finding in check.findings),
        trainable=check.can_train,
        checks=checked(CHECKS, check.findings, check.skipped),
        findings=tuple(check.findings),
        tokens=check.sampled,
        seconds=time.perf_counter() - started,
    )


class _Stop(Exception):
    """Raised for a fault that makes the later checks impossible."""


@dataclass
class _Check:
    """Runs the checks. Each check is a method `_NAME`. It records faults, or returns the reason why it was skipped."""

    made: Any
    messages: tuple[Message, ...]
    weights: Mapping[str, Tensor] | None
    trainable: bool
    max_tokens: int
    timeout: float
    seed: int
    findings: list[Finding] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    current: str = "members"
    calling: str = "making the engine"
    name: str = "engine"
    can_train: bool = False
    sampled: int = 0

    def found(self, sentence: str, *, warning: bool = False) -> None:
        severity = "warning" if warning else "error"
        self.findings.append(Finding(check=self.current, severity=severity, sentence=sentence))

    async def run(self) -> None:
        failed = None
        for self.current in CHECKS:
            if failed is not None and (self.current != "close" or failed == "members"):
                self.skipped[self.current] = f"the check `{failed}` failed"
                continue
            try:
                if reason := await getattr(self, f"_{self.current}")():
                    self.skipped[self.current] = reason
                continue
            except _Stop as stop:
                self.found(str(stop))
            except TimeoutError:
                self.found(f"{self.calling} takes longer than {self.timeout:g} s")
            except Exception as error:
                self.found(f"{self.calling} raised {_shown(error)}")
            failed = failed or self.current

    async def _call(self, what: str, call: Awaitable[Any]) -> Any:
        self.calling = what
        async with asyncio.timeout(self.timeout):
            return await call

    async def _ask(self, request: Request) -> Completion:
        completion = await self._call("complete", self.made.complete(request))
        if not isinstance(completion, Completion):
            raise _Stop(f"complete returned {completion!r:.80}, which is not a Completion")
        self.sampled += len(completion.ids or ())
        return completion

    async def _members(self) -> None:
        if isinstance(self.made, type) or (callable(self.made) and not hasattr(self.made, "complete")):
            made = self.made()
            self.made = await made if inspect.isawaitable(made) else made
        self.name = type(self.made).__name__
        for fault in incomplete(self.made):
            raise _Stop(f"the engine is incomplete: {fault}")
        engine = cast(Engine, self.made)
        self.can_train = not undeclared(engine, TRAINING)
        for fault in undeclared(engine, TRAINING if self.trainable else ()):
            self.found(f"the engine is incomplete: {fault}")

    async def _completes(self) -> None:
        renderer, sampling = self.made.renderer, Sampling(max_tokens=self.max_tokens)
        prompt = None if renderer is None else renderer.prompt(self.messages).ids
        self.request = Request(
            messages=self.messages, prompt=prompt, sampling=sampling, seed=self.seed, path="check", cache_key="a"
        )
        self.first = await self._ask(self.request)

    async def _tokens(self) -> str | None:
        ids, logprobs = self.first.ids, self.first.logprobs
        if ids is None:
            if self.first.text is None and not self.first.tool_calls:
                self.found("a completion has neither text nor ids: give one of them")
            if self.can_train and self.trainable:
                self.found("a completion has no ids, and only sampled ids can be trained on")
            return TEXTS
        if len(ids) > self.max_tokens:
            self.found(f"a completion has {len(ids)} ids, and max_tokens is {self.max_tokens}")
        if logprobs is None:
            self.found("ids come without log-probs: they can be imitated, not reinforced", warning=True)
        elif len(logprobs) != len(ids):
            self.found(f"{len(ids)} ids come with {len(logprobs)} log-probs: give one for each id")
        elif not all(math.isfinite(value) and value <= 1e-4 for value in logprobs):
            self.found("a log-prob is above 0 or not finite: give log softmax(logits / temperature)")
        return None

    async def _spans(self) -> str | None:
        ids, spans = self.first.ids, self.first.spans
        if ids is None:
            return TEXTS
        ends = [0, *(stop for _, _, stop in spans)]
        follow = [start for _, start, _ in spans] == ends[:-1] and ends[-1] == len(ids)
        if not follow or not all(version and start < stop for version, start, stop in spans):
            self.found(
                f"the spans {spans!r:.200} don't cover {len(ids)} ids: give (version, start, end), half-open, each "
                "beginning where the one before ends"
            )
        return None

    async def _determinism(self) -> str | None:
        again = await self._ask(self.request)
        others = [replace(self.request, seed=self.seed + k, cache_key=f"other {k}") for k in (1, 2)]
        among, *_ = await asyncio.gather(*map(self._ask, (self.request, *others)))
        if self.first.ids is None:
            return TEXTS
        for completion, when in ((again, "asked again"), (among, "asked among other requests")):
            if completion.ids != self.first.ids:
                self.found(
                    f"{when}, the same seed gave {list(completion.ids or ())[:8]} instead of "
                    f"{list(self.first.ids)[:8]}: draw each token from the request's seed and the token's position "
                    "alone",
                    # Only a warning: a server's result may depend on its batch, and replay uses the recorded tokens.
                    warning=True,
                )
        return None

    async def _cancellation(self) -> str | None:
        partial: list[Completion] = []
        long = self.request.sampling.model_copy(update={"max_tokens": 256})
        request = replace(self.request, sampling=long, on_partial=partial.append, cache_key="cancelled")
        asking = asyncio.ensure_future(self.made.complete(request))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if asking.done():
            if not asking.cancelled():
                asking.exception()  # marks the exception as retrieved; the other checks report such an error
            return "complete never waits, so that nothing can be cancelled"
        asking.cancel()
        await asyncio.wait({asking}, timeout=self.timeout)
        if not asking.done():
            raise _Stop(f"a cancelled complete ran for {self.timeout:g} s more: let CancelledError through")
        if not asking.cancelled():
            error = asking.exception()
            what = "returned a completion" if error is None else f"raised {_shown(error)}"
            self.found(f"a cancelled complete {what}: raise CancelledError")
        elif len(partial) > 1:
            self.found(f"on_partial was called {len(partial)} times: call it once")
        elif not partial:
            missing = "the tokens sampled until the cancellation are missing on the tape"
            self.found(f"on_partial was not called: {missing}", warning=True)
        elif partial[0].finish != "cancelled":
            self.found(f"the partial completion has finish={partial[0].finish!r}: set `cancelled`")
        return None

    async def _weights(self) -> str | None:
        if not self.can_train:
            return "the engine takes no weights"
        if self.weights is None:
            return "no weights were passed (`weights=state_dict`)"
        await self._call("sync_weights", self.made.sync_weights(self.weights, VERSION))
        if self.made.version != VERSION:
            self.found(f"version is {self.made.version!r} after sync_weights(state, {VERSION!r})")
        if wrong := {version for version, _, _ in (await self._ask(self.request)).spans} - {VERSION}:
            self.found(f"tokens sampled after sync_weights carry {sorted(wrong)}, not {VERSION!r}")
        if self.made.changing:
            self.found("changing is true although no sync_weights is in progress")
        return None

    async def _close(self) -> None:
        self.calling = "forget"
        self.made.forget("a")
        await self._call("close", self.made.close())
        await self._call("a second close", self.made.close())


def _shown(error: BaseException) -> str:
    return f"{type(error).__qualname__}: {str(error)[:200]}"
