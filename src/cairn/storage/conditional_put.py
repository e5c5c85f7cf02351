"""Check that the store honours put-if-absent, which the log depends on.

When two drivers create the same number, the store must let one win. A store that ignores the
condition and accepts both would let two drivers lead a job at once.

Always true here:
- the check changes nothing in a checkpoint that this driver leads;
- a store that cannot be reached is not assumed to honour the condition.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cairn.backoff import backoff_s
from cairn.errors import CommitConflictError, CommitError, CommitUnknownError
from cairn.storage.log import SETTLE_ATTEMPTS_MAX, Log, record_path
from cairn.storage.manifest import Takeover, encode_record


def check_conditional_put(
    log: Log, takeover: Takeover, *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Put a driver's takeover a second time; the store must refuse it."""
    path, data = record_path(takeover.number), encode_record(takeover)
    url = log.store.url
    cause: Exception | None = None
    for attempt in range(SETTLE_ATTEMPTS_MAX):
        if attempt:
            sleep(backoff_s(attempt))
        try:
            has_put = log.store.put_if_absent(path, data)
        except (CommitUnknownError, OSError) as error:
            cause = error
            continue
        if not has_put:
            return
        if log.newest_number() != takeover.number:
            # This driver slept until its takeover was retired and removed. The store is fine.
            raise CommitConflictError(
                f"another driver has taken over since record {takeover.number}\n"
                f"  checkpoint: {url}\n"
                "  next: leave the job to it, or stop it and start again",
                number=takeover.number,
            )
        raise CommitError(
            f"the store does not keep put-if-absent: it has taken {path} twice\n"
            f"  store: {url}\n"
            "  expected: a conditional put of an object that exists is refused "
            "(S3: If-None-Match)\n"
            "  two drivers could lead the job at once, and publish its output twice\n"
            "  next: use a store with conditional puts, or turn them on in this one, then start "
            "the job again",
            url=url,
        )
    raise CommitUnknownError(
        f"could not find out whether the store keeps put-if-absent: {cause}\n"
        f"  store: {url}\n"
        "  next: see that the store can be reached, then start the job again",
        url=url,
    ) from cause
