"""The demo: an untrained chat model learns what words mean to a calculator, in one run directory, in minutes on a CPU.

Its problems look like `47plus83`. The demonstrations show how to use the calculator, but only the rewards show what the
words mean. A policy that does the same in all tasks solves a third of them. So the held-out reward, greedy or sampled,
can't come near 1 by drift alone.

The demo is a run of `train`. Its model is drawn from the seed, and its warm start imitates demonstrations that the demo
records in the same run. `controls` adds two runs that train on as many tokens without the rewards that are claimed to
teach.

In the demo with pictures, a vision model learns which way each lamp at a crossing tells it to go. The demonstrations go
in random directions, so only the rewards show what a lamp's colour means.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pydantic import Field, model_validator

from ...agents import ChatAgent, Limits, Request, ScriptedEngine, rollout
from ...agents.episode.seeds import derive_seed
from ...agents.runs.group import run_all
from ...agents.setup.engine_config import EmbeddedConfig
from ...agents.setup.setup import LoadedSetup, SeedConfig
from ...envs.adapters.calculator import Calculator, demonstrate, read_action, word_problems
from ...envs.adapters.lamps import WAYS, Lamps, lamp_tasks, read_way
from ...tapes import Sampling, Tape, Task
from ...tapes.common.config import Config
from ...tapes.common.progress import Progress, silent
from ...tapes.common.run_async import run_async
from ...tapes.errors import MissingExtra, TapereelError, UsageError
from ...tapes.store.run_directory import METRICS, Control, Evaluations, HeldOut, Results, RunDir, append_metrics
from ...tapes.store.store import Store
from ...tapes.value import Value
from ...tapes.view.curves import Plot, reward_curve, reward_plot
from ...tapes.view.overview import Overview, Score, TapeToRead

try:
    import torch

    from ...agents.engines.embedded.tiny_model import char_tokenizer, tiny_model
    from ...agents.rendering.renderer import Renderer
    from ...agents.vision.tiny_vision import save_tiny_vision
    from ..data.provenance import episode_of
    from ..data.rows import Row, rows
    from ..data.stream import Episode
    from ..loop.history import History, Source
    from ..loop.loop_config import LoopConfig, OptimiserConfig, WarmStartConfig
    from ..trainer.checkpoint import checkpoints
    from ..trainer.ranks import Ranks
    from ..trainer.schedule import Schedule
    from .longer import end_name
    from .player_config import TrainerConfig
    from .policy import Policy, load_policy
    from .trackers import TrackedConfig
    from .train_config import EvaluationConfig, ImitationConfig, TrainConfig
    from .train_run import TrainingRun, TrainSummary
    from .training import closing
    from .warm_start import bring_in, warm_start
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers", "numpy", "tokenizers"):
        raise
    raise MissingExtra(error.name, "demo", "the demo") from error


SPARE = 1.25
"""The held-out split is requested this many times as large as needed, because a split by hash has only about the
requested size."""
CONTEXT = 64
"""Maximum number of tokens in prompt and completion together. A whole episode takes about 35."""


class DemoConfig(SeedConfig, TrackedConfig):
    """The settings of the demo. The numbers in the README were measured with the defaults."""

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
        limits=Limits(turns=4, agent_seconds=120.0),
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
        if self.held_out * SPARE >= self.tasks:
            raise ValueError(
                f"held_out is {self.held_out} of {self.tasks} tasks, and {SPARE} times as many are set aside, so no "
                "task is left to train on: raise tasks or lower held_out"
            )
        # The recorded configuration must name the recipe that trains.
        loop = LoopConfig.model_validate({**self.loop.model_dump(exclude_unset=True), "recipe": self.algo})
        object.__setattr__(self, "loop", loop)
        return self

    def training(self) -> TrainConfig:
        """Return the settings that make `train` do this training."""
        return TrainConfig(
            engine=EmbeddedConfig(model=self.model_name, slots=256, capacity=CONTEXT),
            trainer=TrainerConfig(device="cpu", threads=self.threads),
            seed=self.seed,
            loop=self.loop,
            warm=ImitationConfig(tapes="", **dict(self.warm)),
            evaluation=EvaluationConfig(
                fraction=self.held_out / self.tasks * SPARE,
                limit=self.held_out,
                every=None,
                sampling=self.loop.sampling.model_copy(update={"temperature": 1.0}),
                greedy=True,
                concurrency=256,
            ),
            trackers=self.trackers,
        )

    @property
    def model_name(self) -> str:
        """A description of the model."""
        return f"the {self.model_size} model that is drawn from seed {self.seed}"

    def policy(self) -> Policy:
        """Make the untrained model."""
        tokenizer = char_tokenizer()
        model = tiny_model(tokenizer, self.model_size, seed=self.seed, context=CONTEXT)
        return Policy(model, tokenizer, Renderer(tokenizer), slots=256, capacity=CONTEXT)

    def resolved(self) -> tuple[TrainConfig, LoadedSetup]:
        """Return the settings of `train`, and the loaded agent, environment and tasks."""
        tasks = word_problems(self.tasks, self.seed)
        return self.training().resolve(agent=calculator_agent(), env=calculator, tasks=tasks)

    def shown(self, train_tasks: Sequence[Task]) -> list[Task]:
        """Return one task for each demonstration."""
        n = self.demonstrations
        # The numbers differ from those in the word problems. Otherwise a symbol would reveal what a word means.
        symbols = word_problems((n + 1) // 2, self.seed + 10**9, symbols=True)
        return [train_tasks[k % len(train_tasks)] if k % 2 else symbols[k // 2] for k in range(n)]

    def demonstrate(self, request: Request) -> str:
        """Return the demonstrator's next text."""
        heard = [m["content"] for m in request.messages if m["role"] == "user"]
        return demonstrate(heard[0], heard[1:], random.Random(request.seed))


