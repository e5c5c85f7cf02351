"""Slots of a standby follow the epochs that another driver commits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn import KeyedProcess, state
from cairn.errors import RestoreError
from cairn.ids import new_id
from cairn.plan.deploy import job_spec
from cairn.protocol.messages import Begin, Compaction, Part, Token
from cairn.sinks.base import Execution
from cairn.slot import restore as module
from cairn.slot.level import LevelRuntime
from cairn.storage.manifest import Restore
from cairn.storage.store import open_store
from tests.backends import MORE_IN_SOAK, backend_name
from tests.restored import held_contents
from tests.unit.slot.one_level import Checkpoint, held, model
from tests.unit.slot.test_restore import Rows, some_compaction


def checkpoint_on(backend: str, function: KeyedProcess[Any] | None = None) -> Checkpoint:
    checkpoint = Checkpoint(open_store("memory:"), function)
    checkpoint.spec = job_spec(
        checkpoint.graph,
        job_id=new_id(),
        checkpoint=checkpoint.store.url,
        backend=backend_name(backend),
    )
    return checkpoint


def follow(checkpoint: Checkpoint, slots: list[LevelRuntime]) -> Begin:
    """Bring a standby's slots to the newest epoch, as its driver does."""
    leader, checkpoint.parallelism = checkpoint.parallelism, len(slots)
    begin = msgspec.structs.replace(checkpoint.begin(), follows=True)
    checkpoint.parallelism = leader
    for subtask, slot in enumerate(slots):
        slot.restored = False
        slot.follow(begin.token(), begin, subtask)
    return begin


