"""The demo: an untrained chat model learns what words mean to a calculator, in one run directory, in minutes on a CPU.

Its problems look like `47plus83`. The demonstrations show how to use the calculator, but only the rewards show what the
words mean. A policy that does the same in all tasks solves a third of them. So the held-out reward, greedy or sampled,
can't come near 1 by drift alone.

The demo only calls `run` and `train`, as a user's script would. `run` records the demonstrations, and `train` imitates
them and then learns from rewards. `controls` adds two runs of `train`. They begin with the weights after the imitation
and train on as many tokens, but without the rewards that are claimed to teach. The demo writes these files and folders:

    OUT                   the training run
    OUT/demo.yaml         the settings of the demo
    OUT/model-SIZE        the untrained model
    OUT/demonstrations    the run that recorded the demonstrations
    OUT/controls/NAME     the control runs `sft` and `shuffled`

In the demo with pictures, a vision model learns which way each lamp at a crossing tells it to go. The demonstrations go
in random directions, so only the rewards show what a lamp's colour means.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar, Literal, TypedDict, cast

from pydantic import Field, model_validator

from ...agents import Limits
from ...agents.runs.runner import RunConfig, RunSummary, run
from ...agents.setup.engine_config import EmbeddedConfig, ScriptedConfig
from ...agents.setup.setup import SeedConfig
from ...envs.adapters.calculator import word_problems
from ...envs.adapters.lamps import Lamps, lamp_tasks
from ...envs.taskset import Taskset
from ...tapes import Sampling
from ...tapes.common.config import check_version, dump_config, load_config, translated
from ...tapes.common.config_yaml import read_yaml
from ...tapes.common.progress import Progress, silent
from ...tapes.errors import MissingExtra, UsageError
from ...tapes.store.disk import REAL, put_file
from ...tapes.store.run_directory import CONFIG, METRICS, read_metrics, recorded_settings
from ...tapes.value import Value
from ...tapes.view.overview import Score

try:
    from ...agents.engines.embedded.tiny_model import save_tiny
    from ...agents.vision.tiny_vision import save_tiny_vision
    from ..loop.loop_config import LoopConfig, WarmStartConfig
    from ..trainer.options import OptimiserConfig
    from ..trainer.schedule import Schedule
    from .player_config import TrainerConfig
    from .run_report import TrainSummary
    from .trackers import TrackedConfig
    from .train_config import EvaluationConfig, ImitationConfig, TrainConfig
    from .train_run import train
    from .training import OnEpisode
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers", "numpy", "tokenizers"):
        raise
    raise MissingExtra(error.name, "demo", "the demo") from error


SCENE = f"{__package__}.demo_scene"
DEMO = "demo.yaml"
"""The file with the settings of a demo. `config.yaml` has the settings of its training run."""
SPARE = 1.25
"""The held-out split is requested this many times as large as needed, because a split by hash has only about the
requested size."""
CONTEXT = 64
"""Maximum number of tokens in prompt and completion together. A whole episode takes about 35."""


class DemoScene(TypedDict):
    """The agent, the environment and the tasks of a demo, as keyword arguments of `run` and `train`."""

    agent: str
    env: str
    tasks: Taskset


class DemoConfig(SeedConfig, TrackedConfig):
    """The settings of the demo. The numbers in the README were measured with the defaults."""

    other_names = TrainConfig.other_names
    algo: Literal["grpo", "reinforce", "rloo", "ppo", "dapo"] = "grpo"
    """The recipe for the loop. `loop.recipe` is set to it."""
    model_size: Literal["micro", "tiny", "small", "base"] = "small"
    tasks: int = Field(default=14_000, ge=64)
    held_out: int = Field(default=512, ge=16)
    """Held-out tasks per evaluation."""
    demonstrations: int = Field(default=12_000, ge=64)
    warm: WarmStartConfig = WarmStartConfig(
        updates=360,
        batch=64,
        optimiser=OptimiserConfig(lr=3e-3, schedule=Schedule(kind="cosine", warmup=20, total=360)),
    )
    loop: LoopConfig = LoopConfig(
        updates=120,
        groups=16,
        group_size=16,
        sampling=Sampling(max_tokens=16),
        limits=Limits(turns=4, agent_seconds=120.0, system_seconds=600.0),
        optimiser=OptimiserConfig(lr=5e-4),
    )
    threads: int = Field(default=1, ge=1)
    """Number of torch threads. Two are faster on an idle machine, but one isn't slowed down by other work."""

    @model_validator(mode="after")
    def _agrees(self) -> DemoConfig:
        if self.loop.recipe not in (self.algo, LoopConfig.model_fields["recipe"].default):
            raise ValueError(
                f"loop.recipe is {self.loop.recipe!r} and algo is {self.algo!r}: a demo has the recipe "
                "that `algo` names: remove loop.recipe, or use `tapereel train` on tasks of your own"
            )
        if self.loop.sleep:
            raise ValueError("`loop.sleep` needs servers, and a demo's engine is in this process: remove `loop.sleep`")
        if self.loop.stop_at is not None:
            raise ValueError("`loop.stop_at` needs evaluations during the loop, and a demo has none: remove it")
        if self.held_out * SPARE >= self.tasks:
            raise ValueError(
                f"held_out is {self.held_out} of {self.tasks} tasks, and {SPARE} times as many are set aside, so no "
                "task is left to train on: raise tasks or lower held_out"
            )
        # The recorded configuration must name the recipe that trains.
        loop = LoopConfig.model_validate({**self.loop.model_dump(exclude_unset=True), "recipe": self.algo})
        object.__setattr__(self, "loop", loop)
        return self

    policy: ClassVar[str] = f"{SCENE}:press_a_key"
    """The demonstrator."""

    def model(self, out: Path) -> Path:
        """Return the folder of the untrained model in `out`."""
        return out / f"model-{self.model_size}"

    def save_model(self, folder: Path) -> None:
        """Make the untrained model."""
        save_tiny(folder, size=self.model_size, seed=self.seed, context=CONTEXT)

    def scene(self) -> DemoScene:
        """Return the agent, the environment and the tasks."""
        tasks = word_problems(self.tasks, self.seed)
        return {"agent": f"{SCENE}:calculator_agent", "env": f"{SCENE}:calculator", "tasks": tasks}

    def shown(self, train_tasks: Taskset) -> Taskset:
        """Return the tasks that are demonstrated."""
        n = self.demonstrations
        # The numbers differ from those in the word problems. Otherwise a symbol would reveal what a word means.
        symbols = word_problems((n + 1) // 2, self.seed + 10**9, symbols=True)
        return Taskset([train_tasks[k % len(train_tasks)] if k % 2 else symbols[k // 2] for k in range(n)])

    def recording(self, out: Path) -> RunConfig:
        """Return the settings of the run that records the demonstrations."""
        return RunConfig(
            engine=ScriptedConfig(policy=self.policy, tokenizer=str(self.model(out))),
            split="demo",
            seed=self.seed,
            limits=self.loop.limits,
            sampling=self.loop.sampling,
            concurrency=256,
        )

    def training(self, out: Path) -> TrainConfig:
        """Return the settings of the training run."""
        return TrainConfig(
            engine=EmbeddedConfig(model=str(self.model(out)), slots=256, capacity=CONTEXT),
            trainer=TrainerConfig(device="cpu", threads=self.threads),
            seed=self.seed,
            loop=self.loop,
            warm=ImitationConfig(tapes=str(out / "demonstrations"), **dict(self.warm)),
            evaluation=EvaluationConfig(
                fraction=self.set_aside,
                limit=self.held_out,
                every=None,
                sampling=self.loop.sampling.model_copy(update={"temperature": 1.0}),
                greedy=True,
                concurrency=256,
            ),
            trackers=self.trackers,
            tracking=self.tracking,
        )

    def after_imitation(self, out: Path) -> TrainConfig:
        """Return the settings of a training run that continues after the imitation of the demo in `out`. It begins with
        the demo's weights from that point."""
        made, warm = self.training(out), self.warm.updates
        model = out / "checkpoints" / f"update-{warm:06d}" / "hf" if warm else self.model(out)
        engine = made.engine.model_copy(update={"model": str(model)})
        return made.model_copy(update={"engine": engine, "warm": None})

    @property
    def set_aside(self) -> float:
        """The share of all tasks that is set aside. The held-out tasks are taken from it."""
        return self.held_out / self.tasks * SPARE


class PicturesDemoConfig(DemoConfig):
    """The settings of the demo with pictures."""

    model_size: Literal["small"] = "small"  # pyright: ignore[reportIncompatibleVariableOverride]
    blind: bool = False
    """In each walk, show the lamps of another walk, as a control experiment."""
    tasks: int = Field(default=800, ge=64)
    held_out: int = Field(default=192, ge=16)
    demonstrations: int = Field(default=512, ge=16)
    warm: WarmStartConfig = WarmStartConfig(
        updates=40,
        batch=64,
        optimiser=OptimiserConfig(lr=2e-3, schedule=Schedule(kind="cosine", warmup=10, total=40)),
    )
    loop: LoopConfig = LoopConfig(
        updates=70,
        groups=12,
        group_size=16,
        sampling=Sampling(max_tokens=2),
        limits=Limits(turns=3, agent_seconds=120.0, system_seconds=600.0),
        optimiser=OptimiserConfig(lr=8e-4),
    )
    policy: ClassVar[str] = f"{SCENE}:choose_a_way"

    def model(self, out: Path) -> Path:
        return out / ("model-blind" if self.blind else "model-seeing")

    def save_model(self, folder: Path) -> None:
        save_tiny_vision(folder, "qwen2_5_vl", seed=self.seed, context=CONTEXT)

    def scene(self) -> DemoScene:
        tasks = lamp_tasks(self.tasks, self.seed, blind=self.blind)
        return {"agent": f"{SCENE}:walker", "env": f"{Lamps.__module__}:{Lamps.__name__}", "tasks": tasks}

    def shown(self, train_tasks: Taskset) -> Taskset:
        return Taskset(list(train_tasks)[: self.demonstrations])

    def training(self, out: Path) -> TrainConfig:
        made = super().training(out)
        # The tower begins with random weights, so it must learn too.
        return made.model_copy(update={"trainer": made.trainer.model_copy(update={"freeze": "nothing"})})


class ControlSummary(Value):
    """The result of a control. It begins with the weights after the imitation and trains on as many tokens as the loop,
    but without the rewards."""

    after: float | None
    """Held-out reward with sampled answers."""
    greedy_after: float | None
    trained_tokens: int


class DemoSummary(TrainSummary):
    """The results of a demo."""

    seed: int
    algo: str
    controls: dict[str, ControlSummary]
    """`sft` imitates more instead of running the loop. `shuffled` runs the loop, but shuffles rewards within groups."""
    scores: tuple[Score, ...]
    """The table of results."""


def demo(
    config: DemoConfig,
    out: str | Path,
    *,
    controls: bool = False,
    resume: bool = False,
    progress: Progress = silent,
    on_episode: OnEpisode | None = None,
) -> DemoSummary:
    """Run the demo. With `resume`, only the parts that `out` lacks are run. `on_episode` is as in `train`, which also
    raises the same errors."""
    out = Path(out).absolute()
    shown = prepare(config, out, resume=resume, progress=progress)
    begun = (out / CONFIG).exists()
    summary = train(config.training(out), out, **config.scene(), resume=begun, progress=progress, on_episode=on_episode)
    put_file(REAL, out / DEMO, dump_config(config).encode())  # the run may have been made longer
    found = _control_runs(config, out, shown, progress) if controls or _controls(out) else {}
    return DemoSummary(
        **dict(summary), seed=config.seed, algo=config.algo, controls=found, scores=_scores(summary, found)
    )


def begun_demo(out: str | Path) -> DemoConfig | None:
    """Return the settings of the demo in `out`, or None if there is none. Raises OtherVersion if another version wrote
    it."""
    check_version(Path(out))
    path = Path(out) / DEMO
    if not path.exists():
        return None
    # Like a run's `config.yaml`, the file may have names of settings of earlier versions.
    found = list(translated(list(read_yaml(path.read_text(encoding="utf-8")))))
    kind = PicturesDemoConfig if ("blind",) in (keys for keys, _, _ in found) else DemoConfig
    return load_config(kind, None, [(".".join(keys), value, f"{path} line {line}") for keys, value, line in found])


def prepare(config: DemoConfig, out: Path, *, resume: bool, progress: Progress = silent) -> RunSummary:
    """Make the model in `out` and record the demonstrations. Anything that exists already is kept."""
    begun = (recorded_settings(out).get("loop") or {}).get("updates")
    if _controls(out) and begun != config.loop.updates:
        raise UsageError(
            f"the controls in {out} trained on as many tokens as {begun} updates of the loop: they can't be compared "
            f"with loop.updates={config.loop.updates}; choose another directory (`out=...`)"
        )
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; a run is a folder, so choose another path (`out=...`)")
    model, folder, scene = config.model(out), out / "demonstrations", config.scene()
    if not resume and ((out / DEMO).exists() or (out / CONFIG).exists()):
        raise UsageError(f"{out} holds a run already; continue it with `resume=True`, or choose another (`out=...`)")
    known = begun_demo(out)
    if known is not None and known.model(out) != model:
        raise UsageError(
            f"{out} was begun with {known.model(out).name}, not {model.name}: resume it with the same model"
        )
    out.mkdir(parents=True, exist_ok=True)
    if not (out / DEMO).exists():
        put_file(REAL, out / DEMO, dump_config(config).encode())
    if not model.is_dir():
        config.save_model(part := model.with_name(f"{model.name}.part"))
        part.rename(model)
    train_tasks, _ = scene["tasks"].split(1 - config.set_aside, config.set_aside)
    scene["tasks"] = config.shown(train_tasks)
    return run(config.recording(out), folder, **scene, resume=(folder / CONFIG).exists(), progress=progress)


def trained_tokens(run: Path) -> int:
    """Return how many tokens the run's loop has trained on. Before the loop, the warm start counts instead."""
    lines = [line for line in read_metrics(run / METRICS) if line.get("phase") in ("sft", "rl")]
    last = [line for line in lines if line["phase"] == lines[-1]["phase"]]
    return sum(cast(int, line["tokens"]) for line in last)


def train_on(
    tokens: int, config: TrainConfig, out: Path, scene: DemoScene, *, most: int, progress: Progress
) -> TrainSummary:
    """Train in `out`. While the finished run has trained on fewer than about `tokens` tokens, make it longer. `most` is
    the maximum number of updates of its loop. A second call continues the run."""
    begun = (recorded_settings(out).get("loop") or {}).get("updates")
    updates = config.loop.updates if begun is None else begun
    while True:
        config = config.model_copy(update={"loop": config.loop.model_copy(update={"updates": updates})})
        summary = train(config, out, **scene, resume=(out / CONFIG).exists(), progress=progress)
        done = trained_tokens(out)
        if done >= 0.95 * tokens or updates >= most:
            return summary
        updates = min(most, math.ceil(updates * tokens / max(done, 1)))


def _controls(out: Path) -> bool:
    return (out / "controls").is_dir()


def _control_runs(config: DemoConfig, out: Path, shown: RunSummary, progress: Progress) -> dict[str, ControlSummary]:
    tokens, warm, loop = trained_tokens(out), config.warm, config.loop
    begun, imitated = config.after_imitation(out), cast(ImitationConfig, config.training(out).warm)
    updates = max(1, round(tokens / (shown.tokens["authored"] / shown.episodes * warm.batch)))
    # The same schedule, over the updates of the control.
    schedule = warm.optimiser.schedule.model_copy(update={"total": warm.optimiser.schedule.total and updates})
    optimiser = warm.optimiser.model_copy(update={"schedule": schedule})
    # The loop of the run that only imitates makes no updates. It is used for the evaluation.
    still = LoopConfig(updates=0, sampling=loop.sampling, limits=loop.limits)
    arms = {
        "sft": {
            "seed": config.seed + 1,
            "warm": imitated.model_copy(update={"updates": updates, "optimiser": optimiser}),
            "loop": still,
        },
        "shuffled": {
            "warm": imitated.model_copy(update={"updates": 0}) if loop.demonstrations else None,
            "loop": loop.model_copy(update={"shuffle_rewards": "within"}),
        },
    }
    found = {}
    for name, arm in arms.items():
        folder = out / "controls" / name
        # Episodes may become shorter, even shrink to nothing, so there is a largest number of updates.
        most = 4 * arm["loop"].updates
        made = begun.model_copy(update=arm)
        summary = train_on(tokens, made, folder, config.scene(), most=most, progress=progress)
        found[name] = ControlSummary(
            after=summary.held_out["after"],
            greedy_after=summary.held_out["greedy_after"],
            trained_tokens=trained_tokens(folder),
        )
    return found


def _scores(summary: TrainSummary, controls: dict[str, ControlSummary]) -> tuple[Score, ...]:
    held_out = summary.held_out
    rows = [
        Score(name=name, sampled=held_out[when], greedy=held_out.get(f"greedy_{when}"), n=held_out["n"])
        for name, when in (("after imitation (before RL)", "before"), ("after RL", "after"))
    ]
    for name, found in controls.items():
        title = {"sft": "control: SFT only", "shuffled": "control: rewards shuffled within groups"}[name]
        note = f"{found.trained_tokens:,} trained tokens"
        rows.append(Score(name=title, sampled=found.after, greedy=found.greedy_after, n=held_out["n"], note=note))
    return tuple(rows)
