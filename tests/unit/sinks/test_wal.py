"""Wal, Spark and Foreach: functions in the driver. With a real Spark: tests/spark/test_wal.py."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from cairn import sinks
from cairn.errors import CommitError, CorruptFileError, PlanError
from tests.places.base import context, prepared


class Frame:
    """A DataFrame whose writer notes what it is asked, and fails as told."""

    def __init__(self, error: str = "") -> None:
        self.asked: list[Any] = []
        self.error = error

    @property
    def write(self) -> Frame:
        return self

    def format(self, name: str) -> Frame:
        self.asked.append(name)
        return self

    def mode(self, name: str) -> Frame:
        self.asked.append(name)
        return self

    def options(self, **options: Any) -> Frame:
        self.asked.append(options)
        return self

    def save(self) -> None:
        if self.error:
            raise RuntimeError(self.error)
        self.asked.append("saved")


def open_sink(folder: Path, sink: Any, frame: Frame | None = None) -> Any:
    sink.open(context(folder, "job", "out", None))
    if frame is not None:
        sink.dataframe = lambda files: frame
    return sink


def test_a_writer_gets_the_rows_and_what_makes_the_epoch_unlike_others(tmp_path: Path) -> None:
    got: list[Any] = []
    frame = Frame()
    sink = open_sink(tmp_path, sinks.Wal(lambda df, e: got.append((df, e, e.batch, e.key))), frame)
    sink.commit(2, [prepared(sink, 2, (1, "a"))])
    assert got == [(frame, 2, 0, "job/out/2/0")]


def test_a_writer_that_raises_gets_the_rows_again(tmp_path: Path) -> None:
    tries: list[int] = []

    def write(frame: Any, epoch: int) -> None:
        tries.append(epoch)
        if len(tries) < 3:
            raise ConnectionError("the target is away")

    sink = open_sink(tmp_path, sinks.Wal(write), Frame())
    found = prepared(sink, 2, (1, "a"))
    for _ in range(2):
        with pytest.raises(ConnectionError):
            sink.commit(2, [found])
    for _ in range(2):
        sink.commit(2, [found])
    assert tries == [2, 2, 2]


def test_a_wal_promises_what_its_target_can() -> None:
    assert sinks.Wal(print).promise == "at-least-once"
    assert sinks.Wal(print, idempotent=True).promise == "exactly-once"
    assert pickle.loads(pickle.dumps(sinks.Wal(print, idempotent=True))).promise == "exactly-once"
    assert sinks.Spark("parquet").promise == sinks.Foreach(print).promise == "at-least-once"


def test_functions_and_options_do_not_travel_to_the_slots() -> None:
    held = open(__file__)  # noqa: SIM115
    for sink in (
        sinks.Wal(lambda frame, epoch: held),
        sinks.Foreach(lambda row, epoch: held),
        sinks.Spark("jdbc", password="hunter22"),
    ):
        assert b"hunter22" not in cloudpickle.dumps(sink)
        assert "hunter22" not in repr(sink)
    held.close()


def test_the_short_form_writes_as_spark_does(tmp_path: Path) -> None:
    frame = Frame()
    sink = open_sink(tmp_path, sinks.Spark("jdbc", dbtable="t", url="jdbc:x"), frame)
    sink.commit(2, [prepared(sink, 2, (1, "a"))])
    assert frame.asked == ["jdbc", "append", {"dbtable": "t", "url": "jdbc:x"}, "saved"]


def test_an_error_of_spark_shows_no_secret(tmp_path: Path) -> None:
    frame = Frame("cannot reach jdbc:pg://u:hunter22@host, table t, password hunter22")
    options = {"dbtable": "t", "url": "jdbc:pg://u:hunter22@host", "password": "hunter22"}
    sink = open_sink(tmp_path, sinks.Spark("jdbc", **options), frame)
    with pytest.raises(CommitError) as raised:
        sink.commit(2, [prepared(sink, 2, (1, "a"))])
    assert "cannot reach <url>, table t, password <password>" in str(raised.value)
    assert raised.value.__cause__ is None and raised.value.__suppress_context__


@pytest.mark.parametrize("place", [4, -1])
def test_a_damaged_file_does_not_reach_spark(tmp_path: Path, place: int) -> None:
    asked: list[Any] = []

    class Session:
        @property
        def read(self) -> Any:
            asked.append("read")
            return SimpleNamespace(schema=lambda _: SimpleNamespace(parquet=asked.append))

    sink = sinks.Wal(lambda frame, epoch: asked.append(epoch))
    sink.open(replace(context(tmp_path, "job", "out", None), spark=Session()))
    found = prepared(sink, 2, (1, "a"))
    (file,) = (tmp_path / "checkpoint" / sink.staging_path("")).iterdir()
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptFileError, match="are damaged"):
        sink.commit(2, [found])
    assert asked == []


def test_without_spark_a_wal_says_so(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, sinks.Wal(print))
    with pytest.raises(CommitError, match="needs a Spark session"):
        sink.commit(2, [prepared(sink, 2, (1, "a"))])


@pytest.mark.parametrize("make", [sinks.Wal, sinks.Foreach])
def test_what_is_no_function_is_refused(make: Any) -> None:
    with pytest.raises(PlanError, match="expected: a function"):
        make("jdbc")


# Foreach


def test_a_function_gets_row_by_row_in_order(tmp_path: Path) -> None:
    got: list[Any] = []
    sink = open_sink(tmp_path, sinks.Foreach(lambda row, e: got.append((row.k, row["s"], e))))
    found = [prepared(sink, 2, (s, "a"), (s, None), subtask=s) for s in (1, 0)]
    sink.commit(2, found)
    assert got == [(0, "a", 2), (0, None, 2), (1, "a", 2), (1, None, 2)]


def test_a_function_gets_all_rows_at_once(tmp_path: Path) -> None:
    got: list[Any] = []
    sink = open_sink(tmp_path, sinks.Foreach(lambda rows, e: got.append((rows, e.key)), batch=True))
    sink.commit(2, [prepared(sink, 2, (s, "a"), subtask=s) for s in (1, 0)])
    assert got == [([(0, "a"), (1, "a")], "job/out/2/0")]


def test_a_function_that_raises_fails_the_commit_with_the_row(tmp_path: Path) -> None:
    got: list[Any] = []

    def fn(row: Any, epoch: int) -> None:
        if row.k == 2 and got.count(1) == 1:
            raise ValueError("no twos today")
        got.append(row.k)

    sink = open_sink(tmp_path, sinks.Foreach(fn))
    found = prepared(sink, 2, (1, "a"), (2, "b"), (3, "c"))
    with pytest.raises(CommitError, match=r"no twos today\n  row: Row\(k=2, s='b'\)") as raised:
        sink.commit(2, [found])
    assert (raised.value.sink, raised.value.epoch) == ("out", 2)
    sink.commit(2, [found])
    sink.commit(2, [found])
    assert got == [1, 1, 2, 3]


def test_a_function_for_all_rows_that_raises_says_how_many(tmp_path: Path) -> None:
    def fn(rows: Any, epoch: int) -> None:
        raise ValueError("not today")

    sink = open_sink(tmp_path, sinks.Foreach(fn, batch=True))
    with pytest.raises(CommitError, match="not today\n  rows: 2"):
        sink.commit(2, [prepared(sink, 2, (1, "a"), (2, "b"))])
