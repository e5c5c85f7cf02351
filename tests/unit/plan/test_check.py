"""A wrong program is refused before anything runs, and told what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from cairn import BatchProcess, Job, KeyedProcess, Process, WindowFunction, sinks, state, windows
from cairn.errors import PlanError
from cairn.plan.check import check_event_time, check_watermark
from cairn.plan.deploy import job_spec
from cairn.plan.graph import Watermark
from cairn.types import parse_schema
from tests.unit.plan.programs import Pass, process, source


@pytest.fixture
def job() -> Job:
    return Job("j")


@pytest.mark.parametrize("name", ["a b", "-a", ".a", "a/b", "é", "x" * 101, None, 5])
def test_names_that_are_not_plain_are_refused(name: Any, job: Job) -> None:
    with pytest.raises(PlanError, match="not a plain name"):
        Job(name)
    with pytest.raises(PlanError, match="not a plain name"):
        source(job, "s").sink_to(sinks.Noop(), uid=name)


def test_what_is_given_no_uid_is_refused(job: Job) -> None:
    rows = source(job, "s")
    keyed: Any = rows.key_by("k")
    for build in (
        lambda: rows.sink_to(sinks.Noop()),
        lambda: keyed.process(Pass(), schema="k long"),
        lambda: keyed.aggregate(n="count(*)"),
        lambda: rows.deduplicate(on="k"),
        lambda: keyed.process(Pass(), schema="k long", uid=""),
    ):
        with pytest.raises(PlanError, match=r"no uid is given\n  next: give one, uid='...'"):
            build()


@pytest.mark.parametrize("name", ["a", "A.b_c-1", "1", "x" * 100])
def test_plain_names_are_accepted(name: str, job: Job) -> None:
    assert Job(name).name == name
    source(job, "s").sink_to(sinks.Noop(), uid=name)
    assert [sink.uid for sink in job.graph().sinks] == [name]


def test_a_uid_is_used_once_among_sources_operators_and_sinks(job: Job) -> None:
    rows = source(job, "s")
    process(rows, "a")
    for again, found in (
        (lambda: process(rows, "a"), "an operator"),
        (lambda: process(rows, "s"), "a source"),
        (lambda: rows.sink_to(sinks.Noop(), uid="a"), "an operator"),
    ):
        with pytest.raises(PlanError, match=f"is used twice\n  found: {found} has this name"):
            again()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((), "at least one column"),
        (("x",), "no column 'x'\n  found: k, v, m, n"),
        (("k", "k"), "names a column twice"),
        (("m",), "column 'm' is map<string,bigint>, which Spark cannot hash"),
        (("n",), "which Spark cannot hash"),
    ],
)
def test_keys_that_cannot_be_are_refused(job: Job, columns: Any, message: str) -> None:
    rows = source(job, "s", "k long, v long, m map<string,long>, n array<map<int,int>>")
    with pytest.raises(PlanError) as caught:
        rows.key_by(*columns)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("column", "message"), [("x", "no column 'x'"), ("k", "column 'k' is double")]
)
def test_event_time_must_be_a_column_that_tells_time(column: str, message: str) -> None:
    schema = parse_schema("k double, t timestamp, n timestamp_ntz, d date, s string, m long")
    with pytest.raises(PlanError) as caught:
        check_event_time(column, schema, "source 's'")
    assert message in str(caught.value) and "source 's'" in str(caught.value)
    for known in (*"tndsm", None):
        check_event_time(known, schema, "source 's'")


def test_a_watermark_needs_an_event_time_and_a_span_of_time() -> None:
    where = "source 's'"
    assert check_watermark(None, "1 minute", None, where) is None
    assert check_watermark("10 seconds", None, "t", where) == Watermark(10_000, None)
    assert check_watermark("0 seconds", "1 hour", "t", where) == Watermark(0, 3_600_000)
    with pytest.raises(PlanError, match="watermark of source 's': it needs an event time"):
        check_watermark("1 second", None, None, where)
    with pytest.raises(PlanError, match="watermark of source 's' must be a span of time"):
        check_watermark("soon", None, "t", where)
    with pytest.raises(PlanError, match="idle_after of source 's' must be a span of time"):
        check_watermark(None, "later", None, where)


def test_streams_that_differ_cannot_be_united(job: Job) -> None:
    rows = source(job, "s", "k long, v long")
    with pytest.raises(PlanError, match="the streams differ in v, w"):
        rows.union(source(job, "t", "k long, w long"))
    with pytest.raises(PlanError, match="the streams differ in v\n  found: v bigint, and v int"):
        rows.union(source(job, "u", "k long, v int"))
    for call in (rows.union, rows.broadcast):
        with pytest.raises(PlanError, match="found KeyedStream, expected a stream without keys"):
            call(rows.key_by("k"))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="with itself"):
        rows.union(rows)
    with pytest.raises(PlanError, match="two jobs"):
        rows.union(source(Job("other"), "s"))


def test_late_rows_of_connected_streams_are_by_input(job: Job) -> None:
    class Two(KeyedProcess[Any]):
        def on_a(self, row: Any, ctx: Any) -> Any: ...

        def on_b(self, row: Any, ctx: Any) -> Any: ...

    streams = {name: source(job, name).key_by("k") for name in "ab"}
    both = job.connect(**streams).process(Two(), schema="k long", uid="two")
    with pytest.raises(PlanError, match=r"expected: late\.a, late\.b"):
        both.side("late", "k long")


def test_a_function_for_broadcast_rows_needs_a_broadcast(job: Job) -> None:
    class Ruled(Pass):
        def process_broadcast(self, row: Any, ctx: Any) -> Any: ...

    rows = source(job, "s")
    with pytest.raises(PlanError, match="the stream has no broadcast"):
        rows.key_by("k").process(Ruled(), schema="k long", uid="ruled")
    ruled = rows.key_by("k").broadcast(source(job, "rules"))
    ruled.process(Ruled(), schema="k long", uid="ruled")


def test_what_is_no_function_is_refused(job: Job) -> None:
    class Empty(KeyedProcess[Any]):
        pass

    keyed = source(job, "s").key_by("k")
    for function, message in (
        (Pass, r"give an object, Pass\(\), not the class"),
        (len, "is not a KeyedProcess"),
        (Empty(), r"has no process\(row, ctx\)"),
    ):
        with pytest.raises(PlanError, match=f"operator 'a': .*{message}"):
            keyed.process(function, schema="k long", uid="a")  # type: ignore[arg-type]


def test_what_is_no_sink_is_refused(job: Job) -> None:
    with pytest.raises(PlanError, match=r"is not a cairn.sinks.Sink but str"):
        source(job, "s").sink_to("out", uid="out")  # type: ignore[arg-type]


def declaring(**declared: Any) -> KeyedProcess[Any]:
    names = {**declared, "process": lambda self, row, ctx: None}
    return type("Fn", (KeyedProcess,), names)()  # type: ignore[no-any-return]


@pytest.mark.parametrize("entry", ["map<string,long>", object, "array<map<int,int>>"])
def test_a_map_state_needs_keys_that_can_be_compared(job: Job, entry: Any) -> None:
    keyed = source(job, "s").key_by("k")
    with pytest.raises(PlanError, match=r"operator 'a', state 'm': .* cannot be a map key"):
        keyed.process(declaring(m=state.Map(entry, "long")), schema="k long", uid="a")


@pytest.mark.parametrize(("declared", "default"), [("long", "0"), ("int", 2**31), ("boolean", 0)])
def test_a_default_that_does_not_fit_its_state_is_refused(
    job: Job, declared: str, default: Any
) -> None:
    keyed = source(job, "s").key_by("k")
    function = declaring(n=state.Value(declared, default=default))
    with pytest.raises(PlanError, match="state 'n': its default does not fit: expected"):
        keyed.process(function, schema="k long", uid="a")


def test_state_is_declared_once_on_the_class_and_with_an_object_of_its_own(job: Job) -> None:
    keyed = source(job, "s").key_by("k")

    class Base(KeyedProcess[Any]):
        n = state.Value("long")

        def process(self, row: Any, ctx: Any) -> Any: ...

    class Twice(Base):
        n = state.Value("long")

    class Replaced(Base):
        n = 5  # type: ignore[assignment]

    late = Pass()
    late.m = state.Value("long")  # type: ignore[attr-defined]
    shared = state.Value("long")
    for function, message in (
        (Twice(), "declared twice"),
        (Replaced(), "declared as state and then replaced"),
        (late, "on the object"),
    ):
        with pytest.raises(PlanError, match=message):
            keyed.process(function, schema="k long", uid="a")
    # Python 3.11 wraps what is raised while a class is made.
    with pytest.raises((PlanError, RuntimeError)):
        declaring(a=shared, b=shared)


@pytest.mark.parametrize("name", [n for n in dir(KeyedProcess) if not n.startswith("_")])
def test_a_state_named_like_an_attribute_of_the_engine_is_refused(job: Job, name: str) -> None:
    keyed = source(job, "s").key_by("k")
    function = type("Fn", (Pass,), {name: state.Value("long")})()
    with pytest.raises(PlanError, match=rf"state '{name}' of Fn replaces \w+\.{name}, which cairn"):
        keyed.process(function, schema="k long", uid="a")


def test_a_users_base_class_has_what_users_define_and_nothing_else() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    lives = {"open", "close", "on_epoch_committed"}
    assert public(Process) == lives | {"process", "process_broadcast"}
    timed = {"on_timer", "on_timer_failed", "on_epoch_end"}
    assert public(KeyedProcess) == public(Process) | timed
    assert public(BatchProcess) == lives | {"process", "begin_epoch", "end_epoch", "next_timer"}


def test_side_outputs_have_one_schema_each(job: Job) -> None:
    stream = process(source(job, "s"), "a")
    stream.side("late", "k long")
    assert stream.side("late", "k bigint").schema == parse_schema("k long")
    with pytest.raises(PlanError, match="has two schemas"):
        stream.side("late", "k string")


def test_state_used_outside_a_running_function_says_how_to_test_it() -> None:
    function: Any = declaring(n=state.Value("long"), m=state.Map("long", "long"))
    for use in (
        lambda: function.n.get(),
        lambda: function.n.set(1),
        lambda: function.m[1],
        lambda: len(function.m),
    ):
        with pytest.raises(PlanError, match=r"cairn\.testing\.Harness"):
            use()


def test_state_that_expires_by_event_time_needs_rows_that_have_it(job: Job) -> None:
    by_event = declaring(n=state.Value("long", ttl=state.TTL("1 hour", clock="event")))
    timed = "k long, ts timestamp"
    for name, event_time in (("with", "ts"), ("without", None)):
        rows = source(job, name, timed, event_time)
        rows.key_by("k").process(by_event, schema="k long", uid=f"op-{name}")
    with pytest.raises(PlanError, match="operator 'op-without', state 'n': its ttl counts event"):
        job_spec(job.graph(), job_id="", checkpoint="", backend="heap")


def test_a_batch_function_has_no_state_that_expires(job: Job) -> None:
    class Batches(BatchProcess):
        n = state.Value("long", ttl="1 hour")

        def process(self, batch: Any, ctx: Any) -> Any:
            return None

    source(job, "s").key_by("k").process_batch(Batches(), schema="k long", uid="b")
    with pytest.raises(PlanError, match="state 'n': state that expires is for functions that run"):
        job_spec(job.graph(), job_id="", checkpoint="", backend="heap")


class NoContext(KeyedProcess):
    def process(self, row: Any) -> Any: ...


class BadTimer(Pass):
    def on_timer(self, ctx: Any) -> Any: ...


class BadOpen(Pass):
    def open(self) -> None: ...


class BadBatch(BatchProcess):
    def process(self, batch: Any) -> Any: ...


class BadFold(Pass):
    total = state.Reducing("long", lambda stored: stored)


class BadMigrate(Pass):
    total = state.Value("long", migrate=lambda: 1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (NoContext(), r"NoContext.process(row: 'Any') -> 'Any' is called with 2 arguments"),
        (BadTimer(), r"BadTimer.on_timer(ctx: 'Any') -> 'Any' is called with 2 arguments"),
        (BadOpen(), r"BadOpen.open() -> 'None' is called with 1 arguments"),
        (BadBatch(), r"BadBatch.process(batch: 'Any') -> 'Any' is called with 2 arguments"),
        (BadFold(), r"state 'total': its function (stored) is called with 2 arguments"),
        (BadMigrate(), r"state 'total': migrate=() is called with 1 arguments"),
    ],
)
def test_method_that_cannot_be_called_is_refused_with_its_place(
    job: Job, function: Any, message: str
) -> None:
    keyed = source(job, "s").key_by("k")
    run: Any = keyed.process_batch if isinstance(function, BatchProcess) else keyed.process
    with pytest.raises(PlanError) as raised:
        run(function, schema="k long", uid="op")
    assert message in str(raised.value) and "operator 'op'" in str(raised.value)
    assert f"\n  at: {__file__}:" in str(raised.value)


class AnyArguments(KeyedProcess):
    def process(self, *given: Any, **more: Any) -> Any: ...

    def on_timer(self, time_ms: int, ctx: Any, more: int = 0) -> Any: ...


def test_methods_may_take_more_than_they_are_given(job: Job) -> None:
    function = AnyArguments()
    source(job, "s").key_by("k").process(function, schema="k long", uid="op")
    (node,) = job.graph().operators
    assert node.function is function


def test_handlers_of_inputs_must_take_row_and_context(job: Job) -> None:
    class Orders(KeyedProcess):
        def on_a(self, row: Any) -> Any: ...

        def on_b(self, row: Any, ctx: Any) -> Any: ...

    inputs = {name: source(job, name).key_by("k") for name in "ab"}
    with pytest.raises(PlanError, match=r"(?s)Orders.on_a\(row.*next: let it take \(row, ctx\)"):
        job.connect(**inputs).process(Orders(), schema="k long", uid="op")


def test_functions_of_windows_and_sinks_must_fit_too(job: Job) -> None:
    class Rows(WindowFunction):
        def process(self, key: Any, rows: Any, ctx: Any) -> Any: ...

    windowed = source(job, "s").key_by("k").window(windows.tumbling("1 minute", time="processing"))
    with pytest.raises(PlanError, match=r"let it take \(key, window, rows, ctx\)"):
        windowed.process(Rows(), schema="n long", uid="op")
    with pytest.raises(PlanError, match=r"let it take \(left, right\)"):
        windowed.reduce(lambda row: row, uid="op")
    with pytest.raises(PlanError, match=r"let it take \(row, epoch\)"):
        sinks.Foreach(lambda row: None)
