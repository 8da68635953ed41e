"""Declares the kinds of actions and observations of an environment, for other processes.

A message can only become a step of a declared kind. Its content never causes an import. Both sides must declare the
same kinds with the same fields. To check this, they compare a digest of each kind's JSON Schema.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import JsonValue, ValidationError

from ...tapes.errors import BadArgument
from ...tapes.steps import Action, Answer, Observation, Step, Text
from ..environment import AnyEnvironment, Effect, Environment
from .remote_errors import BadAnswer, WrongEnvironment

StepT = TypeVar("StepT", bound=Step)


@dataclass(frozen=True)
class Declared:
    """The interface of an environment: its kinds of steps, and the effect of its actions."""

    name: str
    """The name of the class, for error messages."""
    actions: Mapping[str, type[Action]]
    """The class of each kind of action that the environment accepts."""
    observations: Mapping[str, type[Observation]]
    """The class of each kind of observation."""
    effect: Effect = "pure"
    varies: Mapping[str, str | None] = field(default_factory=dict)
    """The fields to ignore in a re-execution, as in `Environment.varies`."""
    rewards: Any = None
    """The sources in `Environment.rewards`, if the class sets them. They read the tape, so the client computes their
    scores."""
    pixels: bool = False
    """True if the observations are known to contain pictures (`Environment.pixels`). If the declaration was made from
    an instance, this is the instance's value."""

    @classmethod
    def of(cls, thing: object) -> Declared:
        """Return the declaration of an Environment class or instance, or of a function that returns an Environment.

        The kinds come from `Environment[...]`, the return type of `reset` and `Environment.kinds`. If `reset` returns
        `str`, the kind is `Text`. An environment without an action type accepts `Answer`.
        """
        known = getattr(thing, "declared", None)
        if isinstance(thing, Declared) or isinstance(known, Declared):
            return thing if isinstance(thing, Declared) else known  # type: ignore[return-value]
        env = _environment_class(thing)
        arguments = list(_type_arguments(env))
        accepted = [kind for argument in arguments for kind in _classes(argument, Action)]
        shown = _classes(_returned(inspect.unwrap(env.reset)), Observation)
        every = [*env.kinds, *accepted, *shown]
        actions: dict[str, type[Action]] = {kind.kind: kind for kind in every if issubclass(kind, Action)}
        if not actions and not arguments:  # `class Guess(Environment)`
            actions = {Answer.kind: Answer}
        observations = {kind.kind: kind for kind in every if issubclass(kind, Observation)}
        for what, remedy, found in (
            ("actions", "name them, as in `class Game(Environment[Move])`", actions),
            ("observations", "annotate what its `reset` returns, such as `-> str`", observations),
        ):
            if not found:
                raise BadArgument(
                    f"{env.__qualname__} doesn't declare which kinds of {what} it has: {remedy}, or set "
                    "`kinds = (...)` to their classes on it"
                )
        pixels = thing.pixels if isinstance(thing, Environment) else env.pixels
        return cls(env.__name__, actions, observations, env.effect, env.varies, env.rewards, pixels)

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """The digest of each kind's fields, under a key such as `action:guess` or `observation:hint`."""
        roles: dict[str, Mapping[str, type[Step]]] = {"action": self.actions, "observation": self.observations}
        return {f"{role}:{kind}": _digest(cls) for role, kinds in roles.items() for kind, cls in sorted(kinds.items())}

    def agree(self, name: str, digests: Mapping[str, str], effect: str) -> None:
        """Raise WrongEnvironment unless the other side declares the same kinds and effect."""
        differing = sorted(key for key in {*self.digests, *digests} if self.digests.get(key) != digests.get(key))
        if differing:
            where = [f"{key} ({_how(self.digests.get(key), digests.get(key))})" for key in differing[:8]]
            raise WrongEnvironment(
                f"the server has {name[:80]!r}, which differs from {self.name} here in {', '.join(where)}: run the "
                "same version of the steps on both sides"
            )
        if effect != self.effect:
            raise WrongEnvironment(
                f"on the server the effect of {name[:80]!r} is {effect[:40]!r}; here it is {self.effect!r}. Both must "
                "be equal, because the effect decides which records are durable on disk before an action"
            )

    def action(self, kind: str, content: Mapping[str, JsonValue], files: Mapping[str, object] | None = None) -> Action:
        """Return the action in a message. Raises BadAnswer if the kind is not declared or the content is invalid.

        `files` has the pictures in the content, as returned by `Item.received`. For a step of a tape, it is RECORDED.
        """
        return _read(self.actions, "action", kind, content, files)

    def observation(
        self, kind: str, content: Mapping[str, JsonValue], files: Mapping[str, object] | None = None
    ) -> Observation:
        """Return the observation in a message, in the same way as `action`."""
        return _read(self.observations, "observation", kind, content, files)

    def holds(self, step: Step) -> bool:
        """Return whether the exact class of `step` is declared. A subclass doesn't count, because the other side would
        read the step as one of the base class."""
        return type(step) in (self.actions.get(step.kind), self.observations.get(step.kind))


