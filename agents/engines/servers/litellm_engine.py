"""Samples from hosted models at any provider that litellm supports. Messages go in, text and function calls come out.

Contract. `complete` returns the provider's answer, with token counts and cost (US dollars) if they are known, or raises
`EngineError`. No request outlives its timeout. While the provider answers no requests, all requests wait
(`transport/absence.py`). Every attempt is recorded with its error, such as a rate limit, a timeout or an invalid
answer. A `Retry-After` from the provider delays all of the engine's requests. No error message contains the API key.

The answers can't be used for RL training, because providers don't return the sampled ids and their log-probs. They can
be replayed, audited, scored and used for imitation learning. Only this engine retries requests. litellm's own retries
are off, because a single recorded attempt could otherwise be several requests. Reasoning text that precedes an answer
is discarded.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....tapes.common.access_token import token_for
from ....tapes.common.redact import guard_log, names_secret, refuse_secret, without_secrets
from ....tapes.errors import BadPicture, MissingExtra, NotATape
from ....tapes.messages import frames_of, image_parts, visual_parts
from ....tapes.records import Attempt, Message, Usage
from ....tapes.steps import content_parts
from ..engine import (
    Capability,
    Completion,
    EngineError,
    EngineStopped,
    Finish,
    PromptTooLong,
    Request,
    error_text,
    one_temperature,
)
from ..transport.absence import Absence, Tries, stop_reason
from ..transport.proxies import ask_directly
from ..transport.wire import Json, openai_messages, retry_after, with_results

TRIED_AGAIN = (409, 425, 500)
"""HTTP statuses for which a retry may succeed. A faulty request can cause them too, and then a retry won't help."""
AWAY = (429, 502, 503, 504, 529)
"""HTTP statuses that a provider sends while it can't answer any request."""
SLOWEST = 30.0
"""Longest wait, in seconds, that exponential backoff reaches, before jitter. A `Retry-After` may be longer."""
SETTLING = 5.0
"""Seconds to wait for litellm's background tasks when the engine closes."""
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
"""litellm's arguments that callers must not set, either because the engine sets them or because they would change what
is recorded."""
_NO_KEY = re.compile(r"missing \w*credentials|missing (\w+ )?api key", re.IGNORECASE)
"""Matches messages about a missing API key. litellm raises them with status 500."""
_NO_PROVIDER = "LLM Provider NOT provided"
"""litellm's message, with status 400, if it doesn't know the provider of the named model."""


NEVER_RAN = r"coroutine '.*completion' was never awaited"
"""Matches Python's warning about a request that was cancelled before litellm sent it."""


class HostedFailed(EngineError):
    """The provider is unreachable, closed the connection, exceeded the timeout or returned an error. `complete` raises
    this error after the last attempt."""

    def __init__(
        self, message: str, *, retry: bool = False, after: float | None = None, away: bool | None = False
    ) -> None:
        super().__init__(message, retry=retry)
        self.after = after
        """Seconds to wait before a retry, as given by the `Retry-After` header, or None without this header."""
        self.away = away
        """True if the provider can't answer any request at the moment, and False if it answers others. None if it is
        unknown, because the provider may only be slow with this request."""


@dataclass(slots=True)
class HostedStats:
    """Totals since the engine was created."""

    requests: int = 0
    """Requests sent, including failed ones."""
    spent: float = 0.0
    """Total cost in US dollars of all answers whose cost is known."""
    limited: int = 0
    """Requests refused by a rate limit (status 429)."""
    busy_seconds: float = 0.0
    """Wall time in seconds during which at least one request was in flight."""


