"""vLLM's dialects: `/inference/v1/generate` (ids in, ids out), and two others for servers that refuse this route.

`/v1/completions` takes token ids. `/v1/chat/completions` takes messages, and the server renders them with its own copy
of the chat template. The server returns the prompt ids, which must equal the local renderer's ids. Chat answers are
streamed, so the tokens sampled before a cancellation have arrived already, and no abort route is needed.

The functions are pure, work on JSON values, and were written for vLLM 0.32 and 0.33. Requests contain every sampling
parameter, because vLLM takes missing ones from the model's generation_config.json.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ...rendering.answer_grammar import Grammar
from ..engine import EngineError, Request
from ..transport.wire import Json, Sampled, checked_logprob, field, openai_messages, reader, sampled

if TYPE_CHECKING:
    from ...rendering.renderer import Renderer

_Said = dict[str, Any]


def sampling_parameters(request: Request, stops: Sequence[int]) -> Json:
    """Return the request's sampling parameters with vLLM's names. Values in `extra` override all others."""
    sampling = request.sampling
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": request.seed,
        "max_tokens": sampling.max_tokens,
        "min_tokens": 0 if request.grammar else min(sampling.barring, sampling.max_tokens),
        "stop_token_ids": list(stops),
        **({"ignore_eos": True} if sampling.ignore_eos and not request.grammar else {}),
        **({"structured_outputs": structured_outputs(request.grammar)} if request.grammar else {}),
        **sampling.extra,
    }


def structured_outputs(grammar: Grammar) -> Json:
    """Return the grammar as vLLM's `structured_outputs`. Text around the JSON takes a structural tag of xgrammar, which
    is vLLM's default backend."""
    if len(grammar) == 1 and not grammar[0].begin and not grammar[0].end:
        return {"json": grammar[0].json_schema}
    forms = list[Json]()
    for one in grammar:
        parts: list[Json] = [{"type": "const_string", "value": text} for text in (one.begin, one.end)]
        parts.insert(1, {"type": "json_schema", "json_schema": one.json_schema})
        forms.append({"type": "sequence", "elements": [part for part in parts if part.get("value") != ""]})
    form = forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


SCORING_ROUTE = "/v1/completions"
"""The route that returns the log-probs of a prompt. Every vLLM server has it."""


def scoring(model: str, ids: Sequence[int]) -> Json:
    """Return a body that asks for the log-probs of `ids` at temperature 1. It also asks for one new token, which is
    vLLM's minimum."""
    return {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}


def scoring_shown(body: Json) -> Json:
    """Return `body` with a field that asks for the prompt's log-probs. `body` comes from `Generate.body`, for a prompt
    with pictures."""
    return body | {"sampling_params": {**cast(Json, field(body, "sampling_params")), "prompt_logprobs": 0}}


@reader
def scored(answer: object, ids: Sequence[int]) -> array[float]:
    """Return the log-probs of `ids[1:]` from an answer to `scoring` or `scoring_shown`. Raises BadAnswer if they are
    missing or belong to other ids."""
    whole = cast(_Said, answer).get("prompt_logprobs")
    found = whole if whole is not None else field(answer, "choices", 0, "prompt_logprobs")
    return array("f", [checked_logprob(field(found, k, str(ids[k]), "logprob"), k) for k in range(1, len(ids))])


class _VLLM:
    """Base class of vLLM's dialects."""

    name = "vllm"
    streams = False
    tells = False
    names_ids = False
    """Whether an answer has the token id of each log-prob."""
    abort_route = "/abort_requests"
    abort_id: str
    """vLLM's name for a request. Our request id takes the place of `{}`."""

    @reader
    def parse(self, answer: object) -> Sampled:
        whole, choice = cast(_Said, answer), cast(_Said, field(answer, "choices", 0))
        usage = whole.get("usage") or {}
        found = choice.get("logprobs") or {}
        logprobs, named, content = found.get("token_logprobs"), None, found.get("content")
        if isinstance(content, list):
            logprobs = [field(content, k, "logprob") for k in range(len(content))]
            named = [field(content, k, "token_id") for k in range(len(content))] if self.names_ids else None
        return sampled(
            choice.get("token_ids"),
            logprobs,
            named=named,
            finish=choice.get("finish_reason"),
            versions=choice.get("weight_versions"),
            prompt_tokens=usage.get("prompt_tokens"),
            cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            prompt=choice.get("prompt_token_ids") or whole.get("prompt_token_ids"),
            # On the streamed route, the server renders the messages itself, so its prompt ids are needed to verify it.
            prompt_needed=self.streams,
            places=(whole.get("mm_placeholders") or {}).get("image"),
        )

    def abort(self, request_id: str) -> tuple[str, Json]:
        return self.abort_route, {"request_ids": [self.abort_id.format(request_id)]}

    @reader
    def listed(self, answer: object) -> list[float]:
        top = field(answer, "choices", 0, "logprobs", "content", 0, "top_logprobs")
        return [cast(float, field(found, "logprob")) for found in cast(list[object], top)]


