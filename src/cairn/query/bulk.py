"""A whole state from a server, by Arrow Flight: its ranges of key groups beside each other.

Always true here:
- all rows are of one epoch: every ticket names the same one;
- rows come in the order of key groups.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from cairn.errors import QueryError, StaleEpochError, StateNotFoundError

AT_ONCE: Final = 4
_ERRORS: Final = {"not-found": StateNotFoundError, "gone": StaleEpochError}


def read_table(
    url: str,
    operator: str,
    state: str,
    epoch: int | None = None,
    *,
    headers: list[tuple[bytes, bytes]],
    ca: bytes | None = None,
) -> pa.Table:
    """All rows of a state. `headers` carry the token; `ca` is who signed the certificate."""
    named: dict[str, Any] = {"operator": operator, "state": state}
    if epoch is not None:
        named["epoch"] = epoch
    descriptor = flight.FlightDescriptor.for_command(msgspec.json.encode(named))
    options = flight.FlightCallOptions(headers=headers)
    try:
        with flight.FlightClient(url, tls_root_certs=ca) as asking:
            info = asking.get_flight_info(descriptor, options)

            def read(endpoint: Any) -> pa.Table:
                return asking.do_get(endpoint.ticket, options).read_all()

            with ThreadPoolExecutor(AT_ONCE) as threads:
                parts = list(threads.map(read, info.endpoints))
            return pa.concat_tables([info.schema.empty_table(), *parts])
    except (pa.ArrowException, flight.FlightError) as error:
        code = bytes(getattr(error, "extra_info", b"")).decode(errors="replace")
        kind = _ERRORS.get(code, QueryError)
        raise kind(_said(error), operator=operator, state=state) from None


def _said(error: BaseException) -> str:
    # gRPC adds what only its authors can read.
    return str(error).partition(". Detail: ")[0]
