"""Any order of begin, step, cancel, end, fork, layer, sync, crash and recover, against a model in memory."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from tapereel.tapes import Status, Tape
from tapereel.tapes.records import Parent
from tapereel.tapes.store import Store, verify

from .crash import RUN
from .lab import Clock, Lab
from .simdisk import SimDisk

lab = Lab()


class StoreMachine(RuleBasedStateMachine):
    """The model knows every body in the order in which it was appended, and how many of them are acknowledged."""

    tapes = Bundle("tapes")

    @initialize()
    def start(self) -> None:
        self.disk = SimDisk()
        self.clock = Clock()
        self.numbers = itertools.count()
        self.appended: list[tuple[str, bytes]] = []
        """(tape, body) since the last recovery."""
        self.acknowledged = 0
        self.kept: list[tuple[str, bytes]] = []
        """What earlier recoveries found: it stays for ever."""
        self.store: Any = Store.create(
            RUN, disk=self.disk, cache=False, thread=False, clock=self.clock, rotate_bytes=2500
        )

    def bodies(self, tape: str) -> list[bytes]:
        return [body for name, body in [*self.kept, *self.appended] if name == tape]

    def is_open(self, tape: str) -> bool:
        found = self.bodies(tape)
        return bool(found) and not any(body.startswith(b'{"t":"end"') for body in found)

    def write(self, tape: str, body: bytes) -> None:
        self.store.writer.append(body)
        self.appended.append((tape, body))

    @rule(target=tapes)
    def begin(self) -> str:
        tape = f"t{next(self.numbers)}"
        self.write(tape, lab.begin(tape))
        return tape

    @rule(tape=tapes, action=st.booleans())
    def step(self, tape: str, action: bool) -> None:
        if self.is_open(tape):
            self.write(tape, lab.step(tape, f"{next(self.numbers)}", action=action))

    @rule(tape=tapes, status=st.sampled_from(["finished", "cancelled", "truncated"]))
    def end(self, tape: str, status: str) -> None:
        if self.is_open(tape):
            self.write(tape, lab.end(tape, status))

    @rule(tape=tapes)
    def layer(self, tape: str) -> None:
        if self.bodies(tape) and not self.is_open(tape):
            self.write(tape, lab.reward(tape, 0.5, layer=f"look {next(self.numbers)}"))

    @rule(target=tapes, tape=tapes)
    def fork(self, tape: str) -> str:
        child = f"t{next(self.numbers)}"
        if not self.bodies(tape):
            return child  # it was lost in a crash, its name was never told to anybody
        self.sync()
        parent: Tape = self.store.tape(tape)
        turns = parent.turns
        cut = parent.at_turn(turns)
        above = Parent(tape=tape, digest=cut.digest, records=len(cut.bodies), turn=turns)
        self.write(child, lab.begin(child, parent=above))
        return child

    @rule()
    def sync(self) -> None:
        self.store.writer.sync()
        self.acknowledged = len(self.appended)

    @rule()
    def write_without_sync(self) -> None:
        self.store.writer.commit(sync=False)

    @rule()
    def close_and_open(self) -> None:
        self.store.close()
        self.acknowledged = len(self.appended)
        self.reopen(self.disk)

    @rule(data=st.data(), power=st.booleans())
    @precondition(lambda self: self.appended)
    def crash(self, data: st.DataObject, power: bool) -> None:
        if power:
            images = list(self.disk.crash_images(b'{"n":3,"c":3,"p":"old', thorough=True))
            self.reopen(SimDisk(images[data.draw(st.integers(0, len(images) - 1))], seed=next(self.numbers)))
        else:
            self.reopen(self.disk.after_death())

    def reopen(self, disk: SimDisk) -> None:
        """Recover, compare with the model, and let the model know what is left."""
        self.disk = disk
        report = verify(RUN, disk=disk)
        assert not report.broken, report.broken
        open_before = {tape for tape, _ in [*self.kept, *self.appended] if self.is_open(tape)}
        self.store = Store.open(
            RUN, write=True, disk=disk, cache=False, thread=False, clock=self.clock, rotate_bytes=2500
        )
        found = [(stored.tape, stored.body) for stored in self.store.records() if stored.tape is not None]
        old = len(self.kept)
        assert found[:old] == self.kept
        ended = [entry for entry in found if b'"status":"crashed"' in entry[1] and entry not in self.kept]
        new = [entry for entry in found[old:] if entry not in ended]
        assert new == self.appended[: len(new)], "what came back is no prefix of what was written"
        assert len(new) >= self.acknowledged, "acknowledged records are lost"
        self.kept, self.appended, self.acknowledged = self.kept + new, [], 0
        crashed = set(self.store.recovered.crashed)
        assert crashed == {tape for tape, _ in ended}
        assert crashed <= open_before | {tape for tape, _ in new}
        self.kept = found
        assert not any(self.is_open(tape) for tape, _ in found)

    @invariant()
    def reads_are_right(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.writer.commit(sync=False)
        for summary in self.store.summaries():
            bodies = self.bodies(summary.id)
            within = [body for body in bodies if not body.startswith(b'{"t":"reward"')]
            tape = self.store.tape(summary.id)
            assert tape.bodies == within
            assert len(tape.layers) == len(bodies) - len(within)
            assert (summary.status is None) == self.is_open(summary.id)
            assert summary.status != Status.ERROR
        assert len(self.store.summaries()) == len({tape for tape, _ in [*self.kept, *self.appended]})
        assert self.store.books().closes, self.store.books().findings


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=80, stateful_step_count=25)
