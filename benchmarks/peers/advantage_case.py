"""The rows that `advantages.py` measures, as the columns of a dataset. No tapereel here."""

import random

GROUP, TOKENS = 8, 64


def columns(rows: int) -> dict[str, list]:
    """Groups of 8, every token a label, rewards of 0 and 1."""
    rng = random.Random(0)
    rewards = [float(rng.random() < 0.5) for _ in range(rows)]
    per_token = [[r] * TOKENS for r in rewards]
    same = [list(range(TOKENS))] * rows
    return {
        "input_ids": same,
        "labels": same,
        "reward": rewards,
        "rewards": per_token,
        "advantages": [[0.0] * TOKENS] * rows,
        "old_logprobs": [[-1.0] * TOKENS] * rows,
        "ref_logprobs": [[-1.0] * TOKENS] * rows,
        "group_id": [f"g{i // GROUP}" for i in range(rows)],
    }
