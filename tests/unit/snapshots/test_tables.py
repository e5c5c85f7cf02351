"""State as tables: every kind, odd types and keys, and the same rows wherever they are kept."""

from __future__ import annotations

import datetime as dt
import math
import pickle
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import KeyedProcess, Process, state
from cairn.errors import QueryError, RestoreError, StaleEpochError, StateNotFoundError
from cairn.snapshots import write_savepoint
from cairn.snapshots.branch import branch
from cairn.snapshots.columns import StateColumns
from cairn.snapshots.tables import StateTable, open_state
from cairn.storage.store import Store, open_store
from cairn.testing import Harness
from tests.simulation.looping import HopsWorld
from tests.simulation.world import Driver
from tests.unit.snapshots.checkpoints import GONE, UID, Checkpoint, listed, mapped, value

STATES = {"n": value("bigint"), "items": listed("string"), "last": mapped("string", "double")}
NAN = float("nan")


def grown(**more: Any) -> Checkpoint:
    checkpoint = Checkpoint(STATES, **more)
    checkpoint.commit({"n": {k: k for k in range(40)}, "items": {k: ["a"] for k in range(9)}})
    checkpoint.commit({"last": {k: {"x": 1.0, "y": None} for k in range(20)}})
    checkpoint.commit({"n": {3: GONE, 4: -4}, "items": {1: ["a", "b"], 2: GONE}}, base=True)
    checkpoint.commit({"last": {1: {"x": GONE}, 2: GONE}, "n": {41: 41}})
    return checkpoint


def rows(table: StateTable, **more: Any) -> list[dict[str, Any]]:
    return [row for batch in table.batches(**more) for row in batch.to_pylist()]


def plain(table: StateTable, **more: Any) -> list[tuple[Any, ...]]:
    """Without the key group, in any order."""
    found = [tuple(list(row.values())[1:]) for row in rows(table, **more)]
    return sorted(found, key=repr)


def read(at: Store | str, name: str, uid: str = UID, **more: Any) -> list[tuple[Any, ...]]:
    with open_state(at) as source:
        return plain(source.table(uid, name), **more)


# Kinds


def test_a_value_is_a_row_a_map_a_row_per_entry_a_list_a_row_per_item() -> None:
    checkpoint = grown()
    model = checkpoint.model
    with open_state(checkpoint.store) as source:
        n, items, last = source.tables()
        assert n.schema.names == ["key_group", "k", "value"]
        assert items.schema.names == ["key_group", "k", "position", "value"]
        assert last.schema.names == ["key_group", "k", "entry", "value"]
        assert [t.kind for t in (n, items, last)] == ["value", "list", "map"]
        assert plain(n) == sorted(model["n"].items(), key=repr)
        assert plain(items) == sorted(
            ((k, at, v) for k, held in model["items"].items() for at, v in enumerate(held)),
            key=repr,
        )
        assert plain(last) == sorted(
            ((k, e, v) for k, held in model["last"].items() for e, v in held.items()), key=repr
        )
        for table in (n, items, last):
            for row in rows(table):
                assert row["key_group"] == checkpoint.group(row["k"])


def test_the_source_tells_which_epoch_it_is_of() -> None:
    checkpoint = grown()
    newest = checkpoint.newest
    assert newest is not None
    with open_state(checkpoint.store) as source:
        assert (source.kind, source.epoch, source.job) == ("epoch", newest.number, "shop")
        assert source.max_parallelism == 8
        assert source.wall_ms == newest.wall_ms
    with open_state(checkpoint.store, newest.number - 1) as source:
        assert source.epoch == newest.number - 1
        assert (41,) not in [key[:1] for key in plain(source.table(UID, "n"))]


