"""What is refused: before Spark runs where it can be known, with the row where it cannot."""

from __future__ import annotations

import operator
import warnings

import pytest

import cairn
from cairn import (
    FunctionError,
    Job,
    KeyedProcess,
    KeyGroupCountError,
    PlanError,
    RestoreError,
    StateSchemaError,
    sinks,
    state,
)
from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.spark_config import check_session
from tests.spark.support import epochs, finish, published, stored_state


class Count(KeyedProcess):
    n = state.Value("bigint", default=0)

    def process(self, row, ctx):
        self.n.set(self.n.get() + 1)
        yield row.k, self.n.get()


OUT = "k bigint, n bigint"


@pytest.fixture
def rows(make_input):
    return make_input("k bigint, v string, m map<string,int>").add((1, "a", {}), (2, "b", None))


@pytest.fixture
def one_attempt(monkeypatch):
    """An epoch that fails is not tried again, to save the time."""
    defaults = {**Coordinator.__init__.__kwdefaults__, "attempts_max": 1}
    monkeypatch.setattr(Coordinator.__init__, "__kwdefaults__", defaults)


def jobs_run(spark):
    return len(spark.sparkContext.statusTracker().getJobIdsForGroup(None))


def test_wrong_job_is_refused_before_spark_runs_anything(spark, rows):
    batch = spark.read.parquet(str(rows.folder))
    before = jobs_run(spark)
    job = Job("wrong")
    source = job.source("rows", rows.stream(spark))
    with pytest.raises(PlanError, match="'rows' is used twice"):
        job.source("rows", rows.stream(spark))
    with pytest.raises(PlanError, match="is not a streaming DataFrame"):
        job.source("batch", batch)
    with pytest.raises(PlanError, match="two Spark sessions"):
        job.source("other", rows.stream(spark.newSession()))
    with pytest.raises(PlanError, match="no column 'nope'\n  found: k, v, m"):
        source.key_by("k", "nope")
    with pytest.raises(PlanError, match="'m' is map<string,int>"):
        source.key_by("m")
    with pytest.raises(PlanError, match="no column 'ts'"):
        job.source("timed", rows.stream(spark), event_time="ts")
    with pytest.raises(PlanError, match="expected: a timestamp"):
        job.source("timed", rows.stream(spark), event_time="m")
    keyed = source.key_by("k")
    counted = keyed.process(Count(), schema=OUT, uid="count")
    with pytest.raises(PlanError, match="'count' is used twice"):
        keyed.process(Count(), schema=OUT, uid="count")
    with pytest.raises(PlanError, match="'count' is used twice"):
        counted.sink_to(sinks.Noop(), uid="count")
    with pytest.raises(PlanError, match=r"give an object, Count\(\)"):
        keyed.process(Count, schema=OUT, uid="class")
    with pytest.raises(PlanError, match="no process"):
        keyed.process(KeyedProcess(), schema=OUT, uid="empty")
    with pytest.raises(PlanError, match="the streams differ in n, v"):
        source.transform(lambda df: df.select("k", "v")).union(counted)
    with pytest.raises(PlanError, match="with itself"):
        source.union(source)
    with pytest.raises(PlanError, match=r"transform cannot be planned.*nope") as refused:
        source.transform(lambda df: df.select("nope"))
    assert f"\n  at: {__file__}:" in str(refused.value) and "Project" not in str(refused.value)
    with pytest.raises(PlanError, match="must return a DataFrame, found int"):
        source.transform(lambda df: 1)
    with pytest.raises(PlanError, match="two schemas"):
        counted.side("late", "k bigint")
        counted.side("late", "k string")
    with pytest.raises(PlanError, match="does nothing"):
        idle = Job("idle")
        idle.source("rows", rows.stream(spark))
        idle.graph()
    assert jobs_run(spark) == before


def test_state_declared_twice_is_refused(spark, rows):
    class Again(Count):
        n = state.Value("string")

    class Replaced(Count):
        n = 3

    keyed = Job("twice").source("rows", rows.stream(spark)).key_by("k")
    with pytest.raises(PlanError, match="state 'n' is declared twice in Again") as refused:
        keyed.process(Again(), schema=OUT, uid="count")
    assert refused.value.state == "n"
    with pytest.raises(PlanError, match="declared as state and then replaced by int"):
        keyed.process(Replaced(), schema=OUT, uid="count")
    on_object = Count()
    on_object.extra = state.Value("bigint")
    with pytest.raises(PlanError, match="not on its class"):
        keyed.process(on_object, schema=OUT, uid="count")


