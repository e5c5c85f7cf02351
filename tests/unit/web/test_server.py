"""Real sockets: HTTP, TLS, Flight, events and the client, over a checkpoint without Spark."""

from __future__ import annotations

import asyncio
import datetime as dt
import http.client
import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import cairn
from cairn.driver.serving import Serve
from cairn.errors import EpochError, PlanError, QueryError, StaleEpochError, StateNotFoundError
from cairn.web.events import Watch
from cairn.web.flight import STREAMS_MAX
from cairn.web.server import Listening, Served, serve
from cairn.web.site import Site
from tests.unit.cli import command_line
from tests.unit.snapshots.checkpoints import Checkpoint, value
from tests.unit.web.sites import CONTROL, TOKEN, FakeRun, site_of

UTC = dt.UTC


@pytest.fixture
def run(checkpoint: Checkpoint) -> FakeRun:
    return FakeRun(checkpoint)


@pytest.fixture
def served(checkpoint: Checkpoint, run: FakeRun) -> Iterator[Served]:
    with serve(site_of(checkpoint, run, token=TOKEN, control_token=CONTROL)) as served:
        yield served


@pytest.fixture
def asking(served: Served) -> Iterator[Any]:
    with cairn.client(served.url, TOKEN, control_token=CONTROL) as asking:
        yield asking


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    made = str(folder / "certificate.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-out", made[0], "-keyout", made[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


def test_client_gets_values_in_their_types(asking: Any, checkpoint: Checkpoint) -> None:
    at = dt.datetime(2024, 2, 29, 12, 30, 0, 5, tzinfo=UTC)
    checkpoint.commit({"at": {5: at}})
    assert asking.query("count", "n", 0) == (2**60, 4, True, "slot")
    assert asking.query("count", "n", 1) == (None, 4, False, "slot")
    assert asking.query("count", "at", 5).value == at
    assert asking.query("count", "raw", 1).value == b"\x00\xff"
    assert asking.query("count", "items", 1).value == ["a", "b"]
    assert asking.query("count", "last", 1).value["x"] == 0.5
    assert type(asking.query("count", "last", 1, epoch=2).value) is dict
    assert asking.query("count", "n", 1, epoch=2) == (10, 2, True, "checkpoint")


def test_client_asks_for_more_keys_than_one_request_takes_all_of_one_epoch(
    asking: Any, checkpoint: Checkpoint, run: FakeRun
) -> None:
    keys = 2500
    checkpoint.commit({"n": dict.fromkeys(range(keys), 7)})
    was = run.query_many

    def and_then_go_on(*args: Any) -> Any:
        found = was(*args)
        checkpoint.commit({"n": dict.fromkeys(range(keys), 8)})
        return found

    run.query_many = and_then_go_on  # type: ignore[method-assign]
    answers = asking.query_many("count", "n", [*range(keys), -1])
    assert answers.epoch == 4
    assert answers.values == dict.fromkeys(range(keys), 7)


def test_client_scans_all_rows_and_stops_at_a_limit(asking: Any) -> None:
    rows = list(asking.scan("count", "n"))
    assert {row["k"]: row["value"] for row in rows} == {
        **{k: k * 10 for k in range(2, 40)}, 0: 2**60, 100: 1000,
    }  # fmt: skip
    assert len(list(asking.scan("count", "n", limit=7))) == 7
    assert len(list(asking.scan("count", "n", epoch=2))) == 40


def test_client_reads_a_whole_state_by_flight(asking: Any, checkpoint: Checkpoint) -> None:
    table = asking.table("count", "n")
    assert table.schema.names == ["key_group", "k", "value"]
    assert table.schema.field("value").type == pa.int64()
    assert (
        dict(zip(table["k"].to_pylist(), table["value"].to_pylist(), strict=True))
        == (checkpoint.model["n"])
    )
    assert table["key_group"].to_pylist() == sorted(table["key_group"].to_pylist())
    assert asking.table("count", "n", epoch=2).num_rows == 40
    assert asking.table("count", "at").num_rows == 0
    with pytest.raises(StateNotFoundError, match=r"count\.n"):
        asking.table("count", "nothing")
    with pytest.raises(StaleEpochError):
        asking.table("count", "n", epoch=99)


def test_client_says_what_went_wrong_as_errors_of_ours(asking: Any) -> None:
    with pytest.raises(StateNotFoundError, match=r"(?s)count\.n.*next:"):
        asking.query("count", "nothing", 1)
    with pytest.raises(StaleEpochError):
        asking.query("count", "n", 1, epoch=99)
    with pytest.raises(QueryError, match="bigint"):
        asking.query("count", "n", "word")
    assert TOKEN not in repr(asking) and CONTROL not in repr(asking)


def test_client_without_the_token_or_with_a_wrong_one_learns_nothing(served: Served) -> None:
    for token in (None, "wrong-token-wrong"):
        with cairn.client(served.url, token, flight_url=served.flight_url) as asking:
            with pytest.raises(QueryError, match="token"):
                asking.states()
            with pytest.raises(QueryError, match="token"):
                asking.table("count", "n")
            with pytest.raises(QueryError, match="control token"):
                asking.stop()


def test_command_rebalances_a_served_run_and_prints_what_moves(
    served: Served, run: FakeRun
) -> None:
    told = command_line.call("rebalance", served.url, "--token", TOKEN, "--control-token", CONTROL)
    assert told.exit_code == 0, told.stderr
    assert told.stdout.startswith("4 key groups move: the busiest subtask goes from 2.00 to 1.10")
    assert run.asked == [("rebalance",)]


def test_client_controls_the_run(asking: Any, run: FakeRun, checkpoint: Checkpoint) -> None:
    saved = asking.savepoint("friday")
    assert saved["url"] == f"{checkpoint.store.url}-savepoints/friday"
    asking.rescale(3)
    assert asking.rebalance().groups_moved == 4
    assert run.asked == [("savepoint", saved["url"]), ("rescale", 3), ("rebalance",)]
    run.status = "stopped"
    with pytest.raises(EpochError, match="does not run in this process"):
        asking.stop()


def test_client_goes_on_when_its_connection_was_cut(asking: Any) -> None:
    assert asking.query("count", "n", 5).value == 50
    asking._link._servers[0]._mine.connection.http.sock.shutdown(socket.SHUT_RDWR)
    assert asking.query("count", "n", 6).value == 60


def test_client_waits_for_a_server_that_is_busy(checkpoint: Checkpoint) -> None:
    site = site_of(checkpoint, flight=False)
    with serve(site) as served, cairn.client(served.url) as asking:
        with site.heavy(), site.heavy(), site.heavy(), site.heavy():
            threading.Timer(0.2, lambda: site._heavy.release()).start()
            assert len(list(asking.scan("count", "n"))) == 40
            site._heavy.acquire()
        with pytest.raises(QueryError, match="does not serve whole states"):
            asking.table("count", "n")


def test_client_of_nobody_says_so() -> None:
    with pytest.raises(QueryError, match="does not answer"):
        cairn.client("http://127.0.0.1:9", timeout=0.5).states()
    with pytest.raises(QueryError, match="http://HOST:PORT"):
        cairn.client("127.0.0.1:8080")


def test_client_threads_have_connections_of_their_own(asking: Any) -> None:
    found: list[Any] = []

    def ask(key: int) -> None:
        found.extend(asking.query("count", "n", key).value == key * 10 for _ in range(20))

    threads = [threading.Thread(target=ask, args=(key,)) for key in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


def test_everything_is_there_by_tls_too(
    checkpoint: Checkpoint, certificate: tuple[str, str]
) -> None:
    site = site_of(checkpoint, address="localhost:0", token=TOKEN, tls=certificate)
    with serve(site) as served:
        assert served.url.startswith("https://") and str(served.flight_url).startswith("grpc+tls")
        with cairn.client(served.url, TOKEN, ca=certificate[0]) as asking:
            assert asking.query("count", "n", 5).value == 50
            assert asking.table("count", "n").num_rows == 40
        with cairn.client(served.url, TOKEN) as asking, pytest.raises(QueryError, match="certif"):
            asking.states()
        with pytest.raises(QueryError):
            cairn.client(served.url.replace("https", "http"), TOKEN).states()


def test_a_certificate_that_cannot_be_used_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("no certificate")
    with pytest.raises(PlanError, match="certificate"):
        Listening(Serve(tls=(str(tmp_path / "x.pem"), str(tmp_path / "x.pem"))))


def test_a_port_that_is_taken_is_told_before_anything_starts() -> None:
    taken = Listening(Serve())
    port = urlsplit(taken.url).port
    with pytest.raises(PlanError, match=f"cannot listen on 127.0.0.1:{port}"):
        Listening(Serve(address=f"127.0.0.1:{port}"))
    with pytest.raises(PlanError, match="flight_port"):
        Listening(Serve(flight_port=port))
    taken.close()
    assert is_free(port)


def test_port_is_free_after_the_server_has_ended(checkpoint: Checkpoint) -> None:
    with serve(site_of(checkpoint)) as served:
        port = urlsplit(served.url).port
        assert not is_free(port)
    assert is_free(port)


def is_free(port: int | None) -> bool:
    try:
        Listening(Serve(address=f"127.0.0.1:{port}")).close()
    except PlanError:
        return False
    return True


# Events


class Listener:
    """Reads server-sent events."""

    def __init__(self, url: str, **headers: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
        self._connection.request("GET", "/api/events", headers=headers)
        self.response = self._connection.getresponse()

    def next(self) -> tuple[str, dict[str, Any]] | None:
        name, data = "", None
        while line := self.response.readline().decode():
            if line.startswith("event: "):
                name = line[7:].strip()
            elif line.startswith("data: "):
                data = json.loads(line[6:])
            elif line == "\n" and data is not None:
                return name, data
        return None

    def epoch(self) -> int:
        while (event := self.next()) is not None:
            if event[0] == "epoch":
                return int(event[1]["epoch"])
        raise AssertionError("no more events")


@pytest.mark.parametrize("live", [True, False])
def test_listeners_hear_of_every_epoch_in_order(checkpoint: Checkpoint, live: bool) -> None:
    site = site_of(checkpoint, FakeRun(checkpoint) if live else None, flight=False)
    with serve(site) as served:
        listener = Listener(served.url)
        assert listener.response.headers["content-type"].startswith("text/event-stream")
        name, status = listener.next() or ("", {})
        assert (name, status["status"]) == ("status", "running" if live else "unknown")
        name, facts = listener.next() or ("", {})
        assert (name, facts["epoch"], facts["commit_ms"]) == ("epoch", 3, 1.5 if live else None)
        for _ in range(3):
            checkpoint.commit({"n": {1: 1}})
        assert [listener.epoch() for _ in range(3)] == [4, 5, 6]
        # Who comes back says what it heard last.
        assert [Listener(served.url, **{"Last-Event-ID": "4"}).epoch() for _ in range(1)] == [5]


def test_listeners_hear_how_the_run_ends_and_are_let_go(checkpoint: Checkpoint) -> None:
    run = FakeRun(checkpoint)
    served = serve(site_of(checkpoint, run, flight=False))
    listener = Listener(served.url)
    assert listener.epoch() == 3
    run.paused, run.status = "the sink is away", "paused"
    event = listener.next()
    assert event is not None and event[1]["paused"] == "the sink is away"
    run.paused, run.status = None, "finished"
    served.close()
    event = listener.next()
    assert event is not None and event[1]["status"] == "finished"
    while event is not None:
        event = listener.next()


def test_listeners_are_bounded(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.web.events.LISTENERS_MAX", 2)
    with serve(site_of(checkpoint, flight=False)) as served:
        kept = [Listener(served.url), Listener(served.url)]
        assert [listener.epoch() for listener in kept] == [3, 3]
        assert Listener(served.url).response.status == 429


def test_listeners_that_come_beside_each_other_miss_nothing(checkpoint: Checkpoint) -> None:
    def number(text: bytes) -> int | None:
        lines = [line for line in text.decode().splitlines() if line.startswith("id: ")]
        return int(lines[0][4:]) if lines else None

    async def heard(listener: Any, last: int) -> list[int]:
        found: list[int] = []
        while not found or found[-1] < last:
            told = number(await anext(listener))
            found += [] if told is None else [told]
        return found

    async def listen() -> None:
        watch = Watch(site_of(checkpoint, FakeRun(checkpoint)))
        slow = watch.listen(None)
        await anext(slow)
        # Its client has not taken the rest yet when epochs and another listener come.
        checkpoint.commit({"n": {5: 1}})
        other = watch.listen(None)
        await anext(other)
        checkpoint.commit({"n": {5: 2}})
        assert await heard(slow, 5) == [3, 4, 5]
        assert await heard(other, 5) in ([3, 4, 5], [4, 5])
        await slow.aclose()
        await other.aclose()
        # When nobody has listened for a while, one who comes hears of the newest only.
        while watch._task is not None:
            await asyncio.sleep(0.05)
        checkpoint.commit({"n": {5: 3}})
        checkpoint.commit({"n": {5: 4}})
        third = watch.listen(None)
        assert await heard(third, 7) == [7]
        watch._end()
        await third.aclose()

    asyncio.run(asyncio.wait_for(listen(), 30))


def test_a_listener_that_may_not_read_any_more_is_told_nothing_new(checkpoint: Checkpoint) -> None:
    async def listen() -> None:
        allowed = [True]
        watch = Watch(site_of(checkpoint, FakeRun(checkpoint)))
        listener = watch.listen(None, lambda: allowed[0])
        told = [await anext(listener), await anext(listener)]
        allowed[0] = False
        checkpoint.commit({"n": {5: 1}})
        told += [each async for each in listener]
        assert [b"event: status" in told[0], b"id: 3" in told[1], len(told)] == [True, True, 2]

    asyncio.run(asyncio.wait_for(listen(), 30))


def test_a_look_at_the_head_of_events_ends(served: Served) -> None:
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=20)
    connection.request("HEAD", "/api/events", headers={"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read() == b""
    connection.request("GET", "/login")
    assert connection.getresponse().status == 200


# Flight


@pytest.fixture
def flying(served: Served) -> Iterator[Any]:
    with flight.FlightClient(served.flight_url) as client:
        yield client


def _options(token: str = TOKEN) -> Any:
    return flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])


def test_flights_are_the_states_with_tickets_for_their_key_groups(flying: Any) -> None:
    infos = {
        json.loads(i.descriptor.command)["state"]: i for i in flying.list_flights(b"", _options())
    }
    assert list(infos) == ["n", "items", "last", "at", "raw"]
    info = infos["n"]
    rows = [
        flying.do_get(endpoint.ticket, _options()).read_all().num_rows
        for endpoint in info.endpoints
    ]
    assert sum(rows) == 40 and len(rows) > 1
    by_path = flying.get_flight_info(flight.FlightDescriptor.for_path("count", "n"), _options())
    assert by_path.schema == info.schema


@pytest.mark.parametrize("token", ["", "wrong-token-wrong", TOKEN[:-1]])
def test_flight_without_the_token_learns_nothing(flying: Any, token: str) -> None:
    ticket = flight.Ticket(b"{}")
    for call in (
        lambda: list(flying.list_flights(b"", _options(token))),
        lambda: flying.do_get(ticket, _options(token)),
        lambda: flying.get_flight_info(flight.FlightDescriptor.for_path("a"), _options(token)),
        lambda: list(flying.list_actions(_options(token))),
    ):
        with pytest.raises(flight.FlightUnauthenticatedError) as error:
            call()
        assert TOKEN not in str(error.value)


GOOD = {"operator": "count", "state": "n", "epoch": 3, "first_group": 0, "last_group": 7}


@pytest.mark.parametrize(
    "ticket",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\x00",
        b"[" * 4000,
        b'{"operator": "count"}',
        json.dumps(GOOD | {"x": 1}).encode(),
        json.dumps(GOOD | {"epoch": 0}).encode(),
        json.dumps(GOOD | {"epoch": "3"}).encode(),
        json.dumps(GOOD | {"first_group": -1}).encode(),
        json.dumps(GOOD | {"last_group": 2**63}).encode(),
        json.dumps(GOOD | {"epoch": 99}).encode(),
        json.dumps(GOOD | {"state": "../../etc/passwd"}).encode(),
        json.dumps(GOOD | {"state": "\x00"}).encode(),
        json.dumps(GOOD | {"state": "x" * 5000}).encode(),
    ],
)
def test_malformed_tickets_are_refused_and_the_server_goes_on(flying: Any, ticket: bytes) -> None:
    with pytest.raises(flight.FlightServerError) as error:
        flying.do_get(flight.Ticket(ticket), _options()).read_all()
    said = str(error.value)
    assert "Traceback" not in said and ".py" not in said, "gRPC sends tracebacks if it is let"
    descriptor = flight.FlightDescriptor.for_command(ticket)
    with pytest.raises(flight.FlightServerError):
        flying.get_flight_info(descriptor, _options())
    good = flight.Ticket(json.dumps(GOOD).encode())
    assert flying.do_get(good, _options()).read_all().num_rows == 40


def test_groups_beyond_those_there_are_have_no_rows(flying: Any) -> None:
    ticket = flight.Ticket(json.dumps(GOOD | {"first_group": 8, "last_group": 10}).encode())
    assert flying.do_get(ticket, _options()).read_all().num_rows == 0


def test_nothing_can_be_put_or_called_by_flight(flying: Any) -> None:
    at, schema = flight.FlightDescriptor.for_path("a"), pa.schema([("a", pa.int64())])
    assert list(flying.list_actions(_options())) == []
    for call in (
        lambda: list(flying.do_action(flight.Action("anything", b""), _options())),
        lambda: flying.do_put(at, schema, _options())[0].close(),
        lambda: flying.do_exchange(at, _options())[1].read_chunk(),
    ):
        with pytest.raises(flight.FlightServerError, match="only reads states") as error:
            call()
        assert "Traceback" not in str(error.value) and ".py" not in str(error.value)


def test_a_reader_that_stalls_does_not_keep_the_server_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cairn.web.flight.CLOSE_S", 0.2)
    checkpoint = Checkpoint({"s": value("string")})
    # More than what is sent ahead of a reader.
    checkpoint.commit({"s": {k: f"{k:07d}" * 2000 for k in range(4000)}})
    served = serve(Site(checkpoint.store.url, Serve(), store=checkpoint.store))
    with flight.FlightClient(served.flight_url) as client:
        ticket = flight.Ticket(json.dumps(GOOD | {"state": "s", "epoch": 2}).encode())
        reader = client.do_get(ticket)
        reader.read_chunk()
        closing = threading.Thread(target=served.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
        assert not any(each.name == "cairn-flight-end" for each in threading.enumerate())
        # It is not told that half the rows are all.
        with pytest.raises(flight.FlightError):
            reader.read_all()
    assert not checkpoint.store.list("holds/")


def test_more_streams_than_there_are_places_wait_for_their_turn(
    flying: Any, served: Served
) -> None:
    streams = served._flight._streams  # type: ignore[union-attr]
    while streams.acquire(blocking=False):
        pass
    threading.Timer(0.2, lambda: streams.release(STREAMS_MAX)).start()
    good = flight.Ticket(json.dumps(GOOD).encode())
    assert flying.do_get(good, _options()).read_all().num_rows == 40


def test_an_epoch_that_was_told_of_is_held_until_its_tickets_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = Checkpoint({"n": value("bigint")}, keep=1)
    checkpoint.commit({"n": dict.fromkeys(range(20), 1)})

    def goes_on() -> None:
        for _ in range(4):
            checkpoint.commit({"n": dict.fromkeys(range(20), 2)}, base=True)
            checkpoint.collector.after_epoch()

    with (
        serve(Site(checkpoint.store.url, Serve(), store=checkpoint.store)) as served,
        flight.FlightClient(served.flight_url) as client,
    ):
        info = client.get_flight_info(flight.FlightDescriptor.for_path("count", "n"))
        goes_on()
        tables = [client.do_get(each.ticket).read_all() for each in info.endpoints]
        assert {v for table in tables for v in table["value"].to_pylist()} == {1}
        assert checkpoint.store.list("holds/")
    assert not checkpoint.store.list("holds/")


def test_streams_at_once_are_bounded_and_given_back(
    flying: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = served._flight._streams  # type: ignore[union-attr]
    good = flight.Ticket(json.dumps(GOOD).encode())
    gone = flight.Ticket(json.dumps(GOOD | {"epoch": 99}).encode())
    taken = 0
    while streams.acquire(blocking=False):
        taken += 1
    monkeypatch.setattr("cairn.web.flight.STREAM_WAIT_S", 0.1)
    with pytest.raises(flight.FlightUnavailableError):
        flying.do_get(good, _options()).read_all()
    streams.release()
    for _ in range(5):
        assert flying.do_get(good, _options()).read_all().num_rows == 40
        # One that is left in the middle is given back too.
        with pytest.raises(flight.FlightServerError):
            flying.do_get(gone, _options()).read_all()
    for _ in range(taken - 1):
        streams.release()


def test_a_key_in_a_path_is_decoded_once() -> None:
    checkpoint = Checkpoint({"n": value("bigint")}, {"k": "string"})
    checkpoint.commit({"n": {"%2e/..": 7}})
    with serve(site_of(checkpoint, flight=False)) as served:
        connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=20)
        connection.request("GET", "/api/state/count/n/%252e%2F..")
        answer = json.loads(connection.getresponse().read())
    assert (answer["key"], answer["found"], answer["value"]) == (["%2e/.."], True, 7)
