"""The JSON that others read in PostgreSQL."""

from __future__ import annotations

from typing import Any

import msgspec
import psycopg
import pytest

from cairn.backends.postgres.layout import create_tables
from cairn.backends.versioned.contract import place_of
from cairn.ids import new_id
from tests.backends import backend_name

pack = msgspec.msgpack.encode

VALUES: list[Any] = [
    None, True, False, 0, 127, 128, 65_536, 1 << 40, -1, -32, -33, -129, -40_000, -(1 << 40),
    (1 << 63) - 1, -(1 << 63), 0.0, 1.5, -2.25, 1e300, 5e-324, "", "é", "x" * 40, "x" * 70_000,
    [], [1, [2, "a"], None], list(range(20)), [[1, "a"], [2, "b"]],
]  # fmt: skip


def test_unpack_makes_json_of_every_packed_value() -> None:
    schema = place_of(new_id())
    with psycopg.connect(backend_name("postgres"), autocommit=True) as connection:
        create_tables(connection, schema)
        for value in VALUES:
            (found,) = connection.execute(
                f"select {schema}.unpack(%s)",
                [pack(value)],  # type: ignore[arg-type]
            ).fetchone() or (None,)
            assert (found == value and type(found) is type(value)) or found == pytest.approx(value)
        shown = f"select {schema}.unpack(%s)"
        for value, text in [(float("inf"), "Infinity"), (float("nan"), "NaN"), (b"\x01", "01")]:
            (found,) = connection.execute(shown, [pack(value)]).fetchone() or (None,)  # type: ignore[arg-type]
            assert found == text
