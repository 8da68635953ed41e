"""Hosted models, of any provider that litellm knows: messages in, text and function calls out.

Contract. A completion is what the provider answered, with its tokens and its price in dollars as far as they are known,
or an `EngineError`; nothing hangs past its timeout. Every try is on record with what went wrong: rate limits (a wait
that the provider asks for holds back all requests of the engine), timeouts, answers that are none, a spent budget. No
key is part of any message.

The texts are no RL data: no provider tells the ids that were sampled and how likely each was. They can be replayed,
audited, scored and imitated. litellm's own retries are off, so that each request is one that is recorded. Knows nothing
of tapes; what a model thinks before it answers is not kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....tapes.common.redact import guard_log, holds_secret, names_secret, without_secrets
from ....tapes.errors import MissingExtra
from ....tapes.records import Attempt, Message, Usage
from ..engine import Completion, EngineError, Finish, PromptTooLong, Request, error_text, one_temperature
from ..transport.proxies import ask_directly
from ..transport.retry_after import retry_after

TRIED_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""HTTP statuses after which the same request may succeed."""
SLOWEST = 30.0
"""Seconds of the longest wait between two tries that no provider asked for."""
SETTLING = 5.0
"""Seconds that litellm may take to end what it began."""
OURS = frozenset(
    {
        "model",
        "messages",
        "tools",
        "api_base",
        "base_url",
        "timeout",
        "stream",
        "n",
        "mock_response",
        "max_retries",
        "num_retries",
        "drop_params",
        "client",
        "extra_headers",
        "headers",
    }
)
"""Arguments of litellm that the engine itself sets, or that would change what is recorded."""
_LASTS = re.compile(r"quota|missing \w*credentials|missing (\w+ )?api key", re.IGNORECASE)
"""In the words of errors that litellm gives the status of a passing one: no waiting mends them."""


class HostedFailed(EngineError):
    """The provider couldn't be reached, broke off, took too long or said no, as often as it was asked."""

    def __init__(self, message: str, *, retry: bool = False, after: float | None = None) -> None:
        super().__init__(message, retry=retry)
        self.after = after
        """Seconds after which the provider wants to be asked again; None where it doesn't say."""


class BudgetSpent(EngineError):
    """The engine has spent what it may; nothing more is asked."""


@dataclass(slots=True)
class HostedStats:
    """Sums since the engine was made."""

    requests: int = 0
    """Sent, those that failed included."""
    answers: int = 0
    tokens: int = 0
    """Of the answers, as far as the provider counts them."""
    spent: float = 0.0
    """US dollars of the answers whose price is known."""
    limited: int = 0
    """Requests that a rate limit refused."""
    busy_seconds: float = 0.0
    """Wall time in which at least one request was under way."""


