"""Ray starts, places and restarts the workers of a run (`on=ray`).

Nothing but calls of workers goes through Ray: no weights, no files, no trainer. Workers end with the run. Ray is
imported only here.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, cast

from ...tapes.common.text import counted, logger
from ...tapes.errors import MissingExtra, UsageError
from ..setup.engine_config import ServerConfig
from ..setup.on_config import RayConfig
from ..setup.setup import LoadedSetup, Setup, is_unnamed
from ..setup.team_config import renderer_of
from .attempts import Attempts, LocalAttempts
from .remote_attempts import CAPACITY, Handle, RemoteAttempts
from .worker import Engines, Hello, Worker, WorkerSetup, package_digest

log = logger("workers")

CONNECT_SECONDS = 20.0
"""A cluster must answer within this many seconds."""
READY_SECONDS = 300.0
"""A worker must have started and loaded the agent within this many seconds."""
STORE_BYTES = 200 * 2**20
"""Memory of Ray's object store on this machine. No object goes there."""
SKEW = 1.0
"""A worker's clock may differ by this many seconds from the lead's without a warning."""


class NoRay(MissingExtra, UsageError):
    """Ray is not installed."""


@contextmanager
def placed_attempts(
    config: Setup, setup: LoadedSetup, engines: Engines, *, most: int, trains: bool = False
) -> Iterator[Attempts]:
    """Provide what runs the episodes of a run, at most `most` of them at a time. With `trains`, weights change. Raises
    UsageError if workers can't be used."""
    if config.on is None:
        yield LocalAttempts(setup.agent, setup.env)
        return
    for name, player in engines.players.items():
        if trains and not getattr(player, "frozen", True):
            raise UsageError(
                f"on=ray: players.{name} learns, and workers serve one policy that learns: set players.{name}.frozen, "
                "or leave `on` out"
            )
    models = [engines.engine, *(player.engine for player in engines.players.values())]
    kinds = [one.kind for one in models]
    # The lead's engine knows which weights its servers have, and only the lead knows the server that it started.
    alone = any(isinstance(one, ServerConfig) and not one.urls for one in models)
    lends = trains or alone or any(kind in ("embedded", "custom") for kind in kinds)
    with _connected(config.on) as ray:
        handles = _start(ray, config, setup, engines, most)
        try:
            named = _check(ray, handles, _named_code(config, setup), engines, "embedded" in kinds)
            yield RemoteAttempts(
                setup.agent,
                setup.env,
                cast(Mapping[str, Handle], named),
                gone=(ray.exceptions.RayActorError,),
                kill=lambda handle: ray.kill(handle, no_restart=False),
                lends=lends,
            )
        finally:
            for handle in handles.values():
                with suppress(Exception):  # Ray may be gone
                    ray.kill(handle)


