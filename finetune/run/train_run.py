"""`train`: the asynchronous loop on any agent, environment, tasks and model, in one run directory.

If a warm start on another run's tapes is configured, it comes first. Then rollouts and updates run at the same time,
with evaluations on held-out tasks before, during and after the loop. A run that was killed can be resumed: recorded
updates are applied again from the tapes, and recorded rollouts are used. A finished run continues if `loop.updates` is
raised.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from ...agents.engines.engine import EngineStopped
from ...agents.runs.attempts import Attempts
from ...agents.runs.on_ray import placed_attempts
from ...agents.runs.worker import Engines
from ...agents.setup.setup import AgentSource, EnvSource, LoadedSetup, TasksSource
from ...tapes.audit.advice import advice
from ...tapes.common.progress import Progress, silent
from ...tapes.common.run_async import run_async
from ...tapes.errors import MissingExtra
from ...tapes.store.lease import check_free
from ...tapes.store.run_directory import CONFIG, METRICS, Results, code_changes, open_run, read_metrics

try:
    from ...tapes.common.stats import ends_of, mean_of
    from ..loop.history import History, with_threads
    from ..loop.loop import check_recipe
    from ..trainer.distributed import launched
    from .load_policy import check_begun
    from .loaded_run import LoadedRun
    from .longer import check_rates, lengthening
    from .run_report import REPORT, PlayerSummary, Reporter, TrainSummary, reporting
    from .trackers import check_trackers, tracking
    from .train_config import TrainConfig
    from .training import OnEpisode, Training
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers", "numpy", "tokenizers"):
        raise
    raise MissingExtra(error.name, "train", "training") from error


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    agent: AgentSource | None = None,
    env: EnvSource | None = None,
    tasks: TasksSource | None = None,
    setup: LoadedSetup | None = None,
    resume: bool = False,
    progress: Progress = silent,
    on_episode: OnEpisode | None = None,
) -> TrainSummary:
    """Train in `out`, or continue the run there with `resume`. Raises UsageError if `out` has a run and `resume` is
    false, or if it has none and `resume` is true. After a restart by torchrun, either is right.

    `agent`, `env` and `tasks` are objects to use if the configuration doesn't name them. `setup` is the result of
    `config.checked()` and `resolve`, if the caller has it. Raises UsageError, and writes nothing, if the configuration
    names something that doesn't exist. `on_episode` gets an episode after the first update and after each
    `loop.checkpoint_every` updates. In a group of processes (`accelerate launch`, `torchrun`), rank 0 leads the run,
    and the other ranks only compute their share of each update. Every rank returns the summary. `train` also works
    inside a running event loop.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # torchrun has started the same command again
        resume = (Path(out) / CONFIG).exists()
    if setup is None:
        config, setup = config.checked(resume).resolve(agent=agent, env=env, tasks=tasks)
    with with_threads(config.threads), setup, launched(**config.processes.model_dump()) as ranks:
        folder = Path(out).absolute()
        if ranks.rank:
            return cast(TrainSummary, LoadedRun.of(config, setup, folder, ranks).policy.weights.follow())
        check_free(out)  # before a model is loaded
        engines = Engines(config.engine, config.players)
        with placed_attempts(config, setup, engines, most=config.loop.max_concurrent, trains=True) as place:
            loaded = LoadedRun.of(config, setup, folder, ranks)
            with loaded.policy.weights.leading():
                summary = _lead(loaded, folder, resume, progress, on_episode, place)
        loaded.policy.weights.finish(summary)
        return summary


