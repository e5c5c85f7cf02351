"""Lists of subtasks: each has its own, and no item is lost when their number changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn import Process, state
from cairn.errors import FunctionError, StateSchemaError
from cairn.slot.redistribution import share_of
from cairn.snapshots.branch import branch
from cairn.snapshots.load import load_savepoint, open_job
from cairn.snapshots.rollback import rollback
from cairn.snapshots.savepoint import open_savepoint
from cairn.snapshots.saving import write_savepoint
from cairn.storage.manifest import EMPTY_VERSION
from cairn.storage.store import open_store
from tests.backends import MORE_IN_SOAK, backend_name
from tests.unit.slot.scoped_job import GROUP_COUNT, Notes, ScopedJob, Waiting, feed


@pytest.fixture
def job(tmp_path: Path) -> ScopedJob:
    job = ScopedJob(tmp_path)
    job.lead(2)
    return job


def is_even(lists: list[list[int]]) -> bool:
    sizes = [len(each) for each in lists]
    return max(sizes) - min(sizes) <= 1


def test_each_subtask_has_its_own_list(job: ScopedJob) -> None:
    feed(job, 0, 4)
    feed(job, 4, 4)
    assert job.lists("own") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert job.lists("all") == job.lists("own")


def test_split_from_2_to_5_to_3_subtasks_loses_no_item_and_doubles_none(job: ScopedJob) -> None:
    feed(job, 0, 8)
    before = [v for each in job.lists("own") for v in each]
    job.coordinator.subtasks.rescale(5)
    feed(job, 0, 0)
    five = job.lists("own")
    assert len(five) == 5 and is_even(five)
    assert [v for each in five for v in each] == before, "in order of the subtasks"
    feed(job, 8, 5)
    before = [v for each in job.lists("own") for v in each]
    assert sorted(before) == list(range(13))
    job.coordinator.subtasks.rescale(3)
    feed(job, 0, 0)
    three = job.lists("own")
    assert len(three) == 3 and is_even(three)
    assert [v for each in three for v in each] == before


def test_union_from_2_to_5_to_3_subtasks_gives_all_items_to_all_once(job: ScopedJob) -> None:
    feed(job, 0, 8)
    job.coordinator.subtasks.rescale(5)
    feed(job, 0, 0)
    first = [0, 2, 4, 6, 1, 3, 5, 7]
    assert job.lists("all") == [first] * 5
    feed(job, 8, 5)
    assert job.lists("all") == [[*first, 8 + subtask] for subtask in range(5)]
    job.coordinator.subtasks.rescale(3)
    feed(job, 0, 0)
    assert job.lists("all") == [[*first, 8, 9, 10, 11, 12]] * 3


def test_rows_of_the_epoch_that_rescales_come_upon_the_new_lists(job: ScopedJob) -> None:
    feed(job, 0, 4)
    job.coordinator.subtasks.rescale(3)
    feed(job, 4, 3)
    assert job.lists("own") == [[0, 4], [2, 5], [1, 3, 6]]


@pytest.mark.parametrize("loses_slots", [False, True], ids=["slots live", "slots die"])
def test_a_failed_attempt_at_a_rescale_leaves_no_trace(job: ScopedJob, loses_slots: bool) -> None:
    feed(job, 0, 8)
    job.coordinator.subtasks.rescale(5)
    job.failures += [job.kill if loses_slots else lambda: None] * 2
    feed(job, 8, 5)
    assert sorted(v for each in job.lists("own") for v in each) == list(range(13))
    assert all(sorted(each)[:8] == list(range(8)) for each in job.lists("all"))
    assert [len(each) for each in job.lists("all")] == [9] * 5


def test_slots_killed_right_after_a_rescale_restore_the_same_lists(job: ScopedJob) -> None:
    feed(job, 0, 8)
    job.coordinator.subtasks.rescale(5)
    feed(job, 0, 0)
    own, united = job.lists("own"), job.lists("all")
    job.kill()
    feed(job, 0, 0)
    assert (job.lists("own"), job.lists("all")) == (own, united)
    job.coordinator.subtasks.rescale(2)
    feed(job, 0, 0)
    assert job.lists("all") == [united[0]] * 2


def test_back_before_a_rescale_the_lists_are_handed_out_again(job: ScopedJob) -> None:
    feed(job, 0, 8)
    before = job.newest.number
    job.coordinator.subtasks.rescale(5)
    feed(job, 8, 5)
    rollback(job.store, before)
    job.lead(3)
    feed(job, 0, 0)
    assert [v for each in job.lists("own") for v in each] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert is_even(job.lists("own"))
    assert job.lists("all") == [[0, 2, 4, 6, 1, 3, 5, 7]] * 3


@pytest.mark.parametrize("parallelism", [2, 5])
@pytest.mark.parametrize("backend", MORE_IN_SOAK)
def test_a_savepoint_goes_on_at_any_parallelism_and_backend(
    job: ScopedJob, tmp_path: Path, parallelism: int, backend: str
) -> None:
    feed(job, 0, 7)
    job.run([], [("low", 3), ("high", 9)])
    url = str(tmp_path / "savepoint")
    write_savepoint(job.store, None, url)
    savepoint = open_savepoint(url)
    other = ScopedJob(tmp_path)
    open_job(other.store, "scoped", GROUP_COUNT, savepoint)

    def load(coordinator: Any) -> None:
        coordinator.adopt(
            load_savepoint(
                savepoint,
                other.store,
                number=coordinator.term + 1,
                term=coordinator.term,
                parallelism=parallelism,
                spark_folder="spark",
            )
        )

    other.lead(parallelism, backend=backend_name(backend), adopt=load)
    feed(other, 0, 0)
    joined = [v for each in job.lists("own") for v in each]
    assert [v for each in other.lists("own") for v in each] == joined
    assert is_even(other.lists("own")) and len(other.lists("own")) == parallelism
    if parallelism == 2:
        assert other.lists("all") == job.lists("all"), "nothing is handed out anew"
    else:
        assert other.lists("all") == [joined] * parallelism
    assert other.replicas() == [{"low": 3, "high": 9}] * parallelism
    assert other.rules() == {"low": 3, "high": 9}


def test_a_branch_has_lists_of_its_own(job: ScopedJob, tmp_path: Path) -> None:
    persistent = ScopedJob(tmp_path, f"file://{tmp_path}/parent")
    persistent.lead(2)
    feed(persistent, 0, 6)
    branch(persistent.store, None, f"file://{tmp_path}/branch", spark_dest=open_store("memory:"))
    other = ScopedJob(tmp_path, f"file://{tmp_path}/branch")
    other.lead(3)
    feed(other, 6, 3)
    assert [len(each) for each in other.lists("own")] == [3, 3, 3]
    assert persistent.lists("own") == [[0, 2, 4], [1, 3, 5]]


def test_an_epoch_stores_what_was_appended_and_no_more(job: ScopedJob) -> None:
    feed(job, 0, 100)
    feed(job, 100, 2)
    files = [part.files for part in job.newest.operators["notes"].ranges]
    assert [[ref.rows for ref in each] for each in files] == [[100, 2], [100, 2]]


class Trim(Notes):
    """Keeps the last three of the united list, and counts them."""

    def process(self, row: Any, ctx: Any) -> Any:
        if row.v >= 0:
            super().process(row, ctx)
        self.all.set(list(self.all)[-3:])
        return row.k, len(self.all), ctx.subtask, str(self.all[0])


def test_setting_what_is_there_keeps_copies_copies(tmp_path: Path) -> None:
    job = ScopedJob(tmp_path)
    job.lead(1, Trim())
    feed(job, 0, 5)
    job.coordinator.subtasks.rescale(4)
    job.run([(0, -1)] * 4)
    assert job.lists("all") == [[2, 3, 4]] * 4
    assert not any(
        ref.kind == "delta" for p in job.newest.operators["notes"].ranges for ref in p.files
    )
    job.run([(0, 7), (0, -1)])
    assert job.lists("all") == [[3, 4, 7], [2, 3, 4], [2, 3, 4], [2, 3, 4]]
    job.coordinator.subtasks.rescale(2)
    job.run()
    assert job.lists("all") == [[3, 4, 7, 2]] * 2, "copies that are left count once"


class Wider(Process[Any]):
    own = state.OperatorList("double", migrate=float)
    all = state.OperatorList("string", redistribute="union", migrate=lambda v: f"<{v}>")

    def process(self, row: Any, ctx: Any) -> Any:
        self.own.append(0.5)


@pytest.mark.parametrize("parallelism", [2, 3])
def test_another_type_is_read_as_declared_also_when_lists_are_handed_out(
    job: ScopedJob, parallelism: int
) -> None:
    feed(job, 0, 3)
    job.lead(parallelism, Wider())
    job.run([(0, 0)])
    assert sorted(v for each in job.lists("own") for v in each) == [0.0, 0.5, 1.0, 2.0]
    texts = {v for each in job.lists("all") for v in each}
    assert texts == {"<0>", "<1>", "<2>"}
    decls = job.newest.operators["notes"].states
    assert (decls["own"].type, decls["all"].type) == ("double", "string")


class Forgets(Process[Any]):
    own = state.OperatorList("long")

    def process(self, row: Any, ctx: Any) -> Any:
        pass


def test_a_list_that_is_no_longer_declared_is_lost_only_if_it_may_be(job: ScopedJob) -> None:
    feed(job, 0, 4)
    with pytest.raises(StateSchemaError, match="holds state 'all'"):
        job.lead(2, Forgets())
    job.lead(3, Forgets(), allow_dropped_state=True)
    job.run()
    assert [v for each in job.lists("own") for v in each] == [0, 2, 1, 3]
    assert set(job.newest.operators["notes"].states) == {"own"}


class Shrinks(Process[Any]):
    own = state.OperatorList("long", redistribute="union")
    all = state.OperatorList("long", redistribute="union")

    def process(self, row: Any, ctx: Any) -> Any:
        pass


def test_lists_may_be_handed_out_another_way_from_now_on(job: ScopedJob) -> None:
    feed(job, 0, 4)
    job.lead(3, Shrinks())
    job.run()
    assert job.lists("own") == [[0, 2, 1, 3]] * 3
    job.lead(2, Notes())
    job.run()
    assert job.lists("own") == [[0, 2], [1, 3]], "each copy once"


def test_items_that_are_no_copies_are_all_different() -> None:
    lists = [[(-1, "a"), (-1, "a")], [(-1, "a")]]
    assert share_of(lists, 0, 1, "union") == [(0, "a"), (1, "a"), (2, "a")]


class Opening(Notes):
    def open(self, ctx: Any) -> None:
        self.own.append(-1)


class Telling(Notes):
    def on_epoch_committed(self, epoch: int) -> None:
        self.own.set([])


@pytest.mark.parametrize("function", [Opening(), Telling()])
def test_a_list_is_written_while_rows_are_processed_only(function: Notes, tmp_path: Path) -> None:
    job = ScopedJob(tmp_path)
    job.lead(2, function)
    with pytest.raises(FunctionError, match=r"'own'(.|\n)*next: read it in open\(\)"):
        for first in range(2):
            feed(job, first, 1)


class Closing(Notes):
    def close(self) -> None:
        WRITTEN.append("tried")
        self.own.clear()
        WRITTEN.append("written")


WRITTEN: list[str] = []


def test_a_function_that_is_closed_in_the_middle_of_an_epoch_writes_nothing_more(
    tmp_path: Path,
) -> None:
    job = ScopedJob(tmp_path)
    job.lead(1, Closing())
    feed(job, 0, 2)
    WRITTEN.clear()
    (slot,) = job.cluster.slots.values()
    (operator,) = (op for op in slot.level(0).operators if op.spec.uid == "notes")
    operator.begin_rows()
    with pytest.raises(FunctionError):
        operator.close_function()
    assert WRITTEN == ["tried"]


class Counting(Notes):
    """Knows from `open` on how long its list is."""

    def open(self, ctx: Any) -> None:
        self.count = len(self.own)
        OPENED.append(ctx.subtask)

    def process(self, row: Any, ctx: Any) -> Any:
        super().process(row, ctx)
        self.count += 1
        assert self.count == len(self.own)


OPENED: list[int] = []


def test_what_a_function_has_read_in_open_is_what_it_finds(tmp_path: Path) -> None:
    OPENED.clear()
    job = ScopedJob(tmp_path)
    job.lead(2, Counting())
    feed(job, 0, 6)
    feed(job, 6, 6)
    assert sorted(OPENED) == [0, 1], "not for every epoch"
    for parallelism in (3, 1, 2):
        job.coordinator.subtasks.rescale(parallelism)
        feed(job, 0, 7)
    job.failures = [lambda: None]
    feed(job, 0, 6)
    job.failures = [job.kill]
    feed(job, 0, 6)
    assert sum(map(len, job.lists("own"))) == 12 + 21 + 12


def test_a_slot_that_gets_another_subtask_opens_its_function_anew(tmp_path: Path) -> None:
    job = ScopedJob(tmp_path)
    job.lead(3, Counting())
    feed(job, 0, 7)
    OPENED.clear()
    before = job.cluster.slots
    job.cluster.slots = {0: before[2], 1: before[0], 2: before[1]}
    feed(job, 0, 7)
    assert sorted(OPENED) == [0, 1, 2]


def test_lists_of_a_bounded_operator_go_to_the_subtasks_that_get_rows(tmp_path: Path) -> None:
    job = ScopedJob(tmp_path)
    job.lead(4, Waiting(), bound=2)
    feed(job, 0, 8)
    assert job.lists("own") == [[0, 2, 4, 6], [1, 3, 5, 7], [], []]
    job.coordinator.subtasks.rescale(8)
    feed(job, 8, 2)
    assert job.lists("own") == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9], *[[]] * 6]
    assert all(each.version == EMPTY_VERSION for each in job.newest.operators["notes"].ranges[2:])
    job.kill()
    feed(job, 10, 1)
    assert job.lists("own") == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9], *[[]] * 6]


def test_lists_move_when_a_restart_leaves_their_subtasks_without_rows(tmp_path: Path) -> None:
    job = ScopedJob(tmp_path)
    job.lead(4, Waiting())
    feed(job, 0, 8)
    assert job.lists("own") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    job.lead(4, Waiting(), bound=1)
    job.failures += [job.kill, lambda: None]
    feed(job, 8, 1)
    assert job.lists("own") == [[0, 4, 1, 5, 2, 6, 3, 7, 8], [], [], []]
    before = job.newest.operators["notes"].ranges
    feed(job, 9, 0)
    assert job.newest.operators["notes"].ranges == before, "they are moved once"
    job.lead(4, Waiting(), bound=3)
    feed(job, 9, 3)
    assert job.lists("own") == [[0, 4, 1, 5, 2, 6, 3, 7, 8, 9], [10], [11], []]


def test_items_that_are_united_go_to_all_subtasks_of_a_bounded_operator(tmp_path: Path) -> None:
    job = ScopedJob(tmp_path)
    job.lead(2)
    feed(job, 0, 4)
    job.lead(3, bound=1)
    feed(job, 4, 0)
    assert job.lists("own") == [[0, 2, 1, 3], [], []]
    assert job.lists("all") == [[0, 2, 1, 3]] * 3
    job.lead(3)
    feed(job, 4, 3)
    assert job.lists("all") == [[0, 2, 1, 3, 4 + subtask] for subtask in range(3)]


def test_items_are_united_again_when_a_restart_changes_the_bound_alone(tmp_path: Path) -> None:
    job = ScopedJob(tmp_path)
    job.lead(3)
    feed(job, 0, 3)
    assert job.lists("all") == [[0], [1], [2]]
    job.lead(3, bound=2)
    job.failures += [job.kill, lambda: None]
    feed(job, 3, 0)
    assert job.lists("all") == [[0, 1, 2]] * 3
    assert [len(items) for items in job.lists("own")] == [1, 2, 0]
    before = job.newest.operators["notes"].ranges
    feed(job, 3, 0)
    assert job.newest.operators["notes"].ranges == before, "once"
    feed(job, 3, 2)
    assert job.lists("all") == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2]]
    job.lead(3)
    feed(job, 5, 0)
    assert job.lists("all") == [[0, 1, 2, 3, 4]] * 3
