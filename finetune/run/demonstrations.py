"""The demo: an untrained chat model learns to use a calculator, in one run directory, in minutes on a CPU.

The demo records demonstrations, the model imitates them, then improves by its own rollouts in the loop; held-out tasks
measure the model before and after. Every phase reads in the run directory what is done already, so a killed demo
resumes. This module holds the recipe of the demo; all parts are those of any other training run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from ...agents import ChatAgent, Limits, Request, ScriptedEngine, rollout
from ...agents.episode.seeds import derive_seed
from ...envs.adapters.calculator import Calculator, calculator_tasks, demonstrate, read_action
from ...envs.taskset import overlap
from ...tapes import Sampling, Tape, Task
from ...tapes.common.config import Config
from ...tapes.common.progress import Progress, silent
from ...tapes.common.run_async import run_async
from ...tapes.errors import MissingExtra, TapereelError, UsageError
from ...tapes.store.run_directory import (
    METRICS,
    Control,
    Evaluations,
    HeldOut,
    Results,
    RunDir,
    append_metrics,
    open_run,
)
from ...tapes.store.store import Store
from ...tapes.view.curves import Plot, reward_curve, reward_plot
from ...tapes.view.overview import Fact, Overview, Score, TapeToRead, checks, command
from ...tapes.view.overview import next_commands as next_of_any

try:
    import torch

    from ...agents.engines.embedded.tiny_model import char_tokenizer, tiny_model
    from ...agents.rendering.renderer import Renderer
    from ..data.provenance import episode_of
    from ..data.rows import Row, rows
    from ..data.stream import Episode
    from ..history.history import History
    from ..history.loop_config import LoopConfig, OptimiserConfig, WarmStartConfig
    from ..loop.sft import warm_start
    from ..loop.warm_start import bring_in
    from ..policies.policy import Policy
    from ..recipes import get_recipe
    from ..report.plots import plot_curve
    from ..report.run_report import Reporter, reporting
    from ..report.trackers import TrackerName, check_trackers, tracking
    from ..trainer.checkpoint import checkpoints
    from ..trainer.schedule import Schedule
    from .longer import UPDATES, lengthening
    from .training import Training, closing, new_results
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers", "numpy", "tokenizers"):
        raise
    raise MissingExtra(error.name, "demo", "the demo") from error


SPARE = 1.25
"""Tasks that are set aside for each held-out task: the size of a split by hash is only about the requested one."""


class DemoConfig(Config):
    """The settings of the demo. The README's numbers were made with the defaults."""

    seed: int = 0
    algo: Literal["grpo", "reinforce", "rloo", "ppo", "dapo"] = "grpo"
    """The recipe of the loop; `loop.recipe` is set to it."""
    model_size: Literal["micro", "tiny", "small", "base"] = "small"
    context: int = Field(default=64, ge=32)
    """Tokens of prompt and completion together; a whole episode takes about 45."""
    tasks: int = Field(default=14_000, ge=64)
    held_out: int = Field(default=512, ge=16)
    """Held-out tasks of an evaluation."""
    demonstrations: int = Field(default=12_000, ge=64)
    bad: float = Field(default=0.7, ge=0, le=1)
    """Share of demonstrations with a wrong solution."""
    warm: WarmStartConfig = WarmStartConfig(
        updates=400,
        batch=64,
        optimiser=OptimiserConfig(lr=3e-3, schedule=Schedule(kind="cosine", warmup=20, total=400)),
    )
    loop: LoopConfig = LoopConfig(
        updates=40,
        groups=16,
        group_size=16,
        sampling=Sampling(max_tokens=16),
        limits=Limits(turns=4, seconds=120.0),
        optimiser=OptimiserConfig(lr=3e-4),
    )
    threads: int = Field(default=1, ge=1)
    """Torch threads. One keeps its speed while other work runs on the machine; two are faster on an idle machine."""
    trackers: tuple[TrackerName, ...] = ()
    """Send the metrics to these trackers too; metrics.jsonl is always written."""

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
        object.__setattr__(self, "loop", self.loop.model_copy(update={"recipe": self.algo}))
        return self


class DemoFailed(TapereelError, RuntimeError):
    """A part of the demo doesn't do what the demo relies on; names the part."""


def calculator_agent() -> ChatAgent:
    """The agent of the demo. Its answers are calls of the calculator or final answers; other text is a parse error."""
    return ChatAgent(parse=read_action, name="solver", misreads=0)


def calculator() -> Calculator:
    """The environment of the demo."""
    return Calculator(scorer="chain_sum", max_turns=4)


