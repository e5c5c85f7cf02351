"""Whole states by Arrow Flight, in parallel by key group.

    list_flights            the states of the newest epoch
    get_flight_info         takes {"operator", "state", "epoch"}; returns the schema, and tickets
                            for ranges of key groups
    do_get                  takes {"operator", "state", "epoch", "first_group", "last_group"}

Always true here:
- rows come from the committed epoch that the ticket names, read from the checkpoint, not from
  slots;
- a call without the token is refused; a malformed call gets an error with a code;
- the number of streams is limited: a stream above the limit waits a few seconds, then is refused;
- an epoch is held for a while after `get_flight_info`, and while it is read, so a client can read
  all ranges of a state;
- streams end with the server.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from cairn.errors import CairnError
from cairn.key_groups import overlap
from cairn.logs import logger
from cairn.web.answers import EpochNumber
from cairn.web.auth import is_control, is_token
from cairn.web.errors import describe
from cairn.web.site import Site

if TYPE_CHECKING:
    from cairn.snapshots.tables import StateSource, StateTable

STREAMS_MAX: Final = 8
ENDPOINTS_MAX: Final = 16
TICKET_BYTES_MAX: Final = 4096
STREAM_WAIT_S: Final = 5.0
WAITING_MAX: Final = 64
CLOSE_S: Final = 5.0
HOLD_S: Final = 30.0
"""An epoch is held for this long after it was named to a client, or read."""
HELD_MAX: Final = 16

T = TypeVar("T")
_Group = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class Descriptor(msgspec.Struct, forbid_unknown_fields=True):
    """Names a state."""

    operator: str
    state: str
    epoch: EpochNumber | None = None


class Ticket(msgspec.Struct, forbid_unknown_fields=True):
    """Names rows of a state, from the first to the last key group, both included."""

    operator: str
    state: str
    epoch: EpochNumber
    first_group: _Group
    last_group: _Group


class _Token(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses calls without the token."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def start_call(self, info: object, headers: dict[str, list[str]]) -> None:
        token = self._site.settings.token
        if token is None:
            return
        found = next((v for k, v in headers.items() if k.lower() == "authorization"), [""])
        scheme, _, given = str(found[0]).partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        reads, controls = is_token(given, token), is_control(self._site, given)
        if not (reads or controls):
            raise flight.FlightUnauthenticatedError(
                "the call has no token, or a wrong one\n"
                "  next: send the header authorization: Bearer TOKEN"
            )


class FlightSite(flight.FlightServerBase):  # type: ignore[misc]
    """Serves the states of a site, from its construction on."""

    def __init__(self, site: Site) -> None:
        host = site.settings.host_port()[0]
        shown = f"[{host}]" if ":" in host else host
        scheme = "grpc+tcp" if site.settings.tls is None else "grpc+tls"
        super().__init__(
            f"{scheme}://{shown}:{site.settings.flight_port}",
            tls_certificates=_certificates(site),
            middleware={"token": _Token(site)},
        )
        self._site = site
        self._streams = threading.BoundedSemaphore(STREAMS_MAX)
        self._waiting = threading.BoundedSemaphore(WAITING_MAX)
        self._holds = _Holds(site)

    def close(self) -> None:
        """End all calls. A reader that stalls does not delay this."""
        self._holds.close()
        # shutdown() waits for every call, and a reader may have stalled in the middle of one.
        ending = threading.Thread(target=self.shutdown, daemon=True, name="cairn-flight-end")
        ending.start()
        ending.join(CLOSE_S)
        if ending.is_alive():
            # The process could not exit while a call is running.
            _close_connections(self.port)
            ending.join(CLOSE_S)

    def list_flights(self, context: object, criteria: object) -> Iterator[Any]:
        with _flight_errors(), self._site.open_state() as source:
            return iter([self._info(source.epoch, table) for table in source.tables()])

    def get_flight_info(self, context: object, descriptor: Any) -> Any:
        with _flight_errors():
            asked = _read_descriptor(descriptor)
            with self._site.open_state(asked.epoch, hold=True) as source:
                info = self._info(source.epoch, source.table(asked.operator, asked.state))
                self._holds.keep(source.epoch)
                return info

    def get_schema(self, context: object, descriptor: Any) -> Any:
        with _flight_errors():
            asked = _read_descriptor(descriptor)
            with self._site.open_state(asked.epoch) as source:
                return flight.SchemaResult(source.table(asked.operator, asked.state).schema)

    def do_get(self, context: object, ticket: Any) -> Any:
        with _flight_errors():
            asked = _decode(ticket.ticket, Ticket)
            groups = range(asked.first_group, asked.last_group + 1)
            if not self._acquire_stream():
                raise flight.FlightUnavailableError(f"{STREAMS_MAX} streams are open")
            stream = _Stream(self._site, asked, groups, self._streams)
            self._holds.keep(asked.epoch, is_new=False)
            return flight.GeneratorStream(stream.schema, stream)

    def _acquire_stream(self) -> bool:
        """Wait for one of STREAMS_MAX places. Each waiting call holds a thread, so few may wait."""
        if self._streams.acquire(blocking=False):
            return True
        if not self._waiting.acquire(blocking=False):
            return False
        try:
            return self._streams.acquire(timeout=STREAM_WAIT_S)
        finally:
            self._waiting.release()

    # The base class answers these with a traceback.

    def do_put(self, context: object, descriptor: object, reader: object, writer: object) -> None:
        raise _read_only_error()

    def do_exchange(
        self, context: object, descriptor: object, reader: object, writer: object
    ) -> None:
        raise _read_only_error()

    def do_action(self, context: object, action: object) -> object:
        raise _read_only_error()

    def list_actions(self, context: object) -> Iterator[object]:
        return iter(())

    def _info(self, epoch: int, table: StateTable) -> Any:
        name = {"operator": table.operator, "state": table.state, "epoch": epoch}
        endpoints = [
            flight.FlightEndpoint(
                msgspec.json.encode(
                    {**name, "first_group": groups.start, "last_group": groups.stop - 1}
                ),
                [],
            )
            for groups in table.splits(ENDPOINTS_MAX)
        ]
        descriptor = flight.FlightDescriptor.for_command(msgspec.json.encode(name))
        return flight.FlightInfo(table.schema, descriptor, endpoints, table.rows, -1)


def _close_connections(port: int) -> None:
    """Close the connections of this process on a port: gRPC has no call for it."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A duplicate: the descriptor that was listed may be another file by now.
            own = os.dup(int(name))
            try:
                found = socket.socket(fileno=own)
            except OSError:
                os.close(own)
                continue
            with found:
                is_inet = found.family in (socket.AF_INET, socket.AF_INET6)
                if is_inet and found.getsockname()[1] == port:
                    found.shutdown(socket.SHUT_RDWR)


