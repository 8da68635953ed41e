"""The class `Term`, from which all terms of an objective derive, and the metrics and state that terms share.

A term is a set of constants and one pure function over the stream. A term never refers to another term.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema
from torch import Tensor

from ...envs.load_named import load_named
from ...tapes.errors import UsageError
from ..data.stream import BadBatch


class Term(BaseModel):
    """One term of a recipe. A constant that the class doesn't define is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def out_of_reach(self, tokens: int) -> str | None:
        """Return a warning if the term can't have its intended effect in episodes of at most `tokens` own tokens, or
        None.

        A training run logs the warning when it starts. An example is a length penalty beyond the longest possible
        episode.
        """
        return None

    def fitted(self, tokens: int) -> Self:
        """Return the term for episodes of at most `tokens` own tokens. A length limit becomes `tokens`."""
        return self

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        values.pop("kind", None)
        texts = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in values.items()}
        inside = ", ".join(f"{name}={text}" for name, text in texts.items())
        kind = kind_of(self)
        return f"{kind}({inside})" if kind is not None else inside


def kind_of(term: Term) -> str | None:
    """Return the term's `kind`, or None for a class without one. For a user's class, it is `module:name`."""
    return class_name(type(term)) if _outside(type(term)) else getattr(term, "kind", None)


def sized(term: Term, found: object, n: int, units: str) -> Tensor:
    """Return `found`, which `term` has computed. Raises BadBatch if it isn't one number for each of `n` `units`."""
    if isinstance(found, Tensor) and found.shape == (n,):
        return found
    what = f"the shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"the type {type(found).__name__}"
    raise BadBatch(
        f"{kind_name(term)} returned a result of {what}, and there are {n} {units}: return a tensor of shape ({n},), "
        "without a mean or a sum over them"
    )


def kind_name(term: Term) -> str:
    """Return the name of the term's class for an error. A user's class has its module's name too."""
    cls = type(term)
    return f"{cls.__module__}:{cls.__qualname__}" if _outside(cls) else cls.__qualname__


def _outside(cls: type[Term]) -> bool:
    """Return True if a user defined the class, that is, if its module is outside `finetune`."""
    return not cls.__module__.startswith(__name__.removesuffix("objective.term"))


def class_name(cls: type[Term]) -> str:
    """Return a user's class as `module:name`, so that another process can import it. Raises ValueError for a class that
    is local to a function."""
    if "<" in cls.__qualname__:
        raise ValueError(
            f"{cls.__qualname__} can't be imported by its name, so a run can't record it: define the class at the "
            "top level of a module"
        )
    module, main = cls.__module__, _main_file()
    return f"{main.stem if module == '__main__' and main is not None else module}:{cls.__qualname__}"


