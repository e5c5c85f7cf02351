"""Sinks at the start and at the end of a run: none stays open because of another."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from cairn import Job, sinks
from cairn.driver.engine import Engine
from cairn.driver.idle import Turn
from cairn.driver.lives import Lives
from cairn.driver.options import Options
from cairn.driver.restarts import Restarts, parse_restart
from cairn.driver.start import start
from cairn.errors import (
    CommitConflictError,
    CommitError,
    CorruptFileError,
    EpochError,
    PlanError,
    RestoreError,
)
from cairn.plan.graph import Graph
from cairn.run import Run
from cairn.sinks.base import SinkContext
from cairn.storage.failures import Failures, read_failures
from cairn.storage.log import Log, create_or_open_job
from cairn.storage.notes import ending_of
from cairn.storage.store import open_store
from tests.unit.plan.programs import process, source


class Watched(sinks.Noop):
    """Notes what is done to it; what its name says it cannot do fails."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name = name
        self.seen = seen

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self._note("open")

    def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        self.seen.append(f"{what} {self.name}")
        if self.name == f"cannot {what}":
            raise PlanError(self.name)


def graph_of(seen: list[str], *names: str) -> Graph:
    job = Job("j", max_parallelism=16)
    rows = process(source(job, "s"), "op")
    for index, name in enumerate(names):
        rows.sink_to(Watched(name, seen), uid=f"sink-{index}")
    conf = SimpleNamespace(set=lambda *_: None, get=lambda *_: "10")
    settings = SimpleNamespace(getAll=lambda: [("spark.master", "local[1]")])
    context = SimpleNamespace(getConf=lambda: settings, master="local[1]")
    session = SimpleNamespace(conf=conf, sparkContext=context)
    frame: Any = SimpleNamespace(sparkSession=session)
    node: Any = job._nodes["s"]
    job._nodes["s"] = replace(node, dataframe=frame)
    return job.graph()


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    # Without a session there is nothing to check against.
    monkeypatch.setattr("cairn.driver.start.check_options", lambda *_: 1)
    return Options(str(tmp_path))


def test_sinks_are_closed_when_a_later_one_cannot_be_opened(options: Options) -> None:
    seen: list[str] = []
    with pytest.raises(PlanError, match="cannot open"):
        start(graph_of(seen, "cannot close", "a", "cannot open", "never"), options)
    assert seen[:3] == ["open cannot close", "open a", "open cannot open"]
    assert sorted(seen[3:]) == ["close a", "close cannot close", "close cannot open"]


def test_a_function_that_cannot_be_pickled_is_refused_before_a_sink_is_opened(
    options: Options,
) -> None:
    seen: list[str] = []
    graph = graph_of(seen, "a")
    node: Any = graph.nodes["op"]
    node.function.lock = threading.Lock()
    with pytest.raises(PlanError, match=r"cannot be sent to the slots"):
        start(graph, options)
    assert seen == []