def test_function_that_cannot_travel_is_refused_before_anything_is_written(spark, rows, tmp_path):
    import threading

    function = Count()
    function.lock = threading.Lock()
    job = Job("stuck")
    job.source("rows", rows.stream(spark)).key_by("k").process(function, schema=OUT, uid="count")
    with pytest.raises(PlanError, match=r"create connections, locks and the like in open\(\)"):
        finish(job, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint" / "epochs").exists()


def job_of(spark, rows, *, uid="count", key="k", function=None, group_count=8, name="job"):
    job = Job(name, max_parallelism=group_count)
    source = job.source("rows", rows.stream(spark))
    source.key_by(key).process(function or Count(), schema=OUT, uid=uid)
    return job


def test_program_that_does_not_fit_the_checkpoint_neither_runs_nor_stops_the_one_that_does(
    spark, rows, tmp_path
):
    class Renamed(KeyedProcess):
        m = state.Value("bigint")

        def process(self, row, ctx):
            pass

    class OtherType(KeyedProcess):
        n = state.Value("string")

        def process(self, row, ctx):
            pass

    class Wider(Count):
        more = state.List("string")

    at = tmp_path / "checkpoint"
    finish(job_of(spark, rows), at)
    before = sorted(path.name for path in (at / "epochs").iterdir())
    for expected, message, job in [
        (PlanError, "state of operator 'count', the program has: renamed", {"uid": "renamed"}),
        (StateSchemaError, r"keyed by \(k bigint\), the job by \(v string\)", {"key": "v"}),
        (StateSchemaError, "holds state 'n', which", {"function": Renamed()}),
        (StateSchemaError, "value of bigint, the job declares value of string",
         {"function": OtherType()}),
        (KeyGroupCountError, "max_parallelism=8, the job declares 16", {"group_count": 16}),
        (RestoreError, "belongs to another job", {"name": "another"}),
    ]:  # fmt: skip
        with pytest.raises(expected, match=message):
            finish(job_of(spark, rows, **job), at)
    for wrong, message in [
        ({"parallelism": 9}, "between 1 and max_parallelism"),
        ({"parallelism": 0}, "between 1 and max_parallelism"),
        ({"backend": "tape"}, "no backend 'tape'"),
        ({"retained_epochs": 0}, "at least 1"),
    ]:
        with pytest.raises(PlanError, match=message):
            finish(job_of(spark, rows), at, **wrong)
    with pytest.raises(PlanError, match="trigger"):
        job_of(spark, rows).start(checkpoint=str(at), trigger="now and then")
    assert sorted(path.name for path in (at / "epochs").iterdir()) == before
    # More state and a new operator beside the old one do fit; so does loss that is asked for.
    finish(job_of(spark, rows, function=Wider()), at)
    rows.add((1, "a", None))
    finish(job_of(spark, rows, uid="renamed"), at, allow_dropped_state=True)
    finish(job_of(spark, rows, uid="renamed"), at)
    assert stored_state(job_of(spark, rows, uid="renamed"), at)["renamed"]["n"] == {1: 1}


@pytest.mark.parametrize(
    ("emitted", "field", "why"),
    [
        (("x", 1), "k", "expected bigint, found str 'x'"),
        ((1, 2**63), "n", "expected bigint, found int"),
        ({"k": 1, "m": 2}, "m", "no such field"),
        ((1, 2, 3), None, "it has 3 values"),
        ((None, 1), "k", "NOT NULL"),
    ],
)
def test_row_that_does_not_fit_names_operator_row_and_field(
    spark, rows, tmp_path, one_attempt, emitted, field, why
):
    class Emits(KeyedProcess):
        def process(self, row, ctx):
            return [(row.k, 0), emitted]

    job = Job("misfit", max_parallelism=8)
    source = job.source("rows", rows.stream(spark))
    source.key_by("k").process(Emits(), schema="k bigint not null, n bigint", uid="emits").sink_to(
        sinks.Files(tmp_path / "out"), uid="out"
    )
    with pytest.raises(FunctionError) as raised:
        finish(job, tmp_path / "checkpoint", parallelism=1)
    error = raised.value
    assert error.operator == "emits" and getattr(error, "field", None) == field
    assert why in str(error) and repr(emitted) in str(error) and "k bigint" in str(error)
    assert published(tmp_path / "out") == [] and epochs(tmp_path / "checkpoint") == []


def test_error_in_user_code_tells_operator_key_row_traceback_and_log(spark, rows, tmp_path):
    class Breaks(KeyedProcess):
        n = state.Value("bigint", default=0)

        def process(self, row, ctx):
            print(f"looking at {row.v}")
            self.n.set(1)
            if row.k == 2:
                return self.divide(row)

        def divide(self, row):
            return row.k / 0

    job = Job("breaks", max_parallelism=8)
    source = job.source("rows", rows.stream(spark))
    source.key_by("k").process(Breaks(), schema=OUT, uid="breaks")
    with pytest.raises(FunctionError) as raised:
        finish(job, tmp_path / "checkpoint")
    error = raised.value
    assert (error.operator, error.key) == ("breaks", "2")
    assert error.row == "Row(k=2, v='b', m=None)"
    assert error.cause == "ZeroDivisionError('division by zero')"
    assert "in divide" in error.traceback and "row.k / 0" in error.traceback
    # Tried twice: the same error of the same row would come however often it is tried.
    assert error.attempts == 2 and error.epoch == 2
    assert error.at.startswith(f"{__file__}:") and error.at.endswith(" in divide")
    for part in ("'breaks'", "key: 2", "row: Row(k=2", "division by zero", error.at, error.log):
        assert part in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)
    with open(error.log) as log:
        text = log.read()
    assert text.count("looking at b") == 2 and "ZeroDivisionError" in text
    assert epochs(tmp_path / "checkpoint") == []


