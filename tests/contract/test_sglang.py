"""The engine of servers against the real SGLang on a CPU: what it samples, which weights it used, a server that dies.

Two servers for all tests, on a random tiny Llama; `tests/contract/sglang_cpu.py` makes their environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tapereel.agents import Limits
from tapereel.agents.engines.servers import RemoteEngine
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.engines.transport.http_channel import free_port
from tapereel.finetune import TrainConfig
from tapereel.finetune.run import train
from tapereel.tapes import Text
from tapereel.tapes.store import Store, verify

from ..agents import served
from ..agents.served import CLOSE, Test, ask, long_one, seeds_of, servers
from ..finetune.loop.lab import RENDERER, Letters, Speaker, assert_books_close, settings_of
from ..finetune.loop.versions import assert_versions_true
from .lab import off, policy
from .sglang_cpu import DONE, ENVIRONMENT, FOLDER, OPTIONS, PYTHON

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]


def sent(seed: int) -> Any:
    """`policy(seed)` as one process sends it: a copy of the weights, with each name of a tied one."""
    weights = {name: tensor.clone() for name, tensor in policy(seed).state_dict().items()}
    return SimpleNamespace(state_dict=lambda: weights)


TRIES = ((300, 0.3, 4), (900, 0.5, 4), (1800, 0.8, 2))
"""As `served.TRIES`."""


class SGLang:
    """A server, whose processes are all in one group."""

    def __init__(self, model: Path, log: Path) -> None:
        self.port, self.log = free_port("127.0.0.1"), log
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(model), *OPTIONS]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "--host", "127.0.0.1", "--port", str(self.port)],
                env={**os.environ, **ENVIRONMENT},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, seconds: float = 600.0) -> None:
        until = time.monotonic() + seconds
        while self.version() is None:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"SGLang did not start:\n{self.log.read_text()[-6000:]}")
            time.sleep(0.5)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    def version(self) -> str | None:
        """The version of its weights, or None if it doesn't answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30):
                pass
            with urllib.request.urlopen(f"{self.url}/model_info", timeout=30) as answer:
                return json.load(answer)["weight_version"]
        except OSError:
            return None


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SGLang, SGLang]]:
    if not DONE.exists():
        pytest.fail(f"there is no SGLang in {FOLDER}; make it: python -m tests.contract.sglang_cpu")
    logs = tmp_path_factory.mktemp("log")
    well, mortal = (SGLang(folder, logs / name) for name in ("well", "mortal"))
    try:
        for server in (well, mortal):
            server.start()
        for server in (well, mortal):
            server.wait()
        yield well, mortal
    finally:
        for server in (well, mortal):
            server.kill()


@pytest.fixture
def runs(pair: tuple[SGLang, SGLang], folder: Path, tmp_path: Path) -> Callable[[Test], Any]:
    """Runs an async test with an engine whose server has the weights of `policy(0)`."""

    def run(test: Test) -> Any:
        async def whole() -> Any:
            config = servers(pair[0].url, model=folder, weights_folder=tmp_path)
            engine = await connect(config, RENDERER, weights=True)
            try:
                await engine.sync_weights(sent(0).state_dict(), f"base/{tmp_path.name}")
                return await test(engine)
            finally:
                await engine.close()

        return asyncio.run(whole())

    return run


