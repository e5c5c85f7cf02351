"""Whatever dies between prepare and the end of a commit: each row is visible once, nothing is left.

Real servers, real processes, real SIGKILL. All kinds of sinks are outputs of one job, so
that a driver that dies at a point of one of them dies between two others as well.
"""

from __future__ import annotations

import collections
import concurrent.futures
import time

import pytest

from cairn import CommitConflictError
from cairn.testing.crash import call_at_points
from tests import servers
from tests.marks import for_soak
from tests.soak.chain import Chain
from tests.soak.lossy import LossyProxy
from tests.soak.schedule import SINK_POINTS
from tests.soak.targets import TARGETS, Site, new_site, targets
from tests.spark.programs.outputs import Account, build
from tests.spark.support import epochs, eventually, finish

POSTGRES = ["postgres", "upsert", "prepared"]


@pytest.fixture
def chain(spark, tmp_path):
    def make(*names, on=spark):
        site = new_site(tmp_path / str(len(list(tmp_path.iterdir()))))
        return Chain(site, names, on=on)

    return make


def run_here(spark, chain, *, function=None, **options):
    """The rest of the job, by a driver in this process; its run."""
    job = build(spark, chain.site, targets(chain.site, list(chain.names)), function)
    return finish(job, chain.site.checkpoint, **options)


def clear_up(spark, chain):
    """What a dead slot has left goes when the next driver takes over, and not before."""
    run_here(spark, chain)
    chain.check()


def attempts(chain):
    return [epoch.timings.attempts for epoch in epochs(chain.site.checkpoint)]


# The driver


def one_place_per_sink():
    """A place in each sink's commit, every point among them; `make soak` tries them all."""
    uses = collections.Counter()
    for name, target in TARGETS.items():
        points = [p for p in SINK_POINTS if target.pieces or p != "driver.sink.piece"]
        point = min(points, key=uses.__getitem__)
        uses[point] += 1
        yield f"{point}@{name}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chains", [1, for_soak(2)])
def test_driver_killed_anywhere_between_prepare_and_the_end_of_commit_publishes_once(
    spark, chain, chains
):
    """Two chains at the same time; what one sink is through with, the next one begins with.

    One of them in `make test`, where the simulation has every point of every sink.
    """
    # Before the record and after it; the simulation has every point of no sink in particular.
    places = ["driver.epoch.ran", "driver.manifest.written", *one_place_per_sink()]
    assert {place.split("@")[0] for place in places} >= {*SINK_POINTS}
    made = [chain(*TARGETS) for _ in range(chains)]
    with concurrent.futures.ThreadPoolExecutor(chains) as pool:
        for done in [pool.submit(each.die, places[n::2]) for n, each in enumerate(made)]:
            done.result()
    for each in made:
        assert each.killed and not each.passed_by
        run_here(spark, each)
        each.check()


# Slots


@pytest.mark.slow
def test_slot_killed_while_its_sinks_write_leaves_nothing_behind(spark, chain, tmp_path):
    """Most of what the subtask has for the sinks is with them by then."""
    work = chain(*TARGETS)
    work.events.add(1)
    work.events.add(1, rows=6_000)
    mark = tmp_path / "died"
    run_here(spark, work, function=Account(5_400, str(mark)), parallelism=1)
    assert mark.exists() and attempts(work)[-1] > 1
    clear_up(spark, work)


# Targets


@pytest.mark.slow
def test_target_that_goes_away_during_a_commit_pauses_the_job_until_it_returns(spark, chain):
    work = chain("files", *POSTGRES)
    work.events.add(3)
    server = servers.postgres()
    passed = []

    def told(point):
        passed.append(point)
        # In the second epoch, once the first of PostgreSQL's sinks is about to publish it.
        if passed.count("driver.manifest.written") == 2 and point == "driver.sink.committed":
            passed.clear()
            server.stop()

    job = build(spark, work.site, targets(work.site, list(work.names)))
    options = {"parallelism": 2, "trigger": "available-now"}
    with (
        call_at_points(told),
        job.start(checkpoint=str(work.site.checkpoint), **options) as run,
    ):
        try:
            assert eventually(lambda: run.status == "paused", within_s=60), run.status
            time.sleep(3)
            assert run.status == "paused" and not run._engine.ended.is_set()
        finally:
            server.start()
        assert run.wait(120)
    assert run.status == "finished"
    clear_up(spark, work)


@pytest.mark.soak
@pytest.mark.slow
def test_commit_whose_answer_is_lost_is_made_once(spark, tmp_path):
    """The server has done it; the driver, or a slot that prepares, hears of a broken connection."""
    direct = new_site(tmp_path / "job")
    proxy = LossyProxy(direct.postgres, tmp_path / "p")
    work = Chain(Site(direct.folder, proxy.uri, direct.redis), POSTGRES)
    work.events.add(4)

    def told(point):
        # A job whose sinks cannot be opened would not start.
        if point == "driver.epoch.begun":
            proxy.answers_to_lose = 6

    try:
        with call_at_points(told):
            run_here(spark, work)
        assert proxy.lost == 6
        proxy.answers_to_lose = 0
        run_here(spark, work)
    finally:
        proxy.close()
    for target in targets(direct, POSTGRES).values():
        target.check(work.events)


@pytest.mark.soak
@pytest.mark.slow
def test_commit_that_every_sink_has_made_and_not_told_is_made_once(spark, chain, monkeypatch):
    work = chain(*TARGETS)
    work.events.add(2)
    made = set()

    def lossy(commit):
        def committed(sink, epoch, *arguments, **more):
            commit(sink, epoch, *arguments, **more)
            if (sink.context.uid, epoch) not in made:
                made.add((sink.context.uid, epoch))
                raise ConnectionError("the answer was lost")

        return committed

    for kind in {type(target.sink()) for target in targets(work.site, list(TARGETS)).values()}:
        monkeypatch.setattr(kind, "commit", lossy(kind.commit))
    run_here(spark, work)
    assert {uid for uid, _ in made} == set(TARGETS)
    clear_up(spark, work)


# Two drivers


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "place",
    [
        for_soak("driver.epoch.ran:2"),
        # tests/contract/test_sink_contract.py has it without Spark.
        for_soak("driver.sink.unmarked@postgres:2"),
    ],
)
def test_of_two_drivers_exactly_one_publishes(spark, chain, place):
    """The older one stands still with an epoch prepared, until the newer one has cleaned up."""
    # One that stands still would keep the scheduler of a JVM it shares from going on.
    work = chain("files", *POSTGRES, on=None)
    work.events.add(4)
    with work.drive("--at", f"{place}=stop") as older:
        assert older.await_report(at=...), older.errors()
        newer = build(spark, work.site, targets(work.site, list(work.names))).start(
            checkpoint=str(work.site.checkpoint), parallelism=2, trigger="available-now"
        )
        with newer:
            # Where the older one is inside a transaction, the newer one may have to wait for it.
            eventually(lambda: not newer.is_active or newer.status == "paused", within_s=15)
            older.go_on()
            assert newer.wait(120)
        ended = older.wait()
    assert ended is not None, older.errors()
    assert (ended["end"], ended["error"]) == ("superseded", CommitConflictError.__name__), ended
    work.check()