class LiteLLMEngine:
    """Samples from a hosted model, which is named as in litellm: `LiteLLMEngine("openai/gpt-4o-mini")`."""

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
        options: Mapping[str, object] | None = None,
    ) -> None:
        """`key_variable` names the environment variable that holds the API key. By default, litellm reads the
        provider's usual variable. `seconds` is the timeout for one request. A failed request is retried at most
        `retries` times. If the provider is answering no requests at all, the request is instead repeated for up to
        `patience` seconds. `backoff` is the first wait between two attempts, in seconds. Each further wait doubles.

        `budget` is in US dollars. `prices` are US dollars per million prompt tokens and per million completion tokens,
        for models whose prices litellm doesn't know. `options` are passed to litellm with each request. Raises
        ValueError if `options` has an argument that only the engine may set, if `base_url` contains a secret, or if
        `budget` is set and the prices are unknown."""
        refuse_secret(base_url or "", "base_url")
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
        self._seconds, self._retries = seconds, retries
        self.absence = Absence(patience, backoff=backoff, longest=SLOWEST)
        self._budget, self._prices, self._options = budget, prices, dict(options or {})
        if budget is not None and prices is None and not self._priced():
            raise ValueError(
                f"a budget of {budget} dollars can't be kept: litellm knows no prices of {model!r}; give "
                "them, in dollars for a million prompt and completion tokens: prices=(0.5, 1.5)"
            )
        self._held = 0.0
        """No request is sent before `time.monotonic()` reaches this value. It applies to all of the engine's requests,
        because a rate limit that refused one of them would refuse the others too."""
        self._under_way = 0
        """Number of requests in flight."""
        self._since = 0.0
        """`time.perf_counter()` when the current busy period began."""
        self._closed = False
        _Clients.opened += 1

    @property
    def can(self) -> frozenset[Capability]:
        """The engine's capabilities. Pictures are sent as data URLs. If the model can't read pictures, the provider
        rejects the request."""
        return frozenset({"pictures", "stats", "absence"})

    @property
    def renderer(self) -> None:
        """Always None, because this engine returns text only."""
        return None

    @property
    def context(self) -> None:
        """Always None, because the limit isn't known. The provider rejects prompts that are too long."""
        return None

    async def complete(self, request: Request) -> Completion:
        """Request one completion, and retry after errors for which a retry may help. Raises `PromptTooLong`,
        `EngineStopped` or `HostedFailed`. The error's `attempts` lists all attempts."""
        request = replace(request, messages=with_results(request.messages))
        body = self._body(await _with_pictures(request))
        attempts: list[Attempt] = []
        retries = 0
        with self.absence.request() as tries:
            while True:
                started = time.perf_counter()
                found = await self._try(body)
                seconds = time.perf_counter() - started
                if isinstance(found, Completion):
                    tries.answered()
                    return replace(found, attempts=(*attempts, Attempt(seconds=seconds)))
                attempts.append(Attempt(seconds=seconds, error=error_text(found)))
                try:
                    retries = await self._wait(found, tries, retries)
                except EngineError as error:
                    # `retry` becomes False, because this engine has retried already, and the agent's model interface
                    # must not multiply the retries.
                    error.attempts, error.retry = tuple(attempts), False
                    raise

    def forget(self, cache_key: str) -> None:
        """Do nothing, because the engine keeps no cache."""

    async def close(self) -> None:
        """Close litellm's connections if no other engine in this process is open. A second call does nothing."""
        if not self._closed:
            self._closed = True
            await _settled()
            await _Clients.close(self._litellm)

    # Inside

    def _body(self, request: Request) -> dict[str, Any]:
        """Return litellm's arguments for the request. The engine's own arguments come last, so `options` can't override
        them. Raises EngineStopped if the environment variable for the API key isn't set."""
        supported = self._litellm.get_supported_openai_params(self._model) or ()
        body = parameters(request, seed="seed" in supported)
        key = os.environ.get(self._key_variable) if self._key_variable is not None else token_for(self._base_url or "")
        if self._key_variable is not None and not key:
            raise EngineStopped(
                f"{self.name}: the environment variable {self._key_variable} (API key) is not set", "key"
            )
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

    async def _try(self, body: dict[str, Any]) -> Completion | EngineError:
        """Send one request. Errors are returned instead of raised, because a traceback would keep this frame's `body`,
        which contains the API key."""
        if self._budget is not None and self.stats.spent >= self._budget:
            return EngineStopped(
                f"{self.name}: {self.stats.spent:.4f} dollars are spent, the budget is {self._budget} (engine.budget)",
                "budget",
            )
        # While this request sleeps, another one may move `_held` further, so this is a loop.
        while (left := self._held - time.monotonic()) > 0:
            if left > self.absence.patience:
                return EngineStopped(
                    f"{self.name}: its rate limit holds for {left:.1f} s more, which is beyond the "
                    f"engine's patience of {self.absence.patience:g} s (engine.patience)",
                    "away",
                )
            await asyncio.sleep(left)
        self._begin()
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self._litellm.acompletion(**body)
            return self._read(answer)
        except TimeoutError:
            message = f"{self.name}: no answer within {self._seconds:g} s (engine.seconds)"
            return HostedFailed(message, retry=True, away=None)
        except EngineError as error:
            return error
        except Exception as error:  # the provider's library may raise anything
            return self._typed(error, body.get("api_key"))
        finally:
            self._end()

    def _typed(self, error: Exception, key: str | None) -> EngineError:
        """Return the `EngineError` for an exception from litellm, without the secrets in its message."""
        status = getattr(error, "status_code", None)
        text = without_secrets(str(error), [key] if key else ())
        message = f"{self.name}: {text if len(text) <= 600 else f'{text[:600]} ...'}"
        if isinstance(error, self._litellm.ContextWindowExceededError):
            return PromptTooLong(message)
        self.stats.limited += status == 429
        status = 401 if _NO_KEY.search(text) else 404 if _NO_PROVIDER in text else status
        reason = stop_reason(status, text)
        if reason is not None:
            return EngineStopped(message, reason)
        away = None if status == 408 else status in AWAY or _connection_lost(error)
        retry = away is not False or status in TRIED_AGAIN
        response = getattr(error, "response", None)
        headers = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", {})
        return HostedFailed(message, retry=retry, after=retry_after(headers.get("retry-after")), away=away)

    async def _wait(self, error: EngineError, tries: Tries, retries: int) -> int:
        """Wait before the next attempt, and return the new number of retries. Raises `error` if no retry is left.

        A `Retry-After` also moves `_held`, which delays all requests. While the provider answers no requests, waiting
        for it doesn't use up a retry."""
        away = error.away if isinstance(error, HostedFailed) else False
        after = error.after if isinstance(error, HostedFailed) else None
        if not error.retry:
            tries.answered()
            raise error
        if after is not None:
            self._held = max(self._held, time.monotonic() + after)
        if away is False or (away is None and tries.alone):
            retries += 1
            if retries > self._retries:
                raise error
        await tries.failed(error, after=after)
        return retries

    def _read(self, answer: Any) -> Completion:
        """Return the completion in an answer and add its cost to the statistics. Raises HostedFailed if the provider's
        content filter removed the whole answer."""
        choice = answer.choices[0]
        text, calls = choice.message.content, _tool_calls(choice.message)
        if choice.finish_reason == "content_filter" and not text and not calls:
            raise HostedFailed(f"{self.name}: the provider's content filter withheld the answer")
        usage = _usage(answer, self._prices)
        self.stats.spent += usage.cost or 0.0
        return Completion(
            text=text or "", finish=_FINISH.get(choice.finish_reason, "abort"), tool_calls=calls or None, usage=usage
        )

    def _priced(self) -> bool:
        try:
            info = self._litellm.get_model_info(self._model)
        except Exception:  # litellm raises a plain Exception for an unknown model
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
    """Wait for litellm's background logging, because the event loop could otherwise end with coroutines that were never
    awaited."""
    with contextlib.suppress(ImportError):
        from litellm.litellm_core_utils import logging_worker

        await asyncio.sleep(0)  # in this turn, tasks that are done queue their logging
        logging_worker.GLOBAL_LOGGING_WORKER.start()  # the worker must run in this event loop
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLING):
                await logging_worker.GLOBAL_LOGGING_WORKER.flush()


