"""The databases with versions that state may be in. A further one is a line here."""

from __future__ import annotations

from cairn.backends.versioned.contract import Address, Kind, VersionStore
from cairn.errors import PlanError


def _postgres_address(url: str) -> dict[str, str]:
    # Not at the top: a process with state elsewhere does not load psycopg.
    from cairn.backends.postgres.link import address_of, parameters_of

    return address_of(parameters_of(url))


def _open_postgres(address: Address, place: str, label: str) -> VersionStore:
    from cairn.backends.postgres.versions import PostgresVersions

    return PostgresVersions(address, place, label)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (Kind("postgres", ("postgresql", "postgres"), _postgres_address, _open_postgres),)
}


def kind_of_url(url: str) -> Kind | None:
    """Return the kind of database that a URL is of; None for anything else."""
    scheme, mark, _ = url.partition("://")
    return next((kind for kind in KINDS.values() if mark and scheme in kind.schemes), None)


def open_place(kind: str, address: Address, place: str, label: str) -> VersionStore:
    """Open the rows of a job that an index in a checkpoint names."""
    if kind not in KINDS:
        raise PlanError(
            f"state is in a database of kind {kind!r}\n  expected: one of {', '.join(KINDS)}\n"
            "  next: use the version of cairn that wrote it"
        )
    return KINDS[kind].open(address, place, label)