@contextmanager
def _connected(on: RayConfig) -> Iterator[Any]:
    """Connect to the cluster, or start Ray on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # each worker would make an environment of its own
    if on.address is None:
        # Without this, Ray listens on all networks of the machine.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default, so that a busy machine starves the workers
    try:
        ray = import_module("ray")
    except ModuleNotFoundError as error:
        raise NoRay(error.name or "ray", "ray", "on=ray") from error
    if ray.is_initialized():  # by the caller, who also stops it
        yield ray
        return
    if on.address is None:
        ray.init(include_dashboard=False, object_store_memory=STORE_BYTES, log_to_driver=True)
    else:
        _connect(ray, on.address)
    try:
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster. Raises UsageError if it doesn't answer or refuses."""
    host, _, port = address.rpartition(":")
    if address != "auto":
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise UsageError(f"on={address}: no Ray cluster answers there ({error}): {_START}") from error
    failed: list[BaseException] = []

    def init() -> None:
        try:
            ray.init(address=address)
        except BaseException as error:
            failed.append(error)

    # Ray repeats its attempts for minutes. In another thread, it also leaves the signal handlers of this one alone.
    thread = threading.Thread(target=init, name="ray-init", daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    if thread.is_alive():
        raise UsageError(  # Ray goes on trying with a wrong token
            f"on={address}: no Ray cluster accepted this process within {CONNECT_SECONDS:g} s: give it the cluster's "
            f"token (RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH) if the cluster runs; otherwise {_START}"
        )
    if failed:
        said = str(failed[0]).strip().splitlines()[0][:300] if str(failed[0]).strip() else type(failed[0]).__name__
        token = any(word in str(failed[0]).lower() for word in ("auth", "token"))
        remedy = "give this process the cluster's token (RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)" if token else _START
        raise UsageError(f"on={address}: Ray refuses ({said}): {remedy}") from failed[0]


_START = "start it with `ray start --head`, or leave the address out for this machine alone"


def _start(ray: Any, config: Setup, setup: LoadedSetup, engines: Engines, most: int) -> dict[str, Any]:
    """Start the workers. Return their handles by name."""
    assert config.on is not None
    cpus = config.on.cpus
    room = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    number = min(sum(free // cpus for free in room), most)
    if not number:
        raise UsageError(
            f"on.cpus={cpus}: no machine of the cluster has so many CPUs (they have {', '.join(map(str, room))}): lower"
            " on.cpus, or start Ray with more (`ray start --num-cpus`)"
        )
    try:
        sources = ray.cloudpickle.dumps(setup.sources)
    except Exception as error:
        raise UsageError(
            f"on=ray: the agent or the environment can't be sent to a worker ({type(error).__name__}: {error}): name "
            "it as module:name, so that each worker makes its own"
        ) from error
    settings = Setup(rewards=config.rewards, env_processes=config.env_processes)
    what = WorkerSetup(sources, settings, engines, os.getcwd(), tuple(sys.path))
    made = ray.remote(Worker).options(
        num_cpus=cpus,
        max_concurrency=CAPACITY + 64,
        max_restarts=-1,
        max_task_retries=0,
        scheduling_strategy="SPREAD",
    )
    return {f"worker-{number}": made.remote(what) for number in range(number)}


def _check(
    ray: Any, handles: dict[str, Any], code: Mapping[str, str], engines: Engines, embedded: bool
) -> dict[str, Any]:
    """Wait until the workers have loaded everything. Return them by machine and number. Workers that don't start in
    time are left out. Raises UsageError if none starts, or if one can't take part."""
    refs = {handle.ready.remote(): name for name, handle in handles.items()}
    asked = time.time()
    done, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=READY_SECONDS)
    for ref in waiting:
        log.warning("%s did not start within %g s, and is left out", refs[ref], READY_SECONDS)
        ray.kill(handles.pop(refs[ref]))
    if not done:
        raise UsageError(f"on=ray: none of {counted(len(refs), 'worker')} started within {READY_SECONDS:g} s")
    renderer = renderer_of(engines.engine)
    tokenizer = renderer.tokenizer_hash + renderer.template_hash if renderer is not None else None
    here = Hello(socket.gethostname(), os.getpid(), asked, package_digest(), code, tokenizer)
    named: dict[str, Any] = {}
    for number, ref in enumerate(done):
        try:
            hello = ray.get(ref)
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            said = " ".join(str(cause).split())[:500]  # Ray's messages have many lines
            raise UsageError(f"on=ray: a worker can't load the run: {type(cause).__name__}: {said}") from error
        check_hello(hello, here, refs[ref], embedded=embedded, until=time.time())
        named[f"{hello.machine}/{number}"] = handles[refs[ref]]
    return named


def _named_code(config: Setup, setup: LoadedSetup) -> dict[str, str]:
    """Return the digests of code that workers import. An object without a name brings its code along."""
    agent, env = (not is_unnamed(name or "") for name in (config.agent, config.env))
    return {part: code for part, code in setup.code.items() if part == "python" or (agent if part == "agent" else env)}


def check_hello(hello: Hello, here: Hello, name: str, *, embedded: bool, until: float) -> None:
    """Raise UsageError if a worker differs from this process, `here`. The worker was asked at `here.clock` and has
    answered at `until`."""
    who = f"on=ray: {name} on {hello.machine}"
    if hello.package != here.package:
        raise UsageError(f"{who} has another Tapereel ({hello.package}, here {here.package}): install the same one")
    for part in here.code.keys() & hello.code.keys():
        if hello.code[part] != here.code[part]:
            raise UsageError(f"{who} has another version of the {part}: give it the code of this machine")
    if hello.tokenizer != here.tokenizer:
        raise UsageError(f"{who} has another tokenizer or chat template for the model: give it the same files")
    if embedded and hello.machine != here.machine:
        raise UsageError(
            f"{who}, and the embedded engine serves only its own machine, {here.machine}: use `engine.kind=vllm`, or "
            "workers on this machine"
        )
    off = max(here.clock - hello.clock, hello.clock - until)
    if off > SKEW:
        log.warning("the clock of %s on %s differs from this machine's by %.1f s", name, hello.machine, off)
