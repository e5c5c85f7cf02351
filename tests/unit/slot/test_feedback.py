"""Records on their way back: one file for the same rows, found again here or in the store."""

from __future__ import annotations

import datetime as dt
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn.driver.coordinator.ranges import ranges_for, replace_state
from cairn.errors import EpochError
from cairn.ids import new_id
from cairn.key_groups import groups_of, key_hasher
from cairn.protocol.messages import Begin, OperatorAck, Part
from cairn.protocol.spec import FeedbackSpec, InletSpec
from cairn.sinks.base import Execution
from cairn.slot.feedback import RECORDS, Feedback, InFlight, feedback_state, take
from cairn.slot.gather import Rows
from cairn.snapshots.reader import EpochReader
from cairn.storage.files import StateFile, encode_segment
from cairn.storage.log import Log
from cairn.storage.manifest import EMPTY_VERSION, Epoch, EpochOperator, RangeState, SparkPosition
from cairn.storage.pack import write_segment
from cairn.storage.store import open_store
from cairn.types import parse_schema

GROUPS = 8
ROW = parse_schema("k long, note string, tags map<string,long>, ts timestamp")


def spec(*, keys: tuple[str, ...] = ("k",), event_time: str | None = None) -> FeedbackSpec:
    inlet = InletSpec(
        lane=1, schema=ROW, keys=keys, event_time=event_time, way="keyed" if keys else "spread"
    )
    fields = tuple(ROW.field(name) for name in keys) or (pa.field("subtask", pa.int32()),)
    return FeedbackSpec("loop:op", "op", inlet, key_fields=fields)


def at(second: int) -> dt.datetime:
    return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=second)


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "k": None if n % 7 == 3 else n % 5,
            "note": None if n % 3 else f"n{n}",
            "tags": [("a", n % 2)] if n % 4 else None,
            "ts": at(50 - n),
        }
        for n in range(count)
    ]


def group_of(key: int | None) -> int:
    return key_hasher([pa.int64()])([key]) % GROUPS


def begin(
    versions: list[str], *, epoch: int = 5, parent: int | None = None, **execution: int
) -> Begin:
    return Begin(
        run_id="r", term=1, now_ms=0, watermark_ms=None, parallelism=len(versions),
        parts={at: Part({"loop:op": version}) for at, version in enumerate(versions)},
        group_count=GROUPS, inline_bytes_max=0, epoch=epoch, execution=Execution(**execution),
        parent=parent,
    )  # fmt: skip


class Slot:
    """Gathers and takes, as the levels of a slot do."""

    def __init__(self, feedback: FeedbackSpec) -> None:
        self.spec = feedback
        self.in_flight = InFlight()
        self.store = open_store("memory:")
        self.log = Log(self.store)
        self.term = self.log.take_over(host="", pid=0, wall_ms=0).term
        self.scratch = ""

    def send_back(self, sent: list[dict[str, Any]], begun: Begin, cut: int = 4) -> StateFile | None:
        gathered = Feedback(self.spec, self.in_flight)
        gathered.begin(0, groups_of(0, begun.parallelism, GROUPS))
        for start in range(0, len(sent), cut):
            some = sent[start : start + cut]
            groups = [group_of(row["k"]) for row in some]
            gathered.run(pa.array(groups, pa.int32()), pa.array(some, pa.struct(list(ROW))))
        records = gathered.finish()
        if not records:
            return None
        segment = encode_segment("base", self.spec.uid, records, first_epoch=5, last_epoch=5)
        gathered.name_version(segment.id, begun)
        return write_segment(self.store, segment, self.term)

    def publish(self, stored: StateFile) -> Epoch:
        """An epoch of one subtask that has sent these back."""
        whole = RangeState(
            first_group=0, group_count=GROUPS, version=EMPTY_VERSION, files=[], state_keys=0,
            state_bytes=0,
        )  # fmt: skip
        ack = OperatorAck("loop:op", 0, 0, 0, stored)
        entry = EpochOperator(
            uid="loop:op",
            function_version="",
            key_types=self.spec.key_types,
            states=feedback_state(self.spec).decls,
            parallelism=1,
            ranges=[replace_state(whole, ack, 5)],
            scope="feedback",
        )
        return self.log.append(
            lambda number: Epoch(
                number=number, parent=None, term=self.term, nonce=new_id(), wall_ms=0, now_ms=0,
                watermarks={}, spark=SparkPosition(folder="", batch_id=0, offsets=""),
                operators={"loop:op": entry},
            )
        )  # fmt: skip

    def take(self, begun: Begin, subtask: int = 0) -> Rows | None:
        groups = groups_of(subtask, begun.parallelism, GROUPS)

        def parent() -> Epoch:
            assert begun.parent is not None
            return self.log.epoch(begun.parent)

        return take(
            self.spec,
            self.in_flight,
            begun,
            begun.parts[subtask].versions[self.spec.uid],
            groups,
            subtask,
            parent,
            self.store,
            self.scratch,
        )


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    made = Slot(spec())
    made.scratch = str(tmp_path)
    return made


