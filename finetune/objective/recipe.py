"""The class `Recipe`: an immutable model with the eleven terms of an objective and their constants."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeGuard, get_args

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo

from ...tapes.errors import UsageError
from .adjust import AnyAdjust
from .anchor import Anchor
from .baseline import AnyBaseline, GroupBaseline
from .credit import AnyCredit, TimeCredit
from .regulariser import KL, AnyRegulariser, Balance, Demonstrations, Regulariser
from .reward import Reward
from .select import Select
from .shape import AnyShape, EpisodeKL, RewardKL, Running, TokenKL
from .surrogate import PPO, AnySurrogate, NoSurrogate
from .term import Kinds, Term, class_name, kind_of
from .weigh import Weigh


class Score(Term):
    """How the log-prob of each token is computed, and whether its entropy is computed too.

    A log-prob is log softmax(logits / T). For a policy gradient, T is the temperature at which the token was sampled,
    so that the log-prob belongs to the distribution of the sampler. Maximum likelihood fits the model's distribution at
    T = 1.
    """

    temperature: Literal["recorded", "one"] = "recorded"
    """With `recorded`, T is the temperature at which each token was sampled. With `one`, T is 1."""
    head: Literal["weights", "float32"] = "weights"
    """Dtype of the output layer's matrix product: its weights' dtype (`weights`), or at least float32 (`float32`). The
    sampling engine must use the same dtype, or the log-probs of sampler and trainer differ by rounding."""
    entropy: bool = False
    """Whether to report the exact entropy of every token. If a regulariser needs the entropy, it is always reported."""


class Recipe(Term):
    """The eleven terms of an objective, which together define how rewards become gradients."""

    name: str
    score: Score = Score()
    reward: Reward = Reward()
    shape: tuple[AnyShape, ...] = ()
    baseline: AnyBaseline = GroupBaseline()
    credit: AnyCredit = TimeCredit()
    adjust: tuple[AnyAdjust, ...] = ()
    anchor: Anchor = Anchor()
    surrogate: AnySurrogate = PPO()
    regulariser: tuple[AnyRegulariser, ...] = ()
    select: Select = Select()
    weigh: Weigh = Weigh()
    both_kls: bool = False
    """Whether a recipe may have a KL in the reward and another in the loss. By default, this is an error, because most
    recipes intend only one of them."""

    @model_validator(mode="after")
    def _has_no_subclass_of_a_closed_term(self) -> Recipe:
        # Some fields accept only the package's own class. A subclass would be serialised as this class, so the run
        # would record the wrong class.
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Term) and not _is_open(info) and type(value) is not info.annotation:
                raise ValueError(
                    f"{name} is {class_name(type(value))}, and {name} can't be a class of your own: derive a "
                    "Shape, Baseline, Credit, Adjust, Surrogate or Regulariser"
                )
        return self

    @model_validator(mode="after")
    def _agrees(self) -> Recipe:
        priced = [term.kind for term in self.shape if isinstance(term, TokenKL | EpisodeKL) and term.beta > 0]
        paid = any(isinstance(term, KL) and term.needs_reference for term in self.regulariser)
        if priced and paid and not self.both_kls:
            raise ValueError(
                f"recipe {self.name!r} has a KL in the reward ({priced[0]}) and a KL in the loss: remove "
                "one of them, or set both_kls=True to have both"
            )
        if self.token_penalty is not None and not self.credit.takes_penalty:
            raise ValueError(
                f"recipe {self.name!r}: token_kl adds a reward to each token, and credit "
                f"{kind_of(self.credit)!r} has no time steps to carry it: use credit 'returns' or "
                "'gae', or shape 'episode_kl'"
            )
        if len([term for term in self.shape if isinstance(term, TokenKL)]) > 1:
            raise ValueError(f"recipe {self.name!r} has two token_kl shapes: give one with the sum of the betas")
        if len([term for term in self.shape if isinstance(term, Running)]) > 1:
            raise ValueError(
                f"recipe {self.name!r} has two running shapes, and a run has one memory of its rewards: give one"
            )
        return self

    @property
    def token_penalty(self) -> TokenKL | None:
        """The shape that adds a KL penalty to the reward of each token, or None if the recipe has none."""
        return next((term for term in self.shape if isinstance(term, TokenKL) and term.beta > 0), None)

    @property
    def coefficients(self) -> tuple[Regulariser | RewardKL, ...]:
        """The terms whose current coefficients the trainer stores: all regularisers, then all adaptive KLs in the
        reward."""
        return (*self.regulariser, *(term for term in self.shape if _is_adaptive(term)))

    def at(self, betas: Sequence[float]) -> Recipe:
        """Return a copy in which each adaptive KL in the reward has its current coefficient. `betas` are the current
        coefficients of all terms in `coefficients`, in this order."""
        present = iter(betas[len(self.regulariser) :])
        shape = (term.model_copy(update={"beta": next(present)}) if _is_adaptive(term) else term for term in self.shape)
        return self.model_copy(update={"shape": tuple(shape)})

    @property
    def needs_reference(self) -> bool:
        """True if a term reads a reference model's log-probs."""
        return any(term.needs_reference for term in (*self.shape, *self.regulariser)) or self.surrogate.needs_reference

    @property
    def bootstraps(self) -> bool:
        """True if the return of an episode that was cut off continues with a critic's value of its last state.

        This requires rewards per turn. If an episode has its whole reward at the end, this value also predicts reward
        that was earned before the cut, and it would count twice.
        """
        return self.credit.bootstraps and self.reward.of_turns

    @property
    def needs_teacher(self) -> bool:
        """True if a term reads a teacher's log-probs."""
        return any(term.needs_teacher for term in self.regulariser)

    @property
    def needs_entropy(self) -> bool:
        """True if the trainer computes the entropy of each token together with its log-prob."""
        return self.score.entropy or any(term.needs_entropy for term in self.regulariser)

    @property
    def needs_value(self) -> bool:
        """True if a term reads a critic's values."""
        return self.credit.needs_value

    @property
    def imitates(self) -> bool:
        """True if an update also trains on demonstrations."""
        return self.imitation > 0

    @property
    def imitation(self) -> float:
        """Coefficient of the demonstrations' cross-entropy. 0 turns training on demonstrations off."""
        return sum(term.coefficient for term in self.regulariser if isinstance(term, Demonstrations))

    @property
    def balance(self) -> float:
        """Coefficient of the load-balancing loss for a mixture of experts. If it is 0, this loss isn't computed."""
        return sum(term.coefficient for term in self.regulariser if isinstance(term, Balance))

    def unfit(self, tokens: int) -> list[str]:
        """Return warnings about terms whose constants don't fit episodes of at most `tokens` own tokens
        (`Term.out_of_reach`)."""
        fields = (getattr(self, name) for name in type(self).model_fields)
        terms = [term for field in fields for term in (field if isinstance(field, tuple) else (field,))]
        return [why for term in terms if isinstance(term, Term) and (why := term.out_of_reach(tokens)) is not None]

    def fitted(self, tokens: int, keep: Collection[str] = ()) -> Recipe:
        """Return a copy whose length limits are `tokens`, the largest number of own tokens of an episode, except in the
        fields in `keep`."""
        shape = self.shape if "shape" in keep else tuple(term.fitted(tokens) for term in self.shape)
        weigh = self.weigh if "weigh" in keep else self.weigh.fitted(tokens)
        return self.model_copy(update={"shape": shape, "weigh": weigh})

    @property
    def local(self) -> bool:
        """True if the loss of a token doesn't depend on other tokens. Micro-batches are then independent."""
        return self.surrogate.local and self.anchor.local

    @property
    def idle_at_zero(self) -> bool:
        """True if a token with advantage 0 has loss and gradient exactly 0, so that the trainer may skip it."""
        others = any(term.active and term.per_token for term in self.regulariser)
        return self.surrogate.zero_at_zero and self.local and not others

    @property
    def idle(self) -> bool:
        """True if no token of the rollout batch has a gradient, because the recipe has neither a surrogate nor an
        active regulariser. Demonstrations don't count."""
        others = [term for term in self.regulariser if not isinstance(term, Demonstrations)]
        return isinstance(self.surrogate, NoSurrogate) and not any(term.active for term in others)

    def stands_still(self, *, own_reference: bool) -> bool:
        """Return True if the gradient is always 0, because the loss only holds the policy where it already is.

        This is so if all losses are KLs to the sampler. If `own_reference` is True, the reference is the policy at the
        start of the phase, so KLs to the reference count too.
        """
        terms = [term for term in self.regulariser if term.active]
        near = {"sampler", "reference"} if own_reference else {"sampler"}
        still = all(isinstance(term, KL) and term.to in near for term in terms)
        return isinstance(self.surrogate, NoSurrogate) and bool(terms) and still

    def __str__(self) -> str:
        lines = [f"recipe {self.name}"]
        for field in type(self).model_fields:
            value = getattr(self, field)
            if field in ("name", "both_kls"):
                continue
            shown = "; ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
            lines.append(f"  {field:<12}{shown}")
        return "\n".join(lines)

    def but(self, changes: Mapping[str, object] | None = None, /, **terms: object) -> Recipe:
        """Return a copy with changed terms: `grpo.but(weigh={"kind": "episode"}, baseline={"eps": 1e-4})`.

        A mapping changes only the constants that it names. If its `kind` belongs to another class, all other constants
        get their defaults. A value that isn't a mapping replaces the term. Raises UsageError for an unknown key or an
        invalid value.
        """
        whole: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        for name, value in {**(changes or {}), **terms}.items():
            old = whole.get(name)
            if isinstance(value, Mapping) and isinstance(old, Term):
                constants = self.model_dump(include={name})[name]
                if "kind" in value and _class_of(name, value["kind"]) != _class_of(name, constants.get("kind")):
                    constants = {}
                value = {**constants, **value}
            whole[name] = value
        return read(whole)


