"""A slot keeps state between epochs, and takes nothing for committed that is not."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import msgspec
import pytest

from cairn import KeyedProcess, state
from cairn.backends.files import open_rows
from cairn.errors import EpochError, FunctionError
from cairn.protocol.messages import Compaction, Token, ack_encoder
from cairn.sinks import Collect, Writer
from cairn.sinks.base import Execution
from cairn.sinks.driver import RowsWriter
from cairn.slot.level import LevelRuntime, StaleTokenError
from cairn.slot.runtime import Runtime
from cairn.storage.store import open_store
from cairn.testing import Fault, FaultyStore
from tests.restored import fresh_operator
from tests.unit.slot.one_level import (
    GROUP_COUNT,
    Checkpoint,
    Count,
    batch_of,
    held,
    model,
    run,
    token_of,
)


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint()


@pytest.fixture
def slot(checkpoint: Checkpoint, tmp_path: Path) -> LevelRuntime:
    return checkpoint.slot(tmp_path)


def seen(slot: LevelRuntime) -> Any:
    """What is committed in the slot, and what its next function call would start from."""
    return held([slot])


# Tokens


@pytest.mark.parametrize(
    "older",
    [
        Token(0, 9, Execution(9, 9, 9), 9),
        Token(1, 1, Execution(9, 9, 9), 9),
        Token(1, 2, Execution(0, 9, 9), 9),
        Token(1, 2, Execution(1, 0, 9), 9),
        Token(1, 2, Execution(1, 1, 0), 9),
        Token(1, 2, Execution(1, 1, 1), 0),
    ],
    ids=["term", "epoch", "batch", "attempt", "round", "task attempt"],
)
def test_an_older_attempt_can_neither_begin_nor_run_nor_finish(
    older: Token, checkpoint: Checkpoint, slot: LevelRuntime
) -> None:
    begin = checkpoint.begin()
    newest = Token(1, 2, Execution(1, 1, 1), 1)
    slot.begin(newest, begin, 0)
    slot.run(newest, batch_of([(1, 1)]))
    for call in (
        lambda: slot.begin(older, begin, 0),
        lambda: slot.run(older, batch_of([(1, 5)])),
        lambda: slot.attach(older, print),
        lambda: slot.finish(older),
    ):
        with pytest.raises(StaleTokenError, match="superseded"):
            call()
    slot.abandon(older)
    ack = slot.finish(newest)
    assert ack.operators[0].rows_in == 1
    assert ack.committables["out"]["rows"] == 1


def test_a_zombie_that_begins_while_the_next_attempt_waits_cannot_take_the_slot_back(
    checkpoint: Checkpoint, slot: LevelRuntime
) -> None:
    begin = checkpoint.begin()
    old, new = token_of(begin, 1), token_of(begin, 2)
    slot.begin(old, begin, 0)
    began = threading.Event()

    def begin_new() -> None:
        slot.begin(new, begin, 0)
        began.set()

    with slot._lock:  # The old attempt is in the middle of a batch.
        thread = threading.Thread(target=begin_new)
        thread.start()
        while slot._newest != new:
            pass
        with pytest.raises(StaleTokenError):
            slot.run(old, batch_of([(1, 1)]))
    thread.join(10)
    assert began.is_set()
    with pytest.raises(StaleTokenError):
        slot.begin(old, begin, 0)


def test_rows_leave_by_the_attempt_that_attached_last(
    checkpoint: Checkpoint, slot: LevelRuntime
) -> None:
    begin = checkpoint.begin()
    slot.begin(token_of(begin, 2), begin, 0)
    slot.attach(token_of(begin, 2), lambda batch: None)
    with pytest.raises(StaleTokenError):
        slot.attach(token_of(begin, 1), lambda batch: None)


# The same again


@pytest.mark.parametrize("inline", [True, False])
def test_a_task_that_runs_again_acknowledges_the_same_bytes(
    checkpoint: Checkpoint, slot: LevelRuntime, tmp_path: Path, inline: bool
) -> None:
    checkpoint.run_batch([slot], [(k, k) for k in range(20)])
    checkpoint.run_batch([slot], [(3, None), (4, None), (3, 3)])
    begin = checkpoint.begin(inline_bytes_max=1 << 20 if inline else 0)
    rows = [(1, 7), (3, None), (9, None), (9, 1), (30, 1)]
    first = ack_encoder.encode(run(slot, begin, rows))
    assert ack_encoder.encode(run(slot, begin, rows, task_attempt=1)) == first
    elsewhere = checkpoint.slot(tmp_path)
    assert ack_encoder.encode(run(elsewhere, begin, rows, task_attempt=2)) == first
    assert elsewhere.restored


def test_output_does_not_depend_on_what_the_slot_did_before(
    checkpoint: Checkpoint, slot: LevelRuntime, tmp_path: Path
) -> None:
    """A slot that has learnt how large rows are must not cut its output in another way."""
    checkpoint.run_batch([slot], [(k, k) for k in range(3000)])
    begin, rows = checkpoint.begin(), [(k, 1) for k in range(3000)]
    first = run(slot, begin, rows)
    again = run(checkpoint.slot(tmp_path), begin, rows, task_attempt=1)
    assert again.committables == first.committables


@pytest.mark.parametrize("kind", ["base", "merge"])
def test_a_compaction_leaves_the_acknowledgement_as_it_is(
    checkpoint: Checkpoint, slot: LevelRuntime, tmp_path: Path, kind: str
) -> None:
    """Spark compares what a stage says when it runs again; when a base is done is chance."""
    for n in range(4):
        checkpoint.run_batch([slot], [(k % 7, k + n) for k in range(20 - n)])
    rows = [(2, None), (0, None), (0, 1)]
    plain = run(checkpoint.slot(tmp_path), checkpoint.begin(), rows)
    begin = checkpoint.begin(compaction=Compaction(kind, 4, 1))
    first = run(slot, begin, rows, task_attempt=1)
    slot.compactor.work()
    assert [file.kind for file in slot.compactor.list_unconfirmed()] == [kind]
    again = run(slot, begin, rows, task_attempt=2)
    assert ack_encoder.encode(plain) == ack_encoder.encode(first) == ack_encoder.encode(again)


def test_a_base_is_of_the_epoch_it_was_asked_in_however_late_it_is_written(
    checkpoint: Checkpoint, slot: LevelRuntime, tmp_path: Path
) -> None:
    done = [(k % 7, k) for k in range(20)]
    checkpoint.run_batch([slot], done)
    begin = checkpoint.begin(compaction=Compaction("base", 1, 0), inline_bytes_max=0)
    checkpoint.publish(begin, [run(slot, begin, [(1, 5), (2, None), (9, 9)])])
    later = checkpoint.begin(inline_bytes_max=0)
    checkpoint.publish(later, [run(slot, later, [(3, None), (9, None)])])
    slot.begin(token_of(checkpoint.begin()), checkpoint.begin(), 0)
    slot.compactor.work()
    (file,) = slot.compactor.list_unconfirmed()
    assert file.as_of == begin.parent
    ref = checkpoint.run_batch([slot], []).operators["count"].ranges[0].files[0]
    assert ref.kind == "base"
    spec = checkpoint.spec.levels[0].operators[0]
    fresh = fresh_operator(spec, range(GROUP_COUNT), GROUP_COUNT)
    with open_rows(checkpoint.store, ref, str(tmp_path)) as reader:
        for name in reader.states:
            for batch in reader.read(name, fresh.state.groups):
                fresh.tables[name].apply(batch)
    assert held([SimpleNamespace(operators=[fresh])]) == model(done)


def test_an_attempt_that_is_superseded_makes_no_report_of_the_next_one(
    checkpoint: Checkpoint, slot: LevelRuntime
) -> None:
    begin = checkpoint.begin()
    run(slot, begin, [(1, 1)], task_attempt=1)
    assert slot.report(token_of(begin, 1), executor="", log="", started_ms=0).epoch == begin.epoch
    slot.begin(token_of(begin, 2), begin, 0)
    with pytest.raises(StaleTokenError):
        slot.report(token_of(begin, 1), executor="", log="", started_ms=0)


def test_an_announcement_is_repeated_until_it_is_settled(
    checkpoint: Checkpoint, slot: LevelRuntime
) -> None:
    checkpoint.run_batch([slot], [(1, 1)])
    begin = checkpoint.begin(compaction=Compaction("base", 1, 0))
    run(slot, begin, [])
    slot.compactor.work()
    for attempt in (1, 2):
        run(slot, begin, [], task_attempt=attempt)
        assert len(slot.report(slot._newest, executor="", log="", started_ms=0).compacted) == 1
    settled = [file.stored.id for file in slot.compactor.list_unconfirmed()]
    confirmed = msgspec.structs.replace(begin.parts[0], settled=settled)
    run(slot, msgspec.structs.replace(begin, parts={0: confirmed}), [], task_attempt=3)
    assert slot.report(slot._newest, executor="", log="", started_ms=0).compacted == ()


def test_a_base_that_cannot_be_written_fails_no_epoch(
    checkpoint: Checkpoint, slot: LevelRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.run_batch([slot], [(1, 1)])
    begin = checkpoint.begin(compaction=Compaction("base", 1, 0), inline_bytes_max=0)
    ack = run(slot, begin, [(2, 2)])
    with monkeypatch.context() as patched:
        patched.setattr(type(checkpoint.store), "put", _full_disk)
        patched.setattr(type(checkpoint.store), "put_file", _full_disk)
        slot.compactor.work()
    assert (
        "No space left" in slot.report(slot._newest, executor="", log="", started_ms=0).base_failed
    )
    checkpoint.publish(begin, [ack])
    checkpoint.run_batch([slot], [])
    assert seen(slot) == model([(1, 1), (2, 2)])


def _full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_after_a_rescale_slots_keep_what_they_hold_and_restore_the_rest(
    checkpoint: Checkpoint, slot: LevelRuntime, tmp_path: Path
) -> None:
    done = [(k, k) for k in range(40)]
    checkpoint.run_batch([slot], done)
    checkpoint.parallelism = 2
    slots = [slot, checkpoint.slot(tmp_path)]
    checkpoint.run_batch(slots, [])
    assert [each.restored for each in slots] == [False, True]
    assert held(slots) == model(done)
    checkpoint.run_batch(slots, [(k, 7) for k in range(40)])
    checkpoint.parallelism = 1
    checkpoint.run_batch([slot], [])
    assert slot.restored, "the other half is read back"
    slot.begin(token_of(checkpoint.begin()), checkpoint.begin(), 0)
    assert held([slot]) == model([*done, *((k, 7) for k in range(40))])


def test_a_slot_left_over_from_another_parallelism_does_not_pass_old_state_for_new(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """2, 4, 2 subtasks: the slots of the first two are still alive, with state of long ago."""
    done: list[tuple[int, int | None]] = []
    slots = [checkpoint.slot(tmp_path) for _ in range(4)]
    for turn, parallelism in enumerate((2, 4, 2, 4, 1, 4)):
        checkpoint.parallelism = parallelism
        rows: list[tuple[int, int | None]] = [(k, turn) for k in range(turn, 40)]
        checkpoint.run_batch(slots[:parallelism], rows)
        done += rows
        checkpoint.run_batch(slots[:parallelism], [])
        for subtask, each in enumerate(slots[:parallelism]):
            each.begin(token_of(checkpoint.begin()), checkpoint.begin(), subtask)
        assert held(slots[:parallelism]) == model(done)


def test_an_epoch_without_rows_acknowledges_no_delta_and_keeps_the_version(
    checkpoint: Checkpoint, slot: LevelRuntime
) -> None:
    first = checkpoint.run_batch([slot], [(1, 1)])
    second = checkpoint.run_batch([slot], [])
    assert second.operators["count"].ranges[0].version == first.operators["count"].ranges[0].version
    third = checkpoint.run_batch([slot], [(1, 2)])
    assert third.operators["count"].ranges[0].version != first.operators["count"].ranges[0].version
    run(slot, checkpoint.begin(), [])
    assert not slot.restored
    assert seen(slot) == model([(1, 1), (1, 2)])


# Promoted, undone, restored


def test_what_was_acknowledged_is_promoted_when_the_parent_names_it(
    checkpoint: Checkpoint, slot: LevelRuntime
) -> None:
    checkpoint.run_batch([slot], [(1, 1)])
    slot.begin(token_of(checkpoint.begin()), checkpoint.begin(), 0)
    assert not slot.restored
    assert seen(slot) == model([(1, 1)])


def test_what_was_acknowledged_is_undone_when_the_parent_does_not_name_it(
    checkpoint: Checkpoint, slot: LevelRuntime
) -> None:
    checkpoint.run_batch([slot], [(1, 1), (2, 2)])
    run(slot, checkpoint.begin(), [(1, 5), (2, None), (3, 3)])
    retried = run(slot, checkpoint.begin(attempt=1), [(1, 6)])
    assert not slot.restored
    checkpoint.publish(checkpoint.begin(attempt=1, inline_bytes_max=0), [
        run(slot, checkpoint.begin(attempt=1, inline_bytes_max=0), [(1, 6)], task_attempt=1)
    ])  # fmt: skip
    assert retried.operators[0].keys_changed == 3
    slot.begin(token_of(checkpoint.begin()), checkpoint.begin(), 0)
    assert seen(slot) == model([(1, 1), (2, 2), (1, 6)])


def test_an_attempt_given_up_half_way_leaves_no_trace(
    checkpoint: Checkpoint, slot: LevelRuntime
) -> None:
    checkpoint.run_batch([slot], [(1, 1)])
    begin = checkpoint.begin()
    slot.begin(token_of(begin), begin, 0)
    slot.run(token_of(begin), batch_of([(1, 9), (1, None), (4, 4)]))
    slot.abandon(token_of(begin))
    checkpoint.run_batch([slot], [])
    slot.begin(token_of(checkpoint.begin()), checkpoint.begin(), 0)
    assert not slot.restored
    assert seen(slot) == model([(1, 1)])


def test_a_slot_that_is_a_version_behind_restores(
    checkpoint: Checkpoint, slot: LevelRuntime, tmp_path: Path
) -> None:
    other = checkpoint.slot(tmp_path)
    checkpoint.run_batch([slot], [(1, 1)])
    checkpoint.run_batch([other], [(1, 2)])
    checkpoint.run_batch([slot], [(1, 3)])
    assert slot.restored
    slot.begin(token_of(checkpoint.begin()), checkpoint.begin(), 0)
    assert seen(slot) == model([(1, 1), (1, 2), (1, 3)])


def test_a_slot_whose_pending_epoch_was_published_otherwise_restores(
    checkpoint: Checkpoint, slot: LevelRuntime, tmp_path: Path
) -> None:
    """The epoch number is the same; what was committed under it is not."""
    checkpoint.run_batch([slot], [(1, 1)])
    run(slot, checkpoint.begin(), [(1, 666)])
    checkpoint.run_batch([checkpoint.slot(tmp_path)], [(1, 2)])
    slot.begin(token_of(checkpoint.begin()), checkpoint.begin(), 0)
    assert slot.restored
    assert seen(slot) == model([(1, 1), (1, 2)])


def test_a_restore_that_fails_half_way_does_not_pass_for_the_state(tmp_path: Path) -> None:
    store = FaultyStore(open_store("memory:"))
    checkpoint = Checkpoint(store)
    slot = checkpoint.slot(tmp_path)
    for n in range(3):
        checkpoint.run_batch([slot], [(n, n)])
    fresh = checkpoint.slot(tmp_path)
    store.plan(Fault("get_range", store.calls["get_range"] + 2, "before"))
    begin = checkpoint.begin()
    with pytest.raises(OSError, match="injected"):
        fresh.begin(token_of(begin), begin, 0)
    fresh.begin(token_of(begin, 1), begin, 0)
    assert held([fresh]) == model([(0, 0), (1, 1), (2, 2)])


def test_a_slot_that_changes_its_key_groups_holds_only_its_own(
    checkpoint: Checkpoint, slot: LevelRuntime, tmp_path: Path
) -> None:
    rows: list[tuple[int, int | None]] = [(k, k) for k in range(30)]
    checkpoint.run_batch([slot], rows)
    checkpoint.parallelism = 2
    slots = [slot, checkpoint.slot(tmp_path)]
    checkpoint.run_batch(slots, [(k, 1) for k in range(30)])
    begin = checkpoint.begin()
    for subtask, each in enumerate(slots):
        each.begin(token_of(begin), begin, subtask)
    assert 0 < len(held(slots[:1])) < 30
    assert held(slots) == model([*rows, *((k, 1) for k in range(30))])


# Errors of the function


class Fails(KeyedProcess[Any]):
    n = state.Value("long")

    def open(self, ctx: Any) -> None:
        self.opened = getattr(self, "opened", 0) + 1

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.set(row.v)
        if row.v == 13:
            raise ValueError("unlucky")


def test_a_function_that_raises_names_operator_key_row_and_line(tmp_path: Path) -> None:
    checkpoint = Checkpoint(function=Fails())
    slot = checkpoint.slot(tmp_path)
    begin = checkpoint.begin()
    slot.begin(token_of(begin), begin, 0)
    with pytest.raises(FunctionError) as caught:
        slot.run(token_of(begin), batch_of([(1, 1), (5, 13), (2, 2)]))
        slot.finish(token_of(begin))
    error = caught.value
    assert (error.operator, error.key, error.row) == ("count", "5", "Row(k=5, v=13)")
    assert "ValueError: unlucky" in str(error) and "test_runtime.py" in str(error)
    assert "raise ValueError" in error.traceback


def test_a_function_that_raised_is_tried_again_from_the_parent_state(tmp_path: Path) -> None:
    checkpoint = Checkpoint(function=Fails())
    slot = checkpoint.slot(tmp_path)
    begin = checkpoint.begin()
    with pytest.raises(FunctionError):
        run(slot, begin, [(1, 1), (5, 13)])
    ack = run(slot, checkpoint.begin(attempt=1), [(5, 5)])
    assert ack.operators[0].keys_changed == 1


class Full(Collect):
    """A sink on a full disk."""

    def writer(self, epoch: int, subtask: int, execution: Execution) -> Writer:
        return FullWriter()


class FullWriter(RowsWriter):
    def write(self, batch: Any) -> None:
        raise OSError(28, "No space left on device")


def test_a_sink_that_cannot_be_written_is_not_blamed_on_the_function(tmp_path: Path) -> None:
    checkpoint = Checkpoint(sink=Full())
    slot = checkpoint.slot(tmp_path)
    begin = checkpoint.begin()
    slot.begin(token_of(begin), begin, 0)
    with pytest.raises(EpochError, match="sink 'out' could not be written: "):
        slot.run(token_of(begin), batch_of([(1, 1)]))
        slot.finish(token_of(begin))


def test_closing_a_slot_closes_functions_and_forgets_output(
    checkpoint: Checkpoint, slot: LevelRuntime
) -> None:
    begin = checkpoint.begin()
    slot.begin(token_of(begin), begin, 0)
    slot.run(token_of(begin), batch_of([(1, 1)]))
    slot.close()
    assert slot.operators[0].function is None
    assert slot.sinks["out"].writer is None


# Another function


class Tripled(Count):
    """The same state, another answer."""

    def process(self, row: Any, ctx: Any) -> Any:
        answer = super().process(row, ctx)
        return None if answer is None else (answer[0], answer[1] * 3, answer[2])


class Richer(Count):
    first = state.Value("long")

    def process(self, row: Any, ctx: Any) -> Any:
        if self.first.get() is None and row.v is not None:
            self.first.set(row.v)
        return super().process(row, ctx)


def upgraded(checkpoint: Checkpoint, function: KeyedProcess[Any]) -> tuple[str, bytes]:
    spec = checkpoint.spec.with_function("count", cloudpickle.dumps(function))
    return spec.pickle()


@pytest.mark.parametrize("function", [Tripled(), Richer()])
def test_another_function_finds_the_state_of_the_one_before(
    checkpoint: Checkpoint, tmp_path: Path, function: KeyedProcess[Any]
) -> None:
    runtime = Runtime(scratch=str(tmp_path), store=checkpoint.store, threaded=False)
    runtime.load(*checkpoint.spec.pickle())
    old = runtime.level(0)
    checkpoint.run_batch([old], [(1, 1), (2, 2)])
    runtime.load(*upgraded(checkpoint, function))
    new = runtime.level(0)
    assert new is not old
    checkpoint.run_batch([new], [(1, 5)])
    assert not new.restored
    new.begin(token_of(checkpoint.begin()), checkpoint.begin(), 0)
    assert seen(new) == model([(1, 1), (2, 2), (1, 5)])


def test_an_attempt_of_before_the_change_can_do_nothing_more(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    runtime = Runtime(scratch=str(tmp_path), store=checkpoint.store, threaded=False)
    before = checkpoint.spec.pickle()
    runtime.load(*before)
    old = runtime.level(0)
    begin = checkpoint.begin(inline_bytes_max=0)
    zombie = token_of(begin, 0)
    old.begin(zombie, begin, 0)
    old.run(zombie, batch_of([(1, 1)]))
    live = token_of(begin, 1)
    runtime.load(*upgraded(checkpoint, Tripled()), live)
    new = runtime.level(0)
    new.begin(live, begin, 0)
    for call in (
        lambda: old.run(zombie, batch_of([(1, 7)])),
        lambda: old.finish(zombie),
        lambda: runtime.load(*before, zombie),
    ):
        with pytest.raises(StaleTokenError):
            call()
    new.run(live, batch_of([(1, 1)]))
    checkpoint.publish(begin, [new.finish(live)])
    new.begin(token_of(checkpoint.begin()), checkpoint.begin(), 0)
    assert seen(new) == model([(1, 1)])


class Text(KeyedProcess[Any]):
    n = state.Value("string", migrate=str)
    values = state.List("long")
    last = state.Map("long", "long")

    def process(self, row: Any, ctx: Any) -> Any:
        return row.k, len(self.n.get("")), 0


def test_state_of_another_form_is_read_anew_and_written_as_a_base(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    runtime = Runtime(scratch=str(tmp_path), store=checkpoint.store, threaded=False)
    runtime.load(*checkpoint.spec.pickle())
    checkpoint.run_batch([runtime.level(0)], [(1, 1), (1, 1)])
    runtime.load(*upgraded(checkpoint, Text()))
    slot = runtime.level(0)
    begin = msgspec.structs.replace(checkpoint.begin(), rewrite=["count"])
    run(slot, begin, [])
    assert slot.restored
    (file,) = slot.report(slot._newest, executor="", log="", started_ms=0).compacted
    assert (file.kind, file.as_of) == ("base", begin.parent)
    assert [rows.get(1) for rows in slot.operators[0].tables["n"].rows if 1 in rows] == ["2"]


def test_a_committed_epoch_is_told_once_to_each_function(tmp_path: Path) -> None:
    told: list[int] = []
    TOLD[str(tmp_path)] = told
    checkpoint = Checkpoint(function=Told(str(tmp_path)))
    slot = checkpoint.slot(tmp_path)
    first = checkpoint.run_batch([slot], [(1, 1)])
    begin = checkpoint.begin(inline_bytes_max=0)
    run(slot, begin, [(1, 2)])
    checkpoint.publish(begin, [run(slot, begin, [(1, 2)], task_attempt=1)])
    assert told == [first.number], "once, however many attempts"


TOLD: dict[str, list[int]] = {}


class Told(Count):
    def __init__(self, name: str) -> None:
        self.name = name

    def on_epoch_committed(self, epoch: int) -> None:
        TOLD[self.name].append(epoch)


class Dozing(KeyedProcess[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        time.sleep(0.03)
        return row.k, 1, 1


def test_rows_that_are_processed_when_the_last_has_come_count_as_processing(
    tmp_path: Path,
) -> None:
    checkpoint = Checkpoint(function=Dozing())
    slot = checkpoint.slot(tmp_path)
    run(slot, checkpoint.begin(), [(1, 1)])
    # So few rows are gathered until the end.
    assert slot.process_ms >= 30