def test_error_of_any_size_and_in_any_place_arrives(spark, rows, tmp_path, one_attempt):
    """A message of megabytes; an error in open(); state that does not fit; no row at all."""

    class Loud(KeyedProcess):
        def process(self, row, ctx):
            raise ValueError("ä\n;" * 1_000_000)

    class Opens(KeyedProcess):
        def open(self, ctx):
            raise OSError("no such host")

        def process(self, row, ctx):
            pass

    class Overflows(KeyedProcess):
        n = state.Reducing("tinyint", operator.add)

        def process(self, row, ctx):
            self.n.add(100)
            self.n.add(100)

    class Odd(KeyedProcess):
        def process(self, row, ctx):
            return 5

    for function, message in [
        (Loud(), "ValueError: ä\n;ä"),
        (Opens(), r"open\(\) of operator 'count' raised OSError: no such host"),
        (Overflows(), "'n'.*200"),
        (Odd(), r"process\(\) returned 5; expected a row"),
    ]:
        with pytest.raises(FunctionError, match=message) as raised:
            finish(job_of(spark, rows, function=function), tmp_path / type(function).__name__)
        assert raised.value.operator == "count"


class _Context:
    def __init__(self, **conf):
        self.sparkContext = self
        settings = {**cairn.spark_config(), **conf}
        self.conf = {name: value for name, value in settings.items() if value is not None}

    def getConf(self):
        return self

    def getAll(self):
        return list(self.conf.items())


def test_session_is_refused_when_results_could_be_wrong_and_warned_of_when_slow():
    with pytest.raises(PlanError, match=r"spark\.speculation is on") as refused:
        check_session(_Context(**{"spark.speculation": "true"}))
    assert refused.value.setting == "spark.speculation"
    checksum = "spark.sql.shuffle.orderIndependentChecksum.enabled"
    with pytest.raises(PlanError, match="Checksum"):
        check_session(_Context(**{checksum: "false"}))
    with pytest.warns(UserWarning, match="subtasks will move away"):
        check_session(_Context(**{"spark.shuffle.reduceLocality.enabled": "true"}))
    assert warned_of(_Context()) == []


@pytest.mark.parametrize(
    ("conf", "is_warned_of"),
    [
        ({}, False),
        ({"spark.locality.wait.process": "9s"}, True),
        ({"spark.locality.wait.process": "30s"}, False),
        ({"spark.locality.wait.process": "2min"}, False),
        ({"spark.locality.wait.process": None}, True),
        ({"spark.locality.wait.process": None, "spark.locality.wait": "20000"}, False),
        ({"spark.locality.wait.process": "0s", "spark.master": "local[4]"}, False),
    ],
)
def test_a_cluster_that_gives_subtasks_away_after_a_short_wait_is_warned_of(conf, is_warned_of):
    told = warned_of(_Context(**{"spark.master": "spark://host:7077", **conf}))
    assert [("spark.locality.wait.process is not 60s" in text) for text in told] == (
        [True] if is_warned_of else []
    )


def test_session_of_cairn_gives_no_warning(spark):
    assert warned_of(spark) == []


def warned_of(session):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_session(session)
    return [str(each.message) for each in caught]