def demo_training(
    config: DemoConfig,
    directory: RunDir,
    train_tasks: Sequence[Task] = (),
    held_out: Sequence[Task] = (),
    *,
    progress: Progress = silent,
) -> Training:
    """The parts of a demo's training, with the base weights; without tasks they can only apply recorded updates."""
    tokenizer, sampling = char_tokenizer(), config.loop.sampling
    model = tiny_model(tokenizer, config.model_size, seed=config.seed, context=config.context)
    return Training(
        directory,
        Policy(model, tokenizer, Renderer(tokenizer), slots=256, capacity=config.context),
        calculator_agent(),
        calculator,
        train_tasks,
        held_out,
        config.loop,
        get_recipe(config.algo, config.loop.changes),
        config.warm,
        seed=config.seed,
        evaluations={
            "sampled": sampling.model_copy(update={"temperature": 1.0}),
            "greedy": sampling.model_copy(update={"temperature": 0.0}),
        },
        progress=progress,
    )


async def _measured(training: Training, history: History, when: str) -> Evaluations:
    async with closing(training.engine(history)) as engine:
        return await training.evaluate(engine, when)


@dataclass
class Demo:
    """One run of the demo. `run()` once."""

    config: DemoConfig
    out: Path
    controls: bool = False
    progress: Progress = silent
    results: Results = field(default_factory=Results)
    """The results so far; the content of results.json."""

    def run(self, *, resume: bool = False) -> dict[str, Any]:
        """Run all phases, or the missing ones with `resume`. Returns the summary that `--json` prints."""
        torch.set_num_threads(self.config.threads)
        check_trackers(self.config.trackers)
        with open_run(
            self.out, self.config, resume=resume, begin=new_results, free=("trackers",), changes={UPDATES: self._longer}
        ) as directory:
            self.results, self.store = directory.results, directory.store
            with reporting(reporter(self, directory)):
                with directory.timed("total"), tracking(directory, self.config.trackers):
                    self._work(directory)
                self.results.books = self.store.books()
                directory.save()
        return self.summary()

    def _work(self, directory: RunDir) -> None:
        self._setup(directory)
        self._demonstrate()
        self.training.restore()
        if self.training.history.updates == 0 and not self.config.warm.updates:
            self.training.history.settle()  # the controls begin with these weights too
        self.training.imitate(self.demo_order, self.demos.__getitem__)
        run_async(self._improve())
        if self.controls:
            self._run_controls()

    def _longer(self, directory: RunDir, then: int, now: int) -> str:
        if directory.results.controls:
            raise UsageError(
                f"the controls in {self.out} trained on as many tokens as {then} updates of the loop: they can't be "
                f"compared with loop.updates={now}; choose another --out"
            )
        return lengthening(self.config.loop, self.config.warm.updates)(directory, then, now)

    # Phases

    def _setup(self, directory: RunDir) -> None:
        config = self.config
        tasks = calculator_tasks(config.tasks, config.seed)
        share = config.held_out / config.tasks * SPARE
        train, held_out = tasks.split(1 - share, share)
        self.train_tasks, self.held_out = list(train), list(held_out)[: config.held_out]
        if overlap(train, held_out) != 0:
            raise DemoFailed("training and held-out tasks overlap")
        self.training = demo_training(config, directory, self.train_tasks, self.held_out, progress=self.progress)
        self.results.held_out_tasks, self.results.train_tasks = len(self.held_out), len(self.train_tasks)
        self.results.overlap = 0
        self.demos: dict[str, tuple[list[Row], Episode]] = {}
        self.demo_order: list[str] = []

    def _demonstrate(self) -> None:
        """Record the demonstrations that are not on tape yet. Demonstration k has the same task and seed in every
        process."""
        n = self.config.demonstrations
        have = {}
        for summary in self.store.summaries(split="demo", closed=True):
            tape = self.store.tape(summary.id, refresh=False)
            if tape.trains:
                have[tape.begin.attempt] = tape.id
                self._keep_demo(tape)
        with self.training.run.timed("demonstrations"):
            run_async(self._record([k for k in range(n) if k not in have], have))
        self.demo_order = [have[k] for k in range(n)]
        rewards = [self.demos[tape][1].reward or 0.0 for tape in self.demo_order]
        self.results.demonstrations = {"n": n, "reward": sum(rewards) / n}
        self.training.run.save()

    def _keep_demo(self, tape: Tape) -> None:
        self.demos[tape.id] = (rows(tape), episode_of(tape))

    async def _record(self, missing: list[int], have: dict[int, str]) -> None:
        def policy(request: Request) -> str:
            heard = [m["content"] for m in request.messages if m["role"] == "user"]
            return demonstrate(heard[0], heard[1:], random.Random(request.seed), bad=self.config.bad)

        engine = ScriptedEngine(policy, renderer=self.training.renderer)
        work = iter(missing)

        async def worker() -> None:
            for k in work:
                tape = await rollout(
                    self.training.agent,
                    calculator,
                    self.train_tasks[k % len(self.train_tasks)],
                    engine=engine,
                    seed=derive_seed(self.config.seed, "demo", k),
                    attempt=k,
                    split="demo",
                    limits=self.config.loop.limits,
                    sampling=self.config.loop.sampling,
                    journal=self.store.writer,
                )
                if not tape.trains:
                    raise DemoFailed(f"demonstration {k} ended with {tape.cause}")
                have[k] = tape.id
                self._keep_demo(tape)
                self.progress("recording demonstrations", len(have), self.config.demonstrations, "")

        await asyncio.gather(*(worker() for _ in range(256)))

    async def _improve(self) -> None:
        await self.training.before()
        await self.training.improve()
        await self.training.after()

    # Controls: the same number of trained tokens, without the rewards that are claimed to teach

    def _run_controls(self) -> None:
        training = self.training
        controls = self.results.controls
        base = next(c for c in checkpoints(self.out / "checkpoints") if c.update == self.config.warm.updates)
        trained = training.history.trained_tokens - int(base.state["trained_tokens"])
        for name, run in (("sft", self._control_sft), ("shuffled", self._control_shuffled)):
            if name in controls:
                continue
            out = self.out / "controls" / name
            with Store.create(out) if not (out / "tapes").is_dir() else Store.open(out, write=True) as store:
                training.model.load_state_dict(base.weights())
                history = training.history_in(store, f"{self.results.lineage}-{name}", out)
                history.restore()
                with training.run.timed("controls"):
                    run(history, trained)
                found = run_async(_measured(training, history, f"control-{name}"))
                controls[name] = Control(trained_tokens=history.trained_tokens, **found)
            training.run.save()
        training.model.load_state_dict(checkpoints(self.out / "checkpoints")[-1].weights())

    def _control_sft(self, history: History, trained: int) -> None:
        """More imitation, on as many tokens as the loop trained on."""

        def report(_: int, line: dict[str, Any]) -> None:
            done = min(history.trained_tokens, trained)
            self.progress("control: SFT only", done, trained, f"loss {line['loss']:.3f}")

        # The control has a store of its own. Its updates name these tapes, so the tapes must be there too; otherwise no
        # later process could apply the updates again.
        tapes = bring_in(self.out, self.demo_order, history.store, self.training.renderer)
        warm_start(
            self.config.warm,
            store=history.store,
            history=history,
            tapes=tapes,
            source=self.demos.__getitem__,
            seed=self.config.seed + 1,
            phase="sft-more",
            updates=10**9,
            on_update=report,
            stop=lambda: history.trained_tokens >= trained,
        )

    def _control_shuffled(self, history: History, trained: int) -> None:
        """The same loop on as many tokens, with rewards shuffled within groups. Its episodes become shorter, so it
        takes more updates: at most four times as many, since episodes may shrink to nothing."""
        if self.config.loop.demonstrations:
            bring_in(self.out, self.demo_order, history.store, self.training.renderer)
        config = self.config.loop.model_copy(update={"shuffle_rewards": True, "updates": 4 * self.config.loop.updates})
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

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        r = self.results

        def mean(part: Evaluations | None, name: str) -> float | None:
            return part[name].mean if part else None

        assert r.books is not None
        seconds = {name: r.seconds.get(name, 0.0) for name in ("sft", "rollout", "train", "total")}
        return {
            "run": str(self.out),
            "seed": self.config.seed,
            "algo": self.config.algo,
            "held_out": {
                "before": mean(r.before, "sampled"),
                "after": mean(r.after, "sampled"),
                "greedy_before": mean(r.before, "greedy"),
                "greedy_after": mean(r.after, "greedy"),
                "n": len(self.held_out),
            },
            "controls": {
                name: {
                    "after": control.sampled.mean,
                    "greedy_after": control.greedy.mean,
                    "trained_tokens": control.trained_tokens,
                }
                for name, control in r.controls.items()
            }
            or None,
            "seconds": {**seconds, **{k: v for k, v in r.seconds.items() if k not in seconds}},
            "tokens": self.training.token_counts(),
            "episodes": r.books.begun,
        }


