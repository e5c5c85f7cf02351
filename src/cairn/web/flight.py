"""Whole states by Arrow Flight: columns as they are, in parallel by key group.

    list_flights            the states of the newest epoch
    get_flight_info         of {"operator", "state", "epoch"}: the schema, and tickets for
                            ranges of key groups
    do_get                  of {"operator", "state", "epoch", "first_group", "last_group"}

Always true here:
- rows are of one committed epoch, the one the ticket names, read from the checkpoint: slots
  are left alone;
- a call without the token learns nothing; a malformed one is an error of its own kind;
- streams at once are bounded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from cairn.errors import CairnError
from cairn.web.answers import EPOCH_MAX
from cairn.web.auth import is_control, is_token
from cairn.web.errors import of_cairn
from cairn.web.site import Site

_logger = logging.getLogger("cairn")

STREAMS_MAX: Final = 8
ENDPOINTS_MAX: Final = 16
TICKET_BYTES_MAX: Final = 4096
_PASSED_ON: Final = (flight.FlightError, StopIteration)

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

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[Any]:
        with _said(), self._site.open_state() as source:
            return iter([self._info(source.epoch, table) for table in source.tables()])

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        with _said():
            asked = _asked(descriptor)
            with self._site.open_state(asked.epoch) as source:
                return self._info(source.epoch, source.table(asked.operator, asked.state))

    def get_schema(self, context: Any, descriptor: Any) -> Any:
        with _said():
            asked = _asked(descriptor)
            with self._site.open_state(asked.epoch) as source:
                return flight.SchemaResult(source.table(asked.operator, asked.state).schema)

    def do_get(self, context: Any, ticket: Any) -> Any:
        with _said():
            asked = _decoded(ticket.ticket, Ticket)
            groups = range(asked.first_group, asked.last_group + 1)
            if not self._streams.acquire(blocking=False):
                raise flight.FlightUnavailableError(f"{STREAMS_MAX} streams are under way")
            stream = _Stream(self._site, asked, groups, self._streams)
            return flight.GeneratorStream(stream.schema, stream)

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


class _Stream:
    """The batches of a ticket. Lets go of what it holds at the end, or when it is forgotten."""

    def __init__(
        self, site: Site, asked: Ticket, groups: range, streams: threading.BoundedSemaphore
    ) -> None:
        self._streams: threading.BoundedSemaphore | None = streams
        self._source: Any = None
        try:
            self._source = site.open_state(asked.epoch, hold=True)
            table = self._source.table(asked.operator, asked.state)
            self.schema: pa.Schema = table.schema
            wanted = range(
                max(groups.start, table.groups.start), min(groups.stop, table.groups.stop)
            )
            self._batches = table.batches(wanted) if wanted else iter(())
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
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
            _logger.error("a Flight call failed", exc_info=error)
            raise flight.FlightInternalError("the server failed; see its log") from None


def refused(code: str, message: str) -> Any:
    """What a client did wrong. Of any exception but Flight's own, gRPC would send the traceback."""
    return flight.FlightServerError(message, extra_info=code.encode())


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
