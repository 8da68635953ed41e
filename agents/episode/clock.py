"""The clock, random numbers and ids that an agent gets from its `LLM`. A replay gives the same values again.

All of them are derived from the tape: from the times of its records and the seed in its `begin`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from uuid import UUID

from ...tapes import Tape
from ...tapes.messages import ENV
from .recorder import Recorder
from .seeds import derive_seed


class Clock:
    """Time and randomness of one episode, derived from its tape."""

    def __init__(self, recorder: Recorder, seed: int) -> None:
        self._recorder = recorder
        self._seed = seed
        self._random: dict[tuple[str, int], Random] = {}

    def now(self, tape: Tape) -> datetime:
        """Return the time (UTC) of the newest record that this agent knows: an observation, or its own step or call.

        Between two records the time doesn't change. It never comes from the machine's clock, which a replay couldn't
        repeat.
        """
        path, log = tape.scope, self._recorder.log
        entry = next((entry for entry in reversed(log.entries) if entry.by in (ENV, path)), None)
        call = next((call for _, call in reversed(log.call_order) if call.by == path), None)
        at = max([log.begin.at, *(found.at for found in (entry, call) if found is not None)])
        return datetime.fromtimestamp(at, UTC)

    def random(self, tape: Tape) -> Random:
        """Return this agent's random generator for the current turn. Within a turn, all calls return the same one.

        Each turn has a new generator, so that a fork or a replay that begins at a later turn draws the same numbers.
        The generator is seeded with the episode's sampling seed, so the attempts in a group draw different numbers.
        """
        key = (tape.scope, self._recorder.log.turn)
        if key not in self._random:
            self._random = {known: rng for known, rng in self._random.items() if known[1] == key[1]}
            self._random[key] = Random(derive_seed(self._seed, *key, "random"))
        return self._random[key]

    def uuid(self, tape: Tape) -> UUID:
        """Return a new id (version 4), drawn from `random`."""
        return UUID(int=self.random(tape).getrandbits(128), version=4)
