"""Queries of a job that runs: committed values of one epoch, through a rescale and a loss."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter

import pytest

import cairn
from cairn import Job, KeyedProcess, sinks, state
from tests.spark.support import epoch_of, eventually, slot_pids

KEYS = 50_000
CLIENTS = 4
QUERIES = 2_500
"""Of each client, at least."""


class Stamp(KeyedProcess):
    """Every epoch writes its number to every key: any other number is of another epoch."""

    number = state.Value("long")

    def process(self, row, ctx):
        self.number.set(ctx.epoch)


def stamping(spark) -> Job:
    rows = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", KEYS)
        .load()
        .selectExpr(f"value % {KEYS} as k")
    )
    job = Job("stamps")
    stamps = job.source("rows", rows).key_by("k").process(Stamp(), schema="k long", uid="stamp")
    stamps.sink_to(sinks.Noop(), uid="out")
    return job


class Client(threading.Thread):
    """Asks for pairs of keys, on and on, and checks every answer."""

    def __init__(self, run, seed: int, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.run_asked, self.over, self.random = run, over, random.Random(seed)
        self.sources: Counter[str] = Counter()
        self.epochs: set[int] = set()
        self.wrong: object = None

    def run(self) -> None:
        newest = 0
        try:
            while not self.over.is_set() or self.sources.total() < QUERIES:
                pair = self.random.sample(range(KEYS), 2)
                answers = self.run_asked.query_many("stamp", "number", pair)
                if answers.values != dict.fromkeys(pair, answers.epoch) or answers.epoch < newest:
                    self.wrong = (pair, answers, newest)
                    return
                newest = answers.epoch
                self.epochs.add(newest)
                self.sources[answers.source] += 1
        except BaseException as error:
            self.wrong = error


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_ten_thousand_queries_see_committed_values_of_one_epoch_each(spark, tmp_path):
    job = stamping(spark)
    with job.start(checkpoint=str(tmp_path), parallelism=2, trigger="0 seconds") as run:

        def comes_to(epoch: int) -> None:
            assert eventually(lambda: epoch_of(run) >= epoch, within_s=60)

        comes_to(2)
        over = threading.Event()
        clients = [Client(run, seed, over) for seed in range(CLIENTS)]
        for client in clients:
            client.start()
        comes_to(run.metrics().epoch + 3)
        run.rescale(3)
        assert eventually(lambda: run.parallelism == 3)
        comes_to(run.metrics().epoch + 3)
        os.kill(slot_pids(run._engine.coordinator.run_id)[0], signal.SIGKILL)
        comes_to(run.metrics().epoch + 3)
        over.set()
        for client in clients:
            client.join(60)
        asked = sum((client.sources for client in clients), Counter())
        last = run.metrics().epoch
        assert run.query("stamp", "number", 7).epoch >= last
    for client in clients:
        assert client.wrong is None, client.wrong
        assert len(client.epochs) >= 6
    assert asked.total() >= CLIENTS * QUERIES
    assert asked["slot"] > asked["checkpoint"]
    # The run has ended and its slots with it; what it committed is still there to be asked for.
    after = run.query("stamp", "number", 7)
    assert (after.value, after.source) == (after.epoch, "checkpoint")


def test_a_run_before_its_first_epoch_says_so(spark, make_input, tmp_path):
    source = make_input("k bigint")
    job = Job("early")
    rows = job.source("rows", source.stream(spark))
    stamps = rows.key_by("k").process(Stamp(), schema="k long", uid="stamp")
    stamps.sink_to(sinks.Noop(), uid="out")
    with (
        job.start(checkpoint=str(tmp_path / "c"), parallelism=1) as run,
        pytest.raises(cairn.errors.EpochError, match="no committed epoch yet"),
    ):
        run.query("stamp", "number", 1)
