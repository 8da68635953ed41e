"""Measures what a server can do, before the first token is recorded. Errors say what to change at the server.

The probe finds out what kind of server it is, which route returns token ids, whether answers name weight versions, and
whether the server can receive weights. No route reports the log-prob mode, so the probe measures it at temperature 1
and at 0.1. If log-probs are computed after temperature is applied, the gap between the two likeliest tokens is ten
times larger at 0.1. If they are computed before, the gap is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from ....tapes.messages import image_of
from ....tapes.pictures import Picture
from ....tapes.records import Sampling
from ...rendering.answer_grammar import Alternative
from ..engine import EngineError, Request
from ..transport.http_channel import Server, ServerFailed
from ..transport.wire import BadAnswer, Dialect, field, reader, same_prompt
from ..weights.weight_sync import weight_version
from .fleet import log
from .server_engine import Capabilities, answered
from .sglang import SGLangGenerate, draws_by_seed
from .vllm import Chat, Completions, Generate

if TYPE_CHECKING:
    from ...rendering.renderer import Renderer

SHARP = 0.1
"""Temperature of the second measurement. The first one uses temperature 1."""
LISTED = 5
"""Number of log-probs to request. Two are needed, but the sampled token may replace the last one in the list."""
NUMBER = "7353"
"""The answer that the probe's grammar allows."""
REFUSED = (401, 403, 404, 405, 501)
"""HTTP statuses that servers return for a disabled or missing route."""


async def probe(server: Server, renderer: Renderer, name: str | None = None) -> tuple[Dialect, Capabilities]:
    """Return the dialect (format of requests) to use with `server`, and the server's capabilities. The first dialect
    whose route the server accepts is used. `name` is the model's name if the server is SGLang. Raises EngineError."""
    kind = await kind_of(server)
    dialects: list[Dialect] = [Generate(renderer), Completions(), Chat(renderer.template_kwargs)]
    model, context = _served(await server.get("/v1/models", seconds=30.0))
    seeds = True
    if kind.startswith("SGLang"):
        dialects = [SGLangGenerate()]
        # SGLang renames its model after the folder of each weight sync, and no request of its dialect names a model.
        model, seeds = name or model, await draws_by_seed(server)
    request, refused = _question(renderer, 1.0), []
    for dialect in dialects:
        body = dialect.body(request, model=model, request_id="tapereel-probe", stops=())
        try:
            answer = await answered(server, dialect, body)
        except ServerFailed as error:
            # The next dialect is tried only if the route is disabled. If a transient error, such as a timeout, were
            # enough, the whole run would use a worse dialect.
            if error.status not in REFUSED:
                raise
            refused.append(str(error))
            continue
        try:
            said = dialect.parse(answer)
            same_prompt(request, said)
        except EngineError as error:
            raise EngineError(f"{server} answers without what RL needs: {error}") from error
        capabilities = Capabilities(
            server=kind,
            model=model,
            context=context,
            route=dialect.route,
            logprobs=await _logprobs_mode(server, dialect, renderer, model),
            versions=said.spans is not None,
            takes_weights=await _takes_weights(server),
            sees=isinstance(dialect, Generate)
            and bool(renderer.pictures)
            and await _sees(server, dialect, renderer, model),
            enforces=not isinstance(dialect, SGLangGenerate) and await _enforces(server, dialect, renderer, model),
            seeds=seeds,
        )
        return dialect, capabilities
    raise EngineError(f"{server} refuses every route that gives token ids: {'; '.join(refused)}")


async def kind_of(server: Server) -> str:
    """Return the kind and version of the server, as `vLLM ...` or `SGLang ...`. Raises EngineError."""
    for kind, route in (("vLLM", "/version"), ("SGLang", "/server_info")):
        try:
            return f"{kind} {field(await server.get(route, seconds=30.0), 'version')}"
        except ServerFailed as error:
            if error.status not in (404, 405):
                raise
    raise EngineError(
        f"{server} is neither vLLM (/version) nor SGLang (/server_info); for a server that returns text only, "
        "which can be imitated and not reinforced, take engine.kind=litellm"
    )


