"""score: what is asked of the model for each own token. The bridge itself is `finetune.score`.

A log-prob is log softmax(logits / T) with the temperature T that the token was sampled at.
"""

from __future__ import annotations

from .word import Word


class Score(Word):
    """What is computed beside the log-probs."""

    entropy: bool = False
    """True: the exact entropy of every token is reported (a regulariser that needs it has it in any case)."""
