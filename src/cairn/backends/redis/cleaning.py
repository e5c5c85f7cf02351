"""Remove rows from Redis, with their job or with their operator.

The checkpoint has a note of each server that the job has used, written before the first row. The
set `claims` in Redis lists the key groups, so nothing is searched for.

Always true here:
- the keys of a key group go only if no newer term has claimed it;
- a note has no password.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from cairn.backends.redis.database import call
from cairn.backends.redis.link import Link, address_of, describe
from cairn.backends.redis.scripts import REMOVE, call_script, claims_key, keys_of, member_of
from cairn.ids import content_id
from cairn.storage.log import Log, job_of
from cairn.storage.paths import DATABASES_FOLDER
from cairn.storage.store import NotFoundError, Store

_KEYS_AT_ONCE: Final = 256


class Note(msgspec.Struct, frozen=True, tag="redis", tag_field="kind"):
    """A server that has, or had, state of the job."""

    address: str


def write_note(store: Store, url: str) -> None:
    """Note in the checkpoint that the job uses this server."""
    note = msgspec.json.encode(Note(address_of(url)))
    store.put_if_absent(f"{DATABASES_FOLDER}/{content_id(note)}.json", note)


def addresses(store: Store) -> list[str]:
    """Return the addresses of the servers that the job has used."""
    found = []
    for there in store.list(DATABASES_FOLDER):
        try:
            found.append(msgspec.json.decode(store.get(there.path), type=Note).address)
        except (NotFoundError, msgspec.MsgspecError):
            continue
    return sorted(found)


def list_groups(link: Link, job_id: str) -> Iterator[tuple[str, int]]:
    """Yield operator and number of the key groups that the job has in Redis, by operator."""
    (members,) = call(link, [["SMEMBERS", claims_key(job_id)]])
    parts = [member.decode().partition(":") for member in members]
    yield from sorted((operator, int(group)) for group, _, operator in parts)


def drop_state(store: Store) -> list[str]:
    """Remove the state of a checkpoint's job; return what could not be reached."""
    job = job_of(store)
    if job is None:
        why = "the keys of the job cannot be found, because job.json cannot be read"
        return [f"{describe(address)}: {why}" for address in addresses(store)]
    unreached = []
    for address in addresses(store):
        link = Link(address, "cairn:rm")
        try:
            owned = list(list_groups(link, job.job_id))
            # The job is fenced, so no newer leader needs any of it.
            _remove(link, job.job_id, owned, term=1 << 52)
            call(link, [["UNLINK", claims_key(job.job_id)]])
        except Exception as error:
            unreached.append(f"{describe(address)}: {str(error).splitlines()[0]}")
        finally:
            link.close()
    return unreached


def _remove(link: Link, job_id: str, owned: Iterable[tuple[str, int]], term: int) -> int:
    removed = 0
    owned = list(owned)
    for start in range(0, len(owned), _KEYS_AT_ONCE):
        some = owned[start : start + _KEYS_AT_ONCE]
        keys = [claims_key(job_id)]
        for operator, group in some:
            keys += keys_of(job_id, operator, group)
        members = [member_of(operator, group) for operator, group in some]
        removed += call(link, [call_script(REMOVE, keys, [term, *members])], REMOVE)[0]
    return removed


class OperatorCollector:
    """Removes the rows of operators that the job no longer has. For one leader.

    An older epoch that has them is restored from the checkpoint.
    """

    def __init__(self, store: Store, url: str, job_id: str, term: int) -> None:
        self._store = store
        self._address = address_of(url)
        self._job_id = job_id
        self._term = term
        write_note(store, url)

    def collect(self) -> int:
        """Remove rows of operators that the newest epoch lacks; return the number of keys."""
        newest = Log(self._store).newest_epoch()
        if newest is None:
            return 0
        kept = newest.operators.keys()
        link = Link(self._address, "cairn:collector")
        try:
            gone = [each for each in list_groups(link, self._job_id) if each[0] not in kept]
            return _remove(link, self._job_id, gone, self._term)
        finally:
            link.close()