class _Holds:
    """Holds on the epochs that clients read, each kept for HOLD_S after its last use."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._held: dict[int, tuple[StateSource, threading.Timer]] = {}

    def keep(self, epoch: int, *, is_new: bool = True) -> None:
        """Hold an epoch from now on; with `is_new=False` only if it is held already."""
        if self._site.closing.is_set() or not (is_new or epoch in self._held):
            return
        source = self._site.open_state(epoch, hold=True)
        timer = threading.Timer(HOLD_S, lambda: self._forget(epoch, timer))
        timer.daemon = True
        timer.start()
        with self._lock:
            released = [self._held.pop(epoch, None)]
            self._held[epoch] = source, timer
            if len(self._held) > HELD_MAX:
                released.append(self._held.pop(next(iter(self._held))))
        for held in released:
            _release(held)

    def _forget(self, epoch: int, timer: threading.Timer) -> None:
        with self._lock:
            held = self._held.get(epoch)
            if held is None or held[1] is not timer:
                return
            del self._held[epoch]
        _release(held)

    def close(self) -> None:
        with self._lock:
            released = list(self._held.values())
            self._held.clear()
        for held in released:
            _release(held)


def _release(held: tuple[StateSource, threading.Timer] | None) -> None:
    if held is not None:
        held[1].cancel()
        held[0].close()


class _Stream:
    """The batches of a ticket. It releases its hold at the end, or when it is collected."""

    def __init__(
        self, site: Site, ticket: Ticket, groups: range, streams: threading.BoundedSemaphore
    ) -> None:
        self._streams: threading.BoundedSemaphore | None = streams
        self._source: StateSource | None = None
        self._closing = site.closing
        try:
            self._source = site.open_state(ticket.epoch, hold=True)
            table = self._source.table(ticket.operator, ticket.state)
            self.schema: pa.Schema = table.schema
            wanted = overlap(groups, table.groups)
            self._batches = table.batches(wanted) if wanted else iter(())
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            if self._closing.is_set():
                # A normal end would look like a complete answer.
                raise flight.FlightUnavailableError("the server has ended")
            with _flight_errors():
                return next(self._batches)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        streams, self._streams = self._streams, None
        source, self._source = self._source, None
        if source is not None:
            source.close()
        if streams is not None:
            streams.release()

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def _flight_errors() -> Iterator[None]:
    """Turn exceptions into Flight's own. Of any other exception gRPC sends the traceback."""
    try:
        yield
    except (flight.FlightError, pa.ArrowException, StopIteration):
        raise
    except CairnError as error:
        _, code, message, step = describe(error)
        raise make_error(code, f"{message}\n  next: {step}") from None
    except Exception as error:
        logger.error("a Flight call failed", exc_info=error)
        raise flight.FlightInternalError("the server failed; see its log") from None


def make_error(code: str, message: str) -> Exception:
    error: Exception = flight.FlightServerError(message, extra_info=code.encode())
    return error


def _read_only_error() -> Exception:
    return make_error("not-here", "this server only reads states")


def _read_descriptor(descriptor: Any) -> Descriptor:
    if descriptor.descriptor_type == flight.DescriptorType.CMD:
        return _decode(descriptor.command, Descriptor)
    parts = [part.decode(errors="replace") for part in descriptor.path or []]
    if len(parts) != 2:
        raise make_error(
            "bad-request", 'a descriptor is JSON {"operator", "state"}, or these two as a path'
        )
    return Descriptor(operator=parts[0], state=parts[1])


def _decode(data: bytes, shape: type[T]) -> T:
    if len(data) > TICKET_BYTES_MAX:
        raise make_error("bad-request", f"a ticket has at most {TICKET_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(data, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise make_error("bad-request", f"the ticket is invalid: {error}") from None


def _certificates(site: Site) -> list[tuple[bytes, bytes]] | None:
    if site.settings.tls is None:
        return None
    certificate, key = (Path(path).read_bytes() for path in site.settings.tls)
    return [(certificate, key)]
