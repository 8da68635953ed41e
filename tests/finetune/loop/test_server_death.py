"""`tapereel train` with two servers of which one dies, at moments that a proxy in front of it reaches surely.

Each process ends within its bounds and says which server and what to do; the next one goes on with the same run, in
which at last every token is its version's, every tape has ended and the books close.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tapereel.finetune.run.train_config import TrainConfig
from tapereel.tapes import Status
from tapereel.tapes.common.config import dump_config
from tapereel.tapes.store.store import Store

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
    """A model, two servers of it, the second behind the proxy, and the configuration of a run with them."""

    def __init__(self, path: Path) -> None:
        self.path, self.run = path, path / "run"
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
            for k in range(2)
        ]
        self.mortal = self.servers[1]
        self.proxy = DeadlyProxy(lambda: self.mortal.url)
        self.process: subprocess.Popen[str] | None = None

    def write(self, control_seconds: float = 60.0, servers: int = 2) -> None:
        """The configuration, once the addresses are known: of the first server alone, or of both."""
        world = Path(lab.__file__)
        config = TrainConfig(
            agent=f"{world}:Speaker",
            env=f"{world}:Letters",
            tasks=("ab", "cd", "ac", "db"),
            engine={
                "kind": "vllm",
                "model": str(self.model),
                "urls": [self.servers[0].url, self.proxy.url][:servers],
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

    def until_the_end(self, moment: Moment | None = None) -> tuple[int, str, str]:
        """Exit code and what it printed, of a process in which that happens."""
        self.proxy.moment = moment
        self.start()
        assert self.process is not None
        out, err = self.process.communicate(timeout=300)
        assert moment is None or moment.happened, err[-3000:]
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
def scene(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv(KEY, "the-key-of-deadly-servers")
    made = Scene(tmp_path)
    with made.servers[0], made.servers[1], made.proxy:
        made.write(getattr(request, "param", 60.0))
        yield made
        if made.process is not None and made.process.poll() is None:
            made.process.kill()
            made.process.communicate()


@pytest.mark.ledger("T29")
def test_whoever_dies_in_mid_update_the_run_says_so_and_goes_on(scene: Scene) -> None:
    deaths = [
        (Moment(PAUSE, "asked", 3, scene.mortal.end), "pause"),
        (Moment(RELOAD, "asked", 3, scene.mortal.end), "update"),
        (Moment(NAME, "answered", 3, scene.mortal.end), "finish"),
        (Moment(RESUME, "answered", 3, scene.mortal.end), "resume"),
        # The 40th request may be sent while weights are synced, so the step that fails first differs.
        (Moment(ASK, "asked", 40, scene.mortal.end), "[a-z]+"),
    ]
    for moment, step in deaths:
        code, _, told = scene.until_the_end(moment)
        url = re.escape(scene.proxy.url)
        # A sync is not repeated. Where episodes notice first, the run waits for the server before it stops.
        assert code == 69, told
        assert "`--resume`" in told
        said = re.search(rf"`{step}`.*{url}|{url}.*\bweights\b|{url}.*engine.patience", told)
        assert said, told
        assert scene.verb("verify", str(scene.run))[0] == 0
        with Store.open(scene.run) as store:
            assert all(tape.status is not None for tape in store.tapes()), "who can still write, ends every tape"
        scene.mortal.start()
    for point in ("asked", "answered"):
        code, _, told = scene.until_the_end(Moment(RELOAD, point, 3, scene.kill_trainer))
        assert code == -9, told
    assert_done(scene)


@pytest.mark.parametrize("scene", [10.0], indirect=True)
def test_a_server_that_stands_still_is_waited_for_within_the_bounds(scene: Scene) -> None:
    code, _, told = scene.until_the_end(Moment(RELOAD, "asked", 3, scene.mortal.hang))
    assert code == 69
    assert re.search(rf"`update`.*{re.escape(scene.proxy.url)}", told)
    assert " 10 s" in told
    scene.mortal.end()
    scene.mortal.start()
    assert_done(scene)


def test_a_server_that_is_gone_for_good_is_left_out(scene: Scene) -> None:
    code, _, told = scene.until_the_end(Moment(RELOAD, "asked", 3, scene.mortal.end))
    assert code == 69, told
    scene.write(servers=1)
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
