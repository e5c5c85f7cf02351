"""Formats: what is written comes back, and what could not is refused."""

from __future__ import annotations

import base64
import datetime as dt
import gzip
import io
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.errors import CommitError, PlanError
from cairn.sinks import Files
from cairn.sinks.base import SinkContext
from cairn.sinks.files.formats import make_format
from cairn.sinks.json_lines import LinesEncoder, interval_text
from cairn.types import parse_schema

FLAT = parse_schema(
    "b boolean, y tinyint, l bigint, f float, d double, s string, day date, at timestamp, "
    "local timestamp_ntz, price decimal(20,5)"
)
_TIMES = st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31))
_VALUES = {
    "b": st.booleans(),
    "y": st.integers(-128, 127),
    "l": st.integers(-(2**63), 2**63 - 1),
    "f": st.floats(width=32),
    "d": st.floats(),
    # Arrow's reader, unlike Spark's, takes NUL for the end of a number; CSV has it in text.
    "s": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    "day": st.dates(),
    "at": _TIMES.map(lambda t: t.replace(tzinfo=dt.UTC)),
    "local": _TIMES,
    "price": st.decimals(-(10**14), 10**14, places=5),
}
_ROWS = st.lists(
    st.fixed_dictionaries({name: st.none() | values for name, values in _VALUES.items()}),
    min_size=1,
    max_size=6,
)


def test_merged_parquet_files_have_one_row_group(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pylist([{"a": 1}, {"a": 2}])
    content = written("parquet", [batch], tmp_path / "one")
    make_format("parquet", None, header=True).merge(str(tmp_path / "merged"), [content] * 20)
    merged = pq.ParquetFile(tmp_path / "merged")
    assert merged.num_row_groups == 1
    assert merged.read()["a"].to_pylist() == [1, 2] * 20


def written(format: str, batches: list[pa.RecordBatch], path: Path, **options: Any) -> bytes:
    made = make_format(format, options.get("compression"), header=options.get("header", True))
    file = made.open(str(path), batches[0].schema)
    for batch in batches:
        file.write(batch)
    file.close()
    return path.read_bytes()


def same(left: Any, right: Any) -> bool:
    return left == right or (left != left and right != right)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(rows=_ROWS)
def test_every_value_comes_back_from_every_format(
    rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "format"
    batch = pa.RecordBatch.from_pylist(rows, schema=FLAT)
    expected = batch.to_pylist()
    for format in ("parquet", "json", "csv"):
        data = written(format, [batch, batch.slice(0, 1)], path)
        if format == "parquet":
            found = pq.read_table(pa.BufferReader(data)).to_pylist()
        elif format == "json":
            found = [_from_json(json.loads(line, parse_float=str)) for line in data.splitlines()]
        else:
            found = _read_csv(data)
        for one, other in zip(found, [*expected, expected[0]], strict=True):
            assert {n: v for n, v in one.items() if not same(v, other[n])} == {}, format


def _read_csv(data: bytes) -> list[dict[str, Any]]:
    convert = pyarrow.csv.ConvertOptions(
        column_types=FLAT, strings_can_be_null=True, quoted_strings_can_be_null=False,
        null_values=[""],
    )  # fmt: skip
    # Arrow's reader knows no `-Inf`, Spark's does.
    data = data.replace(b'"-Inf"', b'"-inf"').replace(b'"Inf"', b'"inf"')
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    rows = pyarrow.csv.read_csv(io.BytesIO(data), convert_options=convert, parse_options=parse)
    return rows.to_pylist()


def _from_json(row: dict[str, Any]) -> dict[str, Any]:
    def parsed(name: str, value: Any) -> Any:
        if value is None or name in "bys":
            return value
        if name in ("f", "d"):
            return float(value)
        if name == "price":
            return Decimal(value)
        if name == "day":
            return dt.date.fromisoformat(value)
        if name in ("at", "local"):
            time = dt.datetime.fromisoformat(value)
            assert (time.tzinfo is not None) == (name == "at")
            return time
        return value

    assert None not in row.values()
    return {name: parsed(name, row.get(name)) for name in FLAT.names}


def test_nested_values_are_written_as_spark_reads_them() -> None:
    schema = parse_schema(
        "a array<struct<x:double,at:timestamp>>, m map<string,array<binary>>, "
        "s struct<`a b`:int,t:struct<u:string>>, took interval day to second"
    )
    at = dt.datetime(2026, 1, 31, 10, 0, 0, 5, dt.UTC)
    rows = [
        {"a": [{"x": math.nan, "at": at}, None, {"x": -math.inf, "at": None}],
         "m": {"k": [b"\x00\xff", None], "l": None}, "s": {"a b": 1, "t": {"u": "\n\"é"}},
         "took": -dt.timedelta(days=1, microseconds=1)},
        {"a": [], "m": {}, "s": {"a b": None, "t": None}, "took": None},
        {"a": None, "m": None, "s": None, "took": None},
    ]  # fmt: skip
    batch = pa.RecordBatch.from_pylist([{}, *rows], schema=schema).slice(1)
    lines = LinesEncoder(schema).encode(batch).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"a": [{"x": "NaN", "at": "2026-01-31T10:00:00.000005Z"}, None, {"x": "-Infinity"}],
         "m": {"k": [base64.b64encode(b"\x00\xff").decode(), None], "l": None},
         "s": {"a b": 1, "t": {"u": "\n\"é"}},
         "took": "INTERVAL '-1 00:00:00.000001' DAY TO SECOND"},
        {"a": [], "m": {}, "s": {}},
        {},
    ]  # fmt: skip