class _Clients:
    """Counts open engines. All engines in a process share litellm's connections, so the last one closes them."""

    opened = 0

    @classmethod
    async def close(cls, litellm: Any) -> None:
        cls.opened -= 1
        if cls.opened <= 0:
            await litellm.close_litellm_async_clients()
            # litellm caches its clients, so without this flush, the next engine would get a closed client.
            litellm.in_memory_llm_clients_cache.flush_cache()


async def _with_pictures(request: Request) -> Request:
    """Return the request with its pictures as data URLs made from the stored bytes. Raises EngineError if a message has
    a picture by URL: the provider would fetch it, and the tape wouldn't contain what the model saw."""
    parts = [part for message in request.messages for part in content_parts(message)]
    if any(part.get("type") == "image_url" for part in parts):
        raise EngineError("a message holds an `image_url`: pictures go to a model as `Picture` in a step, never by URL")
    names = dict.fromkeys(str(part.get("media")) for part in image_parts(request.messages))
    if not names:
        return request
    if request.picture is None:
        raise EngineError("the request names pictures without their bytes: set Request.picture")
    try:
        files = {name: await asyncio.to_thread(request.picture, name) for name in names}
    except (BadPicture, NotATape) as error:
        raise EngineError(str(error)) from error
    urls = {name: f"data:image/png;base64,{base64.b64encode(data).decode()}" for name, data in files.items()}
    return replace(request, messages=_as_urls(request.messages, urls))


