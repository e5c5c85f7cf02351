"""Whole states by Arrow Flight: columns as they are, in parallel by key group.

    list_flights            the states of the newest epoch
    get_flight_info         of {"operator", "state", "epoch"}: the schema, and tickets for
                            ranges of key groups
    do_get                  of {"operator", "state", "epoch", "first_group", "last_group"}

Always true here:
- rows are of one committed epoch, the one the ticket names, read from the checkpoint: slots
  are left alone;
- a call without the token learns nothing; a malformed one is an error of its own kind;
- streams at once are bounded: one too many waits a little, and is refused then;
- an epoch that was told of is held for a while, and for as long as it is read: the ranges of a
  state are all there when their turn comes;
- streams end when the server does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from cairn.errors import CairnError
from cairn.key_groups import overlap
from cairn.logs import logger
from cairn.web.answers import EPOCH_MAX
from cairn.web.auth import is_control, is_token
from cairn.web.errors import of_cairn
from cairn.web.site import Site

STREAMS_MAX: Final = 8
ENDPOINTS_MAX: Final = 16
TICKET_BYTES_MAX: Final = 4096
STREAM_WAIT_S: Final = 5.0
WAITING_MAX: Final = 64
CLOSE_S: Final = 5.0
TOLD_S: Final = 30.0
"""How long an epoch is held after it was told of, or read."""
TOLD_MAX: Final = 16

_Epoch = Annotated[int, msgspec.Meta(ge=1, le=EPOCH_MAX)]
_Group = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """A descriptor: which state."""

    operator: str
    state: str
    epoch: _Epoch | None = None


class Ticket(msgspec.Struct, forbid_unknown_fields=True):
    """Which rows; both groups belong to them."""

    operator: str
    state: str
    epoch: _Epoch
    first_group: _Group
    last_group: _Group


class _Token(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses calls that do not bring the token."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:
        token = self._site.settings.token
        if token is None:
            return
        found = next((v for k, v in headers.items() if k.lower() == "authorization"), [""])
        scheme, _, given = str(found[0]).partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        reads, controls = is_token(given, token), is_control(self._site, given)
        if not (reads or controls):
            raise flight.FlightUnauthenticatedError("a token is needed: authorization: Bearer")


class FlightSite(flight.FlightServerBase):  # type: ignore[misc]
    """The states of a site. It answers from the moment it is made."""

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
        self._told = _Told(site)

    def close(self) -> None:
        """Let go of what is under way: a reader that stalls is not waited for."""
        self._told.close()
        # It waits for every call, and a reader may have gone to sleep in the middle of one.
        ending = threading.Thread(target=self.shutdown, daemon=True, name="cairn-flight-end")
        ending.start()
        ending.join(CLOSE_S)
        if ending.is_alive():
            # The process itself could not end while a call is under way.
            _cut(self.port)
            ending.join(CLOSE_S)

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[Any]:
        with _said(), self._site.open_state() as source:
            return iter([self._info(source.epoch, table) for table in source.tables()])

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        with _said():
            asked = _asked(descriptor)
            with self._site.open_state(asked.epoch, hold=True) as source:
                info = self._info(source.epoch, source.table(asked.operator, asked.state))
                self._told.keep(source.epoch)
                return info

    def get_schema(self, context: Any, descriptor: Any) -> Any:
        with _said():
            asked = _asked(descriptor)
            with self._site.open_state(asked.epoch) as source:
                return flight.SchemaResult(source.table(asked.operator, asked.state).schema)

    def do_get(self, context: Any, ticket: Any) -> Any:
        with _said():
            asked = _decoded(ticket.ticket, Ticket)
            groups = range(asked.first_group, asked.last_group + 1)
            if not self._takes_turn():
                raise flight.FlightUnavailableError(f"{STREAMS_MAX} streams are under way")
            stream = _Stream(self._site, asked, groups, self._streams)
            self._told.keep(asked.epoch, is_new=False)
            return flight.GeneratorStream(stream.schema, stream)

    def _takes_turn(self) -> bool:
        """A place among the streams. Who waits for one has a thread: few may."""
        if self._streams.acquire(blocking=False):
            return True
        if not self._waiting.acquire(blocking=False):
            return False
        try:
            return self._streams.acquire(timeout=STREAM_WAIT_S)
        finally:
            self._waiting.release()

    # The base class would answer these with a traceback.

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        raise _not_here()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        raise _not_here()

    def do_action(self, context: Any, action: Any) -> Any:
        raise _not_here()

    def list_actions(self, context: Any) -> Any:
        return iter(())

    def _info(self, epoch: int, table: Any) -> Any:
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


def _cut(port: int) -> None:
    """End the connections that this process has on a port: gRPC offers no way to."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A number of our own: the one that was listed may be another file by now.
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


