"""The client against a server that moves on, is busy, slow or gone."""

from __future__ import annotations

import gc
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cairn
import cairn.query.bulk as bulk
from cairn.errors import NoEpochError, QueryError, StaleEpochError
from cairn.storage.manifest import StateDecl
from cairn.storage.store import open_store
from cairn.web.server import serve
from tests.unit.snapshots.checkpoints import UID, Checkpoint, value
from tests.unit.web.sites import CONTROL, FakeRun, site_of

KEYS = 2500


class Averaging(FakeRun):
    """Answers with the results of an aggregating state; then commits, so many times."""

    commits = 0

    def query_many(self, operator: str, state: str, keys: Any) -> Any:
        newest = self._checkpoint.newest
        assert newest is not None
        values = {key: newest.number * 10.0 for key in keys if 0 <= key < KEYS}
        if self.commits:
            self.commits -= 1
            self._checkpoint.commit({"mean": {0: (2, 10)}})
        return SimpleNamespace(values=values, epoch=newest.number, source="slot")


@pytest.fixture
def averages(tmp_path: Path) -> Checkpoint:
    decl = StateDecl(kind="aggregating", type="struct<n: bigint, total: bigint>")
    made = Checkpoint({"mean": decl}, store=open_store(str(tmp_path / "averages")))
    made.commit({"mean": dict.fromkeys(range(KEYS), (2, 10))})
    return made


def test_before_the_first_epoch_a_client_says_so_and_later_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.query.link.WAIT_S", 0.0)
    made = Checkpoint({"n": value("bigint")}, store=open_store(str(tmp_path / "new")))
    with serve(site_of(made)) as served, cairn.client(served.url) as asking:
        for read in (
            lambda: asking.query(UID, "n", 1),
            lambda: list(asking.scan(UID, "n")),
            lambda: asking.table(UID, "n"),
        ):
            with pytest.raises(NoEpochError, match="no epoch is committed yet") as caught:
                read()
            assert "next: wait for the first one" in str(caught.value)
        assert isinstance(caught.value, StaleEpochError), "who caught that one still does"
        made.commit({"n": {1: 10}})
        assert asking.query(UID, "n", 1).value == 10


def test_many_results_are_all_results_of_one_epoch(averages: Checkpoint) -> None:
    run = Averaging(averages)
    with serve(site_of(averages, run, flight=False)) as served, cairn.client(served.url) as asking:
        for commits in (0, 2):
            run.commits = commits
            found = asking.query_many(UID, "mean", [*range(KEYS), -1])
            assert averages.newest is not None and found.epoch == averages.newest.number
            assert found.values == dict.fromkeys(range(KEYS), found.epoch * 10.0)
            assert found.source == "slot"


def test_results_of_a_job_that_is_always_faster_are_refused_not_mixed(
    averages: Checkpoint,
) -> None:
    run = Averaging(averages)
    with serve(site_of(averages, run, flight=False)) as served, cairn.client(served.url) as asking:
        run.commits = 100
        with pytest.raises(QueryError, match="before all are there"):
            asking.query_many(UID, "mean", range(KEYS))


@pytest.mark.parametrize("live", [True, False])
def test_of_an_epoch_by_its_number_many_are_all_accumulators(
    averages: Checkpoint, live: bool
) -> None:
    run = Averaging(averages) if live else None
    with serve(site_of(averages, run, flight=False)) as served, cairn.client(served.url) as asking:
        found = asking.query_many(UID, "mean", range(KEYS), epoch=2 if live else None)
        assert (found.epoch, found.source) == (2, "checkpoint")
        assert {tuple(each) for each in found.values.values()} == {(2, 10)}
        assert len(found.values) == KEYS


@pytest.mark.parametrize(
    "key",
    ["%064x", "%05d" + "名" * 40, "%05d" + "\U0001f5ff" * 30],
    ids=["hex", "three bytes a letter", "four bytes a letter"],
)
def test_keys_that_are_long_are_asked_for_in_more_requests(tmp_path: Path, key: str) -> None:
    checkpoint = Checkpoint(
        {"n": value("bigint")}, {"k": "string"}, store=open_store(str(tmp_path / "c"))
    )
    checkpoint.commit({"n": {key % at: at for at in range(1500)}})
    with (
        serve(site_of(checkpoint, flight=False)) as served,
        cairn.client(served.url) as asking,
    ):
        found = asking.query_many(UID, "n", [key % at for at in range(1500)])
        assert found.values == {key % at: at for at in range(1500)}
        assert asking.query_many(UID, "n", []).values == {}
        with pytest.raises(QueryError, match="at most 65536 bytes"):
            asking.query(UID, "n", "x" * (64 << 10))
        with pytest.raises(QueryError):
            asking.query(UID, "n", "\ud800")


