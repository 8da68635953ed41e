"""Declared: what an environment says of itself to those who can't see its code.

The kinds of its actions and observations are the only classes that a message can ever become: a kind is looked up
among those declared, never by a name from the wire. Two sides agree when their kinds have the same fields, which a
digest of each kind's JSON Schema tells. Knows nothing of connections.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from ...tapes.errors import TapereelError
from ...tapes.steps import Action, Answer, Observation, Step, Text
from ..environment import Effect, Environment
from .remote_errors import BadAnswer, WrongEnvironment

StepT = TypeVar("StepT", bound=Step)


class Undeclared(TapereelError, TypeError):
    """An environment that doesn't say which kinds of steps it takes and shows; names what to write."""


@dataclass(frozen=True)
class Declared:
    """The face of an environment: its kinds of steps, and what taking an action again would do."""

    name: str
    """Of the class, for people."""
    actions: Mapping[str, type[Action]]
    """Kind -> class, of the actions that it takes."""
    observations: Mapping[str, type[Observation]]
    """Kind -> class, of what it shows."""
    effect: Effect = "pure"
    varies: Mapping[str, str | None] = field(default_factory=dict)
    """As `Environment.varies`."""
    rewards: Any = None
    """As `Environment.rewards`, where the class has them: they look at the tape, so they score on this side."""

    @classmethod
    def of(cls, thing: Any, *, kinds: Iterable[type[Step]] = ()) -> Declared:
        """What an Environment class or instance declares, or a function whose return type names one.

        `kinds` are added to those that `Environment[...]`, the return type of `reset` and `Environment.kinds` name.
        """
        known = getattr(thing, "declared", None)
        if isinstance(thing, Declared) or isinstance(known, Declared):
            return thing if isinstance(thing, Declared) else known  # type: ignore[return-value]
        env = _environment_class(thing)
        every = [*kinds, *env.kinds, *_action_kinds(env), *_shown_by_reset(env)]
        actions: dict[str, type[Action]] = {kind.kind: kind for kind in every if issubclass(kind, Action)}
        if not actions and not _names_actions(env):
            actions = {Answer.kind: Answer}
        observations = {kind.kind: kind for kind in every if issubclass(kind, Observation)}
        for what, found in (("actions", actions), ("observations", observations)):
            if not found:
                raise Undeclared(
                    f"{env.__qualname__} doesn't say which kinds of {what} it has; write "
                    f"`kinds = (...)` with their classes on it, or pass kinds="
                )
        return cls(env.__name__, actions, observations, env.effect, env.varies, env.rewards)

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """`action:guess` or `observation:hint` -> digest of the kind's fields."""
        roles: list[tuple[str, Mapping[str, type[Step]]]] = [
            ("action", self.actions),
            ("observation", self.observations),
        ]
        return {f"{role}:{kind}": _digest(cls) for role, kinds in roles for kind, cls in sorted(kinds.items())}

    def agree(self, name: str, digests: Mapping[str, str], effect: str) -> None:
        """WrongEnvironment unless the environment that the other side declares is this one."""
        differing = sorted(key for key in {*self.digests, *digests} if self.digests.get(key) != digests.get(key))
        if differing:
            told = [f"{key} ({_how(self.digests.get(key), digests.get(key))})" for key in differing[:8]]
            raise WrongEnvironment(
                f"{name[:80]!r} is served there, which differs from {self.name} here in "
                f"{', '.join(told)}: run the same version of its steps on both sides"
            )
        if effect != self.effect:
            raise WrongEnvironment(
                f"{name[:80]!r} says there that its effect is {effect[:40]!r}; here it is "
                f"{self.effect!r}, and what is durable before an action hangs on it"
            )

    def action(self, kind: str, content: Any) -> Action:
        """The action that was sent so. BadAnswer."""
        return _read(self.actions, "action", kind, content)

    def observation(self, kind: str, content: Any) -> Observation:
        """The observation that was sent so. BadAnswer."""
        return _read(self.observations, "observation", kind, content)

    def holds(self, step: Step) -> bool:
        """Whether the step is of a declared kind: its very class, since a subclass would arrive as another one."""
        return type(step) in (self.actions.get(step.kind), self.observations.get(step.kind))


def _read(kinds: Mapping[str, type[StepT]], role: str, kind: str, content: Any) -> StepT:
    cls = kinds.get(kind)
    if cls is None:
        raise BadAnswer(f"the {role} kind {kind[:80]!r} is not declared; there are {', '.join(sorted(kinds))}")
    try:
        return cls.model_validate(content)
    except ValidationError as error:
        raise BadAnswer(f"no {role} of the kind {kind!r}: {brief(error)}") from error


def brief(error: ValidationError) -> str:
    # Without the input: it may be long, and it is the other side's.
    # Of the several ways in which a union fails, the one that came furthest tells most.
    first = max(
        error.errors(include_url=False, include_input=False, include_context=False), key=lambda one: len(one["loc"])
    )
    place = ".".join(map(str, first["loc"][:6]))
    return f"{place[:100]}: {first['msg'][:200]}" if place else first["msg"][:200]


def _how(here: str | None, there: str | None) -> str:
    return "only there" if here is None else "only here" if there is None else "other fields"


def _environment_class(thing: Any) -> type[Environment[Any]]:
    if isinstance(thing, Environment):
        return type(thing)
    if isinstance(thing, type) and issubclass(thing, Environment):
        return thing
    found = _returned(thing) if callable(thing) else None
    if isinstance(found, type) and issubclass(found, Environment):
        return found
    raise Undeclared(
        f"{thing!r:.80} doesn't say which environment it makes; write its return type, or pass "
        "declared=Declared.of(TheClass)"
    )


def _returned(function: Callable[..., Any]) -> Any:
    try:
        return typing.get_type_hints(function).get("return")
    except (NameError, TypeError):  # an annotation that means nothing here names nothing
        return None


def _action_kinds(env: type[Environment[Any]]) -> Iterator[type[Step]]:
    for argument in _type_arguments(env):
        yield from _classes(argument, Action)


def _names_actions(env: type[Environment[Any]]) -> bool:
    """False for `class Guess(Environment)`, which takes the default action, `Answer`."""
    return any(True for _ in _type_arguments(env))


def _type_arguments(env: type[Environment[Any]]) -> Iterator[Any]:
    """`Guess | Pass` of `Environment[Guess | Pass]`, for the class and its base classes."""
    for cls in env.__mro__:
        for base in vars(cls).get("__orig_bases__", ()):
            origin = typing.get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Environment):
                yield typing.get_args(base)[0]


def _shown_by_reset(env: type[Environment[Any]]) -> Iterator[type[Step]]:
    """The classes in the return type of `reset`; `str` stands for `Text`."""
    yield from _classes(_returned(inspect.unwrap(env.reset)), Observation)


def _classes(annotation: Any, role: type[Step]) -> Iterator[type[Step]]:
    if annotation is str and role is Observation:
        yield Text
    elif isinstance(annotation, type) and issubclass(annotation, role) and annotation is not role:
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for each in typing.get_args(annotation):
            yield from _classes(each, role)


@functools.lru_cache(maxsize=1024)
def _digest(cls: type[Step]) -> str:
    schema = _fields(cls.model_json_schema())
    return hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()[:16]


def _fields(schema: Any) -> Any:
    """A JSON Schema without what is for people only, which may change from version to version."""
    if isinstance(schema, dict):
        return {
            key: _fields(value)
            for key, value in schema.items()
            if key not in ("title", "description") or not isinstance(value, str)
        }
    return [_fields(item) for item in schema] if isinstance(schema, list) else schema
