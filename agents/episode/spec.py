"""An `EpisodeSpec` says which episode to run. It holds data only, so it can be sent to a process on another machine."""

from __future__ import annotations

from typing import Self

from pydantic import Field, ValidationError, model_validator

from ...envs.taskset import as_task
from ...tapes import Sampling, Tape, Task
from ...tapes.common.arguments import wrong_fields
from ...tapes.errors import BadArgument
from ...tapes.value import Value
from .limits import Limits
from .seeds import derive_seed


class EpisodeSpec(Value):
    """The task, seeds, limits and other settings of one episode. `rollout` runs it.

    The agent, the environment, the engine and the journal are objects, so they are arguments of `rollout` instead.
    """

    task: Task
    split: str = "train"
    """The purpose of the tape: `train`, `eval`, `demo` or any other name."""
    seed: int = 0
    """The seed for sampling."""
    env_seed: int | None = None
    """The seed for the environment. None means that it is derived from `seed`."""
    group: str | None = None
    """The id of the group whose attempts are compared. None means that the episode is compared with no other."""
    attempt: int = Field(default=0, ge=0)
    """The episode's number within its group, counted from 0."""
    limits: Limits = Field(default_factory=Limits)
    sampling: Sampling = Field(default_factory=Sampling)
    retries: int = Field(default=2, ge=0)
    """Maximum number of times that a model call is repeated after engine errors that may be temporary."""
    fork: Tape | None = None
    """The prefix of a recorded episode, made by `tape.at_turn(k)`, that this episode continues. The environment is
    restored to the state after this prefix. If it doesn't reach the recorded state, the episode ends with an error."""
    unverified: str | None = None
    """Why to continue `fork` although the environment doesn't reach the recorded state. The tape records the reason."""
    tape_id: str | None = None
    """The id of the new tape. None means a new id."""
    worker: str | None = None
    """The name of the worker that runs the episode, which the tape records. None means no worker."""
    versions: dict[str, str] = Field(default_factory=dict[str, str])
    """Versions that the episode must run with, by their names in `Begin.versions`, such as `package` and `tokenizer`.
    `rollout` refuses the episode if the process that runs it has another version. Other versions aren't checked."""

    @model_validator(mode="after")
    def _check_fork(self) -> Self:
        if self.unverified is not None and self.fork is None:
            raise ValueError("unverified is a reason to continue `fork`, and there is none: give `fork`, or remove it")
        return self

    @property
    def environment_seed(self) -> int:
        """The environment's seed, derived from `seed` if `env_seed` is None."""
        return derive_seed(self.seed, "env") if self.env_seed is None else self.env_seed

    @classmethod
    def of(cls, task: object, **fields: object) -> EpisodeSpec:
        """The spec of `task`, which is a Task, a value (see `Task.of`) or a spec, with these fields changed.

        Raises BadTasks if JSON can't hold the task, and BadArgument if a field is unknown or has a wrong value.
        """
        spec = isinstance(task, EpisodeSpec)
        checked = as_task(task.task if spec else task, 0)
        if spec and not fields:
            return task
        known = vars(task) if spec else {"task": checked}
        try:
            return cls.model_validate({**known, **fields})
        except ValidationError as error:
            raise BadArgument(f"EpisodeSpec.of(): {wrong_fields(error, cls)}") from error
