"""check_engine: scripted and embedded engines pass, and each broken engine is reported by the check that it fails."""

from __future__ import annotations

import asyncio
import copy
import re
from array import array
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tapereel.agents import Capability, Completion, EmbeddedEngine, EngineError, Request, ScriptedEngine, check_engine
from tapereel.agents.engines.engine import MEMBERS, require
from tapereel.agents.setup import make_engine
from tapereel.agents.setup.engine_config import CustomConfig
from tapereel.agents.setup.team_config import PartnerConfig
from tapereel.finetune.loop.loop import check_engines
from tapereel.tapes.errors import UsageError

from ...finetune.loop.lab import RENDERER, model, settings_of

if TYPE_CHECKING:
    from torch import Tensor


class Minimal:
    """An engine of one's own: it samples the same ids for every request, and takes weights."""

    name, renderer, context = "minimal", RENDERER, None
    can: frozenset[Capability] = frozenset({"stats", "weights"})
    changing = False

    def __init__(self, length: int = 3) -> None:
        self.length = length
        self.version = "v0"
        self.stats = SimpleNamespace(busy_seconds=0.0)

    async def complete(self, request: Request) -> Completion:
        ids = array("i", [5] * self.length)
        for at in range(self.length):
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                if request.on_partial is not None:
                    request.on_partial(self._completion(ids[:at], "cancelled"))
                raise
        return self._completion(ids, "length")

    def _completion(self, ids: array[int], finish: Any) -> Completion:
        spans = ((self.version, 0, len(ids)),) if ids else ()
        return Completion(text="", ids=ids, logprobs=array("f", [-1.0] * len(ids)), spans=spans, finish=finish)

    async def sync_weights(self, state: Mapping[str, Tensor], version: str, mode: str = "reprefill") -> None:
        self.version = version

    def forget(self, cache_key: str) -> None:
        """Nothing is cached."""

    async def close(self) -> None:
        """Nothing is held."""


def not_an_engine() -> object:
    return SimpleNamespace(name="half", renderer=None)


def test_a_scripted_engine_passes() -> None:
    report = check_engine(ScriptedEngine(lambda request: "one two three"))
    assert report.ok, str(report)
    assert not report.trainable
    assert re.match("skipped: .*texts", report.checks["tokens"])
    assert "(samples" in str(report)


def test_an_embedded_engine_passes_with_new_weights() -> None:
    policy = model()
    engine = EmbeddedEngine(copy.deepcopy(policy), RENDERER, version="v0", slots=4, copy=False)
    report = check_engine(engine, messages=[{"role": "user", "content": "a"}], weights=policy.state_dict())
    assert set(report.checks.values()) == {"ok"}, str(report)
    assert report.trainable
    assert report.tokens > 0


def test_an_engine_of_ones_own_passes_as_an_object_and_as_a_factory() -> None:
    async def made() -> Minimal:
        return Minimal()

    for engine in (Minimal(), Minimal, made):
        report = check_engine(engine, messages=[{"role": "user", "content": "a"}], weights={}, trainable=True)
        assert set(report.checks.values()) == {"ok"}, str(report)


class Uneven(Minimal):
    async def complete(self, request: Request) -> Completion:
        return replace(await super().complete(request), logprobs=array("f", [-1.0]))


class Gaps(Minimal):
    async def complete(self, request: Request) -> Completion:
        return replace(await super().complete(request), spans=(("v0", 0, 1),))


class Counting(Minimal):
    asked = 0

    async def complete(self, request: Request) -> Completion:
        self.asked += 1
        return replace(await super().complete(request), ids=array("i", [5, 5, self.asked]))


class Deaf(Minimal):
    async def complete(self, request: Request) -> Completion:
        try:
            return await super().complete(request)
        except asyncio.CancelledError:
            return Completion(text="")


class Stale(Minimal):
    async def sync_weights(self, state: Any, version: str, mode: str = "reprefill") -> None:
        """Forgets to change the version."""


class ClosesOnce(Minimal):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise EngineError("closed already")
        self.closed = True


class Failing(Minimal):
    async def complete(self, request: Request) -> Completion:
        raise RuntimeError("no model here")


class Hanging(Minimal):
    async def complete(self, request: Request) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError


class Sleepless(Minimal):
    can = Minimal.can | {"sleep"}

    async def sleep(self) -> None:
        """Falls asleep, and can't be woken."""


class Misspelt(Minimal):
    can: Any = frozenset({"stats", "wieghts"})


class Text(Minimal):
    can: Any = "weights"


