"""A reward function in a `.py` file: `reward_func(queries, prompts, labels=..., references=...)`, many samples at once.

Those parameters that the function has are given, as lists; it gives a list of numbers (or an array), or a dict of such
lists, named. Loading runs the file, as importing it would.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...tapes import Tape
from ...tapes.errors import UsageError
from ..load_named import load_named
from .samples import ModelScore, Sample, WrongAnswer, model_source, sample_of
from .sources import RewardSource

FUNCTION = "reward_func"
FIELDS = {"queries": "query", "prompts": "prompt", "labels": "label", "references": "reference", "ids": "id"}
"""Parameter -> field of a Sample."""


class FileReward:
    """That function as a reward model."""

    def __init__(self, function: Callable[..., Any]) -> None:
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
                f"{getattr(function, '__name__', function)} takes {', '.join(parameters) or 'nothing'}; a "
                f"reward function of a file takes some of {', '.join(FIELDS)}"
            )

    async def score(self, samples: Sequence[Sample]) -> list[ModelScore]:
        """One call with all of them; a sync function runs in a thread."""
        given = {name: [getattr(sample, FIELDS[name]) for sample in samples] for name in self.wanted}
        if inspect.iscoroutinefunction(self.function):
            scores = await self.function(**given)
        else:
            scores = await asyncio.to_thread(self.function, **given)
        if not isinstance(scores, Mapping):
            return _listed(scores)
        columns = {str(key): _listed(values) for key, values in scores.items()}
        for key, values in columns.items():
            if len(values) != len(samples):
                raise WrongAnswer(f"{key!r} has {len(values)} scores for {len(samples)} samples")
        rows = [
            {key: values[k] for key, values in columns.items() if values[k] is not None} for k in range(len(samples))
        ]
        return rows  # type: ignore[return-value]


def file_reward(
    path: str | Path,
    *,
    name: str | None = None,
    weight: float = 1.0,
    size: int = 64,
    sample: Callable[[Tape], Sample] = sample_of,
) -> RewardSource[Tape]:
    """A source of the `reward_func` in that file, named like the file. It counts as pure, unless the function has an
    attribute `pure = False`."""
    function = load_named(f"{path}:{FUNCTION}")
    if not callable(function):
        raise UsageError(f"{FUNCTION} in {path} is a {type(function).__name__}, not a function")
    return model_source(
        FileReward(function),
        name=name or Path(path).stem,
        weight=weight,
        size=size,
        sample=sample,
        pure=bool(getattr(function, "pure", True)),
    )


def _listed(scores: Any) -> list[Any]:
    """A list, or what an array or tensor has of one."""
    if hasattr(scores, "tolist"):
        scores = scores.tolist()
    if isinstance(scores, str | Mapping) or not isinstance(scores, Sequence):
        raise WrongAnswer(f"a reward function gives a list of scores, not {type(scores).__name__} {str(scores)[:80]!r}")
    return list(scores)
