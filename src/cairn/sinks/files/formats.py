"""The formats of the `Files` sink: Parquet, JSON lines, CSV.

CSV follows RFC 4180: text is quoted, a quote is doubled, null is empty and the empty string is
`""`. Spark reads it with `header`, `escape='"'`, a `nullValue` that does not occur (by default
it reads `""` as null) and, for line breaks in values, `multiLine`. In Parquet, Spark reads a
duration as a number of microseconds.

Always true here:
- equal batches give equal bytes, so a file can be named by its content;
- a schema whose values would be ambiguous in the format is refused before the first row.
"""

from __future__ import annotations

import gzip
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from cairn.errors import CommitError, PlanError
from cairn.sinks.json_lines import LinesEncoder, as_text, interval_text, why_not_json

_MERGED_GROUP_BYTES: Final = 64 << 20


class FileWriter(ABC):
    """Writes one local file."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Format(ABC):
    """A kind of file, with its settings."""

    name: ClassVar[str]
    compressions: ClassVar[dict[str, str]]
    """The compressions, each with the extension of its files.

    Files with equal extensions can be merged, whatever the settings of the sink are now.
    """

    def __init__(self, compression: str) -> None:
        self.compression = compression
        self.extension = self.compressions[compression]

    @abstractmethod
    def check(self, schema: pa.Schema) -> str | None:
        """Return why rows of this schema cannot be written, or None."""

    @abstractmethod
    def open(self, local_path: str, schema: pa.Schema) -> FileWriter: ...

    @abstractmethod
    def merge(self, local_path: str, contents: Iterable[bytes]) -> None:
        """Write one file with the rows of several, in order."""


class Parquet(Format):
    name = "parquet"
    compressions: ClassVar = dict.fromkeys(("snappy", "zstd", "gzip", "lz4", "none"), ".parquet")

    def check(self, schema: pa.Schema) -> str | None:
        return None

    def open(self, local_path: str, schema: pa.Schema) -> FileWriter:
        return _ParquetFile(local_path, schema, self.compression)

    def merge(self, local_path: str, contents: Iterable[bytes]) -> None:
        writer: pq.ParquetWriter | None = None
        # Readers gain by this: many small row groups become one.
        waiting: list[pa.Table] = []
        try:
            for content in contents:
                file = pq.ParquetFile(pa.py_buffer(content))
                if writer is None:
                    schema = file.schema_arrow
                    writer = pq.ParquetWriter(local_path, schema, compression=self.compression)
                elif file.schema_arrow != schema:
                    raise _differs(str(file.schema_arrow), str(schema))
                waiting.append(file.read())
                if sum(table.nbytes for table in waiting) >= _MERGED_GROUP_BYTES:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting.clear()
            if writer is not None and waiting:
                writer.write_table(pa.concat_tables(waiting))
        finally:
            if writer is not None:
                writer.close()


class _ParquetFile(FileWriter):
    def __init__(self, local_path: str, schema: pa.Schema, compression: str) -> None:
        self._writer = pq.ParquetWriter(local_path, schema, compression=compression)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()


class Json(Format):
    name = "json"
    compressions: ClassVar = {"none": ".json", "gzip": ".json.gz"}

    def check(self, schema: pa.Schema) -> str | None:
        for field in schema:
            why = why_not_json(field.type)
            if why is not None:
                return f"column {field.name!r} has {why}"
        return None

    def open(self, local_path: str, schema: pa.Schema) -> FileWriter:
        return _JsonFile(_stream(local_path, self.compression), schema)

    def merge(self, local_path: str, contents: Iterable[bytes]) -> None:
        # Concatenated gzip files are a gzip file.
        with open(local_path, "wb") as out:
            for content in contents:
                out.write(content)


class _JsonFile(FileWriter):
    def __init__(self, out: Any, schema: pa.Schema) -> None:
        self._out = out
        self._encoder = LinesEncoder(schema)

    def write(self, batch: pa.RecordBatch) -> None:
        self._out.write(self._encoder.encode(batch))

    def close(self) -> None:
        self._out.close()


class Csv(Format):
    name = "csv"
    compressions: ClassVar = {"none": ".csv", "gzip": ".csv.gz"}

    def __init__(self, compression: str, header: bool) -> None:
        super().__init__(compression)
        self.header = header
        if not header:
            self.extension = f".noheader{self.extension}"

    def check(self, schema: pa.Schema) -> str | None:
        for field in schema:
            if pa.types.is_nested(field.type):
                return f"column {field.name!r} is nested, and CSV has no form for that"
            if pa.types.is_binary(field.type):
                return f"column {field.name!r} is binary, and CSV is text"
        if len(schema) == 1 and schema.field(0).nullable:
            return "a null in the only column would be an empty line, which readers skip"
        return None

    def open(self, local_path: str, schema: pa.Schema) -> FileWriter:
        return _CsvFile(_stream(local_path, self.compression), schema, header=self.header)

    def merge(self, local_path: str, contents: Iterable[bytes]) -> None:
        first: bytes | None = None
        with _stream(local_path, self.compression) as out:
            for content in contents:
                data = content
                if self.compression == "gzip":
                    data = gzip.decompress(content)
                start = 0
                if self.header:
                    start = _header_end(data)
                    if first is None:
                        first = data[:start]
                        out.write(first)
                    elif data[:start] != first:
                        raise _differs(repr(data[:start]), repr(first))
                out.write(data[start:])


class _CsvFile(FileWriter):
    def __init__(self, out: Any, schema: pa.Schema, *, header: bool) -> None:
        self._out = out
        self._schema = pa.schema([(field.name, _csv_type(field.type)) for field in schema])
        options = pyarrow.csv.WriteOptions(include_header=header)
        self._writer = pyarrow.csv.CSVWriter(out, self._schema, write_options=options)

    def write(self, batch: pa.RecordBatch) -> None:
        columns = [_csv_column(column) for column in batch.columns]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()
        self._out.close()


def _csv_type(type: pa.DataType) -> pa.DataType:
    """Return the type that Arrow writes: its own for numbers and booleans, text for others."""
    is_plain = pa.types.is_integer(type) or pa.types.is_boolean(type) or pa.types.is_decimal(type)
    return type if is_plain else pa.string()


def _csv_column(array: pa.Array) -> pa.Array:
    type = array.type
    if pa.types.is_floating(type):
        text = array.cast(pa.string())
        if pc.all(pc.is_finite(array)).as_py() in (True, None):
            return text
        for arrow, spark in (("nan", "NaN"), ("-nan", "NaN"), ("inf", "Inf"), ("-inf", "-Inf")):
            text = pc.if_else(pc.equal(text, arrow), spark, text)
        return text
    if pa.types.is_timestamp(type) or pa.types.is_date(type):
        return as_text(array)
    if pa.types.is_duration(type):
        counts = array.cast(pa.int64()).to_pylist()
        return pa.array([None if us is None else interval_text(us) for us in counts], pa.string())
    return array


def _header_end(data: bytes) -> int:
    """Return the end of the first record, after its line break; quoted line breaks do not count."""
    position = 0
    while True:
        end = data.find(b"\n", position)
        if end < 0:
            return len(data)
        if data.count(b'"', 0, end) % 2 == 0:
            return end + 1
        position = end + 1


class _Gzip(gzip.GzipFile):
    """A gzip file without name and time in its header: equal rows give equal bytes."""

    def __init__(self, local_path: str) -> None:
        self._file = open(local_path, "wb")  # noqa: SIM115
        super().__init__("", "wb", compresslevel=6, fileobj=self._file, mtime=0)

    def close(self) -> None:
        super().close()
        self._file.close()


def _stream(local_path: str, compression: str) -> Any:
    return _Gzip(local_path) if compression == "gzip" else pa.OSFile(local_path, "wb")


def _differs(found: str, expected: str) -> CommitError:
    return CommitError(
        f"files of different schemas are not merged\n  found: {found}\n  expected: {expected}"
    )


FORMATS: Final[Sequence[type[Format]]] = (Parquet, Json, Csv)
_DEFAULT: Final = {"parquet": "snappy", "json": "none", "csv": "none"}


def make_format(name: str, compression: str | None, *, header: bool) -> Format:
    """Return the format of this name, or raise PlanError."""
    kinds = {kind.name: kind for kind in FORMATS}
    kind = kinds.get(name)
    if kind is None:
        raise PlanError(f"unknown format {name!r} of files\n  next: use one of {', '.join(kinds)}")
    compression = _DEFAULT[name] if compression is None else compression
    if compression not in kind.compressions:
        raise PlanError(
            f"unknown compression {compression!r} of {name} files\n"
            f"  next: use one of {', '.join(kind.compressions)}"
        )
    if kind is Csv:
        return Csv(compression, header)
    return kind(compression)
