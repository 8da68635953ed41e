"""How a completion was drawn: what an engine is asked for, and what a call has on record. Knows no engine."""

from __future__ import annotations

from pydantic import Field, JsonValue

from .value import Value


class Sampling(Value):
    """How a completion was drawn. `old` log-probs are log softmax(logits / temperature) of the sampled id."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """0 is greedy: never RL data; its recorded log-probs are those at temperature 1."""
    max_tokens: int = Field(default=512, ge=1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0: no limit."""
    extra: dict[str, JsonValue] = Field(default={})
    """Anything else the engine was asked for (penalties, grammars); makes a call unfit for RL, but for `stop`, the
    texts that end an answer, which change no token's chance."""
    first_temperature: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of the first token (FIRE: 10 is usual), whose log-prob is then the one at this temperature. None: as the rest."""

    @property
    def exact(self) -> bool:
        """True when the recorded log-probs are those of the distribution that was sampled from."""
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == 0 and not set(self.extra) - {"stop"}

    def temperature_at(self, position: int) -> float:
        """Of the token at that position of the completion."""
        return self.first_temperature if position == 0 and self.first_temperature is not None else self.temperature
