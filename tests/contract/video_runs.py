"""Runs whose episodes show videos to models that read them natively. Run by `test_video_checks.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tapereel as tr
from tapereel.agents.engines.embedded import load_pictures
from tapereel.agents.vision import save_tiny_vision
from tapereel.cli import main
from tapereel.finetune import rows
from tapereel.tapes import Video
from tapereel.tapes.store import Store, read_metrics

from .video_checks import EXACT, FAMILY, loaded


class Clip(tr.Observation):
    question: str
    video: Video
    picture: tr.Picture | None = None


def film(n: int, seed: int) -> tuple[Video, np.ndarray]:
    frames = np.random.default_rng(seed).integers(0, 256, (n, 24, 16, 3), dtype="uint8")
    return Video.of(frames, fps=1.5, indices=range(0, 2 * n, 2)), frames


TASKS = [film(n, n)[0] for n in (2, 3, 6)]


class Clips(tr.Environment):
    """Shows the task, a video, then another one with as many frames and a picture."""

    async def reset(self, task: Video) -> Clip:
        self.n, self.turn = len(task.frames), 0
        return Clip(question="Where to?", video=task)

    async def step(self, action: tr.Action) -> tr.Outcome:
        self.turn += 1
        reward = sum(map(ord, str(action))) % 7 / 7
        video, frames = film(self.n, 10 * self.n + self.turn)
        seen = Clip(question="Where to?", video=video, picture=tr.Picture.of(frames[0, :16]))
        return tr.Outcome(observation=seen, reward=reward, terminated=self.turn == 2)


def trained(folder: Path, family: str, *, updates: int = 2, resume: bool = False, **more: Any) -> Path:
    if not (folder / "model").exists():
        save_tiny_vision(folder / "model", family)  # type: ignore[arg-type]
    settings = {
        "loop.groups": 2,
        "loop.group_size": 3,
        "loop.max_lag": 0,
        "loop.sampling.max_tokens": 3,
        "loop.optimiser.lr": 1e-3,
        "loop.checkpoint_every": 1,
        "loop.keep_checkpoints": 3,
        "engine.capacity": 1024,
        "engine.renderer.video": "native",
        "evaluation.fraction": 0,
        **more,
    }
    recipe, out, model = settings.pop("recipe", "grpo"), folder / "run", str(folder / "model")
    tr.train(
        tr.ChatAgent(), Clips, TASKS, model, updates=updates, recipe=recipe, out=out, settings=settings,
        resume=resume,
    )  # fmt: skip
    return out


@FAMILY
def test_a_run_with_native_videos_is_verified_replayed_requeried_reproduced_and_resumed(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, family)
    mismatch = [line["mismatch"] for line in read_metrics(run / "metrics.jsonl") if "mismatch" in line]
    assert len(mismatch) == 2
    assert max(mismatch) < EXACT
    saved = load_pictures(sorted((run / "checkpoints").glob("*/hf"))[-1], loaded(family).found.tokenizer, "native")
    with Store.open(run) as store:
        tapes = list(store.tapes(split="train"))
        for tape in tapes:
            assert tape.begin.task.given in TASKS
            assert saved is not None
            assert tape.begin.versions["processor"] == saved.hash
            places = tape.call_places(list(tape.calls)[-1])
            assert [place.kind for place in places] == ["video", "video", "image"]
            assert places[0].times == tuple(2 * k / 1.5 for k in range(len(places[0].media)))
            assert rows(tape)[-1].places == places
    for words in (["verify"], ["replay", "agent"], ["replay", "model"], ["reproduce"]):
        more = ["--agent", "tapereel:ChatAgent"] if "agent" in words else []
        assert main([*words, str(run), *more, "--json"]) == 0, capsys.readouterr().out[-2000:]
    trained(tmp_path, family, updates=3, resume=True)
    mismatch = [line["mismatch"] for line in read_metrics(run / "metrics.jsonl") if "mismatch" in line]
    assert len(mismatch) == 3
    assert max(mismatch) < EXACT


@pytest.mark.parametrize("kind", ["critic", "adapters"])
def test_critics_adapters_and_references_see_videos(kind: str, tmp_path: Path) -> None:
    more: dict[str, dict[str, Any]] = {
        "critic": {"recipe": "ppo", "loop.critic": {"body": "own"}, "trainer.freeze": "nothing"},
        "adapters": {
            "trainer.lora": {"rank": 4},
            "loop.changes": {"regulariser": [{"kind": "kl", "beta": 0.1}]},
            "loop.reference": {"model": str(tmp_path / "model")},
        },
    }
    run = trained(tmp_path, "qwen2_5_vl", updates=1, **more[kind])
    (line,) = [line for line in read_metrics(run / "metrics.jsonl") if "mismatch" in line]
    assert line["mismatch"] < EXACT
    assert main(["reproduce", str(run), "--json"]) == 0
