"""A start leads only from an epoch that its program was checked against, in its own checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.options import Options
from cairn.driver.start import check_prepared, make_coordinator, prepare, start
from cairn.errors import CommitConflictError, PlanError, RestoreError, StateSchemaError
from cairn.storage.log import Log, new_nonce
from cairn.storage.manifest import Epoch, EpochOperator, SparkPosition, StateDecl
from cairn.storage.removal import delete_checkpoint
from cairn.storage.store import Store, open_store
from tests.unit.driver.coordinator.manifests import entry, epoch
from tests.unit.driver.test_start import graph_of

OFFSETS = 'v1\n{}\n{"n":3}'
SAME = entry(uid="op")


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    monkeypatch.setattr("cairn.driver.start.check_options", lambda *_: 1)
    return Options(str(tmp_path))


def commit(store: Store, operator: EpochOperator, source: str = "s") -> Epoch:
    """An epoch that another driver commits behind whatever is there."""
    position = SparkPosition(folder="spark/1", batch_id=0, offsets=OFFSETS, sources=[source])
    return Log(store).append(
        lambda number: msgspec.structs.replace(
            epoch(number, operator), nonce=new_nonce(), spark=position
        )
    )


def interrupt_takeover(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], Any]) -> None:
    """Between what a start checks and its takeover, something happens once."""
    take_over = Coordinator.take_over

    def late(self: Coordinator) -> Epoch | None:
        monkeypatch.setattr(Coordinator, "take_over", take_over)
        meanwhile()
        return take_over(self)

    monkeypatch.setattr(Coordinator, "take_over", late)


OTHER = entry(uid="another", states={"n": StateDecl(kind="value", type="bigint")})


@pytest.mark.parametrize("has_epoch", [True, False])
@pytest.mark.parametrize(
    ("operator", "source", "error", "text"),
    [
        (entry(uid="op", keys={"k": "string"}), "s", StateSchemaError, "keyed by"),
        (OTHER, "s", PlanError, "holds state of operator 'another'"),
        (SAME, "another", PlanError, "does not read another"),
    ],
)
def test_epochs_of_another_program_committed_before_the_takeover_are_refused(
    operator: EpochOperator,
    source: str,
    error: type[Exception],
    text: str,
    has_epoch: bool,
    options: Options,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store(options.checkpoint)
    start(graph_of([], "out"), options)
    if has_epoch:
        commit(store, SAME)
    interrupt_takeover(monkeypatch, lambda: commit(store, operator, source))
    seen: list[str] = []
    with pytest.raises(error, match=text):
        start(graph_of(seen, "out"), options)
    assert seen == ["open out", "close out"]
    newest = Log(store).newest_epoch()
    assert newest is not None and newest.operators.keys() == {operator.uid}, "its program starts"
    assert store.list("spark") == [], "nothing is laid out"
    with pytest.raises(error, match=text):
        start(graph_of([], "out"), options)


def test_an_epoch_of_the_same_program_committed_before_the_takeover_is_gone_on_from(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(options.checkpoint)
    start(graph_of([], "out"), options)
    interrupt_takeover(monkeypatch, lambda: commit(store, SAME))
    started = start(graph_of([], "out"), options)
    assert started.coordinator.newest is not None
    assert started.coordinator.newest.number == 2


def test_a_checkpoint_removed_before_the_takeover_is_not_led(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(options.checkpoint)
    start(graph_of([], "out"), options)
    interrupt_takeover(monkeypatch, lambda: delete_checkpoint(store))
    with pytest.raises(RestoreError, match="was removed while the job started"):
        start(graph_of([], "out"), options)
    assert start(graph_of([], "out"), options).coordinator.newest is None


def test_epochs_without_the_file_that_names_their_job_are_not_led(options: Options) -> None:
    store = open_store(options.checkpoint)
    start(graph_of([], "out"), options)
    commit(store, SAME)
    store.delete(["job.json"])
    with pytest.raises(RestoreError, match=r"has epochs, but not the file[\s\S]*job\.json"):
        start(graph_of([], "out"), options)


class Lead:
    """A grant that the test holds and loses."""

    def __init__(self, only_if_last: int | None = None) -> None:
        self.lost = threading.Event()
        self.only_if_last = only_if_last
        self.confirmed: list[int] = []

    def confirm(self, term: int) -> None:
        self.confirmed.append(term)

    def resign(self, to: str | None = None) -> None:
        self.lost.set()


def test_a_start_with_a_grant_confirms_its_term(options: Options) -> None:
    lead = Lead(only_if_last=0)
    started = start(graph_of([], "a"), options, grant=lead)
    assert lead.confirmed == [started.coordinator.term]


def test_a_start_whose_grant_is_lost_fences_nobody(options: Options) -> None:
    lead, seen = Lead(), list[str]()
    lead.resign()
    with pytest.raises(CommitConflictError, match="lease was lost"):
        start(graph_of(seen, "a"), options, grant=lead)
    assert Log(open_store(options.checkpoint)).newest_number() is None
    assert lead.confirmed == []
    assert seen == ["open a", "close a"]


def test_a_start_whose_log_has_gone_on_since_the_grant_is_refused(options: Options) -> None:
    first = start(graph_of([], "a"), options)
    lead = Lead(only_if_last=0)
    with pytest.raises(CommitConflictError, match="must follow record 0"):
        start(graph_of([], "a"), options, grant=lead)
    assert lead.confirmed == []
    assert first.coordinator.log.is_leading()


def test_a_prepared_program_is_checked_without_a_record_and_started_with_its_run_id(
    options: Options,
) -> None:
    graph, store = graph_of([], "a"), open_store(options.checkpoint)
    prepared = prepare(graph, options)
    coordinator = make_coordinator(graph, options, prepared)
    assert Log(store).newest_number() is None
    commit(store, OTHER)
    newest = Log(store).newest_epoch()
    assert newest is not None
    with pytest.raises(PlanError, match="holds state of operator 'another'"):
        check_prepared(newest, graph, options, coordinator)
    allowed = replace(options, allow_dropped_state=True)
    check_prepared(newest, graph, allowed, coordinator)
    assert Log(store).newest_number() == newest.number
    assert start(graph, allowed, prepared=prepared).coordinator.run_id == prepared.run_id
