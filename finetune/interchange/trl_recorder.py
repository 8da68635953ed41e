"""Tapes inside TRL: a rollout function for its `GRPOTrainer` that records every episode and every update.

    with TRLRecorder("runs/mine") as tapes:
        trainer = GRPOTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer,
                              reward_funcs=tapes.reward(exact), rollout_func=tapes)
        trainer.train()

TRL owns the loss, the optimiser and the data. The recorder samples the completions, with an embedded engine that has
the trainer's weights of that step, so TRL trains on the exact sampled ids. The recorder writes an episode's end only
after its rewards, so the rewards stand on the tape. Each optimiser step is written to the ledger with the tokens that
TRL put into its loss. The recorder doesn't know how TRL weighs those tokens.

1. Only one process, because the ledger of updates has one writer.
2. A weight in the ledger is 1 / (number of tokens in the update), as in TRL's default loss (`dapo`).
3. An episode that may not be trained on (for example after an environment error) has no token in TRL's loss.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue
from transformers import Trainer, TrainerCallback

from ...agents import Agent, Limits
from ...agents.engines.embedded.embedded_engine import EmbeddedEngine
from ...agents.engines.embedded.pretrained import weights_digest
from ...agents.episode.recorder import Recorder
from ...agents.episode.rollout import rollout
from ...agents.episode.seeds import derive_seed
from ...agents.rendering.renderer import Renderer
from ...envs.environment import EnvironmentFactory
from ...tapes import Sampling, Tape, TapereelError, Task
from ...tapes.records import End, Publish, Record, Reward, Use, Void
from ...tapes.status import trains
from ...tapes.store.store import Store
from ..data.provenance import Range, known, own_ranges
from ..data.rows import Row, rows
from ..data.staleness import version_name
from ..trainer.checkpoint import copied_weights
from .trl_prompts import Ask, Asked


class NotForTRL(TapereelError, ValueError):
    """A trainer, prompt or episode that the recorder can't serve; the message says why and what to do."""


