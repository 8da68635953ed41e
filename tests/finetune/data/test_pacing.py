"""Pacing as a state machine: whatever fails, whatever is cancelled or abandoned, something can always happen next."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tapereel.finetune.loop.staleness import Pacer, stale_before


class Pacing(RuleBasedStateMachine):
    """A model with one number per group: the version that was published when it started."""

    @initialize(batch=st.integers(1, 5), concurrent=st.integers(1, 20), lag=st.integers(0, 3), extra=st.integers(0, 6))
    def begin(self, batch: int, concurrent: int, lag: int, extra: int) -> None:
        self.pacer = Pacer(batch, concurrent, lag, extra)
        self.aside = 0
        self.running: list[int] = []
        self.ready: list[int] = []
        self.updating: list[int] = []
        self.version = 0
        self.busy = False

    @rule()
    def start_what_may_start(self) -> None:
        for _ in range(self.pacer.capacity):
            self.pacer.start()
            self.running.append(self.version)
        assert self.pacer.capacity == 0

    @precondition(lambda self: self.pacer.capacity > 0)
    @rule()
    def start_one(self) -> None:
        self.pacer.start()
        self.running.append(self.version)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), usable=st.sampled_from([True, True, False]), aside=st.booleans())
    def close(self, which: int, usable: bool, aside: bool) -> None:
        started = self.running.pop(which % len(self.running))
        self.pacer.close(usable=usable, aside=usable and aside)
        if usable and aside:
            self.aside += 1
        elif usable:
            self.ready.append(started)

    @precondition(lambda self: self.pacer.has_batch)
    @rule()
    def take(self) -> None:
        made_up = min(self.aside, self.pacer.extra)
        n = self.pacer.take()
        assert n <= self.pacer.batch
        assert n + self.aside >= self.pacer.batch + made_up, "an update is short by what was set aside beyond the bound"
        if self.pacer.max_lag == 0:
            assert n + self.aside <= self.pacer.batch + self.pacer.extra, "no more than the bound is made up for"
        self.ready.sort()
        self.updating, self.ready, self.aside = self.ready[:n], self.ready[n:], 0
        self.busy = True

    @precondition(lambda self: self.busy)
    @rule()
    def apply(self) -> None:
        self.pacer.applied()
        self.version += 1
        self.updating, self.busy = [], False

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "pacer"):
            counts = (self.pacer.running, self.pacer.ready, self.pacer.aside, self.pacer.updating)
            assert counts == (len(self.running), len(self.ready), self.aside, self.pacer.batch * self.busy)

    @invariant()
    def bounds_hold(self) -> None:
        if hasattr(self, "pacer"):
            assert len(self.running) <= self.pacer.max_concurrent
            whole = (self.pacer.max_lag + 1) * self.pacer.batch
            assert self.pacer.outstanding <= whole
            assert self.aside <= self.pacer.extra + whole

    @invariant()
    def something_can_happen(self) -> None:
        if hasattr(self, "pacer"):
            assert self.running or self.busy or self.pacer.has_batch or self.pacer.capacity

    @invariant()
    def synchronous_samples_are_of_the_policy_they_train(self) -> None:
        if hasattr(self, "pacer") and self.pacer.max_lag == 0:
            assert set(self.running + self.ready + self.updating) <= {self.version}


TestPacing = Pacing.TestCase
TestPacing.settings = settings(max_examples=80, stateful_step_count=50, derandomize=True)


def test_a_pacer_of_nothing_is_refused() -> None:
    for batch, concurrent, lag, extra in ((0, 1, 0, 0), (1, 0, 0, 0), (1, 1, -1, 0), (1, 1, 0, -1)):
        with pytest.raises(ValueError, match="max_concurrent"):
            Pacer(batch, concurrent, lag, extra)


def test_the_bound_on_age() -> None:
    assert [stale_before(update, 2) for update in (0, 2, 7)] == [-2, 0, 5]
    assert stale_before(4, 0) == 4, "synchronous: nothing but the policy that is trained"


def test_while_an_update_runs_flat_groups_are_not_sampled_without_end() -> None:
    pacer = Pacer(batch=4, max_concurrent=100, max_lag=2, extra=3)
    pacer.ready = 4
    assert pacer.take() == 4
    closed = 0
    while pacer.capacity and closed < 1000:
        pacer.start()
        pacer.close(usable=True, aside=True)
        closed += 1
    assert closed == 3 + 8, "the extra ones, and what two more updates may have in hand"


class Accepting(Pacer):
    """Counts a dropped group as accepted."""

    def close(self, *, usable: bool, aside: bool = False) -> None:
        super().close(usable=True, aside=aside)


class Forgetting(Pacer):
    """Starts as if what the update holds were gone already."""

    @property
    def outstanding(self) -> int:
        return self.running + self.ready + self.overdrawn


class Greedy(Pacer):
    """Looks at how many may run at once, and at nothing else."""

    @property
    def capacity(self) -> int:
        return max(0, self.max_concurrent - self.running)


class Endless(Pacer):
    """Makes up for every group that is set aside."""

    @property
    def overdrawn(self) -> int:
        return 0


class Filling(Pacer):
    """Starts others for what an update goes without, while it runs."""

    def take(self) -> int:
        taken = super().take()
        self.updating = taken
        return taken


@pytest.mark.parametrize("mutant", [Accepting, Forgetting, Greedy, Endless, Filling])
def test_the_machine_finds_what_is_wrong_with_a_pacer(mutant: type[Pacer]) -> None:
    class Mutated(Pacing):
        @initialize(
            batch=st.integers(1, 5), concurrent=st.integers(1, 20), lag=st.integers(0, 3), extra=st.integers(0, 6)
        )
        def begin(self, batch: int, concurrent: int, lag: int, extra: int) -> None:
            super().begin(batch, concurrent, lag, extra)
            self.pacer = mutant(batch, concurrent, lag, extra)

    quick = settings(
        max_examples=400,
        stateful_step_count=40,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        print_blob=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Mutated, settings=quick)
