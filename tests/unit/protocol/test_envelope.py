"""Rows of several lanes travel in shared columns, and come out as they went in."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.protocol.envelope import Envelope
from cairn.types import parse_schema

TYPES = ["bigint", "string", "double", "timestamp", "array<int>", "struct<a: int, b: string>"]


def rows_of(schema: pa.Schema, count: int, seed: int) -> pa.RecordBatch:
    """Rows with some nulls; no two rows are equal."""
    values: dict[str, Any] = {
        "bigint": lambda n: n,
        "string": lambda n: f"ä{n}",
        "double": lambda n: n / 2,
        "timestamp": lambda n: n,
        "array<int>": lambda n: [n, None],
        "struct<a: int, b: string>": lambda n: {"a": n, "b": str(n)},
    }
    types = {parse_schema(f"x {ddl}").field("x").type: make for ddl, make in values.items()}
    columns = [
        pa.array(
            [
                None if (n + at + seed) % 4 == 0 else types[field.type](n + seed)
                for n in range(count)
            ],
            field.type,
        )
        for at, field in enumerate(schema)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def envelope_of(*schemas: str) -> Envelope:
    return Envelope(tuple((3 * n, parse_schema(ddl)) for n, ddl in enumerate(schemas)))


def test_lanes_share_columns_of_equal_types() -> None:
    envelope = envelope_of("k long, s string, n long", "t string, k long, x double, u string")
    assert envelope.names == {0: ("c0", "c1", "c2"), 3: ("c1", "c0", "c3", "c4")}
    assert list(envelope.columns) == ["c0", "c1", "c2", "c3", "c4"]


def test_rows_of_one_lane_need_no_lane_and_no_envelope_is_wider_than_its_rows() -> None:
    assert envelope_of("k long, s string").schema.names == ["c0", "c1", "ack"]
    assert envelope_of().schema.names == ["ack"]
    assert envelope_of("a long", "b long").schema.names == ["lane", "c0", "ack"]


@given(
    st.lists(st.lists(st.sampled_from(TYPES), min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
def test_rows_come_out_of_their_lane_as_they_went_in(
    types: list[list[str]], ways: list[int]
) -> None:
    schemas = [", ".join(f"f{at} {ddl}" for at, ddl in enumerate(each)) for each in types]
    envelope = envelope_of(*schemas)
    lanes = list(envelope.schemas)
    sent: list[tuple[int, Any]] = []
    batches = []
    for seed, way in enumerate(ways):
        lane = lanes[way % len(lanes)]
        rows = rows_of(envelope.schemas[lane], 3, 10 * seed)
        batches.append(envelope.pack(lane, rows))
        sent += [(lane, row) for row in rows.to_pylist()]
    batches.append(envelope.pack_acks(pa.array([b"ack"], pa.binary())))
    mixed = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    assert mixed["ack"].to_pylist() == [None] * len(sent) + [b"ack"]
    found = mixed.slice(0, len(sent))
    for lane in lanes:
        opened = envelope.open(found, lane)
        assert opened.to_pylist() == [row if of == lane else None for of, row in sent]


def test_rows_without_columns_keep_their_number() -> None:
    envelope = Envelope(((0, pa.schema([])), (1, parse_schema("k long"))))
    none = pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([])))
    batch = envelope.pack(0, none)
    assert envelope.open(batch, 0).to_pylist() == [{}, {}]
    assert envelope.open(batch, 1).to_pylist() == [None, None]


def test_columns_of_united_streams_are_found_by_name_and_cast() -> None:
    envelope = envelope_of("k long, t timestamp")
    other = pa.table({"t": pa.array([5], pa.timestamp("us", "Europe/Berlin")), "k": [1]})
    packed = envelope.pack(0, other.to_batches()[0])
    assert packed.schema == envelope.schema
    assert packed["c0"].to_pylist() == [1]


@pytest.mark.parametrize("in_declared_types", [True, False])
def test_types_of_spark_are_kept_unless_rows_are_put_together_with_others(
    in_declared_types: bool,
) -> None:
    envelope = envelope_of("t timestamp")
    spark = pa.timestamp("us", "Europe/Berlin")
    batch = pa.record_batch({"c0": pa.array([5], spark)})
    found = envelope.open(batch, 0, in_declared_types=in_declared_types)
    assert found.type == pa.struct(
        [("t", envelope.schemas[0].field("t").type if in_declared_types else spark)]
    )