class _Held(Recorder):
    """A recorder that holds the episode's end until the trainer's rewards are written.

    A reward after the end would be a layer: not part of the tape's own reward, nor of its digest.
    """

    __slots__ = ("held",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: End | None = None

    def write(self, record: Record) -> None:
        if isinstance(record, End):
            self.held = record
        else:
            super().write(record)

    def let_go(self) -> None:
        """Write the held end, once."""
        if self.held is not None:
            super().write(self.held)
            self.held = None


class _Sample:
    """One episode, and its token sequence; `mask` is 1 for each completion id that TRL may train on."""

    def __init__(self, recorder: _Held, renderer: Renderer) -> None:
        self.recorder = recorder
        tape = Tape(recorder.log)
        end = recorder.held
        assert end is not None
        self.trains = trains(end.status, end.cause.type if end.cause is not None else None)
        self.reward = tape.reward
        found = rows(tape, renderer=renderer)
        if len(found) > 1:
            why = next((call.split for call in tape.calls if call.split), "another agent, or another conversation")
            raise NotForTRL(
                f"tape {tape.id} is {len(found)} token sequences, and TRL trains on one per completion: "
                f"{why}. Use one agent whose prompts only grow"
            )
        self.row: Row | None = found[0] if found and self.trains else None
        self.id = tape.id
        # TRL takes no empty sequence: an episode without a token to train on is two end tokens, masked out.
        first, self.ids, self.mask, self.logprobs = 1, [renderer.end_ids[0]] * 2, [0], [0.0]
        if self.row is not None:
            first, self.ids = int(self.row.own[0]), self.row.input_ids.tolist()
            own = np.zeros(len(self.ids), dtype=int)
            own[self.row.own] = 1
            self.mask = own[first:].tolist()
            self.logprobs = np.nan_to_num(self.row.aligned(self.row.old, 0.0)[first:], nan=0.0).tolist()
        self.prompt_ids, self.completion_ids = self.ids[:first], self.ids[first:]


class TRLRecorder:
    """`GRPOTrainer(..., rollout_func=tapes)`. It serves one trainer; close it, or use it as a context manager.

    Without `agent` and `env`, an episode is the prompt of the row and one answer. With them, an episode is any rollout:
    `task` converts a prompt to a task (default: the prompt is the public part), and `tapes.earned` is a reward function
    that returns the environment's reward.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        agent: Agent | None = None,
        env: EnvironmentFactory | None = None,
        task: Callable[[JsonValue], object] | None = None,
        limits: Limits | None = None,
        slots: int = 64,
        capacity: int | None = None,
        seed: int = 0,
    ) -> None:
        if (agent is None) != (env is None):
            raise NotForTRL("an agent acts in an environment: give both `agent` and `env`, or neither")
        path = Path(path)
        self.store = Store.open(path, write=True) if (path / "tapes").is_dir() else Store.create(path)
        self.agent, self.env, self.task, self.limits = agent or Ask(), env or Asked, task or _public, limits
        self.slots, self.capacity, self.seed = slots, capacity, seed
        self.lineage = secrets.token_hex(4)
        # TRL calls from synchronous code. One thread owns one event loop for the recorder's life: the engine keeps
        # tasks on that loop from call to call, and a new loop per call would cancel them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tapereel-trl")
        self._runner = self._thread.submit(asyncio.Runner).result()
        self._trainer: Any = None
        self._engine: EmbeddedEngine | None = None
        self._renderer: Any = None
        self._version = ""
        self._batch: dict[str, _Sample] = {}
        self._seen: Counter[bytes] = Counter()
        self._passed = 0
        """Number of micro-batches in the current pass over the batch."""
        self._step: list[_Sample] = []
        self._trained: set[str] = set()
        """Ids of the batch's tapes that an optimiser step has trained on."""
        self._loss = 0.0
        self._lr: float | None = None

    # What TRL calls

    def __call__(self, prompts: Sequence[JsonValue], trainer: Trainer) -> dict[str, list[object]]:
        """One episode for each prompt, as the columns that TRL expects of a rollout function."""
        self._attach(trainer)
        # TRL scores a batch before it asks for the next, so the rewards of the last batch are all written.
        self._let_go()
        samples = self._run(self._sampled(list(prompts), trainer))
        self._batch = {sample.id: sample for sample in samples}
        self._seen, self._passed, self._trained = Counter(), 0, set()
        return {
            "prompt_ids": [sample.prompt_ids for sample in samples],
            "completion_ids": [sample.completion_ids for sample in samples],
            "logprobs": [sample.logprobs for sample in samples],
            "env_mask": [sample.mask for sample in samples],
            "tape": [sample.id for sample in samples],
        }

    def reward(self, function: Callable[..., object]) -> Callable[..., object]:
        """Wrap TRL's reward function `f(prompts, completions, **columns)`, so that its scores are written to the tapes.

        The function gets one more column, `tape`: the ids of the tapes. Episodes that may not be trained on stay
        unscored."""
        if not callable(function) or isinstance(function, torch.nn.Module):
            raise NotForTRL(
                f"{function!r:.60} is no function: a reward model stays as it is in reward_funcs, and its "
                "scores are TRL's alone"
            )

        @functools.wraps(function)
        async def later(*args: Any, tape: Sequence[str] = (), **columns: Any) -> list[Any]:
            scores: Any = function(*args, **columns, **_wanting(function, tape))
            return self._scored(later, tape, await scores)

        @functools.wraps(function)
        def scored(*args: Any, tape: Sequence[str] = (), **columns: Any) -> list[Any]:
            return self._scored(scored, tape, function(*args, **columns, **_wanting(function, tape)))

        return later if inspect.iscoroutinefunction(function) else scored

    def earned(self, *, tape: Sequence[str], **_: object) -> list[float | None]:
        """A reward function for TRL: the environment's reward of each episode, None if it is unscored."""
        return [self._batch[name].reward if self._batch[name].trains else None for name in tape]

    # Sampling

    async def _sampled(self, prompts: list[Any], trainer: Any) -> list[_Sample]:
        await self._publish(trainer)
        mode = "train" if trainer.model.training else "eval"
        size = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        name = f"{self.lineage}/{mode}/{trainer.state.global_step:06d}-{secrets.token_hex(2)}"
        jobs: list[asyncio.Task[_Sample]] = []
        async with asyncio.TaskGroup() as group:
            for k, prompt in enumerate(prompts):
                jobs.append(group.create_task(self._episode(prompt, f"{name}/{k // size}", k % size, mode, trainer)))
        # The samples are on disk before TRL trains: a crash then can't leave an update whose tapes are lost.
        await self.store.writer.durable()
        return [job.result() for job in jobs]

    async def _episode(self, prompt: Any, group: str, attempt: int, split: str, trainer: Any) -> _Sample:
        recorders: list[_Held] = []

        def recorder(*arguments: Any) -> _Held:
            recorders.append(_Held(*arguments))
            return recorders[0]

        sampling = _sampling(trainer.args)
        await rollout(
            self.agent,
            self.env(),
            self.task(prompt),
            engine=self._engine,
            # The seed depends on names and counters, not on the order in which concurrent episodes start. Attempts of a
            # group share the environment's seed, so their rewards are comparable.
            seed=derive_seed(self.seed, group, attempt),
            env_seed=derive_seed(self.seed, group, "env"),
            group=group,
            attempt=attempt,
            split=split,
            limits=self.limits or Limits(turns=8, tokens=sampling.max_tokens),
            sampling=sampling,
            journal=self.store.writer,
            recorder=recorder,
        )
        return _Sample(recorders[0], self._renderer)

    async def _publish(self, trainer: Any) -> None:
        """Give the engine the trainer's current weights, under a new version name."""
        version = version_name(self.lineage, trainer.state.global_step)
        if version == self._version:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        weights = copied_weights(model)
        # The publish is recorded before the engine has the weights, so no call names a version without a record.
        mode = "start" if self._engine is None else "reprefill"
        self.store.append_layer(Publish(version=version, digest=weights_digest(weights), mode=mode, at=time.time()))
        if self._engine is None:
            self._engine = EmbeddedEngine(
                model, self._renderer, version=version, slots=self.slots, capacity=self.capacity
            )
        else:
            await self._engine.sync_weights(weights, version)
        self._version = version

    # Scores and updates

    def _scored(self, wrapped: Callable[..., Any], tapes: Sequence[str], scores: Any) -> list[Any]:
        trainer = self._trainer
        weight = float(trainer.reward_weights[trainer.reward_funcs.index(wrapped)]) if trainer is not None else 1.0
        kept: list[Any] = []
        for name, score in zip(tapes, scores, strict=True):
            sample = self._batch[name]
            kept.append(score if sample.trains else None)
            if kept[-1] is not None and float(score) == float(score):
                sample.recorder.write(Reward(tape=name, name=wrapped.__name__, value=float(score), weight=weight))
        return kept

    def _let_go(self) -> None:
        """Write the held end of every episode of the batch; call it only when all rewards are written."""
        for sample in self._batch.values():
            sample.recorder.let_go()

    def _forward(self, inputs: dict[str, Any]) -> None:
        """Note which samples TRL is about to train on. inputs: TRL's padded micro-batch."""
        self._let_go()
        self._lr = known(float(self._trainer.optimizer.param_groups[0]["lr"]))
        for k in range(len(inputs["completion_ids"])):
            ids = torch.cat(
                [inputs[f"{part}_ids"][k][inputs[f"{part}_mask"][k].bool()] for part in ("prompt", "completion")]
            )
            # TRL passes no tape id to the loss, so the exact ids identify the sample. Equal sequences of one batch are
            # taken in turn: without `_seen` the ledger would name the first of them several times.
            key = ids.cpu().numpy().astype(np.int32).tobytes()
            found = [s for s in self._batch.values() if np.array(s.ids, np.int32).tobytes() == key]
            if found and found[0].row is not None:
                self._step.append(found[self._seen[key] % len(found)])
                self._seen[key] += 1
        self._passed += 1

    def _stepped(self, trainer: Any) -> None:
        """Write the ledger entry of an optimiser step that TRL has made."""
        whole = self._passed >= trainer.args.steps_per_generation
        self._trained.update(s.id for s in self._step)
        # Every sampled token must be accounted for. After the last micro-batch of a batch, episodes that no step has
        # trained on are recorded as filtered.
        left = [s for s in self._batch.values() if whole and s.id not in self._trained]
        total = sum(len(s.row.own) for s in self._step if s.row is not None)
        items = [(*part, 1 / total) for part in _ranges(self._step)]
        info: dict[str, Any] = {
            "phase": "trl",
            "tapes": [s.id for s in self._step],
            "oldest": None,
            "rewards": None,
            "stale": [],
            "filtered": [list(part) for part in _ranges(left)],
            "skipped": None,
            "by": "trl",
            "lr": self._lr,
            "loss": known(self._loss),
        }
        self.store.append_layer(
            Use(lineage=self.lineage, update=trainer.state.global_step - 1, items=tuple(items), info=info)
        )
        self._step, self._loss = [], 0.0
        if whole:
            self._seen, self._passed = Counter(), 0
        self._run(self.store.writer.durable())

    # Life

    def _attach(self, trainer: Any) -> None:
        if self._trainer is trainer:
            return
        if self._trainer is not None:
            raise NotForTRL("a recorder serves one trainer: make another one for the next")
        if trainer.accelerator.num_processes > 1:
            raise NotForTRL(
                f"{trainer.accelerator.num_processes} processes train, and the ledger of updates has one "
                "writer: train in one"
            )
        if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
            raise NotForTRL("adapters can't be sampled from here: train the weights themselves")
        _sampling(trainer.args)
        self._trainer, self._renderer = trainer, Renderer(trainer.processing_class)
        # The run has one trainer at a time: the updates of an earlier lineage after this step no longer count.
        for old in self.store.lineages().living:
            self.store.append_layer(
                Void(
                    lineage=old,
                    update=trainer.state.global_step - 1,
                    into=self.lineage,
                    reason="another trainer goes on in this run",
                )
            )
        compute, recorder = trainer.compute_loss, self

        @functools.wraps(compute)
        def compute_loss(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            # TRL calls this for evaluation too, which must not enter the ledger.
            if model.training:
                recorder._forward(inputs)
            loss = compute(model, inputs, *args, **options)
            if model.training:
                recorder._loss += float(loss.detach())
            return loss

        trainer.compute_loss = compute_loss
        trainer.add_callback(_Steps(self))

    def _run(self, work: Any) -> Any:
        return self._thread.submit(self._runner.run, work).result()

    def close(self) -> None:
        """Write held ends, close the engine, and close the run."""
        self._let_go()
        if self._engine is not None:
            self._run(self._engine.close())
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()
        self.store.close()

    def __enter__(self) -> TRLRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Steps(TrainerCallback):
    def __init__(self, recorder: TRLRecorder) -> None:
        self._recorder = recorder

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._recorder._stepped(self._recorder._trainer)


def _ranges(samples: Sequence[_Sample]) -> list[Range]:
    return own_ranges([sample.row for sample in dict.fromkeys(samples) if sample.row is not None])


def _public(prompt: JsonValue) -> Task:
    return Task(public={"prompt": prompt})


def _wanting(function: Callable[..., Any], tapes: Sequence[str]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    takes = "tape" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"tape": tapes} if takes else {}


def _sampling(args: Any) -> Sampling:
    """The trainer's sampling settings. NotForTRL if they alter the distribution, so log-probs aren't the policy's."""
    wanted = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    for name, plain in wanted.items():
        value = getattr(args, name, plain)
        if value not in (plain, None, 0.0 if name == "min_p" else plain):
            raise NotForTRL(
                f"{name}={value} in the trainer's arguments: what it gives isn't drawn from the policy, so "
                f"its log-probs can't be trained on; leave it at {plain}"
            )
    if getattr(args, "use_vllm", False):
        raise NotForTRL("use_vllm=True: here the tokens come from an embedded engine; set it to False")
    return Sampling(temperature=args.temperature, max_tokens=args.max_completion_length or 256)
