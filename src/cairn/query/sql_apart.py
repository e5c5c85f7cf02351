"""SQL of people we do not know, in a process of its own: what it costs, it costs there.

DuckDB bounds what it knows of; a function that makes one huge value, or a text that takes an
hour to bind, is beyond that. So such a query runs in `sql_child`, which the kernel bounds.

Always true here:
- no query takes memory, or time beyond its limit, from the process that asks;
- a query that ends its process is a QueryError;
- the epoch is held by who asks, for as long as it takes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from typing import IO, Final

import msgspec
import pyarrow as pa

import cairn.errors
from cairn.errors import CairnError, QueryError
from cairn.snapshots.tables import StateSource

ANSWER_BYTES_MAX: Final = 16 << 20
_START_S_MAX: Final = 20.0
"""Until it runs: on a machine that has much to do. From then on it keeps the time itself."""
_FRAME_BYTES: Final = 1 << 20
_MODULE: Final = "cairn.query.sql_child"
_ENDED_LATE: Final = frozenset({-signal.SIGALRM, -signal.SIGXCPU})

# The variables that stores and Python need; a query sees no others.
_NAMES: Final = frozenset(
    {
        "HOME", "PATH", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE",
        "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "JAVA_HOME",
        "CLASSPATH", "ARROW_LIBHDFS_DIR", "KRB5CCNAME", "KRB5_CONFIG", "SPARK_HOME",
        # With these it joins the JVM of Hadoop's client that this process holds; its own limit of
        # memory would not let it start one.
        "CAIRN_RUNTIME_DIR", "CAIRN_HADOOP_SETTINGS",
    }
)  # fmt: skip
_PREFIXES: Final = ("AWS_", "AZURE_", "GOOGLE_", "HADOOP_", "OBJECT_STORE_")
_SMALL: Final = {
    # Memory that is put aside for later counts against the limit.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKIO_WORKER_THREADS": "2",
}


def run_sql_apart(
    source: StateSource, sql: str, *, rows_max: int, timeout_s: float, memory_mb: int = 512
) -> pa.Table:
    """As `run_sql`, in a process of its own."""
    asked = {
        "url": source.url,
        "epoch": source.epoch,
        "sql": sql,
        "rows_max": rows_max,
        "timeout_s": timeout_s,
        "memory_mb": memory_mb,
        "bytes_max": ANSWER_BYTES_MAX,
    }
    try:
        request = msgspec.json.encode(asked)
    except UnicodeEncodeError:
        raise QueryError("the query is not text\n  found: half a character in it") from None
    with tempfile.TemporaryFile() as said:
        answer, code, was_ended = _exchange(request, said, timeout_s + _START_S_MAX)
        said.seek(0)
        complaint = said.read(10_000).decode(errors="replace").strip()
    if answer.startswith(b"{"):
        raise _error(answer)
    if len(answer) > ANSWER_BYTES_MAX + _FRAME_BYTES:
        raise QueryError(
            f"the rows of the query take more than {ANSWER_BYTES_MAX >> 20} MiB\n"
            "  next: select fewer rows or columns"
        )
    if was_ended or code in _ENDED_LATE:
        raise QueryError(
            f"the query took longer than {timeout_s:g} s\n"
            "  next: narrow it down, or read the state as a DataFrame"
        )
    if complaint:
        # It says nothing once it has begun with the query.
        raise RuntimeError(f"SQL cannot be run: its process ended with {code}: {complaint}")
    if code or not answer:
        raise QueryError(
            f"the query needs more than {memory_mb} MiB of memory, or is nested too deeply\n"
            "  found: it ended the process it ran in\n"
            "  next: narrow it down, or read the state as a DataFrame"
        )
    with pa.ipc.open_stream(answer) as reader:
        return reader.read_all()


def child_environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.upper() in _NAMES or name.startswith(_PREFIXES)
    }
    # The path of this process, which a program may have changed.
    return {**kept, **_SMALL, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _exchange(request: bytes, said: IO[bytes], end_s: float) -> tuple[bytes, int, bool]:
    """Return the answer of the child, its exit code, and whether it was killed."""
    late = threading.Event()

    def end() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(end_s, end)
    timer.daemon = True
    with tempfile.TemporaryFile() as told:
        told.write(request)
        told.seek(0)
        # Without -P modules in the folder it runs in would come before all others.
        command = [sys.executable, "-P", "-m", _MODULE]
        with subprocess.Popen(
            command, stdin=told, stdout=subprocess.PIPE, stderr=said, env=child_environment()
        ) as child:
            assert child.stdout is not None
            timer.start()
            try:
                answer = child.stdout.read(ANSWER_BYTES_MAX + _FRAME_BYTES + 1)
                if len(answer) <= ANSWER_BYTES_MAX + _FRAME_BYTES:
                    child.wait()
            finally:
                # Its answer is read, or too large: end it.
                child.kill()
                timer.cancel()
        return answer, child.returncode, late.is_set()


def _error(answer: bytes) -> Exception:
    told = msgspec.json.decode(answer)
    kind = getattr(cairn.errors, told["error"], None) if told["error"] else None
    if isinstance(kind, type) and issubclass(kind, CairnError):
        return kind(told["message"])
    return RuntimeError(f"SQL failed in its process:\n{told['message']}")
