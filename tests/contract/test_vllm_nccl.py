"""Weights over vLLM's NCCL route to a server with two workers and to a second server, from end to end but for NCCL
itself, which takes GPUs: gloo carries them."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tapereel.agents.engines.servers import LocalServer
from tapereel.cli.rollout.serve_model import NCCL
from tapereel.tapes.store import verify

from ..agents.embedded_lab import recompute
from ..agents.served import CLOSE
from ..finetune.loop.versions import assert_versions_true
from .lab import policy, run_in_vllm, vllm_is_there
from .vllm_cpu import ENVIRONMENT, OPTIONS, PYTHON

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

STANDIN = Path(__file__).with_name("standin")


def off(model: Any, answer: dict[str, Any], start: int, end: int) -> float:
    """The largest error of its log-probs in [start, end), in nats."""
    exact = recompute(model, answer["prompt"], answer["ids"], answer["temperature"])[start:end].tolist()
    return max(abs(a - b) for a, b in zip(exact, answer["logprobs"][start:end], strict=True))


def test_weights_arrive_over_the_nccl_route(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_is_there()
    save_file({name: tensor.clone() for name, tensor in policy(1).state_dict().items()}, tmp_path / "other.safetensors")
    path = os.pathsep.join(filter(None, (str(STANDIN), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    both = [
        LocalServer(
            folder,
            python=str(PYTHON),
            environment={**ENVIRONMENT, "PYTHONPATH": path},
            options=(*OPTIONS, *parallel, *NCCL, "--worker-extension-cls", "gloo_for_nccl.Extension"),
            log=tmp_path / f"vllm-{len(parallel)}.log",
            patience=540.0,
        )
        for parallel in (("--tensor-parallel-size", "2"), ())
    ]
    run = tmp_path / "run"

    async def started() -> None:
        await asyncio.gather(*(server.start() for server in both))

    def started_again() -> None:
        assert second._process is not None
        second._process.wait()
        if not ended.is_set():
            second.stop()
            asyncio.run(second.start())
            ended.wait()  # the server ends with the thread that started it

    local, second = both
    ended = threading.Event()
    try:
        asyncio.run(started())
        assert local._process is not None
        assert second._process is not None
        watching = threading.Thread(target=started_again)
        watching.start()
        printed = run_in_vllm(
            Path(__file__).with_name("nccl_run.py"),
            local.url,
            str(folder),
            str(tmp_path / "other.safetensors"),
            str(run),
            str(local._process.pid),
            second.url,
            str(second._process.pid),
        )
    finally:
        ended.set()
        for server in both:
            server.stop()
    found = json.loads(printed.splitlines()[-1])
    models: dict[str, Any] = {"other": policy(1), "base": policy(0)}
    for answer in found["sampled"]:
        assert answer["spans"]
        for version, start, end in answer["spans"]:
            assert off(models[version.rsplit("/", 1)[-1]], answer, start, end) < CLOSE, (answer["what"], version)
    kinds = {answer["what"] for answer in found["sampled"] if len(answer["spans"]) > 1}
    assert kinds == {"reprefill"}, "answers lived through a change of weights"
    for summary in (found["trained"], found["resumed"]):
        assert (summary["updates"], summary["books_close"]) == (3, True)
    assert found["verify"] == verify(run).exit_code == 0
    assert_versions_true(run, tmp_path / "fresh", folder, found["trained"]["lineage"], 3)
    assert "`update`" in found["told"]
    assert " 5 s (engine.control_seconds)" in found["told"]
    # The world size of each group, and the first rank of each server in it.
    assert found["groups"] == [[4, 1, 3], [3, 1], [2, 1], [4, 1, 3]]
    assert len([answer for answer in found["sampled"] if answer["what"] == "two"]) == 10
