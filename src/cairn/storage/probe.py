"""A probe: an object by which a start finds out what a store promises, before it takes over.

    probe-<id>

The first of two conditional puts must win and the second must lose, or two drivers could lead a
job. Of several at once only one may win: a file system may look first and create later. Executors
read the probe back: those that do not find it have another place at that url.

Always true here:
- nothing of a checkpoint is read or changed; a probe that a killed start has left is harmless;
- a store that cannot be reached is not assumed to honour the condition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from cairn.backoff import backoff_s
from cairn.errors import CommitUnknownError, PlanError
from cairn.storage.paths import PROBE_PREFIX
from cairn.storage.store import Store

ATTEMPTS_MAX = 5


@contextmanager
def put_probe(
    store: Store, name: str, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """Yield the path of an object that holds `name`; it is removed at the end.

    PlanError if the store does not keep put-if-absent, CommitUnknownError if it is away.
    """
    path = f"{PROBE_PREFIX}{name}"
    try:
        # An outcome may be unknown, and then nobody has won: a later one must lose all the same.
        with ThreadPoolExecutor(store.racers) as pool:
            won = list(pool.map(lambda _: _put(store, path, name, sleep), range(store.racers)))
        if sum(won) > 1 or _put(store, path, name, sleep):
            raise PlanError(
                f"the store does not keep put-if-absent: it has taken {path} twice\n"
                f"  store: {store.url}\n"
                "  expected: a conditional put of an object that exists is refused "
                "(S3: If-None-Match)\n"
                "  two drivers could lead the job at once, and publish its output twice\n"
                "  next: use a store with conditional puts, or turn them on in this one",
                url=store.url,
            )
        yield path
    finally:
        with suppress(Exception):
            store.delete([path])


def _put(store: Store, path: str, name: str, sleep: Callable[[float], None]) -> bool:
    for attempt in range(1, ATTEMPTS_MAX):
        try:
            return store.put_if_absent(path, name.encode())
        except CommitUnknownError:
            sleep(backoff_s(attempt))
    return store.put_if_absent(path, name.encode())
