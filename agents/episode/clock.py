"""What the door gives an agent beside a model's answers: time, randomness and ids, the same in every replay.

All of it follows from what is on the tape anyway: the times of its records and the seed in its `begin`. Knows nothing
of engines.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from random import Random
from uuid import UUID

from ...tapes import Tape
from ...tapes.messages import ENV
from .recorder import Recorder


class Given:
    """The part of the door that asks no model."""

    def __init__(self, recorder: Recorder, seed: int) -> None:
        self._recorder = recorder
        self._seed = seed
        self._random: dict[tuple[str, int], Random] = {}

    def now(self, tape: Tape) -> datetime:
        """The time, in UTC, at which the newest thing was recorded that this agent saw, said or was answered.

        It is that of the observation where a turn begins, and moves on with every answer and step.
        """
        path, log = tape.scope, self._recorder.log
        entry = next((entry for entry in reversed(log.entries) if entry.by in (ENV, path)), None)
        call = next((call for _, call in reversed(log.call_order) if call.by == path), None)
        at = max([log.begin.at, *(found.at for found in (entry, call) if found is not None)])
        return datetime.fromtimestamp(at, UTC)

    def random(self, tape: Tape) -> Random:
        """This agent's randomness: one generator for each of its turns, which goes on where it was left.

        Seeded by the episode's sampling seed, so the attempts of a group draw differently.
        """
        key = (tape.scope, self._recorder.log.turn)
        if key not in self._random:
            self._random = {known: rng for known, rng in self._random.items() if known[1] == key[1]}
            self._random[key] = Random(derive_seed(self._seed, *key, "random"))
        return self._random[key]

    def uuid(self, tape: Tape) -> UUID:
        """A new id, drawn from `random`."""
        return UUID(int=self.random(tape).getrandbits(128), version=4)


def asker(path: str, conversation: str) -> str:
    """Whose questions are counted together: those of one agent in one conversation."""
    return f"{path}#{conversation}" if conversation else path


def derive_seed(seed: int, *parts: str | int) -> int:
    """The first 8 bytes of SHA-256(seed, parts), below 2**63: one stream of randomness for each purpose."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