def test_a_table_is_read_when_streams_are_free_again(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.web.flight.STREAM_WAIT_S", 0.01, raising=False)
    with serve(site_of(checkpoint)) as served, cairn.client(served.url) as asking:
        streams = served._flight._streams  # type: ignore[union-attr]
        taken = 0
        while streams.acquire(blocking=False):
            taken += 1
        threading.Timer(0.3, streams.release, (taken,)).start()
        assert asking.table(UID, "n").num_rows == 40


def test_a_table_that_gets_no_stream_in_time_says_why(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.web.flight.STREAM_WAIT_S", 0.01, raising=False)
    with serve(site_of(checkpoint)) as served, cairn.client(served.url, timeout=0.2) as asking:
        streams = served._flight._streams  # type: ignore[union-attr]
        taken = 0
        while streams.acquire(blocking=False):
            taken += 1
        with pytest.raises(QueryError, match="streams are open"):
            asking.table(UID, "n")
        streams.release(taken)


def test_a_table_whose_epoch_is_retired_meanwhile_is_begun_again(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    was = bulk._when_free
    left = 1

    def retired(*args: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise bulk.flight.FlightServerError("epoch 3 is retired", extra_info=b"gone")
        return was(*args)

    monkeypatch.setattr(bulk, "_when_free", retired)
    with serve(site_of(checkpoint)) as served, cairn.client(served.url) as asking:
        assert asking.table(UID, "n").num_rows == 40
        for epoch in (3, None):
            left = 10
            with pytest.raises(StaleEpochError, match="retired"):
                asking.table(UID, "n", epoch=epoch)


def test_a_whole_state_of_a_server_that_hangs_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:
        url = f"grpc+tcp://127.0.0.1:{hung.getsockname()[1]}"
        asking = cairn.client("http://127.0.0.1:9", flight_url=url, timeout=0.3)
        with pytest.raises(QueryError):
            asking.table(UID, "n")


def test_a_savepoint_is_waited_for_longer_than_any_answer(checkpoint: Checkpoint) -> None:
    class Slow(FakeRun):
        def savepoint(self, path: str) -> Any:
            time.sleep(0.5)
            return super().savepoint(path)

    site = site_of(checkpoint, Slow(checkpoint), control_token=CONTROL, flight=False)
    with (
        serve(site) as served,
        cairn.client(served.url, control_token=CONTROL, timeout=0.2) as asking,
    ):
        assert asking.savepoint("slow")["epoch"] == 3


def test_a_change_whose_answer_is_lost_is_told_as_unknown_and_sent_once() -> None:
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            connection, _ = listening.accept()
            with connection:
                taken.append(connection.recv(1 << 16))

        thread = threading.Thread(target=hang_up)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(QueryError, match=r"not confirmed the savepoint.*\n.*points"):
            cairn.client(url, control_token=CONTROL).savepoint("x")
        thread.join()
        listening.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listening.accept()
    assert len(taken) == 1 and b"POST /api/control/savepoint" in taken[0]


def test_a_change_that_nobody_hears_was_not_made() -> None:
    with pytest.raises(QueryError, match="does not answer"):
        cairn.client("http://127.0.0.1:9", control_token=CONTROL).stop()


def test_connections_of_threads_that_are_gone_are_closed(checkpoint: Checkpoint) -> None:
    with serve(site_of(checkpoint, flight=False)) as served, cairn.client(served.url) as asking:
        sockets = []

        def ask() -> None:
            asking.query(UID, "n", 2)
            sockets.append(asking._link._servers[0]._mine.connection.http.sock)

        for _ in range(5):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        gc.collect()
        assert len(asking._link._servers[0]._connections) == 0
        assert [each.fileno() for each in sockets] == [-1] * 5
        asking.query(UID, "n", 2)
        assert len(asking._link._servers[0]._connections) == 1


@pytest.mark.parametrize("url", ["http://host:99999", "http://host:x", "http://[::1", "host:80"])
def test_a_url_that_cannot_be_is_told(url: str) -> None:
    with pytest.raises(QueryError, match="http://HOST:PORT"):
        cairn.client(url)
