"""A reward function in a `.py` file: `reward_func(queries, prompts, labels=..., references=...)`, for many samples.

The function receives the lists for which it has parameters. It returns a list of numbers (or an array), or a dict of
named lists. Loading imports the file and so runs its code.
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
    """The function of a file as a reward model."""

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
                f"{getattr(function, '__name__', function)} has the parameters {', '.join(parameters) or '(none)'}; a "
                f"reward function in a file may have {', '.join(FIELDS)}, and needs at least one of them"
            )

    async def score(self, samples: Sequence[Sample]) -> list[ModelScore]:
        """One call with all samples; a sync function runs in a thread."""
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


def file_reward(
    path: str | Path,
    *,
    name: str | None = None,
    weight: float = 1.0,
    size: int = 64,
    sample: Callable[[Tape], Sample] = sample_of,
) -> RewardSource[Tape]:
    """A source of the `reward_func` in a file; by default it has the file's name. It is pure unless the function has an
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
    """The scores as a list; an array or tensor is converted."""
    if hasattr(scores, "tolist"):
        scores = scores.tolist()
    if isinstance(scores, str | Mapping) or not isinstance(scores, Sequence):
        raise WrongAnswer(
            f"a reward function must return a list of scores, not {type(scores).__name__} {str(scores)[:80]!r}"
        )
    return list(scores)