def _question(renderer: Renderer, temperature: float, content: object = "1") -> Request:
    """Return the probe's request, which has a short prompt and a fixed seed and asks for one token."""
    messages: list[Any] = [{"role": "user", "content": content}]
    found = renderer.prompt(messages)
    return Request(
        messages=messages,
        prompt=found.ids,
        places=found.places,
        seed=1,
        sampling=Sampling(temperature=temperature, max_tokens=1),
    )


async def _sees(server: Server, dialect: Dialect, renderer: Renderer, model: str) -> bool:
    """Return whether the server reads pictures. Raises EngineError if its tokens for a picture differ from ours."""
    picture = await Picture.read(np.arange(48 * 80 * 3).astype(np.uint8).reshape(48, 80, 3))
    request = replace(_question(renderer, 1.0, [image_of(picture)]), picture=lambda _: picture.data or b"")
    body = dialect.body(request, model=model, request_id="tapereel-probe", stops=())
    try:
        said = dialect.parse(await answered(server, dialect, body))
    except ServerFailed as error:
        if error.status is None or error.away:
            raise
        log.warning("%s refuses pictures, so the engine can't see: %s", server, error)
        return False
    same_prompt(request, said)
    return True


async def _enforces(server: Server, dialect: Dialect, renderer: Renderer, model: str) -> bool:
    """Return whether the server keeps an answer within a grammar. A server that ignores the grammar would hardly answer
    with this number. A tokenizer that can't write it can't write JSON either."""
    if renderer.decode(renderer.text_ids(NUMBER, begin=False)) != NUMBER:
        return False
    request = replace(
        _question(renderer, 1.0),
        grammar=(Alternative("", {"const": int(NUMBER)}, ""),),
        sampling=Sampling(max_tokens=12),
    )
    body = dialect.body(request, model=model, request_id="tapereel-probe", stops=renderer.end_ids)
    try:
        said = dialect.parse(await answered(server, dialect, body))
    except ServerFailed as error:
        if error.status is None or error.away:
            raise
        return False
    return renderer.decode(said.ids).strip() == NUMBER


async def _logprobs_mode(
    server: Server, dialect: Dialect, renderer: Renderer, model: str
) -> Literal["processed", "raw"]:
    """Measure whether log-probs are computed after (`processed`) or before (`raw`) temperature is applied. Raises
    EngineError if the two gaps fit neither mode. The tolerance, 2 % plus 1e-4 nats, covers rounding between two forward
    passes."""
    gap, sharp = [await _gap(server, dialect, _question(renderer, t), model) for t in (1.0, SHARP)]
    for mode, expected in (("processed", gap / SHARP), ("raw", gap)):
        if abs(sharp - expected) <= 0.02 * abs(expected) + 1e-4:
            return "processed" if mode == "processed" else "raw"
    raise EngineError(
        f"the two likeliest tokens of {server} are {gap:.6f} nats apart at temperature 1, {sharp:.6f} "
        f"at {SHARP}: its log-probs are neither from before nor from after temperature"
    )


async def _gap(server: Server, dialect: Dialect, request: Request, model: str) -> float:
    """Return the gap, in nats, between the log-probs listed for the two likeliest first tokens."""
    body = dialect.body(request, model=model, request_id="tapereel-probe", stops=())
    answer = await answered(server, dialect, dialect.listing(body, LISTED))
    values = dialect.listed(answer)
    if len(values) < 2:
        raise BadAnswer(f"asked for two log-probs, {server} gave {values!r}")
    return _difference(values)


@reader
def _difference(values: Sequence[float]) -> float:
    first, second = sorted(values, reverse=True)[:2]
    return first - second


@reader
def _served(models: object) -> tuple[str, int | None]:
    """Return the name of the served model and the size of its context, which may be unknown."""
    about = cast(dict[str, Any], field(models, "data", 0))
    name, context = field(about, "id"), about.get("max_model_len")
    if not isinstance(name, str) or not isinstance(context, int | None):
        raise BadAnswer(f"/v1/models has the model {name!r:.100} with max_model_len {context!r:.100}")
    return name, context


async def _takes_weights(server: Server) -> bool:
    """Return whether the server's weight routes are enabled. If they are, it reports the version of its weights."""
    try:
        return await weight_version(server) is not None
    except EngineError:
        return False
