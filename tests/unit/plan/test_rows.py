"""`.map`, `.filter` and `.flat_map`: where they run, what they are called, what they refuse."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from cairn import Job, Process, sinks
from cairn.driver.coordinator.resume import check_resume
from cairn.errors import FunctionError, PlanError, StateNotFoundError
from cairn.operators.rows import FilterRows, FlatMapRows, MapRows, RowFunction
from cairn.plan.deploy import job_spec
from cairn.plan.explain import explain_graph
from cairn.plan.graph import RowsNode, Watermark
from cairn.protocol.letters import SCHEMA as LETTERS
from cairn.protocol.messages import find_failure
from cairn.protocol.scoped_state import states_by_scope
from cairn.testing import Harness
from cairn.types import parse_schema
from cairn.worker.forward import SubtaskError
from cairn.worker.rows import RowStep, RowSteps
from tests.unit.driver.coordinator.manifests import entry, epoch
from tests.unit.plan.programs import ROW, process, source, transform

TIMED = "k long, t timestamp"


@pytest.fixture
def job() -> Job:
    return Job("j")


def double(row: Any) -> Any:
    return {"k": row.k, "v": row.v * 2}


def is_even(row: Any) -> bool:
    return bool(row.v % 2 == 0)


def test_before_a_key_a_function_adds_neither_level_nor_shuffle(job: Job) -> None:
    process(source(job, "s").map(double).filter(is_even), "a").sink_to(sinks.Noop(), uid="out")
    graph = job.graph()
    assert [op.uid for op in graph.operators] == ["a"]
    assert len(graph.levels) == len(graph.edges) == 1
    assert [n.name for n in graph.nodes.values() if isinstance(n, RowsNode)] == [
        "s.map",
        "s.filter",
    ]


def test_behind_an_operator_a_function_is_chained_to_it(job: Job) -> None:
    process(source(job, "s"), "a").flat_map(lambda row: [row, row]).filter(is_even).sink_to(
        sinks.Noop(), uid="out"
    )
    graph = job.graph()
    assert [op.uid for op in graph.operators] == ["a", "a.flat_map", "a.filter"]
    assert graph.chained == {"a.flat_map", "a.filter", "out"}
    assert len(graph.levels) == len(graph.edges) == 1


def test_rows_of_sources_and_operators_are_each_mapped_where_they_are(job: Job) -> None:
    rows = source(job, "s")
    both = rows.union(process(rows, "a")).map(double, uid="twice")
    process(both, "b")
    graph = job.graph()
    assert isinstance(graph.nodes["twice"], RowsNode)
    assert "a.map" in graph.chained


def test_rows_of_different_spark_stages_are_each_mapped_in_theirs(job: Job) -> None:
    rows = source(job, "s")
    a = process(rows, "a")
    b = process(a, "b")
    united = rows.union(source(job, "t"), transform(a), transform(b))
    process(united.map(double, uid="twice"), "c")
    graph = job.graph()
    mapped = [n.inputs for n in graph.nodes.values() if isinstance(n, RowsNode)]
    assert [len(inputs) for inputs in mapped] == [2, 1, 1], "sources are in one stage"
    assert {name for name, n in graph.nodes.items() if isinstance(n, RowsNode)} == {
        "twice", "a.map", "b.map",
    }  # fmt: skip
    assert [[op.uid for op in level.operators] for level in graph.levels] == [["a"], ["b"], ["c"]]


def test_a_stream_keeps_its_columns_unless_a_schema_is_given(job: Job) -> None:
    rows = source(job, "s")
    assert rows.map(double).schema == rows.filter(is_even).schema == rows.schema
    assert rows.flat_map(double, schema="k long").schema == parse_schema("k long")


def test_event_time_follows_its_column(job: Job) -> None:
    rows = source(job, "s", TIMED, "t", Watermark(0))
    process(rows.map(lambda row: row), "a", TIMED)
    process(rows.map(lambda row: row, schema="k long"), "b", "k long")
    process(process(rows, "c", TIMED).map(lambda row: row), "d", TIMED)
    found = {edge.consumer: edge.event_time for edge in job.graph().edges}
    assert found == {"a": "t", "b": None, "c": "t", "d": "t"}


def test_a_function_behind_an_operator_gets_late_rows_and_rows_without_a_time(job: Job) -> None:
    rows = source(job, "s", TIMED, "t", Watermark(0))
    process(rows, "a", TIMED).map(lambda row: row)
    specs = {op.uid: op for level in spec(job).levels for op in level.operators}
    assert specs["a"].event_time == "t"
    assert specs["a.map"].event_time is None


def spec(job: Job, **more: Any) -> Any:
    return job_spec(job.graph(**more), job_id="j", checkpoint="c", backend="heap")


def test_names_are_made_of_where_the_rows_come_from(job: Job) -> None:
    rows = source(job, "s")
    rows.map(double).filter(is_even).map(double)
    process(rows, "a").map(double).map(double, uid="mine").filter(is_even)
    named = [name for name, node in job._nodes.items() if "." in name or name == "mine"]
    assert named == ["s.map", "s.filter", "s.map-2", "a.map", "mine", "a.filter"]
    with pytest.raises(PlanError, match="uid 'a' is used twice"):
        rows.map(double, uid="a")
    with pytest.raises(PlanError, match="not a plain name"):
        rows.map(double, uid="a b")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (5, "map 's.map': expected a function of a row, found 5"),
        (lambda row, ctx: row, r"the function \(row, ctx\) is called with 1 arguments"),
    ],
)
def test_what_is_no_function_of_a_row_is_refused(job: Job, function: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        source(job, "s").map(function)


def test_a_keyed_stream_is_filtered_and_stays_keyed(job: Job) -> None:
    keyed = source(job, "s").key_by("k").filter(is_even)
    assert repr(keyed) == "<<stream s.filter: k, v> by k>"


def test_rows_that_fail_are_put_aside_by_operators_only(job: Job) -> None:
    rows = source(job, "s").map(double)
    process(rows, "a")
    assert [op.uid for op in job.graph("dead-letter").operators] == ["s.map", "a"]
    assert [op.uid for op in job.graph().operators] == ["a"]
    letters = rows.side("errors")
    assert letters.schema == LETTERS
    letters.sink_to(sinks.Noop(), uid="letters")
    assert [op.uid for op in job.graph().operators] == ["s.map", "a"]
    with pytest.raises(PlanError, match="has no side output 'late'"):
        rows.side("late")  # type: ignore[arg-type]


def test_a_watermark_behind_a_function_that_became_an_operator_is_refused(job: Job) -> None:
    rows = source(job, "s", TIMED).map(lambda row: row)
    process(rows.event_time("t", watermark="1 second"), "a", TIMED)
    assert job.graph().watermarks
    with pytest.raises(PlanError, match=r"operator 's.map' emits these rows.*\n.*on_error='fail'"):
        job.graph("dead-letter")


def test_a_side_output_is_refused_where_a_watermark_was_declared_before(job: Job) -> None:
    rows = source(job, "s", TIMED).map(lambda row: row)
    process(rows.event_time("t", watermark="1 second"), "a", TIMED)
    rows.side("errors").sink_to(sinks.Noop(), uid="errors")
    with pytest.raises(PlanError, match=r"operator 's.map' emits these rows"):
        job.graph()


def test_the_name_of_a_function_over_rows_is_taken(job: Job) -> None:
    rows = source(job, "s").map(double)
    with pytest.raises(PlanError, match=r"(?s)uid 's.map' is used twice.*a function over rows has"):
        process(rows, "s.map")


def test_a_function_that_cannot_be_pickled_is_refused_at_the_start(job: Job) -> None:
    lock = threading.Lock()
    process(source(job, "s").filter(lambda row: lock.locked()), "a")
    with pytest.raises(PlanError, match=r"(?s)operator 's.filter'.*in open\(\) of a Process"):
        spec(job)


def test_functions_are_explained_by_their_name_or_place(job: Job) -> None:
    process(source(job, "s").map(double), "a").filter(lambda row: True)
    graph = explain_graph(job.graph())
    assert [(each.name, each.function) for each in graph.transforms] == [("s.map", "map double")]
    operators = {op.uid: op.function for op in graph.operators}
    assert operators["a.filter"].startswith("filter lambda at test_rows.py:")


def test_an_operator_without_state_may_leave_the_program(job: Job) -> None:
    process(source(job, "s"), "a")
    (operator,) = (op for level in spec(job).levels for op in level.operators)
    entries = {each.uid: each for each in states_by_scope(operator)}
    newest = epoch(1, entry(uid="a"), entry(uid="a.map"))
    check_resume(newest, entries, job_name="j", url="c", allow_dropped_state=False)


# In Spark's Python worker


def run(steps: Sequence[tuple[RowFunction, str]], *rows: Any) -> Iterator[Any]:
    """Run steps, each with its output schema, over rows of `k long, v long`."""
    made, before = [], parse_schema(ROW)
    for n, (function, schema) in enumerate(steps):
        made.append(RowStep(f"step-{n}", function, before, parse_schema(schema)))
        before = parse_schema(schema)
    columns = [pa.array(column, pa.int64()) for column in zip(*rows, strict=True)]
    batch = pa.RecordBatch.from_arrays(columns, schema=parse_schema(ROW))
    for out in RowSteps(made)(iter([batch])):
        yield from (tuple(row.values()) for row in out.to_pylist())


def test_steps_run_one_after_the_other() -> None:
    def pairs(row: Any) -> Iterator[Any]:
        if row.v:
            yield row.k, str(row.v)
            yield {"v": "again", "k": row.k}

    steps = [
        (FilterRows(is_even), ROW),
        (MapRows(double), ROW),
        (FlatMapRows(pairs), "k long, v string"),
    ]
    assert list(run(steps, (1, 1), (2, 2), (3, 0), (4, 4))) == [
        (2, "4"),
        (2, "again"),
        (4, "8"),
        (4, "again"),
    ]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda row: 1 // row.v, "map() of operator 'step-0' raised ZeroDivisionError"),
        (
            lambda row: None,
            "map() of operator 'step-0' raised TypeError: the function",
        ),
        (
            lambda row: [row],
            "map() of operator 'step-0' raised TypeError: the function",
        ),
        (lambda row: (1, "a"), "operator 'step-0' emitted a row that does not fit its schema"),
        (lambda row: {"x": 1}, "operator 'step-0' emitted a row that does not fit its schema"),
    ],
)
def test_an_error_names_function_row_and_place(function: Any, expected: str) -> None:
    with pytest.raises(SubtaskError) as raised:
        list(run([(MapRows(function), ROW), (FilterRows(is_even), ROW)], (7, 0)))
    failure = find_failure(str(raised.value))
    assert failure is not None and failure.kind == "FunctionError"
    assert failure.message.startswith(expected)
    assert "\n  row: " in failure.message
    assert "\n  at: " in failure.message and "test_rows.py" in failure.message
    assert failure.facts["operator"] == "step-0"


def test_an_error_of_a_later_step_is_not_blamed_on_the_first() -> None:
    with pytest.raises(SubtaskError) as raised:
        list(run([(MapRows(double), ROW), (FlatMapRows(lambda row: row.nope), ROW)], (7, 0)))
    failure = find_failure(str(raised.value))
    assert failure is not None and failure.facts["operator"] == "step-1"
    assert failure.message.startswith("flat_map() of operator 'step-1' raised AttributeError")


def test_a_later_step_without_a_place_does_not_get_that_of_the_first() -> None:
    first = (MapRows(double), ROW)
    with pytest.raises(SubtaskError) as raised:
        list(run([first, (FlatMapRows(operator.itemgetter("x")), ROW)], (7, 0)))
    failure = find_failure(str(raised.value))
    assert failure is not None and failure.facts["operator"] == "step-1"
    assert "in double" not in failure.message


def test_errors_of_cairn_keep_their_kind() -> None:
    def look(row: Any) -> Any:
        raise StateNotFoundError("no state 'x'")

    with pytest.raises(SubtaskError) as raised:
        list(run([(MapRows(look), ROW)], (7, 0)))
    failure = find_failure(str(raised.value))
    assert failure is not None and failure.kind == "StateNotFoundError"


# In a slot


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (MapRows(double), [(1, 2), (1, 4)]),
        (FilterRows(is_even), [(1, 2)]),
        (FlatMapRows(lambda row: [row] * row.v), [(1, 1), (1, 2), (1, 2)]),
    ],
)
def test_the_same_functions_run_in_slots(function: Process[Any], expected: list[Any]) -> None:
    with Harness(function, ROW, None, ROW) as harness:
        assert harness.push([(1, 1), (1, 2)]) == expected


def test_in_a_slot_errors_name_the_call_and_letters_hold_the_row() -> None:
    function = MapRows(lambda row: 1 // row.v)
    with Harness(function, ROW, None, ROW) as harness, pytest.raises(FunctionError) as raised:
        harness.push((1, 0))
    assert str(raised.value).startswith("map() of operator 'harness' raised ZeroDivisionError")
    with Harness(MapRows(double), "k long, v string", None, ROW, on_error="dead-letter") as harness:
        assert harness.push([(1, "x")]) == []
        assert len(harness.side("errors")) == 1
