"""Redis, against a real server: what is written, and that nothing old overwrites what is new."""

from __future__ import annotations

import datetime as dt
import decimal
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from cairn.errors import CommitError, EpochError, PlanError
from cairn.sinks import Redis
from cairn.sinks.base import Execution, SinkContext
from cairn.sinks.text_forms import json_of, text_of
from cairn.testing import SimulatedCrash, simulated_crash
from cairn.types import parse_schema
from tests import servers
from tests.places.base import batch, context, prepared
from tests.unit.sinks.proxy import Proxy


@pytest.fixture
def server() -> Iterator[Any]:
    found = servers.redis()
    found.flushall()
    yield found
    found.flushall()


def url(server: Any) -> str:
    return f"unix://{server.socket_file}?db=0"


def open_sink(folder: Path, server: Any, *, job_id: str = "job", **settings: Any) -> Any:
    sink = Redis(url(server), **{"key": "row:{k}", **settings})
    sink.open(context(folder, job_id, "out", None))
    return sink


def text(server: Any) -> dict[str, Any]:
    """All keys but the fence."""
    found = {}
    for key in map(bytes.decode, server.keys("row:*")):
        if server.type(key) == b"hash":
            found[key] = {f.decode(): v.decode() for f, v in server.hgetall(key).items()}
        else:
            found[key] = server.get(key).decode()
    return found


# Written values


def test_a_row_is_a_hash_with_a_field_for_each_other_column(tmp_path: Path, server: Any) -> None:
    sink = open_sink(tmp_path, server)
    sink.commit(2, [prepared(sink, 2, (1, "a"), (2, "b"))])
    assert text(server) == {"row:1": {"s": "a"}, "row:2": {"s": "b"}}


def test_the_field_of_a_null_is_removed_and_others_stay(tmp_path: Path, server: Any) -> None:
    server.hset("row:1", mapping={"s": "old", "mine": "kept"})
    sink = open_sink(tmp_path, server, value=["k", "s"])
    sink.commit(2, [prepared(sink, 2, (1, None), (2, "b"))])
    assert text(server) == {"row:1": {"k": "1", "mine": "kept"}, "row:2": {"k": "2", "s": "b"}}


def test_a_string_is_one_column_and_gone_when_it_is_null(tmp_path: Path, server: Any) -> None:
    server.set("row:2", "old")
    sink = open_sink(tmp_path, server, kind="string", value="s")
    sink.commit(2, [prepared(sink, 2, (1, "a"), (2, None))])
    assert text(server) == {"row:1": "a"}


def test_a_string_without_a_column_is_the_row_as_json(tmp_path: Path, server: Any) -> None:
    sink = open_sink(tmp_path, server, kind="string")
    sink.commit(2, [prepared(sink, 2, (1, "é"), (2, None))])
    assert text(server) == {"row:1": '{"k":1,"s":"é"}', "row:2": '{"k":2}'}


@pytest.mark.parametrize("kind", ["hash", "string"])
def test_keys_expire_when_asked_to(tmp_path: Path, server: Any, kind: Any) -> None:
    sink = open_sink(tmp_path, server, kind=kind, value="s", ttl="1 hour")
    sink.commit(2, [prepared(sink, 2, (1, "a"))])
    assert 0 < server.pttl("row:1") <= 3_600_000
    assert server.pttl(sink.fence) == -1


def test_the_last_row_of_a_key_stays(tmp_path: Path, server: Any) -> None:
    sink = open_sink(tmp_path, server, chunk_rows=2)
    first = prepared(sink, 2, *((1, str(n)) for n in range(5)))
    second = prepared(sink, 2, (1, "last"), round=1)
    sink.commit(2, [second, first])
    assert text(server) == {"row:1": {"s": "last"}}


def test_a_key_may_have_several_columns_and_braces(tmp_path: Path, server: Any) -> None:
    sink = open_sink(tmp_path, server, key="row:{{tag}}:{k}/{s}", kind="string", value="k")
    sink.commit(2, [prepared(sink, 2, (1, "a b"))])
    assert text(server) == {"row:{tag}:1/a b": "1"}