def _lead(
    loaded: LoadedRun, out: Path, resume: bool, progress: Progress, on_episode: OnEpisode | None, place: Attempts
) -> TrainSummary:
    """Do the whole run on rank 0. The other ranks only compute their share of each update."""
    config = loaded.config
    assert loaded.scene is not None
    check_trackers(config.trackers)
    run_async(loaded.check_custom_engines())
    places = ("trainer", *(f"players.{name}.{part}" for name in config.players for part in ("trainer", "engine")))
    frozen = [f"players.{name}.engine" for name, player in config.players.items() if player.frozen]
    warm = config.warm.updates if config.warm else 0
    with open_run(
        out,
        config,
        resume=resume,
        begin=lambda: _new_results(loaded),
        free=(
            *(f"{place}.{name}" for place in places for name in ("threads", "device", "offload")),
            "loop.keep_checkpoints",
            "processes",
            "trackers",
            "tracking",
        ),
        changes=lengthening(config.loop, warm, config.players),
        engines=frozen,
        code=loaded.scene.code,
    ) as directory:
        report = Reporter(
            directory,
            f"Training {loaded.scene.agent.name}",
            loaded.recipe.name,
            config.loop.updates,
            config.loop.checkpoint_every,
            tokenizer=loaded.policy.tokenizer,
        )
        with reporting(report):
            with directory.timed("total"), tracking(directory, config.trackers) as trackers:
                folder = str(config.engine.model)
                check_begun(directory.results, loaded.policy.weights.digest, out, folder)
                training = Training(loaded, directory, progress, on_episode, trackers, place)
                try:
                    training.complete()
                except EngineStopped as stopped:
                    said = f"{training.history.updates:,} updates are recorded"
                    raise stopped.at(said, frozen if directory.fruitless else ()) from stopped
            directory.store.check_counted()
            books = directory.results.books = directory.store.books()
            directory.results.books_close = books.closes
            directory.save()
            hints = advice(directory.store, "train", _loop_lines(out), directory.results.after)
            summary = _summary(training, (*place.notes, *hints))
            directory.summarise(summary)
    return summary


def _new_results(loaded: LoadedRun) -> Results:
    """Return the results of a new run, before its directory is made. Raises UsageError if tapes can't be imitated or
    tasks can't be drawn."""
    # A new lineage makes the version names of this run unique.
    results = Results(lineage=secrets.token_hex(4))
    check_rates(loaded.config.loop, loaded.config.players)
    loaded.tapes_to_imitate()
    if loaded.config.loop.corpus is not None:
        check_recipe(loaded.config.loop, loaded.recipe, len(loaded.documents(results)))
    loaded.draw(results)
    return results


def _summary(training: Training, hints: tuple[str, ...]) -> TrainSummary:
    results, history, out = training.run.results, training.history, training.run.path
    assert results.books is not None
    lines = _loop_lines(out)
    return TrainSummary(
        run=str(out),
        lineage=results.lineage,
        recipe=training.recipe.name,
        updates=training.done,
        ended_by=training.ended_by,
        reward=_first_and_last(lines, "reward"),
        agents={path: _first_and_last(lines, f"reward/agent/{path}") for path in training.trained},
        players={name: _player(name, training) for name in training.config.players},
        held_out=_held_out(results),
        seconds=results.seconds,
        tokens=results.books.counts,
        episodes=results.books.begun,
        books_close=results.books.closes,
        model=_model(history),
        report=str(out / REPORT),
        advice=hints,
        code_changes=code_changes(out),
        compared={name: str(other) for name, other in (history.trainer.others if history.trainer else {}).items()},
    )


def _player(name: str, training: Training) -> PlayerSummary:
    player, history = training.config.players[name], training.histories.get(name)
    if history is None:
        folder = getattr(player.engine, "model", None)
        return PlayerSummary(agents=player.agents, lineage=None, updates=0, model=folder)
    return PlayerSummary(agents=player.agents, lineage=history.lineage, updates=history.updates, model=_model(history))


def _held_out(results: Results) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for when, part in (("before", results.before), ("after", results.after)):
        for name, key in (("sampled", when), ("greedy", f"greedy_{when}")):
            if name == "sampled" or (part and name in part):
                found[key] = part[name].mean if part else None
                if when == "after" and part:
                    found[f"{key}_change"] = part[name].change
                    found[f"{key}_pass_at"] = part[name].pass_change
    last = results.after or results.before
    every = {k: part["sampled"].mean for k, part in results.evaluations.items()}
    n, tasks = (last["sampled"].n, (last["sampled"].reward or {}).get("tasks", 0)) if last else (0, 0)
    return {**found, "n": n, "tasks": tasks, "every": every}


def _loop_lines(run: Path) -> list[dict[str, JsonValue]]:
    return [line for line in read_metrics(run / METRICS) if line.get("phase") == "rl"]


def _model(history: History) -> str:
    return str(history.directory / f"update-{history.updates:06d}" / "hf")


def _first_and_last(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, float | None]:
    first, last = ends_of([line[key] for line in lines if line.get(key) is not None])
    return {"first": mean_of(first), "last": mean_of(last)}
