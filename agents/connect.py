"""Connecting to vLLM servers: what they can do is found out before the first token, and refused with the remedy.

The log-prob mode is in no answer of the server, so it is measured: the gap between the two likeliest tokens grows
tenfold at temperature 0.1 if log-probs are taken after temperature, and stays if they are taken before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..tapes.errors import TapereelError
from ..tapes.records import Sampling
from .engine import EngineError, Request
from .http import Server, ServerFailed
from .publishing import VLLMReload
from .remote import Capabilities, RemoteEngine, weight_version
from .vllm import Completions, Generate
from .wire import BadAnswer, Dialect, field

if TYPE_CHECKING:
    from .render import Renderer

SHARP = 0.1
"""The temperature of the measurement."""
LISTED = 5
"""Log-probs asked for, more than the two needed: the sampled token may take the place of the least of them."""


class NotTrainable(TapereelError, RuntimeError):
    """The server doesn't give what RL needs: token ids, log-probs of the sampled tokens, one model on all servers."""


async def connect(
    urls: Sequence[str], renderer: Renderer, *, model_folder: Path, version: str = "", weights: bool = False,
    weights_folder: Path | None = None, key_variable: str | None = None, seconds: float = 600.0,
    patience: float = 300.0, control_seconds: float = 120.0,
) -> RemoteEngine:  # fmt: skip
    """An engine of the vLLM servers at `urls`, which serve the model of `model_folder`.

    `version` names their weights (default: the servers' own label). With `weights`, new ones can be published to them,
    through folders in `weights_folder`. Raises NotTrainable, or EngineError when a server can't be reached."""
    if not urls:
        raise ValueError("no server addresses")
    servers = [Server(url, key_variable=key_variable, seconds=seconds) for url in urls]
    try:
        found = [await probe(server, renderer) for server in servers]
        kinds = {replace(capabilities, takes_weights=False) for _, capabilities in found}
        if len(kinds) > 1:
            raise NotTrainable(f"the servers differ: {sorted(map(str, kinds))}; one engine needs equal ones")
        dialect, capabilities = found[0]
        if weights and not all(capability.takes_weights for _, capability in found):
            raise NotTrainable(f"{urls} take no weights: start them with VLLM_SERVER_DEV_MODE=1, on loopback or a "
                               "private network only, since those routes know no API key")  # fmt: skip
        labels = {await weight_version(server) for server in servers} if capabilities.versions else {None}
        if not version and len(labels) > 1:
            raise NotTrainable(f"the servers have different weights, {sorted(map(str, labels))}")
        syncs = [VLLMReload(server, seconds=control_seconds) for server in servers] if weights else []
        for sync in syncs:
            await sync.init()
        label = labels.pop() if not version else None
        return RemoteEngine(servers, dialect, renderer, capabilities, model_folder=model_folder, patience=patience,
                            version=version or label or "default", syncs=syncs, weights_folder=weights_folder)
    except BaseException:
        for server in servers:
            await server.close()
        raise


async def probe(server: Server, renderer: Renderer) -> tuple[Dialect, Capabilities]:
    """The dialect to speak with `server`, and what it can do. NotTrainable, EngineError."""
    about = await server.get("/version", seconds=30.0)
    models = await server.get("/v1/models", seconds=30.0)
    model, context = field(models, "data", 0, "id"), field(models, "data", 0).get("max_model_len")
    request = _question(renderer, 1.0)
    for dialect in (Generate(), Completions()):
        body = dialect.body(request, model=model, request_id="tapereel-probe", stops=())
        try:
            answer = await server.post(dialect.route, body, seconds=120.0)
        except ServerFailed as error:
            if error.status in (403, 404, 405) and not isinstance(dialect, Completions):
                continue
            raise
        try:
            said = dialect.parse(answer)
        except BadAnswer as error:
            raise NotTrainable(f"{server} answers without what RL needs: {error}") from error
        capabilities = Capabilities(
            server=f"vLLM {field(about, 'version')}", model=model, context=context,
            logprobs=await _logprobs_mode(server, dialect, renderer, model), versions=said.spans is not None,
            takes_weights=await _takes_weights(server),
        )  # fmt: skip
        return dialect, capabilities
    raise AssertionError("unreachable: the last dialect answers or raises")


def _question(renderer: Renderer, temperature: float) -> Request:
    messages: list[Any] = [{"role": "user", "content": "1"}]
    return Request(messages=messages, prompt=renderer.prompt(messages).ids, seed=1,
                   sampling=Sampling(temperature=temperature, max_tokens=1))  # fmt: skip


async def _logprobs_mode(
    server: Server, dialect: Dialect, renderer: Renderer, model: str
) -> Literal["processed", "raw"]:
    gap, sharp = [await _gap(server, dialect, _question(renderer, t), model) for t in (1.0, SHARP)]
    for mode, expected in (("processed", gap / SHARP), ("raw", gap)):
        if abs(sharp - expected) <= 0.02 * abs(expected) + 1e-4:
            return "processed" if mode == "processed" else "raw"
    raise NotTrainable(f"the two likeliest tokens of {server} are {gap:.6f} nats apart at temperature 1, {sharp:.6f} "
                       f"at {SHARP}: its log-probs are neither from before nor from after temperature")  # fmt: skip


async def _gap(server: Server, dialect: Dialect, request: Request, model: str) -> float:
    """Nats between the two likeliest first tokens, as the server gives them."""
    body = dialect.body(request, model=model, request_id="tapereel-probe", stops=())
    if isinstance(dialect, Generate):
        body["sampling_params"]["logprobs"] = LISTED
        answer = await server.post(dialect.route, body, seconds=120.0)
        listed = field(answer, "choices", 0, "logprobs", "content", 0, "top_logprobs")
        values = [field(listed, k, "logprob") for k in range(len(listed))]
    else:
        answer = await server.post(dialect.route, body | {"logprobs": LISTED}, seconds=120.0)
        values = list(field(answer, "choices", 0, "logprobs", "top_logprobs", 0).values())
    if len(values) < 2:
        raise BadAnswer(f"asked for two log-probs, {server} gave {values!r}")
    first, second = sorted(values, reverse=True)[:2]
    return first - second


async def _takes_weights(server: Server) -> bool:
    try:
        return await weight_version(server) is not None
    except EngineError:
        return False
