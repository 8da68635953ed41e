"""How a completion is sampled: the settings that a run names, an engine carries out and a tape records."""

from __future__ import annotations

from pydantic import Field, JsonValue

from .value import Value


class Sampling(Value):
    """How a completion is sampled. Recorded log-probs are log softmax(logits / temperature) of each sampled id."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """0 is greedy decoding: never RL data, and the recorded log-probs are those at temperature 1."""
    max_tokens: int = Field(default=512, ge=1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0: no limit."""
    extra: dict[str, JsonValue] = Field(default={})
    """Further settings of the engine (penalties, grammars). They make a call unfit for RL, because they change the
    distribution; `stop`, the texts that end an answer, does not."""
    first_temperature: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Temperature of the first token (FIRE: 10 is usual); its log-prob is recorded at this temperature. None: as the
    other tokens."""
    min_tokens: int = Field(default=0, ge=0)
    """The first so many tokens of an answer are no end tokens: their log-probs are those of the distribution over the
    other tokens. A text in `extra.stop` ends an answer all the same."""
    ignore_eos: bool = False
    """End tokens don't end an answer, and each token's distribution stays as it is; `min_tokens` has no effect."""

    @property
    def exact(self) -> bool:
        """True when the recorded log-probs are those of the distribution that was sampled from.

        top_p, top_k and most of `extra` cut or change the distribution after the log-probs were computed: importance
        ratios from such log-probs would be wrong.
        """
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == 0 and not set(self.extra) - {"stop"}

    @property
    def barring(self) -> int:
        """How many of the first tokens can't be end tokens."""
        return 0 if self.ignore_eos else self.min_tokens

    def temperature_at(self, position: int) -> float:
        """Temperature of the token at that position of the completion."""
        return self.first_temperature if position == 0 and self.first_temperature is not None else self.temperature


LATER = {"first_temperature": None, "min_tokens": 0, "ignore_eos": False}
"""Sampling settings that came later, with their defaults. A body leaves out the defaults, so the digests of tapes from
before hold."""