class LiteLLMEngine:
    """`LiteLLMEngine("openai/gpt-4o-mini")`: the model by litellm's name for it."""

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        key_variable: str | None = None,
        seconds: float = 120.0,
        retries: int = 5,
        patience: float = 300.0,
        backoff: float = 0.5,
        budget: float | None = None,
        prices: tuple[float, float] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`key_variable` names the environment variable with the key (default: the provider's own, as litellm finds
        it). Each request is bounded by `seconds`, the tries of one completion by `retries` and `patience` seconds.
        `budget` is in US dollars; `prices` are dollars for a million prompt and completion tokens, for a model whose
        prices litellm doesn't know. `options` go to litellm with each request."""
        if base_url is not None and holds_secret(base_url):
            raise ValueError(
                f"base_url {without_secrets(base_url)!r} holds a user, a password or a key, which would "
                "be recorded with it; give the key by its variable: key_variable="
            )
        refused = sorted(name for name in options or () if name in OURS or names_secret(name))
        if refused:
            raise ValueError(
                f"options {', '.join(refused)}: the engine sets these itself; a key is given by the name "
                "of its environment variable, key_variable="
            )
        self.name = f"litellm:{model}"
        self.stats = HostedStats()
        self._litellm = _import()
        if base_url is not None:
            ask_directly(base_url)
        self._model, self._base_url, self._key_variable = model, base_url, key_variable
        self._seconds, self._retries, self._patience, self._backoff = seconds, retries, patience, backoff
        self._budget, self._prices, self._options = budget, prices, dict(options or {})
        if budget is not None and prices is None and not self._priced():
            raise ValueError(
                f"a budget of {budget} dollars can't be kept: litellm knows no prices of {model!r}; give "
                "them, in dollars for a million prompt and completion tokens: prices=(0.5, 1.5)"
            )
        self._held = 0.0
        """Nothing is sent before that time (monotonic)."""
        self._under_way = 0
        self._since = 0.0
        self._closed = False
        _Clients.opened += 1

    @property
    def renderer(self) -> None:
        """None: texts only."""
        return None

    @property
    def context(self) -> None:
        """None: the provider says when a prompt is too long."""
        return None

    async def complete(self, request: Request) -> Completion:
        """Ask, and ask again where that may help. Raises `PromptTooLong`, `BudgetSpent` or `HostedFailed`, which hold
        every try."""
        body = self._body(request)
        attempts: list[Attempt] = []
        deadline = time.monotonic() + self._patience
        while True:
            started = time.perf_counter()
            found = await self._try(body, deadline)
            seconds = time.perf_counter() - started
            if isinstance(found, Completion):
                return replace(found, attempts=(*attempts, Attempt(seconds=seconds)))
            attempts.append(Attempt(seconds=seconds, error=error_text(found)))
            wait = self._wait(found, len(attempts))
            if not found.retry or len(attempts) > self._retries or time.monotonic() + wait > deadline:
                found.attempts, found.retry = tuple(attempts), False
                raise found
            await asyncio.sleep(wait)

    def forget(self, cache_key: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Close litellm's connections, where no other engine uses them."""
        if not self._closed:
            self._closed = True
            await _settled()
            await _Clients.close(self._litellm)

    # Inside

    def _body(self, request: Request) -> dict[str, Any]:
        supported = self._litellm.get_supported_openai_params(self._model) or ()
        body = parameters(request, seed="seed" in supported)
        key = os.environ.get(self._key_variable) if self._key_variable is not None else None
        if self._key_variable is not None and not key:
            raise HostedFailed(f"{self.name}: the environment variable {self._key_variable} (API key) is not set")
        if key is not None:
            body["api_key"] = key
        if self._base_url is not None:
            body["api_base"] = self._base_url
        return {
            **self._options,
            **body,
            "model": self._model,
            "timeout": self._seconds,
            "max_retries": 0,
            "num_retries": 0,
            "drop_params": False,
        }

    async def _try(self, body: dict[str, Any], deadline: float) -> Completion | EngineError:
        """One request, or why there is no answer: not raised, so that no traceback leads back to a key."""
        if self._budget is not None and self.stats.spent >= self._budget:
            return BudgetSpent(f"{self.name}: {self.stats.spent:.4f} dollars are spent, the budget is {self._budget}")
        while (left := self._held - time.monotonic()) > 0:
            if self._held > deadline:
                return HostedFailed(
                    f"{self.name}: its rate limit holds for {left:.1f} s more, which is beyond the "
                    f"engine's patience of {self._patience:g} s"
                )
            await asyncio.sleep(left)
        self._begin()
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self._litellm.acompletion(**body)
            return self._read(answer)
        except TimeoutError:
            return HostedFailed(f"{self.name}: no answer within {self._seconds:g} s", retry=True)
        except EngineError as error:
            return error
        except Exception as error:  # whatever litellm and its providers raise
            return self._typed(error, body.get("api_key"))
        finally:
            self._end()

    def _typed(self, error: Exception, key: str | None) -> EngineError:
        status = getattr(error, "status_code", None)
        text = without_secrets(str(error), [key] if key else ())
        message = f"{self.name}: {text if len(text) <= 600 else f'{text[:600]} ...'}"
        if isinstance(error, self._litellm.ContextWindowExceededError):
            return PromptTooLong(message)
        self.stats.limited += status == 429
        lasts = _LASTS.search(text) is not None
        return HostedFailed(message, retry=status in TRIED_AGAIN and not lasts, after=_asked_for(error))

    def _wait(self, error: EngineError, tries: int) -> float:
        after = error.after if isinstance(error, HostedFailed) else None
        if after is not None:
            self._held = max(self._held, time.monotonic() + after)
            return after
        return min(self._backoff * 2 ** (tries - 1), SLOWEST) * random.uniform(0.5, 1.5)

    def _read(self, answer: Any) -> Completion:
        choice = answer.choices[0]
        text, calls = choice.message.content, _tool_calls(choice.message)
        if choice.finish_reason == "content_filter" and not text and not calls:
            raise HostedFailed(f"{self.name}: the provider's content filter withheld the answer")
        usage = _usage(answer, self._prices)
        self.stats.answers += 1
        self.stats.tokens += usage.completion_tokens or 0
        self.stats.spent += usage.cost or 0.0
        return Completion(
            text=text or "", finish=_FINISH.get(choice.finish_reason, "abort"), tool_calls=calls or None, usage=usage
        )

    def _priced(self) -> bool:
        try:
            info = self._litellm.get_model_info(self._model)
        except Exception:  # it raises plain ones for a model that it doesn't know
            return False
        return bool(info.get("input_cost_per_token") or info.get("output_cost_per_token"))

    def _begin(self) -> None:
        self.stats.requests += 1
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1

    def _end(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self.stats.busy_seconds += time.perf_counter() - self._since


async def _settled() -> None:
    """Let litellm end what it does behind an answer, or the event loop ends with coroutines that nobody awaited."""
    with contextlib.suppress(ImportError):
        from litellm.litellm_core_utils import logging_worker

        await asyncio.sleep(0)  # what was begun tells the worker of it first
        logging_worker.GLOBAL_LOGGING_WORKER.start()  # in this event loop
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLING):
                await logging_worker.GLOBAL_LOGGING_WORKER.flush()


class _Clients:
    """litellm keeps one set of connections for the whole process; the last engine closes it."""

    opened = 0

    @classmethod
    async def close(cls, litellm: Any) -> None:
        cls.opened -= 1
        if cls.opened <= 0:
            await litellm.close_litellm_async_clients()
            # A closed client would be found again by the next event loop.
            litellm.in_memory_llm_clients_cache.flush_cache()


def parameters(request: Request, *, seed: bool = True) -> dict[str, Any]:
    """The request in litellm's words, which are those of OpenAI's chat completions. Filters that are off are left out,
    since many models refuse to be told; `seed` is False for a provider that takes none."""
    one_temperature(request)
    sampling = request.sampling
    refused = sorted(name for name in sampling.extra if name in OURS or names_secret(name))
    if refused:
        raise EngineError(f"sampling options {', '.join(refused)} are the engine's own to set")
    body: dict[str, Any] = {
        "messages": _messages(request.messages),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        **sampling.extra,
    }
    if sampling.top_p != 1.0:
        body["top_p"] = sampling.top_p
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if seed:
        body["seed"] = request.seed
    if request.tools:
        body["tools"] = list(request.tools)
    return body


def _messages(messages: Sequence[Message]) -> list[Message]:
    """As providers take them: arguments of function calls are JSON text."""
    return [
        {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function.get("arguments"), str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments", {}))}}


def _tool_calls(message: Any) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in message.tool_calls or ()
    )


def _usage(answer: Any, prices: tuple[float, float] | None) -> Usage:
    """None for what the provider didn't say: litellm fills in 0, and no prompt has no tokens."""
    usage = getattr(answer, "usage", None)
    if usage is None or not usage.prompt_tokens:
        return Usage()
    details = getattr(usage, "prompt_tokens_details", None)
    if prices is not None:
        cost = (usage.prompt_tokens * prices[0] + usage.completion_tokens * prices[1]) / 1e6
    else:
        cost = getattr(answer, "_hidden_params", {}).get("response_cost") or None
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=getattr(details, "cached_tokens", None),
        cost=cost,
    )


_FINISH: dict[Any, Finish] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}


def _asked_for(error: Exception) -> float | None:
    """Seconds of a `Retry-After` header."""
    response = getattr(error, "response", None)
    headers = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", {})
    return retry_after(headers.get("retry-after"))


def _import() -> Any:
    # Else the import fetches a price list from the network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        import litellm
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "litellm", "litellm", "a hosted model") from error
    litellm.suppress_debug_info = True  # it prints where to report its bugs
    litellm.telemetry = False
    for name in ("LiteLLM", "openai._base_client"):
        guard_log(name)  # at the level of debugging, they tell all
    return litellm
