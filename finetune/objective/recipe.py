"""A recipe: the eleven terms of an objective, each with its constants, as one frozen value that prints itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from pydantic import ValidationError, model_validator

from ...tapes.errors import UsageError
from .adjust import Adjust
from .anchor import Anchor
from .baseline import Baseline
from .credit import Credit
from .regulariser import KL, Demonstrations, Entropy, Regulariser
from .reward import Reward
from .select import Select
from .shape import EpisodeKL, Running, Shape, TokenKL
from .surrogate import PPO, MinorNLL, Surrogate
from .term import Term
from .weigh import Weigh


class BadRecipe(UsageError):
    """An unknown recipe, an unknown key, or terms that contradict each other."""


class NoSuchRecipe(BadRecipe):
    """A name that no recipe has; says which there are."""


class Score(Term):
    """Which log-probs are computed for each own token, and what is computed with them.

    A log-prob is log softmax(logits / T). For a policy gradient T is the temperature that the token was sampled at,
    since the scored distribution must be the sampled one; maximum likelihood takes the model itself, T = 1.
    """

    temperature: Literal["recorded", "one"] = "recorded"
    """Of the log-probs: that of each token's sampling, or 1."""
    head: Literal["weights", "float32"] = "weights"
    """The dtype in which the output layer multiplies: that of its weights, or float32 where those are narrower. The
    engine that samples must do likewise, or sampler and trainer differ by its rounding."""
    entropy: bool = False
    """True: the exact entropy of every token is reported (a regulariser that needs it has it in any case)."""


class Recipe(Term):
    """How rewards become gradients. Terms apply in the order of the fields."""

    name: str
    score: Score = Score()
    reward: Reward = Reward()
    shape: tuple[Shape, ...] = ()
    baseline: Baseline = Baseline()
    credit: Credit = Credit()
    adjust: tuple[Adjust, ...] = ()
    anchor: Anchor = Anchor()
    surrogate: Surrogate = PPO()
    regulariser: tuple[Regulariser, ...] = ()
    select: Select = Select()
    weigh: Weigh = Weigh()
    both_kls: bool = False
    """True allows a KL price in the reward and a KL loss at once: different terms, and both is rarely meant."""

    @model_validator(mode="after")
    def _agrees(self) -> Recipe:
        priced = [term.kind for term in self.shape if isinstance(term, TokenKL | EpisodeKL) and term.beta > 0]
        paid = any(isinstance(term, KL) and term.needs_reference for term in self.regulariser)
        if priced and paid and not self.both_kls:
            raise ValueError(
                f"recipe {self.name!r} has a KL in the reward ({priced[0]}) and a KL in the loss: take "
                "one out, or set both_kls=True to mean both"
            )
        if self.token_price is not None and self.credit.kind == "broadcast":
            raise ValueError(
                f"recipe {self.name!r}: token_kl prices each token, credit 'broadcast' has no time to "
                "carry it along: use credit 'returns' or 'gae', or shape 'episode_kl'"
            )
        if len([term for term in self.shape if isinstance(term, TokenKL)]) > 1:
            raise ValueError(f"recipe {self.name!r} has two token_kl shapes: give one with the sum of the betas")
        if len([term for term in self.shape if isinstance(term, Running)]) > 1:
            raise ValueError(
                f"recipe {self.name!r} has two running shapes, and a run has one memory of its rewards: give one"
            )
        return self

    @property
    def token_price(self) -> TokenKL | None:
        """The KL price per token, if there is one."""
        return next((term for term in self.shape if isinstance(term, TokenKL) and term.beta > 0), None)

    @property
    def needs_reference(self) -> bool:
        """True when a reference model's log-probs are used."""
        return (
            any(isinstance(term, TokenKL | EpisodeKL) and term.beta > 0 for term in self.shape)
            or any(term.needs_reference for term in self.regulariser)
            or isinstance(self.surrogate, MinorNLL)
        )

    @property
    def needs_entropy(self) -> bool:
        """True when the entropy is computed along with the log-probs that are trained."""
        return self.score.entropy or any(term.kind == "entropy" and term.active for term in self.regulariser)

    @property
    def needs_value(self) -> bool:
        """True when a critic's values are used."""
        return self.credit.kind == "gae"

    @property
    def imitates(self) -> bool:
        """True when demonstrations are trained on beside the batch."""
        return any(isinstance(term, Demonstrations) and term.active for term in self.regulariser)

    @property
    def local(self) -> bool:
        """True when a token's loss needs nothing of other tokens, so that micro-batches are independent."""
        return self.surrogate.local and self.anchor.local

    @property
    def idle_at_zero(self) -> bool:
        """True when a token with advantage 0 has loss and gradient exactly 0."""
        others = any(term.active for term in self.regulariser if isinstance(term, KL | Entropy))
        return self.surrogate.advantages and self.local and not others

    @property
    def idle(self) -> bool:
        """True when none of the batch's tokens has a gradient: no surrogate, and no active regulariser of theirs."""
        others = [term for term in self.regulariser if not isinstance(term, Demonstrations)]
        return self.surrogate.kind == "none" and not any(term.active for term in others)

    def __str__(self) -> str:
        lines = [f"recipe {self.name}"]
        for field in type(self).model_fields:
            value = getattr(self, field)
            if field in ("name", "both_kls"):
                continue
            shown = "; ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
            lines.append(f"  {field:<12}{shown}")
        return "\n".join(lines)

    def but(self, changes: Mapping[str, Any] | None = None, /, **terms: Any) -> Recipe:
        """A copy with some terms changed: `grpo.but(weigh={"kind": "episode"}, baseline={"eps": 1e-4})`.

        A mapping changes the named constants of a term; a surrogate of another `kind` starts from its own defaults.
        Anything else replaces the term.
        """
        whole = self.model_dump()
        for name, value in {**(changes or {}), **terms}.items():
            old = whole.get(name)
            if isinstance(value, Mapping) and isinstance(old, dict):
                other = name in _UNIONS and value.get("kind", old["kind"]) != old["kind"]
                value = dict(value) if other else {**old, **value}
            whole[name] = value.model_dump() if isinstance(value, Term) else value
        return read(whole)