class Everything(KeyedProcess[Any]):
    total = state.Reducing("bigint", lambda a, b: a + b)
    seen = state.Value("string", ttl="1 hour")
    log = state.List("bigint", ttl="1 hour")
    by = state.Map("string", "bigint", ttl="1 hour")
    what = state.Value(object)

    def process(self, row: Any, ctx: Any) -> Any:
        self.total.add(row.v)
        self.seen.set(f"v{row.v}")
        self.log.append(row.v)
        self.by[f"v{row.v}"] = row.v
        self.what.set({row.v})
        ctx.timers.event(row.v * 1000)
        ctx.timers.processing(7_000_000 + row.v)
        return []

    def on_timer(self, timer: Any, ctx: Any) -> Any:
        return []


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("base", [False, True], ids=["deltas", "a base"])
def test_every_kind_of_keyed_state_is_read_as_a_function_left_it(backend: str, base: bool) -> None:
    with Harness(
        Everything(),
        "k string, v bigint, t timestamp",
        "k",
        "x int",
        backend=backend,
        event_time="t",
        now_ms=5_000,
    ) as harness:
        at = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
        harness.push([("a", 1, at), ("a", 2, at), ("b", 3, at)])
        harness.snapshot_and_restore(base=base)
        written = dt.datetime.fromtimestamp(5, dt.UTC)
        with open_state(harness._checkpoint._store) as source:
            tables = {table.state: table for table in source.tables()}
            (uid,) = {table.operator for table in tables.values()}
            assert plain(tables["total"]) == [("a", 3), ("b", 3)]
            assert tables["total"].kind == "reducing"
            assert tables["seen"].schema.names[-1] == "written_at"
            assert plain(tables["seen"]) == [("a", "v2", written), ("b", "v3", written)]
            assert plain(tables["log"]) == [
                ("a", 0, 1, written),
                ("a", 1, 2, written),
                ("b", 0, 3, written),
            ]
            assert plain(tables["by"]) == [
                ("a", "v1", 1, written),
                ("a", "v2", 2, written),
                ("b", "v3", 3, written),
            ]
            held = {key: pickle.loads(data) for key, data in plain(tables["what"])}
            assert held == {"a": {2}, "b": {3}}
            event = tables["timers.event"]
            assert event.kind == "timers" and event.schema.names == ["key_group", "k", "time"]
            stamp = dt.datetime.fromtimestamp
            assert plain(event) == [
                ("a", stamp(1, dt.UTC)),
                ("a", stamp(2, dt.UTC)),
                ("b", stamp(3, dt.UTC)),
            ]
            assert len(plain(tables["timers.processing"])) == 3
            # One key of each, by its key group alone.
            for table in tables.values():
                one = plain(table, keys=[("b",)])
                assert one == [row for row in plain(table) if row[0] == "b"]
                assert source.table(uid, table.state).kind == table.kind


def test_what_has_expired_is_no_row() -> None:
    with Harness(
        Everything(), "k string, v bigint, t timestamp", "k", "x int", event_time="t"
    ) as harness:
        at = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
        harness.push([("a", 1, at)])
        harness.commit()
        harness.clock.advance_ms(2 * 3_600_000)
        harness.push([("b", 2, at)])
        harness.commit()
        with open_state(harness._checkpoint._store) as source:
            (uid,) = {table.operator for table in source.tables()}
            assert [row[0] for row in plain(source.table(uid, "seen"))] == ["b"]
            assert [row[0] for row in plain(source.table(uid, "log"))] == ["b"]
            assert [row[0] for row in plain(source.table(uid, "total"))] == ["a", "b"]


class Recent(Process[Any]):
    items = state.OperatorList("long")

    def process(self, row: Any, ctx: Any) -> Any:
        self.items.set([*self.items, row.v][-3:])
        return []


class Levels(KeyedProcess[Any]):
    levels = state.Broadcast("string", "long")
    n = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.set(self.n.get() + 1)
        return []

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        ctx.broadcast[row.name] = row.v


def test_the_list_of_a_subtask_has_positions_from_zero_whatever_was_removed() -> None:
    with Harness(Recent(), "k long, v long", None, "x int") as harness:
        harness.push([(0, v) for v in range(5)])
        harness.commit()
        harness.push([(0, 9)])
        harness.commit()
        with open_state(harness._checkpoint._store) as source:
            (table,) = source.tables()
            assert (table.kind, table.scope) == ("operator-list", "subtask")
            assert table.schema.names == ["key_group", "subtask", "position", "value"]
            assert plain(table) == [(0, 0, 3), (0, 1, 4), (0, 2, 9)]
            assert plain(table, keys=[(0,)]) == plain(table)
            assert plain(table, keys=[(7,)]) == []


def test_broadcast_state_is_found_under_its_operator() -> None:
    with Harness(
        Levels(), "k long, v long", "k", "x int", broadcast="name string, v long"
    ) as harness:
        harness.push_broadcast([("low", 3), ("high", 9)])
        harness.push((1, 1))
        harness.commit()
        with open_state(harness._checkpoint._store) as source:
            own, shared = source.tables()
            assert shared.operator == own.operator
            table = source.table(own.operator, "levels")
            assert (table.kind, table.scope, table.key_names) == ("broadcast", "shared", ["key"])
            assert plain(table) == [("high", 9), ("low", 3)]
            assert plain(table, keys=[table.parse_key("low")]) == [("low", 3)]