def test_a_start_while_a_target_is_away_says_so_and_leaves_the_job_that_runs_alone(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ConnectionError("no route to host")

    seen: list[str] = []
    graph = graph_of(seen, "a", "b")
    monkeypatch.setattr(graph.sinks[1].sink, "open", refuse)
    with pytest.raises(
        CommitError, match=r"sink 'sink-1' cannot be reached[\s\S]*no route[\s\S]*next: repair"
    ) as away:
        start(graph, options)
    assert away.value.sink == "sink-1"
    assert seen == ["open a", "close a", "close b"]
    assert Log(open_store(options.checkpoint)).newest_number() is None, "nothing is taken over"


def test_a_target_that_goes_away_before_leftovers_are_cleared_is_no_fault_of_the_job(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise TimeoutError

    graph = graph_of([], "a")
    monkeypatch.setattr(graph.sinks[0].sink, "recover", refuse)
    with pytest.raises(CommitError, match=r"cannot be reached[\s\S]*cause: TimeoutError"):
        start(graph, options)


def test_sinks_are_closed_when_the_job_does_not_become_the_leader(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PlanError("another leads")

    seen: list[str] = []
    monkeypatch.setattr("cairn.driver.start.Coordinator.take_over", refuse)
    with pytest.raises(PlanError, match="another leads"):
        start(graph_of(seen, "a", "b"), options)
    assert seen == ["open a", "open b", "close a", "close b"]


def test_a_start_that_succeeds_leaves_its_sinks_open(options: Options) -> None:
    seen: list[str] = []
    start(graph_of(seen, "a"), options)
    assert seen == ["open a"]


def test_checkpoint_that_cannot_be_written_is_refused_as_a_plan_error(
    options: Options, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    seen: list[str] = []
    with pytest.raises(PlanError, match=r"file/checkpoint cannot be used.*\n  next: "):
        start(graph_of(seen, "a"), replace(options, checkpoint=str(tmp_path / "file/checkpoint")))
    assert seen == []


def test_checkpoint_that_can_be_read_but_not_led_is_refused_too(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("cairn.driver.start.Coordinator.take_over", refuse)
    with pytest.raises(PlanError, match="cannot be used: read-only"):
        start(graph_of([], "a"), options)


def ended_run(error: Exception | None) -> Run:
    engine, run = Engine.__new__(Engine), Run.__new__(Run)
    engine.turn, engine._is_raised, engine._awaiting = Turn(), False, 0
    engine.turn.error = error
    engine.ended = threading.Event()
    engine.ended.set()
    engine.ended_as = "finished" if error is None else "failed"
    run._lives = Lives.__new__(Lives)
    run._lives._leadership, run._lives._restarts = None, Restarts(parse_restart("none"))
    run._lives.life, run._lives.waits_as = SimpleNamespace(engine=engine), None  # type: ignore
    return run


def test_leaving_the_block_raises_what_has_failed() -> None:
    with pytest.raises(EpochError, match="lost"), ended_run(EpochError("lost")):
        pass
    with ended_run(None):
        pass


def test_who_waits_again_and_again_counts_as_waiting_in_between() -> None:
    run = ended_run(None)
    run._engine._awaited_s = float("-inf")
    assert not run._engine._is_awaited
    assert run.wait(0)
    assert run._engine._is_awaited


def test_leaving_the_block_raises_nothing_a_second_time() -> None:
    with ended_run(EpochError("lost")) as run, pytest.raises(EpochError, match="lost"):
        run.wait()
    with pytest.raises(KeyError), ended_run(EpochError("lost")):
        raise KeyError


def test_what_is_raised_has_no_frames_of_the_threads_it_came_from() -> None:
    cause = ValueError("bad")
    try:
        raise EpochError("lost") from cause
    except EpochError as error:
        run = ended_run(error)
    with pytest.raises(EpochError) as raised:
        run.wait()
    assert [frame.name for frame in raised.traceback][1:] == ["wait"] * 3 + ["raise_error"]
    assert raised.value.__cause__ is cause


def test_every_sink_is_closed_when_slots_are_not_reached_and_one_cannot_close() -> None:
    def gone() -> None:
        seen.append("goodbye")
        raise ConnectionError("Spark is gone")

    seen: list[str] = []
    engine: Any = Engine.__new__(Engine)
    engine._graph = graph_of(seen, "cannot close", "b")
    engine._on_end = lambda: seen.append("closed to questions")
    engine.changes = SimpleNamespace(join=lambda _: None)
    engine.driver = SimpleNamespace(say_goodbye=gone)
    engine._spark_place = SimpleNamespace(close=lambda: None)
    engine._let_go()
    assert seen == ["closed to questions", "goodbye", "close cannot close", "close b"]


def assert_noted(options: Options, message: str) -> None:
    """The checkpoint shows why the driver that leads the job does not run it."""
    store = open_store(options.checkpoint)
    ending = ending_of(store, Log(store).newest_number() or 0)
    assert ending is not None and (ending.status, ending.message) == ("failed", message)
    assert [each.message for each in read_failures(store)] == [message]


def test_a_savepoint_that_cannot_be_loaded_after_the_takeover_is_noted(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CorruptFileError("a file of the savepoint is damaged")

    monkeypatch.setattr("cairn.driver.start.open_savepoint", lambda _: object())
    monkeypatch.setattr(
        "cairn.driver.start.open_job", lambda s, n, g, _: create_or_open_job(s, n, g)
    )
    monkeypatch.setattr("cairn.driver.start.load_savepoint", refuse)
    with pytest.raises(CorruptFileError):
        start(graph_of([], "a"), replace(options, savepoint="somewhere"))
    assert_noted(options, "a file of the savepoint is damaged")


def test_a_run_that_cannot_go_on_in_a_folder_of_its_own_ends_with_the_reason() -> None:
    def await_termination() -> None:
        raise RuntimeError("CONCURRENT_STREAM_LOG_UPDATE")

    def lay_out() -> bool:
        raise RestoreError("the list of files is gone")

    engine: Any = Engine.__new__(Engine)
    engine.turn, engine.ended = Turn(), threading.Event()
    engine.query = SimpleNamespace(awaitTermination=await_termination)
    engine._batches = SimpleNamespace(go_elsewhere=lay_out)
    engine.coordinator = SimpleNamespace(newest=None, term=1, note_published=lambda: None)
    engine._ticker = SimpleNamespace(stop=lambda: None)
    engine._options = Options("memory:")
    engine.store, engine.name = open_store("memory:"), "j"
    engine.failures = Failures(engine.store, "j")
    engine._finish_epoch = engine._notice_takeover = engine._let_go = lambda: None
    engine._awaiting = 1
    engine._supervise()
    with pytest.raises(RestoreError, match="the list of files is gone"):
        engine.wait(None)
    assert engine.ended_as == "failed"


def test_a_checkpoint_that_another_driver_has_taken_over_is_not_deleted_with_the_run(
    options: Options,
) -> None:
    engine: Any = Engine.__new__(Engine)
    started = start(graph_of([], "a"), options)
    engine.name, engine.failures = "j", started.failures
    engine.store, engine._spark_place = started.store, started.spark_place
    engine.coordinator = started.coordinator
    start(graph_of([], "a"), options)
    with pytest.raises(CommitConflictError, match="another driver runs job 'j'"):
        engine._delete()
    store = open_store(options.checkpoint)
    assert Log(store).newest_number() == 2
    engine.coordinator = start(graph_of([], "a"), options).coordinator
    engine._delete()
    assert not store.list()


def test_a_run_that_cannot_be_planned_leaves_no_sink_open_and_no_port(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PlanError("no table to pin")

    closed: list[bool] = []
    seen: list[str] = []
    monkeypatch.setattr("cairn.driver.spark_driver.SparkDriver", refuse)
    monkeypatch.setattr("cairn.run.Web.close", lambda _: closed.append(True))
    with pytest.raises(PlanError, match="no table to pin"):
        Run(graph_of(seen, "a"), options)
    assert seen == ["open a", "close a"] and closed == [True]
    assert_noted(options, "no table to pin")


def test_a_run_whose_query_does_not_start_leaves_no_sink_open_and_no_port(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        door = SimpleNamespace(key=b"")
        doors: ClassVar[dict[int, str]] = {}
        local_cores = 1

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def start_slots(self, *_: Any) -> None:
            pass

        def start_query(self, *_: Any) -> None:
            raise PlanError("no query")

        def say_goodbye(self) -> None:
            seen.append("goodbye")

    closed: list[bool] = []
    seen: list[str] = []
    monkeypatch.setattr("cairn.driver.spark_driver.SparkDriver", Driver)
    monkeypatch.setattr("cairn.driver.spark_driver.trigger_ms", lambda *_: 1000)
    monkeypatch.setattr("cairn.run.Web.close", lambda _: closed.append(True))
    with pytest.raises(PlanError, match="no query"):
        Run(graph_of(seen, "a"), options)
    assert seen == ["open a", "goodbye", "close a"] and any(closed)
    assert_noted(options, "no query")
