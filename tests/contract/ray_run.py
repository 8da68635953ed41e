"""Parts of `test_ray`: python ray_run.py PART, in the environment of `ray_env`. Each part stops its Ray."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_worker_niceness="0")
os.environ.update(RAY_health_check_period_ms="1000", RAY_health_check_failure_threshold="3")
HERE = Path(__file__).parent
WORLD = HERE / "ray_world.py"
DIGITS = HERE.parents[1] / "examples" / "digits.py"


def digits(model: Any = "model") -> list[str]:
    return ["--agent", f"{DIGITS}:player", "--env", f"{DIGITS}:Digits", "--tasks", f"{DIGITS}:tasks", "--model", model]


def world(env: str = "Slow") -> list[str]:
    scene = ["--agent", f"{WORLD}:player", "--env", f"{WORLD}:{env}", "--tasks", f"{WORLD}:tasks"]
    return [*scene, "--set", "engine.answers=[a, b, c]", "--set", "retries=0"]


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "tapereel", *map(str, words)]


def refusal(*words: object, **variables: str) -> str:
    """What the command says when it refuses."""
    env = {**os.environ, **variables}
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 64, (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr.strip().splitlines()[-1]


def summary(*words: object, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(command(*words, "--json"), capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr[-3000:]
    return json.loads(done.stdout)


def rewards(run: str) -> dict[Any, list[Any]]:
    """The rewards of the usable episodes, by group and attempt."""
    from tapereel.tapes.store.store import Store

    found: dict[Any, list[Any]] = {}
    with Store.open(run) as store:
        for one in store.summaries(closed=True):
            if one.trainable:
                tape = store.tape(one.id, refresh=False)
                texts = [str(step) for step in tape]
                found.setdefault((one.group, one.attempt), []).append((tape.begin.seed, one.reward, texts))
    return found


def weights(model: str) -> str:
    return hashlib.sha256((Path(model) / "model.safetensors").read_bytes()).hexdigest()


def same() -> None:
    """At lag 0 and with one slot, training on Ray gives the same weights, bit for bit."""
    subprocess.run([sys.executable, DIGITS, "model"], check=True, capture_output=True, timeout=100)
    sets = ["engine.slots=1", "trainer.threads=1", "loop.updates=4", "loop.groups=4", "loop.group_size=4"]
    sets += ["loop.max_lag=0", "loop.optimiser.lr=0.01", "evaluation.limit=4"]
    words = ["train", *digits(), *(word for one in sets for word in ("--set", one))]
    here = summary(*words, "--out", "here")
    there = summary(*words, "--out", "there", "--on", "ray")
    assert weights(here["model"]) == weights(there["model"])
    assert here["reward"] == there["reward"]
    assert here["held_out"] == there["held_out"]
    subprocess.run(command("verify", "there"), check=True, capture_output=True, timeout=100)


def killed() -> None:
    """An environment that ends its process once costs nothing but time. One that always does ends with an error."""
    here = summary("run", *world("Slow"), "--out", "here")
    there = summary("run", *world("ExitsOnce"), "--on", "ray", "--out", "there")
    assert rewards("here") == rewards("there")
    assert any("lost with a worker and made again with the same seeds" in line for line in there["advice"]), there
    assert here["episodes"] == there["episodes"]
    always = summary("run", *world("Exits"), "--on", "ray", "--out", "always", "--set", "count=1", code=1)
    assert always["ends"] == [{"status": "error", "cause": "environment", "episodes": 1}], always


def stopped() -> None:
    """A worker that is stopped loses its episodes, and the run goes on."""
    from tapereel.agents.runs import on_ray, remote_attempts

    remote_attempts.SILENT = 5.0
    assert on_ray
    from tapereel.agents.runs.runner import RunConfig, run

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(12.0, os.kill, [pid, signal.SIGCONT]).start()

    _when_running(stop)
    settings: dict[str, Any] = {"agent": f"{WORLD}:player", "env": f"{WORLD}:Slow", "tasks": f"{WORLD}:tasks"}
    settings |= {"engine": {"kind": "scripted", "answers": ["a", "b", "c"]}, "on": "ray"}
    made = run(RunConfig.model_validate(settings), "there")
    assert made.scored == made.tasks, made
    assert any("lost with a worker" in line for line in made.advice), made


def node() -> None:
    """A machine that dies loses its episodes, and the run goes on."""
    import ray
    from ray.cluster_utils import Cluster

    _when_running(lambda _: cluster.remove_node(other, allow_graceful=False), at=2)  # the nodes inherit its variable
    small = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **small})
    other = cluster.add_node(num_cpus=1, **small)
    try:
        made = summary("run", *world("Slow"), "--on", f"ray:{cluster.address}", "--out", "there")
        assert made["scored"] == made["tasks"], made
        assert any("lost with a worker" in line for line in made["advice"]), made
    finally:
        ray.shutdown()
        cluster.shutdown()


def lead() -> None:
    """A lead that is killed continues with --resume, and makes nothing twice."""
    words = ["run", *world("Slow"), "--on", "ray", "--out", "there"]
    _when_running(lambda _: running.kill(), at=4)
    running = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, start_new_session=True)
    assert running.wait(200) == -signal.SIGKILL
    time.sleep(5)
    summary(*words, "--resume")
    here = summary("run", *world("Slow"), "--out", "here")
    assert here["scored"] == here["tasks"]
    assert rewards("here") == rewards("there")
    assert all(len(found) == 1 for found in rewards("there").values())


def refused() -> None:
    """Each refusal is one sentence, before a model is loaded."""
    run = ["run", *world(), "--out", "out"]
    assert "no Ray cluster answers" in refusal(*run, "--on", "ray:127.0.0.1:9")
    assert "ray:ADDRESS" in refusal(*run, "--on", "slurm")
    assert "so many CPUs" in refusal(*run, "--on", "ray", "--set", "on.cpus=999")
    assert "unrecognized" in refusal("serve", "gateway", "--model", "model", "--on", "ray")
    players = ["--set", "players={other: {agents: [player/x], engine: {model: model}}}"]
    subprocess.run([sys.executable, DIGITS, "model"], check=True, capture_output=True, timeout=100)
    assert "players" in refusal("train", *digits(), *players, "--on", "ray", "--out", "out")
    os.environ["RAY_AUTH_MODE"] = "token"  # `Cluster` doesn't turn it on, as `ray start` does
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        said = refusal(*run, "--on", f"ray:{cluster.address}", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
        assert "token" in said, said
    finally:
        cluster.shutdown()
    assert not Path("out").exists()


def _when_running(act: Callable[[int], object], at: int = 1) -> None:
    """Call `act` with the process id of an episode, once the episodes have begun `at` turns."""
    Path("turns").unlink(missing_ok=True)
    os.environ["TURNS"] = str(Path("turns").absolute())

    def wait() -> None:
        while not Path("turns").exists() or len(Path("turns").read_text().splitlines()) < at:
            time.sleep(0.05)
        act(int(Path("turns").read_text().splitlines()[0]))

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
