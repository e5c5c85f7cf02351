"""Plain functions over rows, and expressions as keys, through Spark."""

from __future__ import annotations

import pytest
from pyspark.sql import functions as F

import cairn
from cairn import FunctionError, Job, KeyedProcess, PlanError, sinks, state
from tests.spark.support import finish, published

ROWS = "id long, email string"


class Count(KeyedProcess):
    n = state.Value(int, default=0)

    def process(self, row, ctx):
        self.n.set(self.n.get() + 1)
        return row.email_key, row.id, self.n.get()


def parse(row):
    return row.id, row.email.strip()


def build(spark, rows, out):
    """Functions before a key and behind an operator; the key is an expression."""
    job = Job("rows", max_parallelism=8)
    emails = job.source("emails", rows.stream(spark)).map(parse).filter(lambda row: row.id < 100)
    keyed = emails.key_by(F.lower("email").alias("email_key"))
    counted = keyed.process(Count(), schema="email_key string, id long, n long", uid="counts")
    twice = counted.flat_map(
        lambda row: [(row.email_key, row.n)] * 2, schema="email_key string, n long"
    )
    twice.sink_to(sinks.Files(str(out)), uid="out")
    return job


def test_rows_are_mapped_and_keyed_by_an_expression(spark, make_input, tmp_path):
    rows = make_input(ROWS).add((1, "A@x "), (2, "b@x"), (100, "a@x")).add((3, "a@X"))
    job = build(spark, rows, tmp_path / "out")
    assert len(job.graph().levels) == 1
    assert "shuffle 0, by email_key" in job.explain()
    finish(job, tmp_path / "c")
    found = sorted((row["email_key"], row["n"]) for row in published(tmp_path / "out"))
    assert found == sorted([("a@x", 1), ("a@x", 2), ("b@x", 1)] * 2)
    table = cairn.read_state(spark, str(tmp_path / "c"), "counts", "n")
    assert table.columns == ["key_group", "email_key", "value"]
    assert {(row.email_key, row.value) for row in table.collect()} == {("a@x", 2), ("b@x", 1)}


def test_a_function_that_fails_in_spark_is_reported_or_its_row_put_aside(
    spark, make_input, tmp_path
):
    rows = make_input(ROWS).add((1, "a@x"), (2, None))
    job = build(spark, rows, tmp_path / "out")
    with pytest.raises(FunctionError, match=r"map\(\) of operator 'emails.map' raised Attri") as e:
        finish(job, tmp_path / "c")
    assert "email=None" in e.value.facts["row"]
    assert "test_rows.py" in e.value.facts["at"]
    # The same checkpoint goes on with the function in the slots.
    with pytest.warns(UserWarning, match="rows that emails.map"):
        finish(job, tmp_path / "c", on_error="dead-letter")
    assert len(published(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (lambda: F.lower("email"), r"the key column has no name\n  next: name it with .alias"),
        (lambda: F.col("id").cast("string"), "the key column has no name"),
        (lambda: F.rand().alias("r"), "it is not deterministic"),
        (lambda: F.date_trunc("day", F.current_timestamp()).alias("d"), "it is not deterministic"),
        (lambda: F.explode(F.split("email", "@")).alias("p"), "it is not a value of one row"),
        (lambda: F.lower("email").alias("id"), "the stream has a column 'id' already"),
        (lambda: F.lower("email").alias("Email"), "the stream has a column 'email' already"),
        (lambda: F.lower("nope").alias("x"), "cannot be planned: .*nope"),
        (lambda: 5, "expected names of columns and Spark expressions, found 5"),
        (lambda: F.create_map("email", "id").alias("m"), "which Spark cannot hash"),
    ],
)
def test_an_expression_that_cannot_be_a_key_is_refused(spark, make_input, key, message):
    rows = Job("j").source("s", make_input(ROWS).stream(spark))
    with pytest.raises(PlanError, match=message):
        rows.key_by(key())


def test_a_plain_column_may_be_given_as_an_expression(spark, make_input):
    rows = Job("j").source("s", make_input(ROWS).stream(spark))
    assert repr(rows.key_by(F.col("email"), "id")) == "<<stream s: id, email> by email, id>"