# What a demo writes for a reader: reward.png, report.html, and the printed table

_PARTS = ("demonstrations", "restore", "sft", "evaluation", "rl", "controls")
"""Phases that take wall-clock time one after the other; the engine's and the trainer's seconds are inside `rl`."""


def reporter(demo: Demo, run: RunDir) -> Reporter:
    """The report of a demo: that of any training run, and what only a demo knows once it is through."""

    def complete(data: Overview) -> Overview:
        # Read at the end: a run that begins has no tokenizer yet.
        report.tokenizer = demo.training.tokenizer
        return complete_report(demo, data)

    report = Reporter(
        run,
        f"Tapereel demo: {demo.config.algo}, seed {demo.config.seed}",
        demo.config.algo.upper(),
        demo.config.loop.updates,
        demo.config.loop.checkpoint_every,
        complete=complete,
    )
    return report


def complete_report(demo: Demo, data: Overview) -> Overview:
    """Write reward.png; gives the page of the whole demo."""
    plot = demo_plot(demo)
    plot_curve(demo.out / "reward.png", plot.curves, levels=plot.levels, title=plot.title, ylabel=plot.ylabel)
    summary = demo.summary()
    held = summary["held_out"]
    books = demo.results.books
    assert books is not None
    return data.model_copy(
        update={
            "subtitle": "A tiny chat model learns to add three numbers with a calculator: imitation, then its own "
            "rollouts.",
            "facts": (
                Fact(
                    label="held-out reward, sampled",
                    value=f"{_show(held['before'])} → {_show(held['after'])}",
                    note=f"{held['n']} tasks, none of them trained on",
                ),
                Fact(label="greedy", value=f"{_show(held['greedy_before'])} → {_show(held['greedy_after'])}"),
                Fact(label="seconds", value=f"{summary['seconds']['total']:.0f}"),
                Fact(label="episodes on tape", value=f"{books.begun:,}"),
            ),
            "plots": (plot, *(other for other in data.plots if other.small)),
            "scores": scores(demo),
            "seconds": {part: summary["seconds"][part] for part in _PARTS if part in summary["seconds"]},
            "tapes": pages(demo),
            "next": (*next_of_any(str(demo.out)), _lab(demo)),
        }
    )