class PicturesDemoConfig(DemoConfig):
    """The settings of the demo with pictures."""

    model_size: Literal["small"] = "small"  # pyright: ignore[reportIncompatibleVariableOverride]
    blind: bool = False
    """In each walk, show the lamps of another walk, as a control experiment."""
    tasks: int = Field(default=800, ge=64)
    held_out: int = Field(default=192, ge=16)
    demonstrations: int = Field(default=640, ge=64)
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
        limits=Limits(turns=3, agent_seconds=120.0),
        optimiser=OptimiserConfig(lr=8e-4),
    )

    def training(self) -> TrainConfig:
        made = super().training()
        # The tower begins with random weights, so it must learn too.
        return made.model_copy(update={"trainer": made.trainer.model_copy(update={"freeze": "nothing"})})

    def policy(self) -> Policy:
        config = self.training()
        with TemporaryDirectory() as folder:
            save_tiny_vision(folder, "qwen2_5_vl", seed=self.seed, context=CONTEXT)
            return load_policy(config.engine.model_copy(update={"model": folder}), config.trainer, self.seed)

    def resolved(self) -> tuple[TrainConfig, LoadedSetup]:
        walker = ChatAgent(parse=read_way, name="walker", misreads=0)
        return self.training().resolve(
            agent=walker, env=Lamps, tasks=lamp_tasks(self.tasks, self.seed, blind=self.blind)
        )

    def shown(self, train_tasks: Sequence[Task]) -> list[Task]:
        return [train_tasks[k % len(train_tasks)] for k in range(self.demonstrations)]

    def demonstrate(self, request: Request) -> str:
        return random.Random(request.seed).choice(list(WAYS))


class DemoFailed(TapereelError, RuntimeError):
    """A part of the demo failed. The message names the part."""


def calculator_agent() -> ChatAgent:
    """Return the demo's agent. An answer is a call of the calculator or a final answer. Other text is a parse error."""
    return ChatAgent(parse=read_action, name="solver", misreads=0)


def calculator() -> Calculator:
    """Return the demo's environment."""
    return Calculator(scorer="basic_arithmetic", max_turns=4)


class ControlSummary(Value):
    """The result of a control, which begins with the same weights and trains on as many tokens without the rewards."""

    after: float | None
    """Held-out reward with sampled answers."""
    greedy_after: float | None
    trained_tokens: int


class DemoSummary(TrainSummary):
    """The results of a demo."""

    seed: int
    algo: str
    controls: dict[str, ControlSummary] | None
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
) -> DemoSummary:
    """Run the demo. With `resume`, only the parts that `out` lacks are run. Raises the same errors as `train`."""
    torch.set_num_threads(config.threads)
    run = DemoRun(config, Path(out), controls, progress)
    summary = run.lead(resume)
    return DemoSummary(
        **dict(summary),
        seed=config.seed,
        algo=config.algo,
        controls={
            name: ControlSummary(
                after=found.sampled.mean, greedy_after=found.greedy.mean, trained_tokens=found.trained_tokens
            )
            for name, found in run.directory.results.controls.items()
        }
        or None,
        scores=_scores(run.directory.results),
    )