def test_large_rows_are_sent_in_smaller_chunks(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.sinks.redis.CHUNK_BYTES_MAX", 3000)
    sink = open_sink(tmp_path, server)
    rows = [(n, "x" * 1000) for n in range(10)]
    writer = sink.writer(2, 0, Execution())
    writer.write(batch(*rows))
    with simulated_crash("driver.sink.piece", 3), pytest.raises(SimulatedCrash):
        sink.commit(2, [found := writer.prepare()])
    assert 3 <= len(text(server)) < 10
    sink.commit(2, [found])
    assert text(server) == {f"row:{n}": {"s": s} for n, s in rows}


UTC = dt.timezone.utc  # noqa: UP017
VALUES: dict[str, tuple[Any, bytes]] = {
    "boolean": (True, b"true"),
    "tinyint": (-7, b"-7"),
    "bigint": (1 << 62, b"4611686018427387904"),
    "double": (0.1, b"0.1"),
    "float": (1.5, b"1.5"),
    "decimal(20, 9)": (decimal.Decimal("0.000000001"), b"0.000000001"),
    "string": ("é", "é".encode()),
    "binary": (b"\x00\xff", b"\x00\xff"),
    "date": (dt.date(2026, 1, 31), b"2026-01-31"),
    "timestamp": (dt.datetime(2026, 1, 31, 12, tzinfo=UTC), b"2026-01-31T12:00:00.000000Z"),
    "timestamp_ntz": (dt.datetime(2026, 1, 31, 12, 0, 0, 5), b"2026-01-31T12:00:00.000005"),
    "interval day to second": (dt.timedelta(seconds=1), b"1000000"),
    "array<int>": ([1, None], b"[1,null]"),
    "map<string, bigint>": ([("a", 1)], b'{"a":1}'),
    "struct<a: date, b: binary>": (
        {"a": dt.date(2026, 1, 31), "b": b"\x01"},
        b'{"a":"2026-01-31","b":"AQ=="}',
    ),
    "array<double>": ([float("nan"), float("-inf")], b'["NaN","-Infinity"]'),
    "array<decimal(20, 9)>": ([decimal.Decimal("0.1")], b"[0.100000000]"),
    "array<interval day to second>": (
        [dt.timedelta(seconds=1)],
        b"[\"INTERVAL '0 00:00:01.000000' DAY TO SECOND\"]",
    ),
    "map<boolean, int>": ([(True, 1)], b'{"true":1}'),
    "map<double, int>": ([(float("nan"), 1), (1.5, 2)], b'{"NaN":1,"1.5":2}'),
    "map<binary, int>": ([(b"\xff", 1)], b'{"/w==":1}'),
    'struct<`a"b`: int, `c\\d`: int>': ({'a"b': 1, "c\\d": None}, b'{"a\\"b":1}'),
}


@pytest.mark.parametrize("ddl", VALUES)
def test_each_type_has_its_text(ddl: str) -> None:
    value, expected = VALUES[ddl]
    column = pa.array([value, None], parse_schema(f"c {ddl}").field("c").type)
    assert text_of(column).to_pylist() == [expected, None]


def test_times_after_the_year_9999_have_a_text() -> None:
    column = pa.array([253402300800 * 10**6], pa.timestamp("us", "UTC"))
    text = "10000-01-01T00:00:00.000000Z"
    assert text_of(column).to_pylist() == [text.encode()]
    rows = pa.record_batch({"t": column, "x": pa.array([float("inf")])})
    assert json_of(rows).to_pylist() == [f'{{"t":"{text}","x":"Infinity"}}'.encode()]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e300, 5e-324, 1 / 3])
def test_a_double_reads_back_equal(value: float) -> None:
    (found,) = text_of(pa.array([value])).to_pylist()
    assert str(float(found)) == str(value)


# Newer values stay


def test_an_older_epoch_changes_no_key_that_a_newer_one_wrote(tmp_path: Path, server: Any) -> None:
    zombie, new = open_sink(tmp_path / "1", server), open_sink(tmp_path / "2", server)
    old = prepared(zombie, 2, *((k, "old") for k in range(5)))
    new.commit(3, [prepared(new, 3, *((k, "new") for k in range(0, 5, 2)))])
    with pytest.raises(CommitError, match="Redis has a newer epoch of this job than 2"):
        zombie.commit(2, [old])
    # Not even keys that the newer one left alone: it was published when those were current.
    assert text(server) == {f"row:{k}": {"s": "new"} for k in range(0, 5, 2)}


