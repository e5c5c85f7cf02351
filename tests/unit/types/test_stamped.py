"""Values stored with the time they were written."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cairn.types.codec.stamped import join_stamps, split_stamps, stamp_codec


@pytest.mark.parametrize("type", ["long", "string", "struct<a:long not null,b:string>", "object"])
def test_stamped_values_come_apart_and_together(type: str) -> None:
    codec = stamp_codec(type)
    values = {
        "long": 5, "string": "x", "object": b"\x80", "struct<a:long not null,b:string>": (1, "y"),
    }  # fmt: skip
    pairs = [(1, values[type]), None, (3, None), (4, values[type])]
    array = codec.encode(pairs)
    live = array.is_valid()
    assert codec.decode(join_stamps(*split_stamps(array), live)) == pairs
    assert codec.decode(join_stamps(*split_stamps(array.slice(1)), live.slice(1))) == pairs[1:]
    lists = pa.ListArray.from_arrays([0, 2, 2, 4], codec.encode([pairs[0], pairs[3]] * 2))
    again = join_stamps(*split_stamps(lists.slice(1)), None)
    assert codec.decode(again.flatten()) == [pairs[0], pairs[3]]
    assert again.value_lengths().to_pylist() == [0, 2]


def test_what_is_packed_for_rocksdb_comes_back() -> None:
    for type, value in {"long": 5, "date": None, "struct<a:long>": (1,)}.items():
        codec = stamp_codec(type)
        assert codec.unpack(list(codec.pack((7, value)))) == (7, value)
