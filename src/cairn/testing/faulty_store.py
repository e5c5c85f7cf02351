"""A store that fails as told, to see what the layers above make of it.

A plan is a list of `Fault`s, each for the n-th call of an operation, or made up from a
seed. Faults strike above the retries of the inner store: they are what is left after them.

Always true here:
- "before" has changed nothing; "after" has done the write and then fails;
- a put_if_absent that fails with "before" or "after" raises CommitUnknownError: the
  caller cannot tell which, and must not need to;
- with the same seed and the same calls, the same faults happen.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeVar

from cairn.errors import CommitUnknownError
from cairn.storage.store import Store, StoredObject

T = TypeVar("T")
FaultKind = Literal["before", "after", "torn", "enospc"]

WRITES = frozenset({"put", "put_file", "put_if_absent", "move", "delete"})


class Fault(NamedTuple):
    """Strikes the `call`-th call (from 1) of `operation`; `*` counts calls of any operation."""

    operation: str
    call: int
    kind: FaultKind


class FaultyStore(Store):
    """Wraps a store. `faults_seen` lists the faults that struck."""

    def __init__(
        self,
        inner: Store,
        plan: Iterable[Fault] = (),
        *,
        seed: int | None = None,
        fault_rate: float = 0.1,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.calls: Counter[str] = Counter()
        self.faults_seen: list[Fault] = []
        self.enabled = True
        self._plan = [*plan]
        self._torn_now = False
        self._random = None if seed is None else random.Random(seed)
        self._fault_rate = fault_rate

    def plan(self, *faults: Fault) -> None:
        """Add faults while the store is in use; `calls` says how far it has come."""
        self._plan += faults

    def get(self, path: str) -> bytes:
        return self._read("get", lambda: self.inner.get(path))

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        return self._read("get_range", lambda: self.inner.get_range(path, offset, length))

    def put(self, path: str, data: bytes) -> None:
        self._run("put", lambda: self.inner.put(path, data))

    def put_file(self, path: str, local_file: str) -> None:
        self._run("put_file", lambda: self.inner.put_file(path, local_file))

    def put_if_absent(self, path: str, data: bytes) -> bool:
        try:
            return self._run("put_if_absent", lambda: self.inner.put_if_absent(path, data))
        except OSError as error:
            # A full disk is found out before anything is visible; the rest is in doubt.
            if error.errno == errno.ENOSPC:
                raise
            raise CommitUnknownError(f"injected: outcome of {path!r} unknown", path=path) from error

    def move(self, src: str, dst: str) -> None:
        self._run("move", lambda: self.inner.move(src, dst))

    def delete(self, paths: Iterable[str]) -> None:
        self._run("delete", lambda: self.inner.delete(paths))

    def delete_folder(self, prefix: str) -> None:
        self._run("delete", lambda: self.inner.delete_folder(prefix))

    def list(self, prefix: str = "") -> list[StoredObject]:
        return self._run("list", lambda: self.inner.list(prefix))

    def list_unfinished(self, prefix: str = "") -> dict[str, str]:
        return self._run("list", lambda: self.inner.list_unfinished(prefix))

    def exists(self, path: str) -> bool:
        return self._run("exists", lambda: self.inner.exists(path))

    def local_path(self, path: str) -> str | None:
        return self.inner.local_path(path)

    def _read(self, operation: str, call: Callable[[], bytes]) -> bytes:
        data = self._run(operation, call)
        if self._torn_now:
            return data[: len(data) // 2]
        return data

    def _run(self, operation: str, call: Callable[[], T]) -> T:
        fault = self._next_fault(operation)
        self._torn_now = fault == "torn"
        if fault is not None:
            self.faults_seen.append(Fault(operation, self.calls[operation], fault))
        if fault == "before":
            raise OSError(errno.EIO, f"injected before {operation}")
        if fault == "enospc":
            raise OSError(errno.ENOSPC, f"injected at {operation}")
        result = call()
        if fault == "after":
            raise OSError(errno.EIO, f"injected after {operation}")
        return result

    def _next_fault(self, operation: str) -> FaultKind | None:
        self.calls[operation] += 1
        self.calls["*"] += 1
        if not self.enabled:
            return None
        for fault in self._plan:
            if fault.operation in (operation, "*") and fault.call == self.calls[fault.operation]:
                return fault.kind
        if self._random is not None and self._random.random() < self._fault_rate:
            return self._random.choice(_kinds(operation))
        return None


def _kinds(operation: str) -> list[FaultKind]:
    if operation in WRITES:
        return ["before", "after", "enospc"]
    if operation in ("get", "get_range"):
        return ["before", "torn"]
    return ["before"]


class UnconditionalStore(FaultyStore):
    """A store that ignores conditions: put_if_absent replaces what is there, and says it won."""

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self.put(path, data)
        return True
