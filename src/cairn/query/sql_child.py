"""The process that runs one query for `sql_apart`: asked on stdin, answered on stdout.

Always true here:
- its limits are set before it looks at the query, and end it whatever the query does: nothing
  that DuckDB allocates or forgets to interrupt is left out of them;
- it writes an Arrow IPC stream, or one JSON object that says what is wrong: `Refusal`;
- it ends when its time is over, even if its parent is gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
import traceback
from typing import BinaryIO, Final

import duckdb  # noqa: F401  # Loaded before memory is limited by what there is now.
import msgspec
import pyarrow as pa

from cairn.errors import CairnError, QueryError
from cairn.query.sql import THREADS, run_sql
from cairn.snapshots.tables import open_state

NICE: Final = 10
VALUES_MAX: Final = 4_000_000
"""Values in an answer, those in lists counted: each becomes an object where it is shown."""
_SPARE_MB: Final = 512
"""Address space beyond the query's limit, for stacks of threads and for rows of state."""
_FIRST_TO_GO: Final = "1000"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    epoch: int
    sql: str
    rows_max: int
    timeout_s: float
    memory_mb: int
    bytes_max: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    error: str
    """The class of `cairn.errors`; empty: nobody foresaw it."""
    message: str


def main() -> None:
    out = _own_output()
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
    try:
        _limit(asked)
        answer = _answer(asked)
    except CairnError as error:
        answer = _refusal(type(error).__name__, error.message)
    except MemoryError:
        answer = _refusal(QueryError.__name__, too_large(asked.memory_mb))
    except Exception:
        answer = _refusal("", traceback.format_exc())
    out.write(answer)
    out.flush()
    # Threads that still work for a query that was given up are not waited for.
    os._exit(0)


def too_large(memory_mb: int) -> str:
    return (
        f"the query needs more than {memory_mb} MiB of memory, or is nested too deeply\n"
        "  next: narrow it down, or read the state as a DataFrame"
    )


def _own_output() -> BinaryIO:
    """Stdout for the answer alone: what libraries print goes nowhere."""
    out = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return out


def _limit(asked: Asked) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        # If memory runs short, the kernel is to end this process and not the job.
        score.write(_FIRST_TO_GO)
    pa.set_cpu_count(THREADS)
    pa.set_io_thread_count(THREADS)
    memory = (_address_mb() + asked.memory_mb + _SPARE_MB) << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    cpu_s = math.ceil(asked.timeout_s * THREADS) + 5
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    # Not caught: it ends the process wherever that is. The query's own clock comes first.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, asked.timeout_s + 1)


def _address_mb() -> int:
    """Return the address space in use already: libraries, and memory they have reserved."""
    try:
        with open("/proc/self/statm") as told:
            return int(told.read().split()[0]) * resource.getpagesize() >> 20
    except OSError:
        return 1024


def _answer(asked: Asked) -> bytes:
    # The caller holds the epoch.
    with open_state(asked.url, asked.epoch, hold_ms=0) as source:
        found = run_sql(
            source,
            asked.sql,
            rows_max=asked.rows_max,
            timeout_s=asked.timeout_s,
            memory_mb=asked.memory_mb,
            bytes_max=asked.bytes_max,
        )
    if sum(_values(chunk) for column in found.columns for chunk in column.chunks) > VALUES_MAX:
        raise QueryError(
            f"the rows of the query have more than {VALUES_MAX} values\n"
            "  next: select fewer rows, or shorter lists"
        )
    sink = pa.BufferOutputStream()
    try:
        with pa.ipc.new_stream(sink, found.schema) as writer:
            writer.write_table(found)
    except pa.ArrowInvalid as error:
        raise QueryError(f"the rows of the query cannot be sent\n  found: {error}") from None
    answer: bytes = sink.getvalue().to_pybytes()
    return answer


def _values(array: pa.Array) -> int:
    type, count = array.type, len(array)
    if pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type):
        count += _values(array.flatten())
    elif pa.types.is_map(type):
        for part in (array.keys, array.items):
            count += _values(part)
    elif pa.types.is_struct(type):
        count += sum(_values(part) for part in array.flatten())
    return count


def _refusal(error: str, message: str) -> bytes:
    return msgspec.json.encode(Refusal(error=error, message=message))


if __name__ == "__main__":
    main()