@pytest.mark.parametrize(
    ("engine", "check", "state", "sentence"),
    [
        (Uneven, "tokens", "failed", "3 ids.*1 log-probs"),
        (Gaps, "spans", "failed", r"\('v0', 0, 1\).*3 ids"),
        (Counting, "determinism", "warned", r"seed.*\[5, 5, \d\].*\[5, 5, 1\]"),
        (Deaf, "cancellation", "failed", "returned.*CancelledError"),
        (Stale, "weights", "failed", "'v0'.*sync_weights"),
        (ClosesOnce, "close", "failed", "second.*EngineError: closed"),
        (Failing, "completes", "failed", "complete.*RuntimeError: "),
        (Hanging, "completes", "failed", "complete.* 1 s"),
        (not_an_engine, "members", "failed", "can, context, complete, forget, close .*`Engine`"),
        (Sleepless, "members", "failed", "'sleep'.* wake:"),
        (Misspelt, "members", "failed", "'wieghts'.*'weights'"),
        (Text, "members", "failed", "'weights': .*frozenset"),
    ],
)
def test_a_broken_engine_is_reported(engine: Any, check: str, state: str, sentence: str) -> None:
    report = check_engine(engine, messages=[{"role": "user", "content": "a"}], weights={}, timeout=1.0)
    assert report.checks[check] == state, str(report)
    assert re.search(sentence, str(report))
    assert report.ok == (state == "warned")


def test_a_scripted_engine_can_not_be_trained() -> None:
    report = check_engine(ScriptedEngine(lambda request: "a"), trainable=True)
    assert re.search(
        "'stats': define stats .*'weights': define version, changing, sync_weights ", str(report), re.DOTALL
    )
    with pytest.raises(UsageError, match=r"ScriptedEngine.* stats .* version, changing, sync_weights "):
        check_engines([ScriptedEngine(["a"])], settings_of())
    with pytest.raises(ValueError, match=r"`loop\.sleep`.* minimal "):
        check_engines([Minimal()], settings_of(sleep=True, max_lag=0))


@pytest.mark.parametrize("capability", MEMBERS)
def test_a_capability_is_what_the_engine_declares_and_has(capability: Capability) -> None:
    class Bare(Minimal):
        can: frozenset[Capability] = frozenset()
        changing: Any = None
        sync_weights: Any = None

        def __init__(self) -> None:
            """Without the attributes `version` and `stats`."""

    absent = [name for name in MEMBERS[capability] if name != "changing"]
    with pytest.raises(UsageError, match=f"'{capability}'") as refused:
        require(Bare(), [capability], "This test")
    assert all(name in str(refused.value) for name in absent)
    engine: Any = Bare()
    engine.can = frozenset({capability})
    if absent:
        with pytest.raises(UsageError, match=f"'{capability}'") as refused:
            require(engine, (), "This test")
        assert all(name in str(refused.value) for name in absent)
    for name in absent:
        setattr(engine, name, lambda: None)
    require(engine, [capability], "This test")


def config_of(kind: str, **settings: Any) -> CustomConfig:
    player = PartnerConfig.model_validate({"agents": ("a",), "engine": {"kind": kind, **settings}})
    assert isinstance(player.engine, CustomConfig)
    return player.engine


def test_a_configuration_names_an_engine_of_ones_own() -> None:
    here = f"{__name__}:"
    made = asyncio.run(make_engine(config_of(f"{here}Minimal", options={"length": 2})))
    assert isinstance(made.engine, Minimal)
    assert (made.engine.length, made.publish) == (2, None)
    with pytest.raises(UsageError, match=r"engine\.options.*'size'"):
        config_of(f"{here}Minimal", options={"size": 2}).make()
    with pytest.raises(UsageError, match=r":RENDERER .*engine\.kind"):
        config_of(f"{here}RENDERER").make()
    with pytest.raises(UsageError, match=r"not_an_engine.* can, context, complete, forget, close"):
        config_of(f"{here}not_an_engine").make()
    with pytest.raises(ValueError, match=r"api_key.*key_variable"):
        config_of(f"{here}Minimal", options={"api_key": "x"})


OWN = """
import asyncio
from tapereel.agents.engines.embedded.embedded_engine import EmbeddedEngine
from tapereel.agents.engines.embedded.pretrained import load_pretrained
from tapereel.agents.engines.scripted import ScriptedEngine
from tapereel.agents.rendering.renderer import Renderer

def engine(folder):
    found = load_pretrained(folder)
    return EmbeddedEngine(found.model, Renderer(found.tokenizer), version="own:0", slots=4)

def texts(folder):
    return ScriptedEngine(lambda request: "a")
"""


def test_train_uses_an_engine_of_ones_own_and_refuses_one_without_weights(tmp_path: Path) -> None:
    from tapereel.finetune.run.train_config import TrainConfig
    from tapereel.finetune.run.train_run import train

    from ...finetune.loop.lab import WORDS
    from ...finetune.loop.test_sleep import scene

    folder = tmp_path / "model"
    model().save_pretrained(folder)
    WORDS.save_pretrained(folder)
    module = tmp_path / "own_engines_of_this_test.py"
    module.write_text(OWN)

    def config(name: str) -> TrainConfig:
        settings = scene(folder, "http://127.0.0.1:1")
        settings["engine"] = {"kind": f"{module}:{name}", "model": str(folder), "options": {"folder": str(folder)}}
        return TrainConfig.model_validate({**settings, "loop": settings_of(updates=1, max_lag=0)})

    with pytest.raises(UsageError, match=r" stats .* version, changing, sync_weights "):
        train(config("texts"), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    summary = train(config("engine"), tmp_path / "run")
    assert (summary.updates, summary.books_close) == (1, True)
    settings = scene(folder, "http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"engine\.model"):
        TrainConfig.model_validate({**settings, "engine": {"kind": f"{module}:engine"}})