def plain(taken: Rows | None) -> list[Any]:
    if taken is None:
        return []
    return list(zip(taken.groups.to_pylist(), taken.rows.to_pylist(), strict=True))


def test_the_same_rows_give_the_same_file_in_whichever_order_they_came(slot: Slot) -> None:
    sent = rows(40)
    begun = begin([EMPTY_VERSION])
    first = slot.send_back(sent, begun)
    for seed in range(5):
        random.Random(seed).shuffle(sent)
        assert slot.send_back(sent, begun, cut=seed + 1) == first


def test_an_attempt_that_sends_nothing_back_stores_nothing(slot: Slot) -> None:
    assert slot.send_back([], begin([EMPTY_VERSION])) is None
    assert slot.take(begin([EMPTY_VERSION])) is None


@pytest.mark.parametrize("event_time", [None, "ts"])
@pytest.mark.parametrize("keys", [("k",), ("k", "note"), ()])
def test_what_is_restored_is_what_was_held_in_the_same_order(
    keys: tuple[str, ...], event_time: str | None, tmp_path: Path
) -> None:
    slot = Slot(spec(keys=keys, event_time=event_time))
    slot.scratch = str(tmp_path)
    stored = slot.send_back(rows(40), begin([EMPTY_VERSION]))
    assert stored is not None
    epoch = slot.publish(stored)
    after = begin([stored.id], epoch=epoch.number + 1, parent=epoch.number)
    held = slot.take(after)
    assert held is not None and len(held.rows) == 40
    slot.in_flight = InFlight()
    restored = slot.take(after)
    assert restored is not None
    assert plain(restored) == plain(held)
    assert (restored.times is None) == (event_time is None)
    if restored.times is not None:
        assert restored.times.to_pylist() == sorted(restored.times.to_pylist())


def test_another_parallelism_gets_each_record_in_the_subtask_of_its_key_group(slot: Slot) -> None:
    stored = slot.send_back(rows(40), begin([EMPTY_VERSION]))
    assert stored is not None
    epoch = slot.publish(stored)
    parts = ranges_for(epoch.operators["loop:op"], 3, GROUPS)
    after = begin([p.version for p in parts], epoch=epoch.number + 1, parent=epoch.number)
    found = [plain(slot.take(after, subtask)) for subtask in range(3)]
    for subtask, taken in enumerate(found):
        assert {group for group, _ in taken} <= set(groups_of(subtask, 3, GROUPS))
    assert sum(map(len, found)) == 40


def test_a_round_whose_records_are_lost_fails_the_attempt(slot: Slot) -> None:
    stored = slot.send_back(rows(3), begin([EMPTY_VERSION]))
    assert stored is not None
    slot.in_flight = InFlight()
    with pytest.raises(EpochError, match="has lost what was sent back to it in round 1"):
        slot.take(begin([stored.id], round=1))


def test_what_no_attempt_names_any_more_is_let_go(slot: Slot) -> None:
    first = slot.send_back(rows(3), begin([EMPTY_VERSION]))
    second = slot.send_back(rows(9), begin([EMPTY_VERSION], attempt=1))
    assert first is not None and second is not None
    assert slot.take(begin([second.id], epoch=6)) is not None
    with pytest.raises(EpochError):
        slot.take(begin([first.id], round=1))


def test_what_was_processed_is_not_held_while_a_loop_rests(slot: Slot) -> None:
    stored = slot.send_back(rows(3), begin([EMPTY_VERSION]))
    assert stored is not None
    assert slot.take(begin([stored.id], epoch=6)) is not None
    assert slot.take(begin([EMPTY_VERSION], epoch=7)) is None
    assert slot.in_flight.get("loop:op", stored.id, begin([stored.id], epoch=8)) is None


def test_what_this_very_attempt_sends_back_is_kept_while_its_input_is_read_again(
    slot: Slot,
) -> None:
    """Spark may run a stage again when later ones are done."""
    first = slot.send_back(rows(3), begin([EMPTY_VERSION]))
    assert first is not None
    during = begin([first.id], epoch=6)
    second = slot.send_back(rows(9), during)
    assert second is not None
    assert slot.take(during) is not None
    assert len(plain(slot.take(begin([second.id], epoch=6, round=1)))) == 9


def test_records_are_stored_as_state_of_their_keys(slot: Slot) -> None:
    stored = slot.send_back(rows(10), begin([EMPTY_VERSION]))
    assert stored is not None
    with EpochReader(slot.store, slot.publish(stored)) as reader:
        # The name of the loop is enough.
        found = [row for batch in reader.rows("loop", RECORDS) for row in batch.to_pylist()]
    assert len(found) == 10
    assert all(row["key"] == row["value"]["k"] for row in found)
