"""A whole state from a server, by Arrow Flight: its ranges of key groups beside each other.

Always true here:
- all rows are of one epoch: every ticket names the same one;
- rows come in the order of key groups;
- a server that has no stream to spare is asked again; one that hangs is not waited for
  without end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from cairn.backoff import backoff_s, jitter
from cairn.errors import NoEpochError, QueryError, StaleEpochError, StateNotFoundError

AT_ONCE: Final = 2
"""Streams of one read: a server has eight, and more than two are hardly faster."""
WAIT_S: Final = 0.05
WAIT_MAX_S: Final = 1.0
STREAM_S: Final = 600.0
"""For one range of key groups: long for a large state, and yet an end where a server hangs."""
STARTS_MAX: Final = 3
_ERRORS: Final = {
    "not-found": StateNotFoundError,
    "gone": StaleEpochError,
    "no-epoch": NoEpochError,
}


def read_table(
    url: str,
    operator: str,
    state: str,
    epoch: int | None = None,
    *,
    headers: list[tuple[bytes, bytes]],
    ca: bytes | None = None,
    timeout: float = 30.0,
) -> pa.Table:
    """All rows of a state. `headers` carry the token; `ca` is who signed the certificate.

    `timeout` is for the first answer, and for a stream to be free.
    """
    named: dict[str, Any] = {"operator": operator, "state": state}
    if epoch is not None:
        named["epoch"] = epoch
    for left in reversed(range(STARTS_MAX)):
        try:
            return _read(url, named, headers, ca, timeout)
        except (pa.ArrowException, flight.FlightError) as error:
            code = bytes(getattr(error, "extra_info", b"")).decode(errors="replace")
            # The job may retire the newest epoch between two ranges: then there is a newer one.
            if code != "gone" or epoch is not None or left == 0:
                kind = _ERRORS.get(code, QueryError)
                raise kind(_describe(error), operator=operator, state=state) from None
    raise AssertionError("the last start returns or raises")


def _read(
    url: str,
    named: dict[str, Any],
    headers: list[tuple[bytes, bytes]],
    ca: bytes | None,
    timeout: float,
) -> pa.Table:
    descriptor = flight.FlightDescriptor.for_command(msgspec.json.encode(named))
    short = flight.FlightCallOptions(timeout=timeout, headers=headers)
    long = flight.FlightCallOptions(timeout=max(timeout, STREAM_S), headers=headers)
    with flight.FlightClient(url, tls_root_certs=ca) as asking:
        info = asking.get_flight_info(descriptor, short)

        def read(endpoint: Any) -> pa.Table:
            return _when_free(lambda: asking.do_get(endpoint.ticket, long).read_all(), timeout)

        with ThreadPoolExecutor(AT_ONCE) as threads:
            parts = list(threads.map(read, info.endpoints))
        return pa.concat_tables([info.schema.empty_table(), *parts])


def _when_free(read: Callable[[], pa.Table], timeout: float) -> pa.Table:
    """Call `read`, again while all streams of the server are taken."""
    until = time.monotonic() + timeout
    for failures in itertools.count(1):
        try:
            return read()
        except flight.FlightUnavailableError:
            if time.monotonic() > until:
                raise
        time.sleep(jitter(backoff_s(failures, first_s=WAIT_S, max_s=WAIT_MAX_S)))
    raise AssertionError("the loop has no end")


def _describe(error: BaseException) -> str:
    # gRPC adds details of its own implementation.
    return str(error).partition(". Detail: ")[0]