def _is_adaptive(term: Term) -> TypeGuard[RewardKL]:
    return isinstance(term, RewardKL) and term.adaptive is not None


def read(data: Mapping[str, object], *, execute: bool = True) -> Recipe:
    """Return the recipe that `data` describes. Raises UsageError if a key or value is invalid. For an unknown key, the
    error suggests the valid keys with similar names.

    If `execute` is False, no module is imported. A user's term can then be used only if its module was already
    imported."""
    try:
        return Recipe.model_validate(_plain(data), context={"execute": execute})
    except ValidationError as error:
        raise UsageError("; ".join(_sentence(e) for e in error.errors())) from None


def _plain(value: Any) -> Any:
    """Convert mappings to dicts and tuples to lists, recursively. Pydantic accepts only a dict as the fields of a
    model."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _sentence(error: Any) -> str:
    if not error["loc"]:  # contradicting terms: the message names them, so the input (the whole recipe) is omitted
        return error["msg"].removeprefix("Value error, ")
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        valid = [name for name in _keys_beside(error["loc"]) if name != "kind"]
        near = difflib.get_close_matches(str(error["loc"][-1]), valid)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(valid)}" if valid else ""
        return f"unknown key {where!r}{hint}"
    return f"{where}: {error['msg']} (got {error['input']!r})"


def _keys_beside(loc: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are valid in place of the unknown key at `loc`. The list is empty if it isn't clear to which
    term the key belongs."""
    if len(loc) == 1:
        return list(Recipe.model_fields)
    kinds = kinds_of(str(loc[0]))
    # In a field of several kinds, the part of `loc` before the key is the kind.
    found = kinds if len(kinds) == 1 else [cls for cls in kinds if cls.model_fields["kind"].default == loc[-2]]
    return list(found[0].model_fields) if len(found) == 1 else []


def _class_of(field: str, kind: object) -> object:
    """Return the package's class with this `kind` in a field of a recipe. A user's kind (`module:name`) is returned
    unchanged."""
    named = ((cls, cls.model_fields["kind"]) for cls in kinds_of(field) if "kind" in cls.model_fields)
    return next((cls for cls, info in named if kind in get_args(info.annotation)), kind)


def _is_open(info: FieldInfo) -> bool:
    """Return True if a field of a recipe accepts classes that a user wrote."""
    return any(isinstance(note, Kinds) for note in info.metadata)


def kinds_of(field: str) -> tuple[type[Term], ...]:
    """Return the package's term classes for one field of a recipe. The result is empty for a field that holds no
    term."""
    info = Recipe.model_fields[field]
    listed = get_args(info.annotation)  # for a tuple: (Annotated[Shape, Kinds(...)], ...)
    notes = get_args(listed[0])[1:] if listed and get_args(listed[0]) else info.metadata
    found = next((note.kinds for note in notes if isinstance(note, Kinds)), ())
    if not found and isinstance(info.annotation, type) and issubclass(info.annotation, Term):
        return (info.annotation,)
    return found