class DemoRun(TrainingRun):
    """A run of `train` that records its own demonstrations and runs the controls."""

    def __init__(self, config: DemoConfig, out: Path, controls: bool, progress: Progress) -> None:
        super().__init__(*config.resolved(), out, progress, Ranks(), config.policy())
        self.demo, self.controls = config, controls
        self.title = f"Tapereel demo: {config.algo}, seed {config.seed}"
        self.demos: dict[str, tuple[list[Row], Episode]] = {}
        self.order: list[str] = []
        """Ids of the demonstrations."""

    @property
    def recorded(self) -> Config:
        return self.demo

    def lengthened(self, directory: RunDir, then: int, now: int) -> str:
        if directory.results.controls:
            raise UsageError(
                f"the controls in {self.out} trained on as many tokens as {then} updates of the loop: they can't be "
                f"compared with loop.updates={now}; choose another directory (`out=...`)"
            )
        return super().lengthened(directory, then, now)

    # Demonstrations

    def tapes_to_imitate(self) -> Sequence[str]:
        return ()

    def imitated(self) -> tuple[Sequence[str], Source]:
        """Record the missing demonstrations. Every process uses the same task and the same seed for demonstration k."""
        history = self.training.history
        if not self.demo.warm.updates and not checkpoints(history.directory):
            history.settle()  # the controls also begin with these weights
        n, store, tasks = self.demo.demonstrations, self.directory.store, self.demo.shown(self.scene.train_tasks)
        have = {}
        for summary in store.summaries(split="demo", closed=True):
            tape = store.tape(summary.id, refresh=False)
            if tape.trains:
                have[tape.begin.attempt] = tape.id
                self._keep(tape)
            if tape.begin.task_hash != tasks[tape.begin.attempt].hash:
                raise UsageError(
                    f"{self.out} is a demo of another version of this package, with other tasks: resume it with that "
                    "version, or choose another directory (`out=...`)"
                )
        with self.directory.timed("demonstrations"):
            run_async(self._record([k for k in range(n) if k not in have], have, tasks))
        self.order = [have[k] for k in range(n)]
        rewards = [self.demos[tape][1].reward or 0.0 for tape in self.order]
        self.directory.results.demonstrations = {"n": n, "reward": sum(rewards) / n}
        self.directory.save()
        return self.order, self.demos.__getitem__

    def _keep(self, tape: Tape) -> None:
        self.demos[tape.id] = (rows(tape), episode_of(tape))

    async def _record(self, missing: list[int], have: dict[int, str], tasks: list[Task]) -> None:
        engine = ScriptedEngine(self.demo.demonstrate, renderer=self.policy.renderer)

        async def record(k: int) -> None:
            tape = await rollout(
                self.scene.agent,
                self.scene.env,
                tasks[k],
                engine=engine,
                seed=derive_seed(self.demo.seed, "demo", k),
                attempt=k,
                split="demo",
                limits=self.demo.loop.limits,
                sampling=self.demo.loop.sampling,
                journal=self.directory.store.writer,
            )
            if not tape.trains:
                raise DemoFailed(f"demonstration {k} ended with {tape.cause}")
            have[k] = tape.id
            self._keep(tape)
            self.progress("recording demonstrations", len(have), self.demo.demonstrations, "")

        await run_all(missing, record, concurrency=256)

    # Controls: the same number of trained tokens, without the rewards that are claimed to teach

    def control(self) -> None:
        if not self.controls:
            return
        training, model = self.training, self.policy.model
        controls = self.directory.results.controls
        found = checkpoints(self.out / "checkpoints")
        base = next(one for one in found if one.update == self.demo.warm.updates)
        trained = training.history.trained_tokens - int(base.state["trained_tokens"])
        for name, run in (("sft", self._control_sft), ("shuffled", self._control_shuffled)):
            if name in controls:
                continue
            out = self.out / "controls" / name
            with Store.create(out) if not (out / "tapes").is_dir() else Store.open(out, write=True) as store:
                if (lease := self.directory.store.lease) is not None:
                    store.lease, store.writer.guard = lease, lease.check
                model.load_state_dict(base.weights())
                history = training.history_in(store, f"{training.history.lineage}-{name}", out)
                history.restore()
                with self.directory.timed("controls"):
                    run(history, trained)
                measured = run_async(self._measured(history, f"control-{name}"))
                controls[name] = Control(trained_tokens=history.trained_tokens, **measured)
            self.directory.save()
        model.load_state_dict(found[-1].weights())

    async def _measured(self, history: History, when: str) -> Evaluations:
        async with closing(self.training.engine(history)) as engine:
            return await self.training.evaluate(engine, when)

    def _control_sft(self, history: History, trained: int) -> None:
        """Continue the imitation, on as many tokens as the loop trained on."""

        def report(_: int, line: dict[str, Any]) -> None:
            done = min(history.trained_tokens, trained)
            self.progress("control: SFT only", done, trained, f"loss {line['loss']:.3f}")

        # The control's updates name these tapes, so its own store must have them too. Otherwise no later process could
        # apply the updates again.
        tapes = bring_in(self.out, self.order, history.store, self.policy.renderer)
        warm_start(
            self.demo.warm,
            store=history.store,
            history=history,
            tapes=tapes,
            source=self.demos.__getitem__,
            seed=self.demo.seed + 1,
            phase="sft-more",
            updates=10**9,
            on_update=report,
            stop=lambda: history.trained_tokens >= trained,
        )

    def _control_shuffled(self, history: History, trained: int) -> None:
        """Run the same loop on as many tokens, with rewards shuffled within groups. The episodes become shorter, so
        this takes more updates. There are at most four times as many, because the episodes may shrink to nothing."""
        if self.demo.loop.demonstrations:
            bring_in(self.out, self.training.shown, history.store, self.policy.renderer)
        config = self.demo.loop.model_copy(update={"shuffle_rewards": "within", "updates": 4 * self.demo.loop.updates})
        run_async(
            self.training.run_loop(
                history,
                config,
                lambda update: append_metrics(history.store.path / METRICS, update.metrics),
                name="control: shuffled rewards",
                start=0,
                stop=lambda: history.trained_tokens >= trained,
            )
        )

    # The report

    def _reward_plot(self) -> Plot:
        """Plot the reward per update, together with the held-out rewards and the control."""
        shuffled = self.out / "controls" / "shuffled" / METRICS
        others = [reward_curve("control: shuffled rewards", shuffled)] if shuffled.exists() else []
        return reward_plot(self.recipe.name, self.out / METRICS, self.directory.results, others=others)

    def page(self, overview: Overview) -> Overview:
        return overview.model_copy(
            update={
                "plots": (self._reward_plot(), *(plot for plot in overview.plots if plot.small)),
                "scores": _scores(self.directory.results),
                "tapes": self._tapes_to_read(),
            }
        )

    def _tapes_to_read(self) -> tuple[TapeToRead, ...]:
        """Choose demonstrations, wrong answers before the loop, and right and wrong answers after it."""
        end = end_name(self.directory.results, self.demo.loop.updates)
        return tuple(
            TapeToRead(tape=found.id, caption=caption)
            for split, caption, reward, count in (
                ("demo", "a demonstration with a right solution", 1.0, 1),
                ("demo", "a demonstration with a wrong solution", 0.0, 1),
                ("eval-before-sampled", "before RL, wrong", 0.0, 2),
                (f"eval-{end}-sampled", "after RL, right", 1.0, 2),
                (f"eval-{end}-sampled", "after RL, wrong", 0.0, 1),
            )
            for found in self.directory.store.summaries(split=split, min_reward=reward, max_reward=reward)[:count]
        )


def _scores(results: Results) -> tuple[Score, ...]:
    """Return the rows of the results table: before the loop, after the loop, and the controls."""
    rows = [
        _score(name, part["sampled"], part["greedy"], _partial_credit(part["sampled"]))
        for name, part in (("after imitation (before RL)", results.before), ("after RL", results.after))
        if part
    ]
    for name, part in results.controls.items():
        title = {"sft": "control: SFT only", "shuffled": "control: rewards shuffled within groups"}[name]
        rows.append(_score(title, part.sampled, part.greedy, f"{part.trained_tokens:,} trained tokens"))
    return tuple(rows)


def _score(name: str, sampled: HeldOut, greedy: HeldOut, note: str) -> Score:
    return Score(name=name, sampled=sampled.mean, greedy=greedy.mean, n=sampled.n, note=note)


def _partial_credit(part: HeldOut) -> str:
    value = part.metrics.get("reasoning_gym")
    return "" if value is None else f"reasoning-gym's own scorer, with partial credit: {value:.3f}"