def demo_plot(demo: Demo) -> Plot:
    """Reward per update, with the held-out levels and the control."""
    shuffled = demo.out / "controls" / "shuffled" / METRICS
    others = [reward_curve("control: shuffled rewards", shuffled)] if shuffled.exists() else []
    return reward_plot(demo.config.algo.upper(), demo.out / METRICS, demo.results, others=others)


def scores(demo: Demo) -> tuple[Score, ...]:
    """The table: before, after, and the controls."""
    r = demo.results
    rows = [("after imitation (before RL)", r.before, ""), ("after RL", r.after, "")]
    for name, control in r.controls.items():
        title = {"sft": "control: SFT only", "shuffled": "control: rewards shuffled within groups"}[name]
        found = {"sampled": control.sampled, "greedy": control.greedy}
        rows.append((title, found, f"{control.trained_tokens:,} trained tokens"))
    return tuple(
        Score(
            name=name,
            sampled=part["sampled"].mean,
            greedy=part["greedy"].mean,
            n=part["sampled"].n,
            note=note or _partial_credit(part["sampled"]),
        )
        for name, part, note in rows
        if part
    )


def next_commands(demo: Demo) -> tuple[str, ...]:
    """Commands to try on this run."""
    run = str(demo.out)
    return (*next_of_any(run), *checks(run), _lab(demo))


def _lab(demo: Demo) -> str:
    return command("explain", str(demo.out), "--recipe", "own", "--recipe", "dr_grpo")


def pages(demo: Demo) -> tuple[TapeToRead, ...]:
    """A handful of tapes: a demonstration, and wrong and right answers before and after."""
    chosen: list[TapeToRead] = []

    def add(split: str, caption: str, reward: float, count: int = 1) -> None:
        found = demo.store.summaries(split=split, min_reward=reward, max_reward=reward)[:count]
        chosen.extend(TapeToRead(tape=s.id, caption=caption) for s in found)

    add("demo", "a demonstration with a right solution", 1.0)
    add("demo", "a demonstration with a wrong solution", 0.0)
    add("eval-before-sampled", "before RL, wrong", 0.0, 2)
    add(f"eval-{demo.training.end}-sampled", "after RL, right", 1.0, 2)
    add(f"eval-{demo.training.end}-sampled", "after RL, wrong", 0.0)
    return tuple(chosen)


def _partial_credit(part: HeldOut) -> str:
    value = part.metrics.get("reasoning_gym")
    return "" if value is None else f"reasoning-gym's own scorer, with partial credit: {value:.3f}"


def _show(value: float | None) -> str:
    return "unscored" if value is None else f"{value:.3f}"
