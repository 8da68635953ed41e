"""The demo: from nothing to a chat model that learned to use a calculator, on one run directory, in minutes on a CPU.

Demonstrations are recorded, the model imitates them, then improves by its own rollouts in the async loop; held-out tasks
measure it before and after. Every phase finds out from the run directory what is done already, so a killed demo goes on
where it was. What this module knows is the recipe; every part of it is the part that any other run uses.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ..agents import ChatAgent, Limits, Request, ScriptedEngine, rollout
from ..agents.llm import derive_seed
from ..envs.calculator import Calculator, calculator_tasks, demonstrate, read_action
from ..envs.taskset import overlap
from ..tapes import Action, Misread, Sampling, Tape, Task
from ..tapes.config import Config, dump_config, load_config
from ..tapes.errors import MissingExtra, TapereelError
from ..tapes.store import Store

try:
    import torch

    from ..agents.embedded import EmbeddedEngine
    from ..agents.render import Renderer
    from ..agents.tiny import char_tokenizer, tiny_model
    from .checkpoint import checkpoints
    from .config import LoopConfig, OptimiserConfig, WarmStartConfig
    from .evaluate import Evaluation, evaluate
    from .history import History
    from .loop import Loop, UpdateReport
    from .recipes import get_recipe
    from .rows import Row, rows
    from .schedule import Schedule
    from .sft import warm_start
    from .stream import Episode
    from .trainer import Trainer
    from .use import episode_of
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers", "numpy", "tokenizers"):
        raise
    raise MissingExtra(error.name, "demo", "the demo") from error

Progress = Callable[[str, int, int, str], None]
"""(phase, done, of, note): called as the work goes on."""


class DemoConfig(Config):
    """What the demo does. The defaults are what the README's numbers were made with."""

    seed: int = 0
    algo: Literal["grpo", "reinforce"] = "grpo"
    model_size: Literal["micro", "tiny", "small", "base"] = "small"
    context: int = Field(64, ge=32)
    """Tokens of prompt and completion together; a whole episode takes about 45."""
    tasks: int = Field(14_000, ge=64)
    held_out: int = Field(512, ge=16)
    """Held-out tasks of an evaluation."""
    demonstrations: int = Field(12_000, ge=64)
    bad: float = Field(0.7, ge=0, le=1)
    """Share of demonstrations that go about it the wrong way."""
    warm: WarmStartConfig = WarmStartConfig(
        updates=400, batch=64, optimiser=OptimiserConfig(lr=3e-3, schedule=Schedule(kind="cosine", warmup=20, total=400)),
    )  # fmt: skip
    loop: LoopConfig = LoopConfig(
        updates=40, groups=16, group_size=16, sampling=Sampling(max_tokens=16), limits=Limits(turns=4, seconds=120.0),
        optimiser=OptimiserConfig(lr=3e-4),
    )  # fmt: skip
    threads: int = Field(1, ge=1)
    """Torch threads. One is steady when anything else runs beside; two are faster on an idle machine."""


class DemoFailed(TapereelError, RuntimeError):
    """The demo can't go on in that directory; says what is there."""


def calculator_agent() -> ChatAgent:
    """The agent of the demo: whatever the model writes is a call of the calculator, an answer, or misread."""
    return ChatAgent(parse=_parse, name="solver", misreads=0)


def _parse(text: str) -> Action:
    action = read_action(text)
    if isinstance(action, Misread):
        raise ValueError(action.problem)
    return action