def test_records_on_their_way_back_in_a_loop_are_rows(tmp_path: Path) -> None:
    world = HopsWorld(3, tmp_path)
    driver = Driver(world, parallelism=2)
    driver.start()
    for _ in range(4):
        driver.run_batch()
    with open_state(world.store) as source:
        (table,) = (table for table in source.tables() if table.kind == "feedback")
        found = rows(table)
        assert found and [row["value"] for row in found] == world.in_flight()
        key = found[0][table.key_names[0]]
        mine = [row for row in found if row[table.key_names[0]] == key]
        assert rows(table, keys=[(key,)]) == mine


# The same rows wherever they are


def test_an_epoch_its_savepoint_and_its_branch_have_the_same_rows(tmp_path: Path) -> None:
    checkpoint = grown(store=open_store(str(tmp_path / "ckpt")))
    write_savepoint(checkpoint.store, None, str(tmp_path / "saved"))
    branch(checkpoint.store, None, str(tmp_path / "branch"))
    for name in STATES:
        found = []
        for place in ("ckpt", "saved", "branch"):
            with open_state(str(tmp_path / place)) as source:
                table = source.table(UID, name)
                found.append(rows(table))
                few = rows(table, keys=[(1,), (4,), (77,)])
                assert few == [row for row in found[-1] if row["k"] in (1, 4, 77)]
                split = [row for part in table.splits(3) for row in rows(table, groups=part)]
                assert split == found[-1]
        assert found[0] == found[1] == found[2] and found[0]
    with open_state(str(tmp_path / "saved")) as source:
        assert source.kind == "savepoint"
        assert source.table(UID, "n").rows == len(checkpoint.model["n"])


def test_a_savepoint_is_of_one_epoch_only(tmp_path: Path) -> None:
    checkpoint = grown()
    info = write_savepoint(checkpoint.store, None, str(tmp_path / "saved"))
    with open_state(str(tmp_path / "saved"), info.epoch) as source:
        assert source.epoch == info.epoch
    with pytest.raises(StaleEpochError, match=r"another epoch[\s\S]*next: leave the epoch out"):
        open_state(str(tmp_path / "saved"), info.epoch - 1)


