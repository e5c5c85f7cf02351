from __future__ import annotations

import msgspec
import pytest

from cairn.errors import CorruptFileError, EpochError
from cairn.protocol.messages import Begin, Compaction, Part, Piece, begin_decoder, begin_encoder
from cairn.protocol.parts import INLINE_BYTES_MAX, for_subtask, move_parts, read_part
from cairn.sinks.base import Execution
from cairn.slot.parts import Parts
from cairn.storage.store import Store, open_store
from cairn.testing import FaultyStore

PATH = "pending/parts"


def part_of(subtask: int) -> Part:
    versions = {f"op-{n}": f"{subtask:030d}{n:02d}" for n in range(10)}
    if subtask % 3:
        return Part(versions)
    pieces = {"op-1": [Piece(0, 5, "p"), Piece(5, subtask, "q")]}
    return Part(versions, {"op-0": Compaction("base", subtask, 0)}, pieces, ["s"] * subtask)


def begin_of(parallelism: int) -> Begin:
    return Begin(
        run_id="r", term=1, epoch=5, execution=Execution(), parent=4, now_ms=7, watermark_ms=3,
        parallelism=parallelism, group_count=32_768, inline_bytes_max=9,
        parts={subtask: part_of(subtask) for subtask in range(parallelism)},
    )  # fmt: skip


def moved(begin: Begin, store: Store, **limit: int) -> Begin:
    def put(data: bytes) -> str:
        store.put(PATH, data)
        return PATH

    return begin_decoder.decode(begin_encoder.encode(move_parts(begin, put, **limit)))


@pytest.fixture
def store() -> Store:
    return open_store("memory:")


def test_small_jobs_need_no_object(store: Store) -> None:
    begin = begin_of(4)
    assert moved(begin, store) == begin
    assert not store.list("pending")


def test_size_of_what_a_task_carries_does_not_depend_on_parallelism(store: Store) -> None:
    sizes = {
        len(begin_encoder.encode(moved(begin_of(parallelism), store)))
        for parallelism in (100, 400, 900)
    }
    # The number of digits of the parallelism and of the records' length.
    assert max(sizes) - min(sizes) <= 4
    assert max(sizes) < 500
    inline = begin_encoder.encode(moved(begin_of(10), store))
    assert len(inline) < 2 * INLINE_BYTES_MAX


def test_every_subtask_reads_its_own_part_from_an_object(store: Store) -> None:
    begin = begin_of(100)
    sent = moved(begin, store)
    assert sent.parts == {} and sent.parts_at is not None
    assert {subtask: read_part(sent, subtask, store) for subtask in range(100)} == begin.parts


def test_forwarder_passes_on_the_part_of_its_subtask_only(store: Store) -> None:
    begin = begin_of(4)
    assert for_subtask(begin, 2).parts == {2: part_of(2)}
    sent = moved(begin, store, bytes_max=0)
    assert for_subtask(sent, 2) == sent


def test_levels_of_an_execution_share_one_read() -> None:
    faulty = FaultyStore(open_store("memory:"))
    sent = moved(begin_of(4), faulty, bytes_max=0)
    parts = Parts()
    first = parts.read(sent, 3, faulty)
    faulty.delete([PATH])
    assert parts.read(sent, 3, faulty) is first
    with pytest.raises(EpochError, match="is gone"):
        parts.read(sent, 2, faulty)


def test_part_of_another_execution_is_not_used_again(store: Store) -> None:
    parts = Parts()
    sent = moved(begin_of(4), store, bytes_max=0)
    parts.read(sent, 3, store)
    assert sent.parts_at is not None
    later = msgspec.structs.replace(sent.parts_at, path="pending/later")
    store.put("pending/later", store.get(PATH))
    store.delete([PATH])
    assert parts.read(msgspec.structs.replace(sent, parts_at=later), 3, store) == part_of(3)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"x" + data[1:]])
def test_damaged_object_is_refused(store: Store, change: object) -> None:
    sent = moved(begin_of(2), store, bytes_max=0)
    store.put(PATH, change(store.get(PATH)))  # type: ignore[operator]
    with pytest.raises(CorruptFileError, match="damaged"):
        for subtask in range(2):
            read_part(sent, subtask, store)
