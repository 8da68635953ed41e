"""`tapereel.run`, `tapereel.train`, `tapereel.evaluate` and `tapereel.open`: the functions that a script starts with.

They take objects: an agent, an environment class or factory, any iterable of tasks, and a model. They work in scripts
and in notebooks, and write the same records as the command line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import JsonValue

from ...agents.engines.embedded.tiny_model import ALPHABET, Size
from ...agents.episode.agent import Agent
from ...agents.runs.pass_at_k import Scores
from ...agents.runs.runner import RunConfig, RunSummary, k_settings
from ...agents.runs.runner import run as run_config
from ...agents.setup.setup import AgentSource, EnvSource, TasksSource, load_agent, name_of_tasks
from ...envs.environment import EnvironmentFactory
from ...envs.taskset import Taskset
from ...tapes.common.arguments import check_arguments
from ...tapes.common.config import load_config
from ...tapes.common.progress import Progress, silent
from ...tapes.errors import UsageError
from ...tapes.store.lease import take_over as end_its_lease
from .run_handle import Model, Run, engine_settings

if TYPE_CHECKING:
    from ..run.run_report import TrainSummary
    from ..run.train_config import TrainConfig

Trainable = Annotated[
    str | Path, "a model's folder, its GGUF file or its name on the hub: answers have no weights to train"
]
_HELD_OUT = "evaluation.tasks"
Setting = Annotated[JsonValue, "a value that YAML can hold, such as an object's name 'my_recipes.py:mine'"]
RecipeName = Annotated[str, "the name of a recipe, as 'my_recipes.py:mine': a resumed run finds it again by its name"]


@check_arguments
def run(
    agent: AgentSource,
    env: EnvSource,
    tasks: TasksSource,
    model: Model | None = None,
    *,
    out: str | Path | None = None,
    attempts: int | None = None,
    seed: int | None = None,
    resume: bool = False,
    take_over: bool = False,
    on: str | None = None,
    config: RunConfig | None = None,
    settings: Mapping[str, Setting] | None = None,
    progress: Progress = silent,
) -> Run[RunSummary]:
    """Run the agent on the tasks, and record every episode: `tr.run(tr.ChatAgent(), Env, tasks, ["an answer"])`.

    `out` is the run directory. By default, a new directory below `runs/` is made. `attempts` is the number of episodes
    for each task, by default 1. If `resume` is true, the run in `out` continues. `take_over` takes it over from another
    process, which stops before its next record. `on="ray"` runs the episodes in Ray's workers on this machine, and
    `on="ray:ADDRESS"` in those of a running cluster.

    `settings` can set any setting of `tapereel run` by its dotted key, as in `{"limits.turns": 8}`. `config` has
    settings as an object, such as the `config` of an earlier run. The other arguments override it, and `settings`
    override both. `model` may be omitted if `config` has the engine.

    Raises UsageError, and writes nothing, if an argument is invalid, or if `out` holds a run and `resume` is false, or
    no run and `resume` is true.
    """
    sets = {"attempts": attempts, "seed": seed, "on": on}
    made: RunConfig = _config(config or RunConfig, model, sets, settings)
    folder = _folder(out, agent, take_over, resume)
    summary = run_config(made, folder, agent=agent, env=env, tasks=tasks, resume=resume, progress=progress)
    return Run(folder, agent=_instance(agent), env=_factory(env), summary=summary)


@check_arguments
def evaluate(
    agent: AgentSource,
    env: EnvSource,
    tasks: TasksSource,
    model: Model | None = None,
    *,
    out: str | Path | None = None,
    attempts: int | None = None,
    k: Sequence[int] = (),
    success: float | None = None,
    seed: int | None = None,
    on: str | None = None,
    config: RunConfig | None = None,
    settings: Mapping[str, Setting] | None = None,
    progress: Progress = silent,
) -> Scores:
    """Return the mean reward and pass@k of a model on tasks, with 95 % intervals over tasks:
    `tr.evaluate(agent, Env, tasks, "runs/digits-model", k=[1, 4])`.

    `attempts` is the number of episodes for each task. `k` lists the numbers for which to report pass@k. By default,
    `attempts` is the largest of them, or 1. `success` is the minimum reward that counts as a success, by default 1.
    The episodes are recorded in `out`, as in `run`, and `on`, `config` and `settings` are as in `run`. To read the
    scores of recorded episodes, call `scores` of a `Run`.
    """
    sets: dict[str, Any] = dict(k_settings(k, attempts is not None or config is not None)) if k else {}
    sets |= {} if success is None else {"success": success}
    made = run(
        agent,
        env,
        tasks,
        model,
        out=out,
        attempts=attempts,
        seed=seed,
        on=on,
        config=config,
        settings={**sets, **(settings or {})},
        progress=progress,
    )
    assert made.summary is not None
    return made.summary.scores


@check_arguments
def train(
    agent: AgentSource,
    env: EnvSource,
    tasks: TasksSource,
    model: Trainable | None = None,
    *,
    out: str | Path | None = None,
    updates: int | None = None,
    recipe: RecipeName | None = None,
    seed: int | None = None,
    resume: bool = False,
    take_over: bool = False,
    on: str | None = None,
    config: TrainConfig | None = None,
    settings: Mapping[str, Setting | Taskset] | None = None,
    progress: Progress = silent,
) -> Run[TrainSummary]:
    """Train a model on the agent's episodes: `tr.train(agent, Env, tasks, "runs/digits-model", updates=40)`. Rollouts
    continue while the trainer updates the weights.

    `model` is a folder in Hugging Face format, a GGUF file, or a model on the hub as `org/name` or
    `org/name@revision`. `updates` is the number of updates in the loop. `recipe` is the name of a recipe, such as
    `grpo`, or `module:name`. `updates` and `recipe` have the same defaults as in `tapereel train`. In the returned
    run, `model` is the folder of the trained model. `resume`, `take_over` and `on` are as in `run`.

    `settings` can set any setting of `tapereel train` by its dotted key, as in `{"loop.optimiser.lr": 1e-3}`.
    `evaluation.tasks` may be a `Taskset`, such as the second part of `Taskset.split`. `config` has settings as an
    object of the class `tapereel.finetune.TrainConfig`, such as the `config` of an earlier run. The other arguments
    override it, and `settings` override both. `model` may be omitted if `config` has the engine.

    Raises UsageError, and writes nothing, if an argument is invalid, or if `out` holds a run and `resume` is false, or
    no run and `resume` is true.
    """
    from ..run.train_config import TrainConfig

    named = {"seed": seed, "loop.updates": updates, "loop.recipe": recipe, "on": on}
    sets: dict[str, Any] = {**(settings or {})}
    held_out = sets.get(_HELD_OUT)
    if isinstance(held_out, Taskset):
        if not len(held_out):
            raise UsageError(f"{_HELD_OUT} is an empty Taskset: hold out a larger part of the tasks")
        sets[_HELD_OUT] = name_of_tasks(held_out, held_out)
    given: TrainConfig = _config(config or TrainConfig, model, named, sets)
    made, setup = given.checked(resume).resolve(agent=agent, env=env, tasks=tasks)
    setup = replace(setup, held_out=held_out if isinstance(held_out, Taskset) else None)
    from ..run.train_run import train as train_config  # imports torch
    from .estimate import fit_memory, say_needs

    folder = _folder(out, agent, take_over, resume)
    made = fit_memory(made, given, folder if resume else None)
    if not resume:
        say_needs(made, folder.absolute())
    summary = train_config(made, folder, setup=setup, resume=resume, progress=progress)
    return Run(folder, agent=_instance(agent), env=_factory(env), summary=summary)


@check_arguments
def open(path: str | Path) -> Run:
    """Open the run in the directory `path`: `tr.open("runs/digits").reward`. Raises UsageError if it holds no run.

    Import the modules that define your steps first. Otherwise, their steps are read as `UnknownThought`,
    `UnknownAction` or `UnknownObservation`, with a warning."""
    return Run(path)


@check_arguments
def save_tiny_model(
    folder: str | Path, alphabet: str = ALPHABET, *, size: Size = "tiny", seed: int = 0, context: int = 512
) -> str:
    """Save an untrained chat model with less than a million parameters in `folder`, for tests and first steps on a CPU.

    Each character in `alphabet` gets a token. `size` is `micro`, `tiny`, `small` or `base`. Returns the folder.
    """
    from ...agents.engines.embedded.tiny_model import save_tiny

    save_tiny(folder, alphabet, size=size, seed=seed, context=context)
    return str(folder)


def _config(base: Any, model: Model | None, named: Mapping[str, Any], settings: Mapping[str, Any] | None) -> Any:
    """Return the configuration. Arguments override `base`, and `settings` override both, as `--set` does."""
    sets = [(key, value) for key, value in named.items() if value is not None]
    return load_config(base, None, [*engine_settings(model), *sets, *(settings or {}).items()])


def _folder(out: str | Path | None, agent: AgentSource, take_over: bool, resume: bool) -> Path:
    """Return `out`, or a new folder below `runs/` that is named after the agent and the time. With `take_over`, end the
    lease of the run in it."""
    if take_over:
        end_its_lease("" if out is None else out, resume)
    if out is not None:
        return Path(out)
    name = agent if isinstance(agent, str) else getattr(agent, "name", None) or getattr(agent, "__name__", "run")
    stem = "".join(c if c.isalnum() else "-" for c in str(name)).strip("-").lower()
    path = first = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while path.exists():  # another run began in this second
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def _instance(agent: AgentSource) -> Agent | None:
    """Return the agent as an object, for replays in this process, or None if `agent` is a name."""
    return None if isinstance(agent, str) else load_agent(agent)


def _factory(env: EnvSource) -> EnvironmentFactory | None:
    return None if isinstance(env, str) else env