@dataclass
class Demo:
    """One run of the demo. `run()` once."""

    config: DemoConfig
    out: Path
    controls: bool = False
    progress: Progress = lambda phase, done, of, note: None
    results: dict[str, Any] = field(default_factory=dict)
    """What is known so far; kept in results.json."""

    def run(self, *, resume: bool = False) -> dict[str, Any]:
        """Everything, or what is left of it. Gives the summary that `--json` prints."""
        torch.set_num_threads(self.config.threads)
        self.store = self._open(resume)
        with self.store:
            with self._timed("total"):
                self._setup()
                self._demonstrate()
                self._warm_start()
                asyncio.run(self._improve())
                if self.controls:
                    self._run_controls()
            self.results["books"] = self.store.books().model_dump(mode="json")
            self._save()
        from .demo_report import write_demo_report

        write_demo_report(self)
        return self.summary()

    # The run directory

    def _open(self, resume: bool) -> Store:
        path = self.out / "config.yaml"
        if path.exists():
            if not resume:
                raise DemoFailed(f"{self.out} holds a run already; go on with it by --resume, or choose another --out")
            recorded = load_config(DemoConfig, path)
            if recorded != self.config:
                raise DemoFailed(f"{self.out} was begun with another configuration ({path}); resume it with that one, or "
                                 "choose another --out")
            if (self.out / "results.json").exists():
                self.results = json.loads((self.out / "results.json").read_text())
        self.out.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            self.results = {"lineage": secrets.token_hex(4)}
            self._save()
            _write(path, dump_config(self.config))
        return Store.open(self.out, write=True) if (self.out / "tapes").is_dir() else Store.create(self.out)

    def _save(self) -> None:
        _write(self.out / "results.json", json.dumps(self.results, indent=1) + "\n")

    @contextmanager
    def _timed(self, name: str) -> Any:
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = self.results.setdefault("seconds", {})
            seconds[name] = round(seconds.get(name, 0.0) + time.perf_counter() - started, 3)

    def metrics(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl; what isn't finite is null."""
        clean = {k: (None if isinstance(v, float) and v - v != 0 else v) for k, v in line.items()}
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(clean) + "\n")

    # Phases

    def _setup(self) -> None:
        config = self.config
        self.tokenizer = char_tokenizer()
        self.renderer = Renderer(self.tokenizer)
        self.model = tiny_model(self.tokenizer, config.model_size, seed=config.seed, context=config.context)
        tasks = calculator_tasks(config.tasks, config.seed)
        share = config.held_out / config.tasks * 1.25
        train, held_out = tasks.split(1 - share, share)
        self.train_tasks: list[Task] = list(train)
        self.held_out: list[Task] = list(held_out)[: config.held_out]
        if overlap(train, held_out) != 0:
            raise DemoFailed("training and held-out tasks overlap")
        self.results["held_out_tasks"] = len(self.held_out)
        self.results["train_tasks"] = len(self.train_tasks)
        self.results["overlap"] = 0
        self.agent = calculator_agent()
        self.demos: dict[str, tuple[list[Row], Episode]] = {}
        self.demo_order: list[str] = []
        self.history = self._history(self.store, self.results["lineage"], self.out)

    def _history(self, store: Store, lineage: str, out: Path, loop: LoopConfig | None = None) -> History:
        loop = loop or self.config.loop

        def make(phase: str) -> Trainer:
            optimiser, recipe = (
                (self.config.warm.optimiser, get_recipe("sft"))
                if phase == "sft"
                else (loop.optimiser, get_recipe("sft"))
                if phase == "sft-more"
                else (loop.optimiser, get_recipe(self.config.algo, loop.changes))
            )
            return Trainer(
                self.model, recipe, lr=optimiser.lr, betas=optimiser.betas, weight_decay=optimiser.weight_decay,
                grad_clip=optimiser.grad_clip, schedule=optimiser.schedule, micro_tokens=optimiser.micro_tokens,
            )  # fmt: skip

        return History(store, lineage, out / "checkpoints", self.model, make, renderer=self.renderer,
                       tokenizer=self.tokenizer, keep=loop.keep_checkpoints)  # fmt: skip

    def _demonstrate(self) -> None:
        """Record the demonstrations that are not on tape yet."""
        n = self.config.demonstrations
        tasks = [self.train_tasks[k % len(self.train_tasks)] for k in range(n)]
        have = {}
        for summary in self.store.summaries(split="demo", closed=True):
            tape = self.store.tape(summary.id, refresh=False)
            if tape.trains:
                have[tape.begin.attempt] = tape.id
                self._keep_demo(tape)
        with self._timed("demonstrations"):
            asyncio.run(self._record([k for k in range(n) if k not in have], tasks, have))
        self.demo_order = [have[k] for k in range(n)]
        rewards = [self.demos[tape][1].reward or 0.0 for tape in self.demo_order]
        self.results["demonstrations"] = {"n": n, "reward": sum(rewards) / n}
        self._save()

    def _keep_demo(self, tape: Tape) -> None:
        self.demos[tape.id] = (rows(tape), episode_of(tape))

    async def _record(self, missing: list[int], tasks: list[Task], have: dict[int, str]) -> None:
        def policy(request: Request) -> str:
            heard = [m["content"] for m in request.messages if m["role"] == "user"]
            return demonstrate(heard[0], heard[1:], random.Random(request.seed), bad=self.config.bad)

        engine = ScriptedEngine(policy, renderer=self.renderer)
        work = iter(missing)
        done = self.config.demonstrations - len(missing)

        async def worker() -> None:
            nonlocal done
            for k in work:
                tape = await rollout(
                    self.agent, self._env, tasks[k], engine=engine, seed=derive_seed(self.config.seed, "demo", k), attempt=k,
                    split="demo", limits=self.config.loop.limits, sampling=self.config.loop.sampling, journal=self.store.writer,
                )  # fmt: skip
                if not tape.trains:
                    raise DemoFailed(f"demonstration {k} ended with {tape.cause}")
                have[k] = tape.id
                self._keep_demo(tape)
                done += 1
                if done % 500 == 0:
                    self.progress("demonstrations", done, self.config.demonstrations, "")

        await asyncio.gather(*(worker() for _ in range(256)))

    def _env(self) -> Calculator:
        return Calculator(scorer="chain_sum", max_turns=4)

    def _warm_start(self) -> None:
        history, target = self.history, self.config.warm.updates
        with self._timed("restore"):
            again = history.restore(lambda done, of: self.progress("re-applying recorded updates", done, of, ""))
        if again:
            self.results["reapplied"] = self.results.get("reapplied", 0) + again
        if history.updates >= target:
            return

        def report(done: int, line: dict[str, Any]) -> None:
            self.metrics(line)
            self.progress("imitating demonstrations (SFT)", done, target, f"loss {line['loss']:.3f}")

        with self._timed("sft"):
            warm_start(self.config.warm, store=self.store, history=history, tapes=self.demo_order, source=self.demos.__getitem__,
                       seed=self.config.seed, on_update=report)  # fmt: skip
        self._save()

    def _engine(self, history: History) -> EmbeddedEngine:
        return EmbeddedEngine(self.model, self.renderer, version=history.version, slots=256, capacity=self.config.context)

    async def _improve(self) -> None:
        warm = self.config.warm.updates
        if self.history.updates == warm and "before" not in self.results:
            engine = self._engine(self.history)
            self.results["before"] = await self._evaluate(engine, "before")
            self._save()
            await engine.close()
        self.results.setdefault("before", None)
        if self.history.updates < warm + self.config.loop.updates:
            await self._loop(self.history, self.config.loop, self.store, "improving by rollouts", self.metrics)
        if "after" not in self.results:
            engine = self._engine(self.history)
            self.results["after"] = await self._evaluate(engine, "after")
            await engine.close()
        self._save()

    async def _loop(self, history: History, config: LoopConfig, store: Store, name: str,
                    metrics: Callable[[dict[str, Any]], None]) -> Loop:  # fmt: skip
        engine = self._engine(history)
        start = self.config.warm.updates if history is self.history else 0
        weights, publish = history.publish_record("start")
        if publish.version not in history.published:
            store.append_layer(publish)
        del weights
        order = list(range(len(self.train_tasks)))
        random.Random(derive_seed(self.config.seed, "tasks")).shuffle(order)

        def report(update: UpdateReport) -> None:
            metrics(update.metrics)
            reward = "unscored" if update.reward is None else f"{update.reward:.3f}"
            self.progress(name, update.update - start, config.updates, f"reward {reward}")

        loop = Loop(
            config, store=store, history=history, engine=engine, agent=self.agent, env=self._env,
            tasks=lambda k: self.train_tasks[order[k % len(order)]], seed=self.config.seed, start=start, on_update=report,
        )  # fmt: skip
        with self._timed("rl" if history is self.history else "controls"):
            await loop.run()
        await engine.close()
        if history is self.history:
            seconds = self.results["seconds"]
            seconds["train"] = round(seconds.get("train", 0.0) + loop.train_seconds, 3)
            seconds["rollout"] = round(seconds.get("rollout", 0.0) + loop.engine_seconds, 3)
            self.results["idle_share"] = loop.idle_share
            self._save()
        return loop

    async def _evaluate(self, engine: EmbeddedEngine, when: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            self.progress(f"evaluating on held-out tasks, {when}", 0, 1, name)
            sampling = self.config.loop.sampling.model_copy(update={"temperature": temperature})
            with self._timed("evaluation"):
                result: Evaluation = await evaluate(
                    self.agent, self._env, self.held_out, engine=engine, sampling=sampling, seed=self.config.seed,
                    split=f"eval-{when}-{name}", limits=self.config.loop.limits, journal=self.store.writer,
                )  # fmt: skip
            found[name] = {"mean": result.mean, "error": result.error, "n": result.scored, "metrics": result.metrics}
        return found

    # Controls: the same number of trained tokens, without what is claimed to teach

    def _run_controls(self) -> None:
        controls = self.results.setdefault("controls", {})
        base = next(c for c in checkpoints(self.out / "checkpoints") if c.update == self.config.warm.updates)
        trained = self.history.trained_tokens - int(base.state["trained_tokens"])
        for name, run in (("sft", self._control_sft), ("shuffled", self._control_shuffled)):
            if name in controls:
                continue
            out = self.out / "controls" / name
            with Store.create(out) if not (out / "tapes").is_dir() else Store.open(out, write=True) as store:
                self.model.load_state_dict(base.weights())
                history = self._history(store, f"{self.results['lineage']}-{name}", out)
                asyncio.run(run(store, history, trained))
                engine = self._engine(history)
                controls[name] = asyncio.run(self._evaluate_and_close(engine, f"control-{name}"))
                controls[name]["trained_tokens"] = history.trained_tokens
            self._save()
        self.model.load_state_dict(checkpoints(self.out / "checkpoints")[-1].weights())

    async def _evaluate_and_close(self, engine: EmbeddedEngine, when: str) -> dict[str, Any]:
        try:
            return await self._evaluate(engine, when)
        finally:
            await engine.close()

    async def _control_sft(self, store: Store, history: History, trained: int) -> None:
        """Go on imitating, for as many tokens as the improvement trained on."""
        history.restore()

        def report(done: int, line: dict[str, Any]) -> None:
            self.progress("control: SFT only", min(history.trained_tokens, trained), trained, f"loss {line['loss']:.3f}")

        with self._timed("controls"):
            warm_start(self.config.warm, store=store, history=history, tapes=self.demo_order, source=self.demos.__getitem__,
                       seed=self.config.seed + 1, phase="sft-more", updates=10**9, on_update=report,
                       stop=lambda: history.trained_tokens >= trained)  # fmt: skip

    async def _control_shuffled(self, store: Store, history: History, trained: int) -> None:
        """The same loop, with rewards that say nothing."""
        history.restore()
        path = store.path / "metrics.jsonl"

        def metrics(line: dict[str, Any]) -> None:
            with path.open("a") as file:
                file.write(json.dumps({k: v for k, v in line.items() if not isinstance(v, float) or v == v}) + "\n")

        config = self.config.loop.model_copy(update={"shuffle_rewards": True})
        await self._loop(history, config, store, "control: shuffled rewards", metrics)

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        r = self.results

        def mean(part: Any, name: str) -> float | None:
            return part[name]["mean"] if part else None

        controls = r.get("controls") or None
        seconds = {name: r["seconds"].get(name, 0.0) for name in ("sft", "rollout", "train", "total")}
        return {
            "run": str(self.out), "seed": self.config.seed, "algo": self.config.algo,
            "held_out": {
                "before": mean(r["before"], "sampled"), "after": mean(r["after"], "sampled"),
                "greedy_before": mean(r["before"], "greedy"), "greedy_after": mean(r["after"], "greedy"),
                "n": len(self.held_out),
            },
            "controls": controls and {
                name: {"after": mean(c, "sampled"), "greedy_after": mean(c, "greedy"), "trained_tokens": c["trained_tokens"]}
                for name, c in controls.items()
            },
            "seconds": {**seconds, **{k: v for k, v in r["seconds"].items() if k not in seconds}},
            "tokens": self._token_counts(), "episodes": r["books"]["begun"],
        }  # fmt: skip

    def _token_counts(self) -> dict[str, int]:
        books = self.results["books"]
        return {"sampled": books["sampled"], **books["tokens"], "authored": books["authored"],
                "authored_trained": books["authored_trained"], "applied": books["applied"]}  # fmt: skip


def _write(path: Path, text: str) -> None:
    """Replace a small file as a whole."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
