"""What a query says, told by DuckDB's parser in a process of its own.

The parser tries again and again where brackets are open at an error: a hundred characters can
take it hours. It cannot be interrupted, and nothing else of Python runs meanwhile. So it works
in a child, which the system's clock ends.

Always true here:
- a text that takes longer than PARSE_S is a QueryError, and this process was never held up;
- the child ends with this process, also when this one is killed in the middle.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from typing import Any, Final, NamedTuple

from cairn.errors import QueryError

PARSE_S: Final = 2

# An alarm that nobody handles ends a process wherever it is.
_CHILD: Final = """
import json, signal, sys
import duckdb
connection = duckdb.connect(":memory:", config={"threads": "1"})
for line in sys.stdin:
    signal.alarm(int(sys.argv[1]))
    sql, found = json.loads(line), {}
    try:
        found["kinds"] = [each.type.name for each in connection.extract_statements(sql)]
        if found["kinds"] == ["SELECT"]:
            (found["tree"],) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchone()
    except Exception as error:
        found["error"] = str(error)
    signal.alarm(0)
    print(json.dumps(found), flush=True)
"""


class Parsed(NamedTuple):
    """What the parser found."""

    kinds: list[str]
    """Of the statements: SELECT, COPY, ..."""
    tree: dict[str, Any] | None
    """Of one SELECT, as json_serialize_sql has it."""
    error: str | None


class _Parser:
    """One child, kept for the next query."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def parse(self, sql: str) -> Parsed:
        with self._lock:
            answer = self._ask(json.dumps(sql).encode() + b"\n")
        if not answer:
            raise QueryError(
                f"the query cannot be read within {PARSE_S} s\n"
                "  next: is a bracket left open? If not, nest it less"
            )
        found = json.loads(answer)
        tree = json.loads(found["tree"]) if "tree" in found else None
        return Parsed(found.get("kinds", []), tree, found.get("error"))

    def _ask(self, line: bytes) -> bytes:
        child = self._child
        if child is None or child.poll() is not None:
            child = self._child = self._start()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(line)
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = b""
        except BaseException:
            # What it still says would be taken for the next answer.
            self._end()
            raise
        if not answer:
            self._end()
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(each for each in sys.path if each)
        return subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(PARSE_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            # Ctrl-C is for the query, not for who reads it.
            start_new_session=True,
        )

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def close(self) -> None:
        with self._lock:
            self._end()


_parser: Final = _Parser()
atexit.register(_parser.close)


def parse(sql: str) -> Parsed:
    """The statements of a text. QueryError when that would take too long."""
    return _parser.parse(sql)