def _as_urls(messages: Sequence[Message], urls: Mapping[str, str]) -> list[Message]:
    """Return the messages with pictures as `image_url` parts. Pictures in tool results are moved to a user message
    after the results, because OpenAI's format has no other place for them."""
    sent: list[Message] = []
    shown: list[Message] = []
    for message in messages:
        if shown and message.get("role") != "tool":
            sent.append({"role": "user", "content": shown})
            shown = []
        parts = content_parts(message)
        if message.get("role") == "tool" and visual_parts([message]):
            written = [part for part in parts if part.get("type") == "text"]
            shown.append({"type": "text", "text": f"Pictures of the result of {message.get('name', 'the tool')}:"})
            shown += _with_urls([part for part in parts if part not in written], urls)
            sent.append({**message, "content": "\n".join(str(part["text"]) for part in written)})
        else:
            sent.append({**message, "content": _with_urls(parts, urls)} if parts else message)
    return [*sent, {"role": "user", "content": shown}] if shown else sent


def _with_urls(parts: Sequence[Message], urls: Mapping[str, str]) -> list[Message]:
    """Return the parts with pictures as `image_url`. A video becomes its frames, each after a text with its time."""
    sent: list[Message] = []
    (shown,) = frames_of([{"content": parts}])
    for part in content_parts(shown):
        if part.get("type") == "image":
            detail = {"detail": part["detail"]} if "detail" in part else {}
            part = {"type": "image_url", "image_url": {"url": urls[str(part["media"])], **detail}}
        sent.append(part)
    return sent


def parameters(request: Request, *, seed: bool = True) -> Json:
    """Return the request as litellm's arguments, which have the format of OpenAI's chat completions.

    `top_p` and `top_k` are left out if they are off, because many models reject these arguments. `seed` is False for
    providers that accept no seed. Raises EngineError for sampling options that only the engine may set."""
    one_temperature(request)
    sampling = request.sampling
    refused = sorted(name for name in sampling.extra if name in OURS or names_secret(name))
    if refused:
        raise EngineError(f"sampling options {', '.join(refused)} are the engine's own to set")
    body: Json = {
        "messages": openai_messages(request.messages),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        **sampling.extra,
    }
    if sampling.top_p != 1.0:
        body["top_p"] = sampling.top_p
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    body |= {"min_tokens": min(sampling.barring, sampling.max_tokens)} if sampling.barring else {}
    body |= {"ignore_eos": True} if sampling.ignore_eos else {}
    if seed:
        body["seed"] = request.seed
    if request.tools:
        body["tools"] = list(request.tools)
    return body


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
    """Return the token counts and the cost in US dollars. Unknown values are None. litellm reports unknown counts as 0,
    so a count of 0 prompt tokens means that the counts are unknown."""
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


def _connection_lost(error: BaseException | None) -> bool:
    """Return whether a failed connection caused this exception from litellm, which then has status 500."""
    while error is not None:
        # Classes are compared by name, because it depends on the provider whether litellm uses httpx or aiohttp.
        if any(kind.__name__ in ("TransportError", "ClientError", "OSError") for kind in type(error).__mro__):
            return True
        error = error.__cause__ or error.__context__
    return False


def _import() -> Any:
    # If this isn't set before the import, litellm fetches a price list from the network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        import litellm
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "litellm", "litellm", "a hosted model") from error
    litellm.suppress_debug_info = True  # otherwise litellm prints where to report bugs
    litellm.telemetry = False
    for name in ("LiteLLM", "openai._base_client"):
        guard_log(name)  # at debug level, they log everything, including secrets
    # If a request is cancelled while litellm prepares it in a thread, a coroutine is left behind that never ran.
    warnings.filterwarnings("ignore", NEVER_RAN, RuntimeWarning)
    return litellm