@given(
    st.lists(
        st.tuples(
            st.dictionaries(
                st.tuples(st.one_of(st.none(), st.integers(0, 4)), st.sampled_from(["a", "é", ""])),
                st.one_of(st.just(GONE), st.integers(-9, 9)),
                max_size=8,
            ),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_rows_merged_by_arrow_are_those_merged_by_tables(
    epochs: list[tuple[dict[Any, Any], bool]],
) -> None:
    states = {"n": value("bigint"), "m": mapped("string", "bigint")}
    checkpoint = Checkpoint(states, {"a": "bigint", "b": "string"}, group_count=4)
    for changes, base in epochs:
        entries = {k: {"e": v, "f": 1} for k, v in changes.items()}
        checkpoint.commit({"n": changes, "m": entries}, base=base)
    for name in states:
        with open_state(checkpoint.store) as source:
            table = source.table(UID, name)
            fast, loose = rows(table), rows(table, ordered=False)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(StateColumns, "is_merged_by_arrow", False)
                slow = rows(table)
        assert fast == slow
        assert sorted(map(repr, loose)) == sorted(map(repr, slow))


# Types and keys


def test_values_of_a_struct_with_not_null_fields_are_read_also_where_a_struct_is_null() -> None:
    ddl = "struct<a:int NOT NULL,b:struct<c:string NOT NULL>>"
    checkpoint = Checkpoint({"s": value(ddl), "m": mapped("string", ddl)})
    checkpoint.commit({"s": {1: (1, None), 2: (2, ("x",))}, "m": {1: {"q": None, "r": (3, None)}}})
    checkpoint.commit({"s": {2: GONE, 3: (4, None)}})
    assert read(checkpoint.store, "s") == [
        (1, {"a": 1, "b": None}),
        (3, {"a": 4, "b": None}),
    ]
    assert read(checkpoint.store, "m") == [
        (1, "q", None),
        (1, "r", {"a": 3, "b": None}),
    ]


VALUES: dict[str, Any] = {
    "double": [NAN, -0.0, math.inf],
    "decimal(38,10)": [Decimal("1.5"), Decimal("-9999999999999999999999999999.9999999999")],
    "binary": [b"", b"\x00\xff"],
    "string": ["", "☃\u0000", "a'b"],
    "date": [dt.date.min, dt.date.max],
    "timestamp_ntz": [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)],
    "interval day to second": [dt.timedelta(days=-1, microseconds=1)],
    "array<map<string,array<int>>>": [[{"a": [1, None]}, None], []],
    "boolean": [True, False],
}


@pytest.mark.parametrize("ddl", sorted(VALUES))
def test_values_of_any_type_come_as_they_are(ddl: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint({"v": value(ddl)})
    given_ = dict(enumerate(VALUES[ddl]))
    checkpoint.commit({"v": given_})
    write_savepoint(checkpoint.store, None, str(tmp_path / "saved"))
    for at in (checkpoint.store, str(tmp_path / "saved")):
        with open_state(at) as source:
            found = {row["k"]: row["value"] for row in rows(source.table(UID, "v"))}
        for key, expected in given_.items():
            if expected != expected:
                assert math.isnan(found[key])
            elif ddl.startswith("array"):
                assert [m and [(k, v) for k, v in m] for m in found[key]] == [
                    m and list(m.items()) for m in expected
                ]
            else:
                assert found[key] == expected


KEYS: dict[str, tuple[list[Any], list[str]]] = {
    "string": (["b", "", None, "☃", '["x"]'], ["b", "", "[null]", "☃", '["[\\"x\\"]"]']),
    "bigint": ([-5, None, 2**62], ["-5", "[null]", str(2**62)]),
    "double": ([NAN, 0.5, None], ["NaN", "0.5", "[null]"]),
    "boolean": ([True, False], ["true", "false"]),
    "binary": ([b"\xff", b""], ["/w==", ""]),
    "decimal(4,2)": ([Decimal("1.50")], ["1.5"]),
    "date": ([dt.date(2024, 1, 31)], ["2024-01-31"]),
    "timestamp": (
        [dt.datetime(2024, 1, 31, 12, tzinfo=dt.UTC)],
        ["2024-01-31T12:00:00Z"],
    ),
    "array<int>": ([(1, 2), ()], ["[1, 2]", "[[]]"]),
    "struct<a:int,b:string>": ([(1, "x")], ['{"a": 1, "b": "x"}']),
}


@pytest.mark.parametrize("ddl", sorted(KEYS))
def test_a_key_of_any_type_is_found_by_what_somebody_types(ddl: str) -> None:
    keys, texts = KEYS[ddl]
    checkpoint = Checkpoint({"n": value("int")}, {"k": ddl})
    checkpoint.commit({"n": {key: at for at, key in enumerate(keys)}})
    checkpoint.commit({"n": {keys[0]: 0}})
    with open_state(checkpoint.store) as source:
        table = source.table(UID, "n")
        for at, text in enumerate(texts):
            found = rows(table, keys=[table.parse_key(text)])
            assert [row["value"] for row in found] == [at]
        assert len(rows(table, keys=[table.parse_key(text) for text in texts])) == len(keys)


def test_a_key_of_several_columns_is_found_and_nothing_that_is_only_like_it() -> None:
    checkpoint = Checkpoint({"n": value("int")}, {"a": "string", "b": "bigint"}, group_count=1)
    checkpoint.commit({"n": {(a, b): 1 for a in ("x", "y", None) for b in (1, 2, None)}})
    checkpoint.commit({"n": {("x", 1): GONE}})
    with open_state(checkpoint.store) as source:
        table = source.table(UID, "n")
        asked = [("x", 1), ("x", 2), ("y", 1), (None, None)]
        found = [(row["a"], row["b"]) for row in rows(table, keys=asked)]
        assert sorted(found, key=repr) == sorted([("x", 2), ("y", 1), (None, None)], key=repr)
        assert table.parse_key('["x", 2]') == ("x", 2)


@pytest.mark.parametrize(
    "ddl, text",
    [
        ("bigint", "x"),
        ("bigint", "1.5"),
        ("bigint", "\u0661"),
        ("tinyint", "1000"),
        ("bigint", '["a"]'),
        ("boolean", "yes"),
        ("date", "yesterday"),
        ("binary", "§"),
        ("struct<a:int>", "nonsense"),
        ("struct<a:int>", '{"b": 1}'),
        ("string", "x" * 100_000),
    ],
)
def test_a_key_that_does_not_fit_is_refused(ddl: str, text: str) -> None:
    checkpoint = Checkpoint({"n": value("int")}, {"k": ddl})
    checkpoint.commit({})
    with open_state(checkpoint.store) as source, pytest.raises(QueryError, match="expected"):
        source.table(UID, "n").parse_key(text)


def test_a_key_with_too_few_columns_is_refused() -> None:
    checkpoint = Checkpoint({"n": value("int")}, {"a": "string", "b": "bigint"})
    checkpoint.commit({})
    with open_state(checkpoint.store) as source:
        table = source.table(UID, "n")
        for text in ("x", '["x"]', '["x", 1, 2]'):
            with pytest.raises(QueryError, match=r"2 columns[\s\S]*a string, b bigint"):
                table.parse_key(text)
        with pytest.raises(QueryError, match="tuple of 2"):
            list(table.batches(keys=[("x",)]))
        for odd in (("x", "y"), ("x", 2**63), (1, 1)):
            with pytest.raises(QueryError, match="does not fit"):
                list(table.batches(keys=[odd]))


def test_key_columns_named_like_ours_get_another_name() -> None:
    names = {"Value": "bigint", "key_value": "string", "time": "int", "k": "int"}
    checkpoint = Checkpoint({"m": mapped("string", "int")}, names)
    checkpoint.commit({"m": {(1, "x", 2, 3): {"e": 5}}})
    with open_state(checkpoint.store) as source:
        table = source.table(UID, "m")
        assert table.key_names == ["key_key_Value", "key_value", "key_time", "k"]
        (row,) = rows(table)
        assert list(row.values())[1:] == [1, "x", 2, 3, "e", 5]


# What is not there


def test_a_state_that_is_not_there_is_told_with_those_that_are() -> None:
    checkpoint = grown()
    with open_state(checkpoint.store) as source:
        for operator, name in ((UID, "nope"), ("nope", "n")):
            with pytest.raises(StateNotFoundError, match=r"count\.n, count\.items, count\.last"):
                source.table(operator, name)


def test_an_epoch_without_state_has_empty_tables() -> None:
    checkpoint = Checkpoint(STATES)
    checkpoint.commit({})
    with open_state(checkpoint.store) as source:
        for table in source.tables():
            assert rows(table) == [] and table.rows == 0
            assert table.splits(4) == [table.groups]
            assert rows(table, keys=[(1,)]) == []


def test_where_there_is_nothing_that_is_said_and_no_folder_is_made(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(RestoreError, match=r"no such folder[\s\S]*next:"):
        open_state(str(missing))
    assert not missing.exists()
    with pytest.raises(RestoreError, match="neither a checkpoint nor a savepoint"):
        open_state(str(tmp_path))
    with pytest.raises(RestoreError, match="unknown scheme"):
        open_state("ftp://x/y")


def test_an_epoch_that_is_no_more_or_not_yet_is_stale() -> None:
    checkpoint = grown()
    for number in (1, 99):
        with pytest.raises(StaleEpochError, match="next: `cairn ls`"):
            open_state(checkpoint.store, number)
    assert not checkpoint.store.list("holds")


# At scale


def test_parts_have_about_as_many_rows_though_one_group_has_half_of_them() -> None:
    checkpoint = Checkpoint({"n": value("int")}, group_count=32)
    groups: dict[int, list[int]] = {}
    for key in range(5000):
        groups.setdefault(checkpoint.group(key), []).append(key)
    big, *others = sorted(groups, key=lambda group: len(groups[group]))
    keys = [*groups[big], *(key for group in others for key in groups[group][:5])]
    checkpoint.commit({"n": dict.fromkeys(keys, 1)})
    with open_state(checkpoint.store) as source:
        table = source.table(UID, "n")
        parts = table.splits(4)
        assert [group for part in parts for group in part] == list(range(32))
        counts = [len(rows(table, groups=part)) for part in parts]
        assert sum(counts) == len(keys)
        assert max(counts) <= len(groups[big]) + len(keys) // 4


def test_a_key_that_no_file_has_has_no_rows_however_many_files_there_are() -> None:
    checkpoint = grown(group_count=1, parallelism=1)
    checkpoint.commit({"n": {5: 1}, "last": {5: {"q": 1.0}}, "items": {5: ["z"]}})
    with open_state(checkpoint.store) as source:
        for table in source.tables():
            assert rows(table, keys=[(77,)]) == []


def test_only_the_key_group_of_a_key_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = grown()
    with open_state(checkpoint.store) as source:
        table = source.table(UID, "n")
        asked: list[range] = []
        read_all = source.states.read

        def spy(columns: Any, uid: str, groups: range, *args: Any, **more: Any) -> Any:
            asked.append(groups)
            return read_all(columns, uid, groups, *args, **more)

        monkeypatch.setattr(source.states, "read", spy)
        assert [row["value"] for row in rows(table, keys=[(4,)])] == [-4]
        assert asked == [range(checkpoint.group(4), checkpoint.group(4) + 1)]


def test_many_threads_read_one_source_at_once() -> None:
    checkpoint = grown()
    found: list[Any] = []
    with open_state(checkpoint.store) as source:
        table = source.table(UID, "n")
        threads = [threading.Thread(target=lambda: found.append(plain(table))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [sorted(checkpoint.model["n"].items(), key=repr)] * 8
