"""Functions by the batch: what they are given, what they may give back, what they keep."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cairn import BatchProcess, FunctionError, KeyedProcess, PlanError, state
from cairn.plan.check import check_function, check_handlers
from cairn.slot import batches
from cairn.testing import Harness


class Count(BatchProcess):
    """Count and sum per key; one row per key of each batch."""

    held = state.Value("struct<n: bigint, s: double>")

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        grouped = pa.table({"k": ctx.keys, "v": batch["v"]}).group_by("k", use_threads=False)
        found = grouped.aggregate([([], "count_all"), ("v", "sum")])
        keys = found["k"].combine_chunks()
        before = self.held.get_many(keys)
        n = pc.add(found["count_all"].combine_chunks(), pc.fill_null(before.field("n"), 0))
        s = pc.add(found["v_sum"].combine_chunks(), pc.fill_null(before.field("s"), 0.0))
        self.held.put_many(keys, pa.StructArray.from_arrays([n, s], ["n", "s"]))
        return pa.table({"n": n, "k": keys, "s": s})


def counting(**more: Any) -> Harness:
    return Harness(
        Count(), schema="k long, v double", key_by="k", out="k long, n long, s double", **more
    )


def test_a_batch_of_many_keys_goes_through_state_and_comes_out_in_the_declared_order() -> None:
    with counting() as harness:
        assert harness.push([(1, 0.5), (2, 1.0), (1, 0.25)]) == [(1, 2, 0.75), (2, 1, 1.0)]
        assert harness.push((1, 1.0)) == [(1, 3, 1.75)]
        assert harness.state("held", 1) == (3, 1.75) and harness.state("held", 9) is None


def test_state_survives_commit_restore_and_base_and_not_rollback() -> None:
    with counting() as harness:
        harness.push([(1, 0.5), (None, 1.0)])
        harness.commit()
        harness.push([(1, 0.5), (3, 1.0)])
        harness.rollback()
        assert harness.state("held", 1) == (1, 0.5) and harness.state("held", 3) is None
        harness.snapshot_and_restore()
        harness.push((1, 0.5))
        harness.snapshot_and_restore(base=True)
        assert harness.state("held", 1) == (2, 1.0) and harness.state("held", None) == (1, 1.0)


class Last(BatchProcess):
    """Keeps every row by its time; gives what is due at the end of an epoch."""

    rows = state.Map("long", "string")

    def process(self, batch: pa.RecordBatch, ctx: Any) -> None:
        self.rows.put_many(ctx.keys, batch["at"], batch["text"])

    def end_epoch(self, ctx: Any) -> Any:
        keys, entries, values = self.rows.between(None, ctx.now_ms)
        self.rows.put_many(keys, entries, pa.nulls(len(keys), pa.string()))
        a, b = keys.flatten()
        return [pa.record_batch({"a": a, "b": b, "at": entries, "text": values})]


def test_end_epoch_comes_after_the_last_row_and_without_rows_too() -> None:
    with Harness(
        Last(), schema="a long, b string, at long, text string", key_by=("a", "b"),
        out="a long, b string, at long, text string",
    ) as harness:  # fmt: skip
        assert harness.push([(1, "x", 20, "later"), (2, None, 10, "soon"), (1, "x", 10, "s")]) == []
        harness.commit()
        harness.clock.advance_ms(15)
        harness.snapshot_and_restore()
        assert harness.outputs == [(1, "x", 10, "s"), (2, None, 10, "soon")]
        assert harness.state("rows", (1, "x")) == {20: "later"}
        harness.clock.advance_ms(15)
        harness.commit()
        assert harness.outputs[2:] == [(1, "x", 20, "later")]
        assert harness.state("rows", (1, "x")) == {}


class Echo(BatchProcess):
    """What it is built with decides what it gives back."""

    def __init__(self, make: Any) -> None:
        self.make = make
        self.sizes: list[int] = []

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        self.sizes.append(batch.num_rows)
        assert len(ctx.keys) == batch.num_rows
        assert ctx.times_us is None or len(ctx.times_us) == batch.num_rows
        return self.make(batch, ctx)


def echo(make: Any, **more: Any) -> Harness:
    return Harness(
        Echo(make), schema="k long, v double", key_by="k", out="k long NOT NULL, v double", **more
    )


@pytest.mark.parametrize(
    ("make", "field", "says"),
    [
        (lambda b, c: b.select(["k"]), "v", "missing; found k"),
        (lambda b, c: b.append_column("w", b["v"]), "w", "no such field"),
        (lambda b, c: pa.record_batch({"k": ["x"], "v": [1.0]}), "k", "string does not fit"),
        (lambda b, c: pa.record_batch({"k": [1.5], "v": [1.0]}), "k", "double does not fit"),
        (lambda b, c: pa.record_batch({"k": pa.nulls(1, "int64"), "v": [1.0]}), "k", "NOT NULL"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_field(make: Any, field: str, says: str) -> None:
    with echo(make) as harness, pytest.raises(FunctionError, match=says) as caught:
        harness.push((1, 1.0))
    assert caught.value.facts["field"] == field
    assert caught.value.facts["operator"] == "harness"
    assert "expected: k bigint" in str(caught.value)


def test_what_is_no_batch_is_refused_and_what_it_raises_comes_with_its_place() -> None:
    with echo(lambda b, c: {"k": 1}) as harness, pytest.raises(FunctionError, match="a dict"):
        harness.push((1, 1.0))

    def fail(batch: Any, ctx: Any) -> None:
        raise KeyError("gone")

    with echo(fail) as harness:
        with pytest.raises(FunctionError, match=r"process\(\) of operator .* KeyError") as caught:
            harness.push((1, 1.0))
        assert "in fail" in caught.value.facts["traceback"]


def test_batches_tables_and_iterables_of_them_come_out_in_order_and_integers_are_widened() -> None:
    narrow = pa.record_batch({"v": pa.array([1, 2], pa.int32()), "k": pa.array([3, 4], pa.int16())})

    def make(batch: pa.RecordBatch, ctx: Any) -> Any:
        yield batch
        yield None
        yield pa.Table.from_batches([narrow])

    with echo(make) as harness:
        assert harness.push([(7, 0.5)]) == [(7, 0.5), (3, 1.0), (4, 2.0)]


def test_side_outputs_take_batches() -> None:
    def make(batch: pa.RecordBatch, ctx: Any) -> Any:
        ctx.output("big", batch.filter(pc.greater(batch["v"], 1.0)))

    with echo(make, sides={"big": "k long, v double"}) as harness:
        assert harness.push([(1, 0.5), (2, 5.0)]) == []
        assert harness.side("big") == [(2, 5.0)]
    with (
        echo(lambda b, c: c.output("small", b)) as harness,
        pytest.raises(FunctionError, match="no side output 'small'"),
    ):
        harness.push((1, 1.0))


def test_rows_are_gathered_into_calls_of_one_size_however_they_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "CALL_ROWS_MAX", 10)
    with echo(lambda b, c: b) as harness:
        operator = harness._operator
        harness._begin()
        for size in (3, 4, 5, 21, 1):
            rows = pa.array([{"k": at, "v": 0.0} for at in range(size)], pa.struct(harness.schema))
            operator.run(pa.array([0] * size, pa.int32()), None, rows)
        assert harness.function.sizes == [10, 10, 10]
        harness.commit()
        assert harness.function.sizes == [10, 10, 10, 4]
        expected = [at for size in (3, 4, 5, 21, 1) for at in range(size)]
        assert [row[0] for row in harness.outputs] == expected


def test_late_rows_do_not_come_to_it() -> None:
    import datetime as dt

    def make(batch: pa.RecordBatch, ctx: Any) -> Any:
        assert ctx.times_us.to_pylist() == [1_000_000]
        return batch.select(["k"]).append_column("v", pc.cast(batch["k"], pa.float64()))

    with Harness(
        Echo(make), schema="k long, at timestamp", key_by="k", out="k long, v double",
        event_time="at",
    ) as harness:  # fmt: skip
        at = dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC)
        assert harness.push([(1, at), (2, None)]) == [(1, 1.0)]


# --- refusals before anything runs ----------------------------------------------------------------


class Lists(BatchProcess):
    items = state.List("long")

    def process(self, batch: Any, ctx: Any) -> None: ...


class Pickled(BatchProcess):
    anything = state.Value(object)

    def process(self, batch: Any, ctx: Any) -> None: ...


class Rows(KeyedProcess[Any]):
    def process(self, row: Any, ctx: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "kind", "says"),
    [
        (Lists(), BatchProcess, "Value and Map state only"),
        (Pickled(), None, "pickled objects"),
        (Rows(), BatchProcess, r"run it with .*\.process\("),
        (Count(), KeyedProcess, r"run it with .*\.process_batch\("),
        (lambda batch: batch, BatchProcess, "subclass cairn.BatchProcess"),
        (Count, BatchProcess, "give an object"),
        (BatchProcess(), None, r"no process\(batch, ctx\)"),
    ],
)
def test_what_cannot_run_by_the_batch_is_refused(function: Any, kind: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check_function(function, "op", kind)
        check_handlers(function, "op")


class Balance(BatchProcess):
    """Adds what one input brings, takes what the other takes; reports each call."""

    held = state.Value("bigint", default=0)

    def on_wins(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        return self._add("wins", batch["v"], ctx)

    def on_losses(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        return self._add("losses", pc.negate(batch["v"]), ctx)

    def _add(self, name: str, values: pa.Array, ctx: Any) -> Any:
        if pc.any(pc.equal(values, 13)).as_py():
            raise ValueError("thirteen")
        rows = pa.table({"k": ctx.keys, "v": values})
        found = rows.group_by("k", use_threads=False).aggregate([("v", "sum")])
        keys = found["k"].combine_chunks()
        now = pc.add(self.held.get_many(keys), found["v_sum"].combine_chunks())
        self.held.put_many(keys, now)
        times = None if ctx.times_us is None else pc.max(ctx.times_us).as_py()
        return pa.table(
            {"input": [name] * len(keys), "k": keys, "v": now, "t": [times] * len(keys)}
        )


def balance(**more: Any) -> Harness:
    return Harness(
        Balance(),
        {"wins": "k int, v bigint, ts bigint", "losses": "ts bigint, id bigint, v bigint"},
        {"wins": "k", "losses": "id"},
        "input string, k bigint, v bigint, t bigint",
        **more,
    )


def test_inputs_are_called_one_after_the_other_with_their_own_rows_and_keys() -> None:
    with balance(event_time="ts") as harness:
        found = harness.push(losses=[(5, 1, 2), (1, 2, 4)], wins=[(1, 10, 3), (1, 1, 7)])
        assert found == [
            ("wins", 1, 11, 7000),
            ("losses", 2, -4, 5000),
            ("losses", 1, 9, 5000),
        ]
        assert harness.push(losses=(8, 1, 1)) == [("losses", 1, 8, 8000)]
        harness.snapshot_and_restore()
        assert harness.state("held", 1) == 8


def test_each_input_has_late_rows_of_its_own() -> None:
    with balance(event_time="ts") as harness:
        harness.advance_watermark(10)
        assert harness.push(wins=[(1, 1, 9), (1, 2, 10)], losses=[(3, 1, 1)]) == [
            ("wins", 1, 2, 10_000)
        ]
        assert harness.side("late.wins") == [(1, 1, 9)]
        assert harness.side("late.losses") == [(3, 1, 1)]


def test_rows_are_cut_into_calls_by_their_number_whatever_their_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "CALL_ROWS_MAX", 2)
    with balance() as harness:
        found = harness.push(wins=[(1, 1, 0), (2, 2, 0), (3, 3, 0)], losses=[(0, 1, 1)])
        assert [row[:2] for row in found] == [("wins", 1), ("wins", 2), ("wins", 3), ("losses", 1)]


def test_a_failing_row_of_an_input_is_put_aside_under_its_name() -> None:
    with balance(on_error="dead-letter") as harness:
        found = harness.push(wins=[(1, 13, 0), (1, 1, 0)], losses=[(0, 1, -13), (0, 2, 5)])
        assert [row[:3] for row in found] == [("wins", 1, 1), ("losses", 2, -5)]
        letters = harness.side("errors")
        assert [(row.input, row.key) for row in letters] == [("wins", "1"), ("losses", "1")]
        assert "thirteen" in letters[0].error and '"id": 1' in letters[1].row


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["wins", "losses", "draws"], r"Balance has no on_draws\(batch, ctx\)"),
        (["wins"], r"has on_losses\(\), but no such input"),
    ],
)
def test_an_input_without_a_method_and_a_method_without_an_input_are_refused(
    names: list[str], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        check_handlers(Balance(), "op", names)


def test_methods_of_inputs_take_a_batch_and_the_context() -> None:
    class Short(BatchProcess):
        def on_a(self, batch: Any) -> None: ...

        def on_b(self, batch: Any, ctx: Any) -> None: ...

    with pytest.raises(PlanError, match=r"let it take \(batch, ctx\)"):
        check_handlers(Short(), "op", ["a", "b"])
    with pytest.raises(PlanError, match="takes no broadcast"):
        check_handlers(Count(), "op", has_broadcast=True)


def test_single_keys_and_many_keys_are_not_mixed_up() -> None:
    class Single(BatchProcess):
        held = state.Value("long")

        def process(self, batch: Any, ctx: Any) -> None:
            self.held.get()

    class Many(KeyedProcess[Any]):
        held = state.Value("long")

        def process(self, row: Any, ctx: Any) -> None:
            self.held.get_many(pa.array([1]))

    for function, says in ((Single(), "get_many"), (Many(), "BatchProcess")):
        with (
            Harness(function, schema="k long", key_by="k", out="k long") as harness,
            pytest.raises((FunctionError, PlanError), match=says),
        ):
            harness.push((1,))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda held, keys: held.get_many(pa.array(["x"])), "keys of string; expected bigint"),
        (lambda held, keys: held.put_many(keys, pa.array([1.0, 2.0])), "2 values for 1 keys"),
        (lambda held, keys: held.put_many(keys, pa.array(["x"])), "values of string"),
    ],
)
def test_arrays_that_do_not_fit_the_state_are_refused(call: Any, says: str) -> None:
    class Wrong(BatchProcess):
        held = state.Value("double")

        def process(self, batch: Any, ctx: Any) -> None:
            call(self.held, ctx.keys)

    with (
        Harness(Wrong(), schema="k long", key_by="k", out="k long") as harness,
        pytest.raises(FunctionError, match=says),
    ):
        harness.push((1,))


def test_a_default_stands_in_for_what_is_not_there() -> None:
    class Defaults(BatchProcess):
        number = state.Value("long", default=7)
        pair = state.Value("struct<a: long, b: string>", default={"a": None, "b": "x"})

        def process(self, batch: Any, ctx: Any) -> Any:
            numbers = self.number.get_many(ctx.keys)
            pairs = self.pair.get_many(ctx.keys)
            self.number.put_many(ctx.keys, pc.add(numbers, 1))
            return pa.table({"n": numbers, "a": pairs.field("a"), "b": pairs.field("b")})

    with Harness(
        Defaults(), schema="k long", key_by="k", out="n long, a long, b string"
    ) as harness:
        assert harness.push([(1,), (2,)]) == [(7, None, "x")] * 2
        assert harness.push([(2,), (3,)]) == [(8, None, "x"), (7, None, "x")]
