"""Changes of key groups: fenced, in one piece or many, and applied once."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.backends.cached.numbers import PREFIX
from cairn.backends.redis import database as database_module
from cairn.backends.redis import writer as writer_module
from cairn.backends.redis.database import LostStateError, RedisDatabase
from cairn.backends.redis.link import Link, address_of
from cairn.backends.redis.writer import FencedError, Writer, claim
from cairn.errors import EpochError
from cairn.ids import new_id
from tests import servers
from tests.backends import backend_name

NUMBERS = {"s": 77, "t": 78}


class Slot:
    """A slot that owns key groups 0 and 1 of a job."""

    def __init__(self, job_id: str = "", term: int = 1, epoch: int = 1) -> None:
        self.job_id = job_id or new_id()
        self.owner = new_id()
        self.link = Link(address_of(backend_name("redis")), "test")
        self.database = RedisDatabase(self.link, self.job_id, "op", dict(NUMBERS))
        self.claimed = claim(self.link, self.job_id, "op", [0, 1], term, epoch, self.owner)

    def take_over(self) -> None:
        self.database.markers = {group: each.marker for group, each in self.claimed.items()}

    def writer(self, marker: str) -> Writer:
        return Writer(self.link, self.database, self.owner, [0, 1], marker, lambda: None)

    def write(self, marker: str, rows: dict[str, str | None], state: str = "s") -> None:
        writer = self.writer(marker)
        self.add(writer, rows, state)
        writer.finish({0: {77: (len(rows), len(rows))}})
        writer.end(is_written=True)

    def add(self, writer: Writer, rows: dict[str, str | None], state: str = "s") -> None:
        head = PREFIX.pack(0, NUMBERS[state])
        writer.add(
            [(head + k.encode(), None if v is None else v.encode()) for k, v in rows.items()]
        )

    def read(self, state: str = "s") -> dict[str, str]:
        prefix = self.database.prefix(state, 0)
        found = {k[6:].decode(): v.decode() for k, v in self.database.scan(prefix)}
        names = [prefix + name.encode() for name in found]
        assert [v and v.decode() for v in self.database.get_many(names)] == list(found.values())
        assert list(found) == sorted(found)
        return found


def test_rows_are_put_changed_and_deleted() -> None:
    slot = Slot()
    slot.write("1:a", {"x": "1", "y": "2", "": "empty"})
    slot.write("2:b", {"x": "3", "y": None, "nobody": None})
    assert slot.read() == {"": "empty", "x": "3"}
    slot.database.check()


def test_a_scan_begins_anywhere_and_ends_with_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.backends.redis.database.PAGE_ROWS", 3)
    slot = Slot()
    slot.write("1:a", {f"k{n}": "v" for n in range(8)} | {"j": "v", "l": "v"})
    slot.write("2:b", {"k": "other"}, "t")
    head = slot.database.prefix("s", 0)
    found = [key[6:] for key, _ in slot.database.scan(head + b"k", head + b"k5")]
    assert found == [b"k5", b"k6", b"k7"]
    assert len(slot.read()) == 10 and slot.read("t") == {"k": "other"}


def test_pages_of_many_prefixes_come_in_one_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot()
    slot.write("1:a", {f"k{n}": "v" for n in range(8)})
    slot.write("2:b", {"k": "other"}, "t")
    database = slot.database
    first, second = database.prefix("s", 0), database.prefix("t", 0)
    nothing, unknown = database.prefix("s", 1), database.prefix("s", 5)
    starts = [(first, b"k2"), (second, b""), (nothing, b""), (unknown, b"k"), (first, b"k9")]
    expected = [
        ([b"k2", b"k3", b"k4"], b"k4"),
        ([b"k"], None),
        ([], None),
        ([], None),
        ([], None),
    ]
    trips: list[int] = []
    call = slot.link.call
    monkeypatch.setattr(slot.link, "call", lambda some: (trips.append(len(some)), call(some))[1])
    assert database.read_pages(starts, 3) == expected
    assert trips == [4], "what the slot does not have is not asked for"
    # More than Redis reads at a time.
    monkeypatch.setattr("cairn.backends.redis.database.PAGE_ROWS", 2)
    assert database.read_pages(starts, 3) == expected
    names = [f"k{n}".encode() for n in range(8)]
    assert database.read_pages([(first, b"")], 8) == [(names, b"k7")]
    assert database.read_pages([(first, b"")], 9) == [(names, None)]


def test_pages_of_rows_that_redis_has_lost_are_refused() -> None:
    slot = Slot()
    slot.write("1:a", {"x": "1"})
    slot.link.call([["DEL", *slot.database.keys(0)]])
    with pytest.raises(LostStateError):
        slot.database.read_pages([(slot.database.prefix("s", 0), b"")], 3)


def test_a_large_change_goes_in_pieces_and_reads_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "PIECE_OPS", 2)
    slot = Slot()
    slot.write("1:a", {"x": "old"})
    writer = slot.writer("2:b")
    slot.add(writer, {f"k{n}": "v" for n in range(5)})
    assert len(slot.read()) == 5, "the slot that writes may read between two pieces"
    other = Slot(slot.job_id, term=2)
    marker = other.claimed[0].marker
    assert marker.startswith("~"), "nobody takes it for an epoch"
    with pytest.raises(LostStateError):
        writer.finish({})
    other.write("3:c", {"z": "1"})
    assert other.read() == {"z": "1"}, "what was unfinished is replaced"


def test_no_command_grows_with_the_size_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BUFFERED_BYTES_MAX", 1000)
    sizes: list[int] = []
    call = writer_module.call

    def measured(link: Link, commands: list[list[Any]], *scripts: Any) -> Any:
        sizes.append(sum(len(str(word)) for command in commands for word in command))
        return call(link, commands, *scripts)

    slot = Slot()
    monkeypatch.setattr(writer_module, "call", measured)
    rows: dict[str, str | None] = {f"k{n}": "v" * 300 for n in range(20)}
    slot.write("1:a", rows)
    assert slot.read() == rows
    assert max(sizes) < 3000, sizes


def test_a_piece_that_is_sent_twice_changes_nothing() -> None:
    slot = Slot()
    sent = []
    call = writer_module.call

    def send_twice(*args: object) -> object:
        sent.append(call(*args))  # type: ignore[arg-type]
        return call(*args)  # type: ignore[arg-type]

    slot.write("1:a", {"x": "1"})
    writer_module.call = send_twice  # type: ignore[assignment]
    try:
        slot.write("2:b", {"x": "2"})
    finally:
        writer_module.call = call
    assert sent and slot.read() == {"x": "2"}


def test_a_replacement_replaces_rows_of_its_own_epoch_too() -> None:
    old = Slot()
    old.write("1:a", {"x": "1", "y": "2"})
    new = Slot(old.job_id, term=2)
    assert new.claimed[0].marker == "1:a"
    # It does not take the rows: a state has another type, and so another number.
    new.write("1:a", {"x": "one"}, "t")
    assert new.read("t") == {"x": "one"} and new.read() == {}
    new.database.check()


def test_an_older_term_or_epoch_claims_nothing() -> None:
    slot = Slot(term=3, epoch=7)
    for term, epoch in ((2, 9), (3, 6)):
        with pytest.raises(FencedError):
            Slot(slot.job_id, term, epoch)
    slot.write("1:a", {"x": "1"})
    assert slot.read() == {"x": "1"}


def test_a_slot_whose_key_groups_were_claimed_writes_nothing() -> None:
    old = Slot()
    old.write("1:a", {"x": "1"})
    new = Slot(old.job_id, term=2)
    new.take_over()
    with pytest.raises(LostStateError):
        old.write("2:b", {"x": "zombie"})
    assert new.read() == {"x": "1"}
    new.write("3:c", {"x": "2"})
    with pytest.raises(LostStateError, match="found 3:c"):
        old.read()


def test_rows_of_a_state_that_was_dropped_are_neither_read_nor_kept() -> None:
    slot = Slot()
    slot.write("1:a", {"x": "1"})
    slot.write("2:b", {"y": "1"}, "t")
    slot.database.hidden[0] = {NUMBERS["s"]}
    assert slot.read() == {} and slot.read("t") == {"y": "1"}
    slot.write("3:c", {"z": "2"})
    assert slot.read() == {"z": "2"} and slot.read("t") == {"y": "1"}
    slot.database.check()


def test_a_script_that_fails_half_way_leaves_no_epoch() -> None:
    slot = Slot()
    slot.write("1:a", {"x": "1"})
    client = servers.redis_server().client()
    names = slot.database.keys(0)[1]
    client.delete(names)
    client.set(names, "not a sorted set")
    with pytest.raises(
        EpochError, match=r"redis://.* refused a command .*WRONGTYPE.*\n  next: let"
    ):
        slot.write("2:b", {"new": "1"})
    client.close()
    with pytest.raises(LostStateError):
        slot.database.get(slot.database.prefix("s", 0) + b"x")


def test_scripts_are_loaded_again_when_redis_forgets_them() -> None:
    slot = Slot()
    slot.write("1:a", {"x": "1"})
    client = servers.redis_server().client()
    client.script_flush()
    client.close()
    slot.write("2:b", {"x": "2"})
    assert slot.read() == {"x": "2"}


def test_a_row_counter_that_differs_is_a_loss() -> None:
    slot = Slot()
    slot.write("1:a", {"x": "1", "y": "2"})
    client = servers.redis_server().client()
    client.zrem(slot.database.keys(0)[1], PREFIX.pack(0, 77)[2:] + b"x")
    client.close()
    with pytest.raises(LostStateError):
        slot.database.check()
    assert slot.database.is_lost


def test_an_answer_that_is_overtaken_by_a_writer_is_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slot = Slot()
    slot.write("1:a", {"x": "1"})
    call = database_module.call

    def overtaken(*args: Any) -> Any:
        answers = call(*args)
        monkeypatch.undo()
        slot.write("2:b", {"x": "2"})
        return answers

    monkeypatch.setattr(database_module, "call", overtaken)
    # The caller has seen before that `x` is about to change.
    assert slot.database.get(slot.database.prefix("s", 0) + b"x") == b"1"
    assert slot.read() == {"x": "2"} and not slot.database.is_lost


def test_a_check_that_a_writer_comes_before_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot()
    slot.write("1:a", {"x": "1"})
    call = database_module.call

    def too_late(*args: Any) -> Any:
        monkeypatch.undo()
        slot.write("2:b", {"x": "2"})
        return call(*args)

    monkeypatch.setattr(database_module, "call", too_late)
    slot.database.check()
    assert slot.read() == {"x": "2"} and not slot.database.is_lost