def test_a_driver_overtaken_between_two_chunks_writes_no_more(tmp_path: Path, server: Any) -> None:
    zombie, new = (open_sink(tmp_path / d, server, chunk_rows=2) for d in "12")
    rows = [(k, "old") for k in range(6)]
    old, old_again = (prepared(sink, 2, *rows) for sink in (zombie, new))
    real = zombie._client.register_script

    def overtaken(source: str) -> Any:
        script = real(source)
        calls = []

        def call(keys: Any, args: Any) -> Any:
            calls.append(keys)
            if len(calls) == 2:
                new.commit(2, [old_again])
                new.commit(3, [prepared(new, 3, *((k, "new") for k in range(6)))])
            return script(keys, args)

        return call

    zombie._client.register_script = overtaken
    with pytest.raises(CommitError, match="newer epoch"):
        zombie.commit(2, [old])
    assert text(server) == {f"row:{k}": {"s": "new"} for k in range(6)}


def test_a_later_part_is_not_overwritten_by_an_earlier_one(tmp_path: Path, server: Any) -> None:
    sinks = [open_sink(tmp_path / d, server) for d in "12"]
    late = prepared(sinks[0], 2, (1, "first"))
    sinks[1].commit(2, [prepared(sinks[1], 2, (1, "second"))], 1)
    with pytest.raises(CommitError, match="newer epoch"):
        sinks[0].commit(2, [late], 0)
    assert text(server) == {"row:1": {"s": "second"}}


def test_jobs_have_fences_of_their_own(tmp_path: Path, server: Any) -> None:
    old, other = open_sink(tmp_path, server), open_sink(tmp_path, server, job_id="from a savepoint")
    old.commit(90, [prepared(old, 90, (1, "old"))])
    other.commit(2, [prepared(other, 2, (1, "new"))])
    assert text(server) == {"row:1": {"s": "new"}}


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_commit_that_died_goes_on_behind_the_last_chunk(
    tmp_path: Path, server: Any, nth: int
) -> None:
    sink = open_sink(tmp_path, server, chunk_rows=2)
    rows = [(k, "x") for k in range(6)]
    found = prepared(sink, 2, *rows)
    with simulated_crash("driver.sink.piece", nth), pytest.raises(SimulatedCrash):
        sink.commit(2, [found])
    assert len(text(server)) == 2 * nth
    # Rows in Redis are not written again, also with chunks of another size.
    server.delete("row:0")
    open_sink(tmp_path, server, chunk_rows=5).commit(2, [found])
    assert text(server) == {f"row:{k}": {"s": "x"} for k, _ in rows[1:]}


def test_a_server_that_forgot_gets_everything_again(tmp_path: Path, server: Any) -> None:
    sink = open_sink(tmp_path, server, chunk_rows=1)
    found = prepared(sink, 2, *((k, "x") for k in range(4)))
    with simulated_crash("driver.sink.piece", 2), pytest.raises(SimulatedCrash):
        sink.commit(2, [found])
    server.flushall()
    server.script_flush()
    sink.commit(2, [found])
    assert len(text(server)) == 4


@pytest.mark.parametrize("is_same_driver", [True, False])
def test_a_server_that_lost_published_epochs_is_told_of_once(
    tmp_path: Path, server: Any, caplog: pytest.LogCaptureFixture, is_same_driver: bool
) -> None:
    sink = open_sink(tmp_path, server)
    for epoch in (2, 3, 5):
        if epoch == 3:
            saved = server.hgetall(sink.fence)
        sink.commit(epoch, [prepared(sink, epoch, (epoch, "x"))])
    server.hset(sink.fence, mapping=saved)
    assert not caplog.records
    again = sink if is_same_driver else open_sink(tmp_path, server)
    for epoch in (7, 8):
        again.commit(epoch, [prepared(again, epoch, (epoch, "x"))])
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "'out': Redis has lost rows" in warning
    assert "at epoch 2, batch 0, row 1\n  expected: epoch 5, batch 0" in warning


