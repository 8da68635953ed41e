"""vLLM's own server application over an engine that does what the seed of a request says. Runs in its environment.

    python stub_app.py --model DIR --host 127.0.0.1 --port PORT --enable-scale-out ...      (vLLM's own flags)

Routing, validation, rendering, the shape of answers and of errors are vLLM's; only the tokens are made up. A healthy
engine doesn't fail on request; this one does.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.exceptions import GenerationError, QueueOverflowError, RetryableRequestError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor

IDS = (8, 9, 10, 11, 8, 9)
SCENES = (
    "healthy",
    "breaks",
    "says_error",
    "paused_once",
    "full",
    "aborted",
    "nan",
    "minus_infinity",
    "no_logprobs",
    "mixed",
    "hole",
    "foreign",
    "silent",
    "old",
    "dies",
)
"""By seed, from 100 on; any other seed is healthy."""


class Stub(EngineClient):
    """Six tokens for every prompt."""

    is_running = True  # type: ignore[assignment]
    is_stopped = False  # type: ignore[assignment]
    errored = False  # type: ignore[assignment]
    dead_error = RuntimeError("dead")  # type: ignore[assignment]

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.versions = ["default"]
        self.seen: set[str] = set()

    async def generate(self, prompt: Any, params: Any, request_id: str, **more: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        scene = SCENES[params.seed - 100] if params.seed is not None and 0 <= params.seed - 100 < len(SCENES) else ""
        if scene == "full":
            raise QueueOverflowError
        if scene == "paused_once" and request_id not in self.seen:
            self.seen.add(request_id)
            raise RetryableRequestError("Generation is paused")
        if scene == "dies":
            os._exit(7)
        begun = len(self.versions)
        while scene == "mixed" and len(self.versions) == begun:  # noqa: ASYNC110  # weights come in the midst
            await asyncio.sleep(0.01)
        ids = IDS[: min(len(IDS), params.max_tokens)]
        broken = scene in ("breaks", "says_error")
        if params.output_kind == RequestOutputKind.DELTA:
            for k in range(3 if broken else len(ids)):
                last = not broken and k == len(ids) - 1
                yield self.output(scene, prompt, params, request_id, ids, k, k + 1, last)
                await asyncio.sleep(0)
        if scene == "breaks":
            raise GenerationError("the device is gone")
        if params.output_kind != RequestOutputKind.DELTA or broken:
            yield self.output(scene, prompt, params, request_id, ids, 0, len(ids), True)

    def output(
        self, scene: str, prompt: Any, params: Any, request_id: str, ids: Any, start: int, end: int, last: bool
    ) -> RequestOutput:
        reason = {"aborted": "abort", "says_error": "error"}.get(scene, "length") if last else None
        choice = CompletionOutput(
            index=0,
            text="abcdab"[start:end],
            token_ids=list(ids[start:end]),
            cumulative_logprob=None,
            logprobs=None
            if scene == "no_logprobs"
            else [self.listed(scene, k, ids[k], params) for k in range(start, end)],
            finish_reason=reason,
            weight_versions=self.spans(scene, len(ids)) if last else None,
        )
        read = prompt["prompt_token_ids"]
        return RequestOutput(request_id, None, read, None, [choice], last, num_cached_tokens=0)

    def listed(self, scene: str, k: int, token: int, params: Any) -> dict[int, Logprob]:
        value = -0.5
        if k == 2 and scene in ("nan", "minus_infinity"):
            value = math.nan if scene == "nan" else -math.inf
        found = {token: Logprob(logprob=value, rank=1, decoded_token="a")}
        for k in range(params.logprobs or 0):  # a gap that grows as the temperature falls
            found[12 + k] = Logprob(logprob=-0.5 - 0.25 * (k + 1) / params.temperature, rank=k + 2, decoded_token="b")
        return found

    def spans(self, scene: str, count: int) -> list[WeightVersionSpan] | None:
        now = self.versions[-1]
        before = self.versions[-2] if len(self.versions) > 1 else now
        found = {
            "mixed": [(before, 0, 2), (now, 2, count)],
            "hole": [(now, 0, 2), (now, 3, count)],
            "foreign": [("somebody's", 0, count)],
            "old": [(before, 0, count)],
        }
        if scene == "silent":
            return None
        return [WeightVersionSpan(*span) for span in found.get(scene, [(now, 0, count)])]

    async def update_weight_version(self, new_version: str) -> None:
        self.versions.append(new_version)

    async def get_weight_version(self) -> str:
        return self.versions[-1]

    async def collective_rpc(self, method: str, *args: Any, kwargs: Any = None, **more: Any) -> Any:
        if "broken" in str(kwargs):
            raise RuntimeError("half of the weights could not be read")
        return [None]

    async def get_supported_tasks(self) -> Any:
        return ("generate",)

    async def reset_prefix_cache(self, *args: Any, **more: Any) -> bool:
        return True

    async def is_paused(self) -> bool:
        return False

    async def is_tracing_enabled(self) -> bool:
        return False

    async def check_health(self) -> None:
        """Well, as far as anybody knows."""


async def _nothing(self: Any, *args: Any, **more: Any) -> None:
    """Every other thing that an engine is told to do."""


for _name in Stub.__abstractmethods__:
    setattr(Stub, _name, _nothing)
Stub.__abstractmethods__ = frozenset()


async def main() -> None:
    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    address, sock = setup_server(args, reuse_port=False)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    done = await build_and_serve(Stub(config), address, sock, args)
    await done


if __name__ == "__main__":
    asyncio.run(main())
