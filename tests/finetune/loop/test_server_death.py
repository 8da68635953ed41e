"""`tapereel train` with servers that die, at moments that a proxy in front of one reaches surely.

The run goes on with the servers that are left, and takes one again that has come back and has the newest weights. If
none is left, it ends within its bounds, says which server and what to do, and the next process goes on. At last, every
token is its version's, every tape has ended and the books close.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from tapereel.finetune import TrainConfig
from tapereel.tapes import Status
from tapereel.tapes.common import dump_config
from tapereel.tapes.store import Store

from ...envs.remote.process import Served
from . import lab
from .deadly_proxy import DeadlyProxy, Moment
from .versions import assert_versions_true

pytestmark = [pytest.mark.kill, pytest.mark.timeout(1500)]

UPDATES, EPISODES = 30, 16
"""Versions that the run makes, each of so many episodes."""
PAUSE, RELOAD, NAME, RESUME = "/pause", "/collective_rpc", "/update_weight_version", "/resume"
ASK = "/inference/v1/generate"
KEY = "DEADLY_SERVERS_KEY"
"""The variable with the servers' key: by the proxy's address, no client finds the file of the key."""


class Scene:
    """A model, servers of it, the second behind the proxy, and the configuration of a run with them."""

    def __init__(self, path: Path) -> None:
        self.path, self.run = path, path / "run"
        self.gate, self.addresses = path / "gate", path / "servers.txt"
        self.model = path / "model"
        lab.model().save_pretrained(self.model)
        lab.WORDS.save_pretrained(self.model)
        self.servers = [
            Served(
                str(self.model),
                path / f"server-{k}.log",
                "--engine",
                "embedded",
                "--key",
                KEY,
                verb="serve model",
                environment={"OMP_NUM_THREADS": "1"},
            )
            for k in range(3)
        ]
        self.mortal = self.servers[1]
        self.proxy = DeadlyProxy(lambda: self.mortal.url)
        self.process: subprocess.Popen[str] | None = None

    def write(self, *urls: str, control_seconds: float = 60.0) -> None:
        """The configuration with the servers at these addresses."""
        world = Path(lab.__file__)
        self.addresses.write_text("".join(f"{url}\n" for url in urls))
        config = TrainConfig(
            agent=f"{world}:Speaker",
            env=f"{world}:Gated",
            tasks=("ab", "cd", "ac", "db"),
            engine={
                "kind": "vllm",
                "model": str(self.model),
                "urls": f"file:{self.addresses}",
                "weights_folder": str(self.path / "weights"),
                "control_seconds": control_seconds,
                "key_variable": KEY,
                "patience": 10.0,
            },
            evaluation={"fraction": 0},
            loop=lab.settings_of(
                updates=UPDATES,
                groups=4,
                group_size=4,
                max_lag=1,
                checkpoint_every=1,
                keep_checkpoints=None,
                sampling={"max_tokens": 12},
            ),
        )
        (self.path / "train.yaml").write_text(dump_config(config))

    def die(self) -> None:
        """The mortal server dies and comes up again, and the run is held until it has the weights."""
        self.gate.touch()
        self.mortal.end()
        self.mortal.start()

    def back(self, url: str = "") -> None:
        """The mortal server has the weights. `url` joins."""
        if url:
            self.addresses.write_text(f"{self.addresses.read_text()}{url}\n")
        self.gate.unlink()

    def start(self) -> None:
        """The verb, as a user starts it, and starts it again."""
        command = [
            sys.executable,
            "-m",
            "tapereel.cli",
            "train",
            "--config",
            str(self.path / "train.yaml"),
            "--out",
            str(self.run),
            "--json",
            *(["--resume"] if self.run.exists() else []),
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )

    def kill_trainer(self) -> None:
        assert self.process is not None
        self.process.kill()

    def until_the_end(self, *moments: Moment) -> tuple[int, str, str]:
        """Exit code and what it printed, of a process in which that happens."""
        self.proxy.moments = list(moments)
        self.start()
        assert self.process is not None
        out, err = self.process.communicate(timeout=600)
        assert all(moment.happened for moment in moments), (moments, err[-3000:])
        return self.process.returncode, out, err

    def verb(self, *words: str) -> tuple[int, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "tapereel.cli", *words, "--json"],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv(KEY, "the-key-of-deadly-servers")
    monkeypatch.setenv(lab.GATE, str(tmp_path / "gate"))
    made = Scene(tmp_path)
    with made.servers[0], made.servers[1], made.proxy:
        made.write(made.servers[0].url, made.proxy.url)
        yield made
        if made.process is not None and made.process.poll() is None:
            made.process.kill()
            made.process.communicate()


@pytest.mark.ledger("T29")
def test_a_server_may_die_in_any_step_of_a_sync_and_another_may_join(scene: Scene) -> None:
    """One run: the server dies, comes back and gets the weights, five times. A third one joins meanwhile."""
    deaths = [(PAUSE, "asked"), (RELOAD, "asked"), (NAME, "answered"), (RESUME, "answered"), (ASK, "asked")]
    with scene.servers[2] as third:
        moments = []
        for k, (route, point) in enumerate(deaths):
            moments.append(Moment(route, point, 2, scene.die))
            moments.append(Moment(RESUME, "passed", 1, partial(scene.back, third.url if k == 0 else "")))
        code, _, told = scene.until_the_end(*moments)
        assert code == 0, told
        # The last death is noticed in a request, and the server is given its weights again without being left out.
        assert told.count("is left out until it has the newest weights") >= 4, told
        for step in ("pause", "update", "finish", "resume"):
            assert re.search(rf"{re.escape(scene.proxy.url)} is left out.*`{step}`", told), told
        assert re.search(rf"{re.escape(third.url)} has the weights of .* and samples from now on", told), told
        assert_done(scene)


@pytest.mark.ledger("T29")
def test_if_the_last_server_dies_the_run_stops_and_goes_on_with_others(scene: Scene) -> None:
    scene.write(scene.proxy.url)
    code, _, told = scene.until_the_end(Moment(RELOAD, "asked", 3, scene.mortal.end))
    assert code == 69, told
    assert "`--resume`" in told
    assert re.search(rf"`update`.*{re.escape(scene.proxy.url)}", told), told
    assert scene.verb("verify", str(scene.run))[0] == 0
    with Store.open(scene.run) as store:
        assert all(tape.status is not None for tape in store.tapes()), "who can still write, ends every tape"
    scene.write(scene.servers[0].url)  # the address of the dead one is not needed again
    assert_done(scene)


@pytest.mark.parametrize("point", ["asked", "answered"])
def test_a_trainer_that_dies_in_a_sync_goes_on(scene: Scene, point: Literal["asked", "answered"]) -> None:
    code, _, told = scene.until_the_end(Moment(RELOAD, point, 3, scene.kill_trainer))
    assert code == -9, told
    assert_done(scene)


def test_a_server_that_stands_still_is_waited_for_within_the_bounds(scene: Scene) -> None:
    scene.write(scene.servers[0].url, scene.proxy.url, control_seconds=10.0)
    code, _, told = scene.until_the_end(Moment(RELOAD, "asked", 3, scene.mortal.hang))
    assert code == 0, told
    assert re.search(rf"{re.escape(scene.proxy.url)} is left out.*`update`.* 10 s", told), told
    assert_done(scene)


def test_a_server_that_comes_up_again_takes_part_once_it_has_the_weights(scene: Scene) -> None:
    def again() -> None:
        scene.mortal.end()
        scene.mortal.start()

    # Right after it got some: the next ones come an update later, and what is asked of it by then is asked elsewhere.
    code, _, told = scene.until_the_end(Moment(RESUME, "passed", 3, again))
    assert code == 0, told
    assert_done(scene)


def assert_done(scene: Scene) -> None:
    """The run comes to its end, with everything in order."""
    code, out, told = scene.until_the_end()
    assert code == 0, told
    summary = json.loads(out)
    assert (summary["updates"], summary["books_close"]) == (UPDATES, True)
    for verb in ("verify", "audit", "reproduce"):
        code, found = scene.verb(verb, str(scene.run))
        assert code == 0, (verb, found)
    with Store.open(scene.run) as store:
        assert [use.update for use in store.ledger(summary["lineage"]).uses] == list(range(UPDATES))
        ends = Counter(tape.status for tape in store.tapes())
    assert None not in ends
    assert ends[Status.FINISHED] >= UPDATES * EPISODES
    tokens = assert_versions_true(scene.run, scene.path / "fresh", scene.model, summary["lineage"], UPDATES)
    print(dict(ends), f"{tokens} tokens are their versions'")
