"""The map of one tape: where each record is on the disk, and which items, turns and steps the records form.

The map is made in one pass and keeps no content, only tens of bytes per record. A fork's map begins with the prefix
that the fork inherited. The map of a running tape grows, and `extend` reads only new records.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ..errors import NotATape
from ..messages import ENV
from ..records import IN_TAPE, Begin
from ..schema import parse_record
from ..store.index import Place
from ..store.segment import BadLine
from ..store.store import Store
from ..store.summary import StepFacts, call_id, read_reward, read_step


class TapeMap:
    """The map of one tape. `items` are the rows of a transcript: all records except rewards before the tape's end."""

    def __init__(self, store: Store, tape: str) -> None:
        self.tape = tape
        self._store = store
        self.places: list[Place] = []
        """Places of all records, in this order: the inherited prefix, the tape itself, the layers after its end."""
        self.items = array("I")
        """The record of each item."""
        self.steps = array("i")
        """For each record, the index of its step, or -1 if the record is not a step."""
        self.turns = array("I")
        """The first item of each turn."""
        self.turn_of_item = array("I")
        self.actions = array("i")
        """For each turn, the record of its action, or -1 if the action hasn't been recorded yet."""
        self.calls: dict[str, int] = {}
        """The record of each call, by its id."""
        self.step_items = array("I")
        """The item of each step."""
        self.rewards: dict[int, list[tuple[str, float, float]]] = {}
        """The (component, value, weight) tuples of each step, as recorded before the tape's end."""
        self.episode: list[tuple[str, float, float]] = []
        """Components that the episode earned as a whole."""
        self.inherited = 0
        """Number of records at the beginning of `places` that belong to ancestors."""
        self.holes: list[str] = []
        """Descriptions of the missing parts of the tape, one sentence each."""
        self.begin_record = -1
        self.end_record = -1
        self._in_turn = False
        self._prefix()
        self.inherited = len(self.places)
        self.extend()

    def _prefix(self) -> None:
        """Add the records that the tape inherited from its ancestors, oldest ancestor first."""
        line: list[list[Place]] = []
        tape, seen = self.tape, {self.tape}
        while (above := self._parent(tape)) is not None:
            name, records = above
            if name in seen or name not in self._store.index.ids(name):
                self.holes.append(
                    f"the first steps belong to tape {name}, which is not in this run, so they are missing here"
                )
                break
            seen.add(name)
            line.append([place for place in self._store.index.places(name) if place.t in IN_TAPE][:records])
            tape = name
        for places in reversed(line):
            self._add(places)

    def _parent(self, tape: str) -> tuple[str, int] | None:
        found = self._store.index.places(tape, limit=1)
        for place, body in zip(found, self._store.bodies(found), strict=True):
            if place.t == "begin":
                try:
                    record = parse_record(body)
                except ValueError:
                    return None  # the transcript shows the record as a hole
                if isinstance(record, Begin) and record.parent is not None:
                    return record.parent.tape, record.parent.records
        return None

    def extend(self) -> bool:
        """Add the records that were written since the last call. Return True if there were any."""
        have = len(self.places) - self.inherited
        fresh = self._store.index.places(self.tape, offset=have)
        if not fresh and not have:
            raise NotATape(f"no record of tape {self.tape} is in this run")
        self._add(fresh)
        return bool(fresh)

    def _add(self, places: Sequence[Place]) -> None:
        for place, body in zip(places, self._store.bodies(places), strict=True):
            self._take(len(self.places), place, body)
            self.places.append(place)

    def _take(self, record: int, place: Place, body: bytes) -> None:
        step = -1
        closed = self.end_record >= 0
        if place.t == "step" and not closed:
            step = self._step(record, body)
        elif place.t == "call":
            self.calls[call_id(body)] = record
            self._speak()
            self._item(record)
        elif place.t == "reward" and not closed:
            self._reward(record, body)
        else:
            if place.t == "begin":
                self.begin_record = record
            elif place.t == "end":
                self.end_record = record
            self._item(record)
        self.steps.append(step)

    def _step(self, record: int, body: bytes) -> int:
        try:
            facts = read_step(body)
        except BadLine:
            facts = StepFacts("", "", "", body)  # an unreadable record stays an item, which is shown as a hole
        own = facts.by != ENV
        if own:
            self._speak()
        step = len(self.step_items)
        self.step_items.append(len(self.items))
        self._item(record)
        if own and facts.role == "action":
            self._in_turn = False
            self.actions[-1] = record
        return step

    def _speak(self) -> None:
        # A turn begins with the agent's first record (call, thought or action) after an observation or an action.
        if not self._in_turn:
            self._in_turn = True
            self.turns.append(len(self.items))
            self.actions.append(-1)

    def _item(self, record: int) -> None:
        self.turn_of_item.append(max(len(self.turns) - 1, 0))
        self.items.append(record)

    def _reward(self, record: int, body: bytes) -> None:
        try:
            reward = read_reward(body)
        except (TypeError, ValueError, LookupError):
            self._item(record)  # shown as a hole
            return
        earned = reward.name, reward.value, reward.weight
        if isinstance(reward.step, int) and 0 <= reward.step < len(self.step_items):
            self.rewards.setdefault(reward.step, []).append(earned)
        else:
            self.episode.append(earned)

    def step_after(self, record: int) -> int:
        """Return the record of the step that follows the step in `record`, or -1 if there is none."""
        step = self.steps[record] + 1 if record >= 0 else len(self.step_items)
        return self.items[self.step_items[step]] if step < len(self.step_items) else -1

    def turn_reward(self, turn: int) -> float | None:
        """Return the reward of the turn's action, without metrics, or None if the action has no reward."""
        record = self.actions[turn]
        earned = [w * v for _, v, w in self.rewards.get(self.steps[record], ()) if w] if record >= 0 else []
        return sum(earned) if earned else None