def test_a_sink_of_another_job_expects_nothing_of_the_one_before(
    tmp_path: Path, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sink = open_sink(tmp_path, server)
    sink.commit(5, [prepared(sink, 5, (1, "x"))])
    sink.commit(6, [prepared(sink, 6, (1, "x"))])
    sink.open(context(tmp_path, "another job", "out", None))
    sink.commit(2, [prepared(sink, 2, (1, "x"))])
    assert not caplog.records


def test_a_server_that_lost_the_end_of_an_epoch_or_all_is_told_of(
    tmp_path: Path, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sink = open_sink(tmp_path, server)
    sink.commit(2, [prepared(sink, 2, (1, "x"), (2, "x"))])
    server.hset(sink.fence, "rows", 1)
    sink.commit(3, [prepared(sink, 3, (1, "x"))])
    server.flushall()
    sink.commit(4, [prepared(sink, 4, (1, "x"))])
    partly, whole = (record.getMessage() for record in caplog.records)
    assert "row 1\n  expected: epoch 2, batch 0, row 2" in partly
    assert "at no epoch\n  expected: epoch 3" in whole


def test_a_key_of_another_kind_is_named(tmp_path: Path, server: Any) -> None:
    server.set("row:2", "mine")
    sink = open_sink(tmp_path, server)
    found = prepared(sink, 2, (1, "a"), (2, "b"))
    with pytest.raises(CommitError, match=r"WRONGTYPE.*\(key row:2\)"):
        sink.commit(2, [found])
    server.delete("row:2")
    sink.commit(2, [found])
    assert len(text(server)) == 2


# The server goes away


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_answer_that_is_lost_changes_nothing(tmp_path: Path, server: Any, nth: int) -> None:
    proxy = Proxy(str(tmp_path / "s"), server.socket_file)
    sink = Redis(f"unix://{proxy.path}", key="row:{k}", chunk_rows=2)
    sink.open(context(tmp_path, "job", "out", None))
    found = prepared(sink, 2, *((k, "x") for k in range(6)))
    sink._client.script_load("return 1")
    proxy.lose_answer(nth)
    # The client may try again by itself, or raise.
    with suppress(CommitError):
        sink.commit(2, [found])
    assert proxy.answers_to_lose == 0
    sink.commit(2, [found])
    assert len(text(server)) == 6
    assert server.hget(sink.fence, "rows") == b"6"
    sink.close()
    proxy.stop()


def test_a_server_that_is_gone_and_returns_gets_the_rows(tmp_path: Path, server: Any) -> None:
    proxy = Proxy(str(tmp_path / "s"), server.socket_file)
    sink = Redis(f"unix://{proxy.path}", key="row:{k}", chunk_rows=1)
    sink.open(context(tmp_path, "job", "out", None))
    found = prepared(sink, 2, (1, "a"), (2, "b"))
    proxy.stop()
    for _ in range(2):
        with pytest.raises(CommitError, match="did not accept all of epoch 2"):
            sink.commit(2, [found])
    proxy.start()
    sink.commit(2, [found])
    assert len(text(server)) == 2
    sink.close()
    proxy.stop()


def test_a_job_can_start_while_the_server_is_away(tmp_path: Path, server: Any) -> None:
    sink = Redis(f"unix://{tmp_path}/s", key="row:{k}")
    sink.open(context(tmp_path, "job", "out", None))
    found = prepared(sink, 2, (1, "a"))
    with pytest.raises(CommitError):
        sink.commit(2, [found])
    proxy = Proxy(str(tmp_path / "s"), server.socket_file)
    sink.commit(2, [found])
    assert len(text(server)) == 1
    sink.close()
    proxy.stop()


def test_no_connection_is_left_when_it_is_closed(tmp_path: Path, server: Any) -> None:
    def ours() -> int:
        return sum(client["name"] == "cairn:closing" for client in server.client_list())

    sink = Redis(url(server), key="row:{k}")
    sink.open(context(tmp_path, "job", "closing", None))
    sink.commit(2, [prepared(sink, 2, (1, "a"))])
    assert ours() == 1
    sink.close()
    # The server notices a little later.
    for _ in range(500):
        if ours() == 0:
            break
        time.sleep(0.01)
    assert ours() == 0


def test_slots_do_not_connect(tmp_path: Path) -> None:
    sink = Redis("unix:///nowhere", key="row:{k}")
    sink.open(context(tmp_path, "job", "out", str(tmp_path)))
    assert prepared(sink, 2, (1, "a"))
    sink.close()


# Refused settings


def test_a_null_in_the_key_fails_the_epoch_with_the_row(tmp_path: Path, server: Any) -> None:
    sink = open_sink(tmp_path, server)
    with pytest.raises(EpochError, match=r"'k' is part of the key and null\n  row: .*'a'"):
        prepared(sink, 2, (None, "a"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"key": "row"}, "without a column"),
        ({"key": "row:{}"}, "no name"),
        ({"key": "row:{k"}, "cannot be used"),
        ({"key": "row:{k:>5}"}, "no format"),
        ({"kind": "list"}, "unknown kind"),
        ({"kind": "string", "value": ["k", "s"]}, "one value"),
        ({"chunk_rows": 0}, "at least 1"),
        ({"ttl": "soon"}, "ttl"),
        ({"key": "row:{z}"}, "not have column 'z'"),
        ({"value": "z"}, "not have column 'z'"),
        ({"key": "{k}{s}"}, "has no field"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    tmp_path: Path, settings: Any, why: str
) -> None:
    with pytest.raises(PlanError, match=why):
        sink = Redis("unix:///nowhere", **{"key": "row:{k}", **settings})
        try:
            sink.open(context(tmp_path, "job", "out", str(tmp_path)))
        finally:
            sink.close()


def test_the_url_can_come_from_the_environment_and_is_never_shown(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Redis("env:MY_REDIS", key="row:{k}")
    with pytest.raises(PlanError, match="MY_REDIS, which is not set"):
        sink.open(context(tmp_path, "job", "out", None))
    monkeypatch.setenv("MY_REDIS", "http://:hunter22@host")
    with pytest.raises(PlanError, match="the url is not valid") as raised:
        sink.open(context(tmp_path, "job", "out", None))
    assert "hunter22" not in str(raised.value) + repr(sink)
    monkeypatch.setenv("MY_REDIS", url(server))
    sink.open(context(tmp_path, "job", "out", None))
    assert b"MY_REDIS" not in pickle.dumps(sink)
    found = prepared(sink, 2, (1, "a"))
    assert "socket" not in str(found)
    sink.commit(2, [found])
    assert len(text(server)) == 1


def test_a_password_does_not_travel_to_the_slots(tmp_path: Path, server: Any) -> None:
    driver = Redis(url(server) + "&password=hunter22", key="row:{k}")
    sent = pickle.dumps(driver)
    assert b"hunter22" not in sent
    slot = pickle.loads(sent)
    slot.open(context(tmp_path, "job", "out", str(tmp_path)))
    assert prepared(slot, 2, (1, "a"))
    slot.close()


def test_a_cluster_is_refused(tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redis.Redis.info", lambda self, section: {"cluster_enabled": 1})
    with pytest.raises(PlanError, match="Redis Cluster"):
        open_sink(tmp_path, server)


def test_a_wrong_password_is_told_at_once(tmp_path: Path, server: Any) -> None:
    sink = Redis(f"unix://:hunter22@{server.socket_file}", key="row:{k}")
    server.config_set("requirepass", "another")
    try:
        with pytest.raises(PlanError, match="refuses the password") as raised:
            sink.open(context(tmp_path, "job", "out", None))
    finally:
        server.config_set("requirepass", "")
    assert "hunter22" not in str(raised.value)


def test_without_the_package_it_says_which_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    sink = Redis("redis://host", key="row:{k}")
    with pytest.raises(PlanError, match=r"cairn-state\[redis\]"):
        sink.open(context(tmp_path, "job", "out", None))


def test_rows_of_an_older_version_of_the_job_keep_their_columns(
    tmp_path: Path, server: Any
) -> None:
    old = open_sink(tmp_path, server)
    found = prepared(old, 2, (1, "a"))
    schema = parse_schema("k long, t long, s string")
    new = Redis(url(server), key="row:{k}")
    new.open(SinkContext("job", "j", "out", schema, checkpoint=str(tmp_path / "checkpoint")))
    new.commit(2, [found])
    assert text(server) == {"row:1": {"s": "a"}}


def test_rows_of_other_settings_keep_their_keys_kind_and_fields(
    tmp_path: Path, server: Any
) -> None:
    found = prepared(open_sink(tmp_path, server), 2, (1, "a"))
    new = Redis(url(server), key="other:{s}", kind="string", value="k")
    new.open(context(tmp_path, "job", "out", None))
    new.commit(2, [found])
    assert text(server) == {"row:1": {"s": "a"}}


def test_a_target_names_server_and_database_and_no_password(tmp_path: Path) -> None:
    sink = Redis("redis://me:hunter22@host:7000/3?password=hunter22", key="row:{k}")
    with mock.patch("redis.Redis.info", return_value={}):
        sink.open(context(tmp_path, "job", "out", None))
    assert sink.target == "database 3 of the Redis server at host:7000"
    sink.close()
