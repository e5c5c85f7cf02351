"""Running aggregates on a harness: what is emitted, and what an abandoned epoch leaves."""

from __future__ import annotations

from cairn import KeyedProcess, state
from cairn.testing import Harness
from tests.unit.operators.aggregates.support import Aggregated


def test_changed_keys_are_emitted_once_when_the_epoch_ends() -> None:
    job = Aggregated(None)
    job.push((1, 0, 5), (2, 0, None))
    job.push((1, 0, 7), (3, 0, 1))
    assert job.harness.outputs == []
    assert job.end() == [(1, 2, 7), (2, 1, None), (3, 1, 1)]
    assert job.epoch((2, 0, 4)) == [(2, 2, 4)]
    assert job.epoch() == []


def test_an_abandoned_epoch_leaves_no_trace() -> None:
    job = Aggregated(None)
    job.epoch((1, 0, 5))
    job.push((1, 0, 9), (2, 0, 9))
    job.harness.rollback()
    assert job.epoch((3, 0, 1)) == [(3, 1, 1)]
    assert job.epoch((1, 0, 6)) == [(1, 2, 6)]


def test_state_is_restored_from_files() -> None:
    job = Aggregated(None)
    job.epoch((1, 0, 5), (None, 0, 2))
    job.harness.snapshot_and_restore(base=True)
    assert job.epoch((1, 0, 6), (None, 0, 1)) == [(1, 2, 6), (None, 2, 2)]


def test_groups_of_the_epoch_are_counted_for_the_choice_of_plan() -> None:
    job = Aggregated(None)
    job.push((1, 0, 5), (1, 0, 6), (2, 0, 6))
    job.harness.commit()
    assert job.harness.function.partial_count == 2
    job.harness.commit()
    assert job.harness.function.partial_count == 0


def test_states_of_users_may_have_any_name() -> None:
    class Names(KeyedProcess):
        groups = state.Value("bigint", default=0)
        row_count = state.Value("bigint", default=0)
        late_rows = state.Value("bigint", default=0)

        def process(self, row, ctx):  # type: ignore[no-untyped-def]
            self.groups.set(self.groups.get() + 1)
            return (self.groups.get(),)

    with Harness(Names(), "k bigint", "k", "n bigint") as harness:
        assert harness.push([(1,), (1,)]) == [(1,), (2,)]
        harness.commit()
        assert harness._operator.partial_count == 0
