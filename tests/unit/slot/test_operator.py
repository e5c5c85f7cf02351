"""A function in its operator: rows in, rows out, the context, and what it may return."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from collections.abc import Callable
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from cairn import KeyedProcess, state
from cairn.backends import make_backend
from cairn.errors import CairnError, CorruptFileError, FunctionError
from cairn.protocol.messages import Begin, Piece
from cairn.protocol.spec import InletSpec, OperatorSpec, OutletSpec
from cairn.sinks.base import Execution
from cairn.slot.holding import INCOMPLETE
from cairn.slot.operator import Operator
from cairn.storage.manifest import EMPTY_VERSION
from cairn.types import parse_schema
from cairn.types.codec import codec

GROUP_COUNT = 4


class Driven:
    """An operator in an epoch of its own."""

    def __init__(
        self,
        function: KeyedProcess[Any],
        schema: str = "k long, v long",
        keys: tuple[str, ...] = ("k",),
        out: str = "x long",
        event_time: str | None = None,
    ) -> None:
        self.schema = parse_schema(schema)
        outlets = (
            OutletSpec(None, parse_schema(out), (), ()),
            OutletSpec("late", parse_schema("y string"), (), ()),
        )
        spec = OperatorSpec(
            "op",
            (InletSpec(0, self.schema, keys, event_time),),
            cloudpickle.dumps(function),
            outlets,
        )
        backend = make_backend("heap", "", 1 << 26)
        self.operator = Operator(spec, backend, group_count=GROUP_COUNT)
        self.rows: dict[str | None, list[tuple[Any, ...]]] = {None: [], "late": []}
        for outlet in self.operator.outlets:
            outlet.targets.append(self._taker(outlet.tag))
        self.operator.declare()
        self.operator.state.bring_to(EMPTY_VERSION, range(GROUP_COUNT), [])
        self.operator.state.version = EMPTY_VERSION
        self.begin(1)

    def _taker(self, tag: str | None) -> Callable[[pa.RecordBatch], None]:
        def take(batch: pa.RecordBatch) -> None:
            self.rows[tag] += [tuple(row.values()) for row in batch.to_pylist()]

        return take

    def begin(self, epoch: int) -> None:
        begin = Begin("run", 1, epoch, Execution(), None, 5000 + epoch, None, 3, {}, {}, 0)
        self.operator.open(begin, 2)

    def push(self, *rows: Any) -> list[tuple[Any, ...]]:
        struct = codec(pa.struct(list(self.schema)))
        array = struct.encode([struct.normalise(row) for row in rows])
        before = len(self.rows[None])
        name = self.operator.spec.event_time
        times = None
        if name is not None:
            times = array.field(name)
            times = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64())
        self.operator.run(pa.array([0] * len(rows), pa.int32()), times, array)
        self.operator.flush()
        return self.rows[None][before:]


def function(process: Callable[[Any, Any, Any], Any], **declared: Any) -> KeyedProcess[Any]:
    names = {"process": process, **declared}
    return type("Fn", (KeyedProcess,), names)()  # type: ignore[no-any-return]


@dataclasses.dataclass
class Out:
    x: int


@pytest.mark.parametrize(
    ("returned", "rows"),
    [
        (lambda: None, []),
        (lambda: (1,), [(1,)]),
        (lambda: {"x": 1}, [(1,)]),
        (lambda: Out(1), [(1,)]),
        (lambda: [(1,), {"x": 2}, Out(3)], [(1,), (2,), (3,)]),
        (lambda: [], []),
        (lambda: (row for row in [(1,), (2,)]), [(1,), (2,)]),
        (lambda: iter([(1,)]), [(1,)]),
        (lambda: map(Out, [1, 2]), [(1,), (2,)]),
    ],
)
def test_a_function_returns_nothing_a_row_or_rows(returned: Any, rows: Any) -> None:
    assert Driven(function(lambda self, row, ctx: returned())).push((1, 1)) == rows


@pytest.mark.parametrize("returned", [5, "ab", b"ab", 1.5, True])
def test_a_function_that_returns_no_row_is_told_what_is_expected(returned: Any) -> None:
    driven = Driven(function(lambda self, row, ctx: returned))
    with pytest.raises(FunctionError, match="expected a row"):
        driven.push((1, 1))


def test_rows_and_keys_are_what_the_schema_says() -> None:
    def process(self: Any, row: Any, ctx: Any) -> Any:
        return ctx.key.a, ctx.key["the b"], row["the b"], row.v

    driven = Driven(
        function(process),
        "a long, `the b` string, v long",
        ("a", "the b"),
        "a long, b string, c string, d long",
    )
    assert driven.push((1, "x", 5), (None, None, None)) == [
        (1, "x", "x", 5),
        (None, None, None, None),
    ]


def test_keys_that_spark_groups_together_share_state() -> None:
    def process(self: Any, row: Any, ctx: Any) -> Any:
        self.n.set((self.n.get() or 0) + 1)
        return (self.n.get(),)

    driven = Driven(function(process, n=state.Value("long")), "k double, v long")
    nans = [(math.nan, 0), (-math.nan, 0), (-0.0, 0), (0.0, 0), (None, 0), (None, 0)]
    assert driven.push(*nans) == [(1,), (2,), (1,), (2,), (1,), (2,)]


def test_a_row_keeps_the_value_that_its_key_normalises() -> None:
    driven = Driven(
        function(lambda self, row, ctx: (math.copysign(1, row.k), math.copysign(1, ctx.key))),
        "k double, v long",
        out="a double, b double",
    )
    assert driven.push((-0.0, 1)) == [(-1.0, 1.0)]


def test_the_context_tells_the_epoch_and_the_event_time() -> None:
    def process(self: Any, row: Any, ctx: Any) -> Any:
        return ctx.epoch, ctx.now_ms, ctx.subtask, ctx.parallelism, ctx.event_time_ms

    driven = Driven(
        function(process),
        "k long, t timestamp",
        out="a long, b long, c long, d long, e long",
        event_time="t",
    )
    time = dt.datetime(2024, 5, 6, 7, 8, 9, 123_999, tzinfo=dt.UTC)
    millis = int(time.timestamp()) * 1000 + 123
    assert driven.push((1, time), (1, None)) == [(1, 5001, 2, 3, millis)]
    assert driven.operator.untimed_rows == 1
    driven.begin(2)
    assert driven.push((1, time))[0][:2] == (2, 5002)


@pytest.mark.parametrize(
    "time",
    [
        dt.datetime(1970, 1, 1, tzinfo=dt.UTC),
        dt.datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=dt.UTC),
        dt.datetime(1, 1, 1, tzinfo=dt.UTC),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=dt.UTC),
        dt.datetime(2024, 2, 29, 12),
    ],
)
def test_event_times_become_milliseconds_without_rounding(time: dt.datetime) -> None:
    driven = Driven(
        function(lambda self, row, ctx: (ctx.event_time_ms,)),
        "k long, t timestamp" if time.tzinfo else "k long, t timestamp_ntz",
        out="ms long",
        event_time="t",
    )
    epoch = dt.datetime(1970, 1, 1, tzinfo=time.tzinfo)
    assert driven.push((1, time)) == [((time - epoch) // dt.timedelta(milliseconds=1),)]


def test_side_outputs_go_their_own_way() -> None:
    def process(self: Any, row: Any, ctx: Any) -> Any:
        ctx.output("late", (f"v{row.v}",))
        return (row.v,)

    driven = Driven(function(process))
    driven.push((1, 1), (1, 2))
    assert driven.rows == {None: [(1,), (2,)], "late": [("v1",), ("v2",)]}


def test_an_undeclared_side_output_is_refused_with_those_that_are() -> None:
    driven = Driven(function(lambda self, row, ctx: ctx.output("lost", (1,))))
    with pytest.raises(FunctionError, match="no side output 'lost'") as caught:
        driven.push((7, 1))
    assert "found: late" in str(caught.value) and "operator 'op'" in str(caught.value)
    assert (caught.value.operator, caught.value.key) == ("op", "7")


def test_a_generator_that_raises_half_way_is_reported_with_its_row() -> None:
    def process(self: Any, row: Any, ctx: Any) -> Any:
        yield (1,)
        raise KeyError("half way")

    driven = Driven(function(process))
    with pytest.raises(FunctionError, match="KeyError: 'half way'") as caught:
        driven.push((3, 4))
    assert caught.value.row == "Row(k=3, v=4)"


def test_a_misfit_in_the_output_is_reported_as_such() -> None:
    driven = Driven(function(lambda self, row, ctx: ("x",)))
    with pytest.raises(FunctionError, match="does not fit its schema") as caught:
        driven.push((3, 4))
    assert caught.value.field == "x"


def test_errors_of_cairn_itself_are_not_blamed_on_the_function() -> None:
    def process(self: Any, row: Any, ctx: Any) -> Any:
        raise CorruptFileError("a file")

    with pytest.raises(CorruptFileError, match="a file"):
        Driven(function(process)).push((1, 1))


class Opens(KeyedProcess[Any]):
    def open(self, ctx: Any) -> None:
        self.seen_epoch = ctx.epoch
        if ctx.epoch == 13:
            raise OSError("no connection")

    def process(self, row: Any, ctx: Any) -> Any:
        return (self.seen_epoch,)


def test_a_function_is_opened_once_and_not_once_per_epoch() -> None:
    driven = Driven(Opens())
    driven.begin(2)
    assert driven.push((1, 1)) == [(1,)]


def test_an_open_that_raises_is_reported_and_tried_again() -> None:
    driven = Driven(Opens())
    driven.operator.function_version = "an older one"
    with pytest.raises(FunctionError, match=r"open\(\) of operator 'op' raised OSError"):
        driven.begin(13)
    driven.begin(14)
    assert driven.push((1, 1)) == [(14,)]


def test_a_state_value_that_cannot_be_stored_fails_the_epoch_with_operator_and_key() -> None:
    def process(self: Any, row: Any, ctx: Any) -> Any:
        self.n.set(row.v * 2)
        self.m[row.v * 2] = 1

    declared = {"n": state.Value("long"), "m": state.Map("long", "long")}
    for name in declared:
        driven = Driven(function(process, **declared))
        with pytest.raises(FunctionError, match=r"operator 'op': state '.' of key 8: ") as caught:
            driven.push((1, 1), (8, 2**62))
            driven.operator.finish()
        assert isinstance(caught.value, CairnError), name


def test_a_function_without_state_has_no_delta() -> None:
    driven = Driven(function(lambda self, row, ctx: None))
    driven.push((1, 1))
    assert driven.operator.finish() == {}
    driven.operator.state.name_pending(None)
    assert driven.operator.state.bring_to(EMPTY_VERSION, range(GROUP_COUNT), []) == []


def finished() -> tuple[Operator, str]:
    """An operator with one row of state, pending, and the version it is pending under."""

    def process(self: Any, row: Any, ctx: Any) -> Any:
        self.n.set(row.v)

    driven = Driven(function(process, n=state.Value("long")))
    driven.push((1, 1))
    driven.operator.finish()
    driven.operator.state.name_pending("a delta")
    assert driven.operator.state.pending is not None
    return driven.operator, driven.operator.state.pending


ALL = range(GROUP_COUNT)


def test_pending_state_is_promoted_when_its_version_is_asked_for_and_there_is_no_way_back() -> None:
    operator, pending = finished()
    assert operator.state.bring_to(pending, ALL, []) == []
    assert operator.state.state_held().entries == 1
    assert operator.state.bring_to(EMPTY_VERSION, ALL, []) == [ALL]
    assert operator.state.state_held().entries == 0


@pytest.mark.parametrize("groups", [ALL, range(2)])
def test_state_of_another_version_is_forgotten(groups: range) -> None:
    operator, _ = finished()
    assert operator.state.bring_to("something else", groups, []) == [groups]
    assert operator.state.state_held().entries == 0
    assert operator.state.version == INCOMPLETE


def test_other_groups_keep_what_is_here_in_the_version_they_had() -> None:
    operator, pending = finished()
    half = GROUP_COUNT // 2
    pieces = [Piece(0, half, pending), Piece(half, GROUP_COUNT - half, "elsewhere")]
    assert operator.state.bring_to("united", ALL, pieces) == [ALL], (
        "the same groups, another history"
    )
    operator, pending = finished()
    assert operator.state.bring_to("cut", range(half), [Piece(0, half, pending)]) == []
    operator.state.version = "cut"
    wider = [Piece(0, half, "cut"), Piece(half, GROUP_COUNT - half, "elsewhere")]
    assert operator.state.bring_to("united", ALL, wider) == [range(half, GROUP_COUNT)]


def test_closing_calls_close_once_and_frees_the_state() -> None:
    class Closes(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> Any: ...

        def close(self) -> None:
            assert not hasattr(self, "closed")
            self.closed = True

    driven = Driven(Closes())
    closed = driven.operator.function
    driven.operator.close()
    driven.operator.close()
    assert vars(closed) == {"closed": True}


class Pass(KeyedProcess[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        return (row.k,)


def test_a_side_output_called_like_late_rows_of_an_input_is_one_of_the_users() -> None:
    """Of an operator with one input late rows go to "late", which nobody has asked for here."""
    rows, out = parse_schema("k long, at timestamp"), parse_schema("k long")
    outlets = (OutletSpec(None, out, (), ()), OutletSpec("late.mine", rows, (), ()))
    inlet = InletSpec(0, rows, ("k",), "at")
    spec = OperatorSpec("op", (inlet,), cloudpickle.dumps(Pass()), outlets)
    operator = Operator(spec, make_backend("heap", "", 1 << 26), group_count=GROUP_COUNT)
    operator.declare()
    operator.state.bring_to(EMPTY_VERSION, range(GROUP_COUNT), [])
    operator.state.version = EMPTY_VERSION
    begin = Begin(
        run_id="r", term=1, epoch=1, execution=Execution(), parent=None, now_ms=0,
        watermark_ms=None, parallelism=1, group_count=GROUP_COUNT, inline_bytes_max=0,
    )  # fmt: skip
    operator.open(begin, 0)
    operator.begin_rows()
    untimed = pa.array([{"k": 1, "at": None}], pa.struct(list(rows)))
    operator.run(pa.array([0], pa.int32()), pa.array([None], pa.int64()), untimed)
    operator.finish()
    assert (operator.untimed_rows, [o.rows_out for o in operator.outlets]) == (1, [0, 0])