class Generate(_VLLM):
    """The dialect for `/inference/v1/generate`. The server must run with `--enable-scale-out`."""

    route = "/inference/v1/generate"
    tells = True
    names_ids = True
    abort_route = "/inference/v1/abort_requests"
    abort_id = "generate-tokens-{}"

    def __init__(self, renderer: Renderer | None = None) -> None:
        """`renderer` knows the model's picture tokens. It may be None if no request has pictures."""
        self._pictures = None if renderer is None else renderer.pictures
        self._marker = None if renderer is None else renderer.marker

    def body(self, request: Request, *, model: str, request_id: str, stops: Sequence[int]) -> Json:
        assert request.prompt is not None
        return {
            "model": model,
            "token_ids": request.prompt.tolist(),
            "request_id": request_id,
            "sampling_params": sampling_parameters(request, stops) | {"logprobs": 0},
            "stream": False,
            **(self._shown(request, request.prompt) if request.places else {}),
        }

    def _shown(self, request: Request, prompt: array[int]) -> Json:
        """Return the body's fields for a request with pictures. In the prompt, each picture is replaced by one marker
        token. The server puts the first picture at the first marker, and so on. Raises EngineError if the model sampled
        this token before a picture, because the server would put the picture there."""
        assert request.picture is not None
        assert self._pictures is not None
        ids, parts, end = list[int](), list[Json](), 0
        for place in request.places:
            if place.times:
                raise EngineError(
                    f"the prompt shows the video {place.media[0]} by the model's video tokens, and vLLM's positions "
                    "behind such a video differ from transformers': set engine.renderer.video=frames"
                )
            between = prompt[end : place.offset].tolist()
            if self._marker in between:
                raise EngineError(
                    f"the model sampled token {self._marker} at {end + between.index(self._marker)}, and vLLM would "
                    f"put the picture {place.media[0]} there, not at {place.offset}; the embedded engine can continue"
                )
            ids += [*between, self._marker]
            # No id or hash is sent with the picture, because the server could then use another picture from its cache.
            png = self._pictures.fitted(place, request.picture(place.media[0]))
            parts.append({"type": "image_url", "url": f"data:image/png;base64,{base64.b64encode(png).decode()}"})
            end = place.end
        return {"token_ids": ids + prompt[end:].tolist(), "content_parts": parts, "return_token_ids": True}

    def listing(self, body: Json, count: int) -> Json:
        return body | {"sampling_params": {**cast(Json, field(body, "sampling_params")), "logprobs": count}}


class Completions(_VLLM):
    """The dialect for `/v1/completions`, with token ids as the prompt."""

    route = "/v1/completions"
    abort_id = "cmpl-{}-0"

    def body(self, request: Request, *, model: str, request_id: str, stops: Sequence[int]) -> Json:
        assert request.prompt is not None
        return {
            "model": model,
            "prompt": request.prompt.tolist(),
            "request_id": request_id,
            "logprobs": 0,
            "return_token_ids": True,
            "return_weight_versions": True,
            "stream": False,
            "echo": False,
            **sampling_parameters(request, stops),
        }

    def listing(self, body: Json, count: int) -> Json:
        return body | {"logprobs": count}

    @reader
    def listed(self, answer: object) -> list[float]:
        return list(cast(dict[str, float], field(answer, "choices", 0, "logprobs", "top_logprobs", 0)).values())


class Chat(_VLLM):
    """The dialect for `/v1/chat/completions` with `return_token_ids`."""

    name = "vllm-chat"
    route = "/v1/chat/completions"
    streams = True
    abort_id = "chatcmpl-{}"

    def __init__(self, template_kwargs: Mapping[str, object] | None = None) -> None:
        """`template_kwargs` are the local renderer's arguments for the chat template. The server must use the same
        ones."""
        self._template_kwargs = dict(template_kwargs or {})

    def body(self, request: Request, *, model: str, request_id: str, stops: Sequence[int]) -> Json:
        body: Json = {
            "model": model,
            "messages": openai_messages(request.messages),
            "request_id": request_id,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "return_weight_versions": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "add_generation_prompt": True,
            **sampling_parameters(request, stops),
        }
        if request.tools:
            # The server's template needs the tools. `none` turns its parser off, because calls are parsed locally.
            body |= {"tools": list(request.tools), "tool_choice": "none"}
        if self._template_kwargs:
            body["chat_template_kwargs"] = self._template_kwargs
        return body

    def listing(self, body: Json, count: int) -> Json:
        return body | {"top_logprobs": count}