def held_by(slots: list[LevelRuntime]) -> Any:
    return held(slots)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of state that slots read, in order."""
    found: list[str] = []
    real = module.open_rows

    def open_noted(store: Any, ref: Any, scratch: str) -> Any:
        found.append(f"{ref.kind} {ref.first_epoch}-{ref.last_epoch}")
        return real(store, ref, scratch)

    monkeypatch.setattr(module, "open_rows", open_noted)
    return found


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@pytest.mark.parametrize("seed", range(4))
def test_slots_that_follow_hold_the_state_of_the_newest_epoch(
    backend: str, seed: int, tmp_path: Path
) -> None:
    """The leader changes its parallelism, merges files and is rolled back; a slot dies."""
    chance = random.Random(seed)
    checkpoint = checkpoint_on(backend)
    followers = [checkpoint.slot(tmp_path) for _ in range(2)]
    done: dict[int, Rows] = {}
    for parallelism in (2, 3, 1, 2, 4):
        checkpoint.parallelism = parallelism
        slots = [checkpoint.slot(tmp_path) for _ in range(parallelism)]
        for _ in range(chance.randrange(2, 6)):
            parent = checkpoint.newest
            before = [] if parent is None else done[parent.number]
            rows: Rows = [
                (chance.randrange(25), chance.choice([None, *range(5)]))
                for _ in range(chance.choice([0, 1, 20]))
            ]
            compaction = some_compaction(checkpoint, chance)
            epoch = checkpoint.run_batch(slots, rows, compaction)
            done[epoch.number] = before + rows
            if chance.random() < 0.1:
                followers[chance.randrange(2)] = checkpoint.slot(tmp_path)
            if chance.random() < 0.7:
                follow(checkpoint, followers)
                assert held_by(followers) == model(done[epoch.number])
        if chance.random() < 0.5:
            # No later epoch of this lineage counts any more.
            chosen = chance.choice(sorted(done)[-3:])
            term = checkpoint.log.take_over(host="", pid=0, wall_ms=0).term
            checkpoint.log.append(
                lambda number, chosen=chosen, term=term: Restore(  # type: ignore[misc]
                    number=number, term=term, nonce=new_id(), wall_ms=0, epoch=chosen
                )
            )
            checkpoint.term = term
    follow(checkpoint, followers)
    newest = checkpoint.newest
    assert newest is not None
    assert held_by(followers) == model(done[newest.number])


def test_a_slot_reads_only_the_deltas_that_it_lacks(tmp_path: Path, opened: list[str]) -> None:
    checkpoint = checkpoint_on("heap")
    slot, follower = checkpoint.slot(tmp_path), checkpoint.slot(tmp_path)
    first = checkpoint.run_batch([slot], [(k, 1) for k in range(20)])
    checkpoint.run_batch([slot], [(1, 2)])
    follow(checkpoint, [follower])
    assert opened == ["delta 2-2", "delta 3-3"]
    opened.clear()
    # The base is of an epoch that the follower holds already.
    checkpoint.run_batch([slot], [(2, 2)], Compaction("base", 2, 0))
    checkpoint.run_batch([slot], [(3, 3)])
    follow(checkpoint, [follower])
    assert opened == ["delta 4-4", "delta 5-5"]
    opened.clear()
    follow(checkpoint, [follower])
    assert opened == [] and first.number == 2


def test_a_base_of_an_epoch_that_a_slot_never_saw_is_restored(
    tmp_path: Path, opened: list[str]
) -> None:
    checkpoint = checkpoint_on("heap")
    slot, follower = checkpoint.slot(tmp_path), checkpoint.slot(tmp_path)
    rows: Rows = [(k, 1) for k in range(20)]
    checkpoint.run_batch([slot], rows)
    follow(checkpoint, [follower])
    checkpoint.run_batch([slot], [(1, None)])
    checkpoint.run_batch([slot], [(2, 2)], Compaction("base", 2, 0))
    opened.clear()
    follow(checkpoint, [follower])
    assert opened == ["base 2-3", "delta 4-4"]
    assert held_by([follower]) == model([*rows, (1, None), (2, 2)])


def test_the_first_epoch_after_a_takeover_restores_nothing(tmp_path: Path) -> None:
    checkpoint = checkpoint_on("heap")
    slot, follower = checkpoint.slot(tmp_path), checkpoint.slot(tmp_path)
    checkpoint.run_batch([slot], [(1, 1), (2, 2)])
    follow(checkpoint, [follower])
    checkpoint.term = checkpoint.log.take_over(host="", pid=0, wall_ms=0).term
    begin = checkpoint.begin()
    follower.begin(begin.token(), begin, 0)
    assert not follower.restored
    checkpoint.run_batch([follower], [(1, 3)])
    fresh = checkpoint.slot(tmp_path)
    follow(checkpoint, [fresh])
    assert held_by([fresh]) == model([(1, 1), (2, 2), (1, 3)])


def test_a_slot_that_is_an_epoch_behind_at_a_takeover_reads_one_delta(
    tmp_path: Path, opened: list[str]
) -> None:
    checkpoint = checkpoint_on("heap")
    slot, follower = checkpoint.slot(tmp_path), checkpoint.slot(tmp_path)
    checkpoint.run_batch([slot], [(1, 1)])
    follow(checkpoint, [follower])
    checkpoint.run_batch([slot], [(2, 2)])
    checkpoint.term = checkpoint.log.take_over(host="", pid=0, wall_ms=0).term
    opened.clear()
    begin = checkpoint.begin()
    follower.begin(begin.token(), begin, 0)
    assert opened == ["delta 3-3"] and follower.restored
    assert held_by([follower]) == model([(1, 1), (2, 2)])


def test_files_that_are_gone_fail_a_try_and_the_next_one_begins_with_the_newest_epoch(
    tmp_path: Path,
) -> None:
    checkpoint = checkpoint_on("heap")
    slot, follower = checkpoint.slot(tmp_path), checkpoint.slot(tmp_path)
    checkpoint.run_batch([slot], [(1, 1)])
    follow(checkpoint, [follower])
    epoch = checkpoint.run_batch([slot], [(2, 2)])
    (ref,) = (ref for ref in epoch.operators["count"].ranges[0].files if ref.last_epoch == 3)
    content = checkpoint.store.get(ref.path)
    checkpoint.store.delete([ref.path])
    with pytest.raises((RestoreError, OSError)):
        follow(checkpoint, [follower])
    checkpoint.store.put(ref.path, content)
    checkpoint.run_batch([slot], [(3, 3)])
    follow(checkpoint, [follower])
    assert held_by([follower]) == model([(1, 1), (2, 2), (3, 3)])


def test_a_message_without_state_leaves_slots_empty_for_the_takeover(tmp_path: Path) -> None:
    checkpoint = checkpoint_on("heap")
    slot, follower = checkpoint.slot(tmp_path), checkpoint.slot(tmp_path)
    begin = msgspec.structs.replace(checkpoint.begin(), follows=True)
    follower.follow(begin.token(), begin, 0)
    checkpoint.run_batch([slot], [(1, 1)])
    begin = checkpoint.begin()
    follower.begin(begin.token(), begin, 0)
    assert held_by([follower]) == model([(1, 1)]) and follower.restored


class Reminders(KeyedProcess[Any]):
    seen = state.Value("long", default=0, ttl="1 hour")

    def process(self, row: Any, ctx: Any) -> Any:
        self.seen.set(row.v)
        if row.v:
            ctx.timers.processing(row.v)
        else:
            ctx.timers.delete_processing(5_000)

    def on_timer(self, at: int, ctx: Any) -> Any: ...


def test_timers_that_were_set_and_deleted_meanwhile_are_known(tmp_path: Path) -> None:
    checkpoint = checkpoint_on("heap", Reminders())
    slot, follower = checkpoint.slot(tmp_path), checkpoint.slot(tmp_path)
    for rows in ([(1, 5_000), (2, 5_000)], [(3, 7_000)], [(1, 0)]):
        checkpoint.run_batch([slot], rows)  # type: ignore[arg-type]
        follow(checkpoint, [follower])
    timers = follower.operators[0].timers
    assert timers is not None
    assert [timers.processing.of_key(key) for key in (1, 2, 3)] == [[], [5_000], [7_000]]


def test_expired_state_does_not_pile_up_in_slots_that_follow(tmp_path: Path) -> None:
    checkpoint = checkpoint_on("heap", Reminders())
    slot, follower = checkpoint.slot(tmp_path), checkpoint.slot(tmp_path)
    checkpoint.run_batch([slot], [(1, 5_000)])
    follow(checkpoint, [follower])
    assert held_contents(follower.operators[0].tables["seen"])
    begin = msgspec.structs.replace(checkpoint.begin(), follows=True, now_ms=5 * 3_600_000)
    follower.follow(Token(begin.term, begin.epoch, Execution(), 1), begin, 0)
    assert not held_contents(follower.operators[0].tables["seen"])


def test_a_message_of_before_a_takeover_changes_nothing_after_it(tmp_path: Path) -> None:
    checkpoint = checkpoint_on("heap")
    slot, follower = checkpoint.slot(tmp_path), checkpoint.slot(tmp_path)
    checkpoint.run_batch([slot], [(1, 1)])
    late = follow(checkpoint, [follower])
    checkpoint.term = checkpoint.log.take_over(host="", pid=0, wall_ms=0).term
    begin = checkpoint.begin()
    follower.begin(begin.token(), begin, 0)
    with pytest.raises(Exception, match="superseded"):
        follower.follow(late.token(task_attempt=9), late, 0)
    assert isinstance(late.parts[0], Part)
