"""A real run, served: asked by the client and told what to do over HTTP, to its end."""

from __future__ import annotations

import operator
import socket
import threading
from urllib.parse import urlsplit

import pytest

import cairn
from cairn import Job, KeyedProcess, PlanError, sinks, state
from cairn.snapshots import open_savepoint

CONTROL = "a-token-for-control"


class Mean:
    """Of numbers; what users get is no accumulator."""

    def create(self):
        return 0, 0.0

    def add(self, held, value):
        return held[0] + 1, held[1] + value

    def merge(self, a, b):
        return a[0] + b[0], a[1] + b[1]

    def result(self, held):
        return held[1] / held[0]


class Account(KeyedProcess):
    total = state.Reducing("double", operator.add)
    seen = state.Map("string", "bigint")
    recent = state.List("double")
    mean = state.Aggregating("struct<n:bigint,s:double>", Mean())

    def process(self, row, ctx):
        self.total.add(row.amount)
        self.seen[row.shop] = self.seen.get(row.shop, 0) + 1
        self.recent.append(row.amount)
        self.mean.add(row.amount)
        yield (1,)


def build(spark, rows):
    job = Job("served", max_parallelism=8)
    keyed = job.source("rows", rows.stream(spark)).key_by("name")
    keyed.process(Account(), schema="x int", uid="accounts").sink_to(sinks.Noop(), uid="out")
    return job


def test_run_is_queried_rescaled_saved_and_stopped_from_outside(spark, make_input, tmp_path):
    rows = make_input("name string, shop string, amount double")
    rows.add(("ann", "a", 1.0), ("bob", "b", 2.0), ("ann", "b", 3.0))
    serve = cairn.Serve(control_token=CONTROL)
    job = build(spark, rows)
    with job.start(
        checkpoint=str(tmp_path / "ckpt"), trigger="100 milliseconds", serve=serve
    ) as run:
        run.process_all_available()
        with cairn.client(run.url, control_token=CONTROL) as asking:
            first = asking.query("accounts", "total", "ann")
            assert (first.value, first.found) == (4.0, True)
            assert first.epoch == run.metrics().epoch
            assert asking.query("accounts", "seen", "ann").value == {"a": 1, "b": 1}
            assert asking.query("accounts", "recent", "ann").value == [1.0, 3.0]
            assert asking.query("accounts", "mean", "ann").value == 2.0
            assert asking.query_many("accounts", "total", ["ann", "bob", "nobody"]).values == {
                "ann": 4.0, "bob": 2.0,
            }  # fmt: skip
            assert asking.table("accounts", "seen").num_rows == 3
            found = asking.sql("select sum(value) as s from accounts_total")
            assert found.to_pylist() == [{"s": 6.0}]
            assert asking.job()["name"] == "served"
            assert asking.epochs()[0].epoch >= first.epoch

            asking.rescale(1)
            rows.add(("ann", "c", 5.0))
            run.process_all_available()
            assert run.parallelism == 1
            after = asking.query("accounts", "total", "ann")
            assert after.value == 9.0 and after.epoch > first.epoch
            assert asking.query("accounts", "total", "ann", epoch=first.epoch).value == 4.0

            saved = asking.savepoint("friday")
            assert open_savepoint(saved["url"]).info.epoch == saved["epoch"]
            assert saved["url"].endswith("/ckpt-savepoints/friday")
            assert asking.stop("last")["stopping"]
            assert run.wait(60)
        assert run.status == "stopped"
    for thread in threading.enumerate():
        if thread.name == "cairn-stop":
            thread.join(60)
    assert open_savepoint(str(tmp_path / "ckpt-savepoints" / "last")).info.job == "served"
    with socket.socket() as port:
        assert port.connect_ex(("127.0.0.1", urlsplit(run.url).port)) != 0, "nobody answers"


def test_port_that_is_taken_is_refused_before_the_job_is_taken_over(spark, make_input, tmp_path):
    rows = make_input("name string, shop string, amount double").add(("ann", "a", 1.0))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PlanError, match="cannot listen"):
            build(spark, rows).start(checkpoint=str(tmp_path / "ckpt"), serve=address)
    assert not (tmp_path / "ckpt").exists()