class _Told:
    """The epochs that clients were told of, each held until nobody has asked for a while."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._held: dict[int, tuple[Any, threading.Timer]] = {}

    def keep(self, epoch: int, *, is_new: bool = True) -> None:
        """Hold it from now on; without `is_new` only when it is held already."""
        if self._site.closing.is_set() or not (is_new or epoch in self._held):
            return
        source = self._site.open_state(epoch, hold=True)
        timer = threading.Timer(TOLD_S, lambda: self._forget(epoch, timer))
        timer.daemon = True
        timer.start()
        with self._lock:
            let_go = [self._held.pop(epoch, None)]
            self._held[epoch] = source, timer
            if len(self._held) > TOLD_MAX:
                let_go.append(self._held.pop(next(iter(self._held))))
        for held in let_go:
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
            let_go = list(self._held.values())
            self._held.clear()
        for held in let_go:
            _release(held)


def _release(held: tuple[Any, threading.Timer] | None) -> None:
    if held is not None:
        held[1].cancel()
        held[0].close()


class _Stream:
    """The batches of a ticket. Lets go of what it holds at the end, or when it is forgotten."""

    def __init__(
        self, site: Site, asked: Ticket, groups: range, streams: threading.BoundedSemaphore
    ) -> None:
        self._streams: threading.BoundedSemaphore | None = streams
        self._source: Any = None
        self._closing = site.closing
        try:
            self._source = site.open_state(asked.epoch, hold=True)
            table = self._source.table(asked.operator, asked.state)
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
                # To end here would be a whole answer over half the rows.
                raise flight.FlightUnavailableError("the server has ended")
            with _said():
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


class _said:  # noqa: N801
    """Errors of ours become those of Flight, without a word about what nobody foresaw."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(
            error, flight.FlightError | pa.ArrowException | StopIteration
        ):
            return
        if isinstance(error, CairnError):
            _, code, message, step = of_cairn(error)
            raise refused(code, f"{message}\n  next: {step}") from None
        if isinstance(error, Exception):
            logger.error("a Flight call failed", exc_info=error)
            raise flight.FlightInternalError("the server failed; see its log") from None


def refused(code: str, message: str) -> Any:
    """What a client did wrong. Of any exception but Flight's own, gRPC would send the traceback."""
    return flight.FlightServerError(message, extra_info=code.encode())


def _not_here() -> Any:
    return refused("not-here", "states are read here, and nothing else is done")


def _asked(descriptor: Any) -> Asked:
    if descriptor.descriptor_type == flight.DescriptorType.CMD:
        found: Asked = _decoded(descriptor.command, Asked)
        return found
    parts = [part.decode(errors="replace") for part in descriptor.path or []]
    if len(parts) != 2:
        raise refused(
            "bad-request", 'a descriptor is JSON {"operator", "state"}, or these two as a path'
        )
    return Asked(operator=parts[0], state=parts[1])


def _decoded(data: bytes, shape: Any) -> Any:
    if len(data) > TICKET_BYTES_MAX:
        raise refused("bad-request", f"a ticket has at most {TICKET_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(data, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refused("bad-request", f"this is no ticket of ours: {error}") from None


def _certificates(site: Site) -> list[tuple[bytes, bytes]] | None:
    if site.settings.tls is None:
        return None
    certificate, key = (_read(path) for path in site.settings.tls)
    return [(certificate, key)]


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
