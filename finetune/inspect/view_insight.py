"""Facts about training that the viewer shows: advantages, rows, verdicts, the text of tokens, and probability ratios.

`TrainingInsight` implements the protocol `Insight` in `tapes/view`. It uses `Explainer` and `Policies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ...tapes.store.store import Store
from ..data.rows import rows
from .explainer import Explainer, token_reader
from .requery import Policies, Policy

LONGEST = 20_000
"""Largest number of records in a tape that is explained. An explanation of a longer tape would take too long."""


class TrainingInsight:
    """Facts about the training in one run. The tokenizer is loaded when the object is made."""

    def __init__(self, store: Store, weights: str | None = None, tokenizer: str | None = None) -> None:
        """`weights` is a checkpoint or model folder, whose probabilities of the tokens are compared with the
        probabilities at sampling. `tokenizer` is a folder, or None for the run's own tokenizer."""
        self._store = store
        self._policies = Policies(store.path, (), only=weights) if weights is not None else None
        newest = store.index.tapes("status is not null")[-1:]
        self._decode, self._renderer = token_reader(store.path, tokenizer, [store.tape(row.id) for row in newest])
        self._explainer = Explainer(store, self._decode, self._renderer)

    @property
    def decode(self) -> Callable[[int], str] | None:
        """A function that returns the text of a token id. None without a tokenizer."""
        return self._decode

    def forget(self) -> None:
        """Forget the updates that were read from the run. This is called after training has added updates."""
        self._explainer = Explainer(self._store, self._decode, self._renderer)

    def explain(self, tape: str) -> dict[str, object]:
        """Return how the tape was used in training, with an advantage for each completion token that has one."""
        records = len(self._store.index.places(tape))
        if records > LONGEST:
            return {
                "missing": f"the tape has {records:,} records; only tapes of up to {LONGEST:,} records are explained"
            }
        found = self._explainer.explain(tape)
        return {
            "verdict": found.verdict,
            "notes": list(found.notes),
            "advantages": _by_call(
                (token.call, token.offset, token.advantage)
                for row in found.rows
                for token in row.tokens
                if token.call is not None and token.offset is not None and token.advantage is not None
            ),
            "rows": [
                {
                    "begins": row.begins,
                    "split": row.split,
                    "repeated": row.repeated,
                    "own": row.own,
                    "tokens": len(row.tokens),
                }
                for row in found.rows
            ],
            **self._ratios(tape),
        }

    def _ratios(self, tape: str) -> dict[str, object]:
        """Return exp(log-prob under `weights` - log-prob at sampling) for each sampled token, by call."""
        policy = self._policies.of("") if self._policies is not None else None
        if self._policies is None or not isinstance(policy, Policy):
            return {}
        found = rows(self._store.tape(tape, refresh=False), renderer=self._renderer)
        ratios: list[tuple[str, int, float | None]] = []
        for row in found:
            precision = self._policies.precision(row.versions[-1] if row.versions else "")
            now = self._policies.logprobs(policy, [row], precision)
            for call, offset, ratio in zip(row.call, row.offset, np.exp(now - row.old).tolist(), strict=True):
                ratios.append((row.calls[call], int(offset), ratio if np.isfinite(ratio) else None))
        return {"ratios": _by_call(ratios), "weights": policy.name}


def _by_call(values: Iterable[tuple[str, int, float | None]]) -> dict[str, list[float | None]]:
    """Group triples (call, index, value) by call. The list of a call has each value at its index, and None at other
    indices."""
    known: dict[str, list[float | None]] = {}
    for call, at, value in values:
        column = known.setdefault(call, [])
        column += [None] * (at + 1 - len(column))
        column[at] = value
    return known
