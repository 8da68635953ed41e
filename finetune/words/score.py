"""score: what is asked of the model for each own token. The bridge itself is `finetune.score`.

A log-prob is log softmax(logits / T). For a policy gradient T is the temperature that the token was sampled at, since
the scored distribution must be the sampled one; maximum likelihood is of the model itself, T = 1.
"""

from __future__ import annotations

from typing import Literal

from .word import Word


class Score(Word):
    """Which log-probs, and what is computed beside them."""

    temperature: Literal["recorded", "one"] = "recorded"
    """Of the log-probs: that of each token's sampling, or 1."""
    head: Literal["weights", "float32"] = "weights"
    """The dtype in which the output layer multiplies: that of its weights, or float32 where those are narrower. The
    engine that samples must do likewise, or sampler and trainer differ by its rounding."""
    entropy: bool = False
    """True: the exact entropy of every token is reported (a regulariser that needs it has it in any case)."""
