"""Workers in this process, whose calls are pickled as they are on their way to another one."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Awaitable
from typing import Any

from tapereel.agents.runs.remote_attempts import RemoteAttempts
from tapereel.agents.runs.worker import Engines, Worker, WorkerSetup
from tapereel.agents.setup.engine_config import EmbeddedConfig, ScriptedConfig
from tapereel.agents.setup.setup import Setup, load_agent, load_env


class Gone(Exception):
    """The worker's process is gone."""


class Handle:
    """`handle.attempt.remote(place)` calls a worker, as it does with Ray."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self.worker = Worker(setup)
        self.running: set[asyncio.Future[Any]] = set()
        self.asleep = asyncio.Event()
        self.asleep.set()

    def kill(self) -> None:
        """End the process with all that it does, and start another."""
        running, self.running = self.running, set()
        episodes = [one.task for one in self.worker._episodes.values()]
        for task in (*running, *episodes):
            task.cancel()
        self.worker = Worker(self.setup)

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)


class Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self.handle, self.name = handle, name

    def remote(self, *args: Any) -> Awaitable[Any]:
        sent = pickle.loads(pickle.dumps(args))
        call = asyncio.ensure_future(self._call(self.handle.worker, sent))
        self.handle.running.add(call)
        call.add_done_callback(self.handle.running.discard)

        async def answer() -> Any:
            await asyncio.wait([call])
            if call.cancelled():
                raise Gone
            return pickle.loads(pickle.dumps(call.result()))

        return answer()

    async def _call(self, worker: Worker, args: Any) -> Any:
        await self.handle.asleep.wait()
        found = await getattr(worker, self.name)(*args)
        await self.handle.asleep.wait()
        return found


def crew(
    agent: Any, env: Any, *, model: Any = None, workers: int = 2, own: bool = False
) -> tuple[RemoteAttempts, dict[str, Handle]]:
    """Attempts in workers of this process. With `own`, each has the engine of answers `["a", "a", "a"]`."""
    engine = ScriptedConfig(answers=("a",) * 3) if own else EmbeddedConfig(model=str(model))
    setup = WorkerSetup(pickle.dumps((agent, env)), Setup(), Engines(engine, {}), os.getcwd(), ())
    handles = {f"worker-{k}": Handle(setup) for k in range(workers)}
    made = load_agent(agent), load_env(env)
    # The handles are made in Ray's place.
    attempts = RemoteAttempts(*made, handles, gone=(Gone,), kill=lambda one: one.kill(), lends=not own)  # type: ignore[arg-type]
    return attempts, handles
