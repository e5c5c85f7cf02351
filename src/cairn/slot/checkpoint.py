"""The job's checkpoint as a slot opens it: the driver's, or none.

A slot stores files that the driver then names in a manifest. On an executor without the mount,
or where the path is a disk of its own, they would lie where nobody else finds them.

Always true here:
- a slot makes no checkpoint, and writes to none before it has seen that it is the driver's;
- a checkpoint is the driver's if it has the job's id and the record that the driver wrote last: an
  older copy of the same job has not.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from cairn.errors import RestoreError
from cairn.protocol.messages import Token
from cairn.protocol.spec import JobSpec
from cairn.storage.log import read_job, record_path
from cairn.storage.manifest import decode_record
from cairn.storage.store import NotFoundError, Store, open_store

Open = Callable[[str], Store]


def open_existing(url: str) -> Store:
    """Open a store that is there. NotFoundError when it is not."""
    return open_store(url, create=False)


def open_checkpoint(spec: JobSpec, token: Token | None, open_url: Open = open_existing) -> Store:
    """Open the checkpoint of a job. RestoreError when it is not the one that the driver uses."""
    try:
        store = open_url(spec.checkpoint)
    except NotFoundError:
        raise _refusal(spec, "a folder that is there", "no folder") from None
    expected = f"job.json of job {spec.job_name!r} with the id {spec.job_id}"
    job = read_job(store)
    if job is None:
        raise _refusal(spec, expected, "no job.json")
    if job.job_id != spec.job_id:
        raise _refusal(spec, expected, f"job {job.name!r} with the id {job.job_id}")
    if token is not None:
        _check_newest(store, spec, token)
    return store


def _check_newest(store: Store, spec: JobSpec, token: Token) -> None:
    # An epoch has the number after that of the newest record, and since the takeover all
    # records are of one driver.
    number = token.epoch - 1
    expected = f"record {number} of the log, of term {token.term}"
    path = record_path(number)
    try:
        record = decode_record(store.get(path), f"{store.url}/{path}")
    except NotFoundError:
        raise _refusal(spec, expected, "no such record: an older copy?") from None
    if record.term != token.term:
        raise _refusal(spec, expected, f"one of term {record.term}: another copy?")


def _refusal(spec: JobSpec, expected: str, found: str) -> RestoreError:
    host = os.uname().nodename
    return RestoreError(
        f"a slot on {host} does not see the driver's checkpoint, and has stored nothing\n"
        f"  checkpoint: {spec.checkpoint}\n  expected: {expected}\n  found: {found}\n"
        "  next: pass a checkpoint that driver and executors share: a bucket, or a folder that is "
        "mounted at this path on all of them",
        url=spec.checkpoint,
        host=host,
    )
