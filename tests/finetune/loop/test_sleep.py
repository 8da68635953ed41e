"""Servers that sleep while an update is computed: when they do, and what must hold for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.finetune import TrainConfig
from tapereel.finetune.run import train

from ...agents.faulty import FaultyServer
from .hosting import in_thread
from .lab import WORDS, Letters, Speaker, assert_books_close, model, settings_of

pytestmark = pytest.mark.timeout(120)
ASLEEP = [
    ("/sleep", None),
    ("/reset_prefix_cache", None),
    ("/wake_up", "weights"),
    ("/pause", None),
    ("/collective_rpc", None),
    ("/reset_prefix_cache", None),
    ("/update_weight_version", None),
    ("/resume", None),
    ("/reset_prefix_cache", None),
    ("/wake_up", "kv_cache"),
]
"""One update, to the server."""


def scene(folder: Path, url: str, **engine: Any) -> dict[str, Any]:
    return {
        "agent": f"{Speaker.__module__}:Speaker",
        "env": f"{Letters.__module__}:Letters",
        "tasks": ("a", "b", "c"),
        "evaluation": {"fraction": 0},
        "engine": {"kind": "vllm", "model": str(folder), "urls": [url], **engine},
    }


def sleeping(**loop: Any) -> Any:
    # The made-up log-probs are nobody's, so they can't be compared with the trainer's.
    return settings_of(updates=2, max_lag=0, sleep=True, sampler_tolerance=1e6, **loop)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    model().save_pretrained(path)
    WORDS.save_pretrained(path)
    return path


def test_a_server_sleeps_for_each_update_and_no_longer(folder: Path, tmp_path: Path) -> None:
    server = FaultyServer()
    with in_thread(server.up) as url:
        summary = train(TrainConfig(**scene(folder, url), loop=sleeping()), tmp_path / "run")
    assert (summary.updates, summary.books_close) == (2, True)
    assert_books_close(tmp_path / "run")
    told = [(route, body.get("tags")) for route, body in server.told]
    began = told.index(("/sleep", None))
    assert told[began:] == 2 * ASLEEP
    assert "/sleep" not in [route for route, _ in told[:began]]
    asked = [body["request_id"] for body in server.asked]
    assert len(asked) == len(set(asked)), "nothing was cut short and asked again"


def test_a_server_is_woken_where_an_update_failed(folder: Path, tmp_path: Path) -> None:
    class Wrong(FaultyServer):
        """Gives the episodes other log-probs than those of the weights that it serves."""

        def answer(self, body: dict[str, Any], *args: Any) -> dict[str, Any]:
            answer = super().answer(body, *args)
            for token in (
                answer["choices"][0]["logprobs"]["content"] if body["sampling_params"]["max_tokens"] > 1 else ()
            ):
                token["logprob"] = -90.0
            return answer

    server = Wrong()
    with in_thread(server.up) as url:
        loop = sleeping().model_copy(update={"sampler_tolerance": 20.0})
        with pytest.raises(Exception, match="sampler_tolerance"):
            train(TrainConfig(**scene(folder, url), loop=loop), tmp_path / "run")
    assert [body.get("tags") for route, body in server.told if route in ("/sleep", "/wake_up")] == [
        None,
        "weights",
        "kv_cache",
    ]


@pytest.mark.parametrize(
    ("engine", "loop", "why"),
    [
        ({}, {"max_lag": 1}, "max_lag=1.*max_lag=0"),
        ({"weights": "adapters"}, {}, r"`loop\.sleep`.*\badapters\b"),
        ({"kind": "embedded"}, {}, r"`loop\.sleep`.*\bprocess\b"),
    ],
)
def test_what_can_not_sleep_is_refused(folder: Path, engine: dict[str, Any], loop: dict[str, Any], why: str) -> None:
    settings = scene(folder, "http://127.0.0.1:1", **engine)
    if engine.get("kind") == "embedded":
        del settings["engine"]["urls"]
    with pytest.raises(ValueError, match=why):
        TrainConfig.model_validate({**settings, "loop": {"sleep": True, "max_lag": 0, **loop}})


def test_a_demo_has_nobody_to_sleep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--set", "loop.sleep=true", "--set", "loop.max_lag=0", "--dry-run"]) == 64
    assert "`loop.sleep`" in capsys.readouterr().err


def test_the_command_line_says_so_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "train",
        "--agent",
        "a:b",
        "--env",
        "a:b",
        "--tasks",
        "a:b",
        "--model",
        str(folder),
        "--set",
        "loop.sleep=true",
        "--out",
        str(folder / "run"),
    ]
    assert main(words) == 64
    assert "max_lag=0" in capsys.readouterr().err
