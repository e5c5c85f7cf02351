"""Epochs without state in a real log, and what the log must look like afterwards.

As a program it is a driver that leads a group: `python -m tests.led_log URL CHECKPOINT IDENTITY`.
It prints `leads TERM`, then `epoch NUMBER` for each, and at the end `lost` or `fenced`.
"""

from __future__ import annotations

import sys
import threading
import time

from cairn.driver.coordinator.leadership import Member, open_leadership
from cairn.errors import CommitConflictError
from cairn.storage.log import Log, new_nonce
from cairn.storage.manifest import Epoch, Record, SparkPosition, Takeover
from cairn.storage.store import Store, open_store


def append_epoch(log: Log, term: int, nonce: str | None = None) -> Epoch:
    """Publish an epoch after the newest one."""
    newest = log.newest_epoch()
    found = nonce or new_nonce()

    def make(number: int) -> Epoch:
        return Epoch(
            number=number, parent=newest.number if newest else None, term=term, nonce=found,
            wall_ms=1, now_ms=1, watermarks={}, operators={},
            spark=SparkPosition(folder="spark/0", batch_id=0, offsets=""),
        )  # fmt: skip

    return log.append(make)


def check_log(store: Store, hint: str = "") -> list[Record]:
    """Check that after each takeover only its term publishes, each epoch after the one before."""
    records = [*Log(store).records()]
    term, parent = 0, None
    assert [record.number for record in records] == [*range(1, len(records) + 1)], hint
    for record in records:
        if isinstance(record, Takeover):
            assert record.term > term, f"{hint}: term {record.term} follows {term}"
            term = record.term
        else:
            assert isinstance(record, Epoch)
            assert record.term == term, f"{hint}: epoch {record.number} is of an older term"
            assert record.parent == parent, f"{hint}: epoch {record.number} is out of order"
            parent = record.number
    return records


def main(url: str, checkpoint: str, identity: str) -> None:
    store = open_store(checkpoint)
    group = open_leadership(url, store=store)
    grant = group.campaign(Member(identity=identity, host="h", pid=1), threading.Event())
    assert grant is not None
    log = Log(store)
    term = log.take_over(
        host="h", pid=1, wall_ms=1, only_if_last=grant.only_if_last,
        is_held=lambda: not grant.lost.is_set(),
    ).term  # fmt: skip
    grant.confirm(term)
    print(f"leads {term}", flush=True)
    try:
        while not grant.lost.is_set():
            print(f"epoch {append_epoch(log, term).number}", flush=True)
            time.sleep(0.05)
        print("lost", flush=True)
    except CommitConflictError:
        print("fenced", flush=True)
    # A driver that does not look at its grant: the log alone must refuse it.
    try:
        append_epoch(log, term)
        print("published", flush=True)
    except CommitConflictError:
        print("refused", flush=True)
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