_UNIONS = frozenset({"surrogate"})
"""Terms whose kinds have constants of their own: another kind starts from its own defaults."""


def read(data: Mapping[str, Any]) -> Recipe:
    """The recipe that `data` spells out; a BadRecipe names the wrong key and its nearest neighbours."""
    try:
        return Recipe.model_validate(_plain(data))
    except ValidationError as error:
        raise BadRecipe("; ".join(_sentence(e) for e in error.errors())) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Term):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _sentence(error: Any) -> str:
    where = ".".join(map(str, error["loc"])) or "recipe"
    if error["type"] == "extra_forbidden":
        valid = [name for name in _keys_beside(error["loc"]) if name != "kind"]
        near = difflib.get_close_matches(str(error["loc"][-1]), valid)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(valid)}" if valid else ""
        return f"unknown key {where!r}{hint}"
    return f"{where}: {error['msg']} (got {error['input']!r})"


def _keys_beside(loc: tuple[int | str, ...]) -> list[str]:
    """The keys that the term at `loc`, without its last part, does have; empty where they can't be told."""
    if len(loc) == 1:
        return list(Recipe.model_fields)
    terms = list(_terms_in(Recipe.model_fields[str(loc[0])].annotation))
    kinds = terms if len(terms) == 1 else [t for t in terms if loc[-2] in get_args(t.model_fields["kind"].annotation)]
    return list(kinds[0].model_fields) if len(kinds) == 1 else []


def _terms_in(annotation: Any) -> Iterator[type[Term]]:
    if isinstance(annotation, type) and issubclass(annotation, Term):
        yield annotation
    for part in get_args(annotation):
        yield from _terms_in(part)