def test_logprobs_are_those_of_the_model(
    runs: Callable[[Test], Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(engine: RemoteEngine) -> None:
        assert (engine.name, engine.capabilities.logprobs) == (f"sglang:{folder}", "processed")
        assert "--enable-deterministic-inference" in caplog.text  # once for each server
        asked = [
            ask("abcd"[k % 4] * (k + 1), k, temperature=temperature, max_tokens=48)
            for temperature in (0.5, 1.0, 1.5)
            for k in range(6)
        ]
        for request, completion in zip(asked, await asyncio.gather(*map(engine.complete, asked)), strict=True):
            assert completion.ids
            assert off(0, request, completion) < CLOSE
            assert completion.spans == ((engine.version, 0, len(completion.ids)),)
            ended = completion.ids[-1] in RENDERER.end_ids
            assert completion.finish == ("stop" if ended else "length")

    runs(test)


@pytest.mark.parametrize("mode", ["reprefill", "abort"])
def test_every_token_is_stamped_with_the_weights_that_gave_it(runs: Callable[[Test], Any], mode: str) -> None:
    async def test(engine: RemoteEngine) -> None:
        shows = {"reprefill": lambda found, _: len(found.spans) >= 2, "abort": served.SHOWS["abort"]}[mode]
        versions, answers = await served.swap(engine, sent, mode, 2, shows, TRIES)
        for request, completion in answers:
            for seed, start, end in seeds_of(completion, versions):
                assert off(seed, request, completion, start, end) < CLOSE
        after = ask("abcdabcd" * 24, seed=9, max_tokens=8)  # its prefix was cached under other weights
        for seed in (2, 1):
            if seed == 1:
                await engine.sync_weights(sent(1).state_dict(), f"{engine.version}+last")
            assert off(seed, after, await engine.complete(after)) < CLOSE

    runs(test)


def test_seeds_have_no_effect_and_the_weights_of_an_earlier_run_are_named(
    runs: Callable[[Test], Any], pair: tuple[SGLang, SGLang], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(engine: RemoteEngine) -> None:
        assert not engine.capabilities.seeds
        first, again = [await engine.complete(long_one(3, length=40)) for _ in range(2)]
        assert first.ids != again.ids
        assert engine.version not in caplog.text
        later = await connect(servers(pair[0].url, model=folder), RENDERER)
        await later.close()
        assert later.name == f"sglang:{folder}"
        assert repr(engine.version) in caplog.text

    runs(test)


class Interrupted(Letters):
    """Something happens before its episodes."""

    before: ClassVar[list[Callable[[], Awaitable[None]]]] = []

    async def reset(self, task: str) -> Text:
        for happens in Interrupted.before:
            await happens()
        return await super().reset(task)


def test_a_killed_server_samples_again_and_the_run_goes_on(
    pair: tuple[SGLang, SGLang], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    well, mortal = pair
    run, addresses = tmp_path / "run", tmp_path / "servers.txt"
    addresses.write_text(f"{well.url}\n{mortal.url}\n")

    def config(urls: Any, updates: int) -> TrainConfig:
        return TrainConfig(
            agent=f"{Speaker.__module__}:Speaker",
            env=f"{Interrupted.__module__}:Interrupted",
            tasks=tuple(one + other for one in "abcd" for other in "abcd"),
            evaluation={"fraction": 0.25},
            loop=settings_of(
                updates=updates,
                checkpoint_every=1,
                keep_checkpoints=None,
                limits=Limits(turns=6, agent_seconds=600.0, system_seconds=600.0),
            ),
            engine={"kind": "sglang", "model": str(folder), "urls": urls, "patience": 120.0},
        )

    assert train(config([well.url], 2), run).updates == 2
    killed: list[str | None] = []

    async def kill_and_wait() -> None:
        version = await asyncio.to_thread(well.version)
        if not killed and str(version).endswith(":3"):
            killed.append(version)
            mortal.kill()
            mortal.start()
        # The next sync leaves it out. Then no episode begins until it is back and has the weights of the run.
        while killed and version != killed[0] and await asyncio.to_thread(mortal.version) in (None, "default"):  # noqa: ASYNC110
            await asyncio.sleep(0.5)

    monkeypatch.setattr(Interrupted, "before", [kill_and_wait])
    # One server has the weights of the run and is named after their folder, and the other has those of its start.
    summary = train(config(f"file:{addresses}", 6), run, resume=True)
    assert (len(killed), summary.updates, summary.books_close) == (1, 6, True)
    assert mortal.version() == well.version()
    assert str(well.version()).endswith(":6")
    assert verify(run).exit_code == 0
    assert_books_close(run)
    with Store.open(run) as store:
        assert {call.engine for tape in store.tapes() for call in tape.calls} == {f"sglang:{folder}"}
    assert_versions_true(run, tmp_path / "fresh", folder, summary.lineage, 6)