def _main_file() -> Path | None:
    """Return the file of the script that this process runs, or None without a script.

    A class in the script has the module `__main__` here, but another process must import it by the stem of this file.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file) if file is not None else None


class Kinds:
    """Annotation for a field of a recipe, with the package's classes for this field. The value of `kind` selects one of
    them, or a class that a user wrote.

    A user's class must derive from the field's type. It is written as `kind: module:name` together with its constants,
    and reading a recipe imports it.
    """

    def __init__(self, *kinds: type[Term]) -> None:
        self.kinds = kinds

    def __get_pydantic_core_schema__(self, base: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        union = Annotated[reduce(or_, self.kinds), Field(discriminator="kind")]
        closed = handler.generate_schema(self.kinds[0] if len(self.kinds) == 1 else union)

        def validate(
            value: Any, validate_kinds: core_schema.ValidatorFunctionWrapHandler, info: core_schema.ValidationInfo
        ) -> Any:
            if isinstance(value, base) and type(value) not in self.kinds:
                _check_own(type(value), base)
                return value
            if isinstance(value, Mapping) and ":" in str(value.get("kind", "")):
                return _imported(base, value, **(info.context or {}))
            return validate_kinds(value)

        def serialise(
            value: Any, serialise_kinds: core_schema.SerializerFunctionWrapHandler, info: core_schema.SerializationInfo
        ) -> Any:
            # The union's serialiser would write a user's subclass of PPO as `kind: ppo`, and the run would record the
            # wrong class.
            if type(value) in self.kinds or not isinstance(value, base):
                return serialise_kinds(value)
            return {**value.model_dump(mode=info.mode), "kind": class_name(type(value))}

        return core_schema.with_info_wrap_validator_function(
            validate,
            closed,
            serialization=core_schema.wrap_serializer_function_ser_schema(serialise, info_arg=True, schema=closed),
        )


def _check_own(cls: type[Term], base: type[Term]) -> None:
    """Raise ValueError if a user's class can't be recorded in a run.

    It must be importable by its name. It must not have a constant called `kind`, because a run records the name of the
    class under this key.
    """
    name = class_name(cls)
    kind = cls.model_fields.get("kind")
    if kind is not None and len(get_args(kind.annotation)) != 1:
        raise ValueError(
            f"{name} has a constant `kind`, and a run records the name of the class under that key: derive it from "
            f"{base.__name__}, or rename the constant"
        )


def _imported(base: type[Term], value: Mapping[str, Any], *, execute: bool = True) -> Term:
    """Return the user's term that a mapping with `kind: module:name` describes. Raises ValueError if the class can't be
    imported or the mapping isn't valid for it.

    If `execute` is False, no module is imported for this."""
    name = str(value["kind"])
    module, _, path = name.rpartition(":")
    main = _main_file()
    try:
        # Importing the running script under its file name would run it a second time in this process.
        at_main = main is not None and module == main.stem and module not in sys.modules
        found = (
            reduce(getattr, path.split("."), sys.modules["__main__"]) if at_main else load_named(name, execute=execute)
        )
    except (UsageError, AttributeError) as error:
        raise ValueError(
            f"kind {name!r} can't be imported ({error}): run in the folder of that module, or add it to PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(
            f"kind {name!r} is {found!r:.80}, which isn't a subclass of {base.__module__}.{base.__name__}: derive it "
            "from that class"
        )
    _check_own(found, base)
    fields = {key: constant for key, constant in value.items() if key != "kind"}
    try:
        return found.model_validate(fields)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError(f"constants of {name}: {problems}") from error


class Sums:
    """Metrics that are stored as sums and counts, so that micro-batches, ranks and updates add up exactly.

    A mean is computed only when it is read. A mean of means would give a small micro-batch the weight of a large one.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        self.lows: dict[str, float] = {}
        self.highs: dict[str, float] = {}
        self.fault: str | None = None
        """A sentence about the first number of a term that wasn't finite."""

    def add(self, name: str, values: Tensor, *, extremes: bool = False) -> None:
        """Add all elements of `values` to the metric `name`. Booleans count as 0 and 1.

        Sums are in float64, because the error of a float32 sum over a million tokens is as large as a KL close to 0.
        """
        n = values.numel()
        self.put(name, float(values.sum(dtype=torch.float64)) if n else 0.0, n)
        if extremes and n:
            self.lows[name] = min(self.lows.get(name, float("inf")), float(values.min()))
            self.highs[name] = max(self.highs.get(name, float("-inf")), float(values.max()))

    def note(self, term: Term, found: Tensor, used: Tensor, episode: Tensor, episodes: Sequence[str]) -> None:
        """Note the first number in `found` (n,) that isn't finite, where `used` (n,) is true. `episode` (n,) has the
        index of each number's tape in `episodes`."""
        bad = (used & ~found.detach().isfinite()).nonzero()[:, 0]
        if self.fault is None and len(bad):
            tape, number = episodes[int(episode[bad[0]])], float(found[bad[0]].detach())
            self.fault = f"{kind_name(term)} returned {number} for tape {tape}"

    def put(self, name: str, total: float, n: float = 1) -> None:
        """Add `n` elements whose sum is `total` to the metric `name`."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + n

    def merge(self, other: Sums) -> None:
        """Add all metrics of `other`."""
        for name, value in other.sums.items():
            self.put(name, value, other.counts[name])
        for name, value in other.lows.items():
            self.lows[name] = min(self.lows.get(name, float("inf")), value)
        for name, value in other.highs.items():
            self.highs[name] = max(self.highs.get(name, float("-inf")), value)
        self.fault = self.fault or other.fault

    def without(self, *names: str) -> Sums:
        """Return a copy without the metrics in `names`."""
        copy = Sums()
        copy.fault = self.fault
        for mine, its in (
            (self.sums, copy.sums),
            (self.counts, copy.counts),
            (self.lows, copy.lows),
            (self.highs, copy.highs),
        ):
            its.update((name, value) for name, value in mine.items() if name not in names)
        return copy

    def mean(self, name: str) -> float | None:
        """Return sum / count, or None (not 0) if nothing was counted."""
        n = self.counts.get(name, 0.0)
        return self.sums[name] / n if n else None

    def std(self, name: str) -> float | None:
        """Return the standard deviation (divisor n) of `name`, or None if nothing was counted.

        The metric `name/square` must hold the squares of the same elements. The variance is clamped at 0, because
        rounding can make it negative, and its square root would be NaN.
        """
        mean, square = self.mean(name), self.mean(f"{name}/square")
        return None if mean is None or square is None else max(square - mean * mean, 0.0) ** 0.5

    def items(self) -> Iterator[tuple[str, float, float]]:
        """Yield (name, sum, count) for each metric, in the order in which the metrics were first added."""
        for name, value in self.sums.items():
            yield name, value, self.counts[name]

    def flat(self) -> dict[str, float]:
        """Return the mean of each metric by name. `name/std`, `name/min` and `name/max` are added if they are known.

        These numbers are only for display, because the means of two updates can't be added up.
        """
        means = {name: value / n for name, value, n in self.items() if n}
        means |= {f"{name}/std": std for name in means if (std := self.std(name)) is not None}
        means |= {f"{name}/min": value for name, value in self.lows.items()}
        return means | {f"{name}/max": value for name, value in self.highs.items()}

    def __contains__(self, name: object) -> bool:
        return name in self.sums

    def __getitem__(self, name: str) -> float:
        return self.sums[name]


@dataclass
class Moments:
    """Running count, mean and sum of squared deviations, for example of all rewards in the run so far."""

    n: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    def take(self, n: float, mean: float, m2: float) -> None:
        """Merge the count, mean and sum of squared deviations of a batch into this object (algorithm of Chan et al.).

        The result is the same as if all values had been in one batch. Plain sums of squares would lose precision if the
        mean is large.
        """
        if n == 0:
            return
        delta, whole = mean - self.mean, self.n + n
        self.m2 += m2 + delta * delta * self.n * n / whole
        self.mean += delta * n / whole
        self.n = whole

    @property
    def std(self) -> float | None:
        """Standard deviation (divisor n - 1), or None if there are fewer than two values or all values are equal."""
        return (self.m2 / (self.n - 1)) ** 0.5 if self.n > 1 and self.m2 > 0 else None


@dataclass
class Context:
    """What a term can use in addition to the stream: metrics, running statistics, and sums over all ranks."""

    sums: Sums = field(default_factory=Sums)
    """The metrics of the update."""
    moments: Moments = field(default_factory=Moments)
    """Moments of the rewards, which the trainer keeps from update to update."""
    parts: dict[str, float] = field(default_factory=dict)
    """Each term's part of the loss so far. The parts add up to the loss."""
    add_up: Callable[[Tensor], Tensor] = lambda x: x
    """Function that sums a tensor over all ranks. The default is for a single process. Every rank must call it, because
    the others wait."""

    def add_part(self, name: str, loss: float) -> None:
        """Add `loss` to `parts`. It is what the term `name` contributes to the total loss."""
        self.parts[name] = self.parts.get(name, 0.0) + loss

    def mean_and_square(self, x: Tensor) -> tuple[float, float, float]:
        """Return the count, the mean and the sum of squared deviations of `x` over all ranks.

        The mean is computed first, and the deviations from it second. The formula E[x^2] - E[x]^2 would lose its
        precision if the mean is large compared to the deviation, and whitening would divide by rounding errors.
        """
        n, total = self.add_up(torch.tensor([len(x), float(x.sum())], dtype=torch.float64)).tolist()
        mean = total / max(n, 1.0)
        return n, mean, float(self.add_up((x - mean).square().sum().to(torch.float64)))
