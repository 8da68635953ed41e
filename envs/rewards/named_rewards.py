"""Rewards by name, as in a configuration: `module:name`, a `.py` file, or the address of a reward model.

A `.py` file defines a function that scores many samples, `reward_func(queries, prompts, labels=..., references=...)`.
The function receives only the lists for which it has parameters. It returns a list of numbers, an array, or a dict of
named lists. Loading imports the file, which runs its code.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from ...tapes import Tape
from ...tapes.common.redact import holds_secret, without_secrets
from ...tapes.errors import BadArgument, UsageError
from ..load_named import load_function, load_named
from .reward_models import ModelScore, Sample, WrongAnswer, http_reward, model_source
from .sources import Rewards, RewardSource, Scorer

FUNCTION = "reward_func"
FIELDS = {"queries": "query", "prompts": "prompt", "labels": "label", "references": "reference", "ids": "id"}
"""The field of `Sample` that each parameter of `reward_func` receives."""


RewardLike = Annotated[
    str | Rewards[Tape] | RewardSource[Tape] | Scorer[Tape],
    "a Rewards, a RewardSource, a function from a tape to its score, or the name of one, as 'my_rewards.py:close'",
]


def as_rewards(found: object, name: str = "") -> Rewards[Tape]:
    """Convert `found` to `Rewards`. It is a `Rewards`, a `RewardSource`, or a function that scores a tape."""
    if isinstance(found, Rewards):
        return found
    if isinstance(found, RewardSource):
        return Rewards([found])
    if callable(found) and not isinstance(found, type):
        return Rewards([RewardSource(score=cast(Scorer[Tape], found))])
    raise BadArgument(
        f"{name or 'the reward'} is a {type(found).__name__}; a reward must be a Rewards, a RewardSource, or a "
        "function from a tape to a number, named numbers or None"
    )


def load_rewards(names: Sequence[str]) -> Rewards[Tape] | None:
    """Combine the named rewards. Returns None without names. Raises UsageError if a name doesn't denote a reward."""
    every: list[RewardSource[Any]] = []
    for name in names:
        found = load_reward(name)
        every += (*found.sources, *found.relative)
    try:
        return Rewards(every) if names else None
    except ValueError as error:
        raise UsageError(f"rewards: {error}") from error


def load_reward(name: RewardLike) -> Rewards[Tape]:
    """Load a reward model at `http://...`, the `reward_func` in `file.py`, or `module:name`. An object is used as it
    is.

    Raises UsageError if the name is invalid or is an address that contains a secret. The name is recorded with each
    score.
    """
    if not isinstance(name, str):
        return as_rewards(name)
    if holds_secret(name):
        raise UsageError(
            f"{without_secrets(name)} contains a user, a password or a key, which would be recorded; put the secret "
            "into an environment variable, write http_reward(url, key_variable=...) in a module, and name it here as "
            "module:name"
        )
    if name.startswith(("http://", "https://")):
        return Rewards([http_reward(name)])
    if name.endswith(".py"):
        return Rewards([file_reward(name)])
    return as_rewards(load_named(name), name)


class FileReward:
    """The function in a file, used as a reward model."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        parameters = inspect.signature(function).parameters
        whole = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.wanted = [name for name in FIELDS if whole or name in parameters]
        strange = [
            p.name
            for p in parameters.values()
            if p.name not in FIELDS
            and p.default is p.empty
            and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)
        ]
        if strange or not self.wanted:
            raise UsageError(
                f"{getattr(function, '__name__', function)} has the parameters {', '.join(parameters) or '(none)'}; a "
                f"reward function in a file may have {', '.join(FIELDS)}, and needs at least one of them"
            )

    async def score(self, samples: Sequence[Sample]) -> list[ModelScore]:
        """Call the function once with all samples. A sync function runs in a thread."""
        columns = {name: [getattr(sample, FIELDS[name]) for sample in samples] for name in self.wanted}
        if inspect.iscoroutinefunction(self.function):
            scores = await self.function(**columns)
        else:
            scores = await asyncio.to_thread(self.function, **columns)
        if not isinstance(scores, Mapping):
            return _listed(scores)
        named = {str(key): _listed(values) for key, values in scores.items()}
        for key, values in named.items():
            if len(values) != len(samples):
                raise WrongAnswer(f"{key!r} has {len(values)} scores for {len(samples)} samples")
        rows = [{key: values[k] for key, values in named.items() if values[k] is not None} for k in range(len(samples))]
        return rows  # type: ignore[return-value]


def file_reward(path: str | Path) -> RewardSource[Tape]:
    """Return a source that calls the `reward_func` in a file and has the name of the file. The source is pure unless
    the function has an attribute `pure = False`."""
    function = load_function(f"{path}:{FUNCTION}", "a function")
    return model_source(FileReward(function), name=Path(path).stem, pure=bool(getattr(function, "pure", True)))


def _listed(scores: Any) -> list[Any]:
    """Return the scores as a list. An array or tensor is converted."""
    if hasattr(scores, "tolist"):
        scores = scores.tolist()
    if isinstance(scores, str | Mapping) or not isinstance(scores, Sequence):
        raise WrongAnswer(
            f"a reward function must return a list of scores, not {type(scores).__name__} {str(scores)[:80]!r}"
        )
    return list(scores)