def test_intervals_have_days_and_a_time_of_day() -> None:
    us = 2 * 86_400_000_000 + 3 * 3_600_000_000 + 4 * 60_000_000 + 5_000_006
    assert interval_text(us) == "INTERVAL '2 03:04:05.000006' DAY TO SECOND"


def test_huge_values_are_written(tmp_path: Path) -> None:
    text = 'x\n"' * 3_000_000
    batch = pa.RecordBatch.from_pylist([{"l": 1, "s": text}], parse_schema("l bigint, s string"))
    data = written("json", [batch], tmp_path / "f")
    assert json.loads(data) == {"l": 1, "s": text}
    data = written("csv", [batch], tmp_path / "f")
    assert data == b'"l","s"\n1,"' + text.replace('"', '""').encode() + b'"\n'


@pytest.mark.parametrize("format", ["json", "csv"])
def test_compressed_files_are_equal_for_equal_rows(tmp_path: Path, format: str) -> None:
    batch = pa.RecordBatch.from_pylist([{"l": 1, "s": "a"}], parse_schema("l bigint, s string"))
    one = written(format, [batch], tmp_path / "one", compression="gzip")
    other = written(format, [batch], tmp_path / "other", compression="gzip")
    assert one == other
    assert gzip.decompress(one) == written(format, [batch], tmp_path / "plain")


def test_a_header_with_line_breaks_is_one_header(tmp_path: Path) -> None:
    schema = pa.schema([('a\n"b', pa.int64()), ("c", pa.int64())])
    files = [
        written("csv", [pa.RecordBatch.from_arrays([[n], [n]], schema=schema)], tmp_path / "f")
        for n in range(2)
    ]
    format = make_format("csv", None, header=True)
    format.merge(str(tmp_path / "merged"), files)
    assert (tmp_path / "merged").read_bytes() == b'"a\n""b","c"\n0,0\n1,1\n'
    with pytest.raises(CommitError, match="different schemas"):
        format.merge(str(tmp_path / "merged"), [files[0], b'"z"\n1\n'])


@pytest.mark.parametrize(
    ("format", "ddl", "why"),
    [
        ("csv", "a bigint, b array<int>", "column 'b' is nested"),
        ("csv", "a bigint, b struct<x:int>", "column 'b' is nested"),
        ("csv", "a bigint, b binary", "column 'b' is binary"),
        ("csv", "a string", "an empty line"),
        ("json", "a map<int,string>", "column 'a' has a map with keys of type int32"),
        ("json", "a array<struct<m:map<date,int>>>", "keys of type date32"),
    ],
)
def test_what_cannot_be_told_apart_later_is_refused(
    tmp_path: Path, format: str, ddl: str, why: str
) -> None:
    sink = Files(str(tmp_path), format=format)
    with pytest.raises(PlanError, match=why):
        sink.open(SinkContext("job", "j", "out", parse_schema(ddl)))


def test_a_column_may_have_any_name_in_json(tmp_path: Path) -> None:
    for code in (*range(0x250), 0x2028, 0xFFFF, 0x1F600):
        schema = pa.schema([(f"a{chr(code)}", pa.int64())])
        batch = pa.RecordBatch.from_arrays([[1]], schema=schema)
        assert json.loads(written("json", [batch], tmp_path / "x")) == {schema.names[0]: 1}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"format": "orc"}, "unknown format 'orc'"),
        ({"compression": "brotli"}, "unknown compression 'brotli' of parquet"),
        ({"format": "json", "compression": "snappy"}, "use one of none, gzip"),
        ({"file_bytes_target": 0}, "must be positive"),
    ],
)
def test_settings_are_checked_at_once(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        Files("out", **settings)