def _read(
    kinds: Mapping[str, type[StepT]],
    role: str,
    kind: str,
    content: Mapping[str, JsonValue],
    files: Mapping[str, object] | None,
) -> StepT:
    cls = kinds.get(kind)
    if cls is None:
        raise BadAnswer(f"the {role} kind {kind[:80]!r} is not declared; declared are {', '.join(sorted(kinds))}")
    try:
        return cls.model_validate(content, context=files)
    except ValidationError as error:
        raise BadAnswer(f"invalid {role} of the kind {kind!r}: {brief(error)}") from error


def brief(error: ValidationError) -> str:
    """Return the most specific part of a validation error, with a bounded length."""
    # The input is left out, because it may be long and the other side controls it. For a union, the error with the
    # longest location belongs to the variant that matched best.
    first = max(
        error.errors(include_url=False, include_input=False, include_context=False), key=lambda one: len(one["loc"])
    )
    place = ".".join(map(str, first["loc"][:6]))
    return f"{place[:100]}: {first['msg'][:200]}" if place else first["msg"][:200]


def _how(here: str | None, there: str | None) -> str:
    return "only there" if here is None else "only here" if there is None else "other fields"


def _environment_class(thing: Any) -> type[AnyEnvironment]:
    if isinstance(thing, Environment):
        return type(thing)
    if isinstance(thing, type) and issubclass(thing, Environment):
        return thing
    found = _returned(thing) if callable(thing) else None
    if isinstance(found, type) and issubclass(found, Environment):
        return found
    raise BadArgument(
        f"{thing!r:.80} doesn't say which environment it makes; annotate its return type, or pass "
        "declared=Declared.of(TheClass)"
    )


def _returned(function: Callable[..., Any]) -> Any:
    try:
        return typing.get_type_hints(function).get("return")
    except (NameError, TypeError):  # an annotation that can't be resolved
        return None


def _type_arguments(env: type[AnyEnvironment]) -> Iterator[Any]:
    """Yield `Guess | Pass` for `Environment[Guess | Pass]`, from the class and its base classes."""
    for cls in env.__mro__:
        for base in vars(cls).get("__orig_bases__", ()):
            origin = typing.get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Environment):
                yield typing.get_args(base)[0]


def _classes(annotation: Any, role: type[Step]) -> Iterator[type[Step]]:
    """Yield the classes with that role in an annotation. `str` stands for `Text`."""
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
    """Return a JSON Schema without titles and descriptions, because changes to them don't change the messages."""
    if isinstance(schema, dict):
        return {
            key: _fields(value)
            for key, value in schema.items()
            if key not in ("title", "description") or not isinstance(value, str)
        }
    return [_fields(item) for item in schema] if isinstance(schema, list) else schema
